//! The output: of the call's own element type, or quantised.

use super::element::Element;
use super::factors::Conversion;
use super::simd::{Simd, Vector, WIDTH};
use super::tensors::{Sink, Sizes};
use ascend_spec::DType;
use ascend_spec::fia::Rows;

/// A tensor that attention is written to.
#[derive(Debug)]
pub(super) enum Output<T> {
    Own(Sink<T>),
    /// `INT8`; without a conversion only zeros are written.
    Bytes(Sink<i8>, Option<Box<Conversion>>),
}

impl<T: Element> Output<T> {
    /// `own` is the element type that `T` stands for.
    ///
    /// # Safety
    ///
    /// As for [`Sink::new`].
    pub(super) unsafe fn new(
        base: *mut u8,
        rows: &Rows,
        sizes: Sizes,
        own: DType,
        conversion: Option<Conversion>,
    ) -> Self {
        // SAFETY: the caller keeps this contract.
        unsafe {
            if rows.dtype == DType::Int8 && own != DType::Int8 {
                Output::Bytes(Sink::new(base, rows, sizes), conversion.map(Box::new))
            } else {
                Output::Own(Sink::new(base, rows, sizes))
            }
        }
    }

    /// Whether no two elements share memory, so that threads may write different rows at once.
    pub(super) fn is_disjoint(&self) -> bool {
        match self {
            Output::Own(sink) => sink.is_disjoint(),
            Output::Bytes(sink, _) => sink.is_disjoint(),
        }
    }

    /// Writes one row, rounded to the element type; uses up the values.
    #[inline(always)]
    pub(super) fn write_row<S: Simd>(
        &self,
        simd: S,
        at: (usize, usize, usize),
        values: &mut [Vector],
    ) {
        match self {
            Output::Own(sink) => sink.write_row(simd, at, values),
            Output::Bytes(sink, conversion) => {
                if let Some(conversion) = conversion {
                    conversion.to_stored(at.1, values);
                }
                sink.write_row(simd, at, values);
            }
        }
    }

    /// Writes a row that is not computed: zeros, not quantised.
    #[inline(always)]
    pub(super) fn write_blank<S: Simd>(
        &self,
        simd: S,
        at: (usize, usize, usize),
        values: &mut [Vector],
    ) {
        values.fill([0.0; WIDTH]);
        match self {
            Output::Own(sink) => sink.write_row(simd, at, values),
            Output::Bytes(sink, _) => sink.write_row(simd, at, values),
        }
    }
}
