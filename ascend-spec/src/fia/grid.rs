//! Grids of scales and offsets: which of their numbers applies to which element.

use super::{Operand, Problem};
use crate::{DType, View};

/// What the batch and the rows of a [`Grid`] count.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Counts {
    /// Sequences, and the tokens of each from its first on.
    Tokens,
    /// As the elements lie that the grid is for: the batch axis of their tensor and its rows, or the blocks of a paged
    /// cache and tokens in a block.
    Stored,
    /// Tokens as above; the parts of a sequence follow those of the sequence before it, and `batch` is how many parts
    /// have gone before: see [`Problem::parts_before`].
    Behind,
}

/// How an axis is cut: into parts of `size` places, each of which is a step of the axis's stride, and a part into runs of
/// places that share a number.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Cut {
    size: i64,
    run: i64,
    step: i64,
}

impl Cut {
    /// Every place is a part.
    pub const NONE: Cut = Cut::shared(1);

    /// Parts of `size` places that share a number. At least 1.
    pub(super) const fn shared(size: i64) -> Self {
        Cut::new(size, size, 0)
    }

    /// Parts of `size` places, in runs of `run` that lie `step` apart. Both at least 1.
    pub(super) const fn new(size: i64, run: i64, step: i64) -> Self {
        Cut {
            size: if size < 1 { 1 } else { size },
            run: if run < 1 { 1 } else { run },
            step,
        }
    }

    /// Places in a part.
    pub const fn size(&self) -> i64 {
        self.size
    }

    /// Where a place lies, on an axis of this stride.
    fn at(&self, place: usize, stride: i64) -> i64 {
        let place = place as i64;
        if self.size == 1 {
            // By far the most common, asked for each token; divisions would show.
            return place.saturating_mul(stride);
        }
        let (part, within) = (place / self.size, place % self.size / self.run);
        let part = part.saturating_mul(stride);
        part.saturating_add(within.saturating_mul(self.step))
    }
}

/// How the axes of a [`Grid`] are cut. Its batch axis never is.
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
    /// Every head, row and element has its own step.
    pub const NONE: Cuts = Cuts {
        head: Cut::NONE,
        row: Cut::NONE,
        dim: Cut::NONE,
    };
}

/// A tensor of scales or offsets, addressed by the axes of the tensor it applies to: an axis along which one value
/// stands for all has stride 0.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Grid {
    /// The tensor.
    pub operand: Operand,
    /// Its element type. A `UINT64` scale carries a binary32 in its lower half.
    pub dtype: DType,
    /// Strides in elements, from one part of an axis to the next.
    pub view: View,
    /// The parts of the axes.
    pub cuts: Cuts,
    /// What batch and rows count.
    pub counts: Counts,
}

impl Grid {
    /// The number, counted in elements from the tensor's base, that applies to element `d` of a row.
    #[inline]
    pub fn at(&self, (batch, head, row): (usize, usize, usize), d: usize) -> i64 {
        let (view, cuts) = (&self.view, &self.cuts);
        let batch = (batch as i64).saturating_mul(view.batch);
        [
            batch,
            cuts.head.at(head, view.head),
            cuts.row.at(row, view.row),
            cuts.dim.at(d, view.dim),
        ]
        .into_iter()
        .fold(view.offset, i64::saturating_add)
    }
}

/// What turns stored numbers into values: `(stored + offset) * scale`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Affine {
    /// Factor.
    pub scale: Grid,
    /// Summand, 0 where absent.
    pub offset: Option<Grid>,
}

impl Problem<'_> {
    /// Of each sequence, how many parts of rows the sequences before it have, for a grid that counts [`Counts::Behind`].
    pub fn parts_before(&self, grid: &Grid) -> Vec<usize> {
        let size = usize::try_from(grid.cuts.row.size).unwrap_or(1);
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

    #[test]
    fn parts_and_runs_have_strides_of_their_own() {
        let grid = Grid {
            operand: Operand::ValueAntiquantScale,
            dtype: DType::Float8E8M0,
            view: View {
                offset: 7,
                batch: 1000,
                head: 100,
                row: 10,
                dim: 0,
            },
            cuts: Cuts {
                head: Cut::NONE,
                row: Cut::new(64, 32, 1),
                dim: Cut::shared(32),
            },
            counts: Counts::Tokens,
        };
        assert_eq!(grid.at((0, 0, 31), 5), 7);
        assert_eq!(grid.at((0, 0, 32), 64), 8);
        assert_eq!(grid.at((2, 3, 127), 0), 2318);
        let along = Grid {
            view: View {
                dim: 3,
                ..grid.view
            },
            ..grid
        };
        assert_eq!(along.at((0, 0, 0), 31), 7);
        assert_eq!(along.at((0, 0, 0), 64), 13);
        assert_eq!(Cut::new(0, -1, 5), Cut::new(1, 1, 5));
    }
}
