//! Tensors that are as large as the scores: the mask and the position bias.

use super::Buffers;
use super::element::Element;
use super::simd::{Simd, Vector, WIDTH};
use super::source::Source;
use super::tensors::Sizes;
use ascend_spec::DType;
use ascend_spec::fia::{MaskTensor, Operand, Problem, Rows};
use std::ops::Range;

/// A full mask tensor; it has a byte an element, and any byte but 0 hides.
#[derive(Clone, Debug)]
pub(super) struct MaskBytes {
    base: *const u8,
    at: MaskTensor,
    /// Bytes that may be read.
    bytes: Range<i64>,
}

// SAFETY: the address is only read through, and whoever made the value vouches for that on any thread.
unsafe impl Send for MaskBytes {}
// SAFETY: as above.
unsafe impl Sync for MaskBytes {}

impl MaskBytes {
    /// # Safety
    ///
    /// As long as the value is used, the bytes that the mask is described with may be read.
    pub(super) unsafe fn new(problem: &Problem<'_>, buffers: &Buffers<'_>, at: MaskTensor) -> Self {
        let bytes = problem.call.mask().and_then(|mask| mask.byte_range());
        let count = |byte: u64| i64::try_from(byte).unwrap_or(i64::MAX);
        MaskBytes {
            base: buffers.base(Operand::AttenMask),
            at,
            bytes: bytes.map_or(0..0, |bytes| count(bytes.start)..count(bytes.end)),
        }
    }

    /// Copies the bytes of one row from key `first_key` on. Keys that the tensor does not have are visible.
    #[inline(always)]
    pub(super) fn read_row(&self, batch: usize, row: usize, first_key: usize, out: &mut [u8]) {
        let Some(last) = out.len().checked_sub(1) else {
            return;
        };
        let step = |keys: usize| (keys as i64).saturating_mul(self.at.key);
        let first = self.at.at(batch, row).saturating_add(step(first_key));
        let end = first.saturating_add(step(last));
        let inside = |at: i64| self.bytes.contains(&at);
        if self.at.key == 1 && inside(first) && inside(end) {
            let from = self.base.wrapping_offset(first as isize);
            // SAFETY: both ends lie within the bytes that may be read by the contract of `new`; `out` is ours alone.
            unsafe { from.copy_to_nonoverlapping(out.as_mut_ptr(), out.len()) };
            return;
        }
        for (j, out) in out.iter_mut().enumerate() {
            let at = first.saturating_add(step(j));
            *out = if inside(at) {
                // SAFETY: as above, one byte.
                unsafe { self.base.wrapping_offset(at as isize).read() }
            } else {
                0
            };
        }
    }
}

/// The additive position bias.
#[derive(Debug)]
pub(super) struct Bias<T>(Source<T>);

impl<T: Element> Bias<T> {
    /// # Safety
    ///
    /// As long as the value is used, the bytes that the bias is described with may be read.
    pub(super) unsafe fn new(
        problem: &Problem<'_>,
        buffers: &Buffers<'_>,
        rows: &Rows,
        own: DType,
    ) -> Self {
        let shape = problem.call.pse_shift.map(|pse| pse.shape);
        let axis = |axis: usize| {
            let size = shape.and_then(|shape| shape.get(axis).copied());
            usize::try_from(size.unwrap_or(0)).unwrap_or(0)
        };
        let sizes = Sizes {
            batch: if axis(0) == 1 { problem.batch } else { axis(0) },
            heads: axis(1),
            rows: axis(2),
            dim: axis(3),
        };
        // SAFETY: these are the axes of the description, and a batch axis of 1 has stride 0.
        Bias(unsafe { Source::new(buffers.base(Operand::PseShift), rows, sizes, own) })
    }

    /// Widens the bias of one row from key `keys.start` on; what the tensor does not have is 0.
    #[inline(always)]
    pub(super) fn read<S: Simd>(
        &self,
        simd: S,
        at: (usize, usize, usize),
        keys: Range<usize>,
        out: &mut [Vector],
    ) {
        out.fill([0.0; WIDTH]);
        let sizes = self.0.sizes();
        let keys = keys.start.min(sizes.dim)..keys.end.min(sizes.dim);
        if at.0 < sizes.batch && at.1 < sizes.heads && at.2 < sizes.rows && !keys.is_empty() {
            let watch = &mut simd.splat(0.0);
            self.0.read(simd, at, keys, out, 1, watch);
        }
    }
}
