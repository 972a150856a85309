//! What is wrong with the lengths and tables of sequences, which are only known on the device.

use super::sequences::{Number, SparseContents, SparseSequence, SparseSequences, TokenLayout};
use crate::content_fault::{ContentFault, check_faults, shown_by_texts};
use crate::{Rule, Violation};

/// The side of a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Side {
    /// Queries.
    Query,
    /// Keys.
    Key,
}

/// A number on the device that leads outside of a tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SparseFault {
    /// A length is below 0 or larger than the room for it, or a sequence ends before it begins.
    Length {
        /// Number of the sequence.
        sequence: usize,
        /// Whose length it is.
        side: Side,
        /// The number in the tensor.
        given: i64,
        /// The least and the largest number that would do.
        allowed: [i64; 2],
    },
    /// The row of a sequence in the block table ends before its keys do.
    NoColumn {
        /// Number of the sequence.
        sequence: usize,
        /// Keys of the sequence.
        keys: i64,
        /// Keys that a row of the table can name.
        room: i64,
    },
    /// The block table names a block that the cache does not have.
    NoBlock {
        /// Number of the sequence.
        sequence: usize,
        /// Column of the table.
        column: usize,
        /// The block.
        block: i64,
        /// Number of blocks in the cache.
        blocks: usize,
    },
}

impl ContentFault for SparseFault {
    fn texts(&self) -> [String; 2] {
        match self {
            SparseFault::Length { sequence, side, given, allowed: [least, most] } => {
                let side = match side {
                    Side::Query => "query rows",
                    Side::Key => "keys",
                };
                let given = format!("{given} for the {side} of sequence {sequence}");
                [given, format!("{least} to {most}")]
            }
            SparseFault::NoColumn { sequence, keys, room } => [
                format!("{keys} keys of sequence {sequence}"),
                format!("at most {room}, for which its row of the block table has room"),
            ],
            SparseFault::NoBlock { sequence, column, block, blocks } => [
                format!("block {block} in column {column} of sequence {sequence}"),
                format!("0 to {}", blocks.saturating_sub(1)),
            ],
        }
    }
}

shown_by_texts! { SparseFault }

/// Checks lengths of queries and of keys and the block table, row by row, of a call.
///
/// # Errors
/// [`Violation`] by `rule` where they lead outside of the call's tensors.
pub fn checked_contents(
    sequences: &SparseSequences,
    numbers: &[Vec<i64>; 3],
    rule: &'static Rule,
) -> Result<(), Violation> {
    let contents = SparseContents::of(numbers);
    check_faults(sequences.faults(contents), |_| Some(rule))
}

/// What is unusual about lengths of queries and of keys that the tensors hold: by the first rule query rows of no
/// sequence, by the second rows without keys, each where there is the rule.
pub fn unusual_contents(
    sequences: &SparseSequences,
    numbers: &[Vec<i64>; 3],
    [left_out, without_keys]: [Option<&'static Rule>; 2],
) -> [Option<Violation>; 2] {
    let all = || sequences.each(SparseContents::of(numbers));
    let packed = sequences.query.layout == TokenLayout::Tnd;
    let of_sequences: usize = all().map(|sequence| sequence.queries).sum();
    let rows = sequences.query.rows;
    let short = all().find(|sequence| sequences.causal && sequence.keys < sequence.queries);
    [
        left_out.filter(|_| packed && of_sequences < rows).map(|rule| {
            rule.broken(
                format_args!("{rows} rows of the query, {of_sequences} in sequences"),
                format_args!("lengths that sum up to {rows}"),
            )
        }),
        without_keys.zip(short).map(|(rule, SparseSequence { index, queries, keys, .. })| {
            rule.broken(
                format_args!("{queries} query rows and {keys} keys of sequence {index}"),
                format_args!("{queries} keys or more"),
            )
        }),
    ]
}

impl SparseSequences {
    /// What is wrong with the numbers, sequence by sequence.
    pub fn faults<'a>(&'a self, contents: SparseContents<'a>) -> impl Iterator<Item = SparseFault> + 'a {
        let paged = self.key.layout == TokenLayout::PaBsnd;
        let numbered = self.numbers(contents).enumerate();
        numbered.flat_map(move |(sequence, numbers)| {
            let keys = numbers[1].len();
            let sides = [Side::Query, Side::Key].into_iter().zip(numbers);
            let lengths = sides.filter_map(move |(side, number)| {
                let Number { given, least, most } = number;
                match side {
                    _ if (least..=most).contains(&given) => None,
                    Side::Key if paged && given > most => {
                        Some(SparseFault::NoColumn { sequence, keys: given, room: most })
                    }
                    side => Some(SparseFault::Length { sequence, side, given, allowed: [least, most] }),
                }
            });
            let reached = if paged { keys.div_ceil(self.key.rows.max(1)) } else { 0 };
            let blocks = (0..reached).filter_map(move |column| {
                let entry = contents.block_table.get(sequence * self.columns + column);
                let block = entry.copied().unwrap_or(-1);
                let there = usize::try_from(block).is_ok_and(|block| block < self.key.outer);
                (!there).then_some(SparseFault::NoBlock { sequence, column, block, blocks: self.key.outer })
            });
            lengths.chain(blocks)
        })
    }
}
