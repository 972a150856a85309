//! Decode steps of any number of requests, replayed from graphs captured for a few sizes.

use crate::harness;
mod drafts;
mod groups;
pub mod layers;
mod one_loop;
mod refused;

use ascend_attention::attention::{BlockTable, CallLengths, Cumulative, Inputs, PerRequest};
use ascend_attention::graph::Capturing;
use ascend_attention::scatter::{ScatterPaKvCache, SlotMapping};
use ascend_attention::{FusedInferAttention, Layout, Output, Stream, Tensor, bf16};
use ascend_serving::kv::{CacheShape, PadPolicy, PagedKvCache, Sequence};
use ascend_serving::{
    Attention, AttentionMetadata, AttentionShape, AttentionState, Backends, BatchRequest, BatchSettings, Causality,
    Error, GraphPool, Result, StatePolicy, rules,
};

const BLOCKS: usize = 24;
const BLOCK_SIZE: usize = 128;
const COLUMNS: usize = 3;
const LAYERS: usize = 2;
const HEADS: usize = 2;
const DIM: usize = 64;

fn settings(cache: &PagedKvCache<bf16>) -> BatchSettings {
    BatchSettings::of(cache, Causality::Causal).policy(StatePolicy::new(true, None))
}

fn numbers(seed: u64, n: usize) -> Vec<bf16> {
    let numbers = harness::numbers(seed, n);
    numbers.into_iter().map(bf16::from_f32).collect()
}

struct Layer {
    query: Tensor<bf16>,
    key: Tensor<bf16>,
    value: Tensor<bf16>,
    output: Output<bf16>,
}

struct Buffers {
    table: BlockTable,
    slots: SlotMapping,
    layers: Vec<Layer>,
}

struct Model {
    stream: Stream,
    cache: PagedKvCache<bf16>,
    call: FusedInferAttention,
}

impl Model {
    fn new() -> Self {
        let stream = harness::stream();
        let device = stream.device();
        let shape = CacheShape::new(LAYERS, 1, DIM);
        let pad = PadPolicy::SkipNegative;
        let cache = PagedKvCache::new(device, BLOCKS, BLOCK_SIZE, shape, pad).unwrap();
        let mask = settings(&cache).causality.mask(&device.masks()).unwrap();
        let call = FusedInferAttention::new(Layout::Tnd).heads(HEADS).kv_heads(1).scale(0.125).mask(mask);
        Self { stream, cache, call }
    }

    /// Graphs of one query token.
    fn graphs_of_one(&self) -> GraphPool<Buffers> {
        GraphPool::capture(
            self.stream.device(),
            &[1],
            |size| self.buffers(size),
            |capture, size, buffers| self.record(capture, size, buffers),
        )
        .unwrap()
    }

    fn buffers(&self, size: usize) -> Result<Buffers> {
        let (device, rows) = (self.stream.device(), size);
        let layer = |_| {
            Ok(Layer {
                query: Tensor::empty(device, [rows, HEADS, DIM])?,
                key: Tensor::empty(device, [rows, 1, DIM])?,
                value: Tensor::empty(device, [rows, 1, DIM])?,
                output: Output { attention: Tensor::empty(device, [rows, HEADS, DIM])?, softmax_lse: None },
            })
        };
        let nowhere = vec![-1; rows];
        let slots = BLOCKS * BLOCK_SIZE;
        Ok(Buffers {
            table: BlockTable::zeroed(device, rows, COLUMNS, BLOCK_SIZE)?,
            slots: SlotMapping::allowing(&self.stream, &nowhere, slots, &["slot_mapping.negative"])?,
            layers: (0..LAYERS).map(layer).collect::<Result<_>>()?,
        })
    }

    fn inputs<'a>(&'a self, buffers: &'a Buffers, layer: usize) -> Inputs<'a, bf16> {
        let cache = self.cache.layer(layer).unwrap();
        Inputs::new(&buffers.layers[layer].query, &cache.key, &cache.value).paged(&buffers.table)
    }

    fn record(&self, capture: &Capturing<'_>, size: usize, buffers: &Buffers) -> Result<()> {
        let longest = COLUMNS * BLOCK_SIZE;
        let ends = Cumulative::new((1..=size).collect())?;
        let keys = PerRequest::new(vec![longest; size])?;
        let longest = CallLengths::PackedPaged { q: &ends, kv: &keys };
        let call = capture.attention(&self.call, longest, self.inputs(buffers, 0))?;
        let Layer { key, value, .. } = &buffers.layers[0];
        let cache = self.cache.layer(0)?;
        let write = ScatterPaKvCache::new().plan((key, value, &buffers.slots, &cache.key, &cache.value))?;
        for (at, layer) in buffers.layers.iter().enumerate() {
            let cache = self.cache.layer(at)?;
            let Layer { key, value, .. } = layer;
            let (keys, values) = (&cache.key, &cache.value);
            write.launch(capture, (key, value, &buffers.slots, keys, values))?;
            capture.launch_into(call, self.inputs(buffers, at), &mut layer.output.clone())?;
        }
        Ok(())
    }

    fn fill(&self, buffers: &Buffers, metadata: &AttentionMetadata, seed: u64) -> Result<()> {
        let table = metadata.table();
        let rows: Vec<_> = (0..table.requests()).filter_map(|r| table.row(r)).collect();
        buffers.table.overwrite(&self.stream, &rows)?;
        let slots: Vec<i64> = metadata.slots().iter().map(|slot| (*slot).into()).collect();
        buffers.slots.overwrite(&self.stream, &slots)?;
        for (at, layer) in buffers.layers.iter().enumerate() {
            let new = |tensor: &Tensor<bf16>, salt| {
                let seed = 100 * seed + 10 * at as u64 + salt;
                tensor.overwrite(&self.stream, &numbers(seed, tensor.len()))
            };
            new(&layer.query, 1)?;
            new(&layer.key, 2)?;
            new(&layer.value, 3)?;
            let nan = vec![bf16::NAN; layer.output.attention.len()];
            layer.output.attention.overwrite(&self.stream, &nan)?;
        }
        Ok(())
    }
}

#[test]
fn steps_of_any_size_are_replayed_from_the_smallest_that_holds_them() {
    let model = Model::new();
    let stream = &model.stream;
    let pool = model.cache.pool().clone();
    let mut graphs = GraphPool::capture(
        stream.device(),
        &[4, 1, 6, 4],
        |size| model.buffers(size),
        |capture, size, buffers| model.record(capture, size, buffers),
    )
    .unwrap();
    assert_eq!(graphs.sizes().collect::<Vec<_>>(), [1, 4, 6]);
    assert_eq!(graphs.graph(4).unwrap().varying(), LAYERS);
    let mut sequences: Vec<Sequence> = Vec::new();
    for (step, requests) in [1usize, 2, 5, 6, 4, 3, 1, 6].into_iter().enumerate() {
        sequences.truncate(requests);
        while sequences.len() < requests {
            // Other lengths, some across a block. Their cached keys are zeros, or what earlier requests left.
            let mut sequence = Sequence::new(&pool);
            let _ = sequence.grow(1 + 83 * (sequences.len() % 4)).unwrap();
            model.cache.mark_computed(&sequence, sequence.len()).unwrap();
            sequences.push(sequence);
        }
        for sequence in &mut sequences {
            let _ = sequence.grow(1).unwrap();
        }
        let batch: Vec<_> = sequences.iter().map(|s| BatchRequest::of(s, 1)).collect();
        let mut metadata = AttentionMetadata::new(&batch, settings(&model.cache)).unwrap();
        assert_eq!(metadata.state(), AttentionState::DecodeOnly);
        let buffers = graphs
            .launch(stream, &mut metadata, |buffers, metadata| model.fill(buffers, metadata, step as u64))
            .unwrap();
        let size = metadata.tokens();
        assert_eq!(size, [1, 4, 6].into_iter().find(|s| *s >= requests).unwrap());
        for (at, layer) in buffers.layers.iter().enumerate() {
            let got = layer.output.attention.download(stream).unwrap();
            let call = metadata.call_lengths().apply(model.call.clone());
            let inputs = model.inputs(buffers, at);
            let plan = call.plan(inputs).unwrap();
            let want = plan.launch(stream, inputs).unwrap();
            let want = want.attention.download(stream).unwrap();
            assert_eq!(got, want, "step {step}, layer {at}");
            assert!(got.iter().all(|x| x.is_finite()));
            // Each request's new key is where its slot says.
            let key = layer.key.download(stream).unwrap();
            let cache = model.cache.layer(at).unwrap().key.download(stream).unwrap();
            for (row, slot) in metadata.slots().iter().take(requests).enumerate() {
                let at = *slot as usize * DIM;
                assert_eq!(cache[at..at + DIM], key[row * DIM..][..DIM]);
            }
        }
    }
    drop(sequences);
    let mut sequences: Vec<_> = (0..7).map(|_| Sequence::new(&pool)).collect();
    for sequence in &mut sequences {
        let _ = sequence.grow(2).unwrap();
    }
    let batch: Vec<_> = sequences.iter().map(|s| BatchRequest::of(s, 1)).collect();
    let mut metadata = AttentionMetadata::new(&batch, settings(&model.cache)).unwrap();
    let error = graphs.launch(stream, &mut metadata, |_, _| Ok(()));
    match error.map(drop) {
        Err(Error::Violation(refused)) => assert_eq!(refused.rule, &rules::GRAPH_SIZE),
        other => panic!("{other:?}"),
    }
}

/// Both would write their next token into one block.
#[test]
fn a_fork_between_metadata_and_begin_is_refused() {
    let model = Model::new();
    let stream = &model.stream;
    let mut graphs = model.graphs_of_one();
    let mut sequence = Sequence::new(model.cache.pool());
    let _ = sequence.grow(3).unwrap();
    model.cache.mark_computed(&sequence, 3).unwrap();
    let _ = sequence.grow(1).unwrap();
    let metadata = || {
        let batch = [BatchRequest::of(&sequence, 1)];
        AttentionMetadata::new(&batch, settings(&model.cache)).unwrap()
    };
    let mut before = metadata();
    let fork = sequence.fork();
    let mut launch = |metadata: &mut AttentionMetadata| {
        let launched = graphs.launch(stream, metadata, |buffers, metadata| model.fill(buffers, metadata, 0));
        launched.map(drop)
    };
    let error = launch(&mut before).unwrap_err();
    assert!(error.breaks(&rules::TABLE_SHARED), "{error}");
    drop(fork);
    launch(&mut metadata()).unwrap();
    // Metadata that could not be renewed have no requests, and would be padding alone.
    let mut none = metadata();
    assert!(none.renew(&[BatchRequest::of(&sequence, 0)]).is_err());
    let error = launch(&mut none).unwrap_err();
    assert!(error.breaks(&rules::BATCH_EMPTY), "{error}");
    // A block that is given back during a step is not handed out before its end.
    let _ = sequence.grow(1).unwrap();
    let batch = [BatchRequest::of(&sequence, 1)];
    let mut metadata = AttentionMetadata::new(&batch, settings(&model.cache)).unwrap();
    let fill = |buffers: &Buffers, metadata: &AttentionMetadata| model.fill(buffers, metadata, 0);
    let mut step = graphs.begin(stream, &mut metadata, fill).unwrap();
    step.launch(0).unwrap();
    drop(sequence);
    let pool = model.cache.pool();
    assert_eq!((pool.steps_in_flight(), pool.waiting_blocks()), (1, 1));
    drop(step);
    stream.synchronize().unwrap();
    assert_eq!(pool.steps_in_flight(), 0);
}

/// A cache that joins the pool while a step is open has nothing of it.
#[test]
fn a_step_that_is_open_counts_in_the_caches_that_were_there() {
    let model = Model::new();
    let stream = &model.stream;
    let mut graphs = model.graphs_of_one();
    let pool = model.cache.pool().clone();
    let mut sequence = Sequence::new(&pool);
    let _ = sequence.grow(1).unwrap();
    let batch = [BatchRequest::of(&sequence, 1)];
    let mut metadata = AttentionMetadata::new(&batch, settings(&model.cache)).unwrap();
    let fill = |buffers: &Buffers, metadata: &AttentionMetadata| model.fill(buffers, metadata, 0);
    let mut step = graphs.begin(stream, &mut metadata, fill).unwrap();
    sequence.truncate(0).unwrap();
    let (shape, pad) = (model.cache.shape(), PadPolicy::SkipNegative);
    let later = PagedKvCache::<bf16>::new(stream.device(), BLOCKS, BLOCK_SIZE, shape, pad);
    let later = later.unwrap().with_pool(&pool).unwrap();
    let _ = sequence.grow(1).unwrap();
    let batch = [BatchRequest::of(&sequence, 1)];
    let settings = settings(&later);
    let metadata = AttentionMetadata::new(&batch, settings).unwrap();
    let shape = AttentionShape::new(HEADS, 1, DIM);
    let mut attention = Attention::new(shape, later, Backends::standard(stream.device()));
    let open = attention.begin(stream, &metadata).unwrap();
    step.launch(0).unwrap();
    drop((step, open));
    assert_eq!(attention.cache().computed_tokens(&sequence), Ok(0));
    assert_eq!(model.cache.computed_tokens(&sequence), Ok(0));
}

/// The lengths of a refused replay are there for the next one.
#[test]
fn a_replay_that_a_rule_refuses_is_repeated() {
    let model = Model::new();
    let stream = &model.stream;
    let mut graphs = model.graphs_of_one();
    let mut sequence = Sequence::new(model.cache.pool());
    let _ = sequence.grow(BLOCK_SIZE).unwrap();
    model.cache.mark_computed(&sequence, BLOCK_SIZE).unwrap();
    let _ = sequence.grow(1).unwrap();
    let batch = [BatchRequest::of(&sequence, 1)];
    let mut metadata = AttentionMetadata::new(&batch, settings(&model.cache)).unwrap();
    let row = metadata.table().row(0).unwrap().to_vec();
    let fill = |buffers: &Buffers, metadata: &AttentionMetadata| model.fill(buffers, metadata, 0);
    let mut step = graphs.begin(stream, &mut metadata, fill).unwrap();
    step.buffers().table.overwrite(stream, &[&row[..1]]).unwrap();
    for _ in 0..2 {
        let refused = step.launch(0).unwrap_err().to_string();
        assert!(refused.contains("block_table.row_short"), "{refused}");
    }
    step.buffers().table.overwrite(stream, &[&row]).unwrap();
    step.launch(0).unwrap();
    let again = step.launch(0).unwrap_err();
    assert!(again.breaks(&rules::STEP_LAYER_REPEATED), "{again}");
    let buffers = step.buffers();
    step.end().unwrap();
    let inputs = model.inputs(buffers, 1);
    let plan = metadata.call_lengths().apply(model.call.clone()).plan(inputs).unwrap();
    let want = plan.launch(stream, inputs).unwrap().attention.download(stream).unwrap();
    assert_eq!(buffers.layers[1].output.attention.download(stream).unwrap(), want);
}
