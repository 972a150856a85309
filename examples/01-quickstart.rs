//! One attention call from host memory to a checked answer: `cargo run --example 01-quickstart`.
//!
//! Runs on an NPU if there is one, otherwise on the CPU emulation; `ASCEND_PLATFORM=npu|emulated` chooses.

use ascend_attention::prelude::*;

/// Four query heads share a key head; 48 keys, the last 16 of which belong to the query rows.
const HEADS: usize = 8;
const KV_HEADS: usize = 2;
const ROWS: usize = 16;
const KEYS: usize = 48;
const DIM: usize = 64;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let runtime = Runtime::auto()?;
    let device = runtime.device(0)?;
    let stream = device.stream()?;
    println!("{} on {}", device.soc_name(), runtime.platform());

    let (q, k, v) = (random(1, HEADS * ROWS), random(2, KV_HEADS * KEYS), random(3, KV_HEADS * KEYS));
    let query = stream.upload(&q, [1, HEADS, ROWS, DIM])?;
    let key = stream.upload(&k, [1, KV_HEADS, KEYS, DIM])?;
    let value = stream.upload(&v, [1, KV_HEADS, KEYS, DIM])?;

    let scale = 1.0 / (DIM as f64).sqrt();
    let plan = FusedInferAttention::new(Layout::Bnsd)
        .heads(HEADS)
        .kv_heads(KV_HEADS)
        .scale(scale)
        .mask(device.masks().causal(CausalOrigin::RightDown)?)
        .plan((&query, &key, &value))?; // every rule is checked here; nothing has run yet
    let output = plan.launch(&stream, (&query, &key, &value))?; // once a layer
    let got = output.attention.download(&stream)?; // waits for this stream alone

    let want = naive(&q, &k, &v, scale);
    let worst = got.iter().zip(&want).map(|(g, w)| (g.to_f64() - w).abs()).fold(0.0, f64::max);
    println!("{} values by {}, worst error {worst:.1e}", got.len(), plan.operator());
    if got.len() != want.len() || !got.iter().all(|x| x.is_finite()) || worst > 2e-3 {
        return Err("the answer is wrong".into());
    }
    println!("as expected");
    Ok(())
}

/// `rows` rows of numbers between -1 and 1.
fn random(seed: u64, rows: usize) -> Vec<f16> {
    let mut state = seed;
    let mut next = || {
        state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        f16::from_f32((state >> 40) as f32 / (1u64 << 23) as f32 - 1.0)
    };
    (0..rows * DIM).map(|_| next()).collect()
}

/// Attention by its definition, in double precision.
fn naive(q: &[f16], k: &[f16], v: &[f16], scale: f64) -> Vec<f64> {
    let mut out = Vec::new();
    for head in 0..HEADS {
        let kv = head / (HEADS / KV_HEADS) * KEYS;
        for row in 0..ROWS {
            let visible = row + KEYS - ROWS + 1;
            let at = |tensor: &[f16], row: usize, d: usize| tensor[row * DIM + d].to_f64();
            let dot = |j: usize| (0..DIM).map(|d| at(q, head * ROWS + row, d) * at(k, kv + j, d)).sum::<f64>();
            let weights: Vec<f64> = (0..visible).map(|j| (scale * dot(j)).exp()).collect();
            let total: f64 = weights.iter().sum();
            out.extend(
                (0..DIM).map(|d| weights.iter().enumerate().map(|(j, w)| w * at(v, kv + j, d)).sum::<f64>() / total),
            );
        }
    }
    out
}
