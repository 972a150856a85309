//! Decode steps replayed from graphs: for each layer and each of some sizes one, since the host computes between layers.

use std::collections::HashMap;
use std::rc::Rc;

use ascend_attention::attention::{BlockTable, Inputs};
use ascend_attention::graph::Capturing;
use ascend_attention::kv::{LayerCache, ScatterPaKvCache, SlotMapping};
use ascend_attention::serving::{
    AttentionMetadata, CallLengths, Cumulative, GraphPool, PerRequest,
};
use ascend_attention::{FusedInferAttention, Layout, Output, Result, Stream, Tensor, bf16};

use crate::engine::{BLOCK_SIZE, Kind, rounded, widened};
use crate::model::{Attended, Config};

/// What a graph reads and writes.
struct Buffers {
    shared: Rc<Shared>,
    query: Tensor<bf16>,
    key: Tensor<bf16>,
    value: Tensor<bf16>,
    output: Output<bf16>,
}

/// What the layers of a kind read in common, for a size.
struct Shared {
    /// The most keys of a request.
    most_keys: i64,
    table: BlockTable,
    slots: SlotMapping,
}

/// The graphs of every layer.
pub(crate) struct Graphs {
    layers: Vec<Layer>,
}

struct Layer {
    /// The kind of the layer.
    kind: usize,
    /// Whether it is the first of its kind, which fills what all of the kind read.
    leads: bool,
    pool: GraphPool<Buffers>,
}

impl Graphs {
    pub(crate) fn capture(
        config: &Config,
        stream: &Stream,
        kinds: &[Kind],
        places: &[(usize, usize)],
        sizes: &[u32],
    ) -> Result<Self> {
        let device = stream.device();
        let shared = kinds.iter().map(|kind| {
            let shared = sizes.iter();
            let shared = shared.map(|size| Ok((*size, Rc::new(Shared::new(stream, kind, *size)?))));
            shared.collect::<Result<HashMap<_, _>>>()
        });
        let shared = shared.collect::<Result<Vec<_>>>()?;
        let layer = |&(at, number): &(usize, usize)| {
            let (kind, shared) = (&kinds[at], &shared[at]);
            let cache = kind.attention.cache().layer(number)?;
            let call = FusedInferAttention::new(Layout::Tnd)
                .heads(config.heads)
                .kv_heads(config.kv_heads)
                .scale(1.0 / (config.head_dim as f64).sqrt())
                .mask(kind.causality.mask(&device.masks())?);
            let pool = GraphPool::capture(
                device,
                sizes,
                |size| Buffers::new(config, stream, Rc::clone(&shared[&size]), size),
                |capture, size, buffers| record(capture, &call, cache, size, buffers),
            )?;
            Ok(Layer {
                kind: at,
                leads: number == 0,
                pool,
            })
        };
        Ok(Self {
            layers: places.iter().map(layer).collect::<Result<_>>()?,
        })
    }

    /// Whether there are graphs for so many requests with so many keys.
    pub(crate) fn hold(&self, metadata: &[AttentionMetadata]) -> bool {
        self.layers.iter().all(|layer| {
            let of = &metadata[layer.kind];
            let size = layer.pool.size_for(of.tokens());
            let graph = size.and_then(|size| layer.pool.graph(size));
            let most = graph.map_or(0, |graph| graph.buffers().shared.most_keys);
            of.kv_lengths().lengths().iter().all(|keys| *keys <= most)
        })
    }

    /// The attention of a layer of a decode step.
    pub(crate) fn replay(
        &mut self,
        stream: &Stream,
        layer: usize,
        metadata: &mut [AttentionMetadata],
        attended: &Attended,
    ) -> Result<Vec<f32>> {
        let Layer { kind, leads, pool } = &mut self.layers[layer];
        let buffers = pool.replay(stream, &mut metadata[*kind], |buffers, metadata| {
            if *leads {
                buffers.shared.fill(stream, metadata)?;
            }
            let filled = |tensor: &Tensor<bf16>, rows: &[f32]| {
                let mut rows = rounded(rows);
                rows.resize(tensor.len(), bf16::ZERO);
                tensor.overwrite(stream, &rows)
            };
            filled(&buffers.query, &attended.query)?;
            filled(&buffers.key, &attended.key)?;
            filled(&buffers.value, &attended.value)
        })?;
        let mut rows = widened(&buffers.output.attention.download(stream)?);
        rows.truncate(attended.query.len());
        Ok(rows)
    }
}

impl Buffers {
    fn new(config: &Config, stream: &Stream, shared: Rc<Shared>, size: u32) -> Result<Self> {
        let rows = |heads| Tensor::empty(stream.device(), [size as usize, heads, config.head_dim]);
        Ok(Self {
            shared,
            query: rows(config.heads)?,
            key: rows(config.kv_heads)?,
            value: rows(config.kv_heads)?,
            output: Output {
                attention: rows(config.heads)?,
                softmax_lse: None,
            },
        })
    }
}

impl Shared {
    fn new(stream: &Stream, kind: &Kind, size: u32) -> Result<Self> {
        // Of each request alike: a captured call has to fit the cache at the longest lengths.
        let blocks = kind.pool().blocks() / size;
        let columns = kind.most_keys.div_ceil(BLOCK_SIZE).min(blocks);
        let places = u64::from(kind.pool().blocks() * BLOCK_SIZE);
        // Padding is written to one slot.
        let twice = &["slot_mapping.unique"];
        let slots = vec![0; size as usize];
        Ok(Self {
            most_keys: i64::from(kind.most_keys.min(columns * BLOCK_SIZE)),
            table: BlockTable::zeroed(
                stream.device(),
                size as usize,
                columns as usize,
                BLOCK_SIZE as usize,
            )?,
            slots: SlotMapping::allowing(stream, &slots, places, twice)?,
        })
    }

    fn fill(&self, stream: &Stream, metadata: &AttentionMetadata) -> Result<()> {
        let table = metadata.table();
        let rows: Vec<_> = (0..table.requests())
            .filter_map(|row| table.row(row))
            .collect();
        self.table.overwrite(stream, &rows)?;
        let slots: Vec<i64> = metadata
            .slots()
            .iter()
            .map(|slot| i64::from(*slot))
            .collect();
        self.slots.overwrite(stream, &slots)
    }
}

/// A layer of a decode step of `size` requests: writes its keys and values, then attends.
fn record(
    capture: &mut Capturing<'_>,
    call: &FusedInferAttention,
    cache: &LayerCache<bf16>,
    size: u32,
    buffers: &Buffers,
) -> Result<()> {
    let shared = &buffers.shared;
    let (table, slots) = (&shared.table, &shared.slots);
    let ends = Cumulative::new((1..=i64::from(size)).collect())?;
    let keys = PerRequest::new(vec![shared.most_keys; size as usize])?;
    let longest = CallLengths::PackedPaged {
        q: &ends,
        kv: &keys,
    };
    let inputs = Inputs::new(&buffers.query, &cache.key, &cache.value).paged(table);
    let call = capture.attention(call, longest, &inputs)?;
    let (key, value) = (&buffers.key, &buffers.value);
    let write = ScatterPaKvCache::new().plan(key, value, slots, &cache.key, &cache.value)?;
    capture.scatter(&write, key, value, slots, &cache.key, &cache.value)?;
    capture.launch(call, &inputs, &buffers.output)
}
