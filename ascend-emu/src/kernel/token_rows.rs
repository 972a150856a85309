//! The tensors of sparse attention, by the row: one row for each token and head.

use super::kv::KvTensor;
use super::tensor::input::{ElementTypes, InputTensor};
use super::tensor::quantised_rows::QuantisedRows;
use super::tensor::strided::Sizes;
use ascend_spec::attention_problem::Rows;
use ascend_spec::ops::sparse_sequences::TokenLayout;
use ascend_spec::{Axes, DType, TensorDesc, View};

/// A tensor, and its base address.
#[derive(Clone, Copy, Debug)]
pub(crate) struct TokenRows<'a> {
    pub desc: &'a TensorDesc,
    pub base: *mut u8,
}

impl TokenRows<'_> {
    /// The rows of a tensor `[B, S, N, D]` or `[T, N, D]`, or without the axis of heads.
    pub(super) fn rows(&self, layout: TokenLayout) -> (Rows, Sizes) {
        let TensorDesc { shape, strides, .. } = self.desc;
        let row = usize::from(layout != TokenLayout::Tnd);
        let has_heads = shape.rank() == row + 3;
        let stride = |axis: usize| strides.get(axis).copied().unwrap_or(0);
        let size = |axis: usize| shape.get(axis).map_or(0, |&size| size.max(0) as usize);
        let last = row + 1 + usize::from(has_heads);
        let rows = Rows {
            view: View {
                offset: self.desc.offset,
                batch: if row == 1 { stride(0) } else { 0 },
                head: if has_heads { stride(row + 1) } else { 0 },
                row: stride(row),
                dim: stride(last),
            },
            lanes: 0,
            dtype: self.desc.dtype,
        };
        let sizes = Sizes {
            batch: if row == 1 { size(0) } else { 1 },
            heads: if has_heads { size(row + 1) } else { 1 },
            rows: size(row),
            dim: size(last),
        };
        (rows, sizes)
    }

    /// The rows of a tensor whose axes are in this order; `None` for a tensor of another rank.
    pub(super) fn ordered(&self, axes: Axes) -> Option<(Rows, Sizes)> {
        let rows = Rows { view: axes.view(self.desc, 0)?, lanes: 0, dtype: self.desc.dtype };
        Some((rows, axes.extents(&self.desc.shape, 0)?.into()))
    }

    /// The element types of a tensor that holds what it says.
    pub(super) fn types(&self) -> ElementTypes {
        ElementTypes { query: self.desc.dtype, stored: self.desc.dtype }
    }

    /// The tensor to be read.
    ///
    /// # Safety
    ///
    /// Every element may be read as long as the value is used.
    pub(super) unsafe fn input(&self, layout: TokenLayout) -> InputTensor {
        let (rows, sizes) = self.rows(layout);
        // SAFETY: the caller's promise.
        unsafe { InputTensor::new(self.base, &rows, sizes, self.types()) }
    }

    /// The keys or values of one head of the tensor, whose rows and sizes these are.
    ///
    /// # Safety
    ///
    /// Every element may be read as long as the value is used.
    pub(super) unsafe fn head(&self, (rows, sizes): (Rows, Sizes), head: usize) -> KvTensor {
        let view = View { offset: rows.view.at(0, head, 0), ..rows.view };
        let (rows, sizes) = (Rows { view, ..rows }, Sizes { heads: 1, ..sizes });
        KvTensor {
            dim: sizes.dim,
            // SAFETY: the caller's promise: the rows are those of one head of the tensor.
            own: unsafe { InputTensor::new(self.base, &rows, sizes, self.types()) },
            prefix: InputTensor::Absent,
            rope: None,
        }
    }

    /// The tensor of quantised rows, for queries of type `own`, to be read.
    ///
    /// # Safety
    ///
    /// Every byte may be read as long as the value is used.
    pub(super) unsafe fn quantised_rows(&self, layout: TokenLayout, own: DType) -> InputTensor {
        let (rows, sizes) = self.rows(layout);
        // SAFETY: the caller's promise.
        InputTensor::QuantisedRows(unsafe { QuantisedRows::new(self.base, &rows, sizes, own) })
    }
}
