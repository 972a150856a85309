//! Tensors in device memory as the kernels of small operators read and write them: by the number of an element.

use ascend_spec::TensorDesc;

/// A tensor in memory whose elements are counted in row-major order.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ElementView {
    /// The first byte that the view touches.
    first: *mut u8,
    desc: TensorDesc,
    /// Number of the element at `first`, in elements from the base address.
    lowest: i64,
    contiguous: bool,
}

// SAFETY: reading and writing are unsafe, and their contracts keep the accesses of different threads apart.
unsafe impl Sync for ElementView {}
// SAFETY: reading and writing are unsafe, and their contracts keep the accesses of different threads apart.
unsafe impl Send for ElementView {}

impl ElementView {
    /// The tensor whose first touched byte is at `first`.
    pub(crate) fn new(first: *mut u8, desc: TensorDesc) -> Self {
        let bits = u64::from(desc.dtype.bits()).max(8);
        let start = desc.byte_range().map_or(0, |range| range.start);
        ElementView {
            first,
            lowest: i64::try_from(start * 8 / bits).unwrap_or(i64::MAX),
            contiguous: desc.is_contiguous(),
            desc,
        }
    }

    /// Address of an element.
    pub(super) fn at<T>(&self, element: usize) -> *mut T {
        let first = self.first.cast::<T>();
        if self.contiguous {
            return first.wrapping_add(element);
        }
        let (mut left, mut place) = (element as i64, self.desc.offset);
        let axes = self.desc.shape.iter().zip(self.desc.strides.iter());
        for (&dim, &stride) in axes.rev() {
            place += left % dim.max(1) * stride;
            left /= dim.max(1);
        }
        first.wrapping_offset((place - self.lowest) as isize)
    }

    /// Elements in memory from one element of the last axis to the next.
    pub(super) fn step(&self) -> isize {
        match self.contiguous {
            true => 1,
            false => self.desc.strides.last().map_or(1, |&step| step as isize),
        }
    }

    /// Whether the elements are contiguous.
    pub(super) fn is_contiguous(&self) -> bool {
        self.contiguous
    }

    /// Reads an element.
    ///
    /// # Safety
    ///
    /// The tensor has the element, as a `T` that is live and written by no other thread.
    pub(crate) unsafe fn read<T: Copy>(&self, element: usize) -> T {
        // SAFETY: the caller's promise. No alignment is assumed.
        unsafe { self.at::<T>(element).read_unaligned() }
    }

    /// Writes an element.
    ///
    /// # Safety
    ///
    /// The tensor has the element, as a `T` that is live and accessed by no other thread.
    pub(super) unsafe fn write<T: Copy>(&self, element: usize, value: T) {
        // SAFETY: the caller's promise. No alignment is assumed.
        unsafe { self.at::<T>(element).write_unaligned(value) };
    }

    /// Writes the element of this number of a contiguous tensor that begins at the first byte, whatever the
    /// description has room for.
    ///
    /// # Safety
    ///
    /// The bytes are live and accessed by no other thread.
    pub(super) unsafe fn write_behind<T: Copy>(&self, element: usize, value: T) {
        let place = self.first.cast::<T>().wrapping_add(element);
        // SAFETY: the caller's promise. No alignment is assumed.
        unsafe { place.write_unaligned(value) };
    }
}
