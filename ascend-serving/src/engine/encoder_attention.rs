//! Attention without a cache, in which every token sees all of its own sequence: encoders and vision towers.

use std::fmt;
use std::ops::Range;
use std::sync::Arc;

use ascend_attention::attention::{CallLengths, Inputs, PerRequest};
use ascend_attention::case::tentatively;
use ascend_attention::prompt::{PromptFlashAttention, PromptPlan};
use ascend_attention::spec::Layout;
use ascend_attention::spec::ops::prompt_flash_attention::PromptCall;
use ascend_attention::{AnyTensor, Element, Output, Plan, Stream, Tensor, Violation};

use crate::backends::{AttentionShape, RefusedBackend, apart, batched, no_backend, size};
use crate::error::{Error, Result};
use crate::rules;

use super::layer_check::StepRows;

/// The attention of an encoder or a vision tower: packed sequences, each token of which sees all of its own sequence
/// and nothing else. There is no cache, no mask, and no state: [`EncoderAttention::plan`] checks and prepares a batch
/// once for all layers, [`EncoderAttention::launch`] queues a layer.
///
/// The sequences are whatever must not see each other: texts, pictures, or windows of a picture, for towers that
/// attend within windows in some layers (`cu_window_seqlens`), which then have a plan for the windows and one for the
/// pictures. Model files with running sums get lengths by
/// [`Cumulative::from_with_zero`](ascend_attention::attention::Cumulative::from_with_zero) and
/// [`Cumulative::per_request`](ascend_attention::attention::Cumulative::per_request).
///
/// The routes are tried in this order, and [`EncoderAttention::route`] names the one that is used:
///
/// | route | calls |
/// |---|---|
/// | `packed` | one of FusedInferAttentionScore (TND) |
/// | `batched` | one of FusedInferAttentionScore (BSND) for each run of sequences of one length |
/// | `prompt` | one of PromptFlashAttention (BSH) for each such run, which the Atlas inference series has |
///
/// ```
/// # fn main() -> ascend_serving::Result<()> {
/// # #[cfg(feature = "emulation")] {
/// use ascend_attention::attention::PerRequest;
/// use ascend_attention::{Runtime, f16};
/// use ascend_serving::{AttentionShape, EncoderAttention};
///
/// let stream = Runtime::emulated()?.device(0)?.stream()?;
/// // Two pictures of 100 and 36 patches, 16 heads of 80 elements.
/// let lengths = PerRequest::new(vec![100, 36])?;
/// let rows = stream.upload(&vec![f16::ONE; 136 * 16 * 80], [136, 16, 80])?;
/// let shape = AttentionShape::new(16, 16, 80);
/// let encoder = EncoderAttention::plan(shape, &stream, &lengths, (&rows, &rows, &rows))?;
/// for _layer in 0..2 {
///     let output = encoder.launch(&stream, (&rows, &rows, &rows))?;
///     assert_eq!(output.download(&stream)?[0], f16::ONE);
/// }
/// # }
/// # Ok(())
/// # }
/// ```
pub struct EncoderAttention {
    route: &'static str,
    calls: Calls,
    rows: EncoderRows,
}

impl EncoderAttention {
    /// Prepares a batch of these heads: the length of each sequence, and tensors of the shapes of all layers: query
    /// `[tokens, N, D]`, key and value `[tokens, Nkv, D]`. Sequences may be empty.
    ///
    /// # Errors
    /// [`ARGUMENT_VALUE`](crate::rules::ARGUMENT_VALUE) as for [`AttentionShape::check`];
    /// [`BATCH_EMPTY`](crate::rules::BATCH_EMPTY) without tokens, [`STEP_TOKENS`](crate::rules::STEP_TOKENS) and
    /// [`STEP_HEADS`](crate::rules::STEP_HEADS) for tensors of other shapes,
    /// [`LENGTHS_OVERFLOW`](crate::rules::LENGTHS_OVERFLOW) for lengths whose sum is too large;
    /// [`ARGUMENT_DEVICE`](crate::rules::ARGUMENT_DEVICE) for tensors of another device; [`Error::NoBackend`] with
    /// the reason of each route.
    pub fn plan<T: Element>(
        shape: AttentionShape,
        stream: &Stream,
        lengths: &PerRequest,
        (query, key, value): (&Tensor<T>, &Tensor<T>, &Tensor<T>),
    ) -> Result<Self> {
        shape.check()?;
        let ends = lengths.cumulative()?;
        let tokens = ends.total();
        if tokens == 0 {
            return Err(Violation::new(
                &rules::BATCH_EMPTY,
                format_args!("{} sequences without tokens", lengths.lengths().len()),
                "a token or more",
                "leave empty batches out",
            )
            .into());
        }
        let rows = EncoderRows { tokens, shape };
        rows.check(stream, [query, key, value])?;
        let call = CallLengths::PackedDense { q: &ends, kv: &ends };
        let packed = || {
            let inputs = Inputs::new(query, key, value);
            let plan = call.apply(shape.call(Layout::Tnd)).plan(inputs)?;
            Ok(Calls::Packed(Box::new(plan)))
        };
        let batched_calls = || {
            let runs = runs_of(lengths.lengths(), usize::MAX);
            let plan = |run: &Run| {
                let [query, key, value] = run.parts([query, key, value])?;
                Ok(shape.call(Layout::Bsnd).plan((&query, &key, &value))?)
            };
            Ok(Calls::Batched(planned(&runs, plan)?))
        };
        let prompts = || {
            shape.check_no_soft_cap(
                "PromptFlashAttention",
                "emulate a product whose FusedInferAttentionScore takes packed or batched rows",
            )?;
            let runs = runs_of(lengths.lengths(), PromptCall::MOST_CARD_SEQUENCES as usize);
            let plan = |run: &Run| {
                let [query, key, value] = run.flat_parts([query, key, value])?;
                let call = PromptFlashAttention::new(Layout::Bsh)
                    .heads(shape.heads)
                    .kv_heads(shape.kv_heads)
                    .scale(shape.scale);
                Ok(call.plan((&query, &key, &value))?)
            };
            Ok(Calls::Prompts(planned(&runs, plan)?))
        };
        let routes: [(&'static str, &dyn Fn() -> Result<Calls>); 3] =
            [("packed", &packed), ("batched", &batched_calls), ("prompt", &prompts)];
        let mut reasons = Vec::new();
        for (route, plan) in routes {
            match tentatively(plan) {
                Ok(calls) => {
                    return Ok(Self { route, calls, rows });
                }
                Err(why) => reasons.push(RefusedBackend::new(route, why, stream.device())),
            }
        }
        Err(no_backend(&reasons, None))
    }

    /// The route that it uses.
    pub fn route(&self) -> &'static str {
        self.route
    }

    /// Queues the attention of a layer, given its query, key and value: `[tokens, N, D]`. Returns at once.
    ///
    /// # Errors
    /// [`STEP_TOKENS`](crate::rules::STEP_TOKENS) and [`STEP_HEADS`](crate::rules::STEP_HEADS) for tensors of other
    /// shapes; [`ARGUMENT_DEVICE`](crate::rules::ARGUMENT_DEVICE) for tensors of another device; any error of a
    /// launch.
    pub fn launch<T: Element>(
        &self,
        stream: &Stream,
        inputs: (&Tensor<T>, &Tensor<T>, &Tensor<T>),
    ) -> Result<Tensor<T>> {
        let mut output = Tensor::empty(stream.device(), inputs.0.shape())?;
        self.launch_into(stream, inputs, &mut output)?;
        Ok(output)
    }

    /// As [`launch`](Self::launch), with an output tensor of the caller, of the query's shape.
    ///
    /// # Errors
    /// As for [`launch`](Self::launch); [`PLAN_TENSORS`](crate::rules::PLAN_TENSORS) for an output of another shape,
    /// [`ARGUMENT_MEMORY`](crate::rules::ARGUMENT_MEMORY) for one that shares memory with an input.
    pub fn launch_into<T: Element>(
        &self,
        stream: &Stream,
        (query, key, value): (&Tensor<T>, &Tensor<T>, &Tensor<T>),
        output: &mut Tensor<T>,
    ) -> Result<()> {
        let tensors = [query, key, value];
        self.rows.check(stream, tensors)?;
        let read: [(_, &AnyTensor); 3] = [("query", query), ("key", key), ("value", value)];
        apart("output", output, read)?;
        match &self.calls {
            Calls::Packed(plan) => {
                let inputs = Inputs::new(query, key, value);
                let mut output = Output::from(output.clone());
                Ok(plan.launch_into(stream, inputs, &mut output)?)
            }
            Calls::Batched(calls) => {
                output_of(query, output)?;
                for (run, plan) in calls {
                    let [query, key, value] = run.parts(tensors)?;
                    let mut part = Output::from(run.part(output)?);
                    let inputs = Inputs::new(&query, &key, &value);
                    plan.launch_into(stream, inputs, &mut part)?;
                }
                Ok(())
            }
            Calls::Prompts(calls) => {
                output_of(query, output)?;
                for (run, plan) in calls {
                    let [query, key, value] = run.flat_parts(tensors)?;
                    let mut part = run.flat_part(output)?;
                    let inputs = Inputs::new(&query, &key, &value);
                    plan.launch_into(stream, inputs, &mut part)?;
                }
                Ok(())
            }
        }
    }
}

/// The expected shapes of the tensors of a batch.
#[derive(Clone, Copy, Debug)]
struct EncoderRows {
    tokens: usize,
    shape: AttentionShape,
}

impl EncoderRows {
    /// Refuses query, key and value of other shapes or of another device.
    fn check<T: Element>(&self, stream: &Stream, tensors: [&Tensor<T>; 3]) -> Result<()> {
        let AttentionShape { heads, kv_heads, head_dim, .. } = self.shape;
        let fixes = [
            "bring a row for each token of the planned lengths, or plan with the lengths of these sequences",
            "bring query, key and value in this order, or make the `AttentionShape` with their heads",
        ];
        let rows = StepRows::without_padding(stream, self.tokens, fixes);
        let named = [("query", heads), ("key", kv_heads), ("value", kv_heads)];
        let mut named = named.into_iter().zip(tensors);
        named.try_for_each(|((name, heads), tensor)| rows.check(name, "the batch", tensor, &[heads, head_dim]))
    }
}

/// Consecutive sequences of one length.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Run {
    tokens: Range<usize>,
    sequences: usize,
}

impl Run {
    /// The rows of the run in each tensor, `[sequences, length, heads, D]`.
    fn parts<T: Element>(&self, tensors: [&Tensor<T>; 3]) -> Result<[Tensor<T>; 3]> {
        let [query, key, value] = tensors;
        Ok([self.part(query)?, self.part(key)?, self.part(value)?])
    }

    fn part<T: Element>(&self, tensor: &Tensor<T>) -> Result<Tensor<T>> {
        let rows = tensor.narrow(0, self.tokens.clone())?;
        let length = self.tokens.len().checked_div(self.sequences).unwrap_or(0);
        let shape = [self.sequences, length, size(tensor, 1), size(tensor, 2)];
        Ok(rows.reshape(shape)?)
    }

    /// The rows of the run in each tensor, `[sequences, length, heads * D]`.
    fn flat_parts<T: Element>(&self, tensors: [&Tensor<T>; 3]) -> Result<[Tensor<T>; 3]> {
        let [query, key, value] = tensors;
        let part = |tensor| self.flat_part(tensor);
        Ok([part(query)?, part(key)?, part(value)?])
    }

    fn flat_part<T: Element>(&self, tensor: &Tensor<T>) -> Result<Tensor<T>> {
        batched(&tensor.narrow(0, self.tokens.clone())?, self.sequences)
    }
}

/// Divides sequences into runs of neighbours of one length, at most `most` in each; empty sequences are in none.
fn runs_of(lengths: &[usize], most: usize) -> Vec<Run> {
    let mut runs: Vec<Run> = Vec::new();
    let mut length_of_last = 0;
    let mut first = 0usize;
    for &length in lengths.iter().filter(|&&length| length > 0) {
        let end = first + length;
        match runs.last_mut() {
            Some(run) if length_of_last == length && run.sequences < most => {
                run.tokens.end = end;
                run.sequences += 1;
            }
            _ => runs.push(Run { tokens: first..end, sequences: 1 }),
        }
        (length_of_last, first) = (length, end);
    }
    runs
}

/// The runs with their plans; runs of the same sizes share one.
fn planned<P>(runs: &[Run], plan: impl Fn(&Run) -> Result<P>) -> Result<Vec<(Run, Arc<P>)>> {
    let mut all: Vec<(Run, Arc<P>)> = Vec::with_capacity(runs.len());
    for run in runs {
        let sizes = |run: &Run| (run.sequences, run.tokens.len());
        let known = all.iter().find(|(other, _)| sizes(other) == sizes(run));
        let plan = match known {
            Some((_, plan)) => plan.clone(),
            None => Arc::new(plan(run)?),
        };
        all.push((run.clone(), plan));
    }
    Ok(all)
}

enum Calls {
    Packed(Box<Plan>),
    Batched(Vec<(Run, Arc<Plan>)>),
    Prompts(Vec<(Run, Arc<PromptPlan>)>),
}

/// Refuses an output of another shape than the query's before any of several calls is queued.
fn output_of<T: Element>(query: &Tensor<T>, output: &Tensor<T>) -> Result<()> {
    if output.shape() == query.shape() {
        return Ok(());
    }
    Err(Error::not_as_planned("output", format_args!("{:?}", output.shape()), format_args!("{:?}", query.shape())))
}

impl fmt::Debug for EncoderAttention {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("EncoderAttention").field("route", &self.route).field("rows", &self.rows).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn neighbours_of_one_length_are_one_run() {
        let runs = runs_of(&[4, 4, 0, 4, 4, 7, 0, 4], 3);
        let sizes: Vec<_> = (runs.iter()).map(|run| (run.tokens.clone(), run.sequences)).collect();
        assert_eq!(sizes, [(0..12, 3), (12..16, 1), (16..23, 1), (23..27, 1)]);
        assert!(runs_of(&[0, 0], 3).is_empty());
    }
}
