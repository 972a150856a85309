//! What the serving layer costs the host: `cargo bench --bench serving`.

#![allow(
    missing_docs,
    clippy::unwrap_used,
    reason = "a bench, not an interface"
)]

use ascend_attention::kv::{BlockPool, PadPolicy, Sequence};
use ascend_attention::serving::{
    AttentionMetadata, BatchRequest, BatchSettings, Causality, StatePolicy,
};
use divan::Bencher;

fn main() {
    divan::main();
}

/// Requests that decode, of 1000 to 5000 tokens each.
fn sequences(requests: u32) -> (BlockPool, Vec<Sequence>) {
    let pool = BlockPool::new(16_384, 128, PadPolicy::SkipNegative).unwrap();
    let sequence = |request: u32| {
        let mut sequence = Sequence::new(&pool);
        let _ = sequence.grow(1000 + request * 7919 % 4000).unwrap();
        sequence
    };
    let sequences = (0..requests).map(sequence).collect();
    (pool, sequences)
}

fn settings(pool: &BlockPool) -> BatchSettings {
    BatchSettings {
        blocks: pool.blocks(),
        block_size: pool.block_size(),
        pad: pool.pad_policy(),
        causality: Causality::Causal,
        policy: StatePolicy::default(),
    }
}

fn batch(sequences: &[Sequence]) -> Vec<BatchRequest<'_>> {
    let one = |sequence| BatchRequest::of(sequence, 1);
    sequences.iter().map(one).collect()
}

/// Lengths, slots, table and state of a decode step.
#[divan::bench(args = [1, 32, 256])]
fn plan_decode_step(bencher: Bencher<'_, '_>, requests: u32) {
    let (pool, sequences) = sequences(requests);
    let mut metadata = AttentionMetadata::new(&batch(&sequences), settings(&pool)).unwrap();
    bencher.bench_local(|| {
        metadata.renew(&batch(&sequences)).unwrap();
        metadata.tokens()
    });
}

/// A token more in each request, taken back again.
#[divan::bench(args = [256])]
fn grow_sequences(bencher: Bencher<'_, '_>, requests: u32) {
    let (_pool, mut sequences) = sequences(requests);
    bencher.bench_local(|| {
        for sequence in &mut sequences {
            let len = sequence.len();
            let _ = sequence.grow(1).unwrap();
            sequence.truncate(len).unwrap();
        }
    });
}

/// A prompt of 1000 tokens, beside 64 requests that decode.
#[divan::bench]
fn plan_chunked_step(bencher: Bencher<'_, '_>) {
    let (pool, sequences) = sequences(65);
    let mut batch = batch(&sequences);
    batch[0] = BatchRequest::of(&sequences[0], 1000);
    let mut metadata = AttentionMetadata::new(&batch, settings(&pool)).unwrap();
    bencher.bench_local(|| {
        metadata.renew(&batch).unwrap();
        metadata.tokens()
    });
}
