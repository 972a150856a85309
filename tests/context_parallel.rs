//! A context divided over ranks: each rank attends over its own keys, and the merged parts are attention over all.

#![allow(
    clippy::unwrap_used,
    clippy::panic,
    reason = "a test fails by panicking"
)]

mod harness;

use ascend_attention::attention::Inputs;
use ascend_attention::kv::{CacheShape, Interleave, PadPolicy, PageTable, PagedKvCache};
use ascend_attention::merge::{EmptyRows, MergeState, Part};
use ascend_attention::serving::{CallLengths, PerRequest};
use ascend_attention::{FusedInferAttention, Layout, Output, f16};
use harness::reference::{Half, Logical, row};
use proptest::prelude::*;
use proptest::test_runner::{Config, TestCaseError};

const DIM: usize = 64;
const BLOCK_SIZE: u32 = 128;

#[derive(Clone, Debug)]
struct Case {
    ranks: u32,
    run: u32,
    lengths: Vec<usize>,
    heads: usize,
    seed: u64,
}

/// Rows as `[rows, 1, N, D]`, which is also `[rows, N, D]`.
fn packed(of: &Logical<f16>) -> Vec<f16> {
    let rows = (0..of.rows).flat_map(|row| (0..of.heads).map(move |head| (head, row)));
    rows.flat_map(|(head, row)| of.row(0, head, row).to_vec())
        .collect()
}

fn check(case: &Case) -> Result<(), TestCaseError> {
    let stream = harness::stream();
    let share = Interleave::new(case.ranks, case.run).unwrap();
    let requests = case.lengths.len();
    let logical = |seed: u64, heads: usize, rows: usize| Logical {
        batch: 1,
        heads,
        rows,
        dim: DIM,
        data: harness::halves(case.seed * 97 + seed, heads * rows * DIM),
    };
    let queries = logical(0, case.heads, requests);
    let all = |salt: u64| -> Vec<Logical<f16>> {
        let requests = case.lengths.iter().enumerate();
        requests
            .map(|(r, len)| logical(r as u64 * 2 + salt, 1, *len))
            .collect()
    };
    let (keys, values) = (all(1), all(2));
    // One table for all ranks: an entry stands for a block on each of them.
    let span = BLOCK_SIZE * case.ranks;
    let mut next = 0;
    let rows: Vec<Vec<i32>> = case
        .lengths
        .iter()
        .map(|len| {
            let blocks = (*len as u32).div_ceil(span) as i32;
            next += blocks;
            (next - blocks..next).rev().collect()
        })
        .collect();

    let query = stream
        .upload(&packed(&queries), [requests, 1, case.heads, DIM])
        .unwrap();
    let scale = 1.0 / (DIM as f64).sqrt();
    let mut parts: Vec<Output<f16>> = Vec::new();
    let mut empty = EmptyRows::None;
    for rank in 0..case.ranks {
        let shape = CacheShape::new(1, 1, DIM);
        let pad = PadPolicy::SkipNegative;
        let device = stream.device();
        let blocks = u32::try_from(next).unwrap();
        let mut cache = PagedKvCache::<f16>::new(device, blocks, BLOCK_SIZE, shape, pad).unwrap();
        for (r, len) in case.lengths.iter().enumerate() {
            // What other ranks hold has no slot here, also in the middle of the list.
            let slots: Vec<i32> = (0..*len as u32)
                .map(|position| {
                    let slot = share.slot(&rows[r], position, BLOCK_SIZE, rank).unwrap();
                    slot.unwrap_or(pad.slot())
                })
                .collect();
            let upload = |of: &Logical<f16>| stream.upload(&packed(of), [*len, 1, DIM]).unwrap();
            let (key, value) = (upload(&keys[r]), upload(&values[r]));
            let write = cache.plan_write(&stream, &slots, &key, &value).unwrap();
            cache.write(&stream, &write, 0, &key, &value).unwrap();
        }
        let lengths = case
            .lengths
            .iter()
            .map(|len| share.local_len(*len as u64, rank) as i64);
        let lengths = PerRequest::new(lengths.collect()).unwrap();
        if lengths.lengths().contains(&0) {
            empty = EmptyRows::ThroughHost;
        }
        let table = cache
            .block_table(&stream, &PageTable::from_rows(&rows))
            .unwrap();
        let layer = cache.layer(0).unwrap();
        let inputs = Inputs::new(&query, &layer.key, &layer.value).paged(&table);
        let call = FusedInferAttention::new(Layout::Bsnd)
            .heads(case.heads as i64)
            .kv_heads(1)
            .scale(scale)
            .softmax_lse(true);
        let lengths = CallLengths::Batched {
            q: None,
            kv: &lengths,
        };
        let plan = lengths.apply(call).plan_with(&inputs).unwrap();
        parts.push(plan.launch_with(&stream, &inputs).unwrap());
    }
    let parts: Vec<Part<'_, f16>> = parts.iter().map(|part| Part::of(part).unwrap()).collect();
    let out = match parts.as_slice() {
        [one] => one.attention.download(&stream).unwrap(),
        parts => {
            let merge = MergeState::new(Layout::Bsnd).empty_rows(empty);
            let plan = merge.plan(parts).unwrap();
            let merged = plan.launch(&stream, parts).unwrap();
            merged.attention.download(&stream).unwrap()
        }
    };
    let q = queries.exact();
    for r in 0..requests {
        let (k, v) = (keys[r].exact(), values[r].exact());
        for head in 0..case.heads {
            let want = row(&q, &k, &v, (0, 0), head, r, scale, |_| true).unwrap().0;
            let got = &out[(r * case.heads + head) * DIM..][..DIM];
            for (got, want) in got.iter().zip(&want) {
                let got = got.to_f64();
                prop_assert!(
                    (got - want).abs() <= 2.0 * f16::TOLERANCE,
                    "request {r}, head {head}: {got}, expected {want}"
                );
            }
        }
    }
    Ok(())
}

fn case() -> impl Strategy<Value = Case> {
    let run = (0u32..8).prop_map(|power| 1 << power);
    let lengths = prop::collection::vec(1usize..400, 1..4);
    (1u32..5, run, lengths, 1usize..5, any::<u16>()).prop_map(
        |(ranks, run, lengths, heads, seed)| Case {
            ranks,
            run,
            lengths,
            heads,
            seed: seed.into(),
        },
    )
}

proptest! {
    #![proptest_config(Config { failure_persistence: None, ..Config::with_cases(40) })]

    #[test]
    fn any_division_of_any_context(case in case()) {
        check(&case)?;
    }
}

/// Fewer tokens than ranks: some hold none of them.
#[test]
fn ranks_without_keys() {
    let case = Case {
        ranks: 4,
        run: 64,
        lengths: vec![3, 130, 257],
        heads: 2,
        seed: 9,
    };
    check(&case).unwrap();
}
