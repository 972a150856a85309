//! Dequantisation of INT8, INT4, FP8 and FP4 tensors, and quantisation of the output.
//!
//! A stored element means `(stored + offset) * scale`. The offset is the negative zero point. CANN calls the two
//! antiquant scale and antiquant offset. Each comes from a grid: per tensor, per head, per channel, per token or per
//! group.

pub(crate) mod in_registers;
pub(crate) mod scale_grid;

use super::Buffers;
use super::simd::{Simd, Vector, WIDTH};
use ascend_spec::attention_problem::{AttentionProblem, Counts, Grid, ScaleOffset};
use in_registers::ChannelOrTokenScales;
use scale_grid::ScaleGrid;

/// The position of a row, for grids that count tokens and for grids that count stored rows.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ScalePosition {
    /// Sequence, and token in the sequence.
    pub(crate) sequence: (usize, usize),
    /// Index on the tensor's batch axis and row, or block of the cache and row in the block.
    pub(crate) stored: (usize, usize),
}

/// Scale and offset of a quantised tensor. It dequantises as `(stored + offset) * scale`, and quantises as
/// `value * scale + offset`.
#[derive(Debug)]
pub(crate) struct Quantisation {
    scale: ScaleGrid,
    offset: Option<ScaleGrid>,
    counts: Counts,
    /// For each sequence, the number of grid rows before its own, for grids that count through all sequences.
    before: Vec<usize>,
}

impl Quantisation {
    /// The quantisation of a tensor with `heads` heads and rows of `dim` elements.
    ///
    /// # Safety
    ///
    /// As long as the value is used, the bytes of the tensors of scale and offset may be read.
    pub(crate) unsafe fn new(
        problem: &AttentionProblem<'_>,
        buffers: &Buffers<'_>,
        tensors: &ScaleOffset,
        heads: usize,
        dim: usize,
    ) -> Self {
        // SAFETY: the caller keeps this contract, for both.
        let scales = |grid: &Grid| unsafe { ScaleGrid::new(buffers, grid, heads, dim) };
        let counts = tensors.scale.counts;
        Quantisation {
            scale: scales(&tensors.scale),
            offset: tensors.offset.as_ref().map(scales),
            counts,
            before: match counts {
                Counts::Concatenated => problem.groups_before(&tensors.scale),
                Counts::Tokens | Counts::Stored => Vec::new(),
            },
        }
    }

    /// Whether groups of neighbouring elements share scale or offset.
    pub(crate) fn is_per_group(&self) -> bool {
        let offset = self.offset.as_ref();
        self.scale.is_per_group() || offset.is_some_and(ScaleGrid::is_per_group)
    }

    /// The position of a row in the grids.
    #[inline(always)]
    fn grid_row(&self, position: ScalePosition, head: usize) -> (usize, usize, usize) {
        let (batch, row) = match self.counts {
            Counts::Tokens => position.sequence,
            Counts::Stored => position.stored,
            Counts::Concatenated => {
                let (sequence, token) = position.sequence;
                (self.before.get(sequence).copied().unwrap_or(0), token)
            }
        };
        (batch, head, row)
    }

    /// Dequantises a row of `dim` elements into vectors `step` apart. Adds NaN to `nonfinite` if a value is not
    /// finite.
    #[inline(always)]
    pub(crate) fn dequantise<S: Simd>(
        &self,
        simd: S,
        position: ScalePosition,
        head: usize,
        (out, step, dim): (&mut [Vector], usize, usize),
        nonfinite: &mut S::Register,
    ) {
        let row = self.grid_row(position, head);
        let scale = self.scale.row_entry(row);
        let offset = self.offset.as_ref().map(|it| it.row_entry(row));
        for (i, out) in out.iter_mut().step_by(step).take(dim.div_ceil(WIDTH)).enumerate() {
            if let (Some(offsets), Some(offset)) = (&self.offset, offset) {
                let offset = offsets.vector(row, i, offset);
                for l in 0..WIDTH {
                    out[l] += offset[l];
                }
            }
            let scale = self.scale.vector(row, i, scale);
            let value = simd.multiply(simd.load(out), simd.load(&scale));
            simd.store(value, out);
            // The rest of the last vector stays zeros.
            for out in out.iter_mut().skip(dim - i * WIDTH) {
                *out = 0.0;
            }
            *nonfinite = simd.mul_add(simd.load(out), simd.splat(0.0), *nonfinite);
        }
    }

    /// Scale and offset of a row; either is 0 unless all elements of the row share it.
    pub(crate) fn of_row(&self, position: ScalePosition, head: usize) -> (f32, f32) {
        let row = self.grid_row(position, head);
        let scale = self.scale.row_entry(row);
        let offset = self.offset.as_ref();
        (scale, offset.map_or(0.0, |it| it.row_entry(row)))
    }

    /// Scales and offsets of a head's channels.
    pub(crate) fn of_head(&self, head: usize) -> ChannelOrTokenScales<'_> {
        ChannelOrTokenScales {
            scales: self.scale.of_head(head),
            offsets: self.offset.as_ref().map(|it| it.of_head(head)),
        }
    }

    /// Quantises the values of a row, without rounding them.
    #[inline(always)]
    pub(crate) fn quantise(&self, head: usize, values: &mut [Vector]) {
        let row = (0, head, 0);
        let scale = self.scale.row_entry(row);
        let offset = self.offset.as_ref().map(|it| it.row_entry(row));
        for (i, values) in values.iter_mut().enumerate() {
            let scale = self.scale.vector(row, i, scale);
            for l in 0..WIDTH {
                values[l] *= scale[l];
            }
            if let (Some(offsets), Some(offset)) = (&self.offset, offset) {
                let offset = offsets.vector(row, i, offset);
                for l in 0..WIDTH {
                    values[l] += offset[l];
                }
            }
        }
    }
}
