//! The keys of a list: blocks of rows, each anywhere in a tensor, in the list's order.

/// The blocks that hold the keys, each of `size` rows but for the last.
#[derive(Debug)]
pub(crate) struct ListedRows {
    /// Batch entry or block of a cache, and first row, of each; `None` where the cache does not have its block.
    blocks: Vec<Option<(usize, usize)>>,
    /// Rows of a block.
    size: usize,
    /// Number of keys.
    len: usize,
}

impl ListedRows {
    /// Single rows.
    pub(crate) fn new(rows: Vec<Option<(usize, usize)>>) -> Self {
        let len = rows.len();
        ListedRows { blocks: rows, size: 1, len }
    }

    /// The first `len` keys of blocks of `size` rows, which begin at these rows.
    pub(crate) fn blocks(blocks: Vec<Option<(usize, usize)>>, size: usize, len: usize) -> Self {
        let size = size.max(1);
        let len = len.min(blocks.len().saturating_mul(size));
        ListedRows { blocks, size, len }
    }

    /// Number of keys.
    pub(crate) fn len(&self) -> usize {
        self.len
    }

    /// The block of a key, and its row there. Division takes long, and most lists have blocks of one row.
    #[inline(always)]
    fn place(&self, key: usize) -> (usize, usize) {
        if self.size == 1 { (key, 0) } else { (key / self.size, key % self.size) }
    }

    /// Where a key is.
    #[inline(always)]
    pub(crate) fn find(&self, key: usize) -> Option<(usize, usize)> {
        let (block, row) = self.place(key);
        let (batch, first) = self.blocks.get(block).copied().flatten()?;
        Some((batch, first + row))
    }

    /// Number of keys from `key` on that follow each other in the tensor as they do in the list, counted in whole
    /// blocks until there are `most`.
    #[inline(always)]
    pub(crate) fn run(&self, key: usize, most: usize) -> usize {
        let (block, row) = self.place(key);
        let first = self.size - row;
        let more = self.place(most.saturating_sub(first) + self.size - 1).0;
        let next = self.blocks[block..].windows(2).take(more);
        let follows = |pair: &&[Option<(usize, usize)>]| match **pair {
            [Some((batch, row)), Some(next)] => next == (batch, row + self.size),
            _ => false,
        };
        first + self.size * next.take_while(follows).count()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn runs_end_where_the_next_block_is_elsewhere() {
        let blocks = [0, 4, 12, 16].map(|first| Some((1, first)));
        let rows = ListedRows::blocks(blocks.to_vec(), 4, 15);
        assert_eq!(rows.len(), 15);
        let found = [0, 5, 8, 14].map(|key| rows.find(key));
        assert_eq!(found, [0, 5, 12, 18].map(|row| Some((1, row))));
        assert_eq!([0, 3, 6, 8, 13].map(|key| rows.run(key, 100)), [8, 5, 2, 8, 3]);
        assert_eq!(rows.run(0, 3), 4);
        let single = ListedRows::new(vec![Some((0, 7)), Some((0, 8)), None]);
        assert_eq!([0, 1, 2].map(|key| single.run(key, 3)), [2, 1, 1]);
        assert_eq!(ListedRows::blocks(vec![None], 4, 9).len(), 4);
    }
}
