//! The description of a tensor that an operator receives: everything but its data.

use crate::{DType, Dims, Format};
use std::fmt;
use std::ops::Range;

/// Element type, shape and place in memory of one tensor (`aclTensor` without its address).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct TensorDesc {
    /// Element type.
    pub dtype: DType,
    /// Storage format; attention takes [`Format::Nd`].
    pub format: Format,
    /// View shape.
    pub shape: Dims,
    /// View strides in elements, one an axis.
    pub strides: Dims,
    /// First element of the view, in elements from the base address.
    pub offset: i64,
}

impl TensorDesc {
    /// A contiguous tensor at offset 0, or `None` if `shape` has more than [`Dims::MAX_RANK`] axes.
    pub fn contiguous(dtype: DType, shape: &[i64]) -> Option<Self> {
        Some(Self::packed(dtype, Dims::new(shape)?))
    }

    /// A contiguous tensor of a shape already known to be one.
    pub fn packed(dtype: DType, shape: Dims) -> Self {
        TensorDesc { dtype, format: Format::Nd, strides: shape.contiguous_strides(), shape, offset: 0 }
    }

    /// Number of elements of the view; `None` if the shape is no shape.
    pub fn elements(&self) -> Option<u64> {
        self.shape.elements()
    }

    /// Whether the view has no element. A malformed shape counts as not empty, so that the rules check it.
    pub fn is_empty(&self) -> bool {
        self.elements() == Some(0)
    }

    /// Whether no dimension is negative, each has a stride, and the number of elements fits in 63 bits.
    pub fn is_countable(&self) -> bool {
        self.strides.rank() == self.shape.rank() && self.elements().is_some_and(|count| i64::try_from(count).is_ok())
    }

    /// Whether the elements are packed in row-major order (axes of size 1 may have any stride).
    pub fn is_contiguous(&self) -> bool {
        self.is_contiguous_from(0)
    }

    /// Whether the elements of the axes from `first` on are contiguous, whatever the strides of the axes before.
    pub fn is_contiguous_from(&self, first: usize) -> bool {
        if self.strides.rank() != self.shape.rank() {
            return false;
        }
        let mut want = 1i64;
        let axes = self.shape.iter().zip(self.strides.iter()).skip(first);
        for (&dim, &stride) in axes.rev() {
            if dim > 1 && stride != want {
                return false;
            }
            want = want.saturating_mul(dim.max(1));
        }
        true
    }

    /// Whether every element is at the offset that `other` has for the same indices, with the same type, format and
    /// shape: strides of axes of size 1 do not count.
    pub fn lies_as(&self, other: &Self) -> bool {
        let kind = |desc: &Self| (desc.dtype, desc.format, desc.shape, desc.offset, desc.strides.rank());
        let mut strides = self.shape.iter().zip(self.strides.iter().zip(&other.strides[..]));
        kind(self) == kind(other) && strides.all(|(&dim, (own, other))| dim == 1 || own == other)
    }

    /// The bytes, from the base address, that a walk over axes of these sizes touches with the view's strides. Where
    /// no memory could hold them, or the number of axes differs, the range is larger than any tensor.
    pub(crate) fn walked<const AXES: usize>(&self, axes: [usize; AXES]) -> Range<u64> {
        let axes = axes.map(|size| i64::try_from(size).unwrap_or(i64::MAX));
        let shape = Dims::of(axes);
        TensorDesc { shape, ..*self }.byte_range().unwrap_or(0..u64::MAX)
    }

    /// The tensor as it is read by somebody who takes it for one of another shape without gaps.
    pub(crate) fn read_as(&self, shape: Dims) -> TensorDesc {
        if shape == self.shape {
            return *self;
        }
        TensorDesc { offset: self.offset, ..TensorDesc::packed(self.dtype, shape) }
    }

    /// The first `count` bytes from the start of the view, as offsets from its base address. Where no memory could
    /// hold the view, the range is larger than any tensor.
    pub(crate) fn first_bytes(&self, count: u64) -> Range<u64> {
        match self.byte_range() {
            Some(range) => range.start..range.start.saturating_add(count),
            None => 0..u64::MAX,
        }
    }

    /// The bytes that the view touches, from its base address: empty for a view without elements, `None` if the
    /// view reaches below the base address, is no shape, or does not fit in 64 bits.
    pub fn byte_range(&self) -> Option<Range<u64>> {
        if self.elements()? == 0 {
            return Some(0..0);
        }
        if self.strides.rank() != self.shape.rank() {
            return None;
        }
        let (mut first, mut last) = (self.offset, self.offset);
        for (&dim, &stride) in self.shape.iter().zip(self.strides.iter()) {
            let reach = (dim - 1).checked_mul(stride)?;
            if reach < 0 {
                first = first.checked_add(reach)?;
            } else {
                last = last.checked_add(reach)?;
            }
        }
        let bits = u64::from(self.dtype.bits());
        if bits == 0 {
            return None;
        }
        let first_bit = u64::try_from(first).ok()?.checked_mul(bits)?;
        let end_bit = u64::try_from(last).ok()?.checked_add(1)?.checked_mul(bits)?;
        Some(first_bit / 8..end_bit.div_ceil(8))
    }
}

impl fmt::Display for TensorDesc {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}", self.dtype, self.shape)?;
        if !self.is_contiguous() {
            write!(f, " strides {}", self.strides)?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn byte_range_follows_strides_and_offset() {
        let mut desc = TensorDesc::packed(DType::Float16, Dims::of([2, 3]));
        assert_eq!(desc.byte_range(), Some(0..12));
        desc.offset = 4;
        assert_eq!(desc.byte_range(), Some(8..20));
        desc.strides = Dims::of([10, 1]);
        assert_eq!(desc.byte_range(), Some(8..34));
        assert!(!desc.is_contiguous());
        desc.strides = Dims::of([-3, 1]);
        assert_eq!(desc.byte_range(), Some(2..14));
        desc.offset = 2;
        assert_eq!(desc.byte_range(), None);
    }

    #[test]
    fn packed_nibbles_share_bytes() {
        assert_eq!(TensorDesc::packed(DType::Int4, Dims::of([3])).byte_range(), Some(0..2));
    }

    #[test]
    fn axes_of_size_one_have_any_stride() {
        let mut desc = TensorDesc::packed(DType::Float, Dims::of([1, 4]));
        desc.strides = Dims::of([99, 1]);
        assert!(desc.is_contiguous());
        desc.strides = Dims::of([1]);
        assert!(!desc.is_contiguous());
        assert_eq!(desc.byte_range(), None);
    }

    #[test]
    fn strides_of_single_entries_do_not_move_elements() {
        let own = TensorDesc::packed(DType::Float16, Dims::of([1, 1, 64]));
        let view = TensorDesc { strides: Dims::of([192, 64, 1]), ..own };
        assert!(own.is_contiguous() && view.is_contiguous());
        assert!(own != view && own.lies_as(&view) && view.lies_as(&own));
        let others = [
            TensorDesc { offset: 1, ..own },
            TensorDesc { dtype: DType::Bf16, ..own },
            TensorDesc { strides: Dims::of([64, 64, 2]), ..own },
            TensorDesc { strides: Dims::of([64, 1]), ..own },
            TensorDesc::packed(DType::Float16, Dims::of([1, 64, 1])),
        ];
        for other in others {
            assert!(!own.lies_as(&other) && !other.lies_as(&own), "{other:?}");
        }
    }

    #[test]
    fn extreme_strides_do_not_overflow() {
        let mut desc = TensorDesc::packed(DType::Float, Dims::of([i64::MAX, 2]));
        assert_eq!(desc.byte_range(), None);
        desc.shape = Dims::of([2, 2]);
        desc.strides = Dims::of([i64::MAX, i64::MAX]);
        assert_eq!(desc.byte_range(), None);
        desc.strides = Dims::of([i64::MIN, 1]);
        assert_eq!(desc.byte_range(), None);
    }
}
