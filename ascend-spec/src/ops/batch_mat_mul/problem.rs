//! What a call that holds every rule computes.

use super::{BatchMatMulCall, Parameter};
use crate::TensorDesc;
use std::ops::Range;

/// A call of BatchMatMul that holds every rule, resolved.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BatchMatMulProblem {
    /// Number of products; 0 if a factor has no elements.
    pub batch: usize,
    /// Rows of a product.
    pub rows: usize,
    /// Elements that a sum runs over.
    pub inner: usize,
    /// Columns of a product.
    pub columns: usize,
}

impl BatchMatMulProblem {
    /// Whether there is no element to compute.
    pub fn is_idle(&self) -> bool {
        self.batch == 0 || self.rows == 0 || self.columns == 0
    }

    /// Calls `visit` with every tensor that the call touches and the bytes it touches, from the tensor's base
    /// address, by the strides of its description. Visits nothing if there is no element to compute.
    pub fn touches(
        &self,
        call: &BatchMatMulCall<'_>,
        visit: &mut dyn FnMut(Parameter, Range<u64>),
    ) {
        if self.is_idle() {
            return;
        }
        for (argument, desc) in call.each_tensor() {
            let (rows, columns) = match argument.parameter {
                Parameter::SelfMatrices => (self.rows, self.inner),
                Parameter::Mat2 => (self.inner, self.columns),
                _ => (self.rows, self.columns),
            };
            // A first axis of 1 serves every product.
            let batch = match desc.shape.first() {
                Some(1) => 1,
                _ => self.batch,
            };
            visit(argument.parameter, desc.walked([batch, rows, columns]));
        }
    }
}

impl BatchMatMulCall<'_> {
    /// The contiguous products that follow from the factors, of the type of `self`; `None` without factors, and for
    /// products that no memory holds. Where factors have no three axes each, which a check refuses, a product is one
    /// element.
    pub fn implied_out(&self) -> Option<TensorDesc> {
        let (left, right) = (self.self_?, self.mat2?);
        let shape = match (&left.shape[..], &right.shape[..]) {
            (&[a, m, _], &[b, _, n]) => [a.max(b), m, n],
            _ => [1; 3],
        };
        TensorDesc::contiguous(left.dtype, &shape)
    }
}
