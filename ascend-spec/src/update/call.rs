//! A pure description of one call of AttentionUpdate.

use crate::TensorDesc;

/// Every argument of one call, without data and without addresses.
///
/// The fields are the operator's arguments in snake case; `None` is a null pointer. The values are what a caller wrote,
/// right or wrong: [`UpdateCall::check`] tells.
///
/// Source: aclnnAttentionUpdate, parameter table.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct UpdateCall<'a> {
    /// Log-sum-exps of the parts, `[rows]` each. Empty stands for a null or empty list.
    pub lse: &'a [TensorDesc],
    /// Attention over the parts, `[rows, D]` each, rows in the order of `lse`.
    pub local_out: &'a [TensorDesc],
    /// 0: merges the attention alone. 1: also the log-sum-exps.
    pub update_type: i64,
    /// Merged attention, `[rows, D]`.
    pub out: Option<TensorDesc>,
    /// Merged log-sum-exps, `[rows]`; with `update_type` 1 only.
    pub lse_out: Option<TensorDesc>,
}
