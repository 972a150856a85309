//! `inputLayout`: the order of the axes of query, key, value and output.

use crate::attention_problem::SoftmaxOutputs;
use crate::layout::View;
use crate::{Dims, TensorDesc};
use std::fmt;

/// Axis order of query, key, value and output: B batch, N heads, S rows of a sequence, D head dimension, H = N * D, T
/// rows of all sequences packed.
///
/// These are the orders of FlashAttentionScore and RingAttentionUpdate. The operators of inference have others, each a
/// [`Layout`](crate::Layout).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum InputLayout {
    /// Batch, rows, heads times head dimension.
    Bsh,
    /// Rows, batch, heads times head dimension.
    Sbh,
    /// Batch, rows, heads, head dimension.
    Bsnd,
    /// Batch, heads, rows, head dimension.
    Bnsd,
    /// Packed rows, heads, head dimension.
    Tnd,
}

impl InputLayout {
    /// Every layout.
    pub const ALL: [InputLayout; 5] =
        [InputLayout::Bsh, InputLayout::Sbh, InputLayout::Bsnd, InputLayout::Bnsd, InputLayout::Tnd];

    /// CANN's spelling.
    pub const fn as_str(self) -> &'static str {
        match self {
            InputLayout::Bsh => "BSH",
            InputLayout::Sbh => "SBH",
            InputLayout::Bsnd => "BSND",
            InputLayout::Bnsd => "BNSD",
            InputLayout::Tnd => "TND",
        }
    }

    /// The layout that CANN spells `name`, in any case.
    pub fn parse(name: &str) -> Option<Self> {
        let is_named = |layout: &InputLayout| layout.as_str().eq_ignore_ascii_case(name);
        Self::ALL.into_iter().find(is_named)
    }

    /// Number of axes.
    pub const fn rank(self) -> usize {
        self.as_str().len()
    }

    /// Whether sequences are packed one after another without a batch axis.
    pub const fn is_packed(self) -> bool {
        matches!(self, InputLayout::Tnd)
    }

    /// Whether heads and head dimension are one axis.
    pub const fn is_hidden(self) -> bool {
        matches!(self, InputLayout::Bsh | InputLayout::Sbh)
    }

    /// Index of the batch axis.
    pub const fn batch_axis(self) -> Option<usize> {
        match self {
            InputLayout::Bsh | InputLayout::Bsnd | InputLayout::Bnsd => Some(0),
            InputLayout::Sbh => Some(1),
            InputLayout::Tnd => None,
        }
    }

    /// Index of the axis of rows.
    pub const fn row_axis(self) -> usize {
        match self {
            InputLayout::Sbh | InputLayout::Tnd => 0,
            InputLayout::Bsh | InputLayout::Bsnd => 1,
            InputLayout::Bnsd => 2,
        }
    }

    /// Index of the axis of heads, in layouts that have one.
    pub const fn head_axis(self) -> Option<usize> {
        match self {
            InputLayout::Bsh | InputLayout::Sbh => None,
            InputLayout::Bsnd => Some(2),
            InputLayout::Bnsd | InputLayout::Tnd => Some(1),
        }
    }

    /// Index of the last axis: the head dimension, or the number of heads times the head dimension.
    pub const fn last_axis(self) -> usize {
        self.rank() - 1
    }

    /// Shape of the output of a query of shape `query`, with `heads` heads of `value_dim` elements; `H` saturates.
    pub fn out_shape(self, query: Dims, heads: i64, value_dim: i64) -> Dims {
        let last = match self.is_hidden() {
            true => heads.saturating_mul(value_dim),
            false => value_dim,
        };
        query.with(self.last_axis(), last)
    }

    /// Shape of the maxima and sums for a query of shape `query`: eight equal numbers for each row, `[B, N, S, 8]`,
    /// with packed sequences `[T, N, 8]`.
    pub fn softmax_shape(self, query: Dims, heads: i64) -> Dims {
        let size = |axis: usize| query.get(axis).copied().unwrap_or(0);
        let (rows, copies) = (size(self.row_axis()), SoftmaxOutputs::COPIES as i64);
        match self.batch_axis() {
            Some(batch) => Dims::of([size(batch), heads, rows, copies]),
            None => Dims::of([rows, heads, copies]),
        }
    }

    /// The strides and the first element of the logical axes of `desc`. `dim` is the head dimension, needed to split
    /// `H`. `None` if the rank differs.
    pub fn view(self, desc: &TensorDesc, dim: i64) -> Option<View> {
        if desc.strides.rank() != self.rank() {
            return None;
        }
        let stride = |axis: usize| desc.strides.get(axis).copied().unwrap_or(0);
        let element = stride(self.last_axis());
        Some(View {
            offset: desc.offset,
            batch: self.batch_axis().map_or(0, stride),
            head: match self.head_axis() {
                Some(axis) => stride(axis),
                None => element.saturating_mul(dim),
            },
            row: stride(self.row_axis()),
            dim: element,
        })
    }
}

impl fmt::Display for InputLayout {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::DType;

    #[test]
    fn names_are_known_in_any_case() {
        for layout in InputLayout::ALL {
            assert_eq!(InputLayout::parse(layout.as_str()), Some(layout));
            let lower = layout.as_str().to_lowercase();
            assert_eq!(InputLayout::parse(&lower), Some(layout));
        }
        for other in ["", "BNS", "NTD", "BSH ", "BSHD"] {
            assert_eq!(InputLayout::parse(other), None);
        }
    }

    #[test]
    fn views_find_each_element() {
        let (batch, heads, rows, dim) = (2, 3, 4, 5);
        for (layout, shape) in [
            (InputLayout::Bsh, &[batch, rows, heads * dim][..]),
            (InputLayout::Sbh, &[rows, batch, heads * dim]),
            (InputLayout::Bsnd, &[batch, rows, heads, dim]),
            (InputLayout::Bnsd, &[batch, heads, rows, dim]),
            (InputLayout::Tnd, &[rows, heads, dim]),
        ] {
            let desc = TensorDesc::contiguous(DType::Float, shape).unwrap();
            let view = layout.view(&desc, dim).unwrap();
            let batches = if layout.is_packed() { 1 } else { batch };
            let mut seen = vec![false; desc.elements().unwrap() as usize];
            for b in 0..batches as usize {
                for n in 0..heads as usize {
                    for s in 0..rows as usize {
                        for d in 0..dim {
                            let element = (view.at(b, n, s) + d * view.dim) as usize;
                            assert!(!seen[element], "{layout}");
                            seen[element] = true;
                        }
                    }
                }
            }
            assert!(seen.into_iter().all(|seen| seen), "{layout}");
            assert_eq!(layout.view(&desc, dim).map(|view| view.dim), Some(1));
            let narrow = layout.out_shape(desc.shape, heads, 2);
            let last = narrow.last().copied();
            assert_eq!(last, Some(if layout.is_hidden() { 6 } else { 2 }));
        }
    }
}
