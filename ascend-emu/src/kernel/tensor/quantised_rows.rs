//! Quantised rows of keys, read as the elements that they stand for: quantised ones times their tile's scale, rounded
//! to the dtype of the queries, and then the rotary part.

use super::Element;
use super::strided::{Sizes, StridedTensor};
use crate::kernel::simd::{Simd, Vector, WIDTH};
use ascend_spec::DType;
use ascend_spec::attention_problem::Rows;
use ascend_spec::minifloat::{Float8E4M3Fn, HiFloat8};
use ascend_spec::ops::kv_quant_sparse_flash_attention::QuantisedRow;
use half::{bf16, f16};
use std::ops::Range;

/// A tensor of [`QuantisedRow`]s.
#[derive(Clone, Copy, Debug)]
pub(crate) struct QuantisedRows {
    bytes: StridedTensor<u8>,
    /// Type of the quantised elements.
    stored: DType,
    /// Type of the queries.
    own: DType,
}

impl QuantisedRows {
    /// The tensor at `base`, for queries of type `own`. Rows of another number of bytes do not exist.
    ///
    /// # Safety
    ///
    /// As long as the value is used, every byte of `rows` within `sizes`, counted from `base`, may be read.
    pub(crate) unsafe fn new(base: *const u8, rows: &Rows, sizes: Sizes, own: DType) -> Self {
        let sizes = match sizes.dim {
            QuantisedRow::BYTES => sizes,
            _ => Sizes::NONE,
        };
        QuantisedRows { bytes: StridedTensor::new(base.cast_mut(), rows, sizes), stored: rows.dtype, own }
    }

    /// Sizes of the axes, the last in elements that a row stands for.
    pub(crate) fn sizes(&self) -> Sizes {
        Sizes { dim: QuantisedRow::DIM, ..self.bytes.sizes() }
    }

    /// Whether row `i` of both tensors begins at the same byte for every `i`, with the same strides.
    pub(crate) fn coincides(&self, other: &Self) -> bool {
        self.bytes.coincides(&other.bytes)
    }

    /// Widens the elements `columns` of a row, of which the first is that of a vector: vector `i` of them goes to
    /// `out[i * step]`, the last one padded with zeros. Adds NaN to `nonfinite` if an element is not finite.
    ///
    /// # Panics
    /// If the row or a column does not exist.
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
        assert!(columns.end <= QuantisedRow::DIM, "no such column");
        debug_assert!(columns.start.is_multiple_of(WIDTH), "a vector is within one tile");
        let row = self.row(row);
        let firsts = columns.clone().step_by(WIDTH);
        for (column, out) in firsts.zip(out.iter_mut().step_by(step)) {
            let wide = match column < QuantisedRow::ROPE.start {
                true => self.dequantised(simd, &row, column),
                false => self.rotary(simd, &row, column),
            };
            simd.store(wide, out);
            out[(columns.end - column).min(WIDTH)..].fill(0.0);
            *nonfinite = simd.mul_add(simd.load(out), simd.splat(0.0), *nonfinite);
        }
    }

    /// The bytes of a row.
    #[inline(always)]
    fn row(&self, row: (usize, usize, usize)) -> [u8; QuantisedRow::BYTES] {
        let first = self.bytes.first(row);
        let first = self.bytes.base().cast_const().wrapping_offset(first);
        // Rows of tokens are not cut into fractals, so a dense row is contiguous as a whole.
        match self.bytes.is_dense() {
            // SAFETY: `first` checked that the row exists, whose bytes are contiguous and readable by the contract of
            // `new`, and `new` that it has as many.
            true => unsafe { first.cast::<[u8; QuantisedRow::BYTES]>().read() },
            false => std::array::from_fn(|d| {
                let byte = first.wrapping_offset(self.bytes.column(d));
                // SAFETY: the row exists and has byte `d`, as above.
                unsafe { byte.read() }
            }),
        }
    }

    /// The elements of a vector that is within one tile.
    #[inline(always)]
    fn dequantised<S: Simd>(&self, simd: S, row: &[u8; QuantisedRow::BYTES], column: usize) -> S::Register {
        let codes: [u8; WIDTH] = std::array::from_fn(|i| row[column + i]);
        let quantised = match self.stored {
            DType::Float8E4M3Fn => Float8E4M3Fn::widen(simd, &codes.map(Float8E4M3Fn::from_bits)),
            DType::HiFloat8 => HiFloat8::widen(simd, &codes.map(HiFloat8::from_bits)),
            _ => i8::widen(simd, &codes.map(u8::cast_signed)),
        };
        let scale = QuantisedRow::SCALES.start + column / QuantisedRow::TILE * size_of::<f32>();
        let scale = f32::from_ne_bytes(std::array::from_fn(|i| row[scale + i]));
        let element = simd.multiply(quantised, simd.splat(scale));
        match self.own {
            DType::Float16 => f16::round(simd, element),
            _ => bf16::round(simd, element),
        }
    }

    /// The elements of a vector that is within the rotary part.
    #[inline(always)]
    fn rotary<S: Simd>(&self, simd: S, row: &[u8; QuantisedRow::BYTES], column: usize) -> S::Register {
        let codes: [u16; WIDTH] = std::array::from_fn(|i| {
            let byte = QuantisedRow::ROPE.start + 2 * (column - QuantisedRow::ROPE.start + i);
            u16::from_ne_bytes([row[byte], row[byte + 1]])
        });
        match self.own {
            DType::Float16 => f16::widen(simd, &codes.map(f16::from_bits)),
            _ => bf16::widen(simd, &codes.map(bf16::from_bits)),
        }
    }
}
