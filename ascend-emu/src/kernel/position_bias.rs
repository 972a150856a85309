//! The additive position bias of attention scores: a tensor, or distances weighted with one slope for each head (ALiBi).

use super::Buffers;
use super::attention::Attention;
use super::dequantise::scale_grid::ScaleGrid;
use super::sequence::Sequence;
use super::simd::{Kernel, Simd, Vector, WIDTH};
use super::tensor::input::{ElementTypes, InputTensor};
use super::tensor::strided::Sizes;
use ascend_spec::attention_problem::{AttentionProblem, Slopes, TensorRole};
use std::ops::Range;

/// The position bias of a problem.
#[derive(Debug)]
pub(super) enum Bias {
    /// A bias tensor.
    Tensor(InputTensor),
    /// Distances times the slope of each head.
    Slopes { of: Slopes, slopes: Vec<f32> },
}

impl Bias {
    /// The bias of a problem, if it has one.
    ///
    /// # Safety
    ///
    /// As long as the value is used, the bytes that the bias is described with may be read.
    pub(super) unsafe fn new(
        problem: &AttentionProblem<'_>,
        buffers: &Buffers<'_>,
        types: ElementTypes,
    ) -> Option<Self> {
        if let Some(of) = problem.slopes {
            // SAFETY: the problem touches the slopes.
            let scales = unsafe { ScaleGrid::new(buffers, &of.grid, problem.heads, 1) };
            let slopes = (0..problem.heads).map(|head| scales.of_row((0, head, 0)));
            return Some(Bias::Slopes {
                of,
                slopes: slopes.collect(),
            });
        }
        let bias = problem.bias?;
        let [batch, heads, rows, dim] = bias.sizes;
        let sizes = Sizes {
            batch: if batch == 1 { problem.batch } else { batch },
            heads,
            rows,
            dim,
        };
        // SAFETY: these are the axes of the description, and a batch axis of 1 has stride 0.
        let source =
            unsafe { InputTensor::new(buffers.base(TensorRole::Bias), &bias.rows, sizes, types) };
        Some(Bias::Tensor(source))
    }

    /// Writes the bias of the keys `keys` of a row to `out`. Elements that a bias tensor does not have are 0.
    #[inline(always)]
    pub(super) fn read<S: Simd>(
        &self,
        simd: S,
        at: (usize, usize, usize),
        keys: Range<usize>,
        out: &mut [Vector],
    ) {
        let source = match self {
            Bias::Tensor(source) => source,
            Bias::Slopes { of, slopes } => {
                let slope = slopes.get(at.1).copied().unwrap_or(0.0);
                return simd.outline(SlopeBias {
                    root: of.root,
                    slope,
                    // The weight of a key 2^31 positions away is 0 in any case.
                    apart: of
                        .apart(at.2 as i64, keys.start as i64)
                        .clamp(i32::MIN.into(), i32::MAX.into()) as i32,
                    out,
                });
            }
        };
        out.fill([0.0; WIDTH]);
        let sizes = source.sizes();
        let keys = keys.start.min(sizes.dim)..keys.end.min(sizes.dim);
        if at.0 < sizes.batch && at.1 < sizes.heads && at.2 < sizes.rows && !keys.is_empty() {
            let nonfinite = &mut simd.splat(0.0);
            source.read(simd, at, keys, out, 1, nonfinite);
        }
    }
}

/// Computes the bias of a row from a slope, as [`Slopes::bias`] defines it.
struct SlopeBias<'a> {
    root: bool,
    slope: f32,
    /// Distance of the row from the first key.
    apart: i32,
    out: &'a mut [Vector],
}

impl Kernel for SlopeBias<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, _: S) {
        for (j, out) in self.out.as_flattened_mut().iter_mut().enumerate() {
            let distance = self.apart.saturating_sub(j as i32).unsigned_abs() as f32;
            *out = -self.slope * if self.root { distance.sqrt() } else { distance };
        }
    }
}

/// Reads the position bias of a row, which must exist, times `log2 e`, as scores are. Says whether the call has a bias.
#[inline(always)]
pub(super) fn read_bias<S: Simd>(
    simd: S,
    attention: &Attention,
    sequence: &Sequence,
    (row, head): (usize, usize),
    keys: &Range<usize>,
    out: &mut [Vector],
) -> bool {
    let Some(bias) = &attention.bias else {
        return false;
    };
    let (first_row, first_key) = sequence.origin;
    let at = (sequence.kv.sequence, head, first_row + row);
    let first = first_key + keys.start;
    bias.read(simd, at, first..first + keys.len(), out);
    for out in out.as_flattened_mut() {
        *out *= std::f32::consts::LOG2_E;
    }
    true
}
