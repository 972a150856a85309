//! Decode steps replayed from graphs, layer by layer.

use std::fmt;

use ascend_attention::attention::{BlockTable, Cumulative, Inputs};
use ascend_attention::graph::{Capturing, KeyLimits};
use ascend_attention::scatter::{CacheOrder, ScatterPaKvCache, SlotMapping};
use ascend_attention::spec::Layout;
use ascend_attention::spec::fia::Cache;
use ascend_attention::{AnyTensor, Element, Mask, Output, Stream, Tensor};

use crate::batch::{AttentionMetadata, Causality, MaskKind};
use crate::engine::{Attention, GroupedAttention, GroupedMetadata, same_causality, same_groups};
use crate::error::{Error, Result};
use crate::kv::{BlockPool, PadPolicy, capacity, no_layer};
use crate::refusal::{Refused, Rule, refused};

use super::attention_graph_step::{AttentionGraphStep, GraphTensors, KindBuffers};
use super::graph_limits::GraphLimits;
use super::graph_pool::{GraphPool, packed_paged};

/// Layers that share a cache, to be captured.
struct Kind<'a, T: Element> {
    attention: &'a Attention<T>,
    /// Which keys the tokens of each layer see.
    layers: Vec<Causality>,
    /// Whether sequences give back what lies in front of the window.
    gives_back: bool,
}

impl<T: Element> Kind<'_, T> {
    fn limits(&self, limits: &GraphLimits) -> KeyLimits {
        let pool = self.attention.cache().pool();
        let block_size = pool.block_size();
        let shown = self.layers.first().filter(|_| self.gives_back);
        let shown = shown.and_then(|causality| causality.window());
        // The block in which the window begins is there as a whole.
        let keys = shown.map_or(usize::MAX, |window| {
            (window.get()).saturating_add(block_size.saturating_sub(1))
        });
        KeyLimits {
            keys: limits.keys.min(keys),
            blocks: limits.blocks.min(pool.blocks()),
            block_size,
        }
    }
}

/// Layers that were captured.
struct CapturedKind {
    pool: BlockPool,
    /// Each that a layer has, once.
    seen: Vec<MaskKind>,
    limits: KeyLimits,
}

impl CapturedKind {
    /// Refuses a step whose tokens see other keys, or whose sequences gave back what some layer shows.
    fn admits(&self, metadata: &AttentionMetadata) -> Result<(), Refused> {
        let own = metadata.mask().causality()?;
        if let Some(first) = self.seen.first()
            && !self.seen.contains(metadata.mask())
        {
            same_causality(own, first.causality()?)?;
        }
        self.seen
            .iter()
            .try_for_each(|seen| metadata.keeps_for(seen))
    }
}

/// Decode steps of any number of requests, replayed from graphs that were captured for a few sizes: one graph of each
/// layer, so that the model's other work stands between them. One object serves all layers of the model and all sizes.
///
/// A graph writes the layer's keys and values into the cache and attends by one packed call (TND), as
/// [`Fused`](crate::Fused) does, whose conditions hold. From [`Attention::capture`] or
/// [`GroupedAttention::capture`](crate::GroupedAttention::capture).
///
/// ```
/// use ascend_serving::kv::{CacheShape, PadPolicy, PagedKvCache, Sequence};
/// use ascend_serving::{
///     Attention, AttentionMetadata, AttentionShape, Backends, BatchRequest, BatchSettings, Causality, Fused, GraphLimits,
/// };
/// use ascend_attention::{Runtime, bf16};
///
/// # fn main() -> ascend_serving::Result<()> {
/// # #[cfg(feature = "emulation")] {
/// let device = Runtime::emulated()?.device(0)?;
/// let stream = device.stream()?;
/// let cache = PagedKvCache::new(&device, 16, 128, CacheShape::new(2, 1, 64), PadPolicy::SkipNegative)?;
/// let shape = AttentionShape::new(1, 1, 64);
/// let mut attention = Attention::<bf16>::new(shape, cache, Backends::none().with(Fused));
/// // Up to 4 requests of up to 1024 keys, which share the 16 blocks that there are.
/// let mut graphs = attention.capture(&stream, Causality::Causal, &GraphLimits::new([1, 4], 1024))?;
///
/// let mut sequences = [0; 3].map(|_| Sequence::new(attention.cache().pool()));
/// for sequence in &mut sequences {
///     attention.grow(&stream, sequence, 1)?;
/// }
/// let batch = sequences.each_ref().map(|sequence| BatchRequest::of(sequence, 1));
/// let settings = BatchSettings::of(attention.cache(), Causality::Causal);
/// let mut metadata = AttentionMetadata::new(&batch, settings)?;
/// let rows = stream.upload(&[bf16::ONE; 3 * 64], [3, 1, 64])?;
/// let mut step = graphs.begin(&stream, &mut metadata)?;
/// for layer in 0..2 {
///     let output = step.forward(layer, &rows, &rows, &rows)?;
///     assert_eq!(output.attention.download(&stream)?[..3 * 64], [bf16::ONE; 3 * 64]);
/// }
/// # }
/// # Ok(())
/// # }
/// ```
pub struct AttentionGraphs<T: Element> {
    graphs: GraphPool<Vec<KindBuffers<T>>>,
    kinds: Vec<CapturedKind>,
    of_layer: Vec<(usize, usize)>,
}

impl<T: Element> Attention<T> {
    /// Captures decode steps of all layers, whose tokens see these keys. The stream uploads what the graphs begin with.
    ///
    /// # Errors
    /// [`Rule::GraphSize`] for limits without sizes, or with one of 0;
    /// [`InvalidArgument`](ascend_attention::Error::InvalidArgument) for a stream of another device, or a scale that no
    /// scores are multiplied by; [`CallRule::GraphLengths`](ascend_attention::CallRule::GraphLengths) if the cache has not a
    /// block for each request of the largest size; [`CallRule::GraphStreams`](ascend_attention::CallRule::GraphStreams) if
    /// so many graphs take too many streams; a broken rule of the packed call; as for
    /// [`Graph::capture`](ascend_attention::Graph::capture).
    pub fn capture(
        &self,
        stream: &Stream,
        causality: Causality,
        limits: &GraphLimits,
    ) -> Result<AttentionGraphs<T>> {
        self.capture_layers(stream, |_| causality, limits)
    }

    /// The same, where each layer has its own mask: full and windowed layers over one cache, whose steps have one metadata.
    /// Sequences keep what any layer shows.
    ///
    /// # Errors
    /// As for [`Attention::capture`].
    pub fn capture_layers(
        &self,
        stream: &Stream,
        causality: impl Fn(usize) -> Causality,
        limits: &GraphLimits,
    ) -> Result<AttentionGraphs<T>> {
        let layers = 0..self.cache().shape().layers;
        let kind = Kind {
            attention: self,
            layers: layers.clone().map(causality).collect(),
            gives_back: false,
        };
        let places = layers.map(|layer| (0, layer));
        AttentionGraphs::capture(stream, &[kind], places.collect(), limits)
    }
}

impl<T: Element> GroupedAttention<T> {
    /// Captures decode steps of all layers: as for [`Attention::capture`], with limits for every group.
    ///
    /// # Errors
    /// As there.
    pub fn capture(&self, stream: &Stream, limits: &GraphLimits) -> Result<AttentionGraphs<T>> {
        let kinds = self.groups().iter().map(|group| Kind {
            attention: group.attention(),
            layers: vec![group.causality(); group.layers().len()],
            gives_back: true,
        });
        AttentionGraphs::capture(
            stream,
            &kinds.collect::<Vec<_>>(),
            self.layer_places().to_vec(),
            limits,
        )
    }
}

impl<T: Element> AttentionGraphs<T> {
    fn capture(
        stream: &Stream,
        kinds: &[Kind<'_, T>],
        of_layer: Vec<(usize, usize)>,
        limits: &GraphLimits,
    ) -> Result<Self> {
        for kind in kinds {
            kind.attention.cache().admits(stream)?;
            kind.attention.shape().check()?;
        }
        let sinks = &limits.learnable_sinks;
        if !sinks.is_empty() && sinks.len() != of_layer.len() {
            return Err(Error::invalid(
                "learnable_sinks",
                format_args!("sinks of {} layers", sinks.len()),
                format_args!("of all {} layers, or of none", of_layer.len()),
            ));
        }
        for sink in sinks.iter().flatten() {
            sink.check_device("learnable_sinks", stream.device())?;
        }
        for kind in 0..kinds.len() {
            let own = of_layer
                .iter()
                .zip(sinks)
                .filter(|((of, _), _)| *of == kind);
            let [with, without] = own.fold([0usize; 2], |[with, without], (_, sink)| match sink {
                Some(_) => [with.saturating_add(1), without],
                None => [with, without.saturating_add(1)],
            });
            if with > 0 && without > 0 {
                return Err(refused(
                    Rule::StepLayers,
                    format_args!("sinks of {with} layers of group {kind}, none of {without}"),
                    "sinks of all layers of a group, or of none",
                    "divide the layers into groups with sinks and without",
                )
                .into());
            }
        }
        // Before the captures, which make nothing.
        let masks = stream.device().masks();
        let masks = kinds.iter().map(|kind| -> Result<Vec<Mask>> {
            let layers = kind.layers.iter();
            layers.map(|causality| causality.mask(&masks)).collect()
        });
        let masks: Vec<Vec<Mask>> = masks.collect::<Result<_>>()?;
        let graphs = GraphPool::capture_layers(
            stream.device(),
            &limits.sizes,
            of_layer.len(),
            |size| {
                let buffers = kinds.iter().map(|kind| buffers(stream, kind, limits, size));
                buffers.collect()
            },
            |capture, size, layer, buffers: &Vec<KindBuffers<T>>| {
                let known = of_layer.get(layer).and_then(|(at, local)| {
                    let mask = masks.get(*at)?.get(*local)?;
                    Some((kinds.get(*at)?, mask, buffers.get(*at)?, *local))
                });
                let Some((kind, mask, buffers, local)) = known else {
                    return Err(no_layer(layer, of_layer.len()));
                };
                let sink = sinks.get(layer).and_then(Option::as_ref);
                record(capture, size, (kind, local), mask, sink, buffers, limits)
            },
        )?;
        let kinds = kinds.iter().map(|kind| CapturedKind {
            pool: kind.attention.cache().pool().clone(),
            seen: each_once(&kind.layers),
            limits: kind.limits(limits),
        });
        Ok(Self {
            graphs,
            kinds: kinds.collect(),
            of_layer,
        })
    }

    /// The captured sizes, ascending.
    pub fn sizes(&self) -> impl Iterator<Item = usize> + '_ {
        self.graphs.sizes()
    }

    /// Whether a step can be replayed: it is of the captured cache and layers and adds one token a request, there is a size
    /// that holds it, and its keys and blocks, those of the padding included, are no more than were declared. Compute other
    /// steps without a graph.
    pub fn serves(&self, metadata: &AttentionMetadata) -> bool {
        self.check(std::slice::from_ref(metadata)).is_ok()
    }

    /// The same of a model with several kinds of layers.
    pub fn serves_grouped(&self, metadata: &GroupedMetadata) -> bool {
        self.check(&metadata.groups).is_ok()
    }

    /// The size that a step is padded to, or why it cannot be replayed.
    fn check(&self, groups: &[AttentionMetadata]) -> Result<usize, Refused> {
        same_groups(groups.len(), self.kinds.len())?;
        let mut size = 0;
        for (kind, metadata) in self.kinds.iter().zip(groups) {
            metadata.goes_with(&kind.pool)?;
            kind.admits(metadata)?;
            let (requests, tokens) = (metadata.requests(), metadata.tokens());
            if requests == 0 {
                return Err(refused(
                    Rule::BatchEmpty,
                    "metadata that could not be renewed",
                    "that of 1 request or more",
                    "skip the step",
                ));
            }
            if metadata.actual_tokens() != requests {
                return Err(refused(
                    Rule::GraphSize,
                    format_args!("{} tokens of {requests} requests", metadata.actual_tokens()),
                    "one token a request",
                    "compute the step without a graph",
                ));
            }
            size = self.graphs.fitting(tokens)?;
            // A dummy request has a key, in a block.
            let dummies = std::iter::repeat_n(1, size.saturating_sub(tokens));
            let keys = metadata.kv_lengths().lengths().iter().copied();
            kind.limits
                .admits(&keys.chain(dummies).collect::<Vec<_>>())?;
        }
        Ok(size)
    }

    /// Begins a step: pads it to the smallest size that holds it, and puts its table and slots into that size's buffers,
    /// which waits for the stream. Blocks given back from now on are handed out again when the stream has passed the end of
    /// the step.
    ///
    /// # Errors
    /// [`Rule::GraphSize`] for a step larger than all sizes, or with several tokens of a request;
    /// [`CallRule::GraphLengths`](ascend_attention::CallRule::GraphLengths) for more keys or blocks than were declared;
    /// [`Rule::SettingsCache`], [`Rule::TableGroup`] and [`Rule::StepCausality`] for metadata of another cache or other
    /// layers, [`Rule::BackendMask`] for a named mask, [`Rule::BlockWindow`] for sequences that gave back what a layer
    /// shows, [`Rule::GroupLayers`] for other groups of layers; [`Rule::BatchEmpty`] for metadata without requests. The
    /// metadata is as it was then.
    pub fn begin<'a>(
        &'a mut self,
        stream: &'a Stream,
        metadata: &mut AttentionMetadata,
    ) -> Result<AttentionGraphStep<'a, T>> {
        self.start(stream, std::slice::from_mut(metadata))
    }

    /// The same of a model with several kinds of layers.
    ///
    /// # Errors
    /// As for [`AttentionGraphs::begin`].
    pub fn begin_grouped<'a>(
        &'a mut self,
        stream: &'a Stream,
        metadata: &mut GroupedMetadata,
    ) -> Result<AttentionGraphStep<'a, T>> {
        self.start(stream, &mut metadata.groups)
    }

    fn start<'a>(
        &'a mut self,
        stream: &'a Stream,
        metadata: &mut [AttentionMetadata],
    ) -> Result<AttentionGraphStep<'a, T>> {
        self.graphs.admits(stream)?;
        let size = self.check(metadata)?;
        let mut actual = 0;
        for metadata in &mut *metadata {
            metadata.pad_to(size)?;
            actual = metadata.actual_tokens();
        }
        let metadata = &*metadata;
        let of_layer = &self.of_layer;
        let lengths = |layer: usize| {
            let kind = of_layer.get(layer);
            let own = kind.and_then(|(kind, _)| metadata.get(*kind));
            own.map(packed_paged)
                .ok_or_else(|| no_layer(layer, of_layer.len()))
        };
        let step = self.graphs.start(stream, size, lengths, |buffers| {
            let mut both = buffers.iter().zip(metadata);
            both.try_for_each(|(buffers, metadata)| fill(stream, buffers, metadata))
        })?;
        let leases = self.kinds.iter().map(|kind| kind.pool.begin_step(stream));
        Ok(AttentionGraphStep {
            leases: leases.collect(),
            step,
            of_layer,
            stream,
            actual,
            size,
        })
    }
}

impl<T: Element> fmt::Debug for AttentionGraphs<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("AttentionGraphs")
            .field("graphs", &self.graphs)
            .field("kinds", &self.kinds.len())
            .finish_non_exhaustive()
    }
}

fn each_once(layers: &[Causality]) -> Vec<MaskKind> {
    let mut seen: Vec<MaskKind> = Vec::new();
    for causality in layers.iter().copied().map(MaskKind::from) {
        if !seen.contains(&causality) {
            seen.push(causality);
        }
    }
    seen
}

/// What the graphs of a size read and write.
fn buffers<T: Element>(
    stream: &Stream,
    kind: &Kind<'_, T>,
    limits: &GraphLimits,
    size: usize,
) -> Result<KindBuffers<T>> {
    let (device, rows) = (stream.device(), size);
    let (shape, cache) = (kind.attention.shape(), kind.attention.cache());
    let (of, pool) = (cache.shape(), cache.pool());
    let within = kind.limits(limits);
    let columns = within.keys.div_ceil(within.block_size.max(1));
    let columns = columns.min(within.blocks).max(1);
    let (pad, allowed) = match pool.pad_policy() {
        pad @ PadPolicy::SkipNegative => (pad, "slot_mapping.negative"),
        pad @ PadPolicy::DumpSlot(_) => (pad, "slot_mapping.unique"),
    };
    let slots = vec![i64::from(pad.slot()?); rows];
    let places = capacity(pool.blocks(), pool.block_size());
    Ok(KindBuffers {
        table: BlockTable::zeroed(device, rows, columns, within.block_size)?,
        slots: SlotMapping::allowing(stream, &slots, places, &[allowed])?,
        tensors: GraphTensors {
            query: Tensor::empty(device, [rows, shape.heads, shape.head_dim])?,
            key: Tensor::empty(device, [rows, of.kv_heads, of.key_dim])?,
            value: Tensor::empty(device, [rows, of.kv_heads, of.value_dim])?,
            output: Output {
                attention: Tensor::empty(device, [rows, shape.heads, of.value_dim])?,
                softmax_lse: None,
            },
        },
    })
}

/// A layer of a decode step: writes its keys and values, then attends.
fn record<T: Element>(
    capture: &mut Capturing<'_>,
    requests: usize,
    (kind, layer): (&Kind<'_, T>, usize),
    mask: &Mask,
    sink: Option<&AnyTensor>,
    buffers: &KindBuffers<T>,
    limits: &GraphLimits,
) -> Result<()> {
    let cache = kind.attention.cache();
    let order = match cache.shape().format {
        Cache::BnBsH => CacheOrder::Norm,
        Cache::Nz => CacheOrder::PaNz,
        format => {
            return Err(Error::invalid(
                "cache",
                format_args!("{format:?}"),
                "BnBsH or NZ; others are captured by `GraphPool::capture_layers`",
            ));
        }
    };
    let cached = cache.layer(layer)?;
    let KindBuffers {
        table,
        slots,
        tensors,
    } = buffers;
    let GraphTensors {
        query,
        key,
        value,
        output,
    } = tensors;
    let write = ScatterPaKvCache::new().cache_order(order);
    let write = write.plan(key, value, slots, &cached.key, &cached.value)?;
    let mut inputs = Inputs::new(query, &cached.key, &cached.value).paged(table);
    if let Some(sink) = sink {
        inputs = inputs.learnable_sink_of_any(sink);
    }
    let rows = Cumulative::new((1..=requests).collect())?;
    let call = kind.attention.shape().call(Layout::Tnd).mask(mask.clone());
    let call = capture.attention_within(&call, &rows, kind.limits(limits), &inputs)?;
    capture.scatter(&write, key, value, slots, &cached.key, &cached.value)?;
    Ok(capture.launch(call, &inputs, output)?)
}

/// Puts the table and slots of a step into the buffers of its size.
fn fill<T: Element>(
    stream: &Stream,
    buffers: &KindBuffers<T>,
    metadata: &AttentionMetadata,
) -> Result<()> {
    let table = metadata.table();
    let rows = (0..table.requests()).filter_map(|request| table.row(request));
    buffers.table.overwrite(stream, &rows.collect::<Vec<_>>())?;
    let slots = metadata.slots().iter().map(|slot| i64::from(*slot));
    Ok(buffers
        .slots
        .overwrite(stream, &slots.collect::<Vec<_>>())?)
}
