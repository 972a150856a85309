//! The blocks and lengths of sequences, checked before they reach the device.

use std::sync::Arc;

use ascend_spec::ops::gather_pa_kv_cache::GatherProblem;
use ascend_spec::ops::gather_pa_kv_cache::rules::BLOCK;

use crate::error::{Error, Result};
use crate::ops::known_numbers::{KnownNumbers, longest, narrow, numbers, padded_table};
use crate::runtime::{ReplayCheck, Stream};
use crate::tensor::Tensor;

/// The blocks that hold each sequence in a paged cache, and the tokens of each sequence, on the device.
///
/// Made on the host, it is checked: each block that a sequence reaches is one of the cache's, and each row names as
/// many blocks as its sequence needs. Plans refuse it for a smaller cache, or one of another block size. Cloning
/// shares the memory.
#[derive(Clone, Debug)]
pub struct SequenceBlocks {
    tokens: usize,
    blocks: usize,
    block_size: usize,
    /// Blocks and lengths.
    numbers: KnownNumbers<(), 2>,
}

impl SequenceBlocks {
    /// Checks the blocks of each sequence, `rows`, and its tokens, `lengths`, for a cache of `blocks` blocks of
    /// `block_size` tokens, and copies both to the device. Rows shorter than the longest are filled up with block 0.
    ///
    /// To leave out the first tokens of a sequence, leave out their blocks: the operator's `seqOffset` counts in
    /// whole blocks as well.
    ///
    /// # Errors
    /// [`Error::Violation`] by `gather.block`; [`ARGUMENT_VALUE`](crate::rules::ARGUMENT_VALUE) for no sequence,
    /// another number of lengths than of rows, blocks without tokens, and numbers beyond INT32; otherwise as for
    /// [`Stream::upload`].
    pub fn new(
        stream: &Stream,
        rows: &[impl AsRef<[usize]>],
        lengths: &[usize],
        blocks: usize,
        block_size: usize,
    ) -> Result<Self> {
        if rows.is_empty() || rows.len() != lengths.len() {
            return Err(Error::invalid(
                "lengths",
                format_args!("{} for {} rows", lengths.len(), rows.len()),
                "a length for each of at least one row",
            )
            .fix("make the rows and the lengths from the same batch"));
        }
        if block_size == 0 {
            return Err(Error::invalid("block_size", 0, "at least 1").fix("give the cache's block size"));
        }
        let rows: Vec<&[usize]> = rows.iter().map(AsRef::as_ref).collect();
        let columns = longest(&rows).max(1);
        let tokens = (lengths.iter()).try_fold(0usize, |sum, len| sum.checked_add(*len));
        let tokens = tokens.filter(|tokens| i32::try_from(*tokens).is_ok());
        let Some(tokens) = tokens else {
            return Err(Error::invalid("lengths", "a sum beyond INT32", format_args!("at most {}", i32::MAX))
                .fix("gather fewer sequences at once"));
        };
        check(&rows, lengths, (blocks, block_size))?;
        let numbers = numbers_of(&rows, lengths, columns)?;
        let numbers = KnownNumbers::upload(stream, "sequences", numbers, narrow)?.with_table(0, rows.len())?;
        Ok(Self { tokens, blocks, block_size, numbers })
    }

    /// Waits for a stream, then replaces the blocks and lengths of as many sequences, which have as many tokens in all,
    /// in the same memory: plans, and launches that were captured, read the new ones. Rows may be shorter than those of
    /// the table. Checked as the first ones were; what is refused leaves the old ones in place.
    ///
    /// # Errors
    /// As for [`SequenceBlocks::new`]; [`ARGUMENT_VALUE`](crate::rules::ARGUMENT_VALUE) for another number of sequences
    /// or of tokens, and longer rows; [`ARGUMENT_DEVICE`](crate::rules::ARGUMENT_DEVICE) for a stream of another
    /// device; as for [`Stream::synchronize`]. Where writing itself fails, the sequences are refused by plans, launches
    /// and replays until they are overwritten again.
    pub fn overwrite(&self, stream: &Stream, rows: &[impl AsRef<[usize]>], lengths: &[usize]) -> Result<()> {
        let rows: Vec<&[usize]> = rows.iter().map(AsRef::as_ref).collect();
        let (sequences, columns) = (self.seq_lens().len(), self.block_tables().shape().get(1).copied().unwrap_or(0));
        let tokens = lengths.iter().fold(0usize, |sum, length| sum.saturating_add(*length));
        if [rows.len(), lengths.len()] != [sequences; 2] || longest(&rows) > columns || tokens != self.tokens {
            let given = format_args!("{} rows of at most {} blocks, {tokens} tokens", rows.len(), longest(&rows));
            let allowed = format_args!("{sequences} rows of at most {columns}, {} tokens, as there are", self.tokens);
            return Err(Error::invalid("lengths", given, allowed).fix("make other sequences, and plan with them"));
        }
        check(&rows, lengths, (self.blocks, self.block_size))?;
        self.numbers.overwrite(stream, numbers_of(&rows, lengths, columns)?)
    }

    /// Tokens of all sequences: rows of what is gathered.
    pub fn tokens(&self) -> usize {
        self.tokens
    }

    /// The table on the device, `[B, M]`. Only [`overwrite`](Self::overwrite) can write to it.
    pub fn block_tables(&self) -> &Tensor<i32> {
        self.numbers.tensor(0)
    }

    /// The lengths on the device, `[B]`. Only [`overwrite`](Self::overwrite) can write to them.
    pub fn seq_lens(&self) -> &Tensor<i32> {
        self.numbers.tensor(1)
    }

    /// The check that launches and replays pass.
    pub(super) fn replay_check(&self) -> Arc<dyn ReplayCheck> {
        self.numbers.replay_check()
    }

    /// Refuses a cache for which the blocks were not checked, and blocks that were overwritten in part.
    pub(super) fn fits(&self, problem: &GatherProblem) -> Result<()> {
        if problem.blocks < self.blocks || problem.block_size != self.block_size {
            return Err(Error::invalid(
                "sequences",
                format_args!("checked for {} blocks of {} tokens", self.blocks, self.block_size),
                format_args!(
                    "blocks that were checked for a cache of {} blocks of {}",
                    problem.blocks, problem.block_size
                ),
            )
            .fix("make them again with the blocks of this cache"));
        }
        self.numbers.read(|_| ())
    }
}

/// The table of these rows, filled up with block 0, and the lengths.
fn numbers_of(rows: &[&[usize]], lengths: &[usize], columns: usize) -> Result<[Vec<i64>; 2]> {
    Ok([padded_table(rows, columns, 0)?, numbers("lengths", lengths.iter().copied())?])
}

/// Refuses rows that do not name the blocks of their sequence.
fn check(rows: &[&[usize]], lengths: &[usize], (blocks, block_size): (usize, usize)) -> Result<()> {
    let refused = |given: String| -> Result<()> {
        let allowed = format_args!("enough blocks of {block_size} tokens, each below {blocks}");
        Err(BLOCK.broken(given, allowed).into())
    };
    for (sequence, (row, len)) in rows.iter().zip(lengths).enumerate() {
        let needed = len.div_ceil(block_size.max(1));
        let Some(reached) = row.get(..needed) else {
            let named = row.len();
            return refused(format!("{named} blocks for {len} tokens of sequence {sequence}"));
        };
        if let Some(block) = reached.iter().find(|block| **block >= blocks) {
            return refused(format!("block {block} of sequence {sequence}"));
        }
    }
    Ok(())
}
