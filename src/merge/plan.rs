//! Merging on the device.

use std::fmt;

use ascend_spec::ops::attention_update::{Parameter, UpdateCall, UpdateProblem, visible};
use ascend_spec::{Axes, Layout, TensorDesc};
use smallvec::SmallVec;

use crate::attention::Output;
use crate::error::{Error, Result};
use crate::memory::Element;
use crate::ops::attention_update::{self, LaunchTensors};
use crate::ops::operation::{self, Operation, Sealed};
use crate::runtime::{Queue, Stream};
use crate::tensor::{AnyTensor, Tensor};

use super::LseNat;

/// Attention over a part of the keys, on the device.
#[derive(Clone, Copy, Debug)]
pub struct Part<'a, T: Element> {
    /// The attention output, in the output order of the layout.
    pub attention: &'a Tensor<T>,
    /// The log-sum-exps, as attention writes them: `[B, N, S, 1]`, packed `[T, N, 1]`.
    pub softmax_lse: LseNat<&'a Tensor<f32>>,
}

impl<'a, T: Element> Part<'a, T> {
    /// The part that a launch of attention has computed.
    ///
    /// # Errors
    /// [`ARGUMENT_VALUE`](crate::rules::ARGUMENT_VALUE) for a call that did not compute log-sum-exps.
    pub fn of(output: &'a Output<T>) -> Result<Self> {
        match &output.softmax_lse {
            Some(lse) => Ok(Self { attention: &output.attention, softmax_lse: LseNat(lse) }),
            None => Err(Error::invalid("softmax_lse", "none", "one: ask for it with `softmax_lse(true)`")
                .fix("ask for it with `softmax_lse(true)` when the call is planned")),
        }
    }
}

/// Which rows are without keys in some parts, and so how they are treated. Attention marks them with +inf. The
/// operator's kernel takes that for no keys on Atlas A2 and A3 from CANN 8.5 on, and on Ascend 950 from 9.1 on;
/// elsewhere it computes NaN, and no operator of CANN's known to this crate can replace it on the device.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum EmptyRows {
    /// Every part has a key for every row: the caller's promise, as it holds for a cached prefix that is not empty. A
    /// launch is asynchronous; a row that breaks the promise becomes NaN, which the emulation reports.
    #[default]
    None,
    /// Every row has a key in some part: the caller's promise, as it holds for new tokens beside a context that some
    /// requests do not have. Where the operator takes +inf for no keys, the merge is that of [`EmptyRows::None`];
    /// elsewhere that of [`EmptyRows::ThroughHost`].
    SomeParts,
    /// There may be rows without any key. A launch copies the log-sum-exps (not the attention) to the host and back,
    /// and waits for the stream to do so; once more if a row has no keys at all.
    ThroughHost,
}

/// A merge of attention over 2 to 16 parts of the keys into attention over all of them. The [module](super) describes
/// what becomes of rows without keys and of NaN.
///
/// The operator takes rows one after the other. Log-sum-exps that attention writes as `[B, N, S, 1]` are in the order
/// of BNSD outputs; those of packed calls, `[T, N, 1]`, are in the order of TND outputs. The merge takes them as they
/// are, and also those of other layouts with a single head, or (BSND, BSH) with a single row a sequence; others have
/// to be put in order, which takes [`EmptyRows::ThroughHost`].
///
/// Source: aclnnAttentionUpdate. Not in CANN 8.1, where planning is an [`Error::MissingOperator`]:
/// [`merge_on_host`](super::merge_on_host) does without.
#[derive(Clone, Debug)]
#[must_use = "a description does nothing until planned"]
pub struct MergeState {
    layout: Layout,
    empty_rows: EmptyRows,
}

impl MergeState {
    /// A merge of outputs of calls with this layout.
    pub fn new(layout: Layout) -> Self {
        Self { layout, empty_rows: EmptyRows::default() }
    }

    /// The layout of the outputs' calls.
    pub(super) fn layout(&self) -> Layout {
        self.layout
    }

    /// Sets how rows are treated for which a part has no keys. Unset: [`EmptyRows::None`].
    pub fn empty_rows(mut self, empty_rows: EmptyRows) -> Self {
        self.empty_rows = empty_rows;
        self
    }

    /// Checks a merge and prepares it for parts of these shapes. Nothing is launched, and the tensors are not kept.
    ///
    /// # Errors
    /// Before any function of the operator is called: [`ARGUMENT_VALUE`](crate::rules::ARGUMENT_VALUE) for
    /// log-sum-exps that do not belong to the output, or would have to be put in order; [`Error::Violation`],
    /// [`Error::UnknownProduct`], [`Error::MissingOperator`]. After that [`Error::Aclnn`], should the operator
    /// refuse the call nevertheless.
    #[doc(alias = "aclnnAttentionUpdateGetWorkspaceSize")]
    pub fn plan<T: Element>(&self, parts: &[Part<'_, T>]) -> Result<MergePlan> {
        let Some(first) = parts.first() else {
            return Err(Error::invalid("parts", "none", "2 to 16")
                .fix("merge two parts or more; one part is the result already"));
        };
        let context = first.attention.memory().context();
        let (out, lse_out) = (*first.attention.desc(), *first.softmax_lse.0.desc());
        let rows = self.flatten(&out, &lse_out)?;
        for part in parts {
            part.attention.on("attention", context)?;
            part.softmax_lse.0.on("softmax_lse", context)?;
            let given = (part.attention.desc().shape, part.softmax_lse.0.desc().shape);
            if given != (out.shape, lse_out.shape) {
                return Err(Error::invalid(
                    "parts",
                    format_args!("{} with {}", part.attention.desc(), part.softmax_lse.0.desc()),
                    format_args!("{out} with {lse_out}, as the first part"),
                )
                .fix("merge parts of the same queries, in one type"));
            }
        }
        let aligned = self.in_order(first.softmax_lse.0)?.is_contiguous();
        if !aligned && self.empty_rows != EmptyRows::ThroughHost {
            return Err(Error::invalid(
                "softmax_lse",
                format_args!("{lse_out} for an output {out} in {}", self.layout),
                "log-sum-exps in the order of the output's rows (BNSD, packed, one head, or one row a sequence), or \
                 EmptyRows::ThroughHost, which puts them in order",
            )
            .fix("merge with `EmptyRows::ThroughHost`, or compute the parts in an order that both share"));
        }
        let (lse, local): (SmallVec<[_; 4]>, SmallVec<[_; 4]>) = parts.iter().map(|_| (rows.lse, rows.out)).unzip();
        let call =
            UpdateCall { lse: &lse, local_out: &local, update_type: 1, out: Some(rows.out), lse_out: Some(rows.lse) };
        let planned = call.check(context.target()?).map_err(Error::from);
        let planned = planned.and_then(|problem| {
            let operation = MergeOperation { merge: self.clone(), problem, out, lse_out };
            let is_idle = problem.rows == 0;
            let prepared = attention_update::prepare(context, &call, is_idle, first.attention)?;
            Ok(MergePlan::new(prepared, operation))
        });
        match (&planned, self.rows_of(parts, &rows)) {
            // A refused merge of parts that cannot be viewed as rows is not recorded.
            (Ok(_), _) | (_, Err(_)) => planned.map(|plan| plan.recorded_as(&call)),
            (Err(_), Ok(given)) => MergePlan::recorded(planned, context, &call, &given, None),
        }
    }

    /// Describes an output and its log-sum-exps as the rows that the operator takes.
    fn flatten(&self, out: &TensorDesc, lse: &TensorDesc) -> Result<Rows> {
        let refused = || {
            Error::invalid(
                "softmax_lse",
                format_args!("{lse} for an output {out} in {}", self.layout),
                "[B, N, S, 1], packed [T, N, 1], with the axes of the output",
            )
            .fix("bring the output and the log-sum-exps of one call")
        };
        let heads = lse.shape.get(1).copied().ok_or_else(refused)?;
        let extents = self.layout.output().extents(&out.shape, heads);
        let extents = extents.filter(|extents| self.layout.lse_shape(*extents) == lse.shape);
        let extents = extents.ok_or_else(refused)?;
        let count = lse.elements().and_then(|rows| i64::try_from(rows).ok());
        let count = count.ok_or_else(refused)?;
        let flat = |dtype, shape: &[i64]| TensorDesc::contiguous(dtype, shape).ok_or_else(refused);
        Ok(Rows { out: flat(out.dtype, &[count, extents.dim])?, lse: flat(lse.dtype, &[count])? })
    }

    /// The parts as the rows that the operator takes.
    fn rows_of<T: Element>(&self, parts: &[Part<'_, T>], rows: &Rows) -> Result<LaunchTensors> {
        let flat = |tensor: &AnyTensor, desc: &TensorDesc| {
            let shape = desc.shape.iter().map(|&size| usize::try_from(size).unwrap_or(0));
            tensor.reshape(shape.collect::<SmallVec<[_; 2]>>())
        };
        let mut tensors = SmallVec::new();
        for part in parts {
            tensors.push(flat(&self.in_order(part.softmax_lse.0)?, &rows.lse)?);
        }
        for part in parts {
            tensors.push(flat(part.attention, &rows.out)?);
        }
        Ok(LaunchTensors { outputs: 0, tensors })
    }

    /// A view of log-sum-exps in the order of the output's rows.
    fn in_order(&self, lse: &AnyTensor) -> Result<AnyTensor> {
        match order(self.layout) {
            Some(order) => lse.permute(order),
            None => Ok(lse.clone()),
        }
    }
}

/// Order of axes that puts log-sum-exps into the order of the output's rows; `None` where they are in that order
/// already. Each order is its own inverse.
fn order(layout: Layout) -> Option<&'static [usize]> {
    match layout.output() {
        Axes::Bsh | Axes::Bsnd => Some(&[0, 2, 1, 3]),
        Axes::Nbsd => Some(&[1, 0, 2, 3]),
        Axes::Ntd => Some(&[1, 0, 2]),
        Axes::Bnsd | Axes::Tnd => None,
    }
}

/// Descriptors of the outputs, as the operator takes them.
struct Rows {
    out: TensorDesc,
    lse: TensorDesc,
}

/// What a merge reads: the parts, as many as planned and in their order. Made from a list of them.
#[derive(Clone, Copy, Debug)]
#[must_use = "a description of tensors does nothing until launched"]
pub struct Parts<'a, T: Element>(pub(super) &'a [Part<'a, T>]);

impl<'a, T: Element> From<&'a [Part<'a, T>]> for Parts<'a, T> {
    fn from(parts: &'a [Part<'a, T>]) -> Self {
        Self(parts)
    }
}

impl<'a, T: Element, const N: usize> From<&'a [Part<'a, T>; N]> for Parts<'a, T> {
    fn from(parts: &'a [Part<'a, T>; N]) -> Self {
        Self(parts)
    }
}

impl<'a, T: Element> From<&'a Vec<Part<'a, T>>> for Parts<'a, T> {
    fn from(parts: &'a Vec<Part<'a, T>>) -> Self {
        Self(parts)
    }
}

/// A merge that was checked and prepared. From [`MergeState::plan`].
///
/// A launch reads [`Parts`], and writes what attention over all keys would, except that rows without keys have
/// log-sum-exp -inf: its outputs can be parts of a further merge. It returns at once, unless it goes by way of the host
/// ([`EmptyRows`]): then it waits, fails as the copies or earlier work on the stream do ([`Error::Acl`]), and cannot be
/// captured ([`Error::Capturing`]).
pub type MergePlan = operation::Plan<MergeOperation>;

/// AttentionUpdate, as its [`MergePlan`] knows it.
#[derive(Debug)]
pub struct MergeOperation {
    merge: MergeState,
    problem: UpdateProblem,
    out: TensorDesc,
    lse_out: TensorDesc,
}

impl Sealed for MergeOperation {}

impl Operation for MergeOperation {
    type Inputs<'a, T: Element> = Parts<'a, T>;
    type Output<T: Element> = Output<T>;
    type Parameter = Parameter;

    fn output<T: Element>(&self, plan: &MergePlan) -> Result<Output<T>> {
        let attention = TensorDesc::packed(self.out.dtype, self.out.shape);
        // The rows are in the output's order; the view names them as attention does.
        let mut shape = self.lse_out.shape;
        for (to, &from) in order(self.merge.layout).unwrap_or_default().iter().enumerate() {
            let dim = self.lse_out.shape.get(from).copied().unwrap_or(0);
            shape = shape.with(to, dim);
        }
        let lse = TensorDesc::packed(self.lse_out.dtype, shape);
        let lse = self.merge.in_order(&AnyTensor::empty(plan.context(), lse)?)?;
        Ok(Output { attention: AnyTensor::empty(plan.context(), attention)?.typed()?, softmax_lse: Some(lse.typed()?) })
    }

    fn launch<T: Element>(
        &self,
        plan: &MergePlan,
        queue: &impl Queue,
        &Parts(parts): &Parts<'_, T>,
        output: &mut Output<T>,
    ) -> Result<()> {
        plan.context().admits("stream", queue.context())?;
        let lse_out = self.check(parts, output)?;
        if !self.goes_through_host() {
            let lse = parts.iter().map(|part| {
                let lse = self.merge.in_order(part.softmax_lse.0)?;
                lse.reshape([self.problem.rows])
            });
            let given = self.merge_arguments(parts, lse, output, lse_out)?;
            return plan.queue(queue, &given, || Ok(())).flatten();
        }
        let Some(stream) = queue.stream() else {
            return Err(Error::Capturing {
                what: "a merge through the host",
                instead: "merge parts that all have keys, with EmptyRows::None; or, on Atlas A2 and A3 from CANN 8.5 \
                          on and \
                          on Ascend 950 from 9.1 on, rows that have keys in some part, with EmptyRows::SomeParts",
            });
        };
        match plan.call().is_idle() {
            true => Ok(()),
            false => self.through_host(plan, stream, parts, output, lse_out),
        }
    }

    fn describe(&self, _: &MergePlan, text: &mut fmt::DebugStruct<'_, '_>) {
        text.field("merge", &self.merge).field("problem", &self.problem);
    }
}

impl MergeOperation {
    /// Queues the operator with log-sum-exps that the host has put in order, and waits if rows have no keys at all.
    fn through_host<T: Element>(
        &self,
        plan: &MergePlan,
        stream: &Stream,
        parts: &[Part<'_, T>],
        output: &Output<T>,
        lse_out: &Tensor<f32>,
    ) -> Result<()> {
        let (lse, empty) = self.fetch(stream, parts)?;
        let given = self.merge_arguments(parts, lse.into_iter().map(Ok), output, lse_out)?;
        plan.queue(stream, &given, || Ok(())).flatten()?;
        if let [out, lse, ..] = given.tensors.as_slice()
            && !empty.is_empty()
        {
            stream.synchronize()?;
            let dim = self.problem.dim;
            let row_bytes = dim.saturating_mul(self.problem.dtype.size().unwrap_or(0));
            for row in empty {
                out.write_part(row * row_bytes, &vec![0; row_bytes])?;
                lse.write_part(row * size_of::<f32>(), &f32::NEG_INFINITY.to_ne_bytes())?;
            }
        }
        Ok(())
    }

    /// Whether launches go by way of the host.
    fn goes_through_host(&self) -> bool {
        match self.merge.empty_rows {
            EmptyRows::None => false,
            EmptyRows::SomeParts => !self.problem.infinity_is_empty,
            EmptyRows::ThroughHost => true,
        }
    }

    /// Refuses tensors that differ from the planned ones. Returns the output's log-sum-exps.
    fn check<'o, T: Element>(&self, parts: &[Part<'_, T>], output: &'o Output<T>) -> Result<&'o Tensor<f32>> {
        if parts.len() != self.problem.parts {
            return Err(Error::not_as_planned("parts", parts.len(), self.problem.parts));
        }
        let Some(lse_out) = &output.softmax_lse else {
            return Err(not_as_planned("output.softmax_lse", "none", &self.lse_out));
        };
        for part in parts {
            same("softmax_lse", part.softmax_lse.0, &self.lse_out)?;
            same("attention", part.attention, &self.out)?;
        }
        same("output.attention", &output.attention, &self.out)?;
        same("output.softmax_lse", lse_out, &self.lse_out)?;
        Ok(lse_out)
    }

    /// The tensors of a launch as the operator takes them, with these log-sum-exps of the parts.
    fn merge_arguments<T: Element>(
        &self,
        parts: &[Part<'_, T>],
        lse: impl Iterator<Item = Result<AnyTensor>>,
        output: &Output<T>,
        lse_out: &Tensor<f32>,
    ) -> Result<LaunchTensors> {
        let (rows, dim) = (self.problem.rows, self.problem.dim);
        let mut given = SmallVec::new();
        given.push(output.attention.reshape([rows, dim])?.into());
        given.push(self.merge.in_order(lse_out)?.reshape([rows])?);
        for lse in lse {
            given.push(lse?);
        }
        for part in parts {
            given.push(part.attention.reshape([rows, dim])?.into());
        }
        Ok(LaunchTensors { outputs: 2, tensors: given })
    }

    /// Copies the log-sum-exps through the host, which puts them into the order of the output's rows and sets rows
    /// without keys to -inf. Also returns the rows for which no part has keys; these are 0 in the first part, so that
    /// the operator can compute.
    fn fetch<T: Element>(&self, stream: &Stream, parts: &[Part<'_, T>]) -> Result<(Vec<AnyTensor>, Vec<usize>)> {
        let mut all = Vec::with_capacity(parts.len());
        for part in parts {
            let lse: Tensor<f32> = self.merge.in_order(part.softmax_lse.0)?.typed()?;
            let mut lse = lse.download(stream)?;
            lse.iter_mut().for_each(|lse| *lse = visible(*lse));
            all.push(lse);
        }
        let none = |row: &usize| {
            let lse_of_row = |lse: &Vec<f32>| lse.get(*row).copied();
            all.iter().all(|lse| lse_of_row(lse) == Some(f32::NEG_INFINITY))
        };
        let empty: Vec<usize> = (0..self.problem.rows).filter(none).collect();
        if let Some(first) = all.first_mut() {
            for &row in &empty {
                if let Some(lse) = first.get_mut(row) {
                    *lse = 0.0;
                }
            }
        }
        let upload = |lse: Vec<f32>| Ok(stream.upload(&lse, [lse.len()])?.into());
        let lse = all.into_iter().map(upload).collect::<Result<_>>()?;
        Ok((lse, empty))
    }
}

/// Refuses a tensor of another shape or type. Rows with gaps between them are refused when the tensor is reshaped.
pub(super) fn same(argument: &'static str, tensor: &AnyTensor, planned: &TensorDesc) -> Result<()> {
    if tensor.desc().shape == planned.shape && tensor.dtype() == planned.dtype {
        Ok(())
    } else {
        Err(not_as_planned(argument, tensor.desc(), planned))
    }
}

#[cold]
pub(super) fn not_as_planned(argument: &'static str, given: impl std::fmt::Display, planned: &TensorDesc) -> Error {
    Error::not_as_planned(argument, given, planned)
}
