//! Input tensors of any element type, read by the row.

use super::Element;
use super::quantised_rows::QuantisedRows;
use super::strided::{ReadTensor, Sizes, StridedTensor};
use crate::kernel::simd::{Kernel, Simd, Vector, WIDTH};
use ascend_spec::DType;
use ascend_spec::attention_problem::Rows;
use ascend_spec::minifloat::{Float4E2M1, Float8E4M3Fn, HiFloat8};
use half::{bf16, f16};
use std::ops::Range;

/// The element types of a call's tensors.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ElementTypes {
    /// The type of the query in its description.
    pub(crate) query: DType,
    /// The element type of tensors whose description has the query's type.
    pub(crate) stored: DType,
}

impl ElementTypes {
    /// The type of the elements of a tensor whose description has the type `described`.
    pub(crate) fn stored(self, described: DType) -> DType {
        if described == self.query { self.stored } else { described }
    }
}

/// An input tensor.
#[derive(Clone, Copy, Debug)]
pub(crate) enum InputTensor {
    F32(ReadTensor<f32>),
    F16(ReadTensor<f16>),
    Bf16(ReadTensor<bf16>),
    Int8(ReadTensor<i8>),
    E4m3(ReadTensor<Float8E4M3Fn>),
    HiFloat8(ReadTensor<HiFloat8>),
    FourBit(FourBitTensor),
    /// Rows that hold scales and a rotary part besides quantised elements.
    QuantisedRows(QuantisedRows),
    /// No tensor, or one of a type that the kernels do not read; its elements count as zeros.
    Absent,
}

impl InputTensor {
    /// The tensor at `base`.
    ///
    /// # Safety
    ///
    /// As long as the value is used, every element of `rows` within `sizes`, counted from `base`, may be read.
    pub(crate) unsafe fn new(base: *const u8, rows: &Rows, sizes: Sizes, types: ElementTypes) -> Self {
        // SAFETY: the caller keeps this contract, in whichever type.
        unsafe {
            match types.stored(rows.dtype) {
                DType::Float => InputTensor::F32(ReadTensor::new(base, rows, sizes)),
                DType::Float16 => InputTensor::F16(ReadTensor::new(base, rows, sizes)),
                DType::Bf16 => InputTensor::Bf16(ReadTensor::new(base, rows, sizes)),
                DType::Int8 => InputTensor::Int8(ReadTensor::new(base, rows, sizes)),
                DType::Float8E4M3Fn => InputTensor::E4m3(ReadTensor::new(base, rows, sizes)),
                DType::HiFloat8 => InputTensor::HiFloat8(ReadTensor::new(base, rows, sizes)),
                DType::Int4 => InputTensor::FourBit(FourBitTensor::new(base, rows, sizes, false)),
                DType::Float4E2M1 => InputTensor::FourBit(FourBitTensor::new(base, rows, sizes, true)),
                _ => InputTensor::Absent,
            }
        }
    }

    /// Sizes of the axes; zero where there is no tensor.
    pub(crate) fn sizes(&self) -> Sizes {
        match self {
            InputTensor::F32(tensor) => tensor.sizes(),
            InputTensor::F16(tensor) => tensor.sizes(),
            InputTensor::Bf16(tensor) => tensor.sizes(),
            InputTensor::Int8(tensor) => tensor.sizes(),
            InputTensor::E4m3(tensor) => tensor.sizes(),
            InputTensor::HiFloat8(tensor) => tensor.sizes(),
            InputTensor::FourBit(tensor) => tensor.grid.sizes(),
            InputTensor::QuantisedRows(tensor) => tensor.sizes(),
            InputTensor::Absent => Sizes::NONE,
        }
    }

    /// Whether row `i` of both tensors begins at the same element for every `i`, with the same strides.
    pub(crate) fn coincides(&self, other: &Self) -> bool {
        match (self, other) {
            (InputTensor::F32(one), InputTensor::F32(other)) => one.coincides(other),
            (InputTensor::F16(one), InputTensor::F16(other)) => one.coincides(other),
            (InputTensor::Bf16(one), InputTensor::Bf16(other)) => one.coincides(other),
            (InputTensor::QuantisedRows(one), InputTensor::QuantisedRows(other)) => one.coincides(other),
            _ => false,
        }
    }

    /// Widens the elements `columns` of a row: vector `i` of them goes to `out[i * step]`, the last one padded with
    /// zeros. Adds NaN to `nonfinite` if an element is not finite.
    #[inline(always)]
    pub(crate) fn read<S: Simd>(
        &self,
        simd: S,
        row: (usize, usize, usize),
        columns: Range<usize>,
        out: &mut [Vector],
        step: usize,
        nonfinite: &mut S::Register,
    ) {
        let seen = simd.outline(ReadRow { tensor: self, row, columns, out, step });
        *nonfinite = simd.add(*nonfinite, simd.load(&seen));
    }
}

/// Reads a row of any type. Returns NaN in some lane if an element is not finite, and zeros otherwise. Compiled once
/// for all callers, because there are many of them.
struct ReadRow<'a> {
    tensor: &'a InputTensor,
    row: (usize, usize, usize),
    columns: Range<usize>,
    out: &'a mut [Vector],
    step: usize,
}

impl Kernel for ReadRow<'_> {
    type Output = Vector;

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) -> Vector {
        let ReadRow { tensor, row, columns, out, step } = self;
        let nonfinite = &mut simd.splat(0.0);
        match tensor {
            InputTensor::F32(tensor) => tensor.read(simd, row, columns, out, step, nonfinite),
            InputTensor::F16(tensor) => tensor.read(simd, row, columns, out, step, nonfinite),
            InputTensor::Bf16(tensor) => tensor.read(simd, row, columns, out, step, nonfinite),
            InputTensor::Int8(tensor) => tensor.read(simd, row, columns, out, step, nonfinite),
            InputTensor::E4m3(tensor) => tensor.read(simd, row, columns, out, step, nonfinite),
            InputTensor::HiFloat8(tensor) => tensor.read(simd, row, columns, out, step, nonfinite),
            InputTensor::FourBit(tensor) => tensor.read(row, columns, out, step),
            InputTensor::QuantisedRows(tensor) => tensor.read(simd, row, columns, out, step, nonfinite),
            InputTensor::Absent => clear(out, step, columns.len().div_ceil(WIDTH)),
        }
        let mut seen = [0.0; WIDTH];
        simd.store(*nonfinite, &mut seen);
        seen
    }
}

/// Element types that the decode kernel can read in place.
pub(crate) trait InPlaceElement: Element {
    /// The tensor in `source`, if it has this element type.
    fn of(source: &InputTensor) -> Option<&ReadTensor<Self>>;
}

macro_rules! stored {
    ($($element:ty, $variant:ident;)*) => {$(
        impl InPlaceElement for $element {
            #[inline(always)]
            fn of(source: &InputTensor) -> Option<&ReadTensor<Self>> {
                match source {
                    InputTensor::$variant(tensor) => Some(tensor),
                    _ => None,
                }
            }
        }
    )*};
}

stored! {
    f32, F32;
    f16, F16;
    bf16, Bf16;
    i8, Int8;
}

/// Whether the kernels can read tensors of type `dtype`, for queries of type `own`.
pub(crate) fn reads(dtype: DType, own: DType) -> bool {
    use DType::{Bf16, Float4E2M1, Float8E4M3Fn, Float16, HiFloat8, Int4, Int8};
    let all = [Float16, Bf16, Int8, Int4, Float8E4M3Fn, HiFloat8, Float4E2M1];
    dtype == own || all.contains(&dtype)
}

/// Sets the first `count` vectors, `step` apart, to zeros.
#[inline(always)]
pub(crate) fn clear(out: &mut [Vector], step: usize, count: usize) {
    for out in out.iter_mut().step_by(step).take(count) {
        *out = [0.0; WIDTH];
    }
}

/// A tensor of `INT4` or `FLOAT4_E2M1`: two elements to a byte, the first in the low half.
#[derive(Clone, Copy, Debug)]
pub(crate) struct FourBitTensor {
    grid: StridedTensor<u8>,
    /// Whether the elements are `FLOAT4_E2M1`.
    floats: bool,
}

impl FourBitTensor {
    /// The tensor at `base`.
    ///
    /// # Safety
    ///
    /// As for [`InputTensor::new`].
    unsafe fn new(base: *const u8, rows: &Rows, sizes: Sizes, floats: bool) -> Self {
        // `StridedTensor` checks that addresses do not overflow as if elements were whole bytes: on the safe side.
        let grid = StridedTensor::new(base.cast_mut(), rows, sizes);
        FourBitTensor { grid, floats }
    }

    /// Widens the elements `columns` of a row: vector `i` of them goes to `out[i * step]`, the last one padded with
    /// zeros. All elements are finite.
    #[inline(always)]
    fn read(&self, row: (usize, usize, usize), columns: Range<usize>, out: &mut [Vector], step: usize) {
        if self.floats {
            let value = |high: u8| Float4E2M1::from_bits(high >> 4).to_f32();
            self.read_as(row, columns, out, step, value);
        } else {
            let value = |high: u8| f32::from(high.cast_signed() >> 4);
            self.read_as(row, columns, out, step, value);
        }
    }

    /// Reads as [`FourBitTensor::read`] does; `value` computes an element's value from the upper half of a byte.
    #[inline(always)]
    fn read_as(
        &self,
        row: (usize, usize, usize),
        columns: Range<usize>,
        out: &mut [Vector],
        step: usize,
        value: impl Fn(u8) -> f32,
    ) {
        let grid = &self.grid;
        assert!(columns.end <= grid.sizes().dim, "no such column");
        let first = grid.first(row);
        let base = grid.base().cast_const();
        for (column, out) in columns.clone().step_by(WIDTH).zip(out.iter_mut().step_by(step)) {
            let index = first.wrapping_add(grid.column(column));
            if grid.is_dense() && index & 1 == 0 && column + WIDTH <= columns.end {
                // SAFETY: the row and the columns exist, as checked, and are contiguous.
                let bytes = unsafe { base.wrapping_offset(index >> 1).cast::<[u8; WIDTH / 2]>().read_unaligned() };
                for (i, out) in out.iter_mut().enumerate() {
                    let high = if i % 2 == 0 { bytes[i / 2] << 4 } else { bytes[i / 2] };
                    *out = value(high);
                }
                continue;
            }
            *out = [0.0; WIDTH];
            for (out, d) in out.iter_mut().zip(column..columns.end) {
                let index = first.wrapping_add(grid.column(d));
                // SAFETY: the row and the column exist, as checked, and may be read by the contract of `new`.
                let byte = unsafe { base.wrapping_offset(index >> 1).read() };
                let high = if index & 1 == 0 { byte << 4 } else { byte & 0xf0 };
                *out = value(high);
            }
        }
    }
}
