//! Shapes and strides without heap allocation.

use std::fmt;
use std::ops::Deref;

/// At most [`Dims::MAX_RANK`] signed numbers, one an axis: a shape, or strides in elements.
///
/// The numbers are what a caller wrote, so they may be negative; [`Dims::elements`] is then `None`.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct Dims {
    len: u8,
    values: [i64; Dims::MAX_RANK],
}

impl Dims {
    /// The highest rank: CANN's limit for tensors of these operators.
    pub const MAX_RANK: usize = 8;

    /// The given numbers, or `None` if there are more than [`Dims::MAX_RANK`].
    pub fn new(values: &[i64]) -> Option<Self> {
        let mut dims = Dims { len: u8::try_from(values.len()).ok()?, values: [0; Dims::MAX_RANK] };
        dims.values.get_mut(..values.len())?.copy_from_slice(values);
        Some(dims)
    }

    /// `N` numbers; the rank is checked at compile time.
    pub const fn of<const N: usize>(values: [i64; N]) -> Self {
        const { assert!(N <= Dims::MAX_RANK) };
        let mut dims = Dims { len: N as u8, values: [0; Dims::MAX_RANK] };
        let mut axis = 0;
        while axis < N {
            dims.values[axis] = values[axis];
            axis += 1;
        }
        dims
    }

    /// Number of axes.
    pub fn rank(&self) -> usize {
        usize::from(self.len)
    }

    /// Product of the dimensions, 1 for rank 0; `None` if one is negative or the product overflows.
    pub fn elements(&self) -> Option<u64> {
        let mut product = 1u64;
        let mut empty = false;
        for &dim in self.iter() {
            let dim = u64::try_from(dim).ok()?;
            if dim == 0 {
                empty = true;
            } else {
                product = product.checked_mul(dim)?;
            }
        }
        Some(if empty { 0 } else { product })
    }

    /// Strides, in elements, of a contiguous tensor of this shape (last axis fastest).
    /// Saturates where [`Dims::elements`] is `None`.
    pub fn contiguous_strides(&self) -> Dims {
        let mut strides = *self;
        let mut step = 1i64;
        for axis in (0..self.rank()).rev() {
            strides.values[axis] = step;
            step = step.saturating_mul(self.values[axis].max(1));
        }
        strides
    }

    /// This shape with the size of one axis changed; unchanged if there is no such axis.
    #[must_use]
    pub fn with(mut self, axis: usize, value: i64) -> Dims {
        if axis < self.rank() {
            self.values[axis] = value;
        }
        self
    }
}

impl Deref for Dims {
    type Target = [i64];

    fn deref(&self) -> &[i64] {
        // `len` never passes MAX_RANK, so the fallback is never taken; it keeps this free of panics.
        self.values.get(..self.rank()).unwrap_or(&self.values)
    }
}

impl fmt::Debug for Dims {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list().entries(self.iter()).finish()
    }
}

impl fmt::Display for Dims {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("[")?;
        for (axis, dim) in self.iter().enumerate() {
            if axis > 0 {
                f.write_str(", ")?;
            }
            write!(f, "{dim}")?;
        }
        f.write_str("]")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rank_is_bounded() {
        assert!(Dims::new(&[1; 8]).is_some());
        assert!(Dims::new(&[1; 9]).is_none());
        assert!(Dims::new(&[1; 300]).is_none());
    }

    #[test]
    fn elements_refuse_nonsense() {
        assert_eq!(Dims::of([]).elements(), Some(1));
        assert_eq!(Dims::of([2, 3]).elements(), Some(6));
        assert_eq!(Dims::of([i64::MAX, 0, i64::MAX]).elements(), None);
        assert_eq!(Dims::of([i64::MAX, 0]).elements(), Some(0));
        assert_eq!(Dims::of([2, -1]).elements(), None);
        assert_eq!(Dims::of([i64::MAX, i64::MAX]).elements(), None);
    }

    #[test]
    fn strides_count_from_the_last_axis() {
        assert_eq!(&*Dims::of([2, 3, 4]).contiguous_strides(), &[12, 4, 1]);
        assert_eq!(&*Dims::of([2, 0, 4]).contiguous_strides(), &[4, 4, 1]);
        assert_eq!(Dims::of([2, 3]).to_string(), "[2, 3]");
    }
}
