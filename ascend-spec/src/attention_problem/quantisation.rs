//! The scales and offsets of quantised tensors.

use super::{AttentionProblem, Grid};

/// Scale and offset of a quantised tensor. A stored input element means `(stored + offset) * scale`; an output is
/// stored as `value * scale + offset`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ScaleOffset {
    /// Factor.
    pub scale: Grid,
    /// Summand; 0 if absent. That of an input is its negative zero point.
    pub offset: Option<Grid>,
}

/// The factors of an `INT8` query, from tensors of one element.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Int8Query {
    /// Factor of the scores, beside the scale.
    pub score_scale: Grid,
    /// Factor of the weights, which are then rounded to integers.
    pub weight_scale: Grid,
    /// Factor of the output.
    pub product_scale: Grid,
}

impl AttentionProblem<'_> {
    /// For each sequence, the number of row groups of the sequences before it, for a grid that counts
    /// [`Counts::Concatenated`](super::Counts::Concatenated).
    pub fn groups_before(&self, grid: &Grid) -> Vec<usize> {
        let size = usize::try_from(grid.cuts.row.size()).unwrap_or(1);
        let mut before = 0usize;
        (0..self.batch)
            .map(|b| {
                let first = before;
                before = before.saturating_add(self.kv_len(b).div_ceil(size));
                first
            })
            .collect()
    }
}
