//! The layers that share a cache within captured steps: what their graphs read and write, and how one is recorded.

use std::sync::Arc;

use ascend_attention::attention::{BlockTable, CallLengths, Cumulative, Inputs, PerRequest};
use ascend_attention::graph::{Capturing, KeyLimits};
use ascend_attention::mask::HostMask;
use ascend_attention::spec::Layout;
use ascend_attention::{AnyTensor, Element, Mask, Stream, Tensor, Violation};

use crate::backends::{
    attention_alone, batched, decode_rows as single_row, single_row_inputs, single_rows,
};
use crate::batch::{AttentionMetadata, Causality, MaskKind, MaskedRequest, NamedMask};
use crate::engine::{Attention, same_mask};
use crate::error::Result;
use crate::kv::{
    BlockPool, CacheEntry, CacheShape, WriteViews, quantised_rows, scattered_slots, slot_mapping,
};
use crate::rules;

use super::graph_limits::{GraphLimits, RowsEach};
use super::graph_pool::packed_paged;
use super::graph_tensors::{GraphTensors, GroupBuffers};

/// The group and number of a captured layer of the model.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct LayerPlace {
    /// Its group.
    pub(super) group: usize,
    /// Its number among the layers of the group.
    pub(super) layer: usize,
}

/// Captured layers that share a cache.
pub(super) struct CapturedGroup {
    pool: BlockPool,
    cache_entry: Arc<CacheEntry>,
    shape: CacheShape,
    /// Which keys the tokens of each layer see.
    layers: Vec<MaskKind>,
    /// The different masks of the layers.
    seen: Vec<MaskKind>,
    limits: KeyLimits,
    /// New tokens of each request, at most.
    each: RowsEach,
    quantised: bool,
}

impl CapturedGroup {
    /// A group of layers with these masks. Where sequences give back the tokens before a window, the limit of keys is
    /// lowered to what the window needs.
    pub(super) fn new<T: Element>(
        attention: &Attention<T>,
        layers: Vec<MaskKind>,
        gives_back: bool,
        limits: &GraphLimits,
    ) -> Self {
        let pool = attention.cache().pool();
        let block_size = pool.block_size();
        let shown = layers.first().filter(|_| gives_back);
        let shown = shown.and_then(|mask| mask.causality().ok()?.window());
        // The block in which the window of the first new token begins is read as a whole.
        let keys = shown.map_or(usize::MAX, |window| {
            let around = block_size.saturating_add(limits.each.0).saturating_sub(2);
            // One dummy request may have to take all rows but one for each request.
            let rows = limits.sizes.iter().max().map_or(0, |size| {
                let more = limits.each.0.saturating_sub(1);
                size.saturating_mul(more).saturating_add(1)
            });
            window.get().saturating_add(around).max(rows)
        });
        let mut seen: Vec<MaskKind> = Vec::new();
        for mask in &layers {
            if !seen.contains(mask) {
                seen.push(mask.clone());
            }
        }
        Self {
            pool: pool.clone(),
            cache_entry: Arc::clone(attention.cache().entry()),
            shape: attention.cache().shape(),
            layers,
            seen,
            limits: KeyLimits {
                keys: limits.keys.min(keys),
                blocks: limits.blocks.min(pool.blocks()),
                block_size,
            },
            each: limits.each,
            quantised: attention.cache().is_quantised(),
        }
    }

    /// Refuses what graphs over a quantised cache have no call for.
    pub(super) fn can_be_captured(&self, sinks: bool) -> Result<(), Violation> {
        let causal = |mask: &MaskKind| *mask == MaskKind::from(Causality::Causal);
        let other = self.seen.iter().find(|mask| !causal(mask));
        if !self.quantised || self.each.0 <= 1 && other.is_none() && !sinks {
            return Ok(());
        }
        let with = if sinks { "with" } else { "without" };
        Err(Violation::new(
            &rules::CACHE_QUANTISED,
            match other {
                Some(mask) => format!("a layer with {mask}"),
                None => format!("{} tokens a request, {with} sinks", self.each.0),
            },
            "graphs over a quantised cache of one token a request, causal, without sinks",
            "compute such steps without a graph by `QuantisedPrefill`, or make the cache by `PagedKvCache::new`",
        ))
    }

    pub(super) fn pool(&self) -> &BlockPool {
        &self.pool
    }

    /// The entry of the cache in the progress table of its pool.
    pub(super) fn cache_entry(&self) -> &Arc<CacheEntry> {
        &self.cache_entry
    }

    /// Which keys the tokens of a layer see.
    pub(super) fn mask(&self, layer: usize) -> Option<&MaskKind> {
        self.layers.get(layer)
    }

    pub(super) fn limits(&self) -> KeyLimits {
        self.limits
    }

    /// The masks of the layers that are rules of the caller, each once.
    fn named(&self) -> impl Iterator<Item = &NamedMask> {
        self.seen.iter().filter_map(MaskKind::named)
    }

    /// Columns of the block table.
    fn columns(&self) -> usize {
        let columns = self.limits.keys.div_ceil(self.limits.block_size.max(1));
        columns.min(self.limits.blocks).max(1)
    }

    /// Keys of a mask's row: the tokens of every block in a row of the table.
    fn mask_columns(&self) -> usize {
        self.columns().saturating_mul(self.limits.block_size)
    }

    /// The operator's masks, in the order of the layers; `None` for a rule of the caller.
    pub(super) fn masks(&self, stream: &Stream) -> Result<Vec<Option<Mask>>> {
        let masks = stream.device().masks();
        let of = |mask: &MaskKind| match mask {
            MaskKind::Causality(causality) => causality.mask(&masks).map(Some),
            MaskKind::Named(_) => Ok(None),
        };
        self.layers.iter().map(of).collect()
    }

    /// Refuses a step with another mask, or whose sequences gave back tokens that some layer shows.
    pub(super) fn admits(&self, metadata: &AttentionMetadata) -> Result<(), Violation> {
        metadata.check_pool(&self.pool)?;
        metadata.check_blocks_held(&self.pool)?;
        if let Some(first) = self.seen.first()
            && !self.seen.contains(metadata.mask())
        {
            same_mask(metadata.mask(), first)?;
        }
        self.seen
            .iter()
            .try_for_each(|seen| metadata.check_mask(seen))
    }

    /// Refuses a step with a request of more new tokens than were captured, or of fewer where a layer has a named
    /// mask.
    pub(super) fn admits_tokens(&self, metadata: &AttentionMetadata) -> Result<(), Violation> {
        let each = self.each.0;
        let named = self.named().next();
        let mut requests = metadata.masked_requests();
        let other = requests.find(|of| match (of.place, named) {
            (_, Some(_)) => of.new != each,
            (Some(_), None) => of.new > each,
            (None, None) => false,
        });
        let Some(MaskedRequest { place, new, .. }) = other else {
            return Ok(());
        };
        Err(Violation::new(
            &rules::GRAPH_SIZE,
            match place {
                Some(request) => format!("{new} new tokens of request {request}"),
                None => format!("a dummy request of {new} tokens"),
            },
            match named {
                Some(mask) => format!(
                    "{each} a request, as was captured with the named mask {:?}",
                    mask.name()
                ),
                None => format!("at most {each} a request"),
            },
            match named {
                Some(_) => {
                    "compute the step without a graph: a captured named mask has as many rows for each request"
                }
                None => {
                    "compute the step without a graph, or capture with `GraphLimits::tokens_each`"
                }
            },
        ))
    }

    /// The named masks of a step, padded with these dummy requests, on the host.
    pub(super) fn host_masks(
        &self,
        metadata: &AttentionMetadata,
        dummies: impl Iterator<Item = usize>,
    ) -> Result<Vec<HostMask>> {
        let mut named = self.named().peekable();
        if named.peek().is_none() {
            return Ok(Vec::new());
        }
        let dummies = dummies.map(|new| MaskedRequest {
            place: None,
            new,
            cached: 0,
        });
        let requests: Vec<_> = metadata.masked_requests().chain(dummies).collect();
        let columns = self.mask_columns();
        named.map(|mask| mask.on_host(&requests, columns)).collect()
    }

    /// Allocates the buffers of the graphs of `requests` requests.
    pub(super) fn buffers<T: Element>(
        &self,
        stream: &Stream,
        attention: &Attention<T>,
        requests: usize,
    ) -> Result<GroupBuffers<T>> {
        let device = stream.device();
        let rows = self.each.rows(requests);
        let (shape, of, pool) = (attention.shape(), &self.shape, &self.pool);
        let padding = std::iter::repeat_n(pool.pad_policy().slot()?, rows);
        let mask = |_| Tensor::empty(device, [requests, self.each.0, self.mask_columns()]);
        let tensors = GraphTensors {
            query: Tensor::empty(device, [rows, shape.heads, shape.head_dim])?,
            key: Tensor::empty(device, [rows, of.kv_heads, of.key_dim])?,
            value: Tensor::empty(device, [rows, of.kv_heads, of.value_dim])?,
            output: Tensor::empty(device, [rows, shape.heads, of.value_dim])?,
        };
        let quantisers = match self.quantised {
            false => None,
            true => {
                let new = [&tensors.key, &tensors.value];
                let quantised = quantised_rows(device, new)?;
                // The quantisers of one layer serve all layers: each call takes its layer's scales.
                let layer = attention.cache().quantised_layer(0)?;
                Some(layer.channel_quantisers(device, rows, new, quantised)?)
            }
        };
        Ok(GroupBuffers {
            table: BlockTable::zeroed(device, requests, self.columns(), self.limits.block_size)?,
            slots: slot_mapping(stream, (pool, of), padding)?,
            masks: self.named().map(mask).collect::<Result<_, _>>()?,
            quantisers,
            tensors,
        })
    }

    /// Records a layer of a step: it writes its keys and values, then attends.
    pub(super) fn record<T: Element>(
        &self,
        capture: &Capturing<'_>,
        (attention, layer): (&Attention<T>, usize),
        mask: Option<&Mask>,
        sink: Option<&AnyTensor>,
        buffers: &GroupBuffers<T>,
    ) -> Result<()> {
        let cache = attention.cache();
        let GroupBuffers {
            table,
            slots,
            tensors,
            quantisers,
            ..
        } = buffers;
        let GraphTensors {
            query,
            key,
            value,
            output,
        } = tensors;
        let (requests, shape) = (table.sequences(), attention.shape());
        let rows = self.each.rows(requests);
        // The longest length of every request, where lengths are given one by one.
        let longest = self.limits.keys.min(self.mask_columns());
        let longest = PerRequest::new(vec![longest; requests])?;
        let longest = CallLengths::Batched {
            q: None,
            kv: &longest,
        };
        if let Some(quantisers) = quantisers {
            let of = cache.quantised_layer(layer)?;
            let (layout, call) = single_rows(shape, of);
            let query = single_row(layout, query)?;
            let mut output = attention_alone(single_row(layout, output)?);
            let inputs = single_row_inputs(&query, table, of);
            let call = capture.attention(&call, longest, inputs)?;
            let quantised = of.quantise(quantisers, capture, [key, value])?;
            let write = WriteViews::of(&self.shape, &of.cache, rows, quantised)?;
            let plan = write.scatter(&self.shape, slots)?;
            write.record(capture, &plan, slots)?;
            return Ok(capture.launch_into(call, inputs, &mut output)?);
        }
        let cached = cache.layer(layer)?;
        let write = WriteViews::of(&self.shape, cached, rows, [key, value])?;
        let plan = write.scatter(&self.shape, slots)?;
        let inputs = |query| {
            let inputs = Inputs::new(query, &cached.key, &cached.value).paged(table);
            match sink {
                Some(sink) => inputs.learnable_sink_of_any(sink),
                None => inputs,
            }
        };
        if let Some(mask) = mask {
            let rows = (1..=requests).map(|request| self.each.rows(request));
            let rows = Cumulative::new(rows.collect())?;
            let inputs = inputs(query);
            let call = shape.call(Layout::Tnd).mask(mask.clone());
            let call = capture.attention_within(&call, &rows, self.limits, inputs)?;
            write.record(capture, &plan, slots)?;
            let mut output = attention_alone(output.clone());
            return Ok(capture.launch_into(call, inputs, &mut output)?);
        }
        let own = self.layers.get(layer).and_then(MaskKind::named);
        let at = self.named().position(|mask| Some(mask) == own);
        let Some(mask) = at.and_then(|at| buffers.masks.get(at)) else {
            return Err(crate::kv::no_layer(layer, self.layers.len()));
        };
        let query = batched(query, requests)?;
        let mut output = attention_alone(batched(output, requests)?);
        let inputs = inputs(&query);
        let call = shape.call(Layout::Bsh).mask(Mask::all_mask(mask.clone()));
        let call = capture.attention(&call, longest, inputs)?;
        write.record(capture, &plan, slots)?;
        Ok(capture.launch_into(call, inputs, &mut output)?)
    }

    /// The lengths of a layer's call in a step.
    pub(super) fn lengths<'a>(
        &self,
        layer: usize,
        metadata: &'a AttentionMetadata,
    ) -> CallLengths<'a> {
        let named = matches!(self.layers.get(layer), Some(MaskKind::Named(_)));
        if named || self.quantised {
            return CallLengths::Batched {
                q: None,
                kv: metadata.kv_lengths(),
            };
        }
        packed_paged(metadata)
    }

    /// Puts the table, the slots and the named masks of a step into the buffers of its size.
    pub(super) fn fill<T: Element>(
        &self,
        stream: &Stream,
        buffers: &GroupBuffers<T>,
        metadata: &AttentionMetadata,
        masks: &[HostMask],
    ) -> Result<()> {
        let table = metadata.table();
        let rows = (0..table.requests()).filter_map(|request| table.row(request));
        buffers.table.overwrite(stream, &rows.collect::<Vec<_>>())?;
        let slots = metadata.slots().iter().copied();
        let slots = scattered_slots((&self.pool, &self.shape), slots)?;
        buffers.slots.overwrite(stream, &slots)?;
        let mut masks = buffers.masks.iter().zip(masks);
        Ok(masks.try_for_each(|(to, mask)| to.overwrite_bytes(stream, mask.bytes()))?)
    }
}
