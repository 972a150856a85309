//! The output: of the call's own element type, or quantised.

use super::factors::Conversion;
use super::simd::{Simd, Vector};
use super::source::Types;
use super::tensors::{Sink, Sizes};
use ascend_spec::DType;
use ascend_spec::fia::Rows;
use ascend_spec::minifloat::{Float8E4M3Fn, HiFloat8};
use half::{bf16, f16};

/// A tensor that attention is written to.
#[derive(Debug)]
pub(super) enum Output {
    Single(Sink<f32>),
    Half(Sink<f16>),
    Brain(Sink<bf16>),
    /// `INT8`; without a conversion only zeros are written.
    Bytes(Sink<i8>, Option<Box<Conversion>>),
    /// `FLOAT8_E4M3FN`, likewise.
    E4m3(Sink<Float8E4M3Fn>, Option<Box<Conversion>>),
    /// `HIFLOAT8`, likewise.
    HiFloat8(Sink<HiFloat8>, Option<Box<Conversion>>),
}

impl Output {
    /// # Safety
    ///
    /// As for [`Sink::new`].
    pub(super) unsafe fn new(
        base: *mut u8,
        rows: &Rows,
        sizes: Sizes,
        types: Types,
        conversion: Option<Conversion>,
    ) -> Self {
        // SAFETY: the caller keeps this contract.
        unsafe {
            match types.held(rows.dtype) {
                DType::Float16 => Output::Half(Sink::new(base, rows, sizes)),
                DType::Bf16 => Output::Brain(Sink::new(base, rows, sizes)),
                DType::Float => Output::Single(Sink::new(base, rows, sizes)),
                DType::Float8E4M3Fn => {
                    Output::E4m3(Sink::new(base, rows, sizes), conversion.map(Box::new))
                }
                DType::HiFloat8 => {
                    Output::HiFloat8(Sink::new(base, rows, sizes), conversion.map(Box::new))
                }
                _ => Output::Bytes(Sink::new(base, rows, sizes), conversion.map(Box::new)),
            }
        }
    }

    /// Whether no two elements share memory, so that threads may write different rows at once.
    pub(super) fn is_disjoint(&self) -> bool {
        match self {
            Output::Single(sink) => sink.is_disjoint(),
            Output::Half(sink) => sink.is_disjoint(),
            Output::Brain(sink) => sink.is_disjoint(),
            Output::Bytes(sink, _) => sink.is_disjoint(),
            Output::E4m3(sink, _) => sink.is_disjoint(),
            Output::HiFloat8(sink, _) => sink.is_disjoint(),
        }
    }

    /// Writes one row, rounded to the element type; uses up the values. A row that is not computed is written as it is, not
    /// quantised.
    #[inline(always)]
    pub(super) fn write_row<S: Simd>(
        &self,
        simd: S,
        at: (usize, usize, usize),
        values: &mut [Vector],
        computed: bool,
    ) {
        let conversion = match self {
            Output::Bytes(_, conversion)
            | Output::E4m3(_, conversion)
            | Output::HiFloat8(_, conversion) => conversion.as_ref(),
            Output::Single(_) | Output::Half(_) | Output::Brain(_) => None,
        };
        if let Some(conversion) = conversion.filter(|_| computed) {
            conversion.to_stored(at.1, values);
        }
        match self {
            Output::Single(sink) => sink.write_row(simd, at, values),
            Output::Half(sink) => sink.write_row(simd, at, values),
            Output::Brain(sink) => sink.write_row(simd, at, values),
            Output::Bytes(sink, _) => sink.write_row(simd, at, values),
            Output::E4m3(sink, _) => sink.write_row(simd, at, values),
            Output::HiFloat8(sink, _) => sink.write_row(simd, at, values),
        }
    }
}
