//! What a step computes, as a backend describes it: calls, and at most one merge of their results.

use std::fmt;
use std::iter;
use std::ops::Range;

use ascend_attention::attention::{BlockTable, CallLengths, Cumulative, Inputs, PerRequest};
use ascend_attention::merge::PartsOfRows;
use ascend_attention::spec::Layout;
use ascend_attention::{Element, FusedInferAttention, InnerPrecise, Mask, Tensor, Violation};

use crate::batch::{MaskedRequest, NamedMask};
use crate::error::Result;
use crate::rules;

use super::step_context::{AttentionShape, LayerTensors, StepContext, size};
use super::step_memory::{MemoryLimit, StepMemory};

/// The work of a step: calls of FusedInferAttentionScore, one after the other, and at most one merge of their results
/// by their log-sum-exps. What no such call computes is a [`StepStage`], which runs before the calls.
///
/// A program without a stage can be captured ([`Attention::capture`](crate::Attention::capture)): graphs record its
/// calls, and take the lengths and block tables of the program of each step.
#[must_use = "a program does nothing until planned"]
pub struct StepProgram<T: Element> {
    pub(super) calls: Vec<StepCall>,
    /// For all rows of the step the calls that have keys for them; `None` where each call computes rows of its own.
    pub(super) merge: Option<Vec<PartsOfRows>>,
    pub(super) stage: Option<Box<dyn StepStage<T>>>,
    /// The programs of layers that are computed otherwise than others; nothing else is done then.
    pub(super) by_layer: Option<LayerPrograms<StepProgram<T>>>,
}

/// Programs of one step, or plans of them, and which of them computes a layer.
#[derive(Debug)]
pub(super) struct LayerPrograms<P> {
    /// Each with its name in errors.
    pub(super) programs: Vec<(String, P)>,
    /// The number of each layer's program.
    pub(super) of_layer: Vec<usize>,
    /// The most memory of all together.
    pub(super) limit: Option<MemoryLimit>,
}

impl<P> LayerPrograms<P> {
    /// The programs.
    pub(super) fn all(&self) -> impl Iterator<Item = &P> {
        self.programs.iter().map(|(_, program)| program)
    }

    /// What computes a layer.
    pub(super) fn get(&self, layer: usize) -> Result<&P, Violation> {
        let program = self.of_layer.get(layer);
        match program.and_then(|program| self.programs.get(*program)) {
            Some((_, program)) => Ok(program),
            None => Err(Violation::new(
                &rules::HYBRID_LAYERS,
                format_args!("layer {layer}"),
                format_args!("layers below {}", self.of_layer.len()),
                "divide the layers of the model among the sets",
            )),
        }
    }
}

impl<T: Element> StepProgram<T> {
    /// Calls that each compute rows of their own.
    pub fn new(calls: impl IntoIterator<Item = StepCall>) -> Self {
        Self {
            calls: calls.into_iter().collect(),
            merge: None,
            stage: None,
            by_layer: None,
        }
    }

    /// A program of several, one of which computes a layer.
    pub(super) fn by_layer(programs: LayerPrograms<Self>) -> Self {
        Self {
            by_layer: Some(programs),
            ..Self::new([])
        }
    }

    /// Merges the results of the packed calls, each of which computes all rows of the step: `rows` names the calls
    /// that have keys for each row.
    pub fn merged(mut self, rows: Vec<PartsOfRows>) -> Self {
        self.merge = Some(rows);
        self
    }

    /// Adds work that runs before the calls.
    pub fn stage(mut self, stage: impl StepStage<T> + 'static) -> Self {
        self.stage = Some(Box::new(stage));
        self
    }

    /// The lengths of each call of a layer.
    pub(crate) fn lengths(
        &self,
        layer: usize,
    ) -> Result<impl Iterator<Item = CallLengths<'_>>, Violation> {
        Ok(self.of_layer(layer)?.calls.iter().map(StepCall::lengths))
    }

    /// The program of a layer.
    fn of_layer(&self, layer: usize) -> Result<&Self, Violation> {
        match &self.by_layer {
            None => Ok(self),
            Some(layers) => layers.get(layer)?.of_layer(layer),
        }
    }

    /// The programs of the layers, or this one if it computes them all.
    fn programs(&self) -> Box<dyn Iterator<Item = &Self> + '_> {
        match &self.by_layer {
            None => Box::new(iter::once(self)),
            Some(layers) => Box::new(layers.all().flat_map(Self::programs)),
        }
    }

    /// The calls of all layers.
    pub(super) fn all_calls(&self) -> impl Iterator<Item = &StepCall> {
        self.programs().flat_map(|program| &program.calls)
    }

    /// Refuses calls that leave rows of a step of `tokens` rows out, or compute some twice. The calls of a merge compute
    /// all rows, and a stage may compute those that no call does.
    pub(super) fn check_rows(&self, tokens: usize) -> Result<(), Violation> {
        if self.merge.is_some() || self.by_layer.is_some() {
            return Ok(());
        }
        let rows = self.calls.iter().map(|call| call.rows.clone());
        let mut rows: Vec<_> = rows.map(|rows| rows.unwrap_or(0..tokens)).collect();
        rows.sort_by_key(|rows| rows.start);
        let mut computed = 0;
        let mut once = true;
        for rows in &rows {
            once &= rows.start >= computed && (rows.start == computed || self.stage.is_some());
            computed = rows.end;
        }
        if once && computed <= tokens && (computed == tokens || self.stage.is_some()) {
            return Ok(());
        }
        Err(Violation::new(
            &rules::BACKEND_ROWS,
            format_args!("calls of the rows {rows:?}"),
            format_args!("calls that divide the rows 0..{tokens} among them"),
            "divide the rows by `StepCall::rows`, or merge calls of all rows by `StepProgram::merged`",
        ))
    }

    /// Whether both have programs of their own for the same layers.
    fn divides_as(&self, other: &Self) -> bool {
        match (&self.by_layer, &other.by_layer) {
            (None, None) => true,
            (Some(one), Some(other)) => {
                let mut programs = one.all().zip(other.all());
                one.of_layer == other.of_layer
                    && one.programs.len() == other.programs.len()
                    && programs.all(|(one, other)| one.divides_as(other))
            }
            _ => false,
        }
    }

    /// Refuses a program that differs from this one in more than lengths, blocks and the contents of masks.
    pub(crate) fn check_form(&self, other: &Self, backend: &str) -> Result<(), Violation> {
        let alike = |(one, other): (&Self, &Self)| {
            let mut calls = one.calls.iter().zip(&other.calls);
            one.calls.len() == other.calls.len()
                && calls.all(|(one, other)| one.has_form_of(other))
                && one.merge == other.merge
                && other.stage.is_none()
        };
        if self.divides_as(other) && self.programs().zip(other.programs()).all(alike) {
            return Ok(());
        }
        Err(Violation::new(
            &rules::GRAPH_BACKEND,
            format_args!(
                "calls of the backend `{backend}` whose number, rows, merge or layers depend on the step"
            ),
            "calls that the captured size fixes",
            "register a backend such as `Fused` behind it, or compute the step without a graph",
        ))
    }

    /// Refuses a program that no graph records: its work does not consist of calls alone.
    pub(crate) fn check_recordable(&self, backend: &'static str) -> Result<(), Violation> {
        match self.programs().any(|program| program.stage.is_some()) {
            false => Ok(()),
            true => Err(Violation::new(
                &rules::GRAPH_BACKEND,
                format_args!("the backend `{backend}`, which copies or waits between its calls"),
                "calls alone, whose number and rows the captured size fixes",
                "register a backend such as `Fused` behind it, over a cache of 8 bits `QuantisedDecode`, or compute \
                 the step without a graph",
            )),
        }
    }
}

impl<T: Element> From<StepCall> for StepProgram<T> {
    fn from(call: StepCall) -> Self {
        Self::new([call])
    }
}

impl<T: Element> fmt::Debug for StepProgram<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("StepProgram")
            .field("calls", &self.calls)
            .field("merge", &self.merge)
            .field("stage", &self.stage)
            .field("by_layer", &self.by_layer)
            .finish()
    }
}

/// Work of a step that is no call of FusedInferAttentionScore on the step's tensors: copies of keys, other operators,
/// plans that differ by layer. It runs before the calls of its [`StepProgram`].
pub trait StepStage<T: Element>: Send + Sync + fmt::Debug {
    /// The device memory that it needs besides the cache and the tensors of the layers.
    fn memory(&self) -> StepMemory;

    /// The shape of a layer's output: `[tokens, N, D of the values]`, unless a stage defines another one.
    fn output_shape(&self, layer: &LayerTensors<'_, T>) -> [usize; 3] {
        packed_shape(layer)
    }

    /// Queues the work of a layer, into the layer's output.
    ///
    /// # Errors
    /// [`PLAN_TENSORS`](crate::rules::PLAN_TENSORS) for tensors of other shapes; any error of a launch.
    fn launch_into(
        &self,
        step: &StepContext<'_>,
        layer: &LayerTensors<'_, T>,
        output: &mut Tensor<T>,
    ) -> Result<()>;
}

/// The shape of a layer's attention where each query row has a row of it.
pub(super) fn packed_shape<T: Element>(layer: &LayerTensors<'_, T>) -> [usize; 3] {
    let (query, value) = (layer.query, layer.value);
    [size(query, 0), size(query, 1), size(value, 2)]
}

/// A call of a [`StepProgram`]: which query rows it takes, over which keys, with which lengths and mask. It takes the
/// layer's sinks, if there are any.
#[derive(Clone, Debug)]
#[must_use = "a call does nothing until it is part of a program"]
pub struct StepCall {
    layout: Layout,
    /// Query rows of the step; `None` for all of them.
    rows: Option<Range<usize>>,
    pub(super) keys: CallKeys,
    /// Ends of the query rows of a packed call; over the step's own keys those of the keys too.
    q_ends: Option<Cumulative>,
    /// Keys of each sequence, if they are cached.
    kv_lengths: PerRequest,
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
    /// cached before over the step's own.
    ///
    /// # Errors
    /// [`BACKEND_MASK`](crate::rules::BACKEND_MASK) for a [`NamedMask`], which packed calls do not take; an error of
    /// the device, if the mask has to be made.
    pub fn of_step(step: &StepContext<'_>) -> Result<Self> {
        let metadata = step.metadata;
        let mask = step.mask.causality()?.mask(&step.stream.device().masks())?;
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
        Self {
            keys: CallKeys::Own,
            ..Self::new(Layout::Tnd, Some(ends), PerRequest::default())
        }
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
    fn has_form_of(&self, other: &Self) -> bool {
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

    /// The call under a mask, without lengths.
    pub(super) fn description(&self, shape: AttentionShape, mask: Mask) -> FusedInferAttention {
        let call = shape.call(self.layout).mask(mask);
        match self.inner_precise {
            Some(inner_precise) => call.inner_precise(inner_precise),
            None => call,
        }
    }

    /// The call's rows of a packed tensor `[tokens, N, D]`, in the axes of its layout.
    pub(super) fn view<T: Element>(&self, packed: &Tensor<T>) -> Result<Tensor<T>> {
        let rows = match &self.rows {
            Some(rows) => &packed.narrow(0, rows.clone())?,
            None => packed,
        };
        let [tokens, heads, dim] = [0, 1, 2].map(|axis| size(rows, axis));
        let requests = self.sequences();
        let each = tokens.checked_div(requests).unwrap_or(0);
        Ok(match self.layout {
            Layout::Bsh => rows.reshape([requests, each, heads.saturating_mul(dim)])?,
            Layout::Bsnd => rows.reshape([requests, each, heads, dim])?,
            Layout::Bnsd => rows.reshape([tokens, heads, 1, dim])?,
            _ => rows.clone(),
        })
    }

    /// The inputs of the call in a layer.
    pub(super) fn inputs<'a, T: Element>(
        &self,
        layer: &LayerTensors<'a, T>,
        query: &'a Tensor<T>,
        table: &'a BlockTable,
    ) -> Inputs<'a, T> {
        let inputs = match (&self.keys, layer.quantised) {
            (CallKeys::Own, _) => Inputs::new(query, layer.key, layer.value),
            (_, None) => layer.cached_keys(query, table),
            (_, Some(quantised)) => Inputs::new(query, quantised.key(), quantised.value())
                .paged(table)
                .quantisation(quantised.quantisation().unwrap_or_default()),
        };
        match self.takes_sinks {
            true => layer.with_sink(inputs),
            false => inputs,
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test fails by panicking")]
mod tests {
    use super::*;
    use ascend_attention::bf16;

    #[test]
    fn layers_that_other_programs_compute_are_another_form() {
        let call = || {
            let ends = Cumulative::new(vec![1]).unwrap();
            StepCall::packed(ends, PerRequest::new(vec![9]).unwrap())
        };
        let program = |of_layer: [usize; 3]| {
            let programs = ["full", "last"].map(|name| (name.to_owned(), call().into()));
            StepProgram::<bf16>::by_layer(LayerPrograms {
                programs: programs.into(),
                of_layer: of_layer.into(),
                limit: None,
            })
        };
        let form = program([0, 0, 1]);
        form.check_form(&program([0, 0, 1]), "hybrid").unwrap();
        let refusal = form.check_form(&program([0, 1, 1]), "hybrid").unwrap_err();
        assert_eq!(refusal.rule, &rules::GRAPH_BACKEND);
    }
}
