//! What a call that holds every rule computes.

use crate::DType;

/// A call of AttentionUpdate that holds every rule, resolved.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct UpdateProblem {
    /// Number of parts.
    pub parts: usize,
    /// Number of rows.
    pub rows: usize,
    /// Elements of a row.
    pub dim: usize,
    /// Type of the attention; log-sum-exps are `FLOAT`.
    pub dtype: DType,
    /// Whether the merged log-sum-exps are written.
    pub writes_lse: bool,
}
