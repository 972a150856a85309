//! Block tables: which blocks of a paged cache hold the keys of a sequence.

use super::Buffers;
use super::factors::Numbers;
use ascend_spec::DType;
use ascend_spec::fia::{Operand, Pages, Problem};
use std::fmt;

/// An entry of the block table that names no block of the cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BadBlock {
    /// Sequence: row of the table.
    pub sequence: usize,
    /// Column of the table.
    pub column: usize,
    /// What the entry says; `None` if the table has no such entry.
    pub block: Option<i64>,
    /// Blocks of the cache.
    pub blocks: usize,
}

impl fmt::Display for BadBlock {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let BadBlock {
            sequence, column, ..
        } = self;
        match self.block {
            Some(block) => write!(
                f,
                "block table entry [{sequence}, {column}] names block {block} of {}",
                self.blocks
            ),
            None => write!(f, "the block table has no entry [{sequence}, {column}]"),
        }
    }
}

/// The blocks of one sequence.
#[derive(Debug)]
pub(super) struct Blocks {
    /// `None` for entries that name no block: their keys count as zeros.
    blocks: Vec<Option<u32>>,
    size: usize,
}

impl Blocks {
    /// Reads the row of the table that belongs to a sequence with `keys` keys in the cache.
    ///
    /// # Safety
    ///
    /// The bytes of the block table may be read.
    pub(super) unsafe fn read(
        problem: &Problem<'_>,
        buffers: &Buffers<'_>,
        pages: &Pages,
        sequence: usize,
        keys: usize,
    ) -> Self {
        let mut blocks = Vec::new();
        // SAFETY: the caller keeps this contract.
        unsafe {
            each_entry(problem, buffers, pages, sequence, keys, &mut |entry| {
                blocks.push(entry.ok());
            });
        }
        Blocks {
            blocks,
            size: pages.block_size.max(1),
        }
    }

    /// Rows of a block.
    pub(super) fn size(&self) -> usize {
        self.size
    }

    /// Block and row in it of a key.
    #[inline(always)]
    pub(super) fn find(&self, key: usize) -> Option<(usize, usize)> {
        let block = self.blocks.get(key / self.size).copied().flatten()?;
        Some((block as usize, key % self.size))
    }
}

/// The entries of a sequence's row of the table, in order.
///
/// # Safety
///
/// As for [`Blocks::read`].
unsafe fn each_entry(
    problem: &Problem<'_>,
    buffers: &Buffers<'_>,
    pages: &Pages,
    sequence: usize,
    keys: usize,
    visit: &mut dyn FnMut(Result<u32, BadBlock>),
) {
    // SAFETY: the caller keeps this contract.
    let table = unsafe { Numbers::new(problem.call, buffers, Operand::BlockTable, DType::Int32) };
    let step = |index: usize, stride: i64| (index as i64).saturating_mul(stride);
    let row = pages.offset.saturating_add(step(sequence, pages.row));
    for column in 0..keys.div_ceil(pages.block_size.max(1)) {
        let block = table
            .integer(row.saturating_add(step(column, pages.column)))
            .filter(|_| column < pages.columns);
        let valid = block
            .and_then(|block| u32::try_from(block).ok())
            .filter(|&block| (block as usize) < pages.blocks);
        visit(valid.ok_or(BadBlock {
            sequence,
            column,
            block,
            blocks: pages.blocks,
        }));
    }
}

/// The first entry of the block table that is looked up and names no block.
///
/// # Safety
///
/// The bytes of the block table may be read.
pub(super) unsafe fn first_bad(problem: &Problem<'_>, buffers: &Buffers<'_>) -> Option<BadBlock> {
    let pages = problem.pages.as_ref()?;
    let mut bad = None;
    for sequence in 0..problem.batch {
        let keys = problem.kv_len(sequence);
        // SAFETY: the caller keeps this contract.
        unsafe {
            each_entry(problem, buffers, pages, sequence, keys, &mut |entry| {
                bad = bad.or(entry.err());
            });
        }
    }
    bad
}
