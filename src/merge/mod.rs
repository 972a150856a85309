//! Merging attention over parts of the keys into attention over all of them.
//!
//! Attention over a set of keys is known by its output and the log-sum-exp of its scores. Of two disjoint sets, the
//! output over both is the mean of the outputs with the weights `exp(lse)`, and the log-sum-exp over both is
//! `ln(exp(lse_a) + exp(lse_b))`. Cascades, context split over ranks, a shared prefix computed once, and drafts
//! verified against a cached prefix all rest on this.
//!
//! [`MergeState`] merges on the device, by the operator that CANN has for it; [`merge_on_host`] in host memory, in
//! single or double precision. Neither stands in for the other by itself. Where it is known which parts have keys for
//! which rows, [`MergeState::rows`] merges without looking at the others.
//!
//! # What every merge keeps to
//!
//! - A part without keys for a row, marked by -inf or, as attention writes it, by +inf, changes nothing for that row:
//!   (anything, -inf) is the identity. (On the device "anything" has to be finite.)
//! - A row that no part has keys for becomes 0 with log-sum-exp -inf.
//! - A NaN among a row's log-sum-exps makes the row NaN, output and log-sum-exp.
//! - The order of two parts makes no difference at all, grouping of more makes one of rounding.
//!
//! Log-sum-exps are to the base e in attention and to the base 2 in some other kernels, and the numbers alone do not
//! tell: [`LseNat`] and [`LseLog2`] do.

mod host;
mod lse;
mod plan;
mod rows;

pub use host::{HostPart, Merged, merge_on_host};
pub use lse::{LseLog2, LseNat};
pub use plan::{EmptyRows, MergeOperation, MergePlan, MergeState, Part, Parts};
pub use rows::{PartsOfRows, RowMerge, RowMergeOperation, RowMergePlan};
