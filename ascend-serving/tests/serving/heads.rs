//! Heads of a model, of its cache and of a layer's tensors: what does not go together is refused where it is first
//! said, and values may be narrower than keys where a call takes that.

use crate::harness;
use approx::assert_abs_diff_eq;

use std::num::NonZeroUsize;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use ascend_attention::attention::PerRequest;
use ascend_attention::{Stream, Tensor, bf16};
use ascend_serving::kv::{CacheShape, PadPolicy, PagedKvCache, Sequence};
use ascend_serving::{
    Attention, AttentionMetadata, AttentionShape, AttentionState, Backend, Backends, BatchRequest, BatchSettings,
    Causality, CrossAttention, EncoderAttention, Error, GraphLimits, LayerInputs, LayerMask, NamedMask,
};

fn cache(stream: &Stream, kv_heads: usize, [key, value]: [usize; 2]) -> PagedKvCache<bf16> {
    let shape = CacheShape::new(1, kv_heads, key).value_dim(value);
    PagedKvCache::new(stream.device(), 8, 128, shape, PadPolicy::SkipNegative).unwrap()
}

fn rows(stream: &Stream, tokens: usize, heads: usize, dim: usize) -> Tensor<bf16> {
    let numbers = (0..tokens * heads * dim).map(|at| bf16::from_f32((at % 31) as f32 / 31.0 - 0.5));
    let numbers: Vec<bf16> = numbers.collect();
    stream.upload(&numbers, [tokens, heads, dim]).unwrap()
}

fn names(error: &Error, wanted: &str) -> bool {
    matches!(
        &error,
        Error::Violation(violation)
            if violation.rule.id == "argument.value"
                && violation.given.starts_with(&format!("{wanted}: "))
    )
}

#[test]
fn heads_that_do_not_divide_are_refused_where_they_are_said() {
    let stream = harness::stream();
    for (heads, kv_heads) in [(4, 3), (5, 2), (2, 4), (0, 1), (1, 0), (0, 0)] {
        let shape = AttentionShape::new(heads, kv_heads, 64);
        let of_cache = || cache(&stream, kv_heads.max(1), [64; 2]);
        let mut attention = Attention::new(shape, of_cache(), Backends::none().with(Backend::Fused));
        let mut sequence = Sequence::new(attention.cache().pool());
        attention.grow(&stream, &mut sequence, 3).unwrap();
        let settings = BatchSettings::of(attention.cache(), Causality::Causal);
        let metadata = AttentionMetadata::new(&[BatchRequest::of(&sequence, 3)], settings).unwrap();
        let limits = GraphLimits::new([1], 100);
        let (lengths, rows) = (PerRequest::new(vec![1]).unwrap(), stream.upload(&[bf16::ONE; 64], [1, 1, 64]).unwrap());
        let refused = [
            EncoderAttention::plan(shape, &stream, &lengths, (&rows, &rows, &rows)).map(drop),
            CrossAttention::new(shape, of_cache()).map(drop),
            attention.capture(&stream, Causality::Causal, &limits).map(drop),
            attention.backend_choices(&stream, 0, Causality::Causal, None).map(drop),
            attention.backend_choice(&stream, &metadata, 0, None, None).map(drop),
            attention.begin(&stream, &metadata).map(drop),
        ];
        for (at, outcome) in refused.into_iter().enumerate() {
            let why = outcome.unwrap_err();
            assert!(names(&why, "AttentionShape.heads"), "{heads} {kv_heads}, {at}: {why}");
        }
    }
}

#[test]
fn a_cache_of_other_heads_is_refused() {
    let stream = harness::stream();
    let shape = AttentionShape::new(4, 2, 64);
    for (kv_heads, dim) in [(1, 128), (2, 128), (4, 64)] {
        let of_cache = || cache(&stream, kv_heads, [dim; 2]);
        let why = CrossAttention::new(shape, of_cache()).unwrap_err();
        assert!(names(&why, "AttentionShape"), "{why}");
        let mut attention = Attention::new(shape, of_cache(), Backends::none().with(Backend::Fused));
        let why = attention.backend_choices(&stream, 0, Causality::Causal, None);
        assert!(names(&why.unwrap_err(), "AttentionShape"));
        let settings = BatchSettings::of(attention.cache(), Causality::Causal);
        let sequence = {
            let mut sequence = Sequence::new(attention.cache().pool());
            attention.grow(&stream, &mut sequence, 3).unwrap();
            sequence
        };
        let metadata = AttentionMetadata::new(&[BatchRequest::of(&sequence, 3)], settings).unwrap();
        let why = attention.begin(&stream, &metadata).unwrap_err();
        assert!(names(&why, "AttentionShape"), "{why}");
    }
}

/// One step of a request with `cached` tokens and `new` ones: who serves it, and its output.
fn step(
    stream: &Stream,
    dims: [usize; 2],
    backends: Backends<bf16>,
    causality: Causality,
    [cached, new]: [usize; 2],
) -> Result<(&'static str, Tensor<bf16>), Error> {
    let (heads, kv_heads) = (4, 2);
    let shape = AttentionShape::new(heads, kv_heads, dims[0]);
    let mut attention = Attention::new(shape, cache(stream, kv_heads, dims), backends);
    let mut sequence = Sequence::new(attention.cache().pool());
    attention.grow(stream, &mut sequence, cached + new)?;
    attention.cache().mark_computed(&sequence, cached)?;
    let settings = BatchSettings::of(attention.cache(), causality);
    let metadata = AttentionMetadata::new(&[BatchRequest::of(&sequence, new)], settings)?;
    let query = rows(stream, new, heads, dims[0]);
    let [key, value] = dims.map(|dim| rows(stream, new, kv_heads, dim));
    let mut step = attention.begin(stream, &metadata)?;
    let output = step.forward(0, (&query, &key, &value))?.clone();
    Ok((step.selected(0).unwrap().name, output))
}

#[test]
fn values_may_have_other_heads_than_keys_where_a_call_takes_that() {
    let stream = harness::stream();
    let all = || Backends::none().with(Backend::PagedDecode).with(Backend::Fused);
    let (mut served, mut compared) = (0, 0);
    for dims in [[192, 128], [128, 64], [64, 128], [128, 192], [128, 128]] {
        let attention = Attention::new(AttentionShape::new(4, 2, dims[0]), cache(&stream, 2, dims), all());
        for choice in attention.backend_choices(&stream, 0, Causality::Causal, None).unwrap() {
            let tokens = match choice.state {
                AttentionState::PrefillNoCache => [0, 5],
                AttentionState::PrefillCacheHit => [3, 5],
                AttentionState::DecodeOnly => [3, 1],
                _ => continue,
            };
            let ran = step(&stream, dims, all(), Causality::Causal, tokens);
            match (ran, choice.served) {
                (Ok((name, output)), said) => {
                    assert_eq!(Ok(name), said, "{dims:?} {tokens:?}");
                    assert_eq!(output.shape(), [tokens[1], 4, dims[1]]);
                    // Both ways to compute a single token, where there are two.
                    let fused = Backends::none().with(Backend::Fused);
                    if let Ok((_, other)) = step(&stream, dims, fused, Causality::Causal, tokens) {
                        let numbers = |rows: &Tensor<bf16>| rows.download(&stream).unwrap();
                        let pairs = numbers(&output).into_iter().zip(numbers(&other));
                        for (one, other) in pairs {
                            assert_abs_diff_eq!(one.to_f32(), other.to_f32(), epsilon = 1e-2);
                        }
                        compared += usize::from(name != "fused");
                    }
                    served += 1;
                }
                (Err(why), said) => assert!(said.is_err(), "{dims:?} {tokens:?}: {why}"),
            }
        }
    }
    assert!(served >= 3);
    assert!(compared > 0);
}

#[test]
fn windows_larger_than_any_request_hide_nothing() {
    let stream = harness::stream();
    let fused = || Backends::none().with(Backend::Fused);
    let run = |causality| {
        let (_, output) = step(&stream, [64; 2], fused(), causality, [9, 4]).unwrap();
        output.download(&stream).unwrap()
    };
    let window = |keys| Causality::Window(NonZeroUsize::new(keys).unwrap());
    let causal = run(Causality::Causal);
    for keys in [usize::MAX, 1 << 32, 1 << 31] {
        assert_eq!(run(window(keys)), causal, "{keys}");
    }
}

#[test]
fn a_rule_that_changed_is_asked_again_when_its_tensors_are_forgotten() {
    let stream = harness::stream();
    let hidden = Arc::new(AtomicUsize::new(0));
    let rule = hidden.clone();
    let mask = NamedMask::new("all but one key", move |_, token, key| {
        key <= token && (key != rule.load(Ordering::Relaxed) || key == token)
    });
    let mut attention = Attention::new(
        AttentionShape::new(1, 1, 64),
        cache(&stream, 1, [64; 2]),
        Backends::none().with(Backend::NamedMask),
    );
    let mut sequence = Sequence::new(attention.cache().pool());
    attention.grow(&stream, &mut sequence, 4).unwrap();
    let settings = BatchSettings::of(attention.cache(), Causality::Causal);
    let request = BatchRequest::of(&sequence, 4).recompute();
    let metadata = AttentionMetadata::new(&[request], settings).unwrap();
    let all = rows(&stream, 4, 1, 64);
    let of = LayerMask::from(mask.clone());
    let mut run = || {
        let mut step = attention.begin(&stream, &metadata).unwrap();
        let output = step.forward(0, LayerInputs::from((&all, &all, &all)).mask(&of)).unwrap();
        output.download(&stream).unwrap()
    };
    let first = run();
    assert!(mask.kept_bytes() > 0);
    hidden.store(2, Ordering::Relaxed);
    mask.forget();
    assert_eq!(mask.kept_bytes(), 0);
    let second = run();
    assert_eq!(first[..64], second[..64], "the first token sees itself alone");
    assert_ne!(first[3 * 64..], second[3 * 64..]);
}
