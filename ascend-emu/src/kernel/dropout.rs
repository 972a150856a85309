//! The drop mask: one bit for each weight of attention.

use super::Buffers;
use ascend_spec::attention_problem::{AttentionProblem, TensorRole};
use std::ops::Range;

/// The drop mask of a problem. [`DropRows`](ascend_spec::attention_problem::DropRows) have the positions of a
/// sequence's bits.
#[derive(Debug)]
pub(super) struct DropMask {
    base: *const u8,
    /// Bytes that may be read.
    bytes: Range<u64>,
}

// SAFETY: the address is only read through, which the contract of `new` allows on any thread.
unsafe impl Send for DropMask {}
// SAFETY: as above.
unsafe impl Sync for DropMask {}

impl DropMask {
    /// The drop mask of a problem, if it has one.
    ///
    /// # Safety
    ///
    /// As long as the value is used, the bytes of the drop mask that the problem touches may be read.
    pub(super) unsafe fn new(
        problem: &AttentionProblem<'_>,
        buffers: &Buffers<'_>,
    ) -> Option<Self> {
        problem.dropout.map(|dropout| DropMask {
            base: buffers.base(TensorRole::DropMask).cast_const(),
            bytes: dropout.bytes.range(),
        })
    }

    /// Whether the weight of this bit is kept. A weight outside of the mask is kept.
    #[inline(always)]
    pub(super) fn keeps(&self, bit: u64) -> bool {
        let byte = bit / 8;
        if !self.bytes.contains(&byte) {
            return true;
        }
        // SAFETY: the byte may be read, by the contract of `new`; it lies within memory, so that its index fits an
        // `isize`.
        let byte = unsafe { self.base.wrapping_add(byte as usize).read() };
        byte >> (bit % 8) & 1 != 0
    }
}
