//! The keys of a list: each anywhere in a tensor, in the list's order.

/// Batch entry or block, and row, of each key; `None` where the cache does not have its block.
#[derive(Debug)]
pub(crate) struct ListedRows(Vec<Option<(usize, usize)>>);

impl ListedRows {
    pub(crate) fn new(rows: Vec<Option<(usize, usize)>>) -> Self {
        ListedRows(rows)
    }

    /// Number of keys.
    pub(crate) fn len(&self) -> usize {
        self.0.len()
    }

    /// Where a key is.
    #[inline(always)]
    pub(crate) fn find(&self, key: usize) -> Option<(usize, usize)> {
        self.0.get(key).copied().flatten()
    }

    /// Number of keys from `key` on, at most `most`, that follow each other in the tensor as they do in the list.
    #[inline(always)]
    pub(crate) fn run(&self, key: usize, most: usize) -> usize {
        let next = self.0[key..].windows(2).take(most.saturating_sub(1));
        let follows = |pair: &&[Option<(usize, usize)>]| match **pair {
            [Some((block, row)), Some(next)] => next == (block, row + 1),
            _ => false,
        };
        1 + next.take_while(follows).count()
    }
}
