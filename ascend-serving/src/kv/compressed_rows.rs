//! The places of the compressed tokens of native sparse attention in the blocks of a pool.

use std::ops::Range;

use ascend_attention::Violation;
use ascend_attention::spec::ops::native_sparse::Compression;

use crate::rules;

/// The rows of compressed tokens in each block of a pool.
///
/// The last compressed tokens that begin in a block end in the next one. Sequences that share a prefix share its
/// blocks and go on differently, so that a block may hold only what follows from its own tokens and those before it.
/// A compressed token that ends in the next block is therefore stored there, in a page of its own, with a copy of the
/// compressed tokens of the page that it would complete. Blocks of 256 tokens, `l` of 32 and `d` of 16:
///
/// ```text
/// block 0: tokens 0..256    own pages: compressed tokens 0..15 (0 to 14), one row empty
/// block 1: tokens 256..512  own pages: 16..31                  last page: copies of 0..15, and token 15
/// block 2: tokens 512..     own pages: 32..                    last page: copies of 16..31, and token 31
/// ```
///
/// Attention reads the last page of the next block, where there is one, in place of the last of a block's own.
#[derive(Clone, Copy, Debug)]
pub(crate) struct CompressedRows {
    compression: Compression,
    block_size: usize,
}

impl CompressedRows {
    /// Compressed tokens of a page: the fewest that attention to them takes.
    pub(crate) const PAGE: usize = 16;

    /// The rows in blocks of `block_size` tokens. The sizes of a compression are those that its operator takes, so that
    /// less than a page of compressed tokens ends in the next block.
    ///
    /// # Errors
    /// [`NATIVE_BLOCK`](crate::rules::NATIVE_BLOCK) for blocks that are no whole pages.
    pub(crate) fn new(compression: Compression, block_size: usize) -> Result<Self, Violation> {
        let page = compression.stride * Self::PAGE;
        match block_size > 0 && block_size.is_multiple_of(page) {
            true => Ok(Self { compression, block_size }),
            false => Err(Violation::new(
                &rules::NATIVE_BLOCK,
                format_args!("blocks of {block_size} tokens, with a compressed token every {}", compression.stride),
                format_args!("a multiple of {page} tokens"),
                format_args!("make the cache with blocks of {page} tokens"),
            )),
        }
    }

    /// Compressed tokens that begin in a block.
    fn own(&self) -> usize {
        self.block_size / self.compression.stride
    }

    /// Rows of a block of the pool.
    pub(crate) fn rows(&self) -> usize {
        self.own() + Self::PAGE
    }

    /// Pages of a block of the pool.
    pub(crate) fn pages(&self) -> usize {
        self.rows() / Self::PAGE
    }

    /// The row that a compressed token of a sequence is written to, of all rows of the cache.
    pub(crate) fn slot(&self, blocks: &[usize], compressed: usize) -> usize {
        let (column, place) = (compressed / self.own(), compressed % self.own());
        let last = self.compression.reach(compressed + 1) - 1;
        match last / self.block_size == column {
            true => blocks[column] * self.rows() + place,
            false => blocks[column + 1] * self.rows() + Self::PAGE + place,
        }
    }

    /// The pages from which attention reads the compressed tokens of a sequence.
    pub(crate) fn table(&self, blocks: &[usize]) -> Vec<usize> {
        let pages = self.pages();
        let mut table: Vec<usize> = Vec::with_capacity(blocks.len() * (pages - 1));
        for (column, block) in blocks.iter().enumerate() {
            if column > 0
                && let Some(last) = table.last_mut()
            {
                *last = (block + 1) * pages - 1;
            }
            table.extend(block * pages..(block + 1) * pages - 1);
        }
        table
    }

    /// The rows that are copied, from and to, when a sequence gets these tokens: to each block that they begin, from
    /// the block before. Those that end in the new block are left out.
    pub(crate) fn copies(&self, blocks: &[usize], tokens: Range<usize>) -> impl Iterator<Item = [Range<usize>; 2]> {
        let begun = tokens.start.div_ceil(self.block_size).max(1)..tokens.end.div_ceil(self.block_size);
        let copied = Self::PAGE - (self.compression.block - 1) / self.compression.stride;
        let rows = self.rows();
        begun.map(move |column| {
            let from = blocks[column - 1] * rows + self.own() - Self::PAGE;
            let to = (blocks[column] + 1) * rows - Self::PAGE;
            [from..from + copied, to..to + copied]
        })
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test fails by panicking")]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn blocks_are_whole_pages() {
        let compression = Compression { block: 32, stride: 16 };
        for (block_size, taken) in [(0, false), (128, false), (256, true), (384, false), (512, true)] {
            assert_eq!(CompressedRows::new(compression, block_size).is_ok(), taken, "{block_size}");
        }
        let error = CompressedRows::new(Compression { block: 64, stride: 48 }, 256).unwrap_err();
        assert_eq!((error.rule, &*error.allowed), (&rules::NATIVE_BLOCK, "a multiple of 768 tokens"));
    }

    proptest! {
        /// However a sequence grows, its table reads each compressed token where it was written, and each row of a
        /// block holds what follows from the tokens up to the end of the block.
        #[test]
        fn tables_read_what_was_written(
            (block, stride) in (1usize..9).prop_flat_map(|block| (Just(16 * block), 1..=block.min(4))),
            pages in 1usize..4,
            steps in prop::collection::vec(1usize..700, 1..6),
        ) {
            let compression = Compression { block, stride: 16 * stride };
            let block_size = compression.stride * CompressedRows::PAGE * pages;
            let layout = CompressedRows::new(compression, block_size).unwrap();
            let mut cache = vec![None; 64 * layout.rows()];
            let mut len = 0;
            for new in steps {
                let cached = len;
                len += new;
                let blocks: Vec<usize> = (0..len.div_ceil(block_size)).map(|column| (column * 37 + 5) % 64).collect();
                for compressed in compression.count(cached)..compression.count(len) {
                    let slot = layout.slot(&blocks, compressed);
                    let last = compression.reach(compressed + 1) - 1;
                    prop_assert_eq!(slot / layout.rows(), blocks[last / block_size]);
                    cache[slot] = Some(compressed);
                }
                for [from, to] in layout.copies(&blocks, cached..len) {
                    let page = cache[from].to_vec();
                    cache[to].clone_from_slice(&page);
                }
                let table = layout.table(&blocks);
                for compressed in 0..compression.count(len) {
                    let page = table[compressed / CompressedRows::PAGE];
                    let slot = page * CompressedRows::PAGE + compressed % CompressedRows::PAGE;
                    prop_assert_eq!(cache[slot], Some(compressed), "of {} tokens", len);
                }
            }
        }
    }
}
