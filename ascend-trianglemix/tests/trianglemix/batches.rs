//! TriangleMix as a backend: whatever the batch, each row is what one dense pass over the keys that it sees gives it.

use ascend_attention::bf16;
use ascend_attention::spec::geometry::TriangleMix;
use ascend_serving::kv::{BlockPool, CacheShape, PadPolicy, PagedKvCache};
use ascend_serving::{AttentionMetadata, Backend, Backends, BatchRequest, BatchSettings, Causality, Error};
use ascend_testing::step_memory::{self, BLOCK_SIZE, KV_HEADS};
use ascend_testing::steps::{Case, Request, run};
use ascend_testing::tokens::DIM;
use ascend_trianglemix::{
    BlockSparseUse, TriangleChoice, TriangleLayers, TriangleMixBackend, TriangleThresholds, WhyDense, rules,
};
use proptest::prelude::*;
use proptest::test_runner::{Config, TestCaseError};

/// TriangleMix in the second layer.
fn triangle(sizes: TriangleMix, thresholds: TriangleThresholds) -> TriangleMixBackend {
    TriangleMixBackend { layers: TriangleLayers::explicit([1]).unwrap(), sizes, thresholds }
}

/// The triangle by its definition.
fn in_triangle(sizes: TriangleMix, prompt: Option<usize>, row: usize, key: usize) -> bool {
    let Some(prompt) = prompt else { return true };
    let near = (row - key) as u64 <= sizes.sliding_window_size;
    near || (key as u64) < sizes.num_sink_tokens || row as u64 + sizes.num_last_tokens >= prompt as u64
}

/// Runs a step and says how many requests left keys out.
fn run_triangle(case: &Case, sizes: TriangleMix) -> Result<usize, TestCaseError> {
    let sparse = run_calls(case, sizes, BlockSparseUse::Never)?;
    prop_assert_eq!(run_calls(case, sizes, BlockSparseUse::Always)?, sparse);
    Ok(sparse)
}

fn run_calls(case: &Case, sizes: TriangleMix, block_sparse: BlockSparseUse) -> Result<usize, TestCaseError> {
    let thresholds = TriangleThresholds { block_sparse, ..TriangleThresholds::ALWAYS };
    let backend = triangle(sizes, thresholds);
    let sees = |at: usize, layer: usize, row: usize, key: usize| {
        let request: &Request = &case.requests[at];
        // Single rows are decoding, which is dense, as is the first layer.
        layer == 0 || request.new == 1 || in_triangle(sizes, request.prompt, row, key)
    };
    let first = (sizes.num_sink_tokens + sizes.sliding_window_size + 1) as usize;
    let last = |r: &Request| Some(r.prompt?.saturating_sub(sizes.num_last_tokens as usize));
    let mut marks: Vec<usize> = case.requests.iter().filter_map(last).collect();
    marks.push(first);
    let ran = run(case, Backends::none().with(backend.clone()).with(Backend::Fused), &sees, &marks)?;
    let choices = backend.choices(&ran.metadata);
    let sparse = choices.iter().filter(|c| matches!(c, TriangleChoice::Sparse { .. })).count();
    prop_assert_eq!(ran.name, if sparse > 0 { "triangle_mix" } else { "fused" });
    if sparse == 0 {
        prop_assert_eq!(ran.refused.len(), 1);
    }
    Ok(sparse)
}

fn prompts() -> impl Strategy<Value = Case> {
    // A request: cached tokens, tokens of the step, and how many of the prompt come later.
    let cached = prop_oneof![1 => Just(0usize), 1 => 1usize..300];
    let new = prop_oneof![1 => Just(1usize), 4 => 1usize..200];
    let later = prop_oneof![1 => Just(None), 2 => Just(Some(0usize)), 2 => (0usize..200).prop_map(Some)];
    let request = (cached, new, later).prop_map(|(own, new, later)| Request {
        shares: None,
        own,
        new,
        prompt: later.map(|later| own + new + later),
    });
    let any_cached = prop::collection::vec(request, 1..5);
    (1usize..3, 1usize..4, any_cached, any::<bool>(), 0usize..9, any::<u16>()).prop_map(
        |(kv_heads, group, mut requests, cached, pad, seed)| {
            if !cached {
                requests.iter_mut().for_each(|request| request.own = 0);
            }
            Case { kv_heads, group, requests, pad, causality: Causality::Causal, seed: seed.into() }
        },
    )
}

proptest! {
    #![proptest_config(Config { failure_persistence: None, ..Config::with_cases(16) })]

    #[test]
    fn any_batch_with_triangles(case in prompts(), sinks in 0u64..150, window in 0u64..150, last in 0u64..60) {
        run_triangle(&case, TriangleMix::new(sinks, window, last))?;
    }
}

/// Prompts that end around the first row that leaves a key out and the last ones, whole and in chunks that begin there.
#[test]
fn triangles_at_their_boundaries() {
    let sizes = TriangleMix::new(3, 140, 10);
    let first = 3 + 140 + 1;
    let mut sparse = Vec::new();
    for (prompt, cached) in [
        (1, 0),
        (first, 0),
        (first + 1, 0),
        (first + 10, 0),
        (first + 11, 0),
        (first + 11, 1),
        (300, first),
        (300, first + 1),
        (300, 290),
        (300, 289),
        (300, 128),
    ] {
        let request = Request { own: cached, new: prompt - cached, prompt: Some(prompt), ..Request::default() };
        let decode = Request { own: 5, new: 1, ..Request::default() };
        let alone = Case {
            kv_heads: 1,
            group: 2,
            requests: vec![request.clone()],
            pad: 0,
            causality: Causality::Causal,
            seed: 4,
        };
        let beside = Case { requests: vec![decode.clone(), request, decode], ..alone.clone() };
        let left_out = [&alone, &beside].map(|case| run_triangle(case, sizes).unwrap());
        assert_eq!(left_out[0], left_out[1]);
        sparse.push(left_out[0]);
    }
    assert_eq!(sparse, [0, 0, 0, 0, 1, 1, 1, 1, 0, 1, 1]);
}

/// Chunks with the length of the prompt are the prompt at once; without it they are dense, and the choice says so.
#[test]
fn chunks_need_the_length_of_the_prompt() {
    let sizes = TriangleMix::new(4, 20, 10);
    for (prompt, sparse) in [(Some(250), 1), (None, 0)] {
        for (own, new) in [(0, 100), (100, 100), (200, 50)] {
            let request = Request { shares: None, own, new, prompt };
            let case =
                Case { kv_heads: 1, group: 1, requests: vec![request], pad: 3, causality: Causality::Causal, seed: 6 };
            assert_eq!(run_triangle(&case, sizes).unwrap(), sparse);
        }
    }
    let row = [0, 1];
    let requests = [(Some(250), 100), (None, 100), (Some(250), 1), (Some(60), 60)];
    let batch: Vec<_> = requests
        .iter()
        .enumerate()
        .map(|(at, (prompt_len, new))| BatchRequest::in_row(&row[at % 2..], 0, *new).prompt_len(*prompt_len))
        .collect();
    let settings = |blocks| {
        let pool = BlockPool::new(blocks, 128, PadPolicy::SkipNegative).unwrap();
        BatchSettings::of(&pool, Causality::Causal)
    };
    let thresholds = TriangleThresholds { min_sparse_rows: 50, ..TriangleThresholds::ALWAYS };
    let choice = |request: &BatchRequest<'_>| {
        let metadata = AttentionMetadata::new(&[*request], settings(2)).unwrap();
        triangle(sizes, thresholds).choices(&metadata).remove(0)
    };
    let pairs = 75 * 76 / 2;
    let rows = 25..100;
    assert_eq!(choice(&batch[0]), TriangleChoice::Sparse { rows, saved_pairs: pairs });
    assert_eq!(choice(&batch[1]), TriangleChoice::Dense(WhyDense::PromptUnknown));
    assert_eq!(choice(&batch[2]), TriangleChoice::Dense(WhyDense::SingleRow));
    let why = WhyDense::BelowThresholds { rows: 25, pairs: 25 * 26 / 2 };
    assert_eq!(choice(&batch[3]), TriangleChoice::Dense(why));
}

/// Where a window hides keys, the ordinary backend serves the step, and the refusal says why.
#[test]
fn windows_that_hide_what_is_cached_are_refused_by_name() {
    let request = |own, new| Request { own, new, prompt: Some(400), ..Request::default() };
    let case = Case {
        kv_heads: 1,
        group: 1,
        requests: vec![request(256, 3), request(256, 1)],
        pad: 0,
        causality: Causality::from_flags(true, Some(40)).unwrap(),
        seed: 8,
    };
    let backend = triangle(TriangleMix::new(1, 2, 3), TriangleThresholds::ALWAYS);
    let backends = Backends::none().with(backend).with(Backend::Fused);
    let ran = run(&case, backends, &|_, _, row, key| row - key < 40, &[]).unwrap();
    assert_eq!(ran.name, "fused");
    let [(name, why)] = &ran.refused[..] else {
        panic!("{:?}", ran.refused);
    };
    assert_eq!(*name, "triangle_mix");
    assert!(matches!(why, Error::Violation(refused) if refused.rule == &rules::BACKEND_TRIANGLE), "{why}");
}

/// Compares the memory that a plan says with what its step takes: cached and new tokens of each request.
fn takes_its_memory(requests: &[(usize, usize)], block_sparse: BlockSparseUse) -> Result<(), TestCaseError> {
    let thresholds = TriangleThresholds { block_sparse, ..TriangleThresholds::ALWAYS };
    let backend = TriangleMixBackend {
        sizes: TriangleMix::new(5, 20, 30),
        layers: TriangleLayers::explicit([0, 1]).unwrap(),
        thresholds,
    };
    step_memory::check(
        "triangle_mix",
        Backends::<bf16>::none().with(backend).with(Backend::Fused),
        |stream| {
            let shape = CacheShape::new(2, KV_HEADS, DIM);
            let pad = PadPolicy::SkipNegative;
            PagedKvCache::new(stream.device(), 64, BLOCK_SIZE, shape, pad).unwrap()
        },
        Causality::Causal.into(),
        requests,
    )
}

proptest! {
    #![proptest_config(Config { failure_persistence: None, ..Config::with_cases(4) })]

    #[test]
    fn a_step_takes_the_memory_that_its_plan_says(
        requests in prop::collection::vec((0usize..600, 1usize..200), 1..5),
    ) {
        takes_its_memory(&requests, BlockSparseUse::Never)?;
    }
}

/// Parts of 2048 rows and more are what a layer takes most of.
#[test]
fn parts_that_are_merged_are_counted() {
    for block_sparse in [BlockSparseUse::Never, BlockSparseUse::Always] {
        takes_its_memory(&[(0, 2500)], block_sparse).unwrap();
        takes_its_memory(&[(0, 300), (0, 199)], block_sparse).unwrap();
    }
}
