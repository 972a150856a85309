//! Attention of training over two ranks: each has half of the rows, keys and values go round, and what a rank
//! computes over each half of the keys is merged into the attention over all of them.
//!
//! ```sh
//! cargo run --release --example 12-ring
//! ```

use ascend_attention::flash::{CutBatch, FlashAttention, FlashMask, InputLayout};
use ascend_attention::prelude::*;
use ascend_attention::ring::RingUpdate;

const HEADS: usize = 2;
const DIM: usize = 64;
/// Two packed sequences; the cut goes through the second.
const LENGTHS: [usize; 2] = [60, 452];
/// Rows of each rank.
const ROWS: usize = 256;

fn numbers(seed: usize) -> Vec<f32> {
    let count = 2 * ROWS * HEADS * DIM;
    let number = |i: usize| ((i * 37 + seed * 101) % 65) as f32 / 32.0 - 1.0;
    (0..count).map(number).collect()
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let runtime = Runtime::auto()?;
    let device = runtime.device(0)?;
    let stream = device.stream()?;
    let masks = device.masks();
    let upload = |seed| stream.upload(&numbers(seed), [2 * ROWS, HEADS, DIM]);
    let (query, key, value) = (upload(1)?, upload(2)?, upload(3)?);
    let attention = FlashAttention::new(InputLayout::Tnd).heads(HEADS).scale(1.0 / (DIM as f64).sqrt());
    let ends = [LENGTHS[0], LENGTHS[0] + LENGTHS[1]];

    // Without a ring: all rows and all keys in one place.
    let plan = attention
        .clone()
        .mask(FlashMask::causal(&masks, CausalOrigin::RightDown)?)
        .actual_seq_lengths(ends)
        .actual_seq_lengths_kv(ends)
        .plan((&query, &key, &value))?;
    let whole = plan.launch(&stream, (&query, &key, &value))?;
    let whole = whole.attention.download(&stream)?;

    // Each rank has the rows of its half, and their keys and values.
    let first = |tensor: &Tensor<f32>| tensor.narrow(0, 0..ROWS);
    let second = |tensor: &Tensor<f32>| tensor.narrow(0, ROWS..2 * ROWS);

    // Which rows and keys of sequence 1 are on which rank, and the mask of each call (sparse modes 7 and 8).
    let cut = CutBatch::new(&ends, &ends, ROWS, SparseMode::RightDownCausal).ok_or("the cut leaves a rank empty")?;
    let keys = cut.rows_before();
    let no_call = "one mask does not say what these rows see";

    // Rank 0: sequence 0, and the beginning of sequence 1, which goes on elsewhere. No later key is visible.
    let own = [first(&query)?, first(&key)?, first(&value)?];
    let side = cut.first(0..keys).ok_or(no_call)?;
    let plan = attention
        .clone()
        .mask(FlashMask::cut(&masks, &side)?)
        .actual_seq_lengths(side.q_ends())
        .actual_seq_lengths_kv(side.kv_ends())
        .plan((&own[0], &own[1], &own[2]))?;
    let rank0 = plan.launch(&stream, (&own[0], &own[1], &own[2]))?;
    println!("rank 0: {}", plan.operator());

    // Rank 1: the rest of sequence 1, first with its own keys.
    let own = [second(&query)?, second(&key)?, second(&value)?];
    let side = cut.second(keys..cut.keys()).ok_or(no_call)?;
    let plan = attention
        .clone()
        .mask(FlashMask::cut(&masks, &side)?)
        .actual_seq_lengths(side.q_ends())
        .actual_seq_lengths_kv(side.kv_ends())
        .plan((&own[0], &own[1], &own[2]))?;
    let near = plan.launch(&stream, (&own[0], &own[1], &own[2]))?;

    // Then rank 0 passes on its keys of sequence 1. Every row sees all of them: the band goes beyond the last key.
    let passed = |tensor: &Tensor<f32>| tensor.narrow(0, LENGTHS[0]..ROWS);
    let (key, value) = (passed(&key)?, passed(&value)?);
    let side = cut.second(0..keys).ok_or(no_call)?;
    let plan = attention
        .mask(FlashMask::cut(&masks, &side)?)
        .actual_seq_lengths(side.q_ends())
        .actual_seq_lengths_kv(side.kv_ends())
        .plan((&own[0], &key, &value))?;
    let far = plan.launch(&stream, (&own[0], &key, &value))?;
    let merge = RingUpdate::new().plan(&stream, (&near, &far))?;
    let rank1 = merge.launch(&stream, (&near, &far))?;
    println!("rank 1: {} twice, {}", plan.operator(), merge.operator());

    let mut ranks = rank0.attention.download(&stream)?;
    ranks.extend(rank1.attention.download(&stream)?);
    let apart = whole.iter().zip(&ranks).map(|(a, b)| (a - b).abs());
    let apart = apart.fold(0.0, f32::max);
    println!("{} numbers, at most {apart:e} apart", ranks.len());
    assert_eq!(whole.len(), ranks.len());
    assert!(apart < 1e-5);
    Ok(())
}
