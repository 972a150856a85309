//! A call of a program: its query rows, keys, lengths and mask.

use std::ops::Range;

use ascend_attention::attention::{BlockTable, CallLengths, Cumulative, Inputs, PerRequest, Quantisation};
use ascend_attention::spec::Layout;
use ascend_attention::{AnyTensor, Element, FusedInferAttention, InnerPrecise, Mask, Tensor};

use crate::batch::{MaskedRequest, NamedMask};
use crate::causality::Causality;
use crate::error::Result;

use super::latent_tensors::LatentForm;
use super::step_context::{AttentionShape, LayerTensors, StepContext, size};

/// A call of a [`StepProgram`](crate::StepProgram): which query rows it takes, over which keys, with which lengths and
/// mask. It takes the layer's sinks, if there are any.
///
/// In a layer of [latents](crate::LayerTensors::latent) its queries are absorbed ones with their rotary parts, latents
/// are keys and values, and its output has the heads first. A program has one such call at most, of all rows whose
/// queries are absorbed.
#[derive(Clone, Debug)]
#[must_use = "a call does nothing until it is part of a program"]
pub struct StepCall {
    layout: Layout,
    /// Query rows of the step; `None` for all of them.
    pub(super) rows: Option<Range<usize>>,
    pub(super) keys: CallKeys,
    /// Ends of the query rows of a packed call; over the step's own keys those of the keys too.
    q_ends: Option<Cumulative>,
    /// Keys of each sequence, if they are cached.
    pub(super) kv_lengths: PerRequest,
    pub(super) mask: CallMask,
    pub(super) takes_sinks: bool,
    inner_precise: Option<InnerPrecise>,
}

/// The keys of a call.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum CallKeys {
    /// The step's own keys, packed.
    Own,
    /// Cached keys, by the step's block table.
    Cached,
    /// Cached keys of some requests, by their rows of the step's table.
    CachedOf(Range<usize>),
    /// Cached keys in these blocks of each sequence.
    Blocks(Vec<Vec<usize>>),
}

/// A call's queries in a layer.
pub(super) struct CallQueries {
    query: AnyTensor,
    /// Their rotary parts, where the layer has latents.
    rope: Option<AnyTensor>,
    /// The scales of quantised ones.
    scale: Option<Tensor<f32>>,
}

/// The mask of a call.
#[derive(Clone, Debug)]
pub(super) enum CallMask {
    Operator(Box<Mask>),
    /// A rule of the caller, over every key of the step's block table.
    Named(NamedMask, Vec<MaskedRequest>),
}

impl StepCall {
    fn new(layout: Layout, q_ends: Option<Cumulative>, kv_lengths: PerRequest) -> Self {
        Self {
            layout,
            rows: None,
            keys: CallKeys::Cached,
            q_ends,
            kv_lengths,
            mask: CallMask::Operator(Box::new(Mask::none())),
            takes_sinks: true,
            inner_precise: None,
        }
    }

    /// A packed call (TND) of all of a step's rows under the step's mask: over the cached keys, or where no token was
    /// cached before over the step's own. Where each request has a single row, from which no key is hidden, it has no
    /// mask, which costs time to read; under a window this holds for the lengths of a step that no graph records.
    ///
    /// # Errors
    /// [`BACKEND_MASK`](crate::rules::BACKEND_MASK) for a [`NamedMask`], which packed calls do not take; an error of
    /// the device, if the mask has to be made.
    pub fn of_step(step: &StepContext<'_>) -> Result<Self> {
        let metadata = step.metadata;
        let causality = step.mask.causality()?;
        let shown = match step.recorded {
            true => causality,
            false => causality.over(metadata.longest()),
        };
        let mask = match shown {
            Causality::Causal if metadata.longest_rows() <= 1 => Mask::none(),
            _ => causality.mask(&step.stream.device().masks())?,
        };
        let call = match metadata.state().reads_cache() {
            true => Self::packed(metadata.q_ends().clone(), metadata.kv_lengths().clone()),
            false => Self::over_own_keys(metadata.q_ends().clone()),
        };
        Ok(call.mask(mask))
    }

    /// A packed call (TND) over cached keys, with the ends of the query rows and the number of keys of each sequence.
    /// Its rows see every key unless [`StepCall::mask`] hides some.
    pub fn packed(q_ends: Cumulative, kv_lengths: PerRequest) -> Self {
        Self::new(Layout::Tnd, Some(q_ends), kv_lengths)
    }

    /// A packed call (TND) over the step's own keys, of which each request has one for each of its rows. Its rows see
    /// every key of their request unless [`StepCall::mask`] hides some.
    pub fn over_own_keys(ends: Cumulative) -> Self {
        Self { keys: CallKeys::Own, ..Self::new(Layout::Tnd, Some(ends), PerRequest::default()) }
    }

    /// A call with a batch axis (BSH, BSND or BNSD) over cached keys, of requests with equally many query rows, in
    /// BNSD one each. Its rows see every key unless [`StepCall::mask`] hides some.
    pub fn batched(layout: Layout, kv_lengths: PerRequest) -> Self {
        Self::new(layout, None, kv_lengths)
    }

    /// Takes some rows of the step's query.
    pub fn rows(mut self, rows: Range<usize>) -> Self {
        self.rows = Some(rows);
        self
    }

    /// Reads the cached keys of some requests, by their rows of the step's block table.
    pub fn requests(mut self, requests: Range<usize>) -> Self {
        self.keys = CallKeys::CachedOf(requests);
        self
    }

    /// Reads the cached keys in these blocks, a row for each sequence.
    pub fn blocks(mut self, rows: Vec<Vec<usize>>) -> Self {
        self.keys = CallKeys::Blocks(rows);
        self
    }

    /// Sets a mask of the operator's. A graph reads the tensor that the mask has when it is captured: a step whose
    /// mask has another one is refused there.
    pub fn mask(mut self, mask: Mask) -> Self {
        self.mask = CallMask::Operator(Box::new(mask));
        self
    }

    /// Sets a mask by a rule of the caller.
    pub(super) fn named_mask(mut self, mask: &NamedMask, requests: Vec<MaskedRequest>) -> Self {
        self.mask = CallMask::Named(mask.clone(), requests);
        self
    }

    /// Leaves the layer's sinks out, which another call counts.
    pub fn without_sinks(mut self) -> Self {
        self.takes_sinks = false;
        self
    }

    /// Sets the precision of the products.
    pub fn inner_precise(mut self, inner_precise: InnerPrecise) -> Self {
        self.inner_precise = Some(inner_precise);
        self
    }

    /// The lengths.
    pub(super) fn lengths(&self) -> CallLengths<'_> {
        let kv = &self.kv_lengths;
        match (&self.q_ends, &self.keys) {
            (Some(q), CallKeys::Own) => CallLengths::PackedDense { q, kv: q },
            (Some(q), _) => CallLengths::PackedPaged { q, kv },
            (None, _) => CallLengths::Batched { q: None, kv },
        }
    }

    fn sequences(&self) -> usize {
        let keys = self.kv_lengths.lengths().len();
        self.q_ends.as_ref().map_or(keys, |ends| ends.ends().len())
    }

    /// Whether this call differs from another in lengths, blocks and the contents of a named mask alone.
    pub(super) fn has_form_of(&self, other: &Self) -> bool {
        let keys = match (&self.keys, &other.keys) {
            (CallKeys::Blocks(_), CallKeys::Blocks(_)) => true,
            (one, other) => one == other,
        };
        let masks = match (&self.mask, &other.mask) {
            (CallMask::Operator(one), CallMask::Operator(other)) => {
                let form = |mask: &Mask| {
                    let mode = mask.sparse_mode();
                    // Every compressed tensor of a mode has the same content.
                    let tensor = mask.tensor().filter(|_| !mode.takes_compressed_mask());
                    let place = tensor.map(|tensor| (tensor.as_raw(), *tensor.desc()));
                    (mode, mask.pre_tokens(), mask.next_tokens(), place)
                };
                form(one) == form(other)
            }
            (CallMask::Named(one, rows), CallMask::Named(other, others)) => {
                let new = |rows: &[MaskedRequest]| rows.first().map(|request| request.new);
                one == other && new(rows) == new(others)
            }
            _ => false,
        };
        let rows = |call: &Self| (call.layout, call.rows.clone(), call.sequences());
        let attributes = |call: &Self| (call.takes_sinks, call.inner_precise);
        keys && masks && rows(self) == rows(other) && attributes(self) == attributes(other)
    }

    /// The first query row, and the ends of the rows of each sequence, in a step of `tokens` tokens.
    pub(super) fn row_ends(&self, tokens: usize) -> (usize, Vec<usize>) {
        let rows = self.rows.clone().unwrap_or(0..tokens);
        let each = rows.len().checked_div(self.sequences()).unwrap_or(0);
        let ends = match &self.q_ends {
            Some(ends) => ends.ends().to_vec(),
            None => (1..=self.sequences()).map(|sequence| each * sequence).collect(),
        };
        let of_step = ends.into_iter().map(|end| rows.start + end);
        (rows.start, of_step.collect())
    }

    /// The call in a layer under a mask, without lengths.
    pub(super) fn description<T: Element>(
        &self,
        shape: AttentionShape,
        layer: &LayerTensors<'_, T>,
        mask: Mask,
    ) -> FusedInferAttention {
        let layout = match (layer.latent, self.layout) {
            (None, layout) => layout,
            (Some(_), Layout::Bsh) => Layout::BshNbsd,
            (Some(_), Layout::Bsnd) => Layout::BsndNbsd,
            (Some(_), Layout::Bnsd) => Layout::BnsdNbsd,
            (Some(_), _) => Layout::TndNtd,
        };
        let call = shape.call(layout).mask(mask);
        match self.inner_precise {
            Some(inner_precise) => call.inner_precise(inner_precise),
            None => call,
        }
    }

    /// The call's rows of a packed tensor `[tokens, N, D]`, in the axes of its layout.
    fn view(&self, packed: &AnyTensor) -> Result<AnyTensor> {
        match &self.rows {
            Some(rows) => self.axes(&packed.narrow(0, rows.clone())?),
            None => self.axes(packed),
        }
    }

    /// The call's rows `[tokens, N, D]` in the axes of its layout.
    fn axes(&self, rows: &AnyTensor) -> Result<AnyTensor> {
        let [tokens, heads, dim] = [0, 1, 2].map(|axis| size(rows, axis));
        let requests = self.sequences();
        let each = tokens.checked_div(requests).unwrap_or(0);
        Ok(match self.layout {
            Layout::Bsh => rows.reshape([requests, each, heads * dim])?,
            Layout::Bsnd => rows.reshape([requests, each, heads, dim])?,
            Layout::Bnsd => rows.reshape([tokens, heads, 1, dim])?,
            _ => rows.clone(),
        })
    }

    /// The scales `[tokens, N]` of the call's queries in the axes of its layout.
    fn scale_axes(&self, scale: &Tensor<f32>) -> Result<Tensor<f32>> {
        let [tokens, heads] = [0, 1].map(|axis| size(scale, axis));
        let requests = self.sequences();
        let each = tokens.checked_div(requests).unwrap_or(0);
        Ok(match self.layout {
            Layout::Bsh | Layout::Bsnd => scale.reshape([requests, each, heads])?,
            Layout::Bnsd => scale.reshape([tokens, heads, 1])?,
            _ => scale.clone(),
        })
    }

    /// The call's queries in a layer.
    pub(super) fn queries<T: Element>(&self, layer: &LayerTensors<'_, T>) -> Result<CallQueries> {
        let Some(latent) = layer.latent else {
            return Ok(CallQueries { query: self.view(layer.query)?, rope: None, scale: None });
        };
        let query = match (layer.quantised_queries(), latent.form) {
            (Some(queries), _) => self.axes(queries.query())?,
            (None, LatentForm::Mixed { absorbed, .. }) => self.axes(absorbed)?,
            (None, _) => self.view(layer.query)?,
        };
        let scale = layer.quantised_queries().map(|queries| self.scale_axes(queries.scale()));
        Ok(CallQueries { query, rope: Some(self.view(latent.query_rope)?), scale: scale.transpose()? })
    }

    /// Where the call writes in a layer whose output is this.
    pub(super) fn target<T: Element>(&self, layer: &LayerTensors<'_, T>, output: &Tensor<T>) -> Result<Tensor<T>> {
        let heads_first = match (layer.latent, layer.mixed()) {
            (None, _) => return Ok(self.view(output)?.typed()?),
            (Some(_), Some((_, decoded))) => decoded,
            (Some(_), None) => output,
        };
        let [heads, tokens, dim] = [0, 1, 2].map(|axis| size(heads_first, axis));
        let requests = self.sequences();
        let each = tokens.checked_div(requests).unwrap_or(0);
        Ok(match self.layout {
            Layout::Tnd => heads_first.clone(),
            _ => heads_first.reshape([heads, requests, each, dim])?,
        })
    }

    /// The inputs of the call in a layer, with its [queries](Self::queries) there.
    pub(super) fn inputs<'a, T: Element>(
        &self,
        layer: &LayerTensors<'a, T>,
        queries: &'a CallQueries,
        table: &'a BlockTable,
    ) -> Inputs<'a, T> {
        let CallQueries { query, rope, scale } = queries;
        let of_tensors = |key: &'a Tensor<T>, value: &'a Tensor<T>| match rope {
            None => Inputs::of_any(query, key, value),
            Some(rope) => Inputs::of_any(query, key, key).rope_of_any(rope, value),
        };
        let inputs = match (&self.keys, layer.quantised) {
            (CallKeys::Own, _) => of_tensors(layer.key, layer.value),
            (_, None) => of_tensors(&layer.cache.key, &layer.cache.value).paged(table),
            (_, Some(cache)) => match (rope, scale, cache.latent_scale_tensor()) {
                (Some(rope), Some(scale), Some(factor)) => Inputs::of_any(query, cache.key(), cache.key())
                    .rope_of_any(rope, cache.value())
                    .paged(table)
                    .quantisation(Quantisation::Latent {
                        dequant_scale_query: scale,
                        key_scale: factor,
                        value_scale: factor,
                    }),
                _ => Inputs::of_any(query, cache.key(), cache.value())
                    .paged(table)
                    .quantisation(cache.quantisation().unwrap_or_default()),
            },
        };
        match self.takes_sinks {
            true => layer.with_sink(inputs),
            false => inputs,
        }
    }
}
