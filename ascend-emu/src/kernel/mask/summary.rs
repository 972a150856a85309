//! A summary of the mask tensor, in cells of sixteen rows by sixteen keys.
//!
//! It is made once for a call, so that a head need not read the bytes of KV tiles that are hidden or visible as a
//! whole. It takes one byte for 256 of the tensor's.

use crate::host_memory::{HostMemoryExhausted, try_repeat};
use crate::kernel::mask::tensor::MaskTensor;
use ascend_spec::MaskGeometry;
use ascend_spec::attention_problem::MaskRows;
use rayon::prelude::*;
use std::ops::Range;

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

/// The summary of the mask tensor of one sequence. It covers the keys that rows see by the geometry.
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
        !mask.differs_by_head()
            && rows >= CELL as u64
            && count(rows).saturating_mul(count(keys)) <= MAX_CELLS
    }

    /// An empty summary for a sequence with this geometry, whose rows are filled by [`MaskSummary::fill`].
    ///
    /// # Errors
    /// There is no host memory for the cells.
    pub(crate) fn new(geometry: &MaskGeometry) -> Result<Self, HostMemoryExhausted> {
        let count = |rows: u64| (rows as usize).div_ceil(CELL);
        let across = count(geometry.kv_len());
        let cells = count(geometry.q_len()).saturating_mul(across);
        Ok(MaskSummary {
            cells: try_repeat(0, cells)?,
            across,
        })
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
        (mask, at): (&MaskTensor, &MaskRows),
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
                mask.read_row(at, row, start, bytes);
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
