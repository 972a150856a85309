//! What a mask tensor hides, in cells of sixteen rows by sixteen keys: made once for a call, so that each head need not read
//! the bytes of tiles again that are hidden or visible as a whole.
//!
//! A lower-triangular tensor of 2048 rows, of eight heads, took a fifth longer than the same mask said by its mode while each
//! head read all of it. The summary takes a byte for 256 of the tensor's.

use super::attention::Sequence;
use super::mask::MaskBytes;
use std::ops::Range;

/// Rows, and keys, of a cell.
const SIDE: usize = 16;

/// Keys that are read at once.
const STRETCH: usize = 64 * SIDE;

/// Cells of a sequence at most: those of 65536 rows and as many keys.
const MOST_CELLS: u64 = 1 << 24;

/// Some key of a cell is hidden from some row.
const HIDDEN: u8 = 1;

/// Some key of a cell is visible to some row.
const VISIBLE: u8 = 2;

/// How much of some keys a mask tensor hides from some rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Cover {
    All,
    Nothing,
    Part,
}

/// The cells of the rows and keys of one sequence, as far as its geometry lets rows see keys.
#[derive(Debug)]
pub(super) struct Cells {
    cells: Vec<u8>,
    /// Cells from one row of them to the next.
    across: usize,
}

impl Cells {
    /// Whether a sequence has enough rows for its mask to be read often, and not so many that this would take memory.
    pub(super) fn worth(sequence: &Sequence) -> bool {
        let count = |rows: u64| rows.div_ceil(SIDE as u64);
        let (rows, keys) = (sequence.geometry.q_len(), sequence.geometry.kv_len());
        rows >= SIDE as u64 && count(rows).saturating_mul(count(keys)) <= MOST_CELLS
    }

    /// Room for the cells of a sequence, and the rows of cells, to be filled each by [`Cells::fill`].
    pub(super) fn new(sequence: &Sequence) -> Self {
        let count = |rows: u64| (rows as usize).div_ceil(SIDE);
        let across = count(sequence.geometry.kv_len());
        Cells {
            cells: vec![0; count(sequence.geometry.q_len()).saturating_mul(across)],
            across,
        }
    }

    /// The rows of cells.
    pub(super) fn rows_mut(&mut self) -> impl Iterator<Item = &mut [u8]> {
        self.cells.chunks_mut(self.across.max(1))
    }

    /// Bytes that they take.
    pub(super) fn bytes(&self) -> usize {
        self.cells.len()
    }

    /// Fills row number `number` of the cells.
    pub(super) fn fill(cells: &mut [u8], number: usize, mask: &MaskBytes, sequence: &Sequence) {
        let Some(at) = &sequence.mask else {
            return;
        };
        let first = number * SIDE;
        let last = (first + SIDE).min(sequence.geometry.q_len() as usize);
        let keys = 0..sequence.geometry.kv_len() as usize;
        let keys = sequence.span(first as u64..last as u64, &keys);
        let begin = keys.start / SIDE * SIDE;
        for start in (begin..keys.end).step_by(STRETCH) {
            let count = STRETCH.min(keys.end - start);
            let (mut most, mut least) = ([0u8; STRETCH], [u8::MAX; STRETCH]);
            let mut bytes = [0u8; STRETCH];
            let bytes = &mut bytes[..count];
            for row in first..last {
                mask.read_row(at, row, start, bytes);
                for (byte, (most, least)) in bytes.iter().zip(most.iter_mut().zip(&mut least)) {
                    *most = (*most).max(*byte);
                    *least = (*least).min(*byte);
                }
            }
            let both = most[..count].chunks(SIDE).zip(least[..count].chunks(SIDE));
            for (cell, (most, least)) in cells.iter_mut().skip(start / SIDE).zip(both) {
                let hidden = most.iter().any(|&byte| byte != 0);
                let visible = least.contains(&0);
                *cell = if hidden { HIDDEN } else { 0 } | if visible { VISIBLE } else { 0 };
            }
        }
    }

    /// What the tensor does to these rows and keys, of which some row sees each by the geometry.
    pub(super) fn cover(&self, rows: Range<u64>, keys: Range<usize>) -> Cover {
        let across = keys.start / SIDE..keys.end.div_ceil(SIDE);
        let down = rows.start as usize / SIDE..(rows.end as usize).div_ceil(SIDE);
        let rows = self.cells.chunks(self.across.max(1));
        let rows = rows.skip(down.start).take(down.len());
        let cells = rows.flat_map(|row| row.get(across.clone()).unwrap_or_default());
        match cells.fold(0, |any, cell| any | cell) {
            HIDDEN => Cover::All,
            VISIBLE => Cover::Nothing,
            _ => Cover::Part,
        }
    }
}
