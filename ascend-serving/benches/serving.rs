//! What the serving layer costs the host: `cargo bench -p ascend-serving --bench serving`.

#![allow(missing_docs, clippy::unwrap_used, reason = "a bench, not an interface")]

use std::num::NonZeroUsize;

use ascend_attention::attention::BlockTable;
use ascend_attention::{Device, Runtime, Stream, Tensor, bf16};
use ascend_serving::kv::{BlockPool, CacheShape, PadPolicy, PagedKvCache, Sequence};
use ascend_serving::{
    Attention, AttentionBackend, AttentionMetadata, AttentionShape, Backend, Backends, BatchRequest, BatchSettings,
    Causality, LayerGroup, LayerTensors, RangeCheck, SharedPrefixDecode, StatePolicy, StepContext, StepPlan,
};
use divan::Bencher;

fn main() {
    divan::main();
}

/// Requests that decode, of 1000 to 5000 tokens each.
fn sequences(requests: usize) -> (BlockPool, Vec<Sequence>) {
    let pool = BlockPool::new(16_384, 128, PadPolicy::SkipNegative).unwrap();
    let sequence = |request: usize| {
        let mut sequence = Sequence::new(&pool);
        let _ = sequence.grow(1000 + request * 7919 % 4000).unwrap();
        sequence
    };
    let sequences = (0..requests).map(sequence).collect();
    (pool, sequences)
}

fn settings(pool: &BlockPool) -> BatchSettings {
    BatchSettings::of(pool, Causality::Causal)
}

fn batch(sequences: &[Sequence]) -> Vec<BatchRequest<'_>> {
    let one = |sequence| BatchRequest::of(sequence, 1).recompute();
    sequences.iter().map(one).collect()
}

/// Lengths, slots, table and state of a decode step.
#[divan::bench(args = [1, 32, 256])]
fn plan_decode_step(bencher: Bencher<'_, '_>, requests: usize) {
    let (pool, sequences) = sequences(requests);
    let mut metadata = AttentionMetadata::new(&batch(&sequences), settings(&pool)).unwrap();
    bencher.bench_local(|| {
        metadata.renew(&batch(&sequences)).unwrap();
        metadata.tokens()
    });
}

/// The metadata of a step of a model with full and windowed layers, for both groups.
#[divan::bench(args = [1, 32, 256])]
fn plan_mixed_decode_step(bencher: Bencher<'_, '_>, requests: usize) {
    let device = Runtime::emulated().unwrap().device(0).unwrap();
    let stream = device.stream().unwrap();
    let window = NonZeroUsize::new(1024).map_or(Causality::Causal, Causality::Window);
    let group = |layer: usize, causality| {
        // One element a token: of the caches the pools alone are used.
        let shape = CacheShape::new(1, 1, 1);
        let pad = PadPolicy::SkipNegative;
        let cache = PagedKvCache::<bf16>::new(&device, 16_384, 128, shape, pad).unwrap();
        LayerGroup::new([layer], causality, AttentionShape::new(1, 1, 1), cache, Backends::none())
    };
    let groups = [group(0, Causality::Causal), group(1, window)];
    let mut attention = Attention::of_groups(2, groups).unwrap();
    let sequences: Vec<_> = (0..requests)
        .map(|request| {
            let mut sequence = attention.sequence();
            for tokens in [1000 + request * 7919 % 4000, 1] {
                attention.grow(&stream, &mut sequence, tokens).unwrap();
            }
            sequence
        })
        .collect();
    let batch = || -> Vec<_> {
        let one = |sequence| BatchRequest::of(sequence, 1);
        sequences.iter().map(one).collect()
    };
    let mut metadata = attention.metadata(&batch(), StatePolicy::default()).unwrap();
    bencher.bench_local(|| {
        metadata.renew(&batch()).unwrap();
        metadata.tokens()
    });
}

/// Layers of a decode step with and without a look at their numbers, until the device is done: 32 requests of 1000
/// tokens.
#[divan::bench(args = ["off", "always"])]
fn forward_with_range_check(bencher: Bencher<'_, '_>, check: &str) {
    const LAYERS: usize = 4;
    let stream = Runtime::emulated().unwrap().device(0).unwrap().stream().unwrap();
    let shape = CacheShape::new(LAYERS, 2, 128);
    let cache = PagedKvCache::<bf16>::new(stream.device(), 512, 128, shape, PadPolicy::SkipNegative).unwrap();
    let backends = Backends::none().with(Backend::Fused);
    let mut attention = Attention::new(AttentionShape::new(8, 2, 128), cache, backends);
    let check = (check == "always").then(RangeCheck::always);
    attention.set_range_check(check).unwrap();
    let mut sequences = Vec::new();
    for _ in 0..32 {
        let mut sequence = Sequence::new(attention.cache().pool());
        attention.grow(&stream, &mut sequence, 1000).unwrap();
        attention.cache().mark_computed(&sequence, 999).unwrap();
        sequences.push(sequence);
    }
    let settings = BatchSettings::of(attention.cache(), Causality::Causal);
    let metadata = AttentionMetadata::new(&batch(&sequences), settings).unwrap();
    let rows = |heads: usize| {
        let ones = vec![bf16::ONE; 32 * heads * 128];
        stream.upload(&ones, [32, heads, 128]).unwrap()
    };
    let (query, key) = (rows(8), rows(2));
    bencher.bench_local(|| {
        let mut step = attention.begin(&stream, &metadata).unwrap();
        for layer in 0..LAYERS {
            step.forward(layer, (&query, &key, &key)).unwrap();
        }
        drop(step);
        stream.synchronize().unwrap();
        attention.await_range_findings().unwrap().len()
    });
}

/// A token more in each request, taken back again.
#[divan::bench(args = [256])]
fn grow_sequences(bencher: Bencher<'_, '_>, requests: usize) {
    let (_pool, mut sequences) = sequences(requests);
    bencher.bench_local(|| {
        for sequence in &mut sequences {
            let len = sequence.len();
            let _ = sequence.grow(1).unwrap();
            sequence.truncate(len).unwrap();
        }
    });
}

/// A prompt of 1000 tokens, beside 64 requests that decode.
#[divan::bench]
fn plan_chunked_step(bencher: Bencher<'_, '_>) {
    let (pool, sequences) = sequences(65);
    let mut batch = batch(&sequences);
    batch[0] = BatchRequest::of(&sequences[0], 1000);
    let mut metadata = AttentionMetadata::new(&batch, settings(&pool)).unwrap();
    bencher.bench_local(|| {
        metadata.renew(&batch).unwrap();
        metadata.tokens()
    });
}

/// A layer of a decode step on the emulation: requests with this number of shared tokens in front of 40 of their own.
struct SharedPrefix {
    shape: AttentionShape,
    stream: Stream,
    cache: PagedKvCache<bf16>,
    metadata: AttentionMetadata,
    block_table: BlockTable,
    query: Tensor<bf16>,
    new: Tensor<bf16>,
}

impl SharedPrefix {
    const SIZES: [(usize, usize); 8] =
        [(2, 8192), (4, 1024), (4, 4096), (16, 256), (16, 1024), (16, 4096), (64, 256), (64, 1024)];

    fn new(device: &Device, (requests, prefix): (usize, usize)) -> Self {
        let stream = device.stream().unwrap();
        let shape = AttentionShape::new(16, 4, 128);
        // Shared blocks are counted for each request.
        let blocks = requests * (prefix / 128 + 1) + 1;
        let cache_shape = CacheShape::new(1, shape.kv_heads, shape.head_dim);
        let pad = PadPolicy::SkipNegative;
        let cache = PagedKvCache::new(device, blocks, 128, cache_shape, pad).unwrap();
        let mut donor = Sequence::new(cache.pool());
        let _ = donor.grow(prefix).unwrap();
        let sequence = |_| {
            let mut sequence = donor.share_prefix(prefix).unwrap();
            let _ = sequence.grow(40).unwrap();
            sequence
        };
        let sequences: Vec<Sequence> = (0..requests).map(sequence).collect();
        let settings = settings(cache.pool());
        let metadata = AttentionMetadata::new(&batch(&sequences), settings).unwrap();
        let block_table = cache.block_table(&stream, metadata.table()).unwrap();
        let rows = |heads: usize| {
            let data = vec![bf16::ONE; requests * heads * shape.head_dim];
            let shape = [requests, heads, shape.head_dim];
            stream.upload(&data, shape).unwrap()
        };
        let (query, new) = (rows(shape.heads), rows(shape.kv_heads));
        Self { shape, stream, cache, metadata, block_table, query, new }
    }

    /// Planned once, then launched and waited for.
    fn bench(&self, bencher: Bencher<'_, '_>, backend: &dyn AttentionBackend<bf16>) {
        let step = StepContext {
            stream: &self.stream,
            shape: self.shape,
            metadata: &self.metadata,
            mask: self.metadata.mask(),
            block_table: &self.block_table,
            recorded: false,
            shares_keys: false,
        };
        let layer = LayerTensors {
            layer: 0,
            query: &self.query,
            key: &self.new,
            value: &self.new,
            cache: self.cache.layer(0).unwrap(),
            quantised: None,
            learnable_sink: None,
            latent: None,
        };
        let plan = StepPlan::new(backend, &step, &layer).unwrap();
        bencher.bench_local(|| {
            let output = plan.launch(step.stream, &layer).unwrap();
            self.stream.synchronize().unwrap();
            output
        });
    }
}

/// Each request reads its prefix, in one packed call.
#[divan::bench(args = SharedPrefix::SIZES, sample_count = 10)]
fn shared_prefix_by_fused(bencher: Bencher<'_, '_>, sizes: (usize, usize)) {
    let device = Runtime::emulated().unwrap().device(0).unwrap();
    SharedPrefix::new(&device, sizes).bench(bencher, &Backend::Fused);
}

/// Each request reads its prefix, by the operator's decode path.
#[divan::bench(args = SharedPrefix::SIZES, sample_count = 10)]
fn shared_prefix_by_paged_decode(bencher: Bencher<'_, '_>, sizes: (usize, usize)) {
    let device = Runtime::emulated().unwrap().device(0).unwrap();
    SharedPrefix::new(&device, sizes).bench(bencher, &Backend::PagedDecode);
}

/// The prefix is read once.
#[divan::bench(args = SharedPrefix::SIZES, sample_count = 10)]
fn shared_prefix_read_once(bencher: Bencher<'_, '_>, sizes: (usize, usize)) {
    let device = Runtime::emulated().unwrap().device(0).unwrap();
    SharedPrefix::new(&device, sizes).bench(bencher, &Backend::SharedPrefixDecode(SharedPrefixDecode::ALWAYS));
}
