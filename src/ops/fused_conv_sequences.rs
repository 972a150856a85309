//! The sequences of a call of FusedCausalConv1d, with their lines: numbers that the operator reads on the device.

use std::collections::HashMap;
use std::fmt;
use std::sync::Arc;

use ascend_spec::ops::convolution::ConvProblem;
use ascend_spec::ops::fused_causal_conv1d::FusedConvCall;

use crate::error::{Error, Result};
use crate::ops::causal_conv1d::{ConvCheck, NO_LINE};
use crate::ops::known_numbers::{KnownNumbers, NumbersCheck, narrow, number};
use crate::runtime::{ReplayCheck, Stream};
use crate::tensor::AnyTensor;

/// The places of starts and of lines in [`FusedConvCall::CONTENTS`].
const STARTS: usize = 0;
const LINES: usize = 1;

/// A sequence of a call: how many rows it has, and where its last ones are kept.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct FusedConvSequence<'a> {
    /// Its rows in this call.
    pub rows: usize,
    /// Its tokens in front of these rows. With 0 it begins: what is in front of its first row is zeros.
    pub computed: usize,
    /// Rows at the end of the call before that were rejected, as drafts are, no more than that call had: the sequence
    /// goes on behind the row in front of them. `computed` does not count them.
    pub rejected: usize,
    /// Its line of the pool; none leaves the sequence out, as for rows of padding. With
    /// [blocks](FusedConvSequences::in_blocks) the line of each of its blocks, from its first token on, also of those
    /// that the call does not touch; more are for blocks to come.
    pub lines: &'a [usize],
}

/// The sequences of a call, one behind the other, each with a line of the pool, or one for each of its blocks.
///
/// The operator reads these numbers on the device, where nothing checks them. Made here, the host knows them, and plans
/// refuse numbers that lead elsewhere. They can be [overwritten](Self::overwrite), for the next step of captured
/// launches. Cloning shares the memory.
///
/// A line has 2 rows, and one more for each row that may be rejected.
#[derive(Clone, Debug)]
pub struct FusedConvSequences {
    /// Those of [`FusedConvCall::CONTENTS`].
    pub(super) numbers: KnownNumbers<ConvCheck, 7>,
    /// Rows of a line.
    pub(super) line_rows: usize,
    /// Tokens of a block.
    pub(super) block_size: Option<usize>,
    /// Most rows of a sequence.
    pub(super) most_rows: usize,
}

impl NumbersCheck<7> for ConvCheck {
    fn check(&self, numbers: &[Vec<i64>; 7]) -> Result<()> {
        self.contents(FusedConvCall::contents(numbers))
    }
}

impl FusedConvSequences {
    /// The sequences of a call over lines of `line_rows` rows, each with one line.
    ///
    /// # Errors
    /// [`ARGUMENT_VALUE`](crate::rules::ARGUMENT_VALUE) for no sequence, more than one line for a sequence, more rows
    /// rejected than a line has room for, and numbers beyond INT32; otherwise as for [`Stream::upload`].
    pub fn new(stream: &Stream, line_rows: usize, sequences: &[FusedConvSequence<'_>]) -> Result<Self> {
        Self::of_numbers(stream, sequences, line_rows, None, numbers_of(line_rows, None, 1, sequences)?)
    }

    /// The sequences of a call with prefix caching: each has a line for each of its blocks of `block_size` tokens. A
    /// call leaves the rows in front of each block's end in the line of the block, so that another sequence may begin
    /// behind it, and goes on from the line of the block of its last row.
    ///
    /// # Errors
    /// As for [`Self::new`], for a sequence without a line for each block, also of rejected rows, for a line of a block
    /// that is written and of another block, and for blocks of fewer than 2 tokens.
    pub fn in_blocks(
        stream: &Stream,
        line_rows: usize,
        block_size: usize,
        sequences: &[FusedConvSequence<'_>],
    ) -> Result<Self> {
        let columns = sequences.iter().map(|sequence| sequence.lines.len()).max().unwrap_or(0);
        let numbers = numbers_of(line_rows, Some(block_size), columns, sequences)?;
        Self::of_numbers(stream, sequences, line_rows, Some(block_size), numbers)
    }

    fn of_numbers(
        stream: &Stream,
        sequences: &[FusedConvSequence<'_>],
        line_rows: usize,
        block_size: Option<usize>,
        numbers: [Vec<i64>; 7],
    ) -> Result<Self> {
        let mut numbers = KnownNumbers::upload(stream, "sequences", numbers, narrow)?;
        if block_size.is_some() {
            numbers = numbers.with_table(LINES, sequences.len())?;
        }
        let most_rows = sequences.iter().map(|sequence| sequence.rows).max().unwrap_or(0);
        Ok(Self { numbers, line_rows, block_size, most_rows })
    }

    /// Waits for a stream, then replaces the sequences by as many others, with as many rows in all: plans, and launches
    /// that were captured, read the new ones. Other streams that use the sequences have to be waited for before. Each
    /// has at least one row, and none more than the longest of the first ones.
    ///
    /// # Errors
    /// [`ARGUMENT_VALUE`](crate::rules::ARGUMENT_VALUE) for another number of sequences, and as for
    /// [`new`](Self::new) or [`in_blocks`](Self::in_blocks), with at most as many blocks as the longest list of lines
    /// of the first ones; [`Error::Violation`] for what a plan refuses that was made of the sequences or of a clone of
    /// them, or a captured launch of such a plan, for as long as the plan or the graph is there. Nothing is replaced
    /// then. [`ARGUMENT_DEVICE`](crate::rules::ARGUMENT_DEVICE) for a stream of another device; as for
    /// [`Stream::synchronize`]. Where writing itself fails, the sequences are refused by plans, launches and replays
    /// until they are overwritten again. No other thread may queue work meanwhile that reads them.
    pub fn overwrite(&self, stream: &Stream, sequences: &[FusedConvSequence<'_>]) -> Result<()> {
        let [ends, lines] = [STARTS, LINES].map(|argument| self.numbers.tensor(argument).len());
        let count = ends.saturating_sub(1);
        if sequences.len() != count {
            let given = format_args!("{} in place of {count} sequences", sequences.len());
            return Err(Error::invalid("sequences", given, count).fix(match self.block_size {
                _ if sequences.len() > count => "make the sequences anew, with room for as many, or divide the step",
                None => "fill up with rows of padding, as sequences without a line",
                Some(_) => "fill up with rows of padding, as sequences with scratch lines",
            }));
        }
        let columns = lines / count.max(1) - usize::from(self.block_size.is_some());
        self.numbers.overwrite(stream, numbers_of(self.line_rows, self.block_size, columns, sequences)?)
    }

    /// Whether some rows belong to sequences without a line, which the operator leaves out.
    pub(super) fn has_unwritten(&self) -> Result<bool> {
        self.numbers.read(|[_, lines, ..]| self.block_size.is_none() && lines.contains(&NO_LINE))
    }

    /// Checks the numbers for a plan, and those that replace them.
    pub(super) fn require(&self, problem: ConvProblem, allowed: &[&str]) -> Result<Arc<dyn ReplayCheck>> {
        self.numbers.require(ConvCheck::new(problem, allowed))
    }

    /// The tensor of each argument, by the names that an operator has for [`FusedConvCall::CONTENTS`].
    pub(super) fn each<P: Copy>(&self, parameters: [P; 7]) -> impl Iterator<Item = (P, &AnyTensor)> {
        self.numbers.each(parameters)
    }
}

/// The numbers of [`FusedConvCall::CONTENTS`]. With blocks the table of lines has `columns` of them for each sequence,
/// behind the line that it goes on from: rows may be rejected in a block behind that of the last new row, and the
/// operator takes no number of such a block.
fn numbers_of(
    line_rows: usize,
    block_size: Option<usize>,
    columns: usize,
    sequences: &[FusedConvSequence<'_>],
) -> Result<[Vec<i64>; 7]> {
    if sequences.is_empty() {
        return Err(Error::invalid("sequences", 0, "at least one").fix("leave the call out"));
    }
    if let Some(size @ ..2) = block_size {
        return Err(Error::invalid("block_size", size, "2 or more").fix("give the tokens of a block, such as 128"));
    }
    let mut numbers = [const { Vec::new() }; 7];
    let [starts, lines, accepted, computed, first, last, initial] = &mut numbers;
    number("line_rows", line_rows)?;
    let mut end = 0usize;
    starts.push(0);
    for (index, sequence) in sequences.iter().enumerate() {
        end = end.saturating_add(sequence.rows);
        starts.push(number("rows", end)?);
        let before = sequence.computed.saturating_add(sequence.rejected);
        let tokens = sequence.computed.saturating_add(sequence.rows);
        admits_lines(index, sequence, block_size.map(|size| blocks_of(sequence, size)), columns)?;
        let line = |line: Option<&usize>| line.map_or(Ok(NO_LINE), |&line| number("lines", line));
        if let Some(size) = block_size {
            lines.push(line(sequence.lines.get(before.saturating_sub(1) / size))?);
            // Numbers of blocks count the line in front of the others, too.
            first.push(number("computed", (sequence.computed / size).saturating_add(1))?);
            last.push(number("computed", (tokens.saturating_sub(1) / size).saturating_add(1))?);
            initial.push(0);
        }
        for column in 0..columns {
            lines.push(line(sequence.lines.get(column))?);
        }
        let room = if sequence.computed == 0 { 0 } else { line_rows.saturating_sub(2) };
        if sequence.rejected > room {
            let given = format_args!("{} rejected rows of sequence {index}", sequence.rejected);
            let allowed = format_args!("0 to {room}, with {line_rows} rows of a line");
            return Err(Error::invalid("rejected", given, allowed).fix(match sequence.computed {
                0 => "give 0: a sequence that begins has no rows of a call before",
                _ => "make lines of 2 rows and one more for each row that may be rejected",
            }));
        }
        accepted.push(number("line_rows", line_rows.saturating_sub(1).saturating_sub(sequence.rejected))?);
        computed.push(number("computed", sequence.computed)?);
    }
    block_size.map_or(Ok(()), |size| apart(size, sequences))?;
    Ok(numbers)
}

/// Refuses blocks of which one sequence writes the line of a block that another one has, or that it has itself: rows
/// that are kept for others, or for a later call, would be lost.
fn apart(size: usize, sequences: &[FusedConvSequence<'_>]) -> Result<()> {
    // The line of each block from a first one on, with the numbers of its sequence and block.
    let lines_from = |first: fn(usize, usize) -> usize| {
        sequences.iter().enumerate().flat_map(move |(index, sequence)| {
            let first = first(sequence.computed, size);
            let lines = sequence.lines.iter().enumerate().take(blocks_of(sequence, size)).skip(first);
            lines.map(move |(block, &line)| (line, (index, block)))
        })
    };
    let writers: HashMap<_, _> = lines_from(|computed, size| computed / size).collect();
    let shared = lines_from(|_, _| 0).find_map(|(line, reader)| {
        let writer = writers.get(&line).filter(|writer| **writer != reader)?;
        Some((line, *writer, reader))
    });
    shared.map_or(Ok(()), |(line, (writer, written), (reader, block))| {
        let given =
            format_args!("line {line} of block {written} of sequence {writer} and block {block} of sequence {reader}");
        Err(Error::invalid("lines", given, "a line of its own for each block with a new row").fix(match writer == reader {
            true => "give each block of the sequence a line of its own",
            false => {
                "share lines of whole blocks that no sequence adds rows to, copy a line that two sequences go on from, \
                 and give padding a scratch line of its own"
            }
        }))
    })
}

/// Blocks of the tokens of a sequence: those in front, its rows, and the rejected ones.
fn blocks_of(sequence: &FusedConvSequence<'_>, size: usize) -> usize {
    sequence.computed.saturating_add(sequence.rows.max(sequence.rejected)).div_ceil(size).max(1)
}

/// Refuses a sequence with fewer lines than `blocks`, or with more blocks than a table of `columns` has room for, and
/// without blocks one with more than one line.
fn admits_lines(index: usize, sequence: &FusedConvSequence<'_>, blocks: Option<usize>, columns: usize) -> Result<()> {
    let given = sequence.lines.len();
    let refused = |given: fmt::Arguments<'_>, allowed: fmt::Arguments<'_>| Error::invalid("lines", given, allowed);
    let lines = format_args!("{given} lines for sequence {index}");
    match blocks {
        None if given > 1 => {
            Err(refused(lines, format_args!("1, or none to leave it out")).fix("make sequences of blocks by `in_blocks`"))
        }
        Some(blocks) if given < blocks => Err(refused(lines, format_args!("{blocks} or more")).fix(
            "give a line for each block of the computed tokens and the rows; with blocks padding has a line, too, which \
             no other sequence has",
        )),
        Some(blocks) if blocks > columns => {
            let given = format_args!("sequence {index} of {blocks} blocks");
            let allowed = format_args!("{columns}, the most lines that a sequence had at first");
            Err(refused(given, allowed).fix("make the sequences anew, with lines for the blocks to come, too"))
        }
        _ => Ok(()),
    }
}
