//! What a call that holds every rule computes.

use super::{Argument, Parameter, UpdateCall};
use crate::DType;
use std::ops::Range;

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
    /// Whether a log-sum-exp of +inf, with which attention marks a row without keys, counts as -inf, so that the part
    /// has weight 0; otherwise it makes the row NaN.
    pub infinity_is_empty: bool,
}

impl UpdateProblem {
    /// Calls `visit` with every tensor that the call touches and the bytes it touches, from the tensor's base
    /// address, by the strides of its description. Visits nothing without rows.
    pub fn touches(&self, call: &UpdateCall<'_>, visit: &mut dyn FnMut(Argument, Range<u64>)) {
        if self.rows == 0 {
            return;
        }
        for (argument, desc) in call.each_tensor() {
            let touched = match argument.parameter {
                Parameter::Lse | Parameter::LseOut => desc.walked([self.rows]),
                _ => desc.walked([self.rows, self.dim]),
            };
            visit(argument, touched);
        }
    }
}
