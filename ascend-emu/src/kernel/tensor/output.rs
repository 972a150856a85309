//! The output tensor: of the query's element type, or quantised.

use super::input::ElementTypes;
use super::strided::{Sizes, WriteTensor};
use crate::kernel::dequantise::Quantisation;
use crate::kernel::simd::{Simd, Vector};
use ascend_spec::DType;
use ascend_spec::attention_problem::Rows;
use ascend_spec::minifloat::{Float8E4M3Fn, HiFloat8};
use half::{bf16, f16};

/// The tensor that attention is written to.
#[derive(Debug)]
pub(crate) enum OutputTensor {
    F32(WriteTensor<f32>),
    F16(WriteTensor<f16>),
    Bf16(WriteTensor<bf16>),
    /// `INT8`; without a quantisation only zeros are written.
    Int8(WriteTensor<i8>, Option<Box<Quantisation>>),
    /// `FLOAT8_E4M3FN`, quantised as `INT8` is.
    E4m3(WriteTensor<Float8E4M3Fn>, Option<Box<Quantisation>>),
    /// `HIFLOAT8`, quantised as `INT8` is.
    HiFloat8(WriteTensor<HiFloat8>, Option<Box<Quantisation>>),
}

/// Does the same for tensors of each type.
macro_rules! each_type {
    ($out:expr, $tensor:ident => $result:expr) => {
        match $out {
            OutputTensor::F32($tensor) => $result,
            OutputTensor::F16($tensor) => $result,
            OutputTensor::Bf16($tensor) => $result,
            OutputTensor::Int8($tensor, _) => $result,
            OutputTensor::E4m3($tensor, _) => $result,
            OutputTensor::HiFloat8($tensor, _) => $result,
        }
    };
}

impl OutputTensor {
    /// The tensor at `base`.
    ///
    /// # Safety
    ///
    /// As for [`WriteTensor::new`].
    pub(crate) unsafe fn new(
        base: *mut u8,
        rows: &Rows,
        sizes: Sizes,
        types: ElementTypes,
        quantisation: Option<Quantisation>,
    ) -> Self {
        // SAFETY: the caller keeps this contract.
        unsafe {
            match types.stored(rows.dtype) {
                DType::Float16 => OutputTensor::F16(WriteTensor::new(base, rows, sizes)),
                DType::Bf16 => OutputTensor::Bf16(WriteTensor::new(base, rows, sizes)),
                DType::Float => OutputTensor::F32(WriteTensor::new(base, rows, sizes)),
                DType::Float8E4M3Fn => {
                    OutputTensor::E4m3(WriteTensor::new(base, rows, sizes), quantisation.map(Box::new))
                }
                DType::HiFloat8 => {
                    OutputTensor::HiFloat8(WriteTensor::new(base, rows, sizes), quantisation.map(Box::new))
                }
                _ => OutputTensor::Int8(WriteTensor::new(base, rows, sizes), quantisation.map(Box::new)),
            }
        }
    }

    /// Whether no two elements share memory, so that threads may write different rows at once.
    pub(crate) fn is_disjoint(&self) -> bool {
        each_type!(self, tensor => tensor.is_disjoint())
    }

    /// Writes a row, rounded to the element type. Quantises it in place first, unless the row was not computed.
    #[inline(always)]
    pub(crate) fn write_row<S: Simd>(
        &self,
        simd: S,
        row: (usize, usize, usize),
        values: &mut [Vector],
        computed: bool,
    ) {
        let quantisation = match self {
            OutputTensor::Int8(_, quantisation)
            | OutputTensor::E4m3(_, quantisation)
            | OutputTensor::HiFloat8(_, quantisation) => quantisation.as_ref(),
            OutputTensor::F32(_) | OutputTensor::F16(_) | OutputTensor::Bf16(_) => None,
        };
        if let Some(quantisation) = quantisation.filter(|_| computed) {
            quantisation.quantise(row.1, values);
        }
        each_type!(self, tensor => tensor.write_row(simd, row, values));
    }
}
