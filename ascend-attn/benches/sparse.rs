//! Sparse attention against what it is to be compared with, in one run: `cargo bench -p ascend-attn --bench sparse`.
//!
//! | case | measured | compared with |
//! |---|---|---|
//! | attention | 8 rows, each to 2048 keys of its own 32k | the same rows over 2048 contiguous keys, by latent attention |
//! | indexer | the scores of 1, 8 and 128 rows and 32k keys, and the best 2048 | what the machine multiplies and adds |
//! | block-sparse | 32k rows of one head over 32k keys | one block of keys in ten for each block of rows |
//!
//! Both of a pair run in turns, and the median of the ratios is printed, so that a machine whose speed changes tells
//! the same.

mod pairs;

use std::process::ExitCode;
use std::time::Instant;

use ascend_attention::attention::{BlockTable, Inputs};
use ascend_attention::block_sparse::{BlockMask, BlockSparseAttention};
use ascend_attention::indexer::LightningIndexer;
use ascend_attention::sparse::SparseSequences;
use ascend_attention::sparse_flash::SparseFlashAttention;
use ascend_attention::{FusedInferAttention, Layout, Result, Runtime, Stream, Tensor, f16};
use ascend_emu::kernel::roofline;
use pairs::{numbers, report, seconds};

const SEQUENCES: usize = 8;
const KEYS: usize = 32 * 1024;
const CHOSEN: usize = 2048;
const HEADS: usize = 32;
/// Heads and elements of the indexer's queries.
const INDEXER: [usize; 2] = [64, 128];
const BLOCK: usize = 128;
/// Thousands of operations in one burst of arithmetic.
const BURST: u64 = 300_000;

fn main() -> ExitCode {
    pairs::main(run)
}

fn run(pairs: usize) -> Result<()> {
    let stream = Runtime::emulated()?.device(0)?.stream()?;
    attention(&stream, pairs)?;
    [1, 8, 128].iter().try_for_each(|rows| indexer(&stream, *rows, pairs))?;
    block_sparse(&stream, pairs)
}

fn attention(stream: &Stream, pairs: usize) -> Result<()> {
    let scale = 1.0 / 192f64.sqrt();
    let cached = |keys: usize| -> Result<[Tensor<f16>; 2]> {
        let blocks = SEQUENCES * keys / BLOCK;
        Ok([
            numbers(stream, &[blocks, BLOCK, 1, 512], f16::from_f32)?,
            numbers(stream, &[blocks, BLOCK, 1, 64], f16::from_f32)?,
        ])
    };
    let rows = |keys: usize| -> Vec<Vec<usize>> {
        let blocks = keys / BLOCK;
        (0..SEQUENCES).map(|of| (of * blocks..(of + 1) * blocks).collect()).collect()
    };
    let query = numbers(stream, &[SEQUENCES, HEADS, 512], f16::from_f32)?;
    let query_rope = numbers(stream, &[SEQUENCES, HEADS, 64], f16::from_f32)?;

    // An odd step visits the keys of a power of two in an order without runs.
    let chosen = (0..SEQUENCES).flat_map(|of| (0..CHOSEN).map(move |at| (at * 8_117 + of * 31) % KEYS));
    let chosen: Vec<i32> = chosen.map(|key| key as i32).collect();
    let indices = stream.upload(&chosen, [SEQUENCES, 1, CHOSEN])?;
    let [key, key_rope] = cached(KEYS)?;
    let sequences = SparseSequences::packed(stream, &[1; SEQUENCES], &[KEYS; SEQUENCES])?;
    let sequences = sequences.paged(stream, &rows(KEYS))?;
    let sparse = ((&query, &query_rope), (&key, &key_rope), &indices);
    let sparse_plan = SparseFlashAttention::new(scale).plan(&sequences, sparse)?;

    let [few, few_rope] = cached(CHOSEN)?;
    let flat = |tensor: &Tensor<f16>, dim: usize| tensor.reshape([SEQUENCES * CHOSEN / BLOCK, BLOCK, dim]);
    let (few, few_rope) = (flat(&few, 512)?, flat(&few_rope, 64)?);
    let table = BlockTable::from_rows(stream, &rows(CHOSEN), BLOCK)?;
    let batched = |tensor: &Tensor<f16>, dim: usize| tensor.reshape([SEQUENCES, 1, HEADS, dim]);
    let (dense_query, dense_rope) = (batched(&query, 512)?, batched(&query_rope, 64)?);
    let dense = Inputs::new(&dense_query, &few, &few).rope(&dense_rope, &few_rope).paged(&table);
    let dense_plan = FusedInferAttention::new(Layout::Bsnd)
        .heads(HEADS)
        .kv_heads(1)
        .scale(scale)
        .actual_seq_lengths_kv([CHOSEN; SEQUENCES])
        .plan(dense)?;

    let mut measured = Vec::new();
    for _ in 0..=pairs {
        measured.push([
            1e3 * seconds(stream, || sparse_plan.launch(stream, sparse).map(drop))?,
            1e3 * seconds(stream, || dense_plan.launch(stream, dense).map(drop))?,
        ]);
    }
    // The first pair touches all memory.
    report("attention", ["ms of chosen keys", "ms of contiguous ones"], &measured[1..]);
    Ok(())
}

fn indexer(stream: &Stream, rows: usize, pairs: usize) -> Result<()> {
    let [heads, dim] = INDEXER;
    let query = numbers(stream, &[rows, heads, dim], f16::from_f32)?;
    let weights = numbers(stream, &[rows, heads], f16::from_f32)?;
    let key = numbers(stream, &[KEYS, 1, dim], f16::from_f32)?;
    let sequences = SparseSequences::packed(stream, &[rows], &[KEYS])?;
    let inputs = (&query, &key, &weights);
    let plan = LightningIndexer::new(CHOSEN).plan(&sequences, inputs)?;
    let operations = (2 * rows * heads * dim * KEYS) as f64;
    let mut measured = Vec::new();
    for _ in 0..=pairs {
        let of_call = seconds(stream, || plan.launch(stream, inputs).map(drop))?;
        let rates = rayon::broadcast(|_| {
            let start = Instant::now();
            roofline::multiply_add(BURST) as f64 / start.elapsed().as_secs_f64()
        });
        measured.push([operations / of_call / 1e9, rates.iter().sum::<f64>() / 1e9]);
    }
    report(&format!("indexer, {rows} rows"), ["GFLOP/s", "of the machine"], &measured[1..]);
    Ok(())
}

fn block_sparse(stream: &Stream, pairs: usize) -> Result<()> {
    // Dense attention over all keys takes seconds: as a test it is over few.
    let tokens = if pairs > 1 { KEYS } else { 16 * BLOCK };
    let blocks = tokens / BLOCK;
    let scale = 1.0 / 128f64.sqrt();
    let tensor = || numbers(stream, &[1, 1, tokens, 128], f16::from_f32);
    let [query, key, value] = [tensor()?, tensor()?, tensor()?];
    let shown = |row: usize, keys: usize| i8::from((3 * row + 7 * keys).is_multiple_of(10));
    let mask: Vec<i8> = (0..blocks).flat_map(|row| (0..blocks).map(move |keys| shown(row, keys))).collect();
    let mask = BlockMask::upload(stream, &mask, [1, 1, blocks, blocks])?;
    let sparse = (&query, &key, &value, &mask);
    let sparse_plan = BlockSparseAttention::new(Layout::Bnsd, scale).plan(sparse)?;
    let dense = Inputs::new(&query, &key, &value);
    let dense_plan = FusedInferAttention::new(Layout::Bnsd).heads(1).kv_heads(1).scale(scale).plan(dense)?;
    let mut measured = Vec::new();
    for _ in 0..=pairs.min(5) {
        measured.push([
            1e3 * seconds(stream, || dense_plan.launch(stream, dense).map(drop))?,
            1e3 * seconds(stream, || sparse_plan.launch(stream, sparse).map(drop))?,
        ]);
    }
    report("block-sparse", ["ms of all blocks", "ms of one in ten"], &measured[1..]);
    Ok(())
}
