//! Merging parts that have keys for some rows only, where it is known for which.

use std::fmt;
use std::ops::Range;
use std::sync::Arc;

use ascend_spec::ops::attention_update::Parameter;
use ascend_spec::{Axes, TensorDesc};
use smallvec::SmallVec;

use crate::attention::Output;
use crate::error::{Error, Result};
use crate::memory::Element;
use crate::ops::attention_update;
use crate::ops::operation::{self, Operation, Sealed};
use crate::runtime::{Context, Queue};
use crate::tensor::{AnyTensor, Tensor};

use super::plan::{MergePlan, MergeState, Part, Parts, not_as_planned};

/// Consecutive rows, and the parts that have keys for them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct PartsOfRows {
    /// Number of rows of the first axis: packed tokens in TND, requests in BNSD.
    pub rows: usize,
    /// Bit `i` is set if part `i` has keys for each of the rows.
    pub parts: u16,
}

/// A merge of parts that was checked and prepared, each with keys for some of the rows. From [`RowMerge::plan`].
///
/// The merge ignores what a part holds in rows for which it has no keys. So nothing goes through the host, as it has
/// to in a merge of whole parts with such rows ([`EmptyRows`](super::EmptyRows)): rows with several parts are merged,
/// those with one are copied, and those with none become 0 with log-sum-exp -inf. A launch reads [`Parts`].
pub type RowMergePlan = operation::Plan<RowMergeOperation>;

/// Merges of rows, as a [`RowMergePlan`] knows them.
#[derive(Debug)]
pub struct RowMergeOperation {
    parts: usize,
    out: TensorDesc,
    lse_out: TensorDesc,
    runs: Vec<Run>,
}

/// Rows that are treated alike.
#[derive(Debug)]
struct Run {
    rows: Range<usize>,
    how: How,
}

#[derive(Debug)]
enum How {
    Merge(u16, Box<MergePlan>),
    Copy(usize),
    /// The attention and log-sum-exps to copy into rows without keys.
    Fill(Box<[AnyTensor; 2]>),
}

/// The parts that bits name, in order.
fn named(bits: u16) -> impl Iterator<Item = usize> {
    (0..16).filter(move |part| bits >> part & 1 == 1)
}

/// A merge of parts that have keys for some of the rows only. From [`MergeState::rows`].
#[derive(Clone, Copy, Debug)]
#[must_use = "a description does nothing until planned"]
pub struct RowMerge<'a> {
    merge: &'a MergeState,
    rows: &'a [PartsOfRows],
}

impl MergeState {
    /// A merge of parts that have keys for some of the rows. `rows` lists all rows, in order, with the parts that
    /// have keys for them.
    pub fn rows<'a>(&'a self, rows: &'a [PartsOfRows]) -> RowMerge<'a> {
        RowMerge { merge: self, rows }
    }
}

impl RowMerge<'_> {
    /// Checks the merge and prepares it for parts of these shapes. Nothing is launched, and the tensors are not kept.
    ///
    /// # Errors
    /// [`ARGUMENT_VALUE`](crate::rules::ARGUMENT_VALUE) for another number of rows than the outputs have, for parts
    /// that do not exist, and for layouts whose outputs do not begin with the axis of their log-sum-exps' rows (all
    /// but BNSD and TND); otherwise as for [`MergeState::plan`].
    pub fn plan<T: Element>(&self, parts: &[Part<'_, T>]) -> Result<RowMergePlan> {
        let Self { merge, rows } = *self;
        let Some(first) = parts.first() else {
            return Err(
                Error::invalid("parts", "none", "1 to 16").fix("leave the merge out where nothing was computed")
            );
        };
        if !matches!(merge.layout().output(), Axes::Bnsd | Axes::Tnd) {
            return Err(Error::invalid(
                "layout",
                merge.layout(),
                "BNSD or TND, whose outputs and log-sum-exps have the same first axis",
            )
            .fix("compute the parts in BNSD or TND"));
        }
        let (out, lse_out) = (*first.attention.desc(), *first.softmax_lse.0.desc());
        let total = rows.iter().fold(0usize, |sum, run| sum.saturating_add(run.rows));
        let axis = out.shape.first().copied().unwrap_or(0);
        if i64::try_from(total) != Ok(axis) {
            return Err(Error::invalid("rows", total, format_args!("{axis}, as the parts have"))
                .fix("let the runs cover every row of the parts once"));
        }
        let known = u16::MAX >> 16usize.saturating_sub(parts.len()).min(15);
        if let Some(run) = rows.iter().find(|run| run.parts & !known != 0) {
            return Err(Error::invalid(
                "rows",
                format_args!("rows of part {}, with {} parts given", run.parts.ilog2(), parts.len()),
                format_args!(
                    "rows of parts 0 to {}, or more parts: bit i of `parts` is part i of those given",
                    parts.len() - 1
                ),
            )
            .fix("name parts that are given"));
        }
        let context = first.attention.memory().context();
        let mut runs = Vec::new();
        let mut start = 0;
        for alike in rows.chunk_by(|a, b| a.parts == b.parts) {
            let bits = alike.first().map_or(0, |run| run.parts);
            let rows = start..start + alike.iter().map(|run| run.rows).sum::<usize>();
            start = rows.end;
            if rows.is_empty() {
                continue;
            }
            let how = match bits.count_ones() {
                0 => fill(context, &out, &lse_out, rows.len())?,
                1 => How::Copy(bits.trailing_zeros() as usize),
                _ => How::Merge(bits, Box::new(plan_run(merge, bits, &rows, parts)?)),
            };
            runs.push(Run { rows, how });
        }
        let operation = RowMergeOperation { parts: parts.len(), out, lse_out, runs };
        let launches = attention_update::none(context);
        Ok(RowMergePlan::new(launches, operation))
    }
}

impl RowMergePlan {
    /// Bytes that the plan keeps on the device: what launches copy into rows without keys.
    pub fn kept_bytes(&self) -> usize {
        let kept = |run: &Run| match &run.how {
            How::Merge(..) | How::Copy(_) => 0,
            How::Fill(filled) => filled.iter().map(bytes_of).fold(0, usize::saturating_add),
        };
        self.operation().runs.iter().map(kept).fold(0, usize::saturating_add)
    }
}

/// Bytes of the elements of a tensor.
fn bytes_of(tensor: &AnyTensor) -> usize {
    tensor.len().saturating_mul(tensor.desc().dtype.size().unwrap_or(0))
}

/// Plans the merge of rows that have keys in the parts that bits name.
fn plan_run<T: Element>(
    merge: &MergeState,
    bits: u16,
    rows: &Range<usize>,
    parts: &[Part<'_, T>],
) -> Result<MergePlan> {
    let cut = cut(bits, rows, parts)?;
    let cut: SmallVec<[Part<'_, T>; 4]> = cut.iter().map(Cut::part).collect();
    merge.plan(&cut)
}

/// Some rows of a part.
struct Cut<T: Element> {
    attention: Tensor<T>,
    softmax_lse: Tensor<f32>,
}

impl<T: Element> Cut<T> {
    fn part(&self) -> Part<'_, T> {
        Part { attention: &self.attention, softmax_lse: super::LseNat(&self.softmax_lse) }
    }
}

fn cut<T: Element>(bits: u16, rows: &Range<usize>, parts: &[Part<'_, T>]) -> Result<SmallVec<[Cut<T>; 4]>> {
    let cut = |part: &Part<'_, T>| {
        Ok(Cut {
            attention: part.attention.narrow(0, rows.clone())?,
            softmax_lse: part.softmax_lse.0.narrow(0, rows.clone())?,
        })
    };
    named(bits).filter_map(|at| parts.get(at)).map(cut).collect()
}

/// Makes attention of 0 and log-sum-exps of -inf for `rows` rows without keys.
fn fill(context: &Arc<Context>, out: &TensorDesc, lse_out: &TensorDesc, rows: usize) -> Result<How> {
    let tensor = |like: &TensorDesc| {
        let rows = i64::try_from(rows).unwrap_or(i64::MAX);
        AnyTensor::empty(context, TensorDesc::packed(like.dtype, like.shape.with(0, rows)))
    };
    let (zeros, lse) = (tensor(out)?, tensor(lse_out)?);
    zeros.write_part(0, &vec![0; bytes_of(&zeros)])?;
    let empty = f32::NEG_INFINITY.to_ne_bytes();
    lse.write_part(0, &empty.repeat(lse.len()))?;
    Ok(How::Fill(Box::new([zeros, lse])))
}

impl Sealed for RowMergeOperation {}

impl Operation for RowMergeOperation {
    type Inputs<'a, T: Element> = Parts<'a, T>;
    type Output<T: Element> = Output<T>;
    type Parameter = Parameter;

    fn output<T: Element>(&self, plan: &RowMergePlan) -> Result<Output<T>> {
        let new = |like: &TensorDesc| AnyTensor::empty(plan.context(), TensorDesc::packed(like.dtype, like.shape));
        Ok(Output { attention: new(&self.out)?.typed()?, softmax_lse: Some(new(&self.lse_out)?.typed()?) })
    }

    fn workspace_bytes(&self, _: &RowMergePlan) -> usize {
        let workspace_bytes = |run: &Run| match &run.how {
            How::Merge(_, plan) => plan.workspace_bytes(),
            How::Copy(_) | How::Fill(_) => 0,
        };
        self.runs.iter().map(workspace_bytes).max().unwrap_or(0)
    }

    fn launch<T: Element>(
        &self,
        plan: &RowMergePlan,
        queue: &impl Queue,
        &Parts(parts): &Parts<'_, T>,
        output: &mut Output<T>,
    ) -> Result<()> {
        plan.context().admits("stream", queue.context())?;
        if parts.len() != self.parts {
            return Err(Error::not_as_planned("parts", parts.len(), self.parts));
        }
        let Some(lse_out) = &output.softmax_lse else {
            return Err(not_as_planned("output.softmax_lse", "none", &self.lse_out));
        };
        for (attention, lse) in
            parts.iter().map(|part| (part.attention, part.softmax_lse.0)).chain([(&output.attention, lse_out)])
        {
            super::plan::same("attention", attention, &self.out)?;
            super::plan::same("softmax_lse", lse, &self.lse_out)?;
        }
        for Run { rows, how } in &self.runs {
            let attention = output.attention.narrow(0, rows.clone())?;
            let lse = lse_out.narrow(0, rows.clone())?;
            match how {
                How::Merge(bits, plan) => {
                    let cut = cut(*bits, rows, parts)?;
                    let cut: SmallVec<[Part<'_, T>; 4]> = cut.iter().map(Cut::part).collect();
                    let mut output = Output { attention, softmax_lse: Some(lse) };
                    plan.launch_into(queue, cut.as_slice(), &mut output)?;
                }
                How::Copy(part) => {
                    let copied = cut(1 << part, rows, parts)?;
                    for Cut { attention: from, softmax_lse } in &copied {
                        attention.copy_from(queue, from)?;
                        lse.copy_from(queue, softmax_lse)?;
                    }
                }
                How::Fill(filled) => {
                    let [zeros, empty] = &**filled;
                    AnyTensor::copy_from(&attention, queue, zeros)?;
                    AnyTensor::copy_from(&lse, queue, empty)?;
                }
            }
        }
        Ok(())
    }
    fn describe(&self, _: &RowMergePlan, text: &mut fmt::DebugStruct<'_, '_>) {
        let run = |run: &Run| match &run.how {
            How::Merge(parts, _) => (run.rows.clone(), *parts),
            How::Copy(part) => (run.rows.clone(), 1 << part),
            How::Fill(..) => (run.rows.clone(), 0),
        };
        text.field("parts", &self.parts).field("runs", &self.runs.iter().map(run).collect::<Vec<_>>());
    }
}
