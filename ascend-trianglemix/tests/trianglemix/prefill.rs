//! TriangleMix by calls of the stock operator is attention over exactly the keys of the triangle.

use std::ffi::c_char;
use std::sync::Arc;

use crate::harness;
use approx::abs_diff_eq;

use ascend_attention::blockwise::{BlockCover, SIDE};
use ascend_attention::spec::geometry::{TriangleMix, TrianglePart, TriangleRows};
use ascend_attention::spec::{Cann, Soc};
use ascend_attention::sys::Api;
use ascend_attention::sys::bindings::{aclIntArray, aclOpExecutor, aclTensor, aclnnStatus};
use ascend_attention::{FusedInferAttention, Layout, Mask, Runtime, Stream, Tensor, bf16};
use ascend_serving::{AttentionShape, Error};
use ascend_trianglemix::{
    BlockSparseUse, TriangleCost, TriangleMasks, TrianglePlan, TrianglePrefill, TriangleThresholds,
};
use harness::reference::{Half, Logical, row};
use proptest::prelude::*;
use proptest::test_runner::{Config, TestCaseError};

const DIM: usize = 64;

/// The rows of a range, packed.
fn packed(stream: &Stream, of: &Logical<bf16>, rows: std::ops::Range<usize>) -> Tensor<bf16> {
    let shape = [rows.len(), of.heads, DIM];
    stream.upload(&of.packed(rows), shape).unwrap()
}

#[derive(Clone, Debug)]
struct Case {
    sizes: TriangleMix,
    prompt: usize,
    /// Ends of chunks.
    cuts: Vec<usize>,
    kv_heads: usize,
    group: usize,
    known: bool,
    seed: u64,
    block_sparse: BlockSparseUse,
}

/// The triangle by its definition.
fn sees(case: &Case, row: usize, key: usize) -> bool {
    let (sinks, window) = (case.sizes.num_sink_tokens, case.sizes.sliding_window_size);
    let last = row as u64 + case.sizes.num_last_tokens >= case.prompt as u64;
    let near = key <= row && (row - key) as u64 <= window;
    key <= row && (near || (key as u64) < sinks || last || !case.known)
}

fn check(case: &Case) -> Result<usize, TestCaseError> {
    check_on(&harness::stream(), case).map(|(sparse, _)| sparse)
}

/// How many pairs were left out, and how many chunks were computed by block-sparse calls.
fn check_on(stream: &Stream, case: &Case) -> Result<(usize, usize), TestCaseError> {
    let (heads, kv_heads) = (case.kv_heads * case.group, case.kv_heads);
    let prefill = TrianglePrefill {
        shape: AttentionShape::new(heads, kv_heads, DIM),
        sizes: case.sizes,
        thresholds: TriangleThresholds { block_sparse: case.block_sparse, ..TriangleThresholds::ALWAYS },
    };
    let query = Logical::random(3 * case.seed, [1, heads, case.prompt, DIM]);
    let key = Logical::random(3 * case.seed + 1, [1, kv_heads, case.prompt, DIM]);
    let value = Logical::random(3 * case.seed + 2, [1, kv_heads, case.prompt, DIM]);
    let (q, k, v) = (query.exact(), key.exact(), value.exact());
    let (mut sparse, mut block_sparse) = (0, 0);
    let mut first = 0;
    for end in case.cuts.iter().copied().chain([case.prompt]) {
        let rows = first..end;
        if rows.is_empty() {
            continue;
        }
        let tensors =
            (packed(stream, &query, rows.clone()), packed(stream, &key, 0..end), packed(stream, &value, 0..end));
        let prompt = case.known.then_some(case.prompt);
        let place = (first, prompt);
        let plan = prefill.plan(stream, place, (&tensors.0, &tensors.1, &tensors.2)).unwrap();
        let hidden = |row: usize| (0..=row).filter(|key| !sees(case, row, *key)).count();
        let left_out: usize = rows.clone().map(hidden).sum();
        // Single rows are decoding, which is dense.
        let left_out = if rows.len() == 1 { 0 } else { left_out };
        prop_assert_eq!(plan.saved_pairs(), left_out as u128);
        prop_assert_eq!(plan.is_dense(), left_out == 0);
        sparse += left_out;
        block_sparse += usize::from(plan.is_block_sparse());
        let out = plan.launch(stream, (&tensors.0, &tensors.1, &tensors.2)).unwrap();
        let out = out.download(stream).unwrap();
        for (at, position) in rows.clone().enumerate() {
            let head = (position * 7) % heads;
            let dense = rows.len() == 1;
            let visible = |key: usize| key <= position && (dense || sees(case, position, key));
            let scale = prefill.shape.scale;
            let want = row(&q, &k, &v, (0, 0), head, position, scale, visible).unwrap().0;
            let got = &out[(at * heads + head) * DIM..][..DIM];
            for (got, want) in got.iter().zip(&want) {
                let got = got.to_f64();
                // The parts are rounded before they are merged.
                prop_assert!(
                    abs_diff_eq!(got, want, epsilon = 2.0 * bf16::TOLERANCE),
                    "row {position}, head {head}: {got}, expected {want}"
                );
            }
        }
        first = end;
    }
    Ok((sparse, block_sparse))
}

/// Rows of `[B, N, S, D]` data, one batch, as `[1, N, rows, D]`.
fn heads_first(stream: &Stream, of: &Logical<bf16>, rows: std::ops::Range<usize>) -> Tensor<bf16> {
    let data: Vec<bf16> = (0..of.heads)
        .flat_map(|head| rows.clone().map(move |row| (head, row)))
        .flat_map(|(head, row)| of.row(0, head, row).to_vec())
        .collect();
    stream.upload(&data, [1, of.heads, rows.len(), DIM]).unwrap()
}

/// Every row, by the calls of a prefill and by one call with the whole mask as a tensor (sparse mode 1).
#[track_caller]
fn same_as_the_explicit_mask(sizes: TriangleMix, prompt: usize, cuts: &[usize]) {
    let stream = harness::stream();
    let (heads, kv_heads) = (4, 2);
    let prefill = TrianglePrefill {
        shape: AttentionShape::new(heads, kv_heads, DIM),
        sizes,
        thresholds: TriangleThresholds::ALWAYS,
    };
    let query = Logical::random(71, [1, heads, prompt, DIM]);
    let (key, value) =
        (Logical::random(72, [1, kv_heads, prompt, DIM]), Logical::random(73, [1, kv_heads, prompt, DIM]));
    let mut first = 0;
    for end in cuts.iter().copied().chain([prompt]) {
        let rows = first..end;
        if rows.is_empty() {
            continue;
        }
        let place = (first, Some(prompt));
        let (q, k, v) =
            (packed(&stream, &query, rows.clone()), packed(&stream, &key, 0..end), packed(&stream, &value, 0..end));
        let plan = prefill.plan(&stream, place, (&q, &k, &v)).unwrap();
        let by_calls = plan.launch(&stream, (&q, &k, &v)).unwrap();
        let by_calls = by_calls.download(&stream).unwrap();

        let of = TriangleRows { first_row: first as u64, rows: rows.len() as u64, prompt_len: prompt as u64 };
        let masks = stream.device().masks();
        let mask = match rows.len() {
            // Decoding, which is dense.
            1 => Ok(Mask::none()),
            _ => masks.triangle_mix(sizes, TrianglePart::Triangle, of),
        };
        let (q, k, v) = (
            heads_first(&stream, &query, rows.clone()),
            heads_first(&stream, &key, 0..end),
            heads_first(&stream, &value, 0..end),
        );
        let call = FusedInferAttention::new(Layout::Bnsd)
            .heads(heads)
            .kv_heads(kv_heads)
            .scale(prefill.shape.scale)
            .mask(mask.unwrap());
        let explicit = call.plan((&q, &k, &v)).unwrap();
        let explicit = explicit.launch(&stream, (&q, &k, &v)).unwrap();
        let explicit = explicit.attention.download(&stream).unwrap();
        for head in 0..heads {
            for row in 0..rows.len() {
                let one = &by_calls[(row * heads + head) * DIM..][..DIM];
                let other = &explicit[(head * rows.len() + row) * DIM..][..DIM];
                for (one, other) in one.iter().zip(other) {
                    // Each is rounded, and so are the parts of one of them.
                    assert!(
                        abs_diff_eq!(one.to_f64(), other.to_f64(), epsilon = 2.0 * bf16::TOLERANCE),
                        "prompt {prompt}, cuts {cuts:?}, row {}, head {head}: {one} and {other}",
                        first + row
                    );
                }
            }
        }
        first = end;
    }
}

/// With `S` the first row that leaves a key out: prompts of 1, S, S + 1 tokens and more, at once and in chunks that
/// end at 1, at S, at S + 1, and at the first of the last rows.
#[test]
fn calls_of_the_stock_operator_are_the_explicit_mask() {
    let sizes = TriangleMix::new(3, 12, 10);
    let s = 3 + 12 + 1;
    for prompt in [1, s, s + 1, s + 10, s + 11, 150] {
        let last = prompt - prompt.min(10);
        same_as_the_explicit_mask(sizes, prompt, &[]);
        for cut in [1, s, s + 1, last, last + 1] {
            same_as_the_explicit_mask(sizes, prompt, &[cut.min(prompt)]);
        }
    }
    same_as_the_explicit_mask(sizes, 150, &[1, s, s + 1, 64, 128, 140]);
    same_as_the_explicit_mask(TriangleMix::GUIDE, 300, &[36, 37, 128, 236]);
    same_as_the_explicit_mask(TriangleMix::new(0, 5, 0), 90, &[40]);
    same_as_the_explicit_mask(TriangleMix::new(7, 0, 1), 90, &[40]);
}

fn case() -> impl Strategy<Value = Case> {
    let sizes = (0u64..12, 0u64..40, 0u64..40);
    let prompt = 1usize..200;
    let heads = (1usize..3, 1usize..4);
    let cuts = prop::collection::vec(any::<usize>(), 0..3);
    (sizes, prompt, heads, cuts, any::<u8>(), any::<u32>()).prop_map(
        |((sinks, window, last), prompt, (kv_heads, group), cuts, known, seed)| {
            let mut cuts: Vec<usize> = cuts.into_iter().map(|cut| cut % prompt).collect();
            cuts.sort_unstable();
            Case {
                sizes: TriangleMix::new(sinks, window, last),
                prompt,
                cuts,
                kv_heads,
                group,
                known: known % 8 > 0,
                seed: seed.into(),
                block_sparse: BlockSparseUse::Never,
            }
        },
    )
}

proptest! {
    #![proptest_config(Config { failure_persistence: None, ..Config::with_cases(40) })]

    #[test]
    fn any_chunks_of_any_prompt(case in case()) {
        check(&case)?;
    }
}

proptest! {
    #![proptest_config(Config { failure_persistence: None, ..Config::with_cases(20) })]

    #[test]
    fn block_sparse_calls_are_the_triangle_on_every_product_and_release(
        case in case(), prompt in 300usize..700, sizes in (0u64..200, 0u64..300, 0u64..200), target in 0usize..5,
    ) {
        let (soc, cann, takes) = [
            (Soc::AtlasA2, Cann::V8_5, false),
            (Soc::AtlasA2, Cann::V9_0, true),
            (Soc::AtlasA3, Cann::V9_1, true),
            (Soc::AtlasA3, Cann::V9_2, true),
            (Soc::Ascend950, Cann::V9_2, true),
        ][target];
        let case = Case {
            block_sparse: BlockSparseUse::Always,
            sizes: TriangleMix::new(sizes.0, sizes.1, sizes.2),
            prompt,
            cuts: case.cuts.iter().map(|cut| cut * prompt / case.prompt).collect(),
            ..case
        };
        let (sparse, block_sparse) = check_on(&harness::emulated_stream(soc, cann), &case)?;
        prop_assert_eq!(block_sparse > 0, takes && sparse > 0);
    }
}

/// A prompt whose last rows of [`TriangleMix::GUIDE`] are a row of blocks, which are full.
const FULL: usize = 4 * SIDE + 64;

/// Plans a whole prompt by the GUIDE's sizes, and compares each row with the triangle by its definition.
fn guide(stream: &Stream, dim: usize, rows: usize, block_sparse: BlockSparseUse) -> TrianglePlan {
    let [q, k, v] = [1, 2, 3].map(|seed| Logical::<bf16>::random(seed, [1, 1, rows, dim]));
    let [query, key, value] = [&q, &k, &v].map(|of| stream.upload(&of.packed(0..rows), [rows, 1, dim]).unwrap());
    let (shape, sizes) = (AttentionShape::new(1, 1, dim), TriangleMix::GUIDE);
    let thresholds = TriangleThresholds { block_sparse, ..TriangleThresholds::ALWAYS };
    let prefill = TrianglePrefill { shape, sizes, thresholds };
    let tensors = (&query, &key, &value);
    let plan = prefill.plan(stream, (0, Some(rows)), tensors).unwrap();
    let out = plan.launch(stream, tensors).unwrap().download(stream).unwrap();
    let triangle = sizes.geometry(TrianglePart::Triangle, TriangleRows::whole(rows as u64));
    let (q, k, v) = (q.exact(), k.exact(), v.exact());
    for (at, got) in out.chunks(dim).enumerate() {
        let visible = |key: usize| triangle.sees(at as u64, key as u64);
        let want = row(&q, &k, &v, (0, 0), 0, at, shape.scale, visible).unwrap().0;
        for (got, want) in got.iter().zip(&want) {
            assert!(abs_diff_eq!(got.to_f64(), *want, epsilon = 2.0 * bf16::TOLERANCE), "row {at}: {got}, not {want}");
        }
    }
    plan
}

/// The operator takes heads of 64 and 128 elements, and pages have 128 keys: others are left to the stock operator.
#[test]
fn what_the_block_sparse_operator_refuses_is_left_to_the_stock_operator() {
    let stream = harness::emulated_stream(Soc::AtlasA2, Cann::V9_1);
    let taken = guide(&stream, 128, FULL, BlockSparseUse::Always);
    assert!(taken.is_block_sparse() && taken.memory().held > 0 && taken.memory().layer > 0);
    assert!(!guide(&stream, 128, 120, BlockSparseUse::Always).is_block_sparse());
    assert!(!guide(&stream, 96, FULL, BlockSparseUse::Always).is_block_sparse());
}

/// Prompts of few blocks need fewer block-sparse calls than stock ones. In longer ones, whose blocks are the same in
/// both ways, those at the borders cost more row by row.
#[test]
fn the_cheaper_calls_are_chosen_where_that_is_asked_for() {
    let stream = harness::emulated_stream(Soc::AtlasA2, Cann::V9_1);
    let side = (SIDE * SIDE) as u128;
    let (row_pair, call) = (TriangleCost::ROW_PAIR, TriangleCost::CALL);
    // Three partial blocks: two causal calls, a band, sinks and their merge; or a call of rows and a copy.
    let short = guide(&stream, 128, 256, BlockSparseUse::WhereCheaper);
    assert!(short.is_block_sparse());
    let cost = short.cost();
    assert_eq!((cost.stock, cost.block_sparse), (3 * side + 5 * call, 3 * side * row_pair + 2 * call));
    let long = guide(&stream, 128, 1000, BlockSparseUse::WhereCheaper);
    assert!(!long.is_block_sparse() && long.cost().stock < long.cost().block_sparse);
    for thresholds in [TriangleThresholds::ALWAYS, TriangleThresholds::MEASURED] {
        assert_eq!(thresholds.block_sparse, BlockSparseUse::default());
    }
    assert!(!guide(&stream, 128, 256, BlockSparseUse::default()).is_block_sparse());
}

/// Predictions are made from numbers of blocks alone, and are those of the calls but for the rows of partial blocks
/// that see nothing of them.
#[test]
fn predicted_costs_are_those_of_the_calls() {
    for (sizes, prompt) in [
        (TriangleMix::GUIDE, 256),
        (TriangleMix::GUIDE, 1000),
        (TriangleMix::GUIDE, 2048),
        (TriangleMix::GUIDE_LONG_CONTEXT, 3000),
        (TriangleMix::PAPER, 4096),
        (TriangleMix::PAPER, 5001),
        (TriangleMix::new(0, 127, 0), 1300),
        (TriangleMix::new(300, 5, 1), 1300),
    ] {
        let shape = AttentionShape::new(1, 1, DIM);
        let cost = TrianglePrefill { shape, sizes, thresholds: TriangleThresholds::ALWAYS }.cost(prompt);
        let triangle = sizes.geometry(TrianglePart::Triangle, TriangleRows::whole(prompt as u64));
        let cover = BlockCover::new(&[triangle]).unwrap();
        let of_calls = cover.block_pairs() + cover.row_pairs() * TriangleCost::ROW_PAIR;
        let of_calls = of_calls + cover.calls() as u128 * TriangleCost::CALL;
        let predicted = cost.block_sparse;
        assert!(of_calls <= predicted + TriangleCost::CALL, "{sizes:?}, {prompt}: {predicted}, {of_calls}");
        assert!(predicted <= of_calls * 5 / 4, "{sizes:?}, {prompt}: {predicted}, {of_calls}");
    }
}

/// Phase one of an operator that refuses every call.
unsafe extern "C" fn refuses(
    _: *const aclTensor,
    _: *const aclTensor,
    _: *const aclTensor,
    _: *const aclTensor,
    _: *const aclTensor,
    _: *const aclIntArray,
    _: *const aclIntArray,
    _: *const aclIntArray,
    _: *const aclTensor,
    _: *mut c_char,
    _: *mut c_char,
    _: i64,
    _: i64,
    _: f64,
    _: i64,
    _: i64,
    _: i64,
    _: i64,
    _: i64,
    _: *const aclTensor,
    _: *const aclTensor,
    _: *mut u64,
    _: *mut *mut aclOpExecutor,
) -> aclnnStatus {
    561_002
}

#[test]
fn what_the_installed_operator_refuses_is_left_to_the_stock_operator() {
    if harness::not_on_npu("the operator of an NPU is not replaced") {
        return;
    }
    let mut functions = harness::functions();
    functions.aclnnBlockSparseAttentionGetWorkspaceSize = Some(refuses);
    let api = Arc::new(Api::from_functions(functions, "emulation, with an operator that refuses"));
    // SAFETY: the functions are the emulation's, and one that touches no argument.
    let runtime = unsafe { Runtime::from_api(api) }.unwrap();
    let stream = runtime.device(0).unwrap().stream().unwrap();
    assert!(!guide(&stream, 128, FULL, BlockSparseUse::Always).is_block_sparse());
}

/// Prompts that end around the first row that leaves a key out, and around the last rows.
#[test]
fn lengths_at_the_boundaries() {
    let sizes = TriangleMix::new(3, 12, 10);
    let first_sparse = 3 + 12 + 1;
    let mut sparse = Vec::new();
    for prompt in [1, first_sparse, first_sparse + 1, first_sparse + 10, first_sparse + 11, 60] {
        let case = Case {
            sizes,
            prompt,
            cuts: vec![],
            kv_heads: 1,
            group: 2,
            known: true,
            seed: 5,
            block_sparse: BlockSparseUse::Never,
        };
        sparse.push(check(&case).unwrap());
        for cut in [1, first_sparse, first_sparse + 1, prompt - prompt.min(10)] {
            let cuts = vec![cut.min(prompt)];
            check(&Case { cuts, ..case.clone() }).unwrap();
        }
    }
    assert_eq!(sparse[..4], [0; 4]);
    assert_eq!(sparse[4], 1);
    assert!(sparse[5] > 100);
}

#[test]
fn the_gate_falls_back_to_dense_attention() {
    let stream = harness::stream();
    let tokens = |heads| packed(&stream, &Logical::random(1, [1, heads, 300, DIM]), 0..300);
    let (query, key) = (tokens(2), tokens(1));
    let plan = |thresholds, prompt| {
        let prefill = TrianglePrefill { shape: AttentionShape::new(2, 1, DIM), sizes: TriangleMix::GUIDE, thresholds };
        prefill.plan(&stream, (0, prompt), (&query, &key, &key))
    };
    let rows = 300 - 64 - (4 + 32 + 1);
    let pairs = rows * (rows + 1) / 2;
    let thresholds = |min_sparse_rows, min_saved_pairs| TriangleThresholds {
        min_sparse_rows,
        min_saved_pairs,
        block_sparse: BlockSparseUse::Never,
    };
    let saved = |thresholds, prompt| plan(thresholds, prompt).unwrap().saved_pairs();
    assert_eq!(saved(TriangleThresholds::ALWAYS, Some(300)), pairs);
    assert_eq!(saved(thresholds(rows as usize, pairs), Some(300)), pairs);
    assert_eq!(saved(thresholds(rows as usize + 1, 1), Some(300)), 0);
    assert_eq!(saved(thresholds(1, pairs + 1), Some(300)), 0);
    assert_eq!(saved(TriangleThresholds::MEASURED, Some(300)), 0);
    assert_eq!(saved(TriangleThresholds::ALWAYS, None), 0);
    let prefill = TrianglePrefill {
        shape: AttentionShape::new(2, 1, DIM),
        sizes: TriangleMix::GUIDE,
        thresholds: TriangleThresholds::ALWAYS,
    };
    let error = prefill.plan(&stream, (5, Some(300)), (&query, &key, &key));
    assert!(matches!(
        &error,
        Err(Error::Violation(violation))
            if violation.rule.id == "argument.value"
                && violation.given.starts_with("key: ")
    ));
}
