//! Outputs that share memory with what a layer reads are refused before anything is queued, however many calls
//! compute it.

use crate::harness;

use std::num::NonZeroUsize;

use ascend_attention::attention::PerRequest;
use ascend_attention::{Stream, bf16};
use ascend_serving::kv::{CacheShape, PadPolicy, PagedKvCache, QuantisedType, Sequence};
use ascend_serving::{
    Attention, AttentionMetadata, AttentionShape, Backend, Backends, BatchRequest, BatchSettings, Causality,
    EncoderAttention, Error, LayerMask, NamedMask, StatePolicy, rules,
};

const HEADS: usize = 2;
const DIM: usize = 64;
/// A request that decodes, and one that adds a chunk.
const NEW: [usize; 2] = [1, 3];
const TOKENS: usize = 4;

fn shares_memory(error: &Error) -> bool {
    matches!(
        error,
        Error::Violation(violation)
            if violation.rule == &rules::ARGUMENT_MEMORY
                && violation.given.starts_with("output: ")
                && violation.given.contains("shared with")
    )
}

/// Runs a step with the output at each place of a buffer that has query, key and value behind each other, and behind
/// them.
fn check(stream: &Stream, cache: PagedKvCache<bf16>, backends: Backends<bf16>, mask: &LayerMask) {
    let shape = AttentionShape::new(HEADS, HEADS, DIM);
    let mut attention = Attention::new(shape, cache, backends);
    let settings = BatchSettings::of(attention.cache(), Causality::Causal);
    let settings = settings.policy(StatePolicy::new(true, None));
    let mut sequences = NEW.map(|_| Sequence::new(attention.cache().pool()));
    for (sequence, new) in sequences.iter_mut().zip(NEW) {
        attention.grow(stream, sequence, 5 + new).unwrap();
        attention.cache().mark_computed(sequence, 5).unwrap();
    }
    let requests: Vec<_> = sequences.iter().zip(NEW).map(|(sequence, new)| BatchRequest::of(sequence, new)).collect();
    let mut metadata = AttentionMetadata::new(&requests, settings).unwrap();
    metadata.set_mask(mask.clone());
    let rows = 4 * TOKENS;
    let numbers: Vec<bf16> = (0..rows * HEADS * DIM).map(|at| bf16::from_f32((at % 13) as f32 / 13.0)).collect();
    let buffer = stream.upload(&numbers, [rows, HEADS, DIM]).unwrap();
    let part = |first: usize| buffer.narrow(0, first..first + TOKENS).unwrap();
    let [query, key, value] = [0, 1, 2].map(|at| part(at * TOKENS));
    for first in 0..=rows - TOKENS {
        let mut output = part(first);
        let mut step = attention.begin(stream, &metadata).unwrap();
        let done = step.forward_into(0, (&query, &key, &value), &mut output);
        match first < 3 * TOKENS {
            false => done.unwrap(),
            true => {
                let why = done.unwrap_err();
                assert!(shares_memory(&why), "{why}");
                let kept = part(0).download(stream).unwrap();
                assert_eq!(kept, numbers[..kept.len()], "nothing is computed");
            }
        }
    }
}

fn plain(stream: &Stream) -> PagedKvCache<bf16> {
    let shape = CacheShape::new(1, HEADS, DIM);
    PagedKvCache::new(stream.device(), 4, 128, shape, PadPolicy::SkipNegative).unwrap()
}

#[test]
fn outputs_over_what_a_layer_reads_are_refused_by_every_backend() {
    let stream = harness::stream();
    let causal = LayerMask::from(Causality::Causal);
    let chunk = Causality::Chunk(NonZeroUsize::new(128).unwrap()).into();
    let named = NamedMask::new("causal", |_, token, key| key <= token).into();
    let none = Backends::none;
    check(&stream, plain(&stream), none().with(Backend::Fused), &causal);
    check(&stream, plain(&stream), none().with(Backend::FusedInTwo), &causal);
    check(&stream, plain(&stream), none().with(Backend::CascadePrefill), &causal);
    check(&stream, plain(&stream), none().with(Backend::ChunkedLocal), &chunk);
    check(&stream, plain(&stream), none().with(Backend::NamedMask), &named);
    let shape = CacheShape::new(1, HEADS, DIM);
    let pad = PadPolicy::SkipNegative;
    let quantised = PagedKvCache::quantised_by_token(stream.device(), 4, 128, shape, pad, QuantisedType::Int8).unwrap();
    check(&stream, quantised, none().with(Backend::QuantisedPrefill), &causal);
}

#[test]
fn the_cache_is_no_place_for_an_output() {
    let stream = harness::stream();
    let backends = Backends::none().with(Backend::CascadePrefill).with(Backend::Fused);
    let shape = AttentionShape::new(HEADS, HEADS, DIM);
    let mut attention = Attention::new(shape, plain(&stream), backends);
    let mut sequence = Sequence::new(attention.cache().pool());
    attention.grow(&stream, &mut sequence, 9).unwrap();
    attention.cache().mark_computed(&sequence, 6).unwrap();
    let key = attention.cache().layer(0).unwrap().key.clone();
    let blocks = key.shape().iter().product::<usize>() / (HEADS * DIM);
    let rows = key.reshape([blocks, HEADS, DIM]).unwrap();
    let settings = BatchSettings::of(attention.cache(), Causality::Causal);
    let metadata = AttentionMetadata::new(&[BatchRequest::of(&sequence, 3)], settings).unwrap();
    let ones = stream.upload(&[bf16::ONE; 3 * HEADS * DIM], [3, HEADS, DIM]).unwrap();
    let mut output = rows.narrow(0, 300..303).unwrap();
    let mut step = attention.begin(&stream, &metadata).unwrap();
    let why = step.forward_into(0, (&ones, &ones, &ones), &mut output);
    let why = why.unwrap_err();
    assert!(shares_memory(&why), "{why}");
    step.forward(0, (&ones, &ones, &ones)).unwrap();
}

#[test]
fn outputs_over_what_an_encoder_reads_are_refused() {
    let stream = harness::stream();
    let shape = AttentionShape::new(HEADS, HEADS, DIM);
    let buffer = stream.upload(&[bf16::ZERO; 96 * HEADS * DIM], [96, HEADS, DIM]);
    let buffer = buffer.unwrap();
    let part = |first: usize| buffer.narrow(0, first..first + 24).unwrap();
    let [query, key, value] = [0, 24, 48].map(part);
    let lengths = PerRequest::new(vec![8, 16]).unwrap();
    let encoder = EncoderAttention::plan(shape, &stream, &lengths, (&query, &key, &value)).unwrap();
    for first in [0, 1, 23, 30, 60, 71, 72] {
        let mut output = part(first);
        let done = encoder.launch_into(&stream, (&query, &key, &value), &mut output);
        match first < 72 {
            true => assert!(shares_memory(&done.unwrap_err())),
            false => done.unwrap(),
        }
    }
    stream.synchronize().unwrap();
}
