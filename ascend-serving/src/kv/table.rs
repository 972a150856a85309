//! Block tables on the host: for each request the blocks of its tokens.

use serde::{Deserialize, Serialize};

use ascend_attention::Violation;

use crate::rules::{self, room};

use super::slot::check_block_size;

/// Block ids `[requests, columns]`, row-major: CANN's `blockTable`, `page_table` elsewhere. Entries after a request's
/// blocks are 0. They become INT32, as the operators take them, when they are copied to the device
/// ([`PagedKvCache::block_table`](crate::kv::PagedKvCache::block_table)).
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "TableFields")]
pub struct PageTable {
    requests: usize,
    columns: usize,
    blocks: Vec<usize>,
}

#[derive(Deserialize)]
struct TableFields {
    requests: usize,
    columns: usize,
    blocks: Vec<usize>,
}

impl TryFrom<TableFields> for PageTable {
    type Error = Violation;

    fn try_from(fields: TableFields) -> Result<Self, Violation> {
        Self::new(fields.requests, fields.columns, fields.blocks)
    }
}

impl PageTable {
    /// Most entries of a table, and most rows.
    pub const MAX_ENTRIES: usize = 1 << 28;

    /// A table from its elements.
    ///
    /// # Errors
    /// [`INDEX_SHAPE`](crate::rules::INDEX_SHAPE) unless there are `requests * columns` elements, and for more rows
    /// or entries than [`MAX_ENTRIES`](Self::MAX_ENTRIES).
    pub fn new(requests: usize, columns: usize, blocks: Vec<usize>) -> Result<Self, Violation> {
        check_size(requests, columns)?;
        if requests * columns != blocks.len() {
            return Err(Violation::new(
                &rules::INDEX_SHAPE,
                format_args!("{} blocks", blocks.len()),
                format_args!("{requests} rows of {columns}"),
                "pad each row to the table's columns",
            ));
        }
        Ok(Self { requests, columns, blocks })
    }

    /// A table as wide as its longest row.
    ///
    /// # Errors
    /// [`INDEX_SHAPE`](crate::rules::INDEX_SHAPE) for a table of more than [`MAX_ENTRIES`](Self::MAX_ENTRIES), or
    /// one that does not fit in the host's memory: one long row makes all rows long.
    pub fn from_rows<R: AsRef<[usize]>>(rows: &[R]) -> Result<Self, Violation> {
        let widths = rows.iter().map(|row| row.as_ref().len());
        let columns = widths.fold(0, usize::max);
        let mut table = Self::default();
        table.reset(columns);
        table.room(rows.len())?;
        for row in rows {
            table.push_cut(row.as_ref());
        }
        Ok(table)
    }

    /// Removes every row and sets the width. Keeps the memory.
    pub(crate) fn reset(&mut self, columns: usize) {
        (self.requests, self.columns) = (0, columns);
        self.blocks.clear();
    }

    /// Reserves memory for `rows` rows of the table's width.
    ///
    /// # Errors
    /// [`INDEX_SHAPE`](crate::rules::INDEX_SHAPE) for more entries than a table has, or more than the host has
    /// memory for.
    pub(crate) fn room(&mut self, rows: usize) -> Result<(), Violation> {
        check_size(self.requests + rows, self.columns)?;
        room(
            &mut self.blocks,
            rows * self.columns,
            &rules::INDEX_SHAPE,
            "put requests with long rows into a table of their own",
        )
    }

    /// Fills the rows with 0 up to `columns` columns, if they have fewer.
    ///
    /// # Errors
    /// As for [`PageTable::room`]; the table is unchanged then.
    pub(crate) fn widen(&mut self, columns: usize) -> Result<(), Violation> {
        if columns <= self.columns {
            return Ok(());
        }
        let mut wider = Self::default();
        wider.reset(columns);
        wider.room(self.requests)?;
        for row in self.rows() {
            wider.push_cut(row);
        }
        *self = wider;
        Ok(())
    }

    /// Adds a row, cut or filled with 0 to the table's width. Reserve [`room`](Self::room) for it before.
    pub(crate) fn push_cut(&mut self, row: &[usize]) {
        self.requests += 1;
        let used = row.len().min(self.columns);
        self.blocks.extend_from_slice(&row[..used]);
        self.blocks.resize(self.requests * self.columns, 0);
    }

    /// Number of rows.
    pub fn requests(&self) -> usize {
        self.requests
    }

    /// Number of columns.
    pub fn columns(&self) -> usize {
        self.columns
    }

    /// The elements, row-major.
    pub fn blocks(&self) -> &[usize] {
        &self.blocks
    }

    /// A row.
    pub fn row(&self, request: usize) -> Option<&[usize]> {
        (request < self.requests).then(|| {
            let first = request * self.columns;
            &self.blocks[first..first + self.columns]
        })
    }

    /// The rows, in order.
    pub(crate) fn rows(&self) -> impl Iterator<Item = &[usize]> {
        (0..self.requests).filter_map(|request| self.row(request))
    }

    /// The blocks that a request of `len` tokens uses.
    ///
    /// # Errors
    /// [`TABLE_ROW`](crate::rules::TABLE_ROW) for a request without a row, or a row too short;
    /// [`POOL_SIZE`](crate::rules::POOL_SIZE) for a block size that is 0 or no INT32.
    pub fn used(&self, request: usize, len: usize, block_size: usize) -> Result<&[usize], Violation> {
        check_block_size(block_size)?;
        let needed = len.div_ceil(block_size);
        used_of_row(self.row(request), needed, (request, len), block_size)
    }
}

/// The first `columns` blocks of a row, which hold the `len` tokens of a request.
///
/// # Errors
/// [`TABLE_ROW`](crate::rules::TABLE_ROW) without a row, or for a shorter one.
pub(crate) fn used_of_row(
    row: Option<&[usize]>,
    columns: usize,
    (request, len): (usize, usize),
    block_size: usize,
) -> Result<&[usize], Violation> {
    row.and_then(|row| row.get(..columns)).ok_or_else(|| {
        let given = row.map_or("no row".to_owned(), |row| format!("a row of {}", row.len()));
        rules::TABLE_ROW.broken(
            format_args!("{given} for the {len} tokens of request {request}"),
            format_args!("a row of {columns} or more blocks of {block_size} tokens"),
        )
    })
}

/// Refuses blocks of a request that a cache of `blocks` blocks, from 1 to INT32, does not have.
///
/// # Errors
/// [`TABLE_BLOCK`](crate::rules::TABLE_BLOCK).
pub(crate) fn check_blocks_of(request: usize, row: &[usize], blocks: usize) -> Result<(), Violation> {
    if all_below(row, blocks) {
        return Ok(());
    }
    match row.iter().find(|block| **block >= blocks) {
        None => Ok(()),
        Some(block) => Err(rules::TABLE_BLOCK
            .broken(format_args!("block {block} of request {request}"), format_args!("0 to {}", blocks - 1))),
    }
}

/// Whether all of these numbers are below a bound of up to INT32, in a form that compilers vectorise: a
/// number below the bound has no sign bit, and has one after the bound is subtracted.
fn all_below(numbers: &[usize], bound: usize) -> bool {
    let mut signs = (usize::MAX, 0usize);
    for &number in numbers {
        signs.0 &= number.wrapping_sub(bound);
        signs.1 |= number;
    }
    let sign = |bits: usize| bits > usize::MAX / 2;
    sign(signs.0) && !sign(signs.1)
}

/// Refuses tables of more rows or entries than [`MAX_ENTRIES`](PageTable::MAX_ENTRIES).
fn check_size(rows: usize, columns: usize) -> Result<(), Violation> {
    if rows <= PageTable::MAX_ENTRIES / columns.max(1) {
        return Ok(());
    }
    Err(Violation::new(
        &rules::INDEX_SHAPE,
        format_args!("{rows} rows of {columns}"),
        format_args!("at most {} entries", PageTable::MAX_ENTRIES),
        "put requests with long rows into a step of their own: one long row makes all rows long",
    ))
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test fails by panicking")]
mod tests {
    use super::super::slot::MAX_INT32;
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn rows_are_filled_with_zeros() {
        let table = PageTable::from_rows(&[vec![3], vec![5, 7], vec![]]).unwrap();
        assert_eq!((table.requests(), table.columns()), (3, 2));
        assert_eq!(table.blocks(), [3, 0, 5, 7, 0, 0]);
        assert_eq!(table.used(1, 17, 16).unwrap(), [5, 7]);
        assert_eq!(table.used(2, 0, 16).unwrap(), [0usize; 0]);
        assert_eq!(table.row(3), None);
        for (request, len) in [(3, 0), (1, 33), (1, usize::MAX)] {
            let error = table.used(request, len, 16).unwrap_err();
            assert_eq!(error.rule, &rules::TABLE_ROW);
        }
        for block_size in [0, usize::MAX] {
            let error = table.used(0, 1, block_size).unwrap_err();
            assert_eq!(error.rule, &rules::POOL_SIZE);
        }
        assert_eq!(PageTable::new(2, 2, vec![0; 3]).unwrap_err().rule, &rules::INDEX_SHAPE);
        for (requests, columns) in [(usize::MAX, 2), (usize::MAX, 0), (PageTable::MAX_ENTRIES + 1, 0)] {
            let error = PageTable::new(requests, columns, vec![]).unwrap_err();
            assert_eq!(error.rule, &rules::INDEX_SHAPE);
        }
        // One long row makes all rows long.
        let mut rows = vec![vec![1; 1 << 14]];
        rows.resize(1 + (1 << 14), vec![1]);
        let error = PageTable::from_rows(&rows).unwrap_err();
        assert_eq!(error.rule, &rules::INDEX_SHAPE);
    }

    proptest! {
        #[test]
        fn blocks_are_below_a_bound_if_each_is(
            numbers in prop::collection::vec(prop_oneof![0usize..9, any::<usize>()], 0..9),
            bound in prop_oneof![0usize..9, Just(MAX_INT32)],
        ) {
            prop_assert_eq!(all_below(&numbers, bound), numbers.iter().all(|number| *number < bound));
        }
    }
}
