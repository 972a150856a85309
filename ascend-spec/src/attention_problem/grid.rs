//! Grids of scales and offsets: which entry applies to which element of a tensor.

use super::{AttentionProblem, SmallTensor};
use crate::View;

/// What the batch and the rows of a [`Grid`] count.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Counts {
    /// Sequences, and the tokens of each.
    Tokens,
    /// The batch axis and the rows of the tensor that the grid is for, or the blocks of a paged cache and the tokens
    /// in a block.
    Stored,
    /// Tokens of each sequence, in groups that follow those of the sequence before it. `batch` is the number of
    /// groups before: see [`AttentionProblem::groups_before`](super::AttentionProblem::groups_before).
    Concatenated,
}

/// How an axis is grouped: into groups of `size` elements, each one stride of the axis further, and within a group
/// into runs of elements that share an entry.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Cut {
    size: i64,
    run: i64,
    step: i64,
}

impl Cut {
    /// Every element is a group.
    pub const NONE: Cut = Cut::shared(1);

    /// Groups of `size` elements that share an entry. `size` is at least 1.
    pub(crate) const fn shared(size: i64) -> Self {
        Cut::new(size, size, 0)
    }

    /// Groups of `size` elements, in runs of `run` elements whose entries are `step` apart. Both are at least 1.
    pub(crate) const fn new(size: i64, run: i64, step: i64) -> Self {
        Cut { size: if size < 1 { 1 } else { size }, run: if run < 1 { 1 } else { run }, step }
    }

    /// Number of elements in a group.
    pub const fn size(&self) -> i64 {
        self.size
    }

    /// Offset of the entry of element `place`, on an axis with this stride.
    fn at(&self, place: usize, stride: i64) -> i64 {
        let place = place as i64;
        if self.size == 1 {
            // The common case, read for each token, needs no division.
            return place.saturating_mul(stride);
        }
        let (part, within) = (place / self.size, place % self.size / self.run);
        let part = part.saturating_mul(stride);
        part.saturating_add(within.saturating_mul(self.step))
    }
}

/// How the axes of a [`Grid`] are grouped. The batch axis never is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Cuts {
    /// Heads.
    pub head: Cut,
    /// Rows.
    pub row: Cut,
    /// Elements of a row.
    pub dim: Cut,
}

impl Cuts {
    /// Every head, row and element is a group of its own.
    pub const NONE: Cuts = Cuts { head: Cut::NONE, row: Cut::NONE, dim: Cut::NONE };
}

/// A tensor of scales or offsets, addressed by the axes of the tensor it applies to. An axis along which one entry
/// applies to all has stride 0.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Grid {
    /// The tensor. A `UINT64` scale carries a binary32 in its lower half.
    pub tensor: SmallTensor,
    /// Strides in elements, from one group of an axis to the next.
    pub view: View,
    /// The groups of the axes.
    pub cuts: Cuts,
    /// What batch and rows count.
    pub counts: Counts,
}

impl Grid {
    /// Offset of the entry that applies to element `d` of a row, in elements from the tensor's base address.
    #[inline]
    pub fn at(&self, (batch, head, row): (usize, usize, usize), d: usize) -> i64 {
        let (view, cuts) = (&self.view, &self.cuts);
        let batch = (batch as i64).saturating_mul(view.batch);
        [batch, cuts.head.at(head, view.head), cuts.row.at(row, view.row), cuts.dim.at(d, view.dim)]
            .into_iter()
            .fold(view.offset, i64::saturating_add)
    }
}

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
    /// [`Counts::Concatenated`].
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::DType;
    use crate::attention_problem::TensorRole;

    #[test]
    fn groups_and_runs_have_strides_of_their_own() {
        let grid = Grid {
            tensor: SmallTensor { role: TensorRole::ValueScale, dtype: DType::Float8E8M0, offset: 0, bytes: None },
            view: View { offset: 7, batch: 1000, head: 100, row: 10, dim: 0 },
            cuts: Cuts { head: Cut::NONE, row: Cut::new(64, 32, 1), dim: Cut::shared(32) },
            counts: Counts::Tokens,
        };
        assert_eq!(grid.at((0, 0, 31), 5), 7);
        assert_eq!(grid.at((0, 0, 32), 64), 8);
        assert_eq!(grid.at((2, 3, 127), 0), 2318);
        let along = Grid { view: View { dim: 3, ..grid.view }, ..grid };
        assert_eq!(along.at((0, 0, 0), 31), 7);
        assert_eq!(along.at((0, 0, 0), 64), 13);
        assert_eq!(Cut::new(0, -1, 5), Cut::new(1, 1, 5));
    }
}
