//! Merging two outputs of FlashAttentionScore by their maxima and sums, as the operator RingAttentionUpdate does: one
//! step of ring attention (Liu, Zaharia and Abbeel 2023).
//!
//! A row's new maximum is the larger one, and its new sum and attention are those of both parts, weighted by the
//! exponential of how far their maxima are below the new one. The kernel computes in single precision and rounds once
//! at the end.

use super::element_view::ElementView;
use super::merge::Number;
use ascend_spec::attention_problem::SoftmaxOutputs;
use ascend_spec::ops::flash_attention_score::Sequence;
use ascend_spec::ops::ring_attention_update::{Part, RingUpdateProblem, admits, merge};
use ascend_spec::{DType, Violation};
use half::{bf16, f16};
use rayon::prelude::*;

/// Attention of a part or of the result, and the maximum and sum of each of its rows.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Triple {
    pub attn: ElementView,
    pub max: ElementView,
    pub sum: ElementView,
}

/// The tensors of one call.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Buffers {
    pub prev: Triple,
    pub cur: Triple,
    pub out: Triple,
}

/// A row of a head of a sequence.
#[derive(Clone, Copy, Debug)]
struct Row<'a> {
    sequence: &'a Sequence,
    head: usize,
    row: usize,
}

impl Row<'_> {
    fn softmax(self, problem: &RingUpdateProblem) -> usize {
        let rows = problem.softmax_order.rows(self.sequence, problem.heads);
        rows.at(0, self.head, self.row) as usize
    }

    fn attention(self, problem: &RingUpdateProblem) -> usize {
        problem.attention_element(self.sequence, self.head, self.row)
    }
}

/// Number of rows that a thread takes at a time.
const ROWS: usize = 64;

/// The rows of a sequence.
fn rows<'a>(
    problem: &RingUpdateProblem,
    sequence: &'a Sequence,
) -> impl IndexedParallelIterator<Item = Row<'a>> + use<'a> {
    let heads = problem.heads;
    (0..sequence.q_len * heads).into_par_iter().map(move |index| Row {
        sequence,
        head: index % heads,
        row: index / heads,
    })
}

/// The first row whose merged sum is lost, so that it cannot be merged again, and why.
///
/// # Safety
///
/// As for [`run`].
pub(crate) unsafe fn lost_row(
    problem: &RingUpdateProblem,
    ends: &[i64],
    buffers: &Buffers,
) -> Option<(String, Violation)> {
    problem.sequences(ends).find_map(|sequence| {
        rows(problem, &sequence).with_min_len(ROWS).find_map_first(|row| {
            // SAFETY: the caller keeps this contract.
            let (prev, cur) = unsafe { parts(problem, buffers, row) };
            let violation = admits(prev, cur).err()?;
            // If only one part has keys, a merge only moves the maximum, unless the sum is lost by that.
            let lost = !merge(prev, cur).part.sum.is_normal();
            let Row { sequence, head, row } = row;
            lost.then(|| (format!("row {row} of head {head} of sequence {}", sequence.index), violation))
        })
    })
}

/// Maximum and sum of a row of both parts.
///
/// # Safety
///
/// As for [`run`].
unsafe fn parts(problem: &RingUpdateProblem, buffers: &Buffers, row: Row<'_>) -> (Part, Part) {
    let element = row.softmax(problem);
    let part = |triple: &Triple| Part {
        // SAFETY: the row is one of the problem's, whose softmax tensors have it.
        max: unsafe { triple.max.read(element) },
        // SAFETY: the row is one of the problem's, whose softmax tensors have it.
        sum: unsafe { triple.sum.read(element) },
    };
    (part(&buffers.prev), part(&buffers.cur))
}

/// Merges both parts; `ends` are the contents of `actualSeqQlen`. Rows of no sequence are left as they are. Runs on the
/// current rayon pool.
///
/// # Safety
///
/// The tensors have the shapes and types of the problem and are valid for the duration of the call: those of the parts
/// for reads, those of the result for writes, and these overlap nothing else.
pub(crate) unsafe fn run(problem: &RingUpdateProblem, ends: &[i64], buffers: &Buffers) {
    // SAFETY: the caller keeps this contract; the contract of the operator takes no other dtypes.
    unsafe {
        match problem.dtype {
            DType::Float16 => typed::<f16>(problem, ends, buffers),
            DType::Bf16 => typed::<bf16>(problem, ends, buffers),
            _ => typed::<f32>(problem, ends, buffers),
        }
    }
}

/// # Safety
///
/// As for [`run`]; attention has elements `T`.
unsafe fn typed<T: Number>(problem: &RingUpdateProblem, ends: &[i64], buffers: &Buffers) {
    let out = &buffers.out;
    // Elements of a view may share memory, so only one thread writes to one.
    let apart = [out.attn, out.max, out.sum].iter().all(ElementView::is_contiguous);
    // Sequences with descending ends overlap, so they are merged one after the other.
    for sequence in problem.sequences(ends) {
        let rows = rows(problem, &sequence);
        let least = if apart { ROWS } else { usize::MAX };
        rows.with_min_len(least).for_each(|row| {
            // SAFETY: the caller keeps this contract; no other thread has this row, or there is one thread.
            unsafe { one::<T>(problem, buffers, row) };
        });
    }
}

/// Merges one row.
///
/// # Safety
///
/// As for [`run`]; attention has elements `T`, and nothing else writes the row.
unsafe fn one<T: Number>(problem: &RingUpdateProblem, buffers: &Buffers, row: Row<'_>) {
    // SAFETY: the caller keeps this contract.
    let (prev, cur) = unsafe { parts(problem, buffers, row) };
    let merged = merge(prev, cur);
    let softmax = row.softmax(problem);
    for copy in softmax..softmax + SoftmaxOutputs::COPIES {
        for (to, number) in [(&buffers.out.max, merged.part.max), (&buffers.out.sum, merged.part.sum)] {
            // SAFETY: the row is one of the problem's, whose softmax tensors have all copies of its number.
            unsafe { to.at::<f32>(copy).write_unaligned(number) };
        }
    }
    let first = row.attention(problem);
    let Buffers { prev, cur, out } = buffers;
    let [prev, cur, out] = [prev, cur, out].map(|triple| (triple.attn.at::<T>(first), triple.attn.step()));
    for d in 0..problem.head_dim as isize {
        let place = |(first, step): (*mut T, isize)| first.wrapping_offset(step * d);
        // SAFETY: the row's elements are those along the last axis of tensors that have it.
        unsafe {
            let [prev, cur] = [prev, cur].map(|row| place(row).read_unaligned().widen());
            let sum = prev * merged.prev + cur * merged.cur;
            place(out).write_unaligned(T::narrow(sum));
        }
    }
}
