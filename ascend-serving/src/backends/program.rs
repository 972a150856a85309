//! What a step computes, as a backend describes it: calls, and at most one merge of their results.

use std::fmt;

use ascend_attention::attention::CallLengths;
use ascend_attention::merge::PartsOfRows;
use ascend_attention::{AnyTensor, Element, Stream, Tensor, Violation};

use crate::error::Result;
use crate::rules;

use super::latent_tensors::LatentForm;
use super::shown_keys;
use super::step_call::{CallKeys, StepCall};
use super::step_context::{LayerTensors, StepContext, merges_sinks, size};
use super::step_memory::StepMemory;

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
    /// Whether rows may see fewer keys than the step's mask shows.
    leaves_keys_out: bool,
    pub(super) stage: Option<Box<dyn StepStage<T>>>,
}

impl<T: Element> StepProgram<T> {
    /// Calls that each compute rows of their own.
    pub fn new(calls: impl IntoIterator<Item = StepCall>) -> Self {
        Self { calls: calls.into_iter().collect(), merge: None, leaves_keys_out: false, stage: None }
    }

    /// Merges the results of the packed calls, each of which computes all rows of the step: `rows` names the calls
    /// that have keys for each row.
    pub fn merged(mut self, rows: Vec<PartsOfRows>) -> Self {
        self.merge = Some(rows);
        self
    }

    /// Says that rows see fewer keys than the step's mask shows, as in sparse attention. Otherwise a program whose
    /// calls leave keys out is refused, since it was made from wrong lengths.
    pub fn leaves_keys_out(mut self) -> Self {
        self.leaves_keys_out = true;
        self
    }

    /// Adds work that runs before the calls.
    pub fn stage(mut self, stage: impl StepStage<T> + 'static) -> Self {
        self.stage = Some(Box::new(stage));
        self
    }

    /// Whether it may read the keys of the step from the layer's own tensors.
    pub(super) fn reads_own_keys(&self) -> bool {
        self.calls.iter().any(|call| call.keys == CallKeys::Own)
            || self.stage.as_ref().is_some_and(|stage| stage.reads_own_keys())
    }

    /// The lengths of each call.
    pub(crate) fn lengths(&self) -> impl Iterator<Item = CallLengths<'_>> {
        self.calls.iter().map(StepCall::lengths)
    }

    /// Refuses a program whose calls compute rows twice or not at all, read keys that their requests do not have, show
    /// keys that are hidden, or count sinks twice.
    pub(super) fn check(&self, step: &StepContext<'_>, first: &LayerTensors<'_, T>) -> Result<()> {
        self.check_shared_keys(step)?;
        self.check_rows(step.metadata.tokens())?;
        self.check_latent(step, first)?;
        shown_keys::check(&self.calls, self.merge.as_deref(), self.leaves_keys_out, step)?;
        self.check_sinks(step, first)
    }

    /// Refuses keys of the step's own tensors for layers that share those of others.
    fn check_shared_keys(&self, step: &StepContext<'_>) -> Result<(), Violation> {
        match step.shares_keys && self.reads_own_keys() {
            false => Ok(()),
            true => Err(Violation::new(
                &rules::STEP_SHARED_KEYS,
                "the step's own keys in a layer that shares keys",
                "cached keys alone",
                "add a backend that reads every key from the cache, such as `Backend::Fused`",
            )),
        }
    }

    /// Refuses a merge that counts the layer's sinks twice or never, or whose parts' log-sum-exps do not count them on
    /// this product.
    fn check_sinks(&self, step: &StepContext<'_>, first: &LayerTensors<'_, T>) -> Result<()> {
        if self.merge.is_none() || first.learnable_sink.is_none() {
            return Ok(());
        }
        let counted = self.calls.iter().filter(|call| call.takes_sinks).count();
        if counted == 1 && merges_sinks(step, first)? {
            return Ok(());
        }
        Err(rules::BACKEND_SINKS
            .broken(
                format_args!("a merge of {counted} calls that count the layer's sinks"),
                "1 such call, on a product whose log-sum-exps count sinks",
            )
            .into())
    }

    /// Refuses several calls over latents, and one of some rows. A call returns the heads first, so that its rows of an
    /// output are not contiguous, and its log-sum-exps the tokens first, so that no merge takes both.
    fn check_latent(&self, step: &StepContext<'_>, first: &LayerTensors<'_, T>) -> Result<(), Violation> {
        if first.latent.is_none() {
            return Ok(());
        }
        let all = 0..step.metadata.tokens();
        let absorbed = match first.mixed() {
            Some(_) => 0..step.metadata.decode_tokens(),
            None => all.clone(),
        };
        let given = match (&self.merge, &*self.calls) {
            (None, []) => return Ok(()),
            (None, [call]) => match call.rows.clone().unwrap_or(all) {
                rows if rows == absorbed => return Ok(()),
                rows => format!("a call of the rows {rows:?} over latents"),
            },
            (None, calls) => format!("{} calls over latents", calls.len()),
            (Some(_), _) => "a merge of calls over latents".into(),
        };
        Err(Violation::new(
            &rules::BACKEND_LATENT,
            given,
            format_args!("one call of the rows {absorbed:?}, whose queries are absorbed"),
            "make one call of these rows, or compute the layer in a `StepStage`",
        ))
    }

    /// Refuses calls that leave rows of a step of `tokens` rows out, or compute some twice. The calls of a merge
    /// compute all rows, and a stage may compute those that no call does.
    fn check_rows(&self, tokens: usize) -> Result<(), Violation> {
        if self.merge.is_some() && self.calls.iter().all(|call| call.rows.is_none()) {
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
        Err(rules::BACKEND_ROWS.broken(
            format_args!("calls of the rows {rows:?}"),
            format_args!("calls that divide the rows 0..{tokens} among them"),
        ))
    }

    /// Refuses a program that differs from this one in more than lengths, blocks and the contents of masks.
    pub(crate) fn check_form(&self, other: &Self, backend: &str) -> Result<(), Violation> {
        let mut calls = self.calls.iter().zip(&other.calls);
        if self.calls.len() == other.calls.len()
            && calls.all(|(one, other)| one.has_form_of(other))
            && self.merge == other.merge
            && other.stage.is_none()
        {
            return Ok(());
        }
        Err(Violation::new(
            &rules::GRAPH_BACKEND,
            format_args!("calls of the backend `{backend}` whose number, rows or merge depend on the step"),
            "calls that the captured size fixes",
            "add a backend such as `Backend::Fused` behind it before the capture, or compute this step without a \
             graph; a backend of your own may let its calls depend on the size, and not on lengths or \
             `AttentionMetadata::requests`, which is 0 in a capture",
        ))
    }

    /// Refuses a program that no graph records: its work does not consist of calls alone.
    pub(crate) fn check_recordable(&self, backend: &'static str) -> Result<(), Violation> {
        match &self.stage {
            None => Ok(()),
            Some(_) => Err(Violation::new(
                &rules::GRAPH_BACKEND,
                format_args!("the backend `{backend}`, whose program has a `StepStage`"),
                "calls alone, whose number and rows the captured size fixes",
                "add a backend such as `Backend::Fused` behind it, over a cache of 8 bits \
                 `Backend::QuantisedDecode`, or \
                 compute the step without a graph",
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
            .finish()
    }
}

/// Work of a step that is no call of FusedInferAttentionScore on the step's tensors: copies of keys, other operators,
/// plans that differ by layer. It runs before the calls of its [`StepProgram`].
pub trait StepStage<T: Element>: Send + Sync + fmt::Debug {
    /// The device memory that it needs besides the cache and the tensors of the layers.
    fn memory(&self) -> StepMemory;

    /// Whether it may read [`LayerTensors::key`] and [`LayerTensors::value`], which layers that share keys do not have
    /// ([`StepContext::shares_keys`]): such stages are refused there.
    fn reads_own_keys(&self) -> bool {
        true
    }

    /// Queues the work of a layer on the stream of the step, into the layer's output.
    ///
    /// # Errors
    /// [`PLAN_TENSORS`](crate::rules::PLAN_TENSORS) for tensors of other shapes; any error of a launch.
    fn launch_into(&self, stream: &Stream, layer: &LayerTensors<'_, T>, output: &mut Tensor<T>) -> Result<()>;
}

/// The shape of a layer's output: `[tokens, N, D of the values]`; with latents as their form defines it.
pub(crate) fn output_shape<T: Element>(layer: &LayerTensors<'_, T>) -> [usize; 3] {
    let [tokens, heads, dim] = [0, 1, 2].map(|axis| size(layer.query, axis));
    match layer.latent.map(|latent| latent.form) {
        None => [tokens, heads, size(layer.value, 2)],
        Some(LatentForm::Absorbed) => heads_first(layer.query),
        Some(LatentForm::Quantised(queries)) => heads_first(queries.query()),
        Some(_) => [tokens, heads, dim],
    }
}

/// The shape of the output of absorbed queries: `[N, tokens, 512]`.
pub(super) fn heads_first(absorbed: &AnyTensor) -> [usize; 3] {
    [1, 0, 2].map(|axis| size(absorbed, axis))
}
