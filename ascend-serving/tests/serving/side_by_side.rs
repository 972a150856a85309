//! Caches with keys and values side by side: the numbers are those of a plain cache, and where the operator does not
//! read such a cache in place it is refused by name.

use crate::harness;
use crate::tokens::{DIM, dense, packed};
use approx::abs_diff_eq;

use ascend_attention::gather::{GatherPaKvCache, SequenceBlocks};
use ascend_attention::spec::{Cann, Soc};
use ascend_attention::{Stream, Tensor, bf16};
use ascend_serving::kv::{Cache, CacheShape, CacheWrite, CachedRows, PadPolicy, PagedKvCache, QuantisedType, Sequence};
use ascend_serving::{
    Attention, AttentionMetadata, AttentionShape, Backend, Backends, BatchRequest, BatchSettings, Causality, Error,
    GraphLimits,
};

const LAYERS: usize = 2;
const HEADS: usize = 4;
const KV_HEADS: usize = 2;
const BLOCKS: usize = 24;

/// A request, and the names of its tokens.
struct Request {
    sequence: Sequence,
    names: Vec<u64>,
}

struct Engine<'a> {
    stream: &'a Stream,
    attention: Attention<bf16>,
    next: u64,
    rows: Vec<Vec<bf16>>,
}

impl Engine<'_> {
    fn request(&self) -> Request {
        Request { sequence: Sequence::new(self.attention.cache().pool()), names: Vec::new() }
    }

    /// Adds tokens to requests, and returns their metadata and the names of the new tokens.
    fn grow(&mut self, batch: &mut [(&mut Request, usize)]) -> (AttentionMetadata, Vec<u64>) {
        let mut names = Vec::new();
        for (request, new) in batch.iter_mut() {
            let sequence = &mut request.sequence;
            self.attention.grow(self.stream, sequence, *new).unwrap();
            let added = self.next..self.next + *new as u64;
            self.next = added.end;
            request.names.extend(added.clone());
            names.extend(added);
        }
        let settings = BatchSettings::of(self.attention.cache(), Causality::Causal);
        let requests = batch.iter();
        let requests: Vec<_> = requests.map(|(request, new)| BatchRequest::of(&request.sequence, *new)).collect();
        (AttentionMetadata::new(&requests, settings).unwrap(), names)
    }

    fn inputs(&self, names: &[u64], layer: usize) -> [Tensor<bf16>; 3] {
        let heads = [HEADS, KV_HEADS, KV_HEADS];
        [0, 1, 2].map(|what| packed(self.stream, names, layer, what, heads[what as usize]))
    }

    /// Compares the row of the last token of the last request with its definition.
    fn check_last(&self, batch: &[(&mut Request, usize)], layer: usize, rows: &[bf16]) {
        let (request, _) = batch.last().unwrap();
        let want = dense(&request.names, layer, self.attention.shape(), |_| true);
        let got = &rows[rows.len() - HEADS * DIM..];
        for (got, want) in got.iter().zip(&want) {
            assert!(abs_diff_eq!(got.to_f64(), *want, epsilon = 2e-2), "{got} {want}");
        }
    }

    fn step(&mut self, batch: &mut [(&mut Request, usize)]) {
        let (metadata, names) = self.grow(batch);
        let layers = [0, 1].map(|layer| self.inputs(&names, layer));
        let mut outputs = Vec::new();
        let mut step = self.attention.begin(self.stream, &metadata).unwrap();
        for (layer, [query, key, value]) in layers.iter().enumerate() {
            let output = step.forward(layer, (query, key, value)).unwrap();
            outputs.push(output.download(self.stream).unwrap());
        }
        drop(step);
        for (layer, rows) in outputs.into_iter().enumerate() {
            self.check_last(batch, layer, &rows);
            self.rows.push(rows);
        }
    }

    /// Replays steps that decode a token of each request from a graph.
    fn replay(&mut self, batch: &mut [(&mut Request, usize)], steps: usize) {
        let limits = GraphLimits::new([batch.len()], 600);
        let graphs = self.attention.capture(self.stream, Causality::Causal, &limits);
        let mut graphs = graphs.unwrap();
        for _ in 0..steps {
            let (mut metadata, names) = self.grow(batch);
            let layers = [0, 1].map(|layer| self.inputs(&names, layer));
            let mut outputs = Vec::new();
            let mut step = graphs.begin(self.stream, &mut metadata).unwrap();
            for (layer, [query, key, value]) in layers.iter().enumerate() {
                let output = step.forward(layer, (query, key, value)).unwrap();
                outputs.push(output.download(self.stream).unwrap());
            }
            step.end().unwrap();
            for (layer, rows) in outputs.into_iter().enumerate() {
                self.check_last(batch, layer, &rows);
                self.rows.push(rows);
            }
        }
    }
}

fn attention(stream: &Stream, shape: CacheShape, backends: Backends<bf16>) -> Attention<bf16> {
    let pad = PadPolicy::SkipNegative;
    let cache = PagedKvCache::new(stream.device(), BLOCKS, 128, shape, pad).unwrap();
    let heads = AttentionShape::new(HEADS, KV_HEADS, DIM);
    Attention::new(heads, cache, backends)
}

/// Prompts, a prompt in chunks beside decodes, a fork in the middle of a block, moved tokens, decodes from a graph.
/// Returns the rows of all steps.
fn schedule(stream: &Stream, shape: CacheShape, backends: Backends<bf16>) -> Vec<Vec<bf16>> {
    let mut engine = Engine { stream, attention: attention(stream, shape, backends), next: 1, rows: Vec::new() };
    let pool = engine.attention.cache().pool().clone();
    let [mut first, mut second] = [(); 2].map(|()| engine.request());
    engine.step(&mut [(&mut first, 200), (&mut second, 5)]);
    engine.step(&mut [(&mut second, 130), (&mut first, 1)]);
    let mut fork = Request { sequence: first.sequence.fork(), names: first.names.clone() };
    let others = [(&mut first, 1), (&mut second, 90)];
    engine.step(&mut others.into_iter().chain([(&mut fork, 1)]).collect::<Vec<_>>());
    engine.step(&mut [(&mut fork, 3), (&mut second, 1), (&mut first, 1)]);
    // The last token takes the place of the one before it, over the edge of a block or not.
    let last = second.names.len() - 1;
    let moves = [(last, 100), (last - 1, 200), (3, 129)];
    let cache = engine.attention.cache_mut();
    cache.move_tokens(stream, &second.sequence, moves).unwrap();
    for (from, to) in moves {
        second.names[to] = second.names[from];
    }
    second.sequence.truncate(second.names.len()).unwrap();
    engine.replay(&mut [(&mut first, 1), (&mut fork, 1), (&mut second, 1)], 3);
    // Cached tokens laid one behind the other.
    let width = KV_HEADS * DIM;
    if shape.format == Cache::BnBsH {
        let mut rows = CachedRows::new(128);
        let row: Vec<usize> = second.sequence.row().to_vec();
        rows.push(&row, 2..second.names.len()).unwrap();
        let target = || Tensor::empty(stream.device(), [rows.len(), width]).unwrap();
        let (keys, values): (Tensor<bf16>, Tensor<bf16>) = (target(), target());
        let layer = engine.attention.cache().layer(1).unwrap();
        layer.gather(stream, &rows, &keys, &values).unwrap();
        // By the operator, in the memory that keys and values span.
        let step = if shape.side_by_side { 2 } else { 1 };
        let blocks = (BLOCKS - 1) * step + 1;
        let memory = |cache: &Tensor<bf16>| {
            let span = cache.span().unwrap();
            span.reshape([blocks, 128, KV_HEADS, DIM]).unwrap()
        };
        let caches = [memory(&layer.key), memory(&layer.value)];
        let row: Vec<usize> = row.iter().map(|block| block * step).collect();
        let tokens = second.names.len();
        let sequences = SequenceBlocks::new(stream, &[row], &[tokens], blocks, 128).unwrap();
        let plan = GatherPaKvCache::new().plan(&sequences, (&caches[0], &caches[1]));
        let gathered = plan.unwrap().launch(stream, (&caches[0], &caches[1])).unwrap();
        let all = [gathered.0, gathered.1];
        for (what, (copied, gathered)) in [&keys, &values].into_iter().zip(&all).enumerate() {
            let want = packed::<bf16>(stream, &second.names, 1, 1 + what as u64, KV_HEADS);
            let want = want.download(stream).unwrap();
            assert_eq!(copied.download(stream).unwrap(), want[2 * width..]);
            assert_eq!(gathered.download(stream).unwrap(), want);
        }
    }
    drop((first, second, fork));
    assert_eq!(pool.held_blocks(), 0);
    engine.rows
}

#[test]
fn schedules_give_the_numbers_of_a_plain_cache() {
    let _strict = ascend_emu::check_scope(ascend_emu::Check::Strict);
    let fused: fn() -> Backends<bf16> = || Backends::none().with(Backend::Fused);
    let merged: fn() -> Backends<bf16> = || Backends::none().with(Backend::CascadePrefill).with(Backend::Fused);
    let decoded: fn() -> Backends<bf16> = || Backends::none().with(Backend::PagedDecode).with(Backend::Fused);
    let every = [Cache::BnBsH, Cache::BnNBsD, Cache::Nz];
    // Atlas A2 reads blocks that lie apart in the split-fuse path alone.
    for (soc, formats) in [(Soc::AtlasA2, &every[..1]), (Soc::Ascend950, &every)] {
        let stream = harness::emulated_stream(soc, Cann::V9_2);
        for &format in formats {
            let shape = CacheShape::new(LAYERS, KV_HEADS, DIM).format(format);
            for backends in [fused, merged, decoded] {
                let plain = schedule(&stream, shape, backends());
                let apart = schedule(&stream, shape.side_by_side(), backends());
                assert_eq!(plain.len(), apart.len());
                for (step, (plain, apart)) in plain.iter().zip(&apart).enumerate() {
                    assert!(plain == apart, "{soc} {format} step {step}");
                }
            }
        }
    }
}

/// What a step of one token that decodes is refused by, if it is.
fn refusal(soc: Soc, cann: Cann, shape: CacheShape, backends: Backends<bf16>) -> Option<String> {
    let stream = harness::emulated_stream(soc, cann);
    let mut attention = attention(&stream, shape, backends);
    let mut sequence = Sequence::new(attention.cache().pool());
    attention.grow(&stream, &mut sequence, 3).unwrap();
    attention.cache().mark_computed(&sequence, 3).unwrap();
    attention.grow(&stream, &mut sequence, 1).unwrap();
    let settings = BatchSettings::of(attention.cache(), Causality::Causal);
    let metadata = AttentionMetadata::new(&[BatchRequest::of(&sequence, 1)], settings).unwrap();
    let [query, key, value] = [HEADS, KV_HEADS, KV_HEADS].map(|heads| packed::<bf16>(&stream, &[4], 0, 0, heads));
    let mut step = attention.begin(&stream, &metadata).unwrap();
    match step.forward(0, (&query, &key, &value)) {
        Ok(_) => None,
        Err(error @ Error::NoBackend { .. }) => Some(error.to_string()),
        Err(other) => panic!("{other}"),
    }
}

#[test]
fn calls_that_do_not_read_it_in_place_name_the_rule_and_the_ordinary_cache() {
    let plain = CacheShape::new(LAYERS, KV_HEADS, DIM);
    let apart = plain.side_by_side();
    let fused: fn() -> Backends<bf16> = || Backends::none().with(Backend::Fused);
    let single: fn() -> Backends<bf16> = || Backends::none().with(Backend::PagedDecode);
    for (soc, cann, backends, rule) in [
        (Soc::AtlasA2, Cann::V9_0, fused, "tensor.strided"),
        (Soc::AtlasA2, Cann::V9_1, fused, "tensor.strided"),
        (Soc::AtlasA3, Cann::V9_1, single, "tensor.contiguous"),
        (Soc::AtlasA2, Cann::V9_2, single, "cache.copied"),
        (Soc::Ascend950, Cann::V9_1, fused, "tensor.contiguous"),
    ] {
        let refused = refusal(soc, cann, apart, backends()).unwrap();
        assert!(refused.contains(rule), "{soc} {cann}: {refused}");
        assert!(refused.contains("contiguous"), "{refused}");
        if rule == "cache.copied" {
            let bytes = 2 * BLOCKS * 128 * KV_HEADS * DIM * 2;
            assert!(refused.contains(&format!("{bytes} bytes")), "{refused}");
        }
        // The fix.
        assert_eq!(refusal(soc, cann, plain, backends()), None);
    }
}

#[test]
fn shapes_that_do_not_go_side_by_side_are_refused() {
    let stream = harness::stream();
    let (device, pad) = (stream.device(), PadPolicy::SkipNegative);
    let uneven = CacheShape::new(1, 2, 64).value_dim(32);
    for shape in [uneven, CacheShape::latent(1)] {
        let shape = shape.side_by_side();
        let refused = PagedKvCache::<bf16>::new(device, 4, 128, shape, pad).unwrap_err();
        assert!(refused.to_string().contains("of one size"), "{refused}");
    }
    let shape = CacheShape::new(1, 2, 64).side_by_side();
    let refused = PagedKvCache::<bf16>::quantised_by_token(device, 4, 128, shape, pad, QuantisedType::Int8);
    let refused = refused.unwrap_err().to_string();
    assert!(refused.contains("lie apart"), "{refused}");
}

/// Without ScatterPaKvCache copies write, to the same places.
#[test]
fn copies_write_side_by_side() {
    let stream = harness::emulated_stream(Soc::AtlasInference, Cann::V9_1);
    for (format, kv_heads) in [(Cache::BnBsH, 2), (Cache::BnNBsD, 1)] {
        let shape = CacheShape::new(1, kv_heads, DIM).format(format).side_by_side();
        let pad = PadPolicy::SkipNegative;
        let mut cache = PagedKvCache::<bf16>::new(stream.device(), 5, 16, shape, pad).unwrap();
        let mut sequence = Sequence::new(cache.pool());
        let slots = cache.grow(&stream, &mut sequence, 50).unwrap();
        let names: Vec<u64> = (1..51).collect();
        let [key, value] = [1, 2].map(|what| packed(&stream, &names, 0, what, kv_heads));
        let write = CacheWrite::plan(&cache, &stream, &slots, &key, &value).unwrap();
        cache.write(&stream, &write, 0, &key, &value).unwrap();
        let mut rows = CachedRows::new(16);
        rows.push(sequence.row(), 0..50).unwrap();
        let target = || Tensor::empty(stream.device(), [50, kv_heads * DIM]).unwrap();
        let (keys, values): (Tensor<bf16>, Tensor<bf16>) = (target(), target());
        let layer = cache.layer(0).unwrap();
        layer.gather(&stream, &rows, &keys, &values).unwrap();
        for (got, want) in [(&keys, &key), (&values, &value)] {
            let (got, want) = (got.download(&stream), want.download(&stream));
            assert_eq!(got.unwrap(), want.unwrap());
        }
    }
}
