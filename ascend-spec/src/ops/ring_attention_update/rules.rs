//! The rules of RingAttentionUpdate.

use super::{RingUpdateCall, RingUpdateProblem, Version};
use crate::attention_problem::SoftmaxOutputs;
use crate::dtype::Names;
use crate::ops::flash_attention_score::{InputLayout, SoftmaxOrder};
use crate::rule::{require, rules};
use crate::{DType, Dims, Target, TensorDesc, Violation};

rules! {
    in Scope::ALL;
    ENTRY_POINT = "ring.entry_point", FIND_KERNEL_ERROR, V1, "RingAttentionUpdate documentation, products",
        "the product has the operator",
        "run on Atlas A2, Atlas A3 or Ascend 950";
    REQUIRED = "ring.required", PARAM_NULLPTR, V1, "RingAttentionUpdate documentation, return values",
        "attention, maxima and sums of both parts and of the result are given, and with TND actualSeqQlen",
        "pass every required tensor";
    COUNTABLE = "ring.countable", PARAM_INVALID, V1, "RingAttentionUpdate documentation, constraints",
        "no dimension of an input is below 1, and the bytes of each tensor can be addressed",
        "leave out the call where there is nothing to merge";
    DTYPE = "ring.dtype", PARAM_INVALID, V1, "RingAttentionUpdate documentation, prevAttnOut",
        "prevAttnOut, curAttnOut and attnOut are FLOAT, FLOAT16 or BF16, all the same",
        "convert the three to one of the allowed dtypes";
    SOFTMAX_DTYPE = "ring.softmax_dtype", PARAM_INVALID, V1, "RingAttentionUpdate documentation, prevSoftmaxMax",
        "one of the maxima and sums is FLOAT",
        "convert maxima and sums to FLOAT";
    LAYOUT = "ring.input_layout", PARAM_INVALID, V1, "RingAttentionUpdate documentation, inputLayoutOptional",
        "inputLayout is SBH with maxima and sums of four axes, or TND with three",
        "spell the layout as CANN does";
    COPIES = "ring.softmax_copies", PARAM_INVALID, V1, "RingAttentionUpdate documentation, prevSoftmaxMax",
        "the last axis of maxima and sums is 8",
        "pass maxima and sums as FlashAttentionScore writes them";
    FORMAT = "ring.format", PARAM_INVALID, V1, "RingAttentionUpdate documentation, formats",
        "every tensor is in a plain format such as ND or NCHW",
        "describe the tensor as ND";
    SOFTMAX_DTYPES = "ring.softmax_dtypes", TILING_ERROR, V1, "RingAttentionUpdate tiling, dtypes",
        "every maximum and sum of the parts is FLOAT",
        "convert maxima and sums to FLOAT";
    SHAPES = "ring.shapes", TILING_ERROR, V1, "RingAttentionUpdate tiling, SBH",
        "attention is [S, B, H], maxima and sums are [B, N, S, 8], the same for both parts and the result",
        "merge outputs of calls with the same rows and heads";
    SOFTMAX_LAYOUT = "ring.softmax_layout",
        TILING_ERROR, V2, "RingAttentionUpdateV2 documentation, inputSoftmaxLayoutOptional",
        "with TND inputSoftmaxLayout is null, empty, SBH or TND",
        "pass TND for maxima and sums that lie like the attention, otherwise nothing";
    HEAD_DIM = "ring.head_dim", TILING_ERROR, V1, "RingAttentionUpdate documentation, constraints" in Scope::A2_A3,
        "with TND the head dimension is a multiple of 64, at most 768, and there are at most 256 heads",
        "merge in SBH, or pad the head dimension with zeros";
    LENGTHS_DTYPE = "ring.lengths_dtype", TILING_ERROR, V1, "RingAttentionUpdate documentation, actualSeqQlenOptional",
        "with TND actualSeqQlen is INT64 with one axis of at least two entries",
        "pass the running sums of the lengths behind a leading 0";
    OUT = "ring.out", PARAM_NULLPTR, V1, "RingAttentionUpdate, copy to the outputs",
        "attnOut has the shape of prevAttnOut, softmaxMax and softmaxSum are FLOAT with the shape of prevSoftmaxMax",
        "give the outputs the shapes of the first part";
    LENGTHS = "ring.lengths",
        Overrun("rows are read and written wherever the entries say"),
        V1, "RingAttentionUpdate documentation, actualSeqQlenOptional",
        "actualSeqQlen begins with 0, does not descend, and ends with the rows",
        "pass the running sums of the query's lengths behind a leading 0, and views of as many rows: a marked tail \
         behind the last sequence has nothing to merge";
    SOFTMAX_UNREAD = "ring.softmax_layout_unread",
        Lint("the text is not looked at"), V2, "RingAttentionUpdateV2 documentation, inputSoftmaxLayoutOptional",
        "inputSoftmaxLayout goes with TND",
        "pass null: with SBH there is one order";
    BOTH_MASKED = "ring.both_masked", Lint("only numbers change"), V1, "RingAttentionUpdate kernel, formula",
        "no row is without visible keys in both parts: its sum would become +inf, and the next merge NaN",
        "merge a part in which the row sees keys first, or set the sum back to the largest FLOAT";
    BOTH_EMPTY = "ring.both_empty", Lint("only numbers change"), V1, "RingAttentionUpdate kernel, formula",
        "no packed sequence is without keys in both parts: 0 divided by 0 is NaN",
        "leave the sequence out of the merge";
    ONE_EMPTY = "ring.one_empty", Lint("only numbers change"), V1, "RingAttentionUpdate kernel, formula",
        "no row with a negative maximum meets a part without keys, whose maximum is 0: the merged maximum would be 0, \
         and where the exponential of the row's own is 0, too, the result NaN",
        "leave the sequence out of the merge";
}

/// Limits for packed heads: the head dimension is a multiple of `ALIGNMENT` up to `MOST_DIM`, and there are at most
/// `MOST_HEADS` heads.
const ALIGNMENT: i64 = 64;
const MOST_DIM: i64 = 768;
const MOST_HEADS: i64 = 256;

/// The tensors of a part, or of the result: attention, maxima, sums.
struct Triple<'a> {
    attn: &'a TensorDesc,
    max: &'a TensorDesc,
    sum: &'a TensorDesc,
}

impl RingUpdateProblem {
    /// Checks the contents of `actualSeqQlen`.
    ///
    /// # Errors
    /// `ring.lengths`.
    pub fn admits_lengths(&self, ends: &[i64]) -> Result<(), Violation> {
        let rows = i64::try_from(self.rows);
        let holds = !self.layout.is_packed()
            || ends.first() == Some(&0) && ends.is_sorted() && ends.last().copied() == rows.ok();
        if holds {
            return Ok(());
        }
        let from_to = [ends.first(), ends.last()].map(|end| end.copied().unwrap_or(0));
        Err(LENGTHS.broken(
            format_args!("{} entries from {} to {}", ends.len(), from_to[0], from_to[1]),
            format_args!("entries that ascend from 0 to {}", self.rows),
        ))
    }
}

impl RingUpdateCall<'_> {
    /// Checks the call against the contract of `version` for `target`, and resolves it. The contents of the tensors
    /// are not checked.
    ///
    /// Allocates nothing unless it refuses.
    ///
    /// # Errors
    /// [`Violation`] by the first broken rule, or [`UNSUPPORTED`](crate::UNSUPPORTED) for what the operator takes and
    /// this crate does not compute: packed tensors of different shapes, and heads that do not divide the hidden size.
    pub fn check(&self, version: Version, target: Target) -> Result<RingUpdateProblem, Violation> {
        require!(
            version.runs_on(target),
            ENTRY_POINT,
            format_args!("{version} on {target}"),
            "Atlas A2, Atlas A3 and Ascend 950",
        );
        let (prev, cur, out) = self.required()?;
        dtypes(&prev, &cur, &out)?;
        self.countable(&[&prev, &cur])?;
        let layout = layout(self.input_layout, &prev, &cur)?;
        let packed = layout.is_packed();
        if packed {
            REQUIRED.requires(self.actual_seq_qlen, "actualSeqQlen with TND")?;
        }
        FORMAT.plain(self)?;
        for desc in [prev.max, prev.sum, cur.max, cur.sum] {
            SOFTMAX_DTYPES.takes(desc.dtype, DType::Float)?;
        }
        let problem = match packed {
            true => self.packed(version, target, &prev)?,
            false => dense(&prev, &cur)?,
        };
        let same = out.attn.shape == prev.attn.shape;
        let softmax = [out.max, out.sum];
        require!(
            same && softmax.iter().all(|desc| desc.shape == prev.max.shape && desc.dtype == DType::Float),
            OUT,
            format_args!("{}, {} and {}", out.attn, out.max, out.sum),
            format_args!("{}, FLOAT {} twice", prev.attn, prev.max.shape),
        );
        computed(&prev, &cur, &problem)?;
        Ok(problem)
    }

    /// Checks for lints: the first that the call breaks, leaving out those in `allowed` (by id). The contents of the
    /// tensors are not checked: see [`RingUpdateProblem::admits_lengths`] and [`admits`](super::admits). The target,
    /// which calls of all operators take, makes no difference.
    ///
    /// # Errors
    /// The broken lint, with the same fields as a broken rule.
    pub fn lint(&self, _: Target, allowed: &[&str]) -> Result<(), Violation> {
        let order = self.input_softmax_layout.unwrap_or_default();
        require!(
            order.is_empty() || self.input_layout == Some("TND") || allowed.contains(&SOFTMAX_UNREAD.id),
            SOFTMAX_UNREAD,
            format_args!("{order:?} with SBH"),
            "null",
        );
        Ok(())
    }

    fn required(&self) -> Result<(Triple<'_>, Triple<'_>, Triple<'_>), Violation> {
        let prev = Triple {
            attn: REQUIRED.requires(self.prev_attn_out.as_ref(), "prevAttnOut")?,
            max: REQUIRED.requires(self.prev_softmax_max.as_ref(), "prevSoftmaxMax")?,
            sum: REQUIRED.requires(self.prev_softmax_sum.as_ref(), "prevSoftmaxSum")?,
        };
        let cur = Triple {
            attn: REQUIRED.requires(self.cur_attn_out.as_ref(), "curAttnOut")?,
            max: REQUIRED.requires(self.cur_softmax_max.as_ref(), "curSoftmaxMax")?,
            sum: REQUIRED.requires(self.cur_softmax_sum.as_ref(), "curSoftmaxSum")?,
        };
        let out = Triple {
            attn: REQUIRED.requires(self.attn_out.as_ref(), "attnOut")?,
            max: REQUIRED.requires(self.softmax_max.as_ref(), "softmaxMax")?,
            sum: REQUIRED.requires(self.softmax_sum.as_ref(), "softmaxSum")?,
        };
        Ok((prev, cur, out))
    }

    fn countable(&self, parts: &[&Triple<'_>]) -> Result<(), Violation> {
        COUNTABLE.addressable(self)?;
        let mut inputs = parts.iter().flat_map(|part| [part.attn, part.max, part.sum]);
        let empty = inputs.find(|desc| desc.is_empty());
        let shape = empty.map_or(Dims::of([]), |desc| desc.shape);
        require!(empty.is_none(), COUNTABLE, shape, "dimensions of at least 1");
        Ok(())
    }

    /// Resolves packed rows. The operator compares no shapes here.
    fn packed(&self, version: Version, target: Target, prev: &Triple<'_>) -> Result<RingUpdateProblem, Violation> {
        let order = match version {
            Version::V1 => "",
            Version::V2 => self.input_softmax_layout.unwrap_or_default(),
        };
        let softmax_order = match order {
            "" | "SBH" => SoftmaxOrder::SequenceBlocks,
            "TND" => SoftmaxOrder::SameAsInput,
            other => {
                return Err(SOFTMAX_LAYOUT.broken(format_args!("{other:?}"), "null, \"\", SBH, TND"));
            }
        };
        let &[rows, heads, dim] = &prev.attn.shape[..] else {
            return Err(no_shapes(prev, "[T, N, D]"));
        };
        require!(
            for target => dim % ALIGNMENT == 0 && dim <= MOST_DIM && heads <= MOST_HEADS,
            HEAD_DIM,
            format_args!("{heads} heads of {dim}"),
            format_args!(
                "at most {MOST_HEADS} heads of a multiple of {ALIGNMENT} up to {MOST_DIM}"
            ),
        );
        let ends = self.actual_seq_qlen;
        let entries = ends.map_or(0, |ends| match (ends.dtype, &ends.shape[..]) {
            (DType::Int64, &[entries]) => entries,
            _ => 0,
        });
        require!(
            entries >= 2,
            LENGTHS_DTYPE,
            ends.map_or_else(|| "none".to_owned(), |ends| ends.to_string()),
            "INT64 [B + 1]",
        );
        Ok(RingUpdateProblem {
            layout: InputLayout::Tnd,
            batch: size(entries - 1),
            rows: size(rows),
            heads: size(heads),
            head_dim: size(dim),
            dtype: prev.attn.dtype,
            softmax_order,
        })
    }
}

/// A dimension already known to be at least 1.
fn size(dim: i64) -> usize {
    usize::try_from(dim).unwrap_or(usize::MAX)
}

fn dtypes(prev: &Triple<'_>, cur: &Triple<'_>, out: &Triple<'_>) -> Result<(), Violation> {
    const ALLOWED: &[DType] = &[DType::Float, DType::Float16, DType::Bf16];
    let dtype = prev.attn.dtype;
    require!(
        ALLOWED.contains(&dtype) && [cur, out].iter().all(|part| part.attn.dtype == dtype),
        DTYPE,
        format_args!("{dtype}, {} and {}", cur.attn.dtype, out.attn.dtype),
        format_args!("all of {}", Names(ALLOWED)),
    );
    let softmax = [prev, cur, out].map(|part| [part.max.dtype, part.sum.dtype]);
    require!(softmax.as_flattened().contains(&DType::Float), SOFTMAX_DTYPE, prev.max.dtype, DType::Float,);
    Ok(())
}

fn layout(name: Option<&str>, prev: &Triple<'_>, cur: &Triple<'_>) -> Result<InputLayout, Violation> {
    let parts = [prev.max, prev.sum, cur.max, cur.sum];
    let all = |rank: usize| parts.iter().all(|desc| desc.shape.rank() == rank);
    let layout = match name {
        Some("SBH") if all(4) => InputLayout::Sbh,
        Some("TND") if all(3) => InputLayout::Tnd,
        _ => {
            return Err(LAYOUT.broken(
                format_args!("{:?} with maxima {} and {}", name.unwrap_or("null"), prev.max.shape, cur.max.shape),
                "SBH with [B, N, S, 8], TND with [T, N, 8]",
            ));
        }
    };
    let copies = SoftmaxOutputs::COPIES as i64;
    require!(
        parts.iter().all(|desc| desc.shape.last() == Some(&copies)),
        COPIES,
        format_args!("{} and {}", prev.max.shape, cur.max.shape),
        copies,
    );
    Ok(layout)
}

#[cold]
fn no_shapes(prev: &Triple<'_>, allowed: &str) -> Violation {
    SHAPES.broken(format_args!("{} with maxima {}", prev.attn.shape, prev.max.shape), allowed)
}

fn dense(prev: &Triple<'_>, cur: &Triple<'_>) -> Result<RingUpdateProblem, Violation> {
    let (&[rows, batch, hidden], &[b, heads, s, _]) = (&prev.attn.shape[..], &prev.max.shape[..]) else {
        return Err(no_shapes(prev, "[S, B, H] with [B, N, S, 8]"));
    };
    let softmax = Dims::of([batch, heads, rows, SoftmaxOutputs::COPIES as i64]);
    let same = |part: &Triple<'_>| {
        part.attn.shape == prev.attn.shape && part.max.shape == softmax && part.sum.shape == softmax
    };
    require!(
        (b, s) == (batch, rows) && [prev, cur].into_iter().all(same),
        SHAPES,
        format_args!(
            "{} with {} and {}, {} with {} and {}",
            prev.attn.shape, prev.max.shape, prev.sum.shape, cur.attn.shape, cur.max.shape, cur.sum.shape
        ),
        format_args!("{} with {softmax}, twice", prev.attn.shape),
    );
    Ok(RingUpdateProblem {
        layout: InputLayout::Sbh,
        batch: size(batch),
        rows: size(rows),
        heads: size(heads),
        head_dim: size(hidden / heads.max(1)),
        dtype: prev.attn.dtype,
        softmax_order: SoftmaxOrder::Batches,
    })
}

/// Refuses tensors that the operator takes, and then reads beyond or leaves partly unmerged.
fn computed(prev: &Triple<'_>, cur: &Triple<'_>, problem: &RingUpdateProblem) -> Result<(), Violation> {
    let hidden = prev.attn.shape.last().copied().unwrap_or(0);
    if !problem.layout.is_packed() {
        let divides = problem.heads.saturating_mul(problem.head_dim) == size(hidden);
        return match divides {
            true => Ok(()),
            false => Err(Violation::unsupported(
                "heads that do not divide the hidden size, of which RingAttentionUpdate leaves the rest unmerged",
            )),
        };
    }
    let &[rows, heads, _] = &prev.attn.shape[..] else {
        return Ok(());
    };
    let softmax = Dims::of([rows, heads, SoftmaxOutputs::COPIES as i64]);
    let parts = [prev.max, prev.sum, cur.max, cur.sum];
    let same = cur.attn.shape == prev.attn.shape && parts.iter().all(|desc| desc.shape == softmax);
    match same {
        true => Ok(()),
        false => Err(Violation::unsupported(
            "packed parts of different shapes, which RingAttentionUpdate does not compare and reads as if they were \
                      the first part's",
        )),
    }
}
