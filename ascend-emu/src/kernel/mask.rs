//! The tensors that hide keys: the mask tensor, a summary of it, and the drop mask.

use crate::host_memory::{HostMemoryExhausted, try_repeat};
use crate::kernel::Buffers;
use crate::kernel::prefetch::{CACHE_LINE, CacheLevel, prefetch};
use ascend_spec::MaskGeometry;
use ascend_spec::attention_problem::{AttentionProblem, MaskRows, TensorRole};
use rayon::prelude::*;
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
// SAFETY: the address is only read through, which the contract of `new` allows on any thread.
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
    pub(crate) fn read_row(&self, rows: &MaskRows, row: usize, first_key: usize, out: &mut [u8]) {
        let (context, out) = out.split_at_mut(before_tensor(rows, first_key, out.len()));
        context.fill(0);
        let first_key = first_key + context.len();
        if let Some(from) = self.contiguous(rows, row, first_key, out.len()) {
            // SAFETY: all of the bytes may be read, as `contiguous` checked, by the contract of `new`; `out` is ours
            // alone.
            unsafe { from.copy_to_nonoverlapping(out.as_mut_ptr(), out.len()) };
            return;
        }
        for (j, out) in out.iter_mut().enumerate() {
            let element = rows.element(row, first_key + j);
            *out = match element.filter(|element| self.bytes.contains(element)) {
                // SAFETY: the element is one of the bytes that may be read, by the contract of `new`.
                Some(element) => unsafe { self.base.wrapping_offset(element as isize).read() },
                None => 0,
            };
        }
    }

    /// Adds `lanes` to the entry in `hidden` of each key that the mask hides from a row. The entries are those of the
    /// keys from `first_key` on. Prefetches the same keys of a later row.
    #[inline(always)]
    pub(crate) fn hide(&self, rows: &MaskRows, row: usize, first_key: usize, lanes: u16, hidden: &mut [u16]) {
        const CHUNK: usize = 16;
        let context = before_tensor(rows, first_key, hidden.len());
        let (first_key, hidden) = (first_key + context, &mut hidden[context..]);
        let Some(from) = self.contiguous(rows, row, first_key, hidden.len()) else {
            for (j, hidden) in hidden.iter_mut().enumerate() {
                let mut byte = [0];
                self.read_row(rows, row, first_key + j, &mut byte);
                *hidden |= if byte[0] == 0 { 0 } else { lanes };
            }
            return;
        };
        let below = rows.element(row + PREFETCH_DISTANCE, first_key).unwrap_or(0) as isize;
        for byte in (0..hidden.len()).step_by(CACHE_LINE) {
            let address = self.base.wrapping_offset(below).wrapping_add(byte);
            prefetch(CacheLevel::L1, address);
        }
        let (chunks, rest) = hidden.as_chunks_mut::<CHUNK>();
        let mut next = from;
        for hidden in chunks {
            // SAFETY: all of the bytes may be read, as `contiguous` checked, by the contract of `new`.
            let bytes = unsafe { next.cast::<[u8; CHUNK]>().read_unaligned() };
            for i in 0..CHUNK {
                hidden[i] |= if bytes[i] == 0 { 0 } else { lanes };
            }
            next = next.wrapping_add(CHUNK);
        }
        for hidden in rest {
            // SAFETY: the byte is one of those that `contiguous` checked.
            let byte = unsafe { next.read() };
            *hidden |= if byte == 0 { 0 } else { lanes };
            next = next.wrapping_add(1);
        }
    }

    /// The address of the bytes of `count` keys from key `key` on, if they are contiguous and may be read.
    #[inline(always)]
    fn contiguous(&self, rows: &MaskRows, row: usize, key: usize, count: usize) -> Option<*const u8> {
        let first = rows.element(row, key)?;
        let last = rows.element(row, key + count.checked_sub(1)?)?;
        let inside = self.bytes.contains(&first) && self.bytes.contains(&last);
        (rows.view.dim == 1 && inside).then(|| self.base.wrapping_offset(first as isize))
    }
}

/// The number of keys, among the `count` from `first_key` on, that precede the first element of the tensor.
#[inline(always)]
fn before_tensor(rows: &MaskRows, first_key: usize, count: usize) -> usize {
    rows.context.saturating_sub(first_key).min(count)
}

/// Number of rows, and of keys, of a cell.
const CELL: usize = 16;

/// Keys that are read at a time.
const CHUNK_KEYS: usize = 64 * CELL;

/// Largest number of cells of a sequence: 65536 rows by 65536 keys.
const MAX_CELLS: u64 = 1 << 24;

/// Some key of a cell is hidden from some row.
const HIDDEN: u8 = 1;

/// Some key of a cell is visible to some row.
const VISIBLE: u8 = 2;

/// Whether a mask tensor hides some keys from some rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Coverage {
    /// Every key from every row.
    Hidden,
    /// No key from any row.
    Visible,
    /// Some keys from some rows, or unknown from the summary.
    Mixed,
}

/// A summary of the mask tensor of one sequence, in cells of sixteen rows by sixteen keys: one byte for 256 of the
/// tensor's. It is made once for a call, so that a head need not read the bytes of KV tiles that are hidden or visible
/// as a whole, and covers the keys that rows see by the geometry.
#[derive(Debug)]
pub(crate) struct MaskSummary {
    cells: Vec<u8>,
    /// Number of cells in a row of cells.
    across: usize,
}

impl MaskSummary {
    /// Whether a summary pays: the sequence has enough rows for its mask, one for all heads, to be read often, and at
    /// most [`MAX_CELLS`] cells.
    pub(crate) fn pays(geometry: &MaskGeometry, mask: &MaskRows) -> bool {
        let count = |rows: u64| rows.div_ceil(CELL as u64);
        let (rows, keys) = (geometry.q_len(), geometry.kv_len());
        !mask.differs_by_head() && rows >= CELL as u64 && count(rows).saturating_mul(count(keys)) <= MAX_CELLS
    }

    /// An empty summary for a sequence with this geometry, whose rows are filled by [`MaskSummary::fill`].
    ///
    /// # Errors
    /// There is no host memory for the cells.
    pub(crate) fn new(geometry: &MaskGeometry) -> Result<Self, HostMemoryExhausted> {
        let count = |rows: u64| (rows as usize).div_ceil(CELL);
        let across = count(geometry.kv_len());
        let cells = count(geometry.q_len()).saturating_mul(across);
        Ok(MaskSummary { cells: try_repeat(0, cells)?, across })
    }

    /// The rows of cells.
    pub(crate) fn rows_mut(&mut self) -> impl IndexedParallelIterator<Item = &mut [u8]> {
        self.cells.par_chunks_mut(self.across.max(1))
    }

    /// Bytes of the summary.
    pub(crate) fn bytes(&self) -> usize {
        self.cells.len()
    }

    /// Fills row number `number` of the cells from the mask tensor.
    pub(crate) fn fill(
        cells: &mut [u8],
        number: usize,
        (mask, rows): (&MaskTensor, &MaskRows),
        geometry: &MaskGeometry,
    ) {
        let first = number * CELL;
        let last = (first + CELL).min(geometry.q_len() as usize);
        // Both ends are at most the key length, a usize.
        let keys = geometry.span(first as u64..last as u64);
        let keys = keys.start as usize..keys.end.max(keys.start) as usize;
        let begin = keys.start / CELL * CELL;
        for start in (begin..keys.end).step_by(CHUNK_KEYS) {
            let count = CHUNK_KEYS.min(keys.end - start);
            let (mut most, mut least) = ([0u8; CHUNK_KEYS], [u8::MAX; CHUNK_KEYS]);
            let mut bytes = [0u8; CHUNK_KEYS];
            let bytes = &mut bytes[..count];
            for row in first..last {
                mask.read_row(rows, row, start, bytes);
                for (byte, (most, least)) in bytes.iter().zip(most.iter_mut().zip(&mut least)) {
                    *most = (*most).max(*byte);
                    *least = (*least).min(*byte);
                }
            }
            let both = most[..count].chunks(CELL).zip(least[..count].chunks(CELL));
            for (cell, (most, least)) in cells.iter_mut().skip(start / CELL).zip(both) {
                let hidden = most.iter().any(|&byte| byte != 0);
                let visible = least.contains(&0);
                *cell = if hidden { HIDDEN } else { 0 } | if visible { VISIBLE } else { 0 };
            }
        }
    }

    /// Whether the tensor hides `keys`, each of which some row sees by the geometry, from `rows`.
    pub(crate) fn coverage(&self, rows: Range<u64>, keys: Range<usize>) -> Coverage {
        let across = keys.start / CELL..keys.end.div_ceil(CELL);
        let down = rows.start as usize / CELL..(rows.end as usize).div_ceil(CELL);
        let rows = self.cells.chunks(self.across.max(1));
        let rows = rows.skip(down.start).take(down.len());
        let cells = rows.flat_map(|row| row.get(across.clone()).unwrap_or_default());
        match cells.fold(0, |any, cell| any | cell) {
            HIDDEN => Coverage::Hidden,
            VISIBLE => Coverage::Visible,
            _ => Coverage::Mixed,
        }
    }
}

/// The drop mask of a problem. The [`SequenceTerms`](ascend_spec::attention_problem::SequenceTerms) have the positions
/// of a sequence's bits.
#[derive(Debug)]
pub(super) struct DropMask {
    base: *const u8,
    /// Bytes that may be read.
    bytes: Range<u64>,
}

// SAFETY: the address is only read through, which the contract of `new` allows on any thread.
unsafe impl Send for DropMask {}
// SAFETY: the address is only read through, which the contract of `new` allows on any thread.
unsafe impl Sync for DropMask {}

impl DropMask {
    /// The drop mask of a problem, if it has one.
    ///
    /// # Safety
    ///
    /// As long as the value is used, the bytes of the drop mask that the problem touches may be read.
    pub(super) unsafe fn new(problem: &AttentionProblem<'_>, buffers: &Buffers<'_>) -> Option<Self> {
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
        // SAFETY: the byte may be read, by the contract of `new`; it is within memory, so that its index fits an
        // `isize`.
        let byte = unsafe { self.base.wrapping_add(byte as usize).read() };
        byte >> (bit % 8) & 1 != 0
    }
}
