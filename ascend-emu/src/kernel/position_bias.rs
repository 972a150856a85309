//! The additive position bias of attention scores: a tensor, or distances weighted with one slope for each head
//! (ALiBi).

use super::Buffers;
use super::dequantise::scale_grid::ScaleGrid;
use super::simd::{Kernel, Simd, Vector, WIDTH};
use super::tensor::input::{ElementTypes, InputTensor};
use super::tensor::strided::Sizes;
use crate::host_memory::{HostMemoryExhausted, try_collect, try_with_capacity};
use ascend_spec::attention_problem::{AttentionProblem, Slopes, TensorRole};
use std::ops::Range;

/// The position bias of a problem.
#[derive(Debug)]
pub(super) enum Bias {
    /// A bias tensor. Each element times `factor` is added to a score.
    Tensor { tensor: InputTensor, factor: f32 },
    /// The part of a bias tensor that each sequence has. Each element times `factor` is added to a score.
    OfSequences { biases: Vec<SequenceBias>, factor: f32 },
    /// Distances times slopes: one for each head, or one for each sequence and head.
    Slopes { rule: Slopes, slopes: Vec<f32> },
}

/// The bias of one sequence.
#[derive(Debug)]
pub(super) struct SequenceBias {
    /// Rows and keys of the sequence, or only its last row.
    rows: InputTensor,
    /// Whether the bias depends only on the distance of row and key, and there is none for keys after the row. `rows`
    /// is then the last row, which ends with distance 0.
    by_distance: bool,
}

impl Bias {
    /// The bias of a problem, if it has one.
    ///
    /// # Errors
    /// There is no host memory for a list.
    ///
    /// # Safety
    ///
    /// As long as the value is used, the bytes of the bias that the problem touches may be read.
    pub(super) unsafe fn new(
        problem: &AttentionProblem<'_>,
        buffers: &Buffers<'_>,
        types: ElementTypes,
    ) -> Result<Option<Self>, HostMemoryExhausted> {
        if let Some(rule) = problem.slopes {
            // SAFETY: the problem touches the slopes.
            let scales = unsafe { ScaleGrid::new(buffers, &rule.grid, problem.heads, 1) };
            let batch = if rule.grid.view.batch == 0 { 1 } else { problem.batch };
            let heads = problem.heads;
            let mut slopes = try_with_capacity(heads.saturating_mul(batch))?;
            for b in 0..batch {
                slopes.extend((0..heads).map(|head| scales.of_row((b, head, 0))));
            }
            return Ok(Some(Bias::Slopes { rule, slopes }));
        }
        let Some(bias) = problem.bias else {
            return Ok(None);
        };
        let factor = match bias.before_scale {
            true => (problem.scale * std::f64::consts::LOG2_E) as f32,
            false => std::f32::consts::LOG2_E,
        };
        if !problem.terms.is_empty() {
            // SAFETY: the problem touches the bias of each sequence.
            let biases = unsafe { of_sequences(problem, buffers, types) }?;
            return Ok(Some(Bias::OfSequences { biases, factor }));
        }
        let [batch, heads, rows, dim] = bias.sizes;
        let sizes = Sizes { batch: if batch == 1 { problem.batch } else { batch }, heads, rows, dim };
        // SAFETY: these are the axes of the description, and a batch axis of 1 has stride 0.
        let tensor = unsafe { InputTensor::new(buffers.base(TensorRole::Bias), &bias.rows, sizes, types) };
        Ok(Some(Bias::Tensor { tensor, factor }))
    }

    /// Writes the bias of the keys `keys` of a row to `out`, in the units of scores. Elements outside of the bias
    /// tensor are 0.
    #[inline(always)]
    pub(super) fn read<S: Simd>(
        &self,
        simd: S,
        row: (usize, usize, usize),
        heads: usize,
        keys: Range<usize>,
        out: &mut [Vector],
    ) {
        let (source, row, keys, factor) = match self {
            Bias::Tensor { tensor, factor } => (tensor, row, keys, *factor),
            Bias::OfSequences { biases, factor } => {
                let Some(bias) = biases.get(row.0) else {
                    return out.fill([0.0; WIDTH]);
                };
                let (own_row, keys) = bias.columns(row.2, keys);
                (&bias.rows, (0, row.1, own_row), keys, *factor)
            }
            Bias::Slopes { rule, slopes } => {
                let before = if rule.grid.view.batch == 0 { 0 } else { row.0 * heads };
                let slope = slopes.get(before + row.1).copied().unwrap_or(0.0);
                simd.outline(SlopeBias {
                    root: rule.root,
                    slope,
                    // The weight of a key 2^31 positions away is 0 in any case.
                    distance: rule.distance(row.2 as i64, keys.start as i64).clamp(i32::MIN.into(), i32::MAX.into())
                        as i32,
                    out: &mut *out,
                });
                return scale(out, std::f32::consts::LOG2_E);
            }
        };
        out.fill([0.0; WIDTH]);
        let sizes = source.sizes();
        let keys = keys.start.min(sizes.dim)..keys.end.min(sizes.dim);
        if row.0 < sizes.batch && row.1 < sizes.heads && row.2 < sizes.rows && !keys.is_empty() {
            let nonfinite = &mut simd.splat(0.0);
            source.read(simd, row, keys, out, 1, nonfinite);
            scale(out, factor);
        }
    }
}

#[inline(always)]
fn scale(out: &mut [Vector], factor: f32) {
    for out in out.as_flattened_mut() {
        *out *= factor;
    }
}

impl SequenceBias {
    /// Row and columns of the tensor for the keys `keys` of row `row`.
    #[inline(always)]
    fn columns(&self, row: usize, keys: Range<usize>) -> (usize, Range<usize>) {
        if !self.by_distance {
            return (row, keys);
        }
        // Key `row` has the last column.
        let last = self.rows.sizes().dim.saturating_sub(1);
        let column = |key: usize| (last + key).saturating_sub(row);
        (0, column(keys.start)..column(keys.end.min(row + 1).max(keys.start)))
    }
}

/// The bias of each sequence.
///
/// # Safety
///
/// As long as the value is used, the bytes of the bias that the problem touches may be read.
unsafe fn of_sequences(
    problem: &AttentionProblem<'_>,
    buffers: &Buffers<'_>,
    types: ElementTypes,
) -> Result<Vec<SequenceBias>, HostMemoryExhausted> {
    let base = buffers.base(TensorRole::Bias);
    let one = |b: usize| SequenceBias {
        rows: match problem.bias_rows(b) {
            // SAFETY: the problem touches the elements of each sequence.
            Some((rows, extents)) => unsafe { InputTensor::new(base, &rows, extents.into(), types) },
            None => InputTensor::Absent,
        },
        by_distance: problem.bias.is_some_and(|bias| bias.up_to_row),
    };
    try_collect((0..problem.terms.len()).map(one))
}

/// Computes the bias of a row from a slope, as [`Slopes::bias`] defines it.
struct SlopeBias<'a> {
    root: bool,
    slope: f32,
    /// Distance of the row from the first key.
    distance: i32,
    out: &'a mut [Vector],
}

impl Kernel for SlopeBias<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, _: S) {
        for (j, out) in self.out.as_flattened_mut().iter_mut().enumerate() {
            let distance = self.distance.saturating_sub(j as i32).unsigned_abs() as f32;
            *out = -self.slope * if self.root { distance.sqrt() } else { distance };
        }
    }
}
