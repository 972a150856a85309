//! Blocks of query rows, and the keys that the mask names for them.

use super::rules::{CONTENTS, ROWS_WITHOUT_KEYS};
use super::{BlockSparseCall, BlockSparseProblem, BlockSparseSequence};
use crate::Violation;
use crate::rule::broken;
use std::fmt;
use std::ops::Range;

/// A row of `blockSparseMask` by which a block of query rows sees other keys than the mask seems to say.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BlockFault {
    /// Number of the sequence.
    pub sequence: usize,
    /// The query head.
    pub head: usize,
    /// Number of the block of rows in its sequence.
    pub row_block: usize,
    /// What is wrong with its bytes.
    pub kind: BlockFaultKind,
}

/// What is wrong with the bytes of a block of rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BlockFaultKind {
    /// The byte of a block that begins past the last key of the sequence is set.
    Beyond {
        /// Number of the block of keys.
        block: usize,
        /// Keys of the sequence.
        keys: usize,
    },
    /// The byte of this block is neither 0 nor 1.
    Value {
        /// Number of the block of keys.
        block: usize,
        /// The byte.
        byte: u8,
    },
    /// They name no block, so that the rows are not written.
    Empty,
}

impl fmt::Display for BlockFault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let BlockFault { sequence, head, row_block, kind } = self;
        write!(f, "[{sequence}, {head}, {row_block}")?;
        match kind {
            BlockFaultKind::Beyond { block, keys } => {
                write!(f, ", {block}] names a block behind the {keys} keys of the sequence")
            }
            BlockFaultKind::Value { block, byte } => {
                write!(f, ", {block}] is {}, which counts as 1, allowed: 0 or 1", byte.cast_signed())
            }
            BlockFaultKind::Empty => f.write_str("] names no block, and its rows are not written"),
        }
    }
}

/// A block of query rows of a sequence and a head.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RowBlock {
    /// The sequence.
    pub sequence: BlockSparseSequence,
    /// The query head.
    pub head: usize,
    /// Number of the block in the sequence.
    pub number: usize,
    /// Its rows, counted in the sequence.
    pub rows: Range<usize>,
}

impl BlockSparseProblem {
    /// All blocks of rows of the call, whose problem this is.
    pub fn row_blocks<'c>(&self, call: &BlockSparseCall<'c>) -> impl Iterator<Item = RowBlock> + use<'c> {
        let (heads, size) = (self.heads, self.block[0].max(1));
        let sequences = self.sequences(call).filter(|sequence| sequence.queries > 0);
        let heads = sequences.flat_map(move |sequence| (0..heads).map(move |head| (sequence, head)));
        heads.flat_map(move |(sequence, head)| {
            let firsts = (0..sequence.queries).step_by(size).enumerate();
            firsts.map(move |(number, first)| RowBlock {
                sequence,
                head,
                number,
                rows: first..sequence.queries.min(first.saturating_add(size)),
            })
        })
    }

    /// Number of bytes of the mask.
    pub fn mask_bytes(&self) -> usize {
        let [rows, keys] = self.mask_blocks;
        let sizes = [self.heads, rows, keys];
        sizes.into_iter().fold(self.batch, usize::saturating_mul)
    }

    /// The bytes of the mask for a block of rows, one for each block of keys; none where the mask ends before.
    pub fn bytes<'m>(&self, block: &RowBlock, mask: &'m [u8]) -> &'m [u8] {
        let [rows, keys] = self.mask_blocks;
        let of_head = (block.sequence.index.saturating_mul(self.heads)).saturating_add(block.head);
        let of_rows = of_head.saturating_mul(rows).saturating_add(block.number);
        let bytes = mask.get(of_rows.saturating_mul(keys)..);
        bytes.and_then(|bytes| bytes.get(..keys)).unwrap_or_default()
    }

    /// The keys of the blocks that the bytes of a block of rows name, among the first `keys` of their sequence, in
    /// order. Every block but the one with the last key has the size of a block.
    pub fn selected<'m>(&self, bytes: &'m [u8], keys: usize) -> impl Iterator<Item = Range<usize>> + Clone + use<'m> {
        let size = self.block[1].max(1);
        let blocks = (0..keys).step_by(size).zip(bytes);
        let named = blocks.filter(|&(_, &byte)| byte != 0);
        named.map(move |(first, _)| first..keys.min(first.saturating_add(size)))
    }

    /// What is first wrong with the bytes of a block of rows, whose sequence has `keys` keys.
    fn fault(&self, bytes: &[u8], keys: usize) -> Option<BlockFaultKind> {
        let own = keys.div_ceil(self.block[1].max(1)).min(bytes.len());
        if let Some(behind) = bytes[own..].iter().position(|&byte| byte != 0) {
            let block = own + behind;
            return Some(BlockFaultKind::Beyond { block, keys });
        }
        if let Some(block) = bytes.iter().position(|&byte| byte > 1) {
            let byte = bytes[block];
            return Some(BlockFaultKind::Value { block, byte });
        }
        bytes.iter().all(|&byte| byte == 0).then_some(BlockFaultKind::Empty)
    }

    /// What is wrong with the bytes of the mask of the call, whose problem this is, for each block of rows.
    pub fn faults<'m>(&self, call: &BlockSparseCall<'m>, mask: &'m [u8]) -> impl Iterator<Item = BlockFault> + use<'m> {
        let problem = *self;
        self.row_blocks(call).filter_map(move |block| {
            let kind = problem.fault(problem.bytes(&block, mask), block.sequence.keys)?;
            Some(BlockFault { sequence: block.sequence.index, head: block.head, row_block: block.number, kind })
        })
    }

    /// Checks that the mask of the call, whose problem this is, names no block past the keys of a sequence. `None` is
    /// a mask whose bytes are not known.
    ///
    /// # Errors
    /// [`Violation`] by [`CONTENTS`], also for a mask that is not known and could name such a block.
    pub fn checked_mask(&self, call: &BlockSparseCall<'_>, mask: Option<&[u8]>) -> Result<(), Violation> {
        let blocks = |keys: usize| keys.div_ceil(self.block[1].max(1));
        // Without lengths each sequence has all keys.
        let mut sequences = self.sequences(call);
        let ragged = call.actual_seq_lengths_kv.is_some()
            && sequences.any(|sequence| blocks(sequence.keys) < self.mask_blocks[1]);
        let Some(mask) = mask.filter(|_| ragged) else {
            return match ragged {
                false => Ok(()),
                true => Err(broken(
                    &CONTENTS,
                    "a mask that the host does not know, for sequences with fewer blocks of keys than it has",
                    "masks that the host knows, or sequences with as many blocks of keys",
                    "make the mask by `BlockMask::upload`, or a call for sequences with the same number of blocks",
                )),
            };
        };
        let mut faults = self.faults(call, mask);
        let beyond = |fault: &BlockFault| matches!(fault.kind, BlockFaultKind::Beyond { .. });
        match faults.find(beyond) {
            None => Ok(()),
            Some(fault) => Err(CONTENTS.broken(fault, "blocks of the sequence's keys")),
        }
    }

    /// The lint of rows for which the mask of the call, whose problem this is, names no block of keys.
    ///
    /// # Errors
    /// [`Violation`] by [`ROWS_WITHOUT_KEYS`].
    pub fn lint_mask(&self, call: &BlockSparseCall<'_>, mask: &[u8]) -> Result<(), Violation> {
        let mut blocks = self.row_blocks(call);
        let empty = blocks.find(|block| self.bytes(block, mask).iter().all(|&byte| byte == 0));
        empty.map_or(Ok(()), |RowBlock { sequence, head, number, .. }| {
            let kind = BlockFaultKind::Empty;
            let fault = BlockFault { sequence: sequence.index, head, row_block: number, kind };
            Err(ROWS_WITHOUT_KEYS.broken(fault, "a block of keys for each block of rows"))
        })
    }
}
