//! BatchMatMul: products of matrices, one for each entry of the first axis.
//!
//! `out[b] = self[b] mat2[b]`, where a factor with a first axis of 1 serves every product. Factors and products may be
//! strided.

pub mod rules;

use crate::Cann::{V8_1, V9_0};
use crate::contract::{CallContract, checked_for, described_by};
use crate::operator::{OperatorVersion, versions};
use crate::{Dims, TensorDesc};
use std::ops::Range;

declare_operator! {
    /// Source: aclnnBatchMatMul, parameter table.
    batch_mat_mul_arguments, "BatchMatMul", #[derive(Copy)] BatchMatMulCall;
    1 { self_: tensor, SelfMatrices, "self", "Left factors, `[A, M, K]`." }
    1 { mat2: tensor, Mat2, "mat2",
        "Right factors, `[B, K, N]`, where `A` and `B` are the same or one of them is 1." }
    1 { out: output_mut, Out, "out", "Products, `[max(A, B), M, N]`." }
    1 { cube_math_type: int8 = 0, CubeMathType, "cubeMathType",
        "What the cube units may make of FLOAT: 0 keeps it, 1 allows fewer digits, 2 takes FLOAT16, 3 takes \
         HFLOAT32." }
}

versions! {
    /// The version of BatchMatMul.
    pub enum Version {
        /// The only one.
        V1 = OperatorVersion::new(1, "aclnnBatchMatMul", "8.1").on_a2_a3(V8_1).on_ascend950(V9_0)
            .on_inference_cards(V8_1).on_training_cards(V8_1),
    }
}

/// The values of `cubeMathType`.
pub mod cube_math_type {
    /// FLOAT is multiplied as FLOAT. Not on 310P and 910A.
    pub const KEEP_DTYPE: i8 = 0;
    /// FLOAT may lose digits: it is multiplied as HFLOAT32, on 310P and 910A as FLOAT16.
    pub const ALLOW_FP32_DOWN_PRECISION: i8 = 1;
    /// FLOAT is multiplied as FLOAT16.
    pub const USE_FP16: i8 = 2;
    /// FLOAT is multiplied as HFLOAT32. Not on 310P and 910A.
    pub const USE_HF32: i8 = 3;
}

described_by! { BatchMatMul, rules::RULES }

impl CallContract for BatchMatMul {
    checked_for! { target.soc }

    fn imply_outputs(arguments: &mut Self::Arguments, _: &dyn Fn(&str) -> Option<Dims>) {
        arguments.out = arguments.out.or(arguments.call().implied_out());
    }
}

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
    pub fn touches(&self, call: &BatchMatMulCall, visit: &mut dyn FnMut(Parameter, Range<u64>)) {
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

impl BatchMatMulCall {
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
