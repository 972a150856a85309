//! Cost of checking a call: `cargo bench -p ascend-spec`.

use ascend_spec::ops::fused_infer_attention_score::{FiaCall, Version};
use ascend_spec::{Cann, DType, Soc, Target, TensorDesc};

fn main() {
    divan::main();
}

fn desc(dtype: DType, shape: &[i64]) -> TensorDesc {
    TensorDesc::contiguous(dtype, shape).unwrap_or(TensorDesc::packed(dtype, ascend_spec::Dims::of([0])))
}

const SNAPSHOT: Target = Target::snapshot(Soc::AtlasA2);
const NEWEST: Target = Target::new(Soc::AtlasA2, Cann::NEWEST);

/// A decode step over a paged cache.
#[divan::bench(args = [1, 16, 256])]
fn paged_decode(bencher: divan::Bencher<'_, '_>, batch: i64) {
    decode_on(SNAPSHOT, bencher, batch);
}

/// The same by the contract of the newest release.
#[divan::bench(args = [1, 16, 256])]
fn paged_decode_newest(bencher: divan::Bencher<'_, '_>, batch: i64) {
    decode_on(NEWEST, bencher, batch);
}

fn decode_on(target: Target, bencher: divan::Bencher<'_, '_>, batch: i64) {
    let cache = [desc(DType::Bf16, &[8192, 128, 1024])];
    let lengths: Vec<i64> = (0..batch).map(|b| 1 + b * 16).collect();
    let call = FiaCall {
        query: Some(desc(DType::Bf16, &[batch, 32, 1, 128])),
        key: &cache,
        value: &cache,
        num_heads: 32,
        num_key_value_heads: 8,
        block_table: Some(desc(DType::Int32, &[batch, 32])),
        block_size: 128,
        actual_seq_lengths_kv: Some(&lengths),
        attention_out: Some(desc(DType::Bf16, &[batch, 32, 1, 128])),
        ..FiaCall::new("BNSD")
    };
    let version = Version::chosen_on(&call, Version::V1, target);
    bencher.bench_local(|| {
        let problem = divan::black_box(&call).check(version, target);
        let problem = problem.map(|problem| problem.lint(&[]).is_ok());
        assert!(matches!(problem, Ok(true)));
    });
}

/// A step of packed sequences over a paged cache.
#[divan::bench(args = [1, 16, 256])]
fn packed_step(bencher: divan::Bencher<'_, '_>, batch: i64) {
    step_on(SNAPSHOT, bencher, batch);
}

/// The same by the contract of the newest release.
#[divan::bench(args = [1, 16, 256])]
fn packed_step_newest(bencher: divan::Bencher<'_, '_>, batch: i64) {
    step_on(NEWEST, bencher, batch);
}

fn step_on(target: Target, bencher: divan::Bencher<'_, '_>, batch: i64) {
    let cache = [desc(DType::Bf16, &[8192, 128, 1024])];
    let lengths: Vec<i64> = (0..batch).map(|b| 1 + b * 16).collect();
    let ends: Vec<i64> = (1..=batch).collect();
    let call = FiaCall {
        query: Some(desc(DType::Bf16, &[batch, 32, 128])),
        key: &cache,
        value: &cache,
        num_heads: 32,
        num_key_value_heads: 8,
        block_table: Some(desc(DType::Int32, &[batch, 32])),
        block_size: 128,
        sparse_mode: 3,
        atten_mask: Some(desc(DType::Int8, &[2048, 2048])),
        actual_seq_lengths: Some(&ends),
        actual_seq_lengths_kv: Some(&lengths),
        attention_out: Some(desc(DType::Bf16, &[batch, 32, 128])),
        ..FiaCall::new("TND")
    };
    let version = Version::chosen_on(&call, Version::V1, target);
    bencher.bench_local(|| {
        let problem = divan::black_box(&call).check(version, target);
        let problem = problem.map(|problem| problem.lint(&[]).is_ok());
        assert!(matches!(problem, Ok(true)));
    });
}
