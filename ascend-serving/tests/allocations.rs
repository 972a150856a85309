//! The layers of a decode step allocate nothing on the host.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    unreachable_pub,
    reason = "a test fails by panicking, and modules are the program's own"
)]

use allocations::{MOST_ROUNDS, in_steady_state};
use ascend_attention::attention::PerRequest;
use ascend_attention::delta_rule::DeltaTensors;
use ascend_attention::spec::{Cann, Soc};
use ascend_attention::{Element, Machine, Runtime, Stream, Tensor, bf16, f16};
use ascend_serving::kv::{
    Cache, CacheShape, ChannelScales, Convolution, LatentScale, PadPolicy, PagedKvCache, QuantisedLayer, QuantisedType,
    Sequence, StatePool, StateShape,
};
use ascend_serving::{
    Attention, AttentionMetadata, AttentionShape, Backend, Backends, BatchRequest, BatchSettings, Causality,
    CrossAttention, EncoderAttention, GraphLimits, LatentForm, LatentTensors, LayerGroup, LayerInputs, LayerMask,
    NamedMask, QuantisedQueries, StatePolicy,
};
use ascend_testing::allocations;
use ascend_testing::harness;

#[global_allocator]
static ALLOCATOR: allocations::Counting = allocations::Counting;

/// Layers of a decode step: keys and values written, then attended to. Each round queues four layers, with these
/// masks; the first round plans them.
fn layers_of_a_step<T: Element + Default>(backends: Backends<T>, masks: impl Fn(usize) -> Option<LayerMask>) -> usize {
    let stream = harness::stream();
    let pad = PadPolicy::SkipNegative;
    let cache = PagedKvCache::new(stream.device(), 8, BLOCK, cache_shape(), pad);
    layers_over(&stream, cache.unwrap(), backends, masks)
}

/// Layers of a round.
const LAYERS: usize = 4;
/// Tokens of a block: the caches of this number of layers are small.
const BLOCK: usize = 32;

/// A step queues each layer once, so that there is one for each round.
fn cache_shape() -> CacheShape {
    CacheShape::new(LAYERS * MOST_ROUNDS, 2, 64)
}

fn uniform_scales(shape: &CacheShape) -> Vec<ChannelScales> {
    let scales = ChannelScales::uniform(shape, 0.1, 0.1).unwrap();
    vec![scales; shape.layers]
}

/// As [`layers_of_a_step`], over a cache.
fn layers_over<T: Element + Default>(
    stream: &Stream,
    cache: PagedKvCache<T>,
    backends: Backends<T>,
    masks: impl Fn(usize) -> Option<LayerMask>,
) -> usize {
    const REQUESTS: usize = 3;
    let device = stream.device();
    let pool = cache.pool().clone();
    let mut sequences = [3, 130, 60].map(|len| {
        let mut sequence = Sequence::new(&pool);
        let _ = sequence.grow(len).unwrap();
        sequence
    });
    let mut engine = Attention::new(AttentionShape::new(4, 2, 64), cache, backends);
    for sequence in &mut sequences {
        let cached = sequence.len();
        engine.cache().mark_computed(sequence, cached).unwrap();
        let _ = sequence.grow(1).unwrap();
    }
    let batch: Vec<_> = sequences.iter().map(|s| BatchRequest::of(s, 1)).collect();
    let settings = BatchSettings::of(&pool, Causality::Causal);
    let metadata = AttentionMetadata::new(&batch, settings).unwrap();
    let rows = |heads: usize| {
        let zeros = vec![T::default(); REQUESTS * heads * 64];
        stream.upload(&zeros, [REQUESTS, heads, 64]).unwrap()
    };
    let layers: Vec<_> = (0..LAYERS).map(|_| [rows(4), rows(2), rows(2)]).collect();
    let mut outputs: Vec<_> = (0..LAYERS).map(|_| Tensor::<T>::empty(device, [REQUESTS, 4, 64]).unwrap()).collect();
    let masks: Vec<_> = (0..LAYERS).map(masks).collect();
    let mut step = engine.begin(stream, &metadata).unwrap();
    let mut layer = 0..;
    in_steady_state(|| {
        for (([query, key, value], output), mask) in layers.iter().zip(&mut outputs).zip(&masks) {
            let mut inputs = LayerInputs::from((query, key, value));
            inputs.mask = mask.as_ref();
            let layer = layer.next().unwrap();
            step.forward_into(layer, inputs, output).unwrap();
        }
        stream.synchronize().unwrap();
    })
}

#[test]
fn a_layer_of_a_decode_step_allocates_nothing() {
    let packed = layers_of_a_step(Backends::<bf16>::none().with(Backend::Fused), |_| None);
    assert_eq!(packed, 0, "200 packed layers allocated {packed} times");
    let decode = layers_of_a_step(Backends::<f16>::none().with(Backend::PagedDecode), |_| None);
    assert_eq!(decode, 0, "200 layers allocated {decode} times");
}

#[test]
fn a_decoding_layer_over_an_int8_cache_allocates_nothing() {
    let stream = harness::stream();
    let pad = PadPolicy::SkipNegative;
    let shape = cache_shape();
    let scales = uniform_scales(&shape);
    let cache = PagedKvCache::<bf16>::quantised(&stream, 8, BLOCK, shape, pad, QuantisedType::Int8, &scales).unwrap();
    let backends = Backends::none().with(Backend::QuantisedDecode);
    let decode = layers_over(&stream, cache, backends, |_| None);
    assert_eq!(decode, 0, "200 layers allocated {decode} times");
}

#[test]
fn a_decoding_layer_over_latents_allocates_nothing() {
    let stream = harness::stream();
    let shape = CacheShape::latent(LAYERS * MOST_ROUNDS);
    let pad = PadPolicy::SkipNegative;
    let cache = PagedKvCache::<bf16>::new(stream.device(), 4, BLOCK, shape, pad).unwrap();
    over_latents(&stream, cache);
}

#[test]
fn a_decoding_layer_over_latents_of_a_byte_allocates_nothing() {
    let stream = harness::stream();
    let shape = CacheShape::latent(LAYERS * MOST_ROUNDS).format(Cache::Nz);
    let scales = vec![LatentScale::new(0.1).unwrap(); shape.layers];
    let pad = PadPolicy::SkipNegative;
    let cache = PagedKvCache::quantised_latents(&stream, 2, 128, shape, pad, QuantisedType::Int8, &scales).unwrap();
    over_latents(&stream, cache);
}

fn over_latents(stream: &Stream, cache: PagedKvCache<bf16>) {
    let scale = cache.quantised_layer(0).ok().and_then(QuantisedLayer::latent_scale);
    let backends = Backends::none().with(Backend::MLA_256_MIB).with(Backend::QUANTISED_MLA_256_MIB);
    let mut engine = Attention::new(AttentionShape::latent(2), cache, backends);
    let sequences = [3, 40].map(|len| {
        let mut sequence = Sequence::new(engine.cache().pool());
        engine.grow(stream, &mut sequence, len).unwrap();
        engine.cache().mark_computed(&sequence, len).unwrap();
        engine.grow(stream, &mut sequence, 1).unwrap();
        sequence
    });
    let batch = sequences.each_ref().map(|s| BatchRequest::of(s, 1));
    let settings = BatchSettings::of(engine.cache(), Causality::Causal);
    let metadata = AttentionMetadata::new(&batch, settings).unwrap();
    let rows = |heads: usize, dim: usize| {
        let zeros = vec![bf16::ZERO; 2 * heads * dim];
        stream.upload(&zeros, [2, heads, dim]).unwrap()
    };
    let (query, query_rope) = (rows(2, 512), rows(2, 64));
    let (latent, key_rope) = (rows(1, 512), rows(1, 64));
    let tensors = LatentTensors { query_rope: &query_rope, form: LatentForm::Absorbed };
    let quantised = scale.map(|scale| {
        QuantisedQueries::quantise_on_host(stream, QuantisedType::Int8, (&query, &query_rope), scale).unwrap()
    });
    let inputs = match &quantised {
        Some((queries, divided)) => LayerInputs::quantised_latent(queries, divided, &latent, &key_rope),
        None => LayerInputs::latent(&query, &latent, &key_rope, tensors),
    };
    let mut output = Tensor::empty(stream.device(), [2, 2, 512]).unwrap();
    let mut step = engine.begin(stream, &metadata).unwrap();
    let mut layer = 0..;
    let latents = in_steady_state(|| {
        for _ in 0..LAYERS {
            let layer = layer.next().unwrap();
            step.forward_into(layer, inputs, &mut output).unwrap();
        }
        stream.synchronize().unwrap();
    });
    assert_eq!(latents, 0, "200 layers allocated {latents} times");
}

#[test]
fn a_decoding_layer_over_floats_of_a_byte_allocates_nothing() {
    if harness::not_on_npu("Ascend 950 is emulated") {
        return;
    }
    // The harness looks at what is left behind.
    drop(harness::runtime());
    let machine = Machine::new(Soc::Ascend950, Cann::V9_1);
    let runtime = Runtime::emulated_as(&machine).unwrap();
    let stream = runtime.device(0).unwrap().stream().unwrap();
    let (pad, shape) = (PadPolicy::SkipNegative, cache_shape());
    let scales = uniform_scales(&shape);
    for stored in [QuantisedType::Float8E4M3Fn, QuantisedType::HiFloat8] {
        let cache = PagedKvCache::<bf16>::quantised(&stream, 8, BLOCK, shape, pad, stored, &scales);
        let backends = Backends::none().with(Backend::QuantisedDecode);
        let decode = layers_over(&stream, cache.unwrap(), backends, |_| None);
        assert_eq!(decode, 0, "200 layers of {stored:?} allocated {decode} times");
    }
}

#[test]
fn layers_with_masks_of_their_own_allocate_nothing() {
    let window = std::num::NonZeroUsize::new(70).map(|keys| Causality::Window(keys).into());
    let near = NamedMask::new("near", |_, token, key| token.abs_diff(key) < 9);
    let chunk = std::num::NonZeroUsize::new(128).map(|keys| Causality::Chunk(keys).into());
    let masks = |layer| match layer {
        0 => None,
        1 => window.clone(),
        2 => chunk.clone(),
        _ => Some(near.clone().into()),
    };
    let backends = Backends::<bf16>::none().with(Backend::NamedMask).with(Backend::ChunkedLocal).with(Backend::Fused);
    let mixed = layers_of_a_step(backends, masks);
    assert_eq!(mixed, 0, "200 layers of four masks allocated {mixed} times");
}

#[test]
fn layers_over_an_encoder_allocate_nothing() {
    let stream = harness::stream();
    let cache = || {
        let pad = PadPolicy::SkipNegative;
        PagedKvCache::<bf16>::new(stream.device(), 8, BLOCK, cache_shape(), pad).unwrap()
    };
    let mut cross = CrossAttention::new(AttentionShape::new(4, 2, 64), cache()).unwrap();
    let mut encoded = Sequence::new(cross.cache().pool());
    let rows = |rows: usize, heads: usize| {
        let ones = vec![bf16::ONE; rows * heads * 64];
        stream.upload(&ones, [rows, heads, 64]).unwrap()
    };
    let keys = rows(200, 2);
    let mut encoding = cross.encode(&stream, &mut [(&mut encoded, 200)]).unwrap();
    for layer in 0..cache_shape().layers {
        encoding.write(layer, &keys, &keys).unwrap();
    }
    drop(encoding);
    let own = cache();
    let mut sequence = Sequence::new(own.pool());
    let _ = sequence.grow(3).unwrap();
    let settings = BatchSettings::of(&own, Causality::Causal);
    let metadata = AttentionMetadata::new(&[BatchRequest::of(&sequence, 3)], settings).unwrap();
    let query = rows(3, 4);
    let mut output = Tensor::empty(stream.device(), query.shape()).unwrap();
    let mut step = cross.begin(&stream, &metadata, &[&encoded]).unwrap();
    let mut layer = 0..;
    let crossed = in_steady_state(|| {
        for layer in layer.by_ref().take(LAYERS) {
            step.forward_into(layer, &query, &mut output).unwrap();
        }
        stream.synchronize().unwrap();
    });
    assert_eq!(crossed, 0, "200 layers over encoder keys allocated {crossed} times");

    let lengths = PerRequest::new(vec![2, 1]).unwrap();
    let keys = rows(3, 2);
    let shape = AttentionShape::new(4, 2, 64);
    let encoder = EncoderAttention::plan(shape, &stream, &lengths, (&query, &keys, &keys)).unwrap();
    let alone = in_steady_state(|| {
        for _ in 0..LAYERS {
            encoder.launch_into(&stream, (&query, &keys, &keys), &mut output).unwrap();
        }
        stream.synchronize().unwrap();
    });
    assert_eq!(alone, 0, "200 layers of an encoder allocated {alone} times");
}

/// Layers of a decode step in turn from a full and a windowed group, after the first of each, which plan.
fn mixed_layers_of_a_step() -> usize {
    let stream = harness::stream();
    let device = stream.device();
    let window = std::num::NonZeroUsize::new(100).map_or(Causality::Causal, Causality::Window);
    let all = LAYERS * MOST_ROUNDS;
    let group = |first: usize, causality| {
        let shape = CacheShape::new(all / 2, 2, 64);
        let pad = PadPolicy::SkipNegative;
        let cache = PagedKvCache::<bf16>::new(device, 12, BLOCK, shape, pad).unwrap();
        let shape = AttentionShape::new(4, 2, 64);
        let backends = Backends::none().with(Backend::Fused);
        LayerGroup::new((first..all).step_by(2), causality, shape, cache, backends)
    };
    let groups = [group(0, Causality::Causal), group(1, window)];
    let mut engine = Attention::of_groups(all, groups).unwrap();
    let mut sequences = [3, 230].map(|len| {
        let mut sequence = engine.sequence();
        engine.grow(&stream, &mut sequence, len).unwrap();
        engine.mark_computed(&sequence, len).unwrap();
        sequence
    });
    for sequence in &mut sequences {
        engine.grow(&stream, sequence, 1).unwrap();
    }
    let requests: Vec<_> = sequences.iter().map(|s| BatchRequest::of(s, 1)).collect();
    let metadata = engine.metadata(&requests, StatePolicy::default()).unwrap();
    let rows = |heads: usize| {
        let zeros = vec![bf16::ZERO; 2 * heads * 64];
        stream.upload(&zeros, [2, heads, 64]).unwrap()
    };
    let layers: Vec<_> = (0..LAYERS).map(|_| [rows(4), rows(2), rows(2)]).collect();
    let output = || Tensor::<bf16>::empty(device, [2, 4, 64]).unwrap();
    let mut outputs: Vec<_> = (0..LAYERS).map(|_| output()).collect();
    let mut step = engine.begin(&stream, &metadata).unwrap();
    let mut layer = 0..;
    in_steady_state(|| {
        for ([query, key, value], output) in layers.iter().zip(&mut outputs) {
            step.forward_into(layer.next().unwrap(), (query, key, value), output).unwrap();
        }
        stream.synchronize().unwrap();
    })
}

#[test]
fn a_mixed_layer_of_a_decode_step_allocates_nothing() {
    let mixed = mixed_layers_of_a_step();
    assert_eq!(mixed, 0, "full and windowed layers allocated {mixed} times");
}

/// Layers of linear attention of a decode step, after the first, which plans.
#[test]
fn a_layer_of_linear_attention_allocates_nothing() {
    let Some(stream) = harness::stream_of(Cann::V8_5) else { return };
    let layers = LAYERS * MOST_ROUNDS;
    let shape = StateShape {
        layers,
        key_heads: 2,
        value_heads: 2,
        value_dim: 16,
        key_dim: 16,
        scale: 0.25,
        g: false,
        gk: false,
        drafts: 0,
        convolution: None,
    };
    let states = StatePool::new::<bf16>(&stream, 4, shape).unwrap();
    let pad = PadPolicy::SkipNegative;
    let cache = PagedKvCache::<bf16>::new(stream.device(), 4, BLOCK, CacheShape::new(1, 2, 64), pad).unwrap();
    let full = AttentionShape::new(4, 2, 64);
    let full = LayerGroup::new([layers], Causality::Causal, full, cache, Backends::none().with(Backend::Fused));
    let mut attention = Attention::of_hybrid(layers + 1, [full], 0..layers, states).unwrap();
    let mut sequences = [attention.sequence(), attention.sequence()];
    for sequence in &mut sequences {
        attention.grow(&stream, sequence, 1).unwrap();
    }
    let batch = sequences.each_ref().map(|sequence| BatchRequest::of(sequence, 1));
    let metadata = attention.metadata(&batch, StatePolicy::default()).unwrap();
    let rows = stream.upload(&[bf16::ONE; 2 * 2 * 16], [2, 2, 16]).unwrap();
    let beta = stream.upload(&[bf16::ONE; 2 * 2], [2, 2]).unwrap();
    let mut output = Tensor::empty(stream.device(), rows.shape()).unwrap();
    let mut step = attention.begin(&stream, &metadata).unwrap();
    let mut layer = 0..;
    let allocated = in_steady_state(|| {
        for layer in layer.by_ref().take(LAYERS) {
            step.forward_into(layer, DeltaTensors::new((&rows, &rows, &rows), &beta), &mut output).unwrap();
        }
        stream.synchronize().unwrap();
    });
    assert_eq!(allocated, 0, "layers of linear attention allocated {allocated} times");
}

/// Layers of linear attention are replayed with drafts, so that each has a convolution, copies of its windows and the
/// delta rule. The tensors are those of the graphs, filled in place; the first replay of a graph makes its events.
#[test]
fn replayed_layers_of_linear_attention_allocate_nothing() {
    if harness::not_on_npu("the package of the convolution is emulated") {
        return;
    }
    let shape = StateShape {
        layers: LAYERS,
        key_heads: 2,
        value_heads: 2,
        value_dim: 16,
        key_dim: 16,
        scale: 0.25,
        g: true,
        gk: false,
        drafts: 1,
        convolution: Some(Convolution { width: 4, channels: 64, silu: true }),
    };
    drop(harness::runtime());
    let runtime = Runtime::emulated_as(&Machine::new(Soc::AtlasA2, Cann::V9_1)).unwrap();
    let stream = runtime.device(0).unwrap().stream().unwrap();
    let rows =
        |shape: &[usize]| stream.upload(&vec![bf16::from_f32(0.25); shape.iter().product::<usize>()], shape).unwrap();
    let (weight, wide) = (rows(&[4, 64]), [rows(&[4, 4, 64]), rows(&[4, 2, 64])]);
    let pad = PadPolicy::SkipNegative;
    let cache = PagedKvCache::<bf16>::new(stream.device(), 16, BLOCK, CacheShape::new(1, 2, 64), pad).unwrap();
    let full = AttentionShape::new(4, 2, 64);
    let full = LayerGroup::new([LAYERS], Causality::Causal, full, cache, Backends::none().with(Backend::Fused));
    let states = StatePool::new::<bf16>(&stream, 8, shape).unwrap();
    let mut attention = Attention::of_hybrid(LAYERS + 1, [full], 0..LAYERS, states).unwrap();
    let weights = [(); LAYERS].map(|()| (weight.clone(), None));
    let limits = GraphLimits::new([3], 256).tokens_each(2).convolutions(weights);
    let mut graphs = attention.capture(&stream, Causality::Causal, &limits).unwrap();
    let mut sequences = [attention.sequence(), attention.sequence()];
    let mut step = || {
        for sequence in &mut sequences {
            attention.grow(&stream, sequence, 2).unwrap();
        }
        let batch = sequences.each_ref().map(|sequence| BatchRequest::of(sequence, 2).drafts(1));
        let mut metadata = attention.metadata(&batch, StatePolicy::default()).unwrap();
        let mut step = graphs.begin(&stream, &mut metadata).unwrap();
        let before = allocations::allocations();
        for layer in 0..LAYERS {
            let own = step.linear_tensors(layer).unwrap();
            step.convolve(layer, (own.x.as_ref().unwrap(), &weight)).unwrap();
            step.forward(layer, own.inputs()).unwrap();
        }
        stream.synchronize().unwrap();
        let allocated = allocations::allocations() - before;
        step.forward(LAYERS, (&wide[0], &wide[1], &wide[1])).unwrap();
        step.end().unwrap();
        allocated
    };
    // As in `in_steady_state`, a queue may grow on a busy machine.
    let least = (0..20).map(|_| step()).min();
    assert_eq!(least, Some(0), "replayed layers allocate in every step");
}
