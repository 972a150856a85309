//! The blocks of a paged cache that hold the keys of each sequence.

use std::ops::Range;
use std::sync::{Arc, Mutex};

use ascend_spec::ops::fused_infer_attention_score::ContentBounds;
use ascend_spec::ops::fused_infer_attention_score::rules::contents::BLOCK;

use crate::error::{Error, Result};
use crate::memory::as_bytes;
use crate::runtime::{Device, Stream, lock};
use crate::tensor::Tensor;

/// The blocks of each sequence in a paged cache (`blockTable`), and the tokens in a block (`blockSize`).
///
/// `[B, M]`, INT32 on the device: row `b` names the blocks that hold the keys and values of sequence `b`, in order. Key
/// and value cache are one tensor each, of the same shape: `[blocks, block_size, N * D]`, `[blocks, N, block_size, D]`
/// or, where the path takes it, `[blocks, N, D / c, block_size, c]` with `c` elements in 32 bytes;
/// [`Cache::shape`](ascend_spec::ops::fused_infer_attention_score::Cache::shape) computes them. A call with a table
/// needs the number of keys of each sequence
/// ([`actual_seq_lengths_kv`](crate::FusedInferAttention::actual_seq_lengths_kv)); entries of a row after the blocks
/// that these keys need are ignored.
///
/// The table remembers what it was filled with. Each plan and each launch compares that with the cache and the
/// lengths: a block that the cache does not have is refused by `block_table.range`, a row that does not name enough
/// blocks for its sequence's keys by `block_table.row_short`. From the first launch on the table takes no block
/// beyond that launch's cache.
///
/// The operator reads the table on the device when it runs. A launch takes any table of the planned shape and block
/// size: the same one with new content ([`BlockTable::overwrite`]), or another one, so that the next step's table can
/// be filled while this step's is in use. Cloning shares the memory.
///
/// Since CANN 8.1.
///
/// ```
/// use ascend_attention::attention::{BlockTable, Inputs};
/// use ascend_attention::{FusedInferAttention, Layout, Runtime, bf16};
///
/// # fn main() -> ascend_attention::Result<()> {
/// # #[cfg(feature = "emulation")] {
/// let stream = Runtime::emulated()?.device(0)?.stream()?;
/// let cache = stream.upload(&vec![bf16::ONE; 6 * 16 * 128], [6, 16, 128])?; // 6 blocks of 16 tokens
/// let query = stream.upload(&vec![bf16::ONE; 2 * 128], [2, 1, 128])?;
///
/// // Sequence 0 has 20 keys, in the blocks 4 and 1; sequence 1 has 7, in block 3.
/// let table = BlockTable::from_rows(&stream, &[vec![4, 1], vec![3]], 16)?;
/// let inputs = Inputs::new(&query, &cache, &cache).paged(&table);
/// let plan = FusedInferAttention::new(Layout::Bsh)
///     .scale(1.0 / 128f64.sqrt())
///     .heads(1)
///     .kv_heads(1)
///     .actual_seq_lengths_kv([20, 7])
///     .plan(inputs)?;
/// let output = plan.launch(&stream, inputs)?;
/// assert_eq!(output.attention.download(&stream)?, vec![bf16::ONE; 2 * 128]);
/// # }
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug)]
pub struct BlockTable {
    tensor: Tensor<i32>,
    block_size: usize,
    /// The block size as the operator counts it.
    acl_block_size: i64,
    /// Row of the content at which the table begins.
    first: usize,
    content: Arc<Mutex<Content>>,
}

/// What is known of a table in device memory. Tables that share the memory share it.
#[derive(Debug, Default)]
struct Content {
    /// Rows of the table that has the whole memory.
    sequences: usize,
    /// The largest block; `None` if there is none, or it is not known.
    largest: Option<usize>,
    /// Blocks that each row names; empty if that is not known, or if rows are full.
    rows: Vec<usize>,
    /// Number of blocks of the smallest cache that a launch has read by the table: queued or captured work may still
    /// do so.
    blocks: Option<usize>,
    /// Rows with unknown contents, since overwriting them has failed.
    unknown: Range<usize>,
}

impl Content {
    /// Refuses some rows if overwriting one of them has failed.
    fn known(&self, rows: &Range<usize>) -> Result<()> {
        match self.unknown.start.max(rows.start) < self.unknown.end.min(rows.end) {
            false => Ok(()),
            true => Err(Error::invalid("block_table", "rows that were overwritten in part", "rows that are known")
                .fix("overwrite the rows again, by the `overwrite` that has failed")),
        }
    }

    /// Notes new rows from `first` on, of a table of `columns` columns.
    fn replace(&mut self, first: usize, rows: &[impl AsRef<[usize]>], columns: usize) {
        let (largest, lengths) = (largest(rows), rows.iter().map(|row| row.as_ref().len()));
        if rows.len() == self.sequences {
            self.largest = largest;
            self.rows = lengths.collect();
            return;
        }
        // Other rows stay as they are.
        self.largest = self.largest.max(largest);
        if self.rows.is_empty() {
            self.rows = vec![columns; self.sequences];
        }
        for (row, len) in self.rows.iter_mut().skip(first).zip(lengths) {
            *row = len;
        }
    }
}

fn largest(rows: &[impl AsRef<[usize]>]) -> Option<usize> {
    rows.iter().flat_map(|row| row.as_ref()).copied().max()
}

impl BlockTable {
    /// A table of these rows, a row for each sequence. Rows shorter than the longest are filled up with block 0.
    ///
    /// # Errors
    /// [`ARGUMENT_VALUE`](crate::rules::ARGUMENT_VALUE) for a block beyond INT32, no row, or rows that are all
    /// empty; otherwise as for [`Stream::upload`].
    pub fn from_rows(stream: &Stream, rows: &[impl AsRef<[usize]>], block_size: usize) -> Result<Self> {
        let columns = rows.iter().map(|row| row.as_ref().len()).max();
        Self::with_columns(stream, rows, columns.unwrap_or(0), block_size)
    }

    /// A table of these rows with room for `columns` blocks a sequence, so that it can be
    /// [overwritten](BlockTable::overwrite) as the sequences grow.
    ///
    /// # Errors
    /// As for [`BlockTable::from_rows`], and for a row of more than `columns` blocks.
    pub fn with_columns(
        stream: &Stream,
        rows: &[impl AsRef<[usize]>],
        columns: usize,
        block_size: usize,
    ) -> Result<Self> {
        let flat = flat(rows, columns)?;
        let tensor = stream.upload(&flat, [rows.len(), columns])?;
        let mut content = Content { sequences: rows.len(), ..Content::default() };
        content.replace(0, rows, columns);
        Self::owned(tensor, block_size, content)
    }

    /// A table that is on the device already, `[B, M]`. Its content is not checked.
    ///
    /// # Errors
    /// [`ARGUMENT_VALUE`](crate::rules::ARGUMENT_VALUE) for another number of axes, a strided tensor, one without
    /// elements, or blocks of no token.
    ///
    /// # Safety
    /// Whenever a call that was launched with the table runs, the entries for the blocks that the keys of each
    /// sequence need are blocks of the call's cache.
    pub unsafe fn from_tensor(tensor: Tensor<i32>, block_size: usize) -> Result<Self> {
        let content = Content { sequences: tensor.shape().first().copied().unwrap_or(0), ..Content::default() };
        Self::new(tensor, block_size, content)
    }

    /// A table full of block 0, to be overwritten.
    ///
    /// # Errors
    /// As for [`BlockTable::from_tensor`] and [`Device::alloc_zeroed`].
    pub fn zeroed(device: &Device, sequences: usize, columns: usize, block_size: usize) -> Result<Self> {
        let entries = sequences.checked_mul(columns).ok_or_else(|| {
            Error::invalid("block_table", format_args!("[{sequences}, {columns}]"), "entries that can be counted")
                .fix("give fewer sequences or blocks")
        })?;
        let buffer = device.alloc_zeroed::<i32>(entries)?;
        Self::owned(
            Tensor::from_buffer(&buffer, [sequences, columns])?,
            block_size,
            Content { sequences, largest: Some(0), ..Content::default() },
        )
    }

    /// A table whose rows name `columns` blocks each, all of `blocks` in row-major order.
    ///
    /// # Errors
    /// As for [`BlockTable::from_rows`]; [`ARGUMENT_VALUE`](crate::rules::ARGUMENT_VALUE) if `blocks` are not whole
    /// rows.
    pub fn from_full_rows(stream: &Stream, blocks: &[usize], columns: usize, block_size: usize) -> Result<Self> {
        let rows = blocks.len().checked_div(columns).unwrap_or(0);
        let flat = flat(&[blocks], blocks.len())?;
        let content = Content { sequences: rows, largest: largest(&[blocks]), ..Content::default() };
        Self::owned(stream.upload(&flat, [rows, columns])?, block_size, content)
    }

    /// A table of some of the sequences, whose rows stay in the same memory: overwriting either table changes both.
    ///
    /// # Errors
    /// [`ARGUMENT_VALUE`](crate::rules::ARGUMENT_VALUE) for rows that the table does not have, or for none.
    pub fn rows(&self, rows: Range<usize>) -> Result<Self> {
        Ok(Self {
            tensor: self.tensor.narrow(0, rows.clone())?,
            first: self.first.saturating_add(rows.start),
            ..self.clone()
        })
    }

    /// A table in memory that it alone uses.
    fn owned(tensor: Tensor<i32>, block_size: usize, content: Content) -> Result<Self> {
        tensor.freeze();
        Self::new(tensor, block_size, content)
    }

    fn new(tensor: Tensor<i32>, block_size: usize, content: Content) -> Result<Self> {
        let fits = tensor.shape().len() == 2 && tensor.is_contiguous() && !tensor.is_empty();
        if !fits {
            return Err(Error::invalid(
                "block_table",
                tensor.desc(),
                "a contiguous tensor [sequences, blocks of each], both at least 1",
            )
            .fix("copy the rows into a table of their own"));
        }
        let counted = i64::try_from(block_size).ok();
        let Some(acl_block_size) = counted.filter(|&tokens| tokens > 0) else {
            return Err(Error::invalid("block_size", block_size, format_args!("1 to {}", i64::MAX))
                .fix("give the tokens of a block of the cache"));
        };
        Ok(Self { tensor, block_size, acl_block_size, first: 0, content: Arc::new(Mutex::new(content)) })
    }

    /// Waits for a stream, then replaces the content, and waits for that. Rows may be shorter than the table's; they
    /// are filled up with block 0. Other streams that use the table have to be waited for before.
    ///
    /// # Errors
    /// As for [`BlockTable::with_columns`], for another number of rows, and for a table of another device;
    /// [`Error::Violation`] by `block_table.range` for a block that the cache of an earlier launch does not have. Where
    /// writing itself fails, launches and replays refuse the rows until they are overwritten again.
    pub fn overwrite(&self, stream: &Stream, rows: &[impl AsRef<[usize]>]) -> Result<()> {
        if rows.len() != self.sequences() {
            return Err(Error::invalid(
                "block_table",
                format_args!("{} rows", rows.len()),
                format_args!("{} rows", self.sequences()),
            )
            .fix("make another table, and plan again"));
        }
        let flat = flat(rows, self.columns())?;
        self.tensor.on("block_table", stream.context())?;
        // The content is not locked meanwhile: the stream may be waiting for a launch that locks it.
        stream.synchronize()?;
        let mut content = lock(&self.content);
        let largest = largest(rows);
        if let (Some(blocks), Some(block)) = (content.blocks, largest)
            && block >= blocks
        {
            return Err(BLOCK
                .broken(
                    format_args!("block {block}"),
                    format_args!(
                        "0 to {}, as a launch with this table has read a cache of {blocks} blocks",
                        blocks.saturating_sub(1)
                    ),
                )
                .into());
        }
        let own = self.own_rows();
        let written = self.tensor.renew(stream, as_bytes(&flat));
        if written.is_ok() {
            content.replace(self.first, rows, self.columns());
            if own.start <= content.unknown.start && content.unknown.end <= own.end {
                content.unknown = 0..0;
            }
        } else {
            // A part of the rows may have been written.
            content.largest = content.largest.max(largest);
            let before = if content.unknown.is_empty() { own.clone() } else { content.unknown.clone() };
            content.unknown = before.start.min(own.start)..before.end.max(own.end);
        }
        written
    }

    /// Refuses a table that does not fit a call. `rows` is false for a captured call, whose rows are checked before
    /// each replay. `launched` makes the table remember the call's cache.
    pub(crate) fn admitted(&self, bounds: &ContentBounds, rows: bool, launched: bool) -> Result<()> {
        let mut content = lock(&self.content);
        let largest = content.largest.map(|block| i64::try_from(block).unwrap_or(i64::MAX));
        bounds.admits_block(largest)?;
        if rows && launched {
            content.known(&self.own_rows())?;
        }
        if rows {
            Self::name_enough(&content, self.first, bounds)?;
        }
        if launched {
            let blocks = content.blocks.unwrap_or(usize::MAX);
            content.blocks = Some(blocks.min(bounds.blocks()));
        }
        Ok(())
    }

    /// Its rows, as the table that has the whole memory counts them.
    fn own_rows(&self) -> Range<usize> {
        self.first..self.first.saturating_add(self.sequences())
    }

    fn name_enough(content: &Content, first: usize, bounds: &ContentBounds) -> Result<()> {
        let rows = content.rows.get(first..).unwrap_or(&[]);
        Ok(bounds.admits_rows(rows.iter().copied())?)
    }

    /// The table on the device, `[B, M]`. Only [`BlockTable::overwrite`] can write to one that was made on the host.
    pub fn tensor(&self) -> &Tensor<i32> {
        &self.tensor
    }

    /// Tokens in a block.
    pub fn block_size(&self) -> usize {
        self.block_size
    }

    /// Tokens of a block, as the operator counts them.
    #[inline]
    pub(super) fn acl_block_size(&self) -> i64 {
        self.acl_block_size
    }

    /// Number of sequences, B.
    pub fn sequences(&self) -> usize {
        self.axis(0)
    }

    /// Room for blocks of each sequence, M.
    pub fn columns(&self) -> usize {
        self.axis(1)
    }

    fn axis(&self, axis: usize) -> usize {
        self.tensor.shape().get(axis).copied().unwrap_or(0)
    }
}

/// Concatenates rows, each filled up to `columns` entries, as the device has them.
fn flat(rows: &[impl AsRef<[usize]>], columns: usize) -> Result<Vec<i32>> {
    let mut flat = Vec::new();
    let entries = rows.len().saturating_mul(columns);
    flat.try_reserve_exact(entries).map_err(|_| {
        Error::invalid("block_table", format_args!("[{}, {columns}]", rows.len()), "what fits in the host's memory")
            .fix("put requests with long rows into a call of their own: one long row makes all rows long")
    })?;
    for (at, row) in rows.iter().enumerate() {
        let row = row.as_ref();
        if row.len() > columns {
            return Err(Error::invalid(
                "block_table",
                format_args!("{} blocks in row {at}", row.len()),
                format_args!("at most {columns}"),
            )
            .fix("make the table with the columns of the longest row"));
        }
        for &block in row {
            flat.push(i32::try_from(block).map_err(|_| {
                Error::invalid(
                    "block_table",
                    format_args!("block {block} in row {at}"),
                    format_args!("0 to {}, as tables are INT32", i32::MAX),
                )
                .fix("use the numbers that the cache gave its blocks")
            })?);
        }
        let filled = columns.saturating_sub(row.len());
        flat.extend(std::iter::repeat_n(0, filled));
    }
    Ok(flat)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn short_rows_are_filled_up_and_wrong_ones_named() {
        let rows = [vec![3, 1], vec![], vec![2]];
        assert_eq!(flat(&rows, 3), Ok(vec![3, 1, 0, 0, 0, 0, 2, 0, 0]));
        let refused = |rows: &[&[usize]], columns| match flat(rows, columns) {
            Err(Error::Violation(violation)) => (violation.given, violation.allowed),
            other => panic!("{other:?}"),
        };
        let told = |given: &str, allowed: &str| (given.to_owned(), allowed.to_owned());
        assert_eq!(
            refused(&[&[0], &[5, 1 << 31]], 2),
            told("block_table: block 2147483648 in row 1", "0 to 2147483647, as tables are INT32")
        );
        assert_eq!(refused(&[&[0], &[5, 1]], 1), told("block_table: 2 blocks in row 1", "at most 1"));
    }
}
