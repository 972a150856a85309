//! Two backends on the same recorded steps: over random schedules each is as far from dense attention in double
//! precision as its element type lets it, and a number that is off is found in its place.

use crate::acts::config;
use crate::harness;
use approx::{abs_diff_eq, assert_abs_diff_eq};

use std::num::NonZeroUsize;
use std::sync::atomic::{AtomicUsize, Ordering};

use ascend_attention::{Stream, Tensor, bf16};
use ascend_serving::kv::{BlockPool, CacheShape, PadPolicy, PagedKvCache};
use ascend_serving::{
    Attention, AttentionBackend, AttentionMetadata, AttentionShape, AttentionState, Backend, Backends, BatchRequest,
    BatchSettings, Causality, Error, FurthestElement, LayerGroup, LayerMask, LayerTensors, RecordedBatch, Result,
    StepComparison, StepContext, StepMemory, StepProgram, StepStage, compare_backends, rules,
};
use proptest::prelude::*;

const BLOCK: usize = 128;
const SHAPE: (usize, usize, usize) = (4, 2, 64);

fn shape() -> AttentionShape {
    AttentionShape::new(SHAPE.0, SHAPE.1, SHAPE.2)
}

/// An element that is made wrong: of which step, layer and place in the output.
type Off = (usize, usize, usize);

/// Attention by its definition, in double precision, over what the cache holds.
#[derive(Debug, Default)]
struct Dense {
    off: Option<Off>,
    steps: AtomicUsize,
}

#[derive(Debug)]
struct DenseStep {
    metadata: AttentionMetadata,
    mask: LayerMask,
    scale: f64,
    /// An element that is made wrong: of which layer and place in the output.
    off: Option<(usize, usize)>,
}

impl AttentionBackend<bf16> for Dense {
    fn name(&self) -> &'static str {
        "dense"
    }

    fn program(&self, step: &StepContext<'_>, _: &LayerTensors<'_, bf16>) -> Result<StepProgram<bf16>> {
        let number = self.steps.fetch_add(1, Ordering::Relaxed);
        let off = self.off.filter(|off| off.0 == number);
        Ok(StepProgram::new([]).stage(DenseStep {
            metadata: step.metadata.clone(),
            mask: step.mask.clone(),
            scale: step.shape.scale,
            off: off.map(|off| (off.1, off.2)),
        }))
    }
}

/// The keys, or values, of a request, `[keys, N, D]`.
fn cached(metadata: &AttentionMetadata, numbers: &[bf16], request: usize, len: usize) -> Vec<f64> {
    let row = SHAPE.1 * SHAPE.2;
    let blocks = metadata.table().row(request).unwrap();
    let of = |key: usize| {
        let at = (blocks[key / BLOCK] * BLOCK + key % BLOCK) * row;
        numbers[at..at + row].iter().map(|x| x.to_f64())
    };
    (0..len).flat_map(of).collect()
}

impl StepStage<bf16> for DenseStep {
    fn memory(&self) -> StepMemory {
        StepMemory::default()
    }

    fn launch_into(&self, stream: &Stream, layer: &LayerTensors<'_, bf16>, attention: &mut Tensor<bf16>) -> Result<()> {
        let (heads, kv_heads, dim) = SHAPE;
        let window = match &self.mask {
            LayerMask::Causality(causality) => causality.window().map_or(usize::MAX, |w| w.get()),
            other => panic!("{other:?}"),
        };
        let query = layer.query.download(stream)?;
        let [keys, values] = [&layer.cache.key, &layer.cache.value];
        let (keys, values) = (keys.download(stream)?, values.download(stream)?);
        let ends = self.metadata.q_ends().ends();
        let mut output = Vec::new();
        let mut first = 0;
        for (request, (&end, &len)) in ends.iter().zip(self.metadata.kv_lengths().lengths()).enumerate() {
            let keys = cached(&self.metadata, &keys, request, len);
            let values = cached(&self.metadata, &values, request, len);
            for token in first..end {
                let seen = len + token + 1 - end;
                for head in 0..heads {
                    let query = &query[(token * heads + head) * dim..][..dim];
                    let at = head / (heads / kv_heads);
                    let of = |key: usize| (key * kv_heads + at) * dim;
                    let places = seen.saturating_sub(window)..seen;
                    let score = |key: usize| -> f64 {
                        let pairs = query.iter().zip(&keys[of(key)..][..dim]);
                        pairs.map(|(q, k)| q.to_f64() * k).sum::<f64>() * self.scale
                    };
                    let scores: Vec<f64> = places.clone().map(score).collect();
                    let most = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
                    let weights: Vec<f64> = scores.iter().map(|x| (x - most).exp()).collect();
                    let sum: f64 = weights.iter().sum();
                    let mut row = vec![0.0; dim];
                    for (key, weight) in places.zip(&weights) {
                        for (x, v) in row.iter_mut().zip(&values[of(key)..][..dim]) {
                            *x += weight / sum * v;
                        }
                    }
                    output.extend(row.into_iter().map(bf16::from_f64));
                }
            }
            first = end;
        }
        if let Some((_, at)) = self.off.filter(|off| off.0 == layer.layer) {
            output[at] = bf16::from_f64(output[at].to_f64() + 2.0);
        }
        Ok(attention.overwrite(stream, &output)?)
    }
}

fn settings(window: Option<usize>) -> BatchSettings {
    let pool = BlockPool::new(12, BLOCK, PadPolicy::SkipNegative).unwrap();
    BatchSettings::of(&pool, Causality::from_flags(true, window).unwrap())
}

fn request(cached: usize, new: usize, row: &[usize]) -> BatchRequest<'_> {
    BatchRequest::in_row(row, cached, new)
}

/// Three requests with blocks of their own; the first have something cached before the first step.
const ROWS: [&[usize]; 3] = [&[7, 2, 9], &[0, 11, 4], &[5, 1, 8]];

/// Steps in which some of the requests get more tokens, read again from files.
fn schedule(window: Option<usize>, mut lengths: [usize; 3], steps: &[[Option<usize>; 3]]) -> Vec<RecordedBatch> {
    let mut recorded = Vec::new();
    for step in steps {
        let mut requests = Vec::new();
        for (at, row) in ROWS.iter().enumerate() {
            let room = ROWS[at].len() * BLOCK - lengths[at];
            let Some(new) = step[at].map(|new| new.min(room)).filter(|new| *new > 0) else {
                continue;
            };
            requests.push(request(lengths[at], new, row));
            lengths[at] += new;
        }
        if !requests.is_empty() {
            let json = RecordedBatch::new(settings(window), &requests).to_json();
            recorded.push(RecordedBatch::from_json(&json).unwrap());
        }
    }
    recorded
}

/// Compares the steps by two lists of backends, over caches of two layers.
fn compare(
    stream: &Stream,
    (seed, runs): (u64, usize),
    backends: [Backends<bf16>; 2],
    steps: &[RecordedBatch],
) -> Result<Vec<StepComparison>> {
    let [mut first, mut second] = backends.map(|backends| attention(stream, backends));
    compare_backends(stream, [&mut first, &mut second], steps, seed, runs)
}

fn attention(stream: &Stream, backends: Backends<bf16>) -> Attention<bf16> {
    let cache = PagedKvCache::new(stream.device(), 12, BLOCK, CacheShape::new(2, 2, 64), PadPolicy::SkipNegative);
    Attention::new(shape(), cache.unwrap(), backends)
}

/// Elements compared and equal in all steps.
fn elements(found: &[StepComparison]) -> [usize; 2] {
    let sum = |count: fn(&StepComparison) -> usize| found.iter().map(count).sum();
    [sum(|step| step.deviation.elements), sum(|step| step.deviation.equal)]
}

/// The element that is furthest apart, and its step.
fn furthest(found: &[StepComparison]) -> Option<(usize, FurthestElement)> {
    let each = found.iter().enumerate().filter_map(|(at, step)| Some((at, step.furthest?)));
    each.max_by(|one, other| one.1.distance.total_cmp(&other.1.distance))
}

/// What a request has cached before the first step.
fn length() -> impl Strategy<Value = usize> {
    prop_oneof![Just(0), 0usize..150]
}

/// New tokens of a request in a step, if it takes part.
fn turn() -> impl Strategy<Value = Option<usize>> {
    prop_oneof![1 => Just(None), 2 => Just(Some(1)), 1 => (1usize..40).prop_map(Some)]
}

proptest! {
    #![proptest_config(config(10))]

    #[test]
    fn any_schedule_is_as_far_from_dense_attention_as_rounding_takes_it(
        window in prop_oneof![2 => Just(None), 1 => (1usize..150).prop_map(Some)],
        lengths in [length(), length(), length()],
        steps in prop::collection::vec([turn(), turn(), turn()], 1..5),
        which in 0usize..3,
        seed in any::<u64>(),
    ) {
        let stream = harness::stream();
        let steps = schedule(window, lengths, &steps);
        prop_assume!(!steps.is_empty());
        let backends = match which {
            0 => Backends::none().with(Backend::Fused),
            1 => Backends::none().with(Backend::FusedInTwo).with(Backend::Fused),
            _ => Backends::none().with(Backend::PagedDecode),
        };
        let dense = Backends::none().with(Dense::default());
        let found = compare(&stream, (seed, 1), [backends, dense], &steps).unwrap();
        prop_assert_eq!(found.len(), steps.len());
        for (step, recorded) in found.iter().zip(&steps) {
            let tokens: usize = recorded.requests().iter().map(|request| request.new).sum();
            prop_assert_eq!(step.backends[1].as_ref().unwrap(), &"dense");
            match &step.backends[0] {
                Ok(_) => prop_assert_eq!(step.deviation.elements, 2 * tokens * 4 * 64),
                Err(refused) => {
                    // Later steps are compared all the same, over the keys of this one.
                    let told = matches!(refused, Error::NoBackend { .. });
                    prop_assert!(which == 2 && told && step.deviation.elements == 0, "{}", refused);
                }
            }
            prop_assert!(which == 2 || step.deviation.elements > 0);
        }
        let [elements, equal] = elements(&found);
        if let Some((_, at)) = furthest(&found) {
            prop_assert!(at.distance <= 1e-2, "{:?}", at);
            prop_assert!(equal < elements);
        }
        if elements > 0 {
            // Rounded from sums in another order, most are the same all the same.
            prop_assert!(equal as f64 > 0.3 * elements as f64, "{} of {}", equal, elements);
        }
    }
}

#[test]
fn an_element_that_is_off_is_found_in_its_place() {
    let stream = harness::stream();
    let steps = schedule(None, [130, 5, 0], &[[Some(1), Some(1), None], [Some(3), None, Some(9)]]);
    let state = |at: usize| {
        let step = &steps[at];
        AttentionMetadata::new(&step.requests(), step.settings).unwrap().state()
    };
    let run = |off| {
        let backends =
            [Backends::none().with(Backend::Fused), Backends::none().with(Dense { off, ..Dense::default() })];
        compare(&stream, (7, 1), backends, &steps).unwrap()
    };
    let right = run(None);
    // Tokens of both steps, layers, heads and elements of a head.
    let [all, right_equal] = elements(&right);
    assert_eq!(all, (2 + 12) * 2 * 4 * 64);
    assert!(furthest(&right).is_none_or(|(_, at)| at.distance < 1e-2));
    assert_eq!([right[0].state, right[1].state], [state(0), state(1)]);
    assert_eq!(right[0].state, AttentionState::DecodeOnly);
    assert_eq!(right[0].backends[0], Ok("fused"));
    assert!(right.iter().flat_map(|step| step.times).all(|time| !time.is_zero()));
    for (off, place) in [
        // Token 0 of request 1, head 3, element 9.
        ((0, 1, 4 * 64 + 3 * 64 + 9), (0, 1, 1, 0, 3, 9)),
        // Three tokens of request 0 come before those of the second one, which is request 2 of the schedule.
        ((1, 0, (3 + 5) * 4 * 64 + 64), (1, 0, 1, 5, 1, 0)),
        ((1, 1, 2 * 4 * 64 + 63), (1, 1, 0, 2, 0, 63)),
    ] {
        let found = run(Some(off));
        let (step, at) = furthest(&found).unwrap();
        let here = (step, at.layer, at.request, at.token, at.head, at.element);
        assert_eq!(here, place);
        assert!(abs_diff_eq!(at.distance, 2.0, epsilon = 5e-2), "{at:?}");
        assert_abs_diff_eq!((at.values[1] - at.values[0]).abs(), at.distance, epsilon = 1e-9);
        // The other step has its own.
        let other = &found[1 - place.0];
        assert!(other.deviation.elements > 0);
        assert!(other.furthest.is_none_or(|at| at.distance < 1e-2));
        let [_, equal] = elements(&found);
        assert!(equal + 1 >= right_equal && equal <= right_equal);
    }
}

#[test]
fn the_same_backend_computes_the_same_and_seeds_differ() {
    let stream = harness::stream();
    let steps = schedule(NonZeroUsize::new(60).map(NonZeroUsize::get), [100, 0, 0], &[[Some(1), Some(4), None]]);
    let both = || [Backends::none().with(Backend::Fused), Backends::none().with(Backend::Fused)];
    let found = compare(&stream, (1, 1), both(), &steps).unwrap();
    assert_eq!((elements(&found), furthest(&found)), ([2 * 5 * 4 * 64; 2], None));
    // Runs write the same keys: later steps stay what they were.
    let next = schedule(None, [100, 0, 0], &[[Some(1), Some(4), None], [Some(2), Some(1), None]]);
    let dense = Backends::none().with(Dense::default());
    let backends = [Backends::none().with(Backend::Fused), dense];
    let found = compare(&stream, (1, 3), backends, &next).unwrap();
    assert_eq!(elements(&found)[0], 2 * (5 + 3) * 4 * 64);
    assert!(furthest(&found).is_none_or(|(_, at)| at.distance < 1e-2));
    // Each layer of the model has a cache layer, whichever that is.
    let in_order = |layers: [usize; 2]| {
        let cache = PagedKvCache::new(stream.device(), 12, BLOCK, CacheShape::new(2, 2, 64), PadPolicy::SkipNegative);
        let backends = Backends::none().with(Backend::Fused);
        let group = LayerGroup::<bf16>::new(layers, Causality::Causal, shape(), cache.unwrap(), backends);
        Attention::of_groups(2, [group]).unwrap()
    };
    let (mut first, mut second) = (in_order([0, 1]), in_order([1, 0]));
    let found = compare_backends(&stream, [&mut first, &mut second], &next, 0, 1).unwrap();
    assert_eq!(furthest(&found), None);
    let refused = [Backends::none().with(Backend::PagedDecode), Backends::none()];
    let found = compare(&stream, (1, 1), refused, &steps).unwrap();
    assert_eq!(elements(&found), [0, 0]);
    assert!(found[0].backends.iter().all(|backend| backend.is_err()));
}

#[test]
fn what_cannot_be_compared_is_refused_by_name() {
    let stream = harness::stream();
    let steps = schedule(None, [3, 3, 3], &[[Some(1), None, None]]);
    let fused = || Backends::none().with(Backend::Fused);
    let refusal = |steps: &[RecordedBatch]| compare(&stream, (0, 1), [fused(), fused()], steps).unwrap_err();
    assert!(refusal(&[]).to_string().contains("steps"));
    let pool = BlockPool::new(13, BLOCK, PadPolicy::SkipNegative).unwrap();
    let other = BatchSettings::of(&pool, Causality::Causal);
    let other = RecordedBatch::new(other, &steps[0].requests());
    assert!(refusal(&[steps[0].clone(), other]).breaks(&rules::SETTINGS_CACHE));
    let short = RecordedBatch::new(settings(None), &[request(300, 1, &[4])]);
    assert!(refusal(&[short]).to_string().contains("blocks"));

    // A cache of other layers in the place of an attention's own.
    let (mut right, mut wrong) = (attention(&stream, fused()), attention(&stream, fused()));
    *wrong.cache_mut() =
        PagedKvCache::new(stream.device(), 12, BLOCK, CacheShape::new(3, 2, 64), PadPolicy::SkipNegative).unwrap();
    let refused = compare_backends(&stream, [&mut right, &mut wrong], &steps, 0, 1).unwrap_err();
    assert!(refused.breaks(&rules::GROUP_LAYERS), "{refused}");

    let one_layer = PagedKvCache::new(stream.device(), 12, BLOCK, CacheShape::new(1, 2, 64), PadPolicy::SkipNegative);
    let mut one_layer = Attention::new(shape(), one_layer.unwrap(), fused());
    let refused = compare_backends(&stream, [&mut attention(&stream, fused()), &mut one_layer], &steps, 0, 1);
    assert!(refused.unwrap_err().to_string().contains("attentions"));
    let latents = || {
        let shape = CacheShape::latent(2);
        let cache = PagedKvCache::new(stream.device(), 12, BLOCK, shape, PadPolicy::SkipNegative).unwrap();
        Attention::new(AttentionShape::latent(4), cache, fused())
    };
    let refused = compare_backends(&stream, [&mut latents(), &mut latents()], &steps, 0, 1).unwrap_err();
    assert!(refused.to_string().contains("latents"), "{refused}");
    let scaled = || {
        let attention = attention(&stream, fused());
        attention.layer_scales(|layer| 0.1 * (layer + 1) as f64).unwrap()
    };
    let refused = compare_backends(&stream, [&mut attention(&stream, fused()), &mut scaled()], &steps, 0, 1);
    assert!(refused.unwrap_err().to_string().contains("scales"));
}
