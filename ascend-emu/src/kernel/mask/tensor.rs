//! The mask tensor, read element by element.

use crate::kernel::Buffers;
use crate::kernel::prefetch::{CACHE_LINE, CacheLevel, prefetch};
use ascend_spec::attention_problem::{AttentionProblem, MaskRows, TensorRole};
use std::ops::Range;

/// Prefetch distance, in rows of the mask.
const PREFETCH_DISTANCE: usize = 2;

/// The mask tensor: one byte for each element, and any byte but 0 hides. The [`MaskRows`] of a sequence have the
/// positions of its elements.
#[derive(Clone, Debug)]
pub(crate) struct MaskTensor {
    base: *const u8,
    /// Bytes that may be read.
    bytes: Range<i64>,
}

// SAFETY: the address is only read through, which the contract of `new` allows on any thread.
unsafe impl Send for MaskTensor {}
// SAFETY: as above.
unsafe impl Sync for MaskTensor {}

impl MaskTensor {
    /// The mask tensor of a problem.
    ///
    /// # Safety
    ///
    /// As long as the value is used, the bytes of the mask that the problem touches may be read.
    pub(crate) unsafe fn new(problem: &AttentionProblem<'_>, buffers: &Buffers<'_>) -> Self {
        let bytes = problem.mask_bytes();
        let count = |byte: u64| i64::try_from(byte).unwrap_or(i64::MAX);
        MaskTensor {
            base: buffers.base(TensorRole::Mask),
            bytes: bytes.map_or(0..0, |bytes| count(bytes.start)..count(bytes.end)),
        }
    }

    /// Copies the bytes of one row from key `first_key` on. Keys that the tensor does not have are visible.
    #[inline(always)]
    pub(crate) fn read_row(&self, at: &MaskRows, row: usize, first_key: usize, out: &mut [u8]) {
        let (context, out) = out.split_at_mut(before_tensor(at, first_key, out.len()));
        context.fill(0);
        let first_key = first_key + context.len();
        if let Some(from) = self.contiguous(at, row, first_key, out.len()) {
            // SAFETY: all of the bytes may be read, as `contiguous` checked, by the contract of `new`; `out` is ours
            // alone.
            unsafe { from.copy_to_nonoverlapping(out.as_mut_ptr(), out.len()) };
            return;
        }
        for (j, out) in out.iter_mut().enumerate() {
            let element = at.element(row, first_key + j);
            *out = match element.filter(|element| self.bytes.contains(element)) {
                // SAFETY: as above, one byte.
                Some(element) => unsafe { self.base.wrapping_offset(element as isize).read() },
                None => 0,
            };
        }
    }

    /// Adds `lanes` to the entry in `hidden` of each key that the mask hides from a row. The entries are those of the
    /// keys from `first_key` on. Prefetches the same keys of a later row.
    #[inline(always)]
    pub(crate) fn hide(
        &self,
        at: &MaskRows,
        row: usize,
        first_key: usize,
        lanes: u16,
        hidden: &mut [u16],
    ) {
        const CHUNK: usize = 16;
        let context = before_tensor(at, first_key, hidden.len());
        let (first_key, hidden) = (first_key + context, &mut hidden[context..]);
        let Some(from) = self.contiguous(at, row, first_key, hidden.len()) else {
            for (j, hidden) in hidden.iter_mut().enumerate() {
                let mut byte = [0];
                self.read_row(at, row, first_key + j, &mut byte);
                *hidden |= if byte[0] == 0 { 0 } else { lanes };
            }
            return;
        };
        let below = at.element(row + PREFETCH_DISTANCE, first_key).unwrap_or(0) as isize;
        for byte in (0..hidden.len()).step_by(CACHE_LINE) {
            let address = self.base.wrapping_offset(below).wrapping_add(byte);
            prefetch(CacheLevel::L1, address);
        }
        let (chunks, rest) = hidden.as_chunks_mut::<CHUNK>();
        let mut at = from;
        for hidden in chunks {
            // SAFETY: all of the bytes may be read, as `contiguous` checked, by the contract of `new`.
            let bytes = unsafe { at.cast::<[u8; CHUNK]>().read_unaligned() };
            for i in 0..CHUNK {
                hidden[i] |= if bytes[i] == 0 { 0 } else { lanes };
            }
            at = at.wrapping_add(CHUNK);
        }
        for hidden in rest {
            // SAFETY: as above, one byte.
            let byte = unsafe { at.read() };
            *hidden |= if byte == 0 { 0 } else { lanes };
            at = at.wrapping_add(1);
        }
    }

    /// The address of the bytes of `count` keys from key `key` on, if they are contiguous and may be read.
    #[inline(always)]
    fn contiguous(&self, at: &MaskRows, row: usize, key: usize, count: usize) -> Option<*const u8> {
        let first = at.element(row, key)?;
        let last = at.element(row, key + count.checked_sub(1)?)?;
        let inside = self.bytes.contains(&first) && self.bytes.contains(&last);
        (at.key == 1 && inside).then(|| self.base.wrapping_offset(first as isize))
    }
}

/// The number of keys, among the `count` from `first_key` on, that precede the first element of the tensor.
#[inline(always)]
fn before_tensor(at: &MaskRows, first_key: usize, count: usize) -> usize {
    at.context.saturating_sub(first_key).min(count)
}
