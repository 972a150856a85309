//! Keys and values that are not stored per sequence: the pages of a cache, and a shared prefix.

use super::{Rows, SmallTensor};

/// A paged cache and its block table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Pages {
    /// Number of tokens in a block.
    pub block_size: usize,
    /// Number of blocks in the cache; every block id is below it.
    pub blocks: usize,
    /// Block table, `INT32`.
    pub table: SmallTensor,
    /// Elements of the table from one sequence to the next.
    pub row: i64,
    /// Elements of the table from one block of a sequence to the next.
    pub column: i64,
    /// Number of blocks that a row of the table can name.
    pub columns: usize,
}

/// A shared prefix: keys and values that precede those of every sequence.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Prefix {
    /// Number of valid rows.
    pub len: usize,
    /// Key rows, of batch 0.
    pub key: Rows,
    /// Value rows, of batch 0.
    pub value: Rows,
}
