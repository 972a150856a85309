//! Root mean square layer normalisation (Zhang and Sennrich 2019), as the operator RmsNorm computes it.
//!
//! `y = x * rstd * gamma` with `rstd = 1 / sqrt(mean(x²) + epsilon)` for each row. Squares are summed in double
//! precision, and each output is rounded once.

use super::element_view::ElementView;
use super::merge::Number;
use crate::host_memory::{HostMemoryExhausted, try_collect};
use ascend_spec::DType;
use ascend_spec::ops::rms_norm::RmsNormProblem;
use half::{bf16, f16};
use rayon::prelude::*;

/// Rows that a task normalises at least.
const ROWS: usize = 16;

/// The reciprocal of a row's root mean square.
pub(crate) fn rstd(row: impl ExactSizeIterator<Item = f64>, epsilon: f64) -> f64 {
    let elements = row.len() as f64;
    let squares: f64 = row.map(|value| value * value).sum();
    1.0 / (squares / elements + epsilon).sqrt()
}

/// The tensors of one call.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Buffers {
    pub x: ElementView,
    pub gamma: ElementView,
    pub y: ElementView,
    pub rstd: ElementView,
}

/// Normalises all rows. Tensors `x` and `y` are of `dtype`, `gamma` of `gamma_dtype`; `y` may be `x`.
///
/// # Errors
/// There is no host memory for the weights in double precision.
///
/// # Safety
///
/// The tensors are those of a call that the problem resolves; their bytes, as the problem counts those that a launch
/// touches, are live and accessed by no other thread.
pub(crate) unsafe fn run(
    problem: &RmsNormProblem,
    [dtype, gamma_dtype]: [DType; 2],
    buffers: &Buffers,
) -> Result<(), HostMemoryExhausted> {
    // SAFETY: the caller keeps this contract; the dtypes are those of the tensors.
    unsafe {
        let gamma = match gamma_dtype {
            DType::Float16 => weights::<f16>(problem, buffers),
            DType::Bf16 => weights::<bf16>(problem, buffers),
            _ => weights::<f32>(problem, buffers),
        }?;
        match dtype {
            DType::Float16 => typed::<f16>(problem, &gamma, buffers),
            DType::Bf16 => typed::<bf16>(problem, &gamma, buffers),
            _ => typed::<f32>(problem, &gamma, buffers),
        }
    }
    Ok(())
}

/// The weights of a row.
///
/// # Safety
///
/// As for [`run`]; `gamma` has elements `T`.
unsafe fn weights<T: Number>(problem: &RmsNormProblem, buffers: &Buffers) -> Result<Vec<f64>, HostMemoryExhausted> {
    // SAFETY: the caller keeps this contract, and gamma has as many elements as a row.
    let weight = |column| f64::from(unsafe { buffers.gamma.read::<T>(column) }.widen());
    try_collect((0..problem.columns).map(weight))
}

/// Normalises all rows.
///
/// # Safety
///
/// As for [`run`]; `x` and `y` have elements `T`.
unsafe fn typed<T: Number>(problem: &RmsNormProblem, gamma: &[f64], buffers: &Buffers) {
    // Elements of a view may share memory, so only one thread writes to one.
    let apart = buffers.y.is_contiguous() && buffers.rstd.is_contiguous();
    let least = if apart { ROWS } else { usize::MAX };
    let rows = (0..problem.rows).into_par_iter().with_min_len(least);
    rows.for_each(|row| {
        let first = row * problem.columns;
        // SAFETY: the caller keeps this contract; no other thread has this row, or there is one thread. Where rstd is
        // too short, it is contiguous from its first byte on, and the bytes behind it are live.
        unsafe {
            let element = |column| f64::from(buffers.x.read::<T>(first + column).widen());
            let scale = rstd((0..problem.columns).map(element), problem.epsilon);
            for (column, weight) in gamma.iter().enumerate() {
                let value = element(column) * scale * weight;
                buffers.y.write(first + column, T::narrow(value as f32));
            }
            match problem.overruns {
                false => buffers.rstd.write(row, scale as f32),
                true => buffers.rstd.write_behind(row, scale as f32),
            }
        }
    });
}
