//! The block table of a paged cache: the blocks that hold the keys of each sequence.

use crate::host_memory::{HostMemoryExhausted, try_with_capacity};
use crate::kernel::Buffers;
use crate::kernel::dequantise::scale_grid::ScalarTensor;
use ascend_spec::attention_problem::{AttentionProblem, Pages};
use std::fmt;

/// An entry of the block table that names no block of the cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct BadBlock {
    /// Sequence: row of the table.
    pub sequence: usize,
    /// Column of the table.
    pub column: usize,
    /// The entry; `None` if the table has no such entry.
    pub block: Option<i64>,
    /// Blocks of the cache.
    pub blocks: usize,
}

impl fmt::Display for BadBlock {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let BadBlock { sequence, column, .. } = self;
        match self.block {
            Some(block) => write!(f, "block table entry [{sequence}, {column}] names block {block} of {}", self.blocks),
            None => write!(f, "the block table has no entry [{sequence}, {column}]"),
        }
    }
}

/// The blocks of one sequence, in order.
#[derive(Debug)]
pub(crate) struct BlockIds {
    /// `None` for entries that name no block: their keys count as zeros.
    blocks: Vec<Option<u32>>,
    size: usize,
}

impl BlockIds {
    /// Reads the row of the table that belongs to a sequence with `keys` keys in the cache.
    ///
    /// # Errors
    /// There is no host memory for the blocks.
    ///
    /// # Safety
    ///
    /// The bytes of the block table may be read.
    pub(crate) unsafe fn read(
        buffers: &Buffers<'_>,
        pages: &Pages,
        sequence: usize,
        keys: usize,
    ) -> Result<Self, HostMemoryExhausted> {
        let size = pages.block_size.max(1);
        let mut blocks = try_with_capacity(keys.div_ceil(size))?;
        // SAFETY: the caller keeps this contract.
        unsafe {
            each_entry(buffers, pages, sequence, keys, &mut |entry| {
                blocks.push(entry.ok());
            });
        }
        Ok(BlockIds { blocks, size })
    }

    /// Number of rows in a block.
    pub(crate) fn size(&self) -> usize {
        self.size
    }

    /// Block of a key, and row in the block; `None` if the table names no block of the cache for it.
    #[inline(always)]
    pub(crate) fn find(&self, key: usize) -> Option<(usize, usize)> {
        let block = self.blocks.get(key / self.size).copied().flatten()?;
        Some((block as usize, key % self.size))
    }
}

/// Calls `visit` with the entries of a sequence's row of the table, in order.
///
/// # Safety
///
/// As for [`BlockIds::read`].
unsafe fn each_entry(
    buffers: &Buffers<'_>,
    pages: &Pages,
    sequence: usize,
    keys: usize,
    visit: &mut dyn FnMut(Result<u32, BadBlock>),
) {
    // SAFETY: the caller keeps this contract.
    let table = unsafe { ScalarTensor::new(buffers, &pages.table) };
    let step = |index: usize, stride: i64| (index as i64).saturating_mul(stride);
    let row = pages.table.offset.saturating_add(step(sequence, pages.row));
    for column in 0..keys.div_ceil(pages.block_size.max(1)) {
        let block = table.integer(row.saturating_add(step(column, pages.column))).filter(|_| column < pages.columns);
        let valid = block.and_then(|block| u32::try_from(block).ok()).filter(|&block| (block as usize) < pages.blocks);
        visit(valid.ok_or(BadBlock { sequence, column, block, blocks: pages.blocks }));
    }
}

/// Finds the first entry of the block table that a problem reads and that names no block of the cache.
///
/// # Safety
///
/// The bytes of the block table may be read.
pub(crate) unsafe fn first_bad(problem: &AttentionProblem<'_>, buffers: &Buffers<'_>) -> Option<BadBlock> {
    let pages = problem.pages.as_ref()?;
    let mut bad = None;
    for sequence in 0..problem.batch {
        let keys = problem.kv_len(sequence);
        // SAFETY: the caller keeps this contract.
        unsafe {
            each_entry(buffers, pages, sequence, keys, &mut |entry| {
                bad = bad.or(entry.err());
            });
        }
    }
    bad
}
