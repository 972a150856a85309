//! Cross attention: whatever the encoders' lengths and the decoder's steps, each token sees all encoder keys of its
//! request and no others.

use crate::harness;
use crate::tokens::{DIM, dense, packed};
use approx::abs_diff_eq;
use ascend_attention::spec::Rule;

use ascend_attention::spec::Cann;
use ascend_attention::{Stream, bf16};
use ascend_serving::kv::{Cache, CacheShape, PadPolicy, PagedKvCache, QuantisedType, Sequence};
use ascend_serving::{
    AttentionMetadata, AttentionShape, BatchRequest, BatchSettings, Causality, CrossAttention, Encoding, Error, rules,
};
use proptest::prelude::*;

const LAYERS: usize = 2;
const BLOCKS: usize = 40;

fn cache(stream: &Stream, kv_heads: usize, format: Cache) -> PagedKvCache<bf16> {
    let shape = CacheShape::new(LAYERS, kv_heads, DIM).format(format);
    PagedKvCache::new(stream.device(), BLOCKS, 128, shape, PadPolicy::SkipNegative).unwrap()
}

/// A model: its encoder keys, and the cache that the decoder's own tokens would be in.
struct Model {
    stream: Stream,
    cross: CrossAttention<bf16>,
    own: PagedKvCache<bf16>,
}

/// A request: what its encoder saw, by name, and the tokens of its decoder.
struct Request {
    encoded: Sequence,
    encoder: Vec<u64>,
    decoder: Sequence,
}

impl Model {
    fn new(stream: Stream, kv_heads: usize, group: usize, format: Cache) -> Self {
        let shape = AttentionShape::new(kv_heads * group, kv_heads, DIM);
        let cross = CrossAttention::new(shape, cache(&stream, kv_heads, format)).unwrap();
        let own = cache(&stream, kv_heads, Cache::BnBsH);
        Self { stream, cross, own }
    }

    fn request(&self) -> Request {
        Request {
            encoded: Sequence::new(self.cross.cache().pool()),
            encoder: Vec::new(),
            decoder: Sequence::new(self.own.pool()),
        }
    }

    /// Encodes these tokens of these requests at once.
    fn encode(&mut self, requests: &mut [Request], new: &[Vec<u64>]) {
        let kv_heads = self.cross.shape().kv_heads;
        let mut rows: Vec<(&mut Sequence, usize)> = requests
            .iter_mut()
            .zip(new)
            .map(|(request, new)| {
                request.encoder.extend(new);
                (&mut request.encoded, new.len())
            })
            .collect();
        let names: Vec<u64> = new.iter().flatten().copied().collect();
        if names.is_empty() {
            return;
        }
        let mut encoding = self.cross.encode(&self.stream, &mut rows).unwrap();
        for layer in 0..LAYERS {
            let [key, value] = [1, 2].map(|what| packed(&self.stream, &names, layer, what, kv_heads));
            encoding.write(layer, &key, &value).unwrap();
        }
    }

    fn metadata(&self, requests: &mut [Request], new: &[usize], pad: usize) -> AttentionMetadata {
        for (request, new) in requests.iter_mut().zip(new) {
            let _ = request.decoder.grow(*new).unwrap();
        }
        let settings = BatchSettings::of(&self.own, Causality::Causal);
        let batch: Vec<BatchRequest<'_>> =
            (requests.iter().zip(new)).map(|(request, new)| BatchRequest::of(&request.decoder, *new)).collect();
        let mut metadata = AttentionMetadata::new(&batch, settings).unwrap();
        metadata.pad_to(metadata.tokens() + pad).unwrap();
        metadata
    }

    /// A step with this number of new tokens of each request, against the definition.
    fn step(&mut self, requests: &mut [Request], new: &[usize], pad: usize) {
        let metadata = self.metadata(requests, new, pad);
        let encoded: Vec<&Sequence> = requests.iter().map(|request| &request.encoded).collect();
        let shape = self.cross.shape();
        let names: Vec<u64> = (0..metadata.tokens() as u64).map(|at| 5000 + at).collect();
        let mut outputs = Vec::new();
        let mut step = self.cross.begin(&self.stream, &metadata, &encoded).unwrap();
        for layer in 0..LAYERS {
            let query = packed(&self.stream, &names, layer, 0, shape.heads);
            outputs.push(step.forward(layer, &query).unwrap());
        }
        drop(step);
        let width = shape.heads * DIM;
        for (layer, output) in outputs.iter().enumerate() {
            let got = output.download(&self.stream).unwrap();
            let mut at = 0;
            for (request, new) in requests.iter().zip(new) {
                for _ in 0..*new {
                    let keys = request.encoder.len();
                    let all = [&request.encoder[..], &[names[at]]].concat();
                    let want = match keys {
                        0 => vec![0.0; width],
                        _ => dense(&all, layer, shape, |key| key < keys),
                    };
                    for (got, want) in got[at * width..][..width].iter().zip(&want) {
                        assert!(
                            abs_diff_eq!(got.to_f64(), want, epsilon = 1e-2),
                            "layer {layer}, token {at}, {keys} keys: {got}, expected {want}"
                        );
                    }
                    at += 1;
                }
            }
            assert!(got[at * width..].iter().all(|x| x.to_f64() == 0.0), "padding");
        }
    }
}

/// Names of a request's encoder tokens, other ones for each.
fn names(request: usize, first: usize, count: usize) -> Vec<u64> {
    (first..first + count).map(|at| (1000 * request + at) as u64).collect()
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(32) })]

    #[test]
    fn each_token_sees_the_encoder_keys_of_its_request(
        (kv_heads, group) in (1usize..3, 1usize..4),
        format in prop::sample::select(&[Cache::BnBsH, Cache::BnNBsD, Cache::Nz][..]),
        lengths in prop::collection::vec((0usize..300, 0usize..40), 1..5),
        steps in prop::collection::vec((prop::collection::vec(1usize..6, 4), 0usize..9), 1..4),
    ) {
        let mut model = Model::new(harness::stream(), kv_heads, group, format);
        let mut requests: Vec<Request> = lengths.iter().map(|_| model.request()).collect();
        let of = |first: fn(&(usize, usize)) -> (usize, usize)| -> Vec<Vec<u64>> {
            let each = lengths.iter().enumerate();
            each.map(|(at, lengths)| { let (from, count) = first(lengths); names(at, from, count) }).collect()
        };
        model.encode(&mut requests, &of(|(one, _)| (0, *one)));
        for (at, (new, pad)) in steps.iter().enumerate() {
            model.step(&mut requests, &new[..lengths.len()], *pad);
            if at == 0 {
                // More of the encoder arrives while the decoder runs, as in streaming.
                model.encode(&mut requests, &of(|(one, two)| (*one, *two)));
            }
            model.step(&mut requests, &vec![1; lengths.len()], 0);
        }
        drop(requests);
        model.stream.synchronize().unwrap();
        prop_assert_eq!(model.cross.cache().pool().held_blocks(), 0);
        prop_assert_eq!(model.cross.cache().pool().steps_in_flight(), 0);
    }
}

#[test]
fn every_release_serves_decoding_and_prompts() {
    for cann in Cann::ALL {
        let Some(stream) = harness::stream_of(cann) else {
            continue;
        };
        let mut model = Model::new(stream, 1, 2, Cache::BnBsH);
        let mut requests = [model.request(), model.request(), model.request()];
        model.encode(&mut requests, &[names(0, 0, 150), Vec::new(), names(2, 0, 1)]);
        model.step(&mut requests, &[4, 1, 2], 3);
        model.step(&mut requests, &[1, 1, 1], 0);
    }
}

#[test]
fn beams_share_the_keys_of_their_encoder() {
    let mut model = Model::new(harness::stream(), 1, 1, Cache::BnBsH);
    let mut first = [model.request()];
    model.encode(&mut first, &[names(0, 0, 200)]);
    let held = model.cross.cache().pool().held_blocks();
    let [first] = first;
    let beam = |first: &Request, model: &Model| Request {
        encoded: first.encoded.fork(),
        encoder: first.encoder.clone(),
        decoder: Sequence::new(model.own.pool()),
    };
    let mut beams = [beam(&first, &model), beam(&first, &model), first];
    model.step(&mut beams, &[1, 2, 1], 0);
    assert_eq!(model.cross.cache().pool().held_blocks(), held);
}

fn rule<T: std::fmt::Debug>(outcome: Result<T, Error>) -> &'static Rule {
    match outcome {
        Err(Error::Violation(refused)) => refused.rule,
        other => panic!("{other:?}"),
    }
}

#[test]
fn what_cannot_be_is_refused_by_name() {
    let mut model = Model::new(harness::stream(), 1, 1, Cache::BnBsH);
    let mut requests = [model.request(), model.request()];
    model.encode(&mut requests, &[names(0, 0, 300), names(1, 0, 4)]);
    let metadata = model.metadata(&mut requests, &[1, 2], 0);
    let Model { stream, cross, own } = &mut model;
    let [one, two] = &requests;
    let mut none = metadata.clone();
    assert!(none.renew(&[BatchRequest::of(&requests[0].decoder, 0)]).is_err());
    let encoded = [&requests[0].encoded, &requests[1].encoded];
    assert_eq!(rule(cross.begin(stream, &none, &encoded)), &rules::BATCH_EMPTY);
    let begin = |encoded: &[&Sequence]| rule(cross.begin(stream, &metadata, encoded));
    assert_eq!(begin(&[&one.encoded]), &rules::LENGTHS_BATCH);
    let strange = Sequence::new(own.pool());
    assert_eq!(begin(&[&one.encoded, &strange]), &rules::BLOCK_POOL);
    let mut cut = one.encoded.fork();
    cut.drop_before(128).unwrap();
    assert_eq!(begin(&[&cut, &two.encoded]), &rules::BLOCK_WINDOW);
    let mut grown = two.encoded.fork();
    let _uncopied = grown.grow(1).unwrap();
    assert_eq!(begin(&[&one.encoded, &grown]), &rules::BLOCK_UNCOPIED);
    drop((cut, grown));

    let encoded = [&one.encoded, &two.encoded];
    let of_other = cross.cache().layer(1).unwrap().key.clone();
    let of_other = of_other.reshape([of_other.len() / DIM, 1, DIM]).unwrap();
    let mut step = cross.begin(stream, &metadata, &encoded).unwrap();
    let query = |shape: [usize; 3]| {
        let zeros = vec![bf16::ZERO; shape.iter().product()];
        stream.upload(&zeros, shape).unwrap()
    };
    let mut in_cache = of_other.narrow(0, 0..3).unwrap();
    assert_eq!(rule(step.forward_into(0, &query([3, 1, DIM]), &mut in_cache)), &rules::ARGUMENT_MEMORY);
    assert_eq!(rule(step.forward(0, &query([2, 1, DIM]))), &rules::STEP_TOKENS);
    assert_eq!(rule(step.forward(0, &query([3, 2, DIM]))), &rules::STEP_HEADS);
    assert_eq!(rule(step.forward(0, &query([3, 1, 32]))), &rules::STEP_HEADS);
    assert!(matches!(step.forward(LAYERS, &query([3, 1, DIM])), Err(Error::Violation(_))));
    let mut other = query([3, 1, 32]);
    assert!(step.forward_into(0, &query([3, 1, DIM]), &mut other).is_err());
    step.forward(0, &query([3, 1, DIM])).unwrap();
    // The keys of layer 0 are no other layer's.
    assert_eq!(rule(step.forward(0, &query([3, 1, DIM]))), &rules::STEP_LAYER_REPEATED);
    assert_eq!(rule(step.end()), &rules::STEP_LAYERS_MISSING);

    // Nothing has grown where one could not.
    let mut more = [Sequence::new(cross.cache().pool()), Sequence::new(cross.cache().pool())];
    let held = cross.cache().pool().held_blocks();
    let [a, b] = &mut more;
    let outcome = cross.encode(stream, &mut [(a, 400), (b, BLOCKS * 128)]);
    assert_eq!(rule(outcome.map(drop)), &rules::POOL_EXHAUSTED);
    assert_eq!((more[0].len(), more[1].len()), (0, 0));
    assert_eq!(cross.cache().pool().held_blocks(), held);
    let [a, _] = &mut more;
    assert_eq!(rule(cross.encode(stream, &mut [(a, 0)]).map(drop)), &rules::BATCH_EMPTY);

    // An encoding without its last layer is encoded again from where it began.
    let [a, _] = &mut more;
    let write =
        |encoding: &mut Encoding<'_, bf16>, layer| encoding.write(layer, &query([2, 1, DIM]), &query([2, 1, DIM]));
    let mut encoding = cross.encode(stream, &mut [(&mut *a, 2)]).unwrap();
    write(&mut encoding, 0).unwrap();
    let why = encoding.end().unwrap_err();
    assert!(why.breaks(&rules::STEP_LAYERS_MISSING) && why.to_string().contains("truncate"), "{why}");
    let why = cross.encode(stream, &mut [(&mut *a, 2)]).map(drop).unwrap_err();
    assert!(why.breaks(&rules::STEP_LAYERS_MISSING) && !why.to_string().contains("of(&"), "{why}");
    a.truncate(0).unwrap();
    let mut encoding = cross.encode(stream, &mut [(&mut *a, 2)]).unwrap();
    (0..LAYERS).for_each(|layer| write(&mut encoding, layer).unwrap());
    encoding.end().unwrap();

    let shape = CacheShape::new(1, 1, DIM);
    let int8 = PagedKvCache::<bf16>::quantised_by_token(
        stream.device(),
        2,
        128,
        shape,
        PadPolicy::SkipNegative,
        QuantisedType::Int8,
    )
    .unwrap();
    let int8 = CrossAttention::new(AttentionShape::new(1, 1, DIM), int8);
    assert_eq!(rule(int8), &rules::BACKEND_QUANTISED);
}
