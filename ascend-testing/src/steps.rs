//! A step by any backends over requests that may share prefixes: whatever the batch, each row is what one dense pass
//! over the keys that it sees gives it.

use approx::abs_diff_eq;
use ascend_attention::{Stream, bf16};
use ascend_serving::kv::{CacheShape, CacheWrite, PadPolicy, PagedKvCache, Sequence};
use ascend_serving::{
    Attention, AttentionMetadata, AttentionShape, Backends, BatchRequest, BatchSettings, Causality, Error, LayerInputs,
    StatePolicy,
};
use proptest::test_runner::TestCaseError;
use proptest::{prop_assert, prop_assert_eq};

use crate::harness;
use crate::tokens::{DIM, dense_with_sinks, packed};

/// Layers of the model.
pub const LAYERS: usize = 2;
/// Tokens of a block.
pub const BLOCK_SIZE: usize = 128;
/// Blocks of the cache.
pub const BLOCKS: usize = 96;
/// Tokens of each of the two prefixes that requests may share.
pub const DONATED: usize = 300;

/// A request of the step.
#[derive(Clone, Debug, Default)]
pub struct Request {
    /// One of the prefixes, and the number of its tokens that the request begins with.
    pub shares: Option<(usize, usize)>,
    /// Cached tokens of its own.
    pub own: usize,
    /// Tokens of the step.
    pub new: usize,
    pub prompt: Option<usize>,
}

#[derive(Clone, Debug)]
pub struct Case {
    pub kv_heads: usize,
    pub group: usize,
    pub requests: Vec<Request>,
    /// Padding tokens.
    pub pad: usize,
    pub causality: Causality,
    pub seed: u64,
}

/// What a step did.
pub struct Ran {
    pub name: &'static str,
    pub refused: Vec<(&'static str, Error)>,
    pub metadata: AttentionMetadata,
}

/// Tokens that are cached before the step, written to every layer.
pub fn fill(stream: &Stream, attention: &mut Attention<bf16>, sequence: &mut Sequence, names: &[u64], kv_heads: usize) {
    if names.is_empty() {
        return;
    }
    let grown = sequence.grow(names.len()).unwrap();
    let cache = attention.cache_mut();
    cache.copy_blocks(stream, &grown.copies).unwrap();
    for layer in 0..LAYERS {
        let key = packed(stream, names, layer, 1, kv_heads);
        let value = packed(stream, names, layer, 2, kv_heads);
        let write = CacheWrite::plan(cache, stream, &grown.slots, &key, &value);
        cache.write(stream, &write.unwrap(), layer, &key, &value).unwrap();
    }
    cache.mark_computed(sequence, sequence.len()).unwrap();
}

/// Which keys a row sees: request, layer, row, key.
pub type Sees<'a> = &'a dyn Fn(usize, usize, usize, usize) -> bool;

/// Runs a step and compares every row of it, or of long ones some.
pub fn run(case: &Case, backends: Backends<bf16>, sees: Sees<'_>, marks: &[usize]) -> Result<Ran, TestCaseError> {
    run_on(&harness::stream(), None, case, backends, sees, marks)
}

/// Runs a step as [`run`] does, on a stream of any product, with sinks or without.
pub fn run_on(
    stream: &Stream,
    sinks: Option<&[f64]>,
    case: &Case,
    backends: Backends<bf16>,
    sees: Sees<'_>,
    marks: &[usize],
) -> Result<Ran, TestCaseError> {
    let (heads, kv_heads) = (case.kv_heads * case.group, case.kv_heads);
    let shape = AttentionShape::new(heads, kv_heads, DIM);
    let pad = PadPolicy::SkipNegative;
    let cache_shape = CacheShape::new(LAYERS, kv_heads, DIM);
    let cache = PagedKvCache::new(stream.device(), BLOCKS, BLOCK_SIZE, cache_shape, pad).unwrap();
    let pool = cache.pool().clone();
    let mut attention = Attention::new(shape, cache, backends);
    let mut next = case.seed * 100_000;
    let mut name = || {
        next += 1;
        next
    };
    let donors: Vec<(Sequence, Vec<u64>)> = (0..2)
        .map(|_| {
            let names: Vec<u64> = (0..DONATED).map(|_| name()).collect();
            let mut sequence = Sequence::new(&pool);
            fill(stream, &mut attention, &mut sequence, &names, kv_heads);
            (sequence, names)
        })
        .collect();
    let mut sequences = Vec::new();
    for request in &case.requests {
        let (mut sequence, mut names) = match request.shares {
            None => (Sequence::new(&pool), Vec::new()),
            Some((donor, tokens)) => {
                let (sequence, names) = &donors[donor];
                let shared = sequence.share_prefix(tokens).unwrap();
                (shared, names[..tokens].to_vec())
            }
        };
        let own: Vec<u64> = (0..request.own).map(|_| name()).collect();
        fill(stream, &mut attention, &mut sequence, &own, kv_heads);
        names.extend(own);
        names.extend((0..request.new).map(|_| name()));
        let grown = sequence.grow(request.new).unwrap();
        attention.cache_mut().copy_blocks(stream, &grown.copies).unwrap();
        sequences.push((sequence, names));
    }
    let batch: Vec<BatchRequest<'_>> = sequences
        .iter()
        .zip(&case.requests)
        .map(|((sequence, _), request)| BatchRequest::of(sequence, request.new).prompt_len(request.prompt))
        .collect();
    let settings = BatchSettings::of(attention.cache(), case.causality).policy(StatePolicy::new(true, None));
    let mut metadata = AttentionMetadata::new(&batch, settings).unwrap();
    metadata.pad_to(metadata.tokens() + case.pad).unwrap();
    let mut tokens: Vec<u64> = Vec::new();
    for ((_, names), request) in sequences.iter().zip(&case.requests) {
        tokens.extend(&names[names.len() - request.new..]);
    }
    tokens.resize(metadata.tokens(), 0);
    let sink = sinks.map(|sinks| {
        let sinks: Vec<bf16> = sinks.iter().map(|sink| bf16::from_f64(*sink)).collect();
        stream.upload(&sinks[..heads], [heads]).unwrap()
    });
    let mut step = attention.begin(stream, &metadata).unwrap();
    let mut outputs = Vec::new();
    for layer in 0..LAYERS {
        let query = packed(stream, &tokens, layer, 0, heads);
        let key = packed(stream, &tokens, layer, 1, kv_heads);
        let value = packed(stream, &tokens, layer, 2, kv_heads);
        let mut inputs = LayerInputs::from((&query, &key, &value));
        inputs.learnable_sink = sink.as_deref();
        let output = step.forward(layer, inputs).unwrap();
        outputs.push(output.download(stream).unwrap());
    }
    let selected = step.selected(0).unwrap();
    let refused = selected.refused.iter();
    let ran = Ran {
        name: selected.name,
        refused: refused.map(|r| (r.name, r.why.clone())).collect(),
        metadata: metadata.clone(),
    };
    drop(step);
    for (layer, output) in outputs.iter().enumerate() {
        let mut start = 0;
        for (at, ((_, names), request)) in sequences.iter().zip(&case.requests).enumerate() {
            let new = request.new;
            let cached = names.len() - new;
            let all = (0..new).filter(|row| {
                let near = marks.iter().any(|mark| (cached + row).abs_diff(*mark) < 2);
                near || [0, new / 2, new - 1].contains(row)
            });
            for row in all {
                let position = cached + row;
                let seen = |key: usize| sees(at, layer, position, key);
                let names = &names[..=position];
                let want = dense_with_sinks(names, layer, shape, seen, sinks.unwrap_or(&[]));
                let got = &output[(start + row) * heads * DIM..][..heads * DIM];
                for (got, want) in got.iter().zip(&want) {
                    // Parts are rounded before they are merged.
                    prop_assert!(
                        abs_diff_eq!(got.to_f64(), want, epsilon = 2e-2),
                        "layer {layer}, request {at}, position {position}: {got}, expected {want}, by {}",
                        ran.name
                    );
                }
            }
            start += new;
        }
    }
    drop(batch);
    drop((sequences, donors));
    stream.synchronize().unwrap();
    prop_assert_eq!((pool.held_blocks(), pool.steps_in_flight()), (0, 0));
    Ok(ran)
}
