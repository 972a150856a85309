//! Steps replayed from graphs, layer by layer.

use std::fmt;
use std::sync::{Arc, Mutex};

use ascend_attention::graph::Update;
use ascend_attention::{AnyTensor, Element, Stream, Violation};

use crate::backends::check_deterministic;
use crate::batch::{AttentionMetadata, LayerMask};
use crate::error::{Error, Result};
use crate::graphs::{
    CachedLayer, CapturedGroup, GraphLimits, GraphPool, LentTensors, ReplayedProgram, RowsPerRequest, fitting_rows,
    not_while_capturing,
};
use crate::kv::{QueuedLayers, STEP_AGAIN, no_layer};
use crate::rules;
use crate::sharing::lock;

use super::attention::Attention;
use super::layer_check::StepRows;
use super::layer_group::{LayerGroup, LayerPlace};
use super::leased_states::LeasedStates;
use super::linear_buffers::{CapturedLinear, LinearBuffers, SizeBuffers};
use super::range_check::SharedChecker;
use super::replayed_layers::ReplayedLayers;
use super::step::{Step, StepCalls};

/// Steps of any number of requests, replayed from graphs that were captured for a few sizes: one graph for each
/// layer, so that the model's other work can run between them. One object serves all layers of the model and all
/// sizes. Requests add one token each, or up to [`GraphLimits::tokens_each`].
///
/// A graph writes the layer's keys and values into the cache, quantised where the cache has scales of channels or
/// latents, and attends by the calls of a backend: of those of the attention the first that serves steps of the
/// captured sizes by calls whose number and rows the size fixes ([`AttentionGraphs::backend`]), such as
/// [`Backend::Fused`](crate::Backend::Fused) and [`Backend::PagedDecode`](crate::Backend::PagedDecode); the book's page
/// of graphs lists them. A layer of linear attention has a graph of RecurrentGatedDeltaRule, and one of the convolution
/// in front where the states have one ([`GraphLimits::convolutions`]). Over a cache of latents the queries are absorbed
/// ([`LatentForm::Absorbed`](crate::LatentForm::Absorbed)), over latents of one byte quantised
/// ([`LatentForm::Quantised`](crate::LatentForm::Quantised)). From [`Attention::capture`] or
/// [`Attention::capture_layers`].
///
/// ```
/// use ascend_serving::kv::{CacheShape, PadPolicy, PagedKvCache, Sequence};
/// use ascend_serving::{
///     Attention, AttentionMetadata, AttentionShape, Backends, BatchRequest, BatchSettings, Causality, GraphLimits,
/// };
/// use ascend_attention::{Runtime, bf16};
///
/// # fn main() -> ascend_serving::Result<()> {
/// # #[cfg(feature = "emulation")] {
/// let device = Runtime::emulated()?.device(0)?;
/// let stream = device.stream()?;
/// let cache = PagedKvCache::new(&device, 16, 128, CacheShape::new(2, 1, 64), PadPolicy::SkipNegative)?;
/// let shape = AttentionShape::new(1, 1, 64);
/// let mut attention = Attention::<bf16>::new(shape, cache, Backends::standard(&device));
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
///     let output = step.forward(layer, (&rows, &rows, &rows))?;
///     assert_eq!(output.download(&stream)?[..3 * 64], [bf16::ONE; 3 * 64]);
/// }
/// # }
/// # Ok(())
/// # }
/// ```
pub struct AttentionGraphs<T: Element> {
    graphs: GraphPool<SizeBuffers<T>>,
    groups: Vec<CapturedGroup>,
    /// For each group the scales that its layers have now.
    scales: Vec<Arc<Mutex<Vec<f64>>>>,
    /// For each group the cache of each of its layers.
    caches: Vec<Vec<CachedLayer<T>>>,
    places: Vec<LayerPlace>,
    /// The sinks of each layer; empty without sinks.
    sinks: Vec<Option<AnyTensor>>,
    /// The layers of linear attention, if there are any.
    linear: Option<CapturedLinear<T>>,
    each: RowsPerRequest,
    deterministic: bool,
    range_checker: SharedChecker<T>,
}

impl<T: Element> Attention<T> {
    /// Captures steps of all layers, whose tokens see keys by a [`Causality`](crate::Causality) or a
    /// [`NamedMask`](crate::NamedMask). The stream uploads the initial contents of the graphs' buffers.
    ///
    /// A named mask takes a byte for each new token of a size and each key of the longest request that is declared,
    /// and each step fills all of them: declare as few keys as the layer needs.
    ///
    /// # Errors
    /// [`GRAPH_SIZE`](crate::rules::GRAPH_SIZE) for limits without sizes, or with one of 0 requests or tokens;
    /// [`STEP_CAUSALITY`](crate::rules::STEP_CAUSALITY) for a mask that shows more than the causality of a layer's
    /// group;
    /// [`Error::NoBackend`](crate::Error::NoBackend) if no backend serves such steps by calls that the size fixes
    /// ([`GRAPH_BACKEND`](crate::rules::GRAPH_BACKEND)), which over latents serve causal layers without sinks alone
    /// ([`BACKEND_LATENT`](crate::rules::BACKEND_LATENT));
    /// [`CACHE_QUANTISED`](crate::rules::CACHE_QUANTISED) for a quantised cache whose scales are not of channels
    /// or latents;
    /// [`ARGUMENT_DEVICE`](crate::rules::ARGUMENT_DEVICE) or [`ARGUMENT_VALUE`](crate::rules::ARGUMENT_VALUE) for a
    /// stream or a sink of another device, a scale that is not above 0 or not finite, sinks that are not those of all
    /// layers, and one of a layer of linear attention; [`STEP_LAYERS`](crate::rules::STEP_LAYERS) for sinks of some
    /// layers of a group alone;
    /// [`GRAPH_LENGTHS`](crate::rules::GRAPH_LENGTHS) for limits of 0 keys or blocks, or if the cache does not have a
    /// block for each request of the largest size; [`GRAPH_STREAMS`](crate::rules::GRAPH_STREAMS) if the graphs take
    /// too many streams; [`DEVICE_DETERMINISTIC`](crate::rules::DEVICE_DETERMINISTIC) as for [`Attention::begin`]; a
    /// broken rule of the call; as for [`Graph::capture`](ascend_attention::Graph::capture).
    ///
    /// With layers of linear attention [`GRAPH_INPUTS`](crate::rules::GRAPH_INPUTS) for weights or biases of other
    /// convolutions than the states are for;
    /// [`GRAPH_SIZE`](crate::rules::GRAPH_SIZE) for more than 8 tokens of a
    /// request; as for
    /// [`RecurrentGatedDeltaRule::plan`](ascend_attention::recurrent_delta_rule::RecurrentGatedDeltaRule::plan), which
    /// from CANN 9.1 on takes no more rows than the pool has slots, and for
    /// [`CausalConv1d::plan`](ascend_attention::causal_conv::CausalConv1d::plan). Without such layers
    /// [`GRAPH_INPUTS`](crate::rules::GRAPH_INPUTS) for limits with weights of some
    /// ([`GraphLimits::convolutions`]).
    pub fn capture(
        &self,
        stream: &Stream,
        mask: impl Into<LayerMask>,
        limits: &GraphLimits,
    ) -> Result<AttentionGraphs<T>> {
        let mask = mask.into();
        self.capture_layers(stream, |_| mask.clone(), limits)
    }

    /// Captures as [`capture`](Self::capture) does, with a mask for each layer: that of its [group](Self::mask), or one
    /// that shows no more keys. So full and windowed layers can be over one cache, whose sequences keep all tokens that
    /// any layer shows. The limits hold for every group.
    ///
    /// # Errors
    /// As for [`Attention::capture`].
    pub fn capture_layers<M: Into<LayerMask>>(
        &self,
        stream: &Stream,
        mask: impl Fn(usize) -> M,
        limits: &GraphLimits,
    ) -> Result<AttentionGraphs<T>> {
        let groups = self.groups().iter().map(|group| {
            let state = group.backends().recorded_state(limits.each.0, limits.drafting);
            let preferred = |layer| group.backends().preferred(layer, state);
            let layers = group.layers().iter().enumerate();
            let layers = layers.map(|(own, layer)| {
                let mask = mask(*layer).into();
                group.check_mask(&mask)?;
                Ok((mask, preferred(own), group.shape_of(own)))
            });
            let layers = layers.collect::<Result<Vec<_>>>()?;
            let causality = group.fixed_causality();
            Ok(CapturedGroup::new(group.cache(), group.shape(), causality, layers.into_iter(), limits))
        });
        AttentionGraphs::capture(stream, self, groups.collect::<Result<_>>()?, limits)
    }
}

impl<T: Element> AttentionGraphs<T> {
    /// Captures the layers of an attention, by groups.
    fn capture(
        stream: &Stream,
        attention: &Attention<T>,
        groups: Vec<CapturedGroup>,
        limits: &GraphLimits,
    ) -> Result<Self> {
        for group in attention.groups() {
            group.check(stream)?;
        }
        check_deterministic(attention.is_deterministic(), stream.device())?;
        limits.check()?;
        let places = attention.places().to_vec();
        check_sinks(stream, groups.len(), &places, limits)?;
        match attention.states() {
            Some(pool) => LinearBuffers::<T>::check(pool, limits)?,
            None => limits.check_no_convolutions()?,
        }
        let linear = attention.states.as_ref().map(|pool| CapturedLinear::new(pool, limits)).transpose()?;
        let convolutions = linear.as_ref().map_or(0, |linear| linear.convolutions.len());
        let caches = attention.groups().iter().map(LayerGroup::cache);
        let caches = caches.map(|cache| (0..cache.shape().layers).map(|layer| cache.tensors(layer)).collect());
        let caches = caches.collect::<Result<Vec<Vec<_>>>>()?;
        let sinks = &limits.learnable_sinks;
        let of_group = |group: usize| {
            let own = places.iter().zip(sinks);
            let own = own.filter(move |(place, _)| place.group == group);
            let mut own: Vec<_> = own.map(|(place, sink)| (place.layer, sink.as_ref())).collect();
            own.sort_unstable_by_key(|(layer, _)| *layer);
            own.into_iter().map(|(_, sink)| sink).collect::<Vec<_>>()
        };
        let graphs = GraphPool::capture_layers(
            stream.device(),
            &limits.rows(),
            places.len().saturating_add(convolutions),
            |rows| {
                let requests = limits.each.requests(rows);
                let both = groups.iter().zip(attention.groups()).enumerate();
                let groups = both.map(|(at, (group, own))| {
                    group.buffers(stream, (own.cache(), own.backends()), requests, &of_group(at))
                });
                let groups = groups.collect::<Result<_>>()?;
                let linear = linear.as_ref().map(|linear| LinearBuffers::new(linear, stream, (requests, rows)));
                Ok(SizeBuffers { groups, linear: linear.transpose()? })
            },
            |capture, _, layer, buffers: &SizeBuffers<T>| {
                if let (Some(linear), Some(buffers)) = (&linear, &buffers.linear) {
                    if let Some(own) = layer.checked_sub(places.len()) {
                        return buffers.record_convolution(capture, linear, own);
                    }
                    if let Some(place) = places.get(layer).filter(|place| place.group == groups.len()) {
                        return buffers.record_layer(capture, &linear.pool, place.layer);
                    }
                }
                let known = places.get(layer).and_then(|place| {
                    let LayerPlace { group: at, layer } = *place;
                    let own = (attention.groups().get(at)?.cache(), layer);
                    Some((groups.get(at)?, own, buffers.groups.get(at)?))
                });
                let Some((group, own, buffers)) = known else {
                    return Err(no_layer(layer, places.len()));
                };
                let sink = sinks.get(layer).and_then(Option::as_ref);
                group.record(capture, own, sink, buffers)
            },
        )?;
        Ok(Self {
            graphs,
            groups,
            scales: attention.groups().iter().map(|group| Arc::clone(&group.scales)).collect(),
            caches,
            places,
            sinks: limits.learnable_sinks.clone(),
            linear,
            each: limits.each,
            deterministic: attention.is_deterministic(),
            range_checker: Arc::clone(&attention.range_checker),
        })
    }

    /// The captured sizes, in requests, ascending.
    pub fn sizes(&self) -> impl Iterator<Item = usize> + '_ {
        self.graphs.sizes().map(|rows| self.each.requests(rows))
    }

    /// The backend whose calls the graphs of a layer record; of several sizes that of the smallest. A layer of linear
    /// attention has none.
    pub fn backend(&self, layer: usize) -> Option<&'static str> {
        let place = self.places.get(layer)?;
        let program = self.groups.get(place.group)?.program(place.layer)?;
        let buffers = self.graphs.buffers(self.graphs.sizes().next()?)?;
        let captured = buffers.groups.get(place.group)?.programs.get(program)?;
        Some(captured.recorded.backend.name())
    }

    /// Whether a step can be replayed now: it is of the captured cache and layers, its requests add no more tokens than
    /// were declared, there is a size that holds it, its keys and blocks, including those of the padding, are no more
    /// than were declared, and its sequences and their states can take the step. Compute other steps without a graph.
    ///
    /// [`begin`](Self::begin) asks the same, and may refuse a step all the same for its stream, because the calls of a
    /// backend of one's own depend on more than the size ([`GRAPH_BACKEND`](crate::rules::GRAPH_BACKEND)), because a
    /// named mask shows a token no key ([`MASK_ROWS`](crate::rules::MASK_ROWS)), on a thread that captures, or because
    /// there is no slot for a state that was forked after its growth
    /// ([`STATE_EXHAUSTED`](crate::rules::STATE_EXHAUSTED)).
    pub fn serves(&self, metadata: &AttentionMetadata) -> bool {
        self.check(metadata).is_ok()
    }

    /// The query rows that a step is padded to, or why it cannot be replayed.
    fn check(&self, step: &AttentionMetadata) -> Result<usize> {
        step.check_groups(self.groups.len())?;
        check_deterministic(self.deterministic, self.graphs.device())?;
        self.check_scales()?;
        let parts: Vec<_> = self.groups.iter().zip(step.groups()).collect();
        let sizes: Vec<usize> = self.graphs.sizes().collect();
        let rows = fitting_rows(&sizes, &parts, |rows, group| {
            let buffers = self.graphs.buffers(rows).and_then(|buffers| buffers.groups.get(group));
            buffers.map_or(&[][..], |buffers| &buffers.programs)
        })?;
        if let Some(linear) = &self.linear {
            // Before the caches, which would take the tokens of a step that left layers out once more.
            LeasedStates::check(&linear.pool, step)?;
        }
        for (group, part) in parts {
            part.check_begins(group.cache_entry())?;
        }
        if self.linear.is_some() {
            LeasedStates::of_requests(step)?;
        }
        Ok(rows)
    }

    /// Refuses steps once a layer has another scale than it was captured with.
    fn check_scales(&self) -> Result<(), Violation> {
        for (layer, place) in self.places.iter().enumerate() {
            let captured = self.groups.get(place.group).and_then(|group| group.scale(place.layer));
            let scale = self.scales.get(place.group).and_then(|scales| lock(scales).get(place.layer).copied());
            if let (Some(scale), Some(captured)) = (scale, captured)
                && scale != captured
            {
                return Err(Violation::new(
                    &rules::GRAPH_INPUTS,
                    format_args!("the scale {scale} of layer {layer}, set by `Attention::layer_scales`"),
                    format_args!("{captured}, with which the layer was captured"),
                    "capture the graphs again, or compute the step without a graph",
                ));
            }
        }
        Ok(())
    }

    /// Begins a step: pads it to the smallest captured size that fits, and copies its table, slots and named masks into
    /// the buffers of that size. The copy waits for the stream. Blocks given back from now on are handed out
    /// again when the stream has passed the end of the step.
    ///
    /// The backends describe the step's calls anew, and a named mask is called in every step, for each key of the
    /// longest request that was declared.
    ///
    /// # Errors
    /// [`GRAPH_SIZE`](crate::rules::GRAPH_SIZE) for a step larger than all sizes, with a request of more tokens than
    /// were declared (with a named mask also of fewer), or with longer dummies than the captured calls take; the
    /// refusal of a captured backend, and
    /// [`GRAPH_BACKEND`](crate::rules::GRAPH_BACKEND) for calls of another form than it was captured with;
    /// [`GRAPH_LENGTHS`](crate::rules::GRAPH_LENGTHS) for more keys or blocks than were declared;
    /// [`SETTINGS_CACHE`](crate::rules::SETTINGS_CACHE), [`TABLE_POOL`](crate::rules::TABLE_POOL) and
    /// [`STEP_CAUSALITY`](crate::rules::STEP_CAUSALITY) for metadata of another cache or other masks,
    /// [`BLOCK_GIVEN_BACK`](crate::rules::BLOCK_GIVEN_BACK) for blocks that went back to the pool since it was made,
    /// [`BLOCK_UNCOPIED`](crate::rules::BLOCK_UNCOPIED) where another cache of the pool has copied a block and this one
    /// has not ([`Attention::queue_pending_copies`]);
    /// [`SEQUENCE_CHANGED`](crate::rules::SEQUENCE_CHANGED), [`SEQUENCE_COMPUTED`](crate::rules::SEQUENCE_COMPUTED),
    /// [`SEQUENCE_IN_PROGRESS`](crate::rules::SEQUENCE_IN_PROGRESS), [`SEQUENCE_GAP`](crate::rules::SEQUENCE_GAP),
    /// [`SEQUENCE_MOVED`](crate::rules::SEQUENCE_MOVED) and
    /// [`STEP_LAYERS_MISSING`](crate::rules::STEP_LAYERS_MISSING) as
    /// for [`Attention::begin`]; [`MASK_ROWS`](crate::rules::MASK_ROWS) for a token that a named mask shows no key,
    /// [`BLOCK_WINDOW`](crate::rules::BLOCK_WINDOW) for sequences that gave back what a layer shows,
    /// [`GROUP_LAYERS`](crate::rules::GROUP_LAYERS) for other groups of layers,
    /// [`GRAPH_INPUTS`](crate::rules::GRAPH_INPUTS) once a layer has another scale than it was captured with
    /// ([`Attention::layer_scales`]); [`BATCH_EMPTY`](crate::rules::BATCH_EMPTY) for metadata without requests;
    /// [`DEVICE_DETERMINISTIC`](crate::rules::DEVICE_DETERMINISTIC) as for [`Attention::begin`];
    /// [`Capturing`](ascend_attention::Error::Capturing) on a thread that captures;
    /// [`ARGUMENT_DEVICE`](crate::rules::ARGUMENT_DEVICE) or [`ARGUMENT_VALUE`](crate::rules::ARGUMENT_VALUE) for a
    /// stream of another device, and if the step before was on another stream and its end is not known; with layers of
    /// linear attention as for [`Attention::begin`]. The metadata is unchanged then. A step that is begun has padded it
    /// to the captured size, also where the step is given up: a step without graphs then takes the padding's rows too
    /// ([`AttentionMetadata::tokens`]), and one that is begun again all of them or none.
    ///
    /// Errors of the device while lengths are planned and buffers filled, such as
    /// [`Acl`](ascend_attention::Error::Acl) and [`OutOfMemory`](ascend_attention::Error::OutOfMemory), leave the
    /// metadata padded: it can be begun again, and computed without a graph.
    pub fn begin<'a>(&'a mut self, stream: &'a Stream, metadata: &mut AttentionMetadata) -> Result<Step<'a, T>> {
        self.graphs.admits(stream)?;
        self.linear.as_ref().map_or(Ok(()), |linear| linear.pool.check_stream(stream))?;
        let rows = self.check(metadata)?;
        // Blocks that go back from here on wait for the step; those that went back before are found by the check.
        let leases = self.groups.iter();
        let leases = leases.map(|group| group.pool().begin_step(stream));
        let leases: Vec<_> = leases.collect();
        let progress = self.groups.iter().zip(metadata.groups());
        let progress = progress.map(|(group, metadata)| metadata.begin_progress(group.cache_entry()));
        let progress = progress.collect::<Result<Vec<_>, _>>()?;
        let requests = self.each.requests(rows);
        // Before the padding: a backend may refuse the step, and a mask may have a row without keys.
        let buffers = Arc::clone(self.graphs.buffers(rows).ok_or_else(|| self.graphs.too_large(rows))?);
        let padded = metadata.replayed(requests, rows)?;
        let programs = self.groups.iter().zip(buffers.groups.iter().zip(&self.caches)).zip(padded.groups());
        let programs = programs
            .map(|((group, (buffers, caches)), padded)| group.replayed(stream, (buffers, caches.as_slice()), padded));
        let programs: Vec<Vec<ReplayedProgram<T>>> = programs.collect::<Result<_>>()?;
        // Checks that can be made now come before the padding, which cannot be undone.
        not_while_capturing("filling the buffers of a step")?;
        self.graphs.follow(stream)?;
        let leased = self.linear.as_ref().map(|linear| LeasedStates::begin(&linear.pool, stream, metadata));
        let leased = leased.transpose()?;
        let unfilled = metadata.tokens();
        metadata.pad_to_requests(requests, rows)?;
        let (metadata, places, groups) = (&*metadata, &self.places, &self.groups);
        let lengths = |layer: usize, update: Update| {
            if places.get(layer).is_none_or(|place| place.group == groups.len()) {
                // Layers of linear attention and their convolutions read their numbers from tensors.
                return Ok(update);
            }
            let known = places.get(layer).and_then(|place| {
                let program = groups.get(place.group)?.program(place.layer)?;
                programs.get(place.group)?.get(program)
            });
            let known = known.ok_or_else(|| no_layer(layer, places.len()))?;
            Ok(update.each(known.program.lengths())?)
        };
        let replays = self.graphs.start(stream, rows, lengths, |buffers| {
            let mut all = groups.iter().zip(&buffers.groups).zip(metadata.groups()).zip(&programs);
            all.try_for_each(|(((group, buffers), metadata), programs)| {
                group.fill(stream, buffers, metadata, programs)
            })?;
            match (&self.linear, &buffers.linear, &leased) {
                (Some(linear), Some(buffers), Some(leased)) => buffers.fill(&linear.pool, stream, leased.states()),
                _ => Ok(()),
            }
        })?;
        let replayed = ReplayedLayers {
            replays,
            layers: places.len(),
            groups,
            caches: &self.caches,
            sinks: &self.sinks,
            convolutions: self.linear.as_ref().map_or(&[], |linear| &linear.convolutions),
            rows: StepRows::of_step(stream, metadata, Some(unfilled)),
            lent: vec![LentTensors::default(); groups.len() + 1],
            convolved: None,
        };
        let checked = lock(&self.range_checker).as_mut().and_then(|checker| checker.begin(metadata));
        Ok(Step {
            stream,
            places,
            tokens: rows,
            calls: StepCalls::Replayed(replayed),
            leased,
            _leases: leases,
            layers: QueuedLayers::new(places.len(), progress, STEP_AGAIN),
            range_checker: &self.range_checker,
            checked,
            output: None,
        })
    }
}

impl<T: Element> fmt::Debug for AttentionGraphs<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("AttentionGraphs")
            .field("graphs", &self.graphs)
            .field("groups", &self.groups.len())
            .finish_non_exhaustive()
    }
}

/// Refuses sinks of some layers of a group and not of others, and another number of layers.
fn check_sinks(stream: &Stream, groups: usize, places: &[LayerPlace], limits: &GraphLimits) -> Result<()> {
    let sinks = &limits.learnable_sinks;
    if !sinks.is_empty() && sinks.len() != places.len() {
        return Err(Error::invalid(
            "learnable_sinks",
            format_args!("sinks of {} layers", sinks.len()),
            format_args!("of all {} layers, or of none", places.len()),
        )
        .fix("give one entry for each layer of the model, `None` for layers without sinks"));
    }
    for sink in sinks.iter().flatten() {
        sink.check_device("learnable_sinks", stream.device())?;
    }
    let linear = places.iter().zip(sinks).filter(|(place, sink)| place.group == groups && sink.is_some()).count();
    if linear > 0 {
        let given = format_args!("sinks of {linear} layers of linear attention");
        return Err(Error::invalid("learnable_sinks", given, "none for such layers, which have no sinks")
            .fix("give `None` for layers of linear attention"));
    }
    for group in 0..groups {
        let own = places.iter().zip(sinks).filter(|(place, _)| place.group == group);
        let [with, without] = own.fold([0usize; 2], |[with, without], (_, sink)| match sink {
            Some(_) => [with.saturating_add(1), without],
            None => [with, without.saturating_add(1)],
        });
        if with > 0 && without > 0 {
            return Err(Violation::new(
                &rules::STEP_LAYERS,
                format_args!("sinks of {with} layers of group {group}, none of {without}"),
                "sinks of all layers of a group, or of none",
                "divide the layers into groups with sinks and without",
            )
            .into());
        }
    }
    Ok(())
}
