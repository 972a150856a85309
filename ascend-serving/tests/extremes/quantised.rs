//! Caches of numbers of a byte, and steps over them.

use ascend_attention::spec::{Cann, Soc};
use ascend_attention::{AnyTensor, Element, Machine, Runtime, Stream, Tensor, bf16};
use ascend_serving::kv::{
    Cache, CacheShape, CacheWrite, ChannelScales, LatentScale, PadPolicy, PagedKvCache, QuantisedType, Sequence,
};
use ascend_serving::{
    Attention, AttentionMetadata, AttentionShape, Backend, Backends, BatchRequest, BatchSettings, Causality,
    GraphLimits, QuantisedQueries,
};

use crate::draw::Draw;
use crate::harness;
use crate::kv::{pad, slots};
use crate::{Call, Forwards};

const DIM: usize = 64;

pub static STEPS: Forwards = Forwards::new();
pub static GRAPH_STEPS: Forwards = Forwards::new();

/// The machine, or an emulated Ascend 950.
fn drawn_stream(draw: &mut Draw) -> Stream {
    let stream = crate::stream();
    if draw.bool() || harness::not_on_npu("Ascend 950 is emulated") {
        return stream;
    }
    let runtime = Runtime::emulated_as(&Machine::new(Soc::Ascend950, Cann::V9_1)).unwrap();
    runtime.device(0).unwrap().stream().unwrap()
}

fn stored(draw: &mut Draw) -> QuantisedType {
    use QuantisedType::{Float8E4M3Fn, HiFloat8, Int8};
    draw.of(&[Int8, Float8E4M3Fn, HiFloat8])
}

fn number(draw: &mut Draw) -> f32 {
    let any = draw.f64() as f32;
    let odd = draw.of(&[any, 0.0, f32::MAX, f32::NAN, f32::NEG_INFINITY]);
    draw.of(&[1.0, 0.01, 2.5, 1.0, 0.01, 2.5, -300.0, odd])
}

/// A cache of one of the kinds.
fn cache(
    draw: &mut Draw,
    stream: &Stream,
    (blocks, size): (usize, usize),
    shape: CacheShape,
    pad: PadPolicy,
) -> ascend_serving::Result<PagedKvCache<bf16>> {
    let device = stream.device();
    match draw.below(8) {
        0 | 1 => {
            let (key, value) = (number(draw), number(draw));
            let scales = ChannelScales::uniform(&shape, key, value)?;
            let scales = vec![scales; shape.layers.min(3)];
            PagedKvCache::quantised(stream, blocks, size, shape, pad, stored(draw), &scales)
        }
        2 => PagedKvCache::quantised_by_token(device, blocks, size, shape, pad, stored(draw)),
        3 => PagedKvCache::quantised_sparse_latents(device, blocks, size, shape.layers, pad),
        4 => PagedKvCache::quantised_index_keys(device, blocks, size, shape.layers, pad),
        5 | 6 => {
            let scale = LatentScale::new(number(draw))?;
            let shape = draw.of(&[shape, CacheShape::latent(shape.layers).format(shape.format)]);
            let size = draw.of(&[size, 128]);
            let scales = vec![scale; shape.layers.min(3)];
            PagedKvCache::quantised_latents(stream, blocks, size, shape, pad, stored(draw), &scales)
        }
        _ => PagedKvCache::mxfp8(device, blocks, size, shape, pad),
    }
}

fn rows(draw: &mut Draw, stream: &Stream, tokens: usize, heads: usize) -> Tensor<bf16> {
    let some = [number(draw), number(draw), number(draw)].map(bf16::from_f32);
    let some = some.into_iter().cycle().take(tokens * heads * DIM);
    let some: Vec<_> = some.collect();
    stream.upload(&some, [tokens, heads, DIM]).unwrap()
}

pub const CALLS: &[Call] = &[
    ("ChannelScales", |draw| {
        let (keys, values) = (draw.few(number), draw.few(number));
        let stored = stored(draw);
        let _ = ChannelScales::covering(stored, &keys, &values, draw.usize(), draw.usize());
        let shape = CacheShape::new(1, draw.usize(), draw.usize());
        let _ = ChannelScales::uniform(&shape, number(draw), number(draw));
        let _ = ChannelScales::new(keys, values);
    }),
    ("QuantisedQueries", |draw| {
        let stream = drawn_stream(draw);
        let _ = LatentScale::covering(stored(draw), &draw.few(number));
        let Ok(scale) = LatentScale::new(number(draw)) else {
            return;
        };
        let mut shaped = || {
            let shape = [draw.below(3), draw.below(3), draw.below(70)];
            let numbers: Vec<_> = (0..shape.iter().product()).map(|_| bf16::from_f32(number(draw))).collect();
            stream.upload(&numbers, shape).unwrap()
        };
        let (query, query_rope, other) = (shaped(), shaped(), shaped());
        let query_rope = if query.shape()[..2] == query_rope.shape()[..2] { query_rope } else { query.clone() };
        for rope in [&query_rope, &other] {
            let _ = QuantisedQueries::quantise_on_host(&stream, stored(draw), (&query, rope), scale);
        }
        let bytes = query.bits_as(<i8 as Element>::DTYPE).and_then(AnyTensor::typed::<i8>).unwrap();
        for scales in [[draw.below(3), draw.below(3)], [query.shape()[0], query.shape()[1]]] {
            let scales = Tensor::<f32>::empty(stream.device(), scales).unwrap();
            let _ = QuantisedQueries::new(&bytes, &scales);
            let _ = QuantisedQueries::new(&query, &scales);
        }
    }),
    ("a quantised cache of any size", |draw| {
        let stream = drawn_stream(draw);
        let formats = [Cache::BnBsH, Cache::BnNBsD, Cache::Nz];
        let shape =
            CacheShape::new(draw.usize(), draw.usize(), draw.usize()).value_dim(draw.usize()).format(draw.of(&formats));
        let sizes = (draw.usize(), draw.usize());
        let pad = pad(draw);
        if let Ok(cache) = cache(draw, &stream, sizes, shape, pad) {
            let _ = (cache.bytes(), cache.quantised_layer(draw.usize()).is_ok());
        }
    }),
    ("writes into a quantised cache", |draw| {
        let stream = drawn_stream(draw);
        let format = draw.of(&[Cache::BnBsH, Cache::BnNBsD]);
        let shape = CacheShape::new(1, 2, DIM).format(format);
        let size = draw.of(&[128, 512]);
        let pad = pad(draw);
        let Ok(mut cache) = cache(draw, &stream, (2, size), shape, pad) else {
            return;
        };
        let slots = slots(draw);
        let (key, value) = (rows(draw, &stream, 3, 2), rows(draw, &stream, 3, 2));
        let count = slots.len().min(3);
        let (key, value) = (key.narrow(0, 0..count), value.narrow(0, 0..count));
        let (key, value) = (key.unwrap(), value.unwrap());
        if let Ok(write) = CacheWrite::plan(&cache, &stream, &slots, &key, &value) {
            let _ = cache.write(&stream, &write, draw.usize(), &key, &value);
            let _ = cache.write(&stream, &write, 0, &key, &value);
            let other = rows(draw, &stream, 5, 1);
            assert!(cache.write(&stream, &write, 0, &other, &value).is_err());
        }
        stream.synchronize().unwrap();
    }),
    ("steps over a quantised cache", |draw| {
        let stream = drawn_stream(draw);
        let format = draw.of(&[Cache::BnBsH, Cache::BnNBsD]);
        let shape = CacheShape::new(1, 2, DIM).format(format);
        let sizes = (6, draw.of(&[128, 512]));
        let Ok(cache) = cache(draw, &stream, sizes, shape, PadPolicy::SkipNegative) else {
            return;
        };
        let backends = Backends::none()
            .with(Backend::QuantisedDecode)
            .with(Backend::QuantisedPrefill)
            .with(Backend::MxFp8)
            .with(Backend::Fused);
        let heads = draw.of(&[2, 4, 6, 2, 4, 6, usize::MAX]);
        let mut attention = Attention::new(AttentionShape::new(heads, 2, DIM), cache, backends);
        let keys = draw.usize();
        let limits = GraphLimits::new([1, 2], draw.of(&[128, 128, 128, keys]));
        let captured = attention.capture(&stream, Causality::Causal, &limits);
        let mut captured = captured.ok();
        let settings = BatchSettings::of(attention.cache(), Causality::Causal);
        let mut sequences = [0, 1].map(|_| Sequence::new(attention.cache().pool()));
        for _ in 0..3 {
            let new = draw.of(&[1, 1, 2, 40]);
            for sequence in &mut sequences {
                attention.grow(&stream, sequence, new).unwrap();
            }
            let batch = sequences.each_ref().map(|of| BatchRequest::of(of, new));
            let mut metadata = AttentionMetadata::new(&batch, settings).unwrap();
            let query = rows(draw, &stream, 2 * new, heads.min(6));
            let (key, value) = (rows(draw, &stream, 2 * new, 2), rows(draw, &stream, 2 * new, 2));
            if let Some(graphs) = &mut captured
                && graphs.serves(&metadata)
            {
                let mut step = graphs.begin(&stream, &mut metadata).unwrap();
                let _ = step.forward(0, (&query, &key, &value));
                GRAPH_STEPS.count();
            } else if let Ok(mut step) = attention.begin(&stream, &metadata) {
                let _ = step.forward(draw.usize(), (&query, &key, &value));
                let _ = step.forward(0, (&query, &key, &value));
                STEPS.count();
            }
            // What was refused counts as written, whatever is there.
            for sequence in &sequences {
                let cache = attention.cache();
                cache.mark_computed(sequence, sequence.len()).unwrap();
            }
            let shorter = sequences[0].len() - draw.below(2);
            sequences[0].truncate(shorter).unwrap();
            let moves = [(draw.usize(), draw.usize())];
            let _ = attention.cache_mut().move_tokens(&stream, &sequences[1], moves);
            // All tokens stay, and the next ones may come.
            let len = sequences[1].len();
            sequences[1].truncate(len).unwrap();
        }
        stream.synchronize().unwrap();
    }),
];
