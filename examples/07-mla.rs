//! Multi-head latent attention, absorbed: decoding two tokens at once over a paged cache of latents and rotary parts.
//!
//! ```sh
//! cargo run --example 07-mla
//! ```

use ascend_attention::attention::{BlockTable, Inputs};
use ascend_attention::{CausalOrigin, FusedInferAttention, Layout, Runtime, bf16};

const HEADS: usize = 32;
const LATENT: usize = 512; // what key and value are projected from
const ROPE: usize = 64;
const BLOCKS: usize = 4;
const BLOCK_SIZE: usize = 128;
const ROWS: usize = 2; // query rows a sequence: one decoded token, one predicted

fn main() -> ascend_attention::Result<()> {
    let runtime = Runtime::auto()?;
    let device = runtime.device(0)?;
    let stream = device.stream()?;
    let halves = |n: usize, f: fn(usize) -> f32| -> Vec<bf16> {
        (0..n).map(|at| bf16::from_f32(f(at))).collect()
    };

    // The latent cache is key and value at once. Rotary parts are a cache of their own, with the same blocks.
    let latents = halves(BLOCKS * BLOCK_SIZE * LATENT, |at| {
        (at / LATENT % 128) as f32
    });
    let latents = stream.upload(&latents, [BLOCKS, BLOCK_SIZE, LATENT])?;
    let key_rope = halves(BLOCKS * BLOCK_SIZE * ROPE, |_| 0.0);
    let key_rope = stream.upload(&key_rope, [BLOCKS, BLOCK_SIZE, ROPE])?;
    let query = halves(ROWS * HEADS * LATENT, |_| 0.0);
    let query = stream.upload(&query, [1, ROWS, HEADS, LATENT])?;
    let query_rope = halves(ROWS * HEADS * ROPE, |at| (at % 5) as f32);
    let query_rope = stream.upload(&query_rope, [1, ROWS, HEADS, ROPE])?;

    let table = BlockTable::from_rows(&stream, &[[2]], BLOCK_SIZE)?;
    let inputs = Inputs::new(&query, &latents, &latents)
        .rope(&query_rope, &key_rope)
        .paged(&table);
    let plan = FusedInferAttention::new(Layout::Bsnd)
        .heads(HEADS as i64)
        .kv_heads(1)
        .scale(1.0 / 192f64.sqrt())
        .mask(device.masks().causal(CausalOrigin::RightDown)?)
        .actual_seq_lengths_kv([20])
        .plan_with(&inputs)?;
    println!("{plan:?}");
    let output = plan.launch_with::<bf16>(&stream, &inputs)?;
    let output = output.attention.download(&stream)?;

    // All scores are 0: a row's output is the mean of the latents that it sees, 0 to 18 and 0 to 19.
    let rows = [output[0].to_f32(), output[HEADS * LATENT].to_f32()];
    println!("{rows:?}");
    assert_eq!(rows, [9.0, 9.5]);
    Ok(())
}
