//! The range check finds the first offender of each tensor of each layer of the steps that it looks at, and nothing
//! else.

use crate::harness;

use std::num::NonZeroUsize;

use ascend_attention::{Stream, Tensor, bf16, f16};
use ascend_serving::kv::{CacheShape, PadPolicy, PagedKvCache, QuantisedType, Sequence};
use ascend_serving::{
    Attention, AttentionMetadata, AttentionShape, Backend, Backends, BatchRequest, BatchSettings, Causality, Error,
    GraphLimits, LatentForm, LatentRows, LatentTensors, LayerGroup, LayerInputs, LayerTensor, RangeCheck, RangeFinding,
    StatePolicy, UpProjected, rules,
};
use proptest::prelude::*;

const LAYERS: usize = 3;
const HEADS: usize = 2;
const DIM: usize = 16;
const ROW: usize = HEADS * DIM;
const INPUTS: [LayerTensor; 3] = [LayerTensor::Query, LayerTensor::Key, LayerTensor::Value];

fn parts(stream: &Stream, layers: usize) -> (AttentionShape, PagedKvCache<f16>, Backends<f16>) {
    let shape = CacheShape::new(layers, HEADS, DIM);
    let cache = PagedKvCache::new(stream.device(), 16, 128, shape, PadPolicy::SkipNegative).unwrap();
    (AttentionShape::new(HEADS, HEADS, DIM), cache, Backends::none().with(Backend::Fused))
}

fn attention(stream: &Stream, layers: usize) -> Attention<f16> {
    let (shape, cache, backends) = parts(stream, layers);
    Attention::new(shape, cache, backends)
}

/// A number at a place of a layer's tensor.
#[derive(Clone, Copy, Debug)]
struct Bad {
    layer: usize,
    tensor: usize,
    at: usize,
    value: f32,
}

fn bad() -> impl Strategy<Value = Bad> {
    let value = prop_oneof![Just(f32::NAN), Just(f32::INFINITY), Just(-2e4f32), Just(2e4f32)];
    (0..LAYERS, 0..3usize, any::<usize>(), value).prop_map(|(layer, tensor, at, value)| Bad {
        layer,
        tensor,
        at,
        value,
    })
}

/// Rows of ones with the bad numbers of a layer's tensor, of which the last holds where several are at one place.
fn rows(tokens: usize, layer: usize, tensor: usize, bad: &[Bad]) -> Vec<f16> {
    let mut rows = vec![f16::ONE; tokens * ROW];
    for of in bad {
        if (of.layer, of.tensor) == (layer, tensor) {
            rows[of.at % (tokens * ROW)] = f16::from_f32(of.value);
        }
    }
    rows
}

/// What a check by this limit finds in rows first: place and number.
fn first(rows: &[f16], limit: f64) -> Option<(usize, f64)> {
    let numbers = rows.iter().map(|of| of.to_f64());
    let mut bad = numbers.enumerate();
    bad.find(|(_, of)| !of.is_finite() || of.abs() > limit)
}

fn same(found: f64, wanted: f64) -> bool {
    found == wanted || found.is_nan() && wanted.is_nan()
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(48) })]

    /// Steps of random requests, with padding that holds NaN, of which each `every`-th is looked at.
    #[test]
    fn each_tensor_s_first_offender_is_found(
        lengths in prop::collection::vec(1usize..40, 1..5),
        steps in prop::collection::vec(prop::collection::vec(bad(), 0..6), 1..5),
        every in 1usize..4,
        limit in prop::sample::select(vec![1e4, f64::INFINITY]),
        padding in 0usize..3,
        by_graphs: bool,
    ) {
        let stream = harness::stream();
        let mut attention = attention(&stream, LAYERS);
        let check = RangeCheck::sampled(NonZeroUsize::new(every).unwrap()).limit(limit);
        let limits = GraphLimits::new([5], 200).tokens_each(40);
        let mut graphs =
            by_graphs.then(|| attention.capture(&stream, Causality::Causal, &limits).unwrap());
        attention.set_range_check(check).unwrap();
        let mut sequences: Vec<Sequence> = lengths.iter().map(|_| Sequence::new(attention.cache().pool())).collect();
        let tokens: usize = lengths.iter().sum();
        let padded = tokens + padding;
        let mut found: Vec<RangeFinding> = Vec::new();
        let mut wanted = Vec::new();
        for (step, bad) in steps.iter().enumerate() {
            for (sequence, length) in sequences.iter_mut().zip(&lengths) {
                attention.grow(&stream, sequence, *length).unwrap();
            }
            let requests: Vec<_> = sequences.iter().zip(&lengths).map(|(sequence, length)| BatchRequest::of(sequence, *length)).collect();
            let mut metadata = AttentionMetadata::new(&requests, BatchSettings::of(attention.cache(), Causality::Causal)).unwrap();
            let mut begun = match &mut graphs {
                Some(graphs) => graphs.begin(&stream, &mut metadata).unwrap(),
                None => {
                    if padding > 0 {
                        metadata.pad_to(padded).unwrap();
                    }
                    attention.begin(&stream, &metadata).unwrap()
                }
            };
            let padded = begun.tokens();
            for layer in 0..LAYERS {
                let given: Vec<Vec<f16>> = (0..3).map(|tensor| rows(tokens, layer, tensor, bad)).collect();
                let [query, key, value] = [0, 1, 2].map(|tensor| {
                    let mut rows: Vec<f16> = given[tensor].clone();
                    rows.resize(padded * ROW, f16::NAN);
                    stream.upload(&rows, [padded, HEADS, DIM]).unwrap()
                });
                let output = begun.forward(layer, (&query, &key, &value)).unwrap().clone();
                if step % every != 0 {
                    continue;
                }
                let output = output.download(&stream).unwrap();
                let all = given.iter().map(Vec::as_slice).chain([&output[..tokens * ROW]]);
                for (tensor, rows) in INPUTS.into_iter().chain([LayerTensor::Output]).zip(all) {
                    if let Some((at, value)) = first(rows, limit) {
                        wanted.push((step, layer, tensor, at, value));
                    }
                }
            }
            drop(begun);
            found.extend(attention.range_findings().unwrap());
        }
        found.extend(attention.await_range_findings().unwrap());
        prop_assert_eq!(found.len(), wanted.len(), "{:?}\n{:?}", &found, &wanted);
        for (found, (step, layer, tensor, at, value)) in found.iter().zip(wanted) {
            prop_assert_eq!((found.step, found.layer, found.tensor), (step as u64, layer, tensor));
            prop_assert!(same(found.value, value), "{found}");
            let before: usize = lengths[..found.request].iter().sum();
            prop_assert!(found.token < lengths[found.request]);
            prop_assert_eq!(((before + found.token) * HEADS + found.head) * DIM + found.element, at);
            prop_assert_eq!(found.report.first, Some(at));
        }
        prop_assert!(attention.await_range_findings().unwrap().is_empty(), "findings are taken once");
    }
}

/// One step of one token whose query is infinite in each layer.
fn step(stream: &Stream, attention: &mut Attention<f16>, sequence: &mut Sequence, layers: usize) {
    attention.grow(stream, sequence, 1).unwrap();
    let settings = BatchSettings::of(attention.cache(), Causality::Causal);
    let metadata = AttentionMetadata::new(&[BatchRequest::of(sequence, 1)], settings).unwrap();
    let upload = |of: f16| stream.upload(&[of; ROW], [1, HEADS, DIM]).unwrap();
    let (bad, ones) = (upload(f16::INFINITY), upload(f16::ONE));
    let mut begun = attention.begin(stream, &metadata).unwrap();
    for layer in 0..layers {
        begun.forward(layer, (&bad, &ones, &ones)).unwrap();
    }
}

#[test]
fn a_check_is_set_and_taken_off() {
    let stream = harness::stream();
    let mut attention = attention(&stream, 1);
    let mut sequence = Sequence::new(attention.cache().pool());
    step(&stream, &mut attention, &mut sequence, 1);
    assert!(attention.await_range_findings().unwrap().is_empty());

    for limit in [-1.0, f64::NAN] {
        let check = RangeCheck::always().limit(limit);
        let refused = attention.set_range_check(check).unwrap_err();
        let named = matches!(
            &refused,
            Error::Violation(violation)
                if violation.rule.id == "argument.value"
                    && violation.given.starts_with("RangeCheck.limit: ")
        );
        assert!(named, "{refused}");
    }

    attention.set_range_check(RangeCheck::always()).unwrap();
    step(&stream, &mut attention, &mut sequence, 1);
    let found = attention.await_range_findings().unwrap();
    assert_eq!(found[0].report.inf, ROW);
    let told = found[0].to_string();
    assert!(
        told.starts_with(
            "step 0, layer 0, query: inf at element 0 of head 0 of token 0 of request 0; 0 NaN, 32 infinite"
        ),
        "{told}"
    );

    attention.set_range_check(None).unwrap();
    step(&stream, &mut attention, &mut sequence, 1);
    assert!(attention.await_range_findings().unwrap().is_empty());
}

/// A cache whose scales are made by the host refuses what is not finite, and the check says where it is.
#[test]
fn what_cannot_be_quantised_is_found() {
    let stream = harness::stream();
    let shape = CacheShape::new(1, HEADS, 64);
    let pad = PadPolicy::SkipNegative;
    let cache = PagedKvCache::quantised_by_token(stream.device(), 4, 128, shape, pad, QuantisedType::Int8).unwrap();
    let backends = Backends::none().with(Backend::QuantisedPrefill);
    let mut attention = Attention::<f16>::new(AttentionShape::new(HEADS, HEADS, 64), cache, backends);
    attention.set_range_check(RangeCheck::always()).unwrap();
    let mut sequence = Sequence::new(attention.cache().pool());
    attention.grow(&stream, &mut sequence, 4).unwrap();
    let settings = BatchSettings::of(attention.cache(), Causality::Causal);
    let metadata = AttentionMetadata::new(&[BatchRequest::of(&sequence, 4)], settings).unwrap();
    let mut numbers = [f16::ONE; 4 * HEADS * 64];
    let ones = stream.upload(&numbers, [4, HEADS, 64]).unwrap();
    numbers[(2 * HEADS + 1) * 64 + 9] = f16::NAN;
    let bad = stream.upload(&numbers, [4, HEADS, 64]).unwrap();
    let mut step = attention.begin(&stream, &metadata).unwrap();
    let why = step.forward(0, (&ones, &bad, &ones)).unwrap_err();
    assert!(why.breaks(&rules::QUANTISED_FINITE), "{why}");
    drop(step);
    let found = attention.await_range_findings().unwrap();
    let told: Vec<_> = found.iter().map(|of| (of.tensor, of.token, of.head, of.element)).collect();
    assert_eq!(told, [(LayerTensor::Key, 2, 1, 9)]);
}

/// More steps than findings are kept of, which are never taken.
#[test]
fn the_first_findings_are_kept() {
    let stream = harness::stream();
    let mut attention = attention(&stream, LAYERS);
    attention.set_range_check(RangeCheck::always()).unwrap();
    let mut sequence = Sequence::new(attention.cache().pool());
    for _ in 0..100 {
        step(&stream, &mut attention, &mut sequence, LAYERS);
    }
    let found = attention.await_range_findings().unwrap();
    assert_eq!((found.len(), found[0].step), (256, 0));
}

#[test]
fn groups_tell_the_layers_of_the_model() {
    let stream = harness::stream();
    let window = Causality::Window(NonZeroUsize::new(8).unwrap());
    let group = |layers: &[usize], causality| {
        let (shape, cache, backends) = parts(&stream, layers.len());
        LayerGroup::new(layers.iter().copied(), causality, shape, cache, backends)
    };
    let mut attention = Attention::of_groups(3, [group(&[0, 2], Causality::Causal), group(&[1], window)]).unwrap();
    attention.set_range_check(RangeCheck::always()).unwrap();
    let mut sequence = attention.sequence();
    attention.grow(&stream, &mut sequence, 1).unwrap();
    let request = BatchRequest::of(&sequence, 1);
    let metadata = attention.metadata(&[request], StatePolicy::default()).unwrap();
    let upload = |of: f16| stream.upload(&[of; ROW], [1, HEADS, DIM]).unwrap();
    let (bad, ones) = (upload(f16::NAN), upload(f16::ONE));
    let mut begun = attention.begin(&stream, &metadata).unwrap();
    for layer in 0..3 {
        begun.forward(layer, (&ones, &ones, &bad)).unwrap();
    }
    drop(begun);
    let found = attention.await_range_findings().unwrap();
    let told: Vec<_> = found.iter().map(|of| (of.layer, of.tensor)).collect();
    let both = |layer| [(layer, LayerTensor::Value), (layer, LayerTensor::Output)];
    assert_eq!(told, [0, 1, 2].map(both).concat());
}

/// Latent attention: two requests that decode, one with a prompt of three tokens, and a token of padding.
mod latent {
    use super::*;

    const HEADS: usize = 2;
    const LATENT: usize = 512;
    const ROPE: usize = 64;
    const DIM: usize = 128;
    const NEW: [usize; 3] = [1, 1, 3];
    const PADDED: usize = 6;

    #[derive(Clone, Copy, Debug, PartialEq)]
    enum Form {
        Absorbed,
        Plain,
        Mixed,
    }

    /// A token of the step, a head of it and an element of this head.
    type Place = [usize; 3];

    /// `[tokens, heads, dim]` of the step's tokens from the first on, with NaN in the padding, and at a place.
    fn rows(
        stream: &Stream,
        (first, tokens): (usize, usize),
        heads: usize,
        dim: usize,
        nan: Option<Place>,
    ) -> Tensor<bf16> {
        let mut rows = vec![bf16::ONE; tokens * heads * dim];
        let actual: usize = NEW.iter().sum();
        for (at, row) in rows.chunks_mut(heads * dim).enumerate() {
            if first + at >= actual {
                row.fill(bf16::NAN);
            }
        }
        if let Some([token, head, element]) = nan
            && (first..first + tokens).contains(&token)
        {
            rows[((token - first) * heads + head) * dim + element] = bf16::NAN;
        }
        stream.upload(&rows, [tokens, heads, dim]).unwrap()
    }

    /// What is found in a step with one NaN.
    fn found(form: Form, tensor: LayerTensor, place: Place) -> Vec<RangeFinding> {
        let stream = harness::stream();
        let pad = PadPolicy::SkipNegative;
        let cache = PagedKvCache::new(stream.device(), 4, 128, CacheShape::latent(1), pad);
        let backends = Backends::none().with(Backend::MLA_256_MIB);
        let mut attention = Attention::<bf16>::new(AttentionShape::latent(HEADS), cache.unwrap(), backends);
        attention.set_range_check(RangeCheck::always()).unwrap();
        let settings = BatchSettings::of(attention.cache(), Causality::Causal);
        let blocks = [[0], [1], [2]];
        let requests = [(9, 0), (5, 1), (0, 2)].map(|(cached, at)| BatchRequest::in_row(&blocks[at], cached, NEW[at]));
        let mut metadata = AttentionMetadata::new(&requests, settings).unwrap();
        metadata.pad_to(PADDED).unwrap();
        let nan = |of: LayerTensor| (of == tensor).then_some(place);
        let split = match form {
            Form::Absorbed => PADDED,
            Form::Plain => 0,
            Form::Mixed => metadata.decode_tokens(),
        };
        let rest = PADDED - split;
        let query = nan(LayerTensor::Query);
        let absorbed = rows(&stream, (0, split), HEADS, LATENT, query);
        let plain = rows(&stream, (split, rest), HEADS, DIM, query);
        let decoded = Tensor::empty(stream.device(), [HEADS, split, LATENT]).unwrap();
        let projection = |stream: &Stream, _: usize, of: LatentRows<'_, bf16>, out: &UpProjected<bf16>| {
            let tokens = of.latent.shape()[0];
            for (to, dim) in [(&out.key, DIM), (&out.key_rope, ROPE), (&out.value, DIM)] {
                to.overwrite(stream, &vec![bf16::ONE; tokens * HEADS * dim])?;
            }
            Ok(())
        };
        let (query, form) = match form {
            Form::Absorbed => (&absorbed, LatentForm::Absorbed),
            Form::Plain => (&plain, LatentForm::Plain(&projection)),
            Form::Mixed => {
                let (absorbed, decoded) = (&absorbed, &decoded);
                let form = LatentForm::Mixed { absorbed, decoded, projection: &projection };
                (&plain, form)
            }
        };
        let all = (0, PADDED);
        let query_rope = rows(&stream, all, HEADS, ROPE, nan(LayerTensor::QueryRope));
        let latent = rows(&stream, all, 1, LATENT, nan(LayerTensor::Key));
        let key_rope = rows(&stream, all, 1, ROPE, nan(LayerTensor::Value));
        let tensors = LatentTensors { query_rope: &query_rope, form };
        let mut step = attention.begin(&stream, &metadata).unwrap();
        step.forward(0, LayerInputs::latent(query, &latent, &key_rope, tensors)).unwrap();
        drop(step);
        attention.await_range_findings().unwrap()
    }

    /// A NaN in a head of a query is found there and in that head of the output, of the same token.
    #[test]
    fn heads_and_tokens_of_queries_and_outputs_are_told_apart() {
        for form in [Form::Absorbed, Form::Plain, Form::Mixed] {
            for (tensor, element) in [(LayerTensor::Query, 100), (LayerTensor::QueryRope, 63)] {
                for (token, request, of_request) in [(0, 0, 0), (1, 1, 0), (2, 2, 0), (4, 2, 2)] {
                    for head in 0..HEADS {
                        let found = found(form, tensor, [token, head, element]);
                        let told: Vec<_> =
                            found.iter().map(|of| (of.tensor, of.request, of.token, of.head, of.element)).collect();
                        let place = |tensor, element| (tensor, request, of_request, head, element);
                        let wanted = [place(tensor, element), place(LayerTensor::Output, 0)];
                        assert_eq!(told, wanted, "{form:?} {tensor:?} {token} {head}");
                        assert_eq!(found[0].report.nan, 1);
                    }
                }
            }
        }
    }

    #[test]
    fn latents_and_rotary_keys_are_told_apart() {
        for form in [Form::Absorbed, Form::Plain, Form::Mixed] {
            for (tensor, element) in [(LayerTensor::Key, 511), (LayerTensor::Value, 7)] {
                let found = found(form, tensor, [3, 0, element]);
                let first = &found[0];
                assert_eq!((first.tensor, first.request, first.token), (tensor, 2, 1), "{form:?}");
                assert_eq!((first.head, first.element, first.report.nan), (0, element, 1));
            }
        }
    }
}
