//! The layers that share a cache within captured steps: what their graphs read and write, and how one is recorded.

use std::ops::Range;
use std::sync::Arc;

use ascend_attention::attention::{BlockTable, Cumulative, PerRequest};
use ascend_attention::graph::{Capturing, KeyLimits};
use ascend_attention::{AnyTensor, Element, Stream, Tensor};

use crate::backends::{
    AttentionShape, Backends, LayerTensors, QuantisedQueries, RecordedBackend, StepContext, checked_program,
};
use crate::batch::{AttentionMetadata, AttentionState, BatchSettings, Drafting, LayerMask, StatePolicy};
use crate::causality::Causality;
use crate::error::{Error, Result};
use crate::kv::{
    BlockPool, CacheEntry, CacheShape, LayerCache, PagedKvCache, QuantisedLayer, WriteViews, no_layer, quantised_rows,
    scattered_slots, slot_mapping,
};

use super::graph_limits::{GraphLimits, RowsPerRequest};
use super::graph_tensors::{CachedLayer, CapturedProgram, GraphTensors, GroupBuffers, ReplayedProgram, zeros};

/// The captured layers of a group that have the same mask and scale and prefer the same backend.
#[derive(Clone, Debug)]
pub(super) struct AlikeLayers {
    pub(super) mask: LayerMask,
    preferred: Option<&'static str>,
    heads: AttentionShape,
    /// The first of them.
    first: usize,
}

impl AlikeLayers {
    fn context<'a>(
        &'a self,
        stream: &'a Stream,
        metadata: &'a AttentionMetadata,
        block_table: &'a BlockTable,
    ) -> StepContext<'a> {
        let (shape, mask) = (self.heads, &self.mask);
        StepContext { stream, shape, metadata, mask, block_table, recorded: true, shares_keys: false }
    }
}

/// Captured layers that share a cache.
pub(crate) struct CapturedGroup {
    pub(super) pool: BlockPool,
    cache_entry: Arc<CacheEntry>,
    stored: Arc<[Range<usize>]>,
    shape: CacheShape,
    heads: AttentionShape,
    /// Which keys the layers see, unless that is left to the steps.
    pub(super) causality: Option<Causality>,
    /// The layers that have a program of their own.
    pub(super) alike: Vec<AlikeLayers>,
    /// For each layer the number of its program.
    program_of: Vec<usize>,
    pub(super) limits: KeyLimits,
    /// New tokens of each request, at most.
    pub(super) each: RowsPerRequest,
    drafting: Option<Drafting>,
}

impl CapturedGroup {
    /// A group of layers over a cache, each with its mask, the backend that it prefers and its heads. Where sequences
    /// give back the tokens before a window, the limit of keys is lowered to what the window needs.
    pub(crate) fn new<T: Element>(
        cache: &PagedKvCache<T>,
        heads: AttentionShape,
        causality: Option<Causality>,
        layers: impl Iterator<Item = (LayerMask, Option<&'static str>, AttentionShape)>,
        limits: &GraphLimits,
    ) -> Self {
        let pool = cache.pool();
        let block_size = pool.block_size();
        // The block in which the window of the first new token begins is read as a whole.
        let keys = causality.and_then(Causality::window).map_or(usize::MAX, |window| {
            let around = block_size.saturating_add(limits.each.0).saturating_sub(2);
            // One dummy request may have to take all rows but one for each request.
            let rows = limits.sizes.iter().max().map_or(0, |size| {
                let more = limits.each.0.saturating_sub(1);
                size.saturating_mul(more).saturating_add(1)
            });
            window.get().saturating_add(around).max(rows)
        });
        let mut alike: Vec<AlikeLayers> = Vec::new();
        let mut program_of = Vec::new();
        for (layer, (mask, preferred, heads)) in layers.enumerate() {
            let is_alike =
                |known: &AlikeLayers| known.mask == mask && known.preferred == preferred && known.heads == heads;
            let known = alike.iter().position(is_alike);
            program_of.push(known.unwrap_or(alike.len()));
            if known.is_none() {
                alike.push(AlikeLayers { mask, preferred, heads, first: layer });
            }
        }
        Self {
            pool: pool.clone(),
            cache_entry: Arc::clone(cache.entry()),
            stored: Arc::clone(cache.stored()),
            shape: cache.shape(),
            heads,
            causality,
            alike,
            program_of,
            limits: KeyLimits { keys: limits.keys.min(keys), blocks: limits.blocks.min(pool.blocks()), block_size },
            each: limits.each,
            drafting: limits.drafting,
        }
    }

    pub(crate) fn pool(&self) -> &BlockPool {
        &self.pool
    }

    /// The entry of the cache in the progress table of its pool.
    pub(crate) fn cache_entry(&self) -> &Arc<CacheEntry> {
        &self.cache_entry
    }

    /// The addresses of the cache's tensors, for [`check_outside_caches`](crate::kv::check_outside_caches).
    pub(crate) fn stored(&self) -> &Arc<[Range<usize>]> {
        &self.stored
    }

    /// The pool and the shape of the cache.
    pub(crate) fn pool_and_shape(&self) -> (&BlockPool, &CacheShape) {
        (&self.pool, &self.shape)
    }

    /// Which keys the tokens of a layer see.
    pub(crate) fn mask(&self, layer: usize) -> Option<&LayerMask> {
        Some(&self.alike.get(self.program(layer)?)?.mask)
    }

    /// The factor of the scores of a layer.
    pub(crate) fn scale(&self, layer: usize) -> Option<f64> {
        Some(self.alike.get(self.program(layer)?)?.heads.scale)
    }

    /// Columns of the block table.
    pub(crate) fn columns(&self) -> usize {
        let columns = self.limits.keys.div_ceil(self.limits.block_size.max(1));
        columns.min(self.limits.blocks).max(1)
    }

    /// The requests that have `rows` rows.
    pub(crate) fn requests(&self, rows: usize) -> usize {
        self.each.requests(rows)
    }

    /// Refuses a size of which no step keeps to the limits.
    pub(crate) fn check_size(&self, requests: usize) -> Result<()> {
        let ends = Cumulative::new((1..=requests).map(|request| self.each.rows(request)).collect())?;
        self.limits.extremes(&ends)?;
        Ok(())
    }

    /// Steps of `requests` requests that differ as much as captured ones may: with few and with many keys, and last,
    /// where requests may add fewer tokens, with most tokens in few requests, at most `most_rows` in each. They are
    /// of the kind `state`.
    fn examples(&self, state: AttentionState, requests: usize, most_rows: usize) -> Result<Vec<AttentionMetadata>> {
        let each = self.each.0;
        let ends = (1..=requests).map(|request| self.each.rows(request));
        let ends = Cumulative::new(ends.collect())?;
        let mut examples: Vec<(Cumulative, PerRequest)> = Vec::new();
        for keys in self.limits.extremes(&ends)? {
            examples.push((ends.clone(), keys));
        }
        examples.push((ends.clone(), ends.per_request()));
        if each > 1 && requests > 1 {
            let rows = self.each.rows(requests);
            let ends = (1..=requests).map(|request| {
                let later = (requests - request).saturating_mul(most_rows);
                request.max(rows.saturating_sub(later))
            });
            let ends = Cumulative::new(ends.collect())?;
            let keys = ends.per_request();
            if self.limits.admits(keys.lengths()).is_ok() {
                examples.push((ends, keys));
            }
        }
        let settings = BatchSettings::of(&self.pool, Causality::Causal);
        let steps = examples.into_iter();
        let steps = steps.map(|(q, kv)| Ok(AttentionMetadata::of_dummies(settings, q, kv)?.of_kind(state)));
        steps.collect()
    }

    /// Allocates the buffers of the graphs of `requests` requests, and chooses what computes the layers that are
    /// alike. `sinks` has those of the group's layers.
    pub(crate) fn buffers<T: Element>(
        &self,
        stream: &Stream,
        (cache, backends): (&PagedKvCache<T>, &Backends<T>),
        requests: usize,
        sinks: &[Option<&AnyTensor>],
    ) -> Result<GroupBuffers<T>> {
        let device = stream.device();
        let rows = self.each.rows(requests);
        let (heads, shape, pool) = (self.heads, &self.shape, &self.pool);
        let padding = std::iter::repeat_n(pool.pad_policy().slot()?, rows);
        let zeros = |heads: usize, dim: usize| zeros::<T>(device, [rows, heads, dim]);
        let (query_dim, rope_dim, output) = match shape.is_latent() {
            true => (shape.key_dim, Some(shape.value_dim), [heads.heads, rows, shape.key_dim]),
            false => (heads.head_dim, None, [rows, heads.heads, shape.value_dim]),
        };
        let (first, quantised) = cache.tensors(0)?;
        let query_rope = rope_dim.map(|dim| zeros(heads.heads, dim)).transpose()?;
        let of_latents = quantised.as_ref().filter(|layer| layer.latent_scale().is_some());
        let quantised_query =
            of_latents.map(|layer| QuantisedQueries::zeros(device, layer.stored(), [rows, heads.heads, query_dim]));
        let quantised_query = quantised_query.transpose()?;
        let tensors = GraphTensors {
            query: match (&query_rope, &quantised_query) {
                (Some(rope), Some(_)) => rope.clone(),
                _ => zeros(heads.heads, query_dim)?,
            },
            query_rope,
            quantised_query,
            key: zeros(shape.kv_heads, shape.key_dim)?,
            value: zeros(shape.kv_heads, shape.value_dim)?,
            output: Tensor::empty(device, output)?,
        };
        let slots = slot_mapping(stream, (pool, shape), padding)?;
        let new = [&tensors.key, &tensors.value];
        let (write, quantisers) = match &quantised {
            None => (WriteViews::of(shape, &first, rows, new)?.scatter(shape, &slots)?, None),
            Some(layer) => {
                let quantised = quantised_rows(device, &layer.stored_shape(shape), rows)?;
                // The quantisers of one layer serve all layers: each call takes its layer's scales.
                let quantisers = layer.device_quantisers(device, rows, new, quantised.clone())?;
                let views = WriteViews::of(shape, &layer.cache, rows, quantised.each_ref())?;
                (views.scatter(shape, &slots)?, Some(quantisers))
            }
        };
        let table = BlockTable::zeroed(device, requests, self.columns(), self.limits.block_size)?;
        // Absorbed queries may have no more rows than a decode.
        let most = self.limits.keys.max(self.each.0);
        let few = Some(StatePolicy::MAX_VERIFIED).filter(|few| (2..*few).contains(&self.each.0) && *few < most);
        let examples = [Some(most), few].into_iter().flatten();
        let state = backends.recorded_state(self.each.0, self.drafting);
        let examples = examples.map(|rows| Ok((rows, self.examples(state, requests, rows)?)));
        let examples: Vec<_> = examples.collect::<Result<_>>()?;
        let programs = self.alike.iter().map(|alike| {
            let layer = alike.first;
            let (cache, quantised) = cache.tensors(layer)?;
            let sink = sinks.get(layer).copied().flatten();
            let tensors = self.layer_tensors(layer, &tensors, (&cache, quantised.as_ref()), sink);
            let others = self.alike.iter().map(|other| (&other.mask, other.preferred));
            let scales = others.filter(|other| *other == (&alike.mask, alike.preferred)).count();
            let record = |steps: &[&AttentionMetadata]| {
                let steps = steps.iter().map(|metadata| alike.context(stream, metadata, &table));
                backends.record(&steps.collect::<Vec<_>>(), &tensors, (self.columns(), scales))
            };
            let (recorded, dummy_rows) = self.record_examples(&examples, record)?;
            Ok(CapturedProgram { recorded, dummy_rows, sink: sink.cloned() })
        });
        Ok(GroupBuffers { programs: programs.collect::<Result<_>>()?, table, slots, quantisers, write, tensors })
    }

    /// Records steps whose dummies have as many rows as possible, of examples for several numbers of rows. Where no
    /// backend serves requests with fewer tokens, all have to add as many.
    fn record_examples<R>(
        &self,
        examples: &[(usize, Vec<AttentionMetadata>)],
        record: impl Fn(&[&AttentionMetadata]) -> Result<R>,
    ) -> Result<(R, Option<usize>)> {
        let mut alike = Vec::new();
        for (rows, steps) in examples {
            alike = steps.iter().filter(|step| step.longest_rows() == self.each.0).collect();
            match record(&steps.iter().collect::<Vec<_>>()) {
                Err(Error::NoBackend { .. }) if alike.len() < steps.len() => {}
                recorded => return Ok((recorded?, Some(*rows))),
            }
        }
        Ok((record(&alike)?, None))
    }

    fn layer_tensors<'a, T: Element>(
        &self,
        layer: usize,
        tensors: &'a GraphTensors<T>,
        (cache, quantised): (&'a LayerCache<T>, Option<&'a QuantisedLayer>),
        learnable_sink: Option<&'a AnyTensor>,
    ) -> LayerTensors<'a, T> {
        LayerTensors {
            layer,
            query: &tensors.query,
            key: &tensors.key,
            value: &tensors.value,
            cache,
            quantised,
            learnable_sink,
            latent: tensors.latent(),
        }
    }

    /// The number of the program that computes a layer.
    pub(crate) fn program(&self, layer: usize) -> Option<usize> {
        self.program_of.get(layer).copied()
    }

    /// Records a layer of a step: it writes its keys and values, then attends.
    pub(crate) fn record<T: Element>(
        &self,
        capture: &Capturing<'_>,
        (cache, layer): (&PagedKvCache<T>, usize),
        sink: Option<&AnyTensor>,
        buffers: &GroupBuffers<T>,
    ) -> Result<()> {
        let GroupBuffers { table, slots, quantisers, write, programs, tensors } = buffers;
        let program = self.program(layer).and_then(|at| programs.get(at));
        let Some(program) = program else {
            return Err(no_layer(layer, self.program_of.len()));
        };
        let (cache, quantised) = cache.tensors(layer)?;
        let (rows, new) = (self.each.rows(table.sequences()), [&tensors.key, &tensors.value]);
        match (quantisers, &quantised) {
            (Some(quantisers), Some(layer)) => {
                let new = layer.quantise(quantisers, capture, new)?;
                let views = WriteViews::of(&self.shape, &layer.cache, rows, new.each_ref())?;
                views.launch(capture, write, slots)?;
            }
            _ => {
                let views = WriteViews::of(&self.shape, &cache, rows, new)?;
                views.launch(capture, write, slots)?;
            }
        }
        let layer = self.layer_tensors(layer, tensors, (&cache, quantised.as_ref()), sink);
        let plan = &program.recorded.plan;
        plan.record(capture, &layer, &tensors.output, self.limits)
    }

    /// The programs of a padded step, one for the layers that are alike, and the contents of their named masks.
    pub(crate) fn replayed<T: Element>(
        &self,
        stream: &Stream,
        (buffers, caches): (&GroupBuffers<T>, &[CachedLayer<T>]),
        metadata: &AttentionMetadata,
    ) -> Result<Vec<ReplayedProgram<T>>> {
        let (table, tensors) = (&buffers.table, &buffers.tensors);
        let programs = self.alike.iter().zip(&buffers.programs);
        let programs = programs.map(|(alike, captured)| {
            let RecordedBackend { backend, form, plan } = &captured.recorded;
            let first = alike.first;
            let (cache, quantised) = caches.get(first).ok_or_else(|| no_layer(first, caches.len()))?;
            let layer = self.layer_tensors(first, tensors, (cache, quantised.as_ref()), captured.sink.as_ref());
            let step = alike.context(stream, metadata, table);
            let program = checked_program(&**backend, &step, &layer)?;
            form.check_form(&program, backend.name())?;
            let masks = plan.host_masks(&program, table)?;
            Ok(ReplayedProgram { program, masks })
        });
        programs.collect()
    }

    /// Puts the slots of a step and the tables and named masks of its programs into the buffers of its size.
    pub(crate) fn fill<T: Element>(
        &self,
        stream: &Stream,
        buffers: &GroupBuffers<T>,
        metadata: &AttentionMetadata,
        programs: &[ReplayedProgram<T>],
    ) -> Result<()> {
        let table = metadata.table();
        let rows = (0..table.requests()).filter_map(|request| table.row(request));
        buffers.table.overwrite(stream, &rows.collect::<Vec<_>>())?;
        let slots = metadata.slots().iter().copied();
        let slots = scattered_slots((&self.pool, &self.shape), slots)?;
        buffers.slots.overwrite(stream, &slots)?;
        for (captured, replayed) in buffers.programs.iter().zip(programs) {
            let ReplayedProgram { program, masks } = replayed;
            captured.recorded.plan.refill(stream, program, masks)?;
        }
        Ok(())
    }
}
