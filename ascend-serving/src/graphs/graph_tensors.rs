//! The tensors that captured layers read and write.

use std::fmt;

use ascend_attention::attention::BlockTable;
use ascend_attention::mask::HostMask;
use ascend_attention::scatter::{ScatterPlan, SlotMapping};
use ascend_attention::{AnyTensor, Device, Element, Stream, Tensor, Violation};

use crate::backends::{
    LatentForm, LatentTensors, LayerInputs, QuantisedQueries, RecordedBackend, StepProgram, names_of_keys, size,
};
use crate::error::{Error, Result};
use crate::kv::{DeviceQuantisers, LayerCache, QuantisedLayer, QueuedLayers};
use crate::rules;

/// The tensors of a captured layer, with a row for each token of the captured size: its requests times the tokens of
/// each. All layers of a group and size have the same tensors. Over latents `query` holds absorbed queries, `key`
/// latents, `value` rotary keys, and `output` attention to be projected, `[N, rows, 512]`. In
/// [`TreeGraphs`](crate::TreeGraphs) they are `[size, heads, nodes, D]`.
#[derive(Debug)]
pub struct GraphTensors<T: Element> {
    /// Queries, `[rows, N, D]`. Over latents of one byte it is the tensor `query_rope`, and the queries are
    /// `quantised_query`.
    pub query: Tensor<T>,
    /// The rotary parts of absorbed queries, over a cache of latents.
    pub query_rope: Option<Tensor<T>>,
    /// The absorbed queries, over a cache of latents of one byte
    /// ([`PagedKvCache::quantised_latents`](crate::kv::PagedKvCache::quantised_latents)).
    pub quantised_query: Option<QuantisedQueries>,
    /// Keys of the step, `[rows, Nkv, D]`.
    pub key: Tensor<T>,
    /// Values of the step.
    pub value: Tensor<T>,
    /// The attention, `[rows, N, Dv]`; over latents `[N, rows, 512]`. The next layer of the group overwrites it,
    /// so that [`Step::forward`](crate::Step::forward) alone lends it.
    pub(crate) output: Tensor<T>,
}

impl<T: Element> GraphTensors<T> {
    /// What latent attention has besides query, key and value.
    pub(crate) fn latent(&self) -> Option<LatentTensors<'_, T>> {
        let query_rope = self.query_rope.as_ref()?;
        let form = self.quantised_query.as_ref().map_or(LatentForm::Absorbed, LatentForm::Quantised);
        Some(LatentTensors { query_rope, form })
    }

    /// The tensors that a layer reads, for [`Step::forward`](crate::Step::forward).
    pub fn inputs(&self) -> LayerInputs<'_, T> {
        LayerInputs { latent: self.latent(), ..LayerInputs::from((&self.query, &self.key, &self.value)) }
    }

    /// The inputs of a layer by name, over latents with the rotary parts of the queries, each with its tensor.
    pub(crate) fn places<'a>(
        &'a self,
        inputs: &LayerInputs<'a, T>,
        query_rope: Option<&'a Tensor<T>>,
    ) -> impl Iterator<Item = (&'static str, &'a AnyTensor, &'a AnyTensor)> + Clone + use<'a, T> {
        let rope = query_rope.zip(self.query_rope.as_ref());
        let [key, value] = names_of_keys(rope.is_some());
        let query = match self.quantised_queries(inputs) {
            Some([from, to]) => (from.query(), to.query()),
            None => (&**inputs.query, &*self.query),
        };
        let places = [
            Some(("query", query.0, query.1)),
            Some((key, inputs.key, &self.key)),
            Some((value, inputs.value, &self.value)),
            rope.map(|(from, to)| ("query_rope", &**from, &**to)),
        ];
        places.into_iter().flatten()
    }

    /// The quantised queries of a layer, and their place.
    fn quantised_queries<'a>(&'a self, inputs: &LayerInputs<'a, T>) -> Option<[&'a QuantisedQueries; 2]> {
        match (inputs.latent?.form, &self.quantised_query) {
            (LatentForm::Quantised(queries), Some(place)) => Some([queries, place]),
            _ => None,
        }
    }

    /// The scales of quantised queries by name, with their place.
    pub(crate) fn scale_place<'a>(
        &'a self,
        inputs: &LayerInputs<'a, T>,
    ) -> Option<(&'static str, &'a AnyTensor, &'a AnyTensor)> {
        self.quantised_queries(inputs).map(|[from, to]| ("scale", &**from.scale(), &**to.scale()))
    }

    /// Copies the inputs of a layer, which fit, to the first places of these tensors.
    pub(crate) fn copy_in(
        &self,
        stream: &Stream,
        inputs: &LayerInputs<'_, T>,
        query_rope: Option<&Tensor<T>>,
    ) -> Result<()> {
        copy_rows(stream, self.places(inputs, query_rope).chain(self.scale_place(inputs)))
    }
}

/// Whether the tensors of a graph, which several layers have, are lent to be filled for one of them.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct LentTensors {
    /// The layer that they were lent for last.
    layer: Option<usize>,
}

impl LentTensors {
    /// Notes that the tensors are lent for a layer.
    pub(crate) fn lend(&mut self, layer: usize, queued: &QueuedLayers) -> Result<(), Violation> {
        self.check_lent(layer, queued)?;
        self.layer = Some(layer);
        Ok(())
    }

    /// Refuses a layer whose tensors were lent for another one that is not queued.
    pub(crate) fn check_lent(self, layer: usize, queued: &QueuedLayers) -> Result<(), Violation> {
        match self.layer.filter(|lent| *lent != layer && !queued.is_queued(*lent)) {
            None => Ok(()),
            Some(lent) => Err(Violation::new(
                &rules::STEP_IN_PLACE,
                format_args!("layer {layer}, whose tensors were lent to be filled for layer {lent}"),
                format_args!("layer {lent} queued before another one that has its tensors"),
                format_args!("queue layer {lent} first, then queue layer {layer} or take its tensors"),
            )),
        }
    }

    /// Refuses inputs of a layer, each with its name and place, that are in their places where these were not lent for
    /// the layer: what is in them may be another layer's.
    pub(crate) fn check_taken<'a>(
        self,
        layer: usize,
        mut inputs: impl Iterator<Item = (&'static str, &'a AnyTensor, &'a AnyTensor)>,
    ) -> Result<(), Violation> {
        let in_place = inputs.find(|(_, from, to)| self.layer != Some(layer) && from.as_raw() == to.as_raw());
        in_place.map_or(Ok(()), |(name, ..)| {
            Err(Violation::new(
                &rules::STEP_IN_PLACE,
                format_args!("{name} of layer {layer} in the tensors of the graph, which were not lent for this layer"),
                "tensors that were lent for the layer, or inputs of the caller's own",
                "take the tensors for the layer (`tensors` or `linear_tensors` of the step) before they are filled \
                 for it",
            ))
        })
    }
}

/// A tensor of zeros of a graph: rows of padding are read as well.
pub(crate) fn zeros<T: Element>(device: &Device, shape: [usize; 3]) -> Result<Tensor<T>> {
    let elements = shape.iter().fold(1usize, |product, axis| product.saturating_mul(*axis));
    Ok(Tensor::from_buffer(&device.alloc_zeroed::<T>(elements)?, shape)?)
}

/// Refuses a tensor of this name and place that is not the one which the graph reads.
pub(crate) fn check_captured(
    (name, place): (&str, impl fmt::Display),
    given: Option<&AnyTensor>,
    captured: Option<&AnyTensor>,
    fix: &'static str,
) -> Result<(), Violation> {
    let is_same = match (given, captured) {
        (Some(given), Some(captured)) => given.as_raw() == captured.as_raw() && given.desc() == captured.desc(),
        (given, captured) => given.is_none() && captured.is_none(),
    };
    if is_same {
        return Ok(());
    }
    let text =
        |tensor: Option<&AnyTensor>| tensor.map_or_else(|| "none".to_owned(), |tensor| tensor.desc().to_string());
    let other = if given.map(|given| given.desc()) == captured.map(|captured| captured.desc()) {
        ", in memory of its own,"
    } else {
        ""
    };
    Err(Violation::new(
        &rules::GRAPH_INPUTS,
        format_args!("{name} {}{other} in {place}", text(given)),
        format_args!("the tensor that the layer was captured with: {}", text(captured)),
        fix,
    ))
}

/// Copies inputs of a layer, each with its name, to the first rows of the graph's tensors. An input that is these rows
/// stays where it is.
pub(crate) fn copy_rows<'a>(
    stream: &Stream,
    copies: impl Iterator<Item = (&'static str, &'a AnyTensor, &'a AnyTensor)> + Clone,
) -> Result<()> {
    let first_rows = |from: &AnyTensor, to: &AnyTensor| to.narrow(0, 0..size(from, 0));
    let is_in_place =
        |from: &AnyTensor, rows: &AnyTensor| from.as_raw() == rows.as_raw() && rows.desc().lies_as(from.desc());
    for (name, from, _) in copies.clone() {
        from.check_device(name, stream.device())?;
        // An input in another input's place would be overwritten before it is copied.
        for (other, source, to) in copies.clone().filter(|(_, _, to)| from.overlaps(to)) {
            let rows = first_rows(source, to)?;
            if from.overlaps(&rows) && !(other == name && is_in_place(from, &rows)) {
                let given = format_args!("memory that is shared with the first rows of the graph's tensor `{other}`");
                let allowed = format_args!("the first rows of the graph's tensor `{name}`, or memory of its own");
                return Err(Error::shared(name, given, allowed));
            }
        }
    }
    for (_, from, to) in copies {
        let rows = first_rows(from, to)?;
        if !is_in_place(from, &rows) {
            rows.copy_from(stream, from)?;
        }
    }
    Ok(())
}

/// The buffers of the graphs of a size, for the layers that share a cache.
pub(crate) struct GroupBuffers<T: Element> {
    pub(crate) table: BlockTable,
    pub(crate) slots: SlotMapping,
    /// The quantisers of keys and of values, where the cache is quantised.
    pub(crate) quantisers: Option<DeviceQuantisers>,
    /// The write of new keys and values, the same call in every layer.
    pub(crate) write: ScatterPlan,
    /// For each mask and scale that layers have the backend that computes them, and its program.
    pub(crate) programs: Vec<CapturedProgram<T>>,
    pub(crate) tensors: GraphTensors<T>,
}

/// What computes the captured layers with one mask and scale.
pub(crate) struct CapturedProgram<T: Element> {
    pub(crate) recorded: RecordedBackend<T>,
    /// The most rows of a dummy request in a step whose requests add fewer tokens than were declared; `None` where each
    /// request has to add as many.
    pub(crate) dummy_rows: Option<usize>,
    /// The sinks of the first of the layers.
    pub(crate) sink: Option<AnyTensor>,
}

/// The tensors that a cache has for a layer.
pub(crate) type CachedLayer<T> = (LayerCache<T>, Option<QuantisedLayer>);

/// The program of a step for the captured layers with one mask and scale, and the contents of its named masks.
pub(crate) struct ReplayedProgram<T: Element> {
    pub(crate) program: StepProgram<T>,
    pub(crate) masks: Vec<Option<HostMask>>,
}
