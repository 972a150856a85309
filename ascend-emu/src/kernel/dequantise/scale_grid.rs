//! Grids of scales, or of offsets: one for a tensor, for each head, channel, token or group of elements.

use super::scalars::ScalarTensor;
use crate::kernel::Buffers;
use crate::kernel::simd::{Vector, WIDTH};
use ascend_spec::attention_problem::{Cuts, Grid};

/// A grid of scales or offsets.
#[derive(Debug)]
pub(crate) struct ScaleGrid {
    scalars: ScalarTensor,
    grid: Grid,
    /// Whether groups of neighbouring elements share an entry; such entries are read again for each row.
    per_group: bool,
    /// The entries of a per-channel grid, `vectors` vectors for each head. Empty for other grids.
    channels: Vec<Vector>,
    vectors: usize,
}

impl ScaleGrid {
    /// The grid of a tensor with `heads` heads and rows of `dim` elements.
    ///
    /// # Safety
    ///
    /// As long as the value is used, the bytes of the grid's tensor may be read.
    pub(crate) unsafe fn new(buffers: &Buffers<'_>, grid: &Grid, heads: usize, dim: usize) -> Self {
        // SAFETY: the caller keeps this contract.
        let scalars = unsafe { ScalarTensor::new(buffers, &grid.tensor) };
        let vectors = dim.div_ceil(WIDTH);
        let per_group = grid.cuts != Cuts::NONE;
        let mut channels = Vec::new();
        if grid.view.dim != 0 && !per_group {
            channels.resize(heads * vectors, [0.0; WIDTH]);
            for (head, vectors) in channels.chunks_exact_mut(vectors.max(1)).enumerate() {
                let values = vectors.as_flattened_mut().iter_mut().take(dim);
                for (d, value) in values.enumerate() {
                    let index = grid.at((0, head, 0), d);
                    *value = scalars.float(index).unwrap_or(f32::NAN);
                }
            }
        }
        ScaleGrid {
            scalars,
            grid: *grid,
            per_group,
            channels,
            vectors,
        }
    }

    /// Whether groups of neighbouring elements share an entry.
    pub(super) fn is_per_group(&self) -> bool {
        self.per_group
    }

    /// The entry of a row whose elements share one; NaN if the tensor does not have it.
    pub(crate) fn of_row(&self, at: (usize, usize, usize)) -> f32 {
        self.of_element(at, 0)
    }

    /// The entry of element `d` of a row; NaN if the tensor does not have it.
    fn of_element(&self, at: (usize, usize, usize), d: usize) -> f32 {
        let entry = self.scalars.float(self.grid.at(at, d));
        entry.unwrap_or(f32::NAN)
    }

    /// The entries of vector `i` of a row; `of_row` is the entry that all elements share, if there is one.
    #[inline(always)]
    pub(super) fn vector(&self, at: (usize, usize, usize), i: usize, of_row: f32) -> Vector {
        if self.per_group {
            return self.read_vector(at, i);
        }
        let head = at.1;
        let channels = self.channels.get(head * self.vectors + i);
        channels.copied().unwrap_or([of_row; WIDTH])
    }

    /// The entries of vector `i` of a row, read one by one.
    #[inline(never)]
    fn read_vector(&self, at: (usize, usize, usize), i: usize) -> Vector {
        std::array::from_fn(|l| self.of_element(at, i * WIDTH + l))
    }

    /// The entries of a head's channels; empty unless the grid is per channel.
    pub(super) fn of_head(&self, head: usize) -> &[Vector] {
        let first = head.saturating_mul(self.vectors);
        let channels = self.channels.get(first..).unwrap_or_default();
        channels.get(..self.vectors).unwrap_or_default()
    }

    /// The entry of a row whose elements share one; 0 for other grids.
    #[inline(always)]
    pub(super) fn row_entry(&self, at: (usize, usize, usize)) -> f32 {
        if self.channels.is_empty() && !self.per_group {
            self.of_row(at)
        } else {
            0.0
        }
    }
}
