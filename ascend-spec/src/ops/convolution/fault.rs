//! Numbers on the device that lead elsewhere than to a sequence's own rows and lines.

use crate::content_fault::{ContentFault, shown_by_texts};

/// A number on the device that leads elsewhere than to the sequence's own rows and lines.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ConvFault {
    /// A sequence begins behind its end, outside of the rows, within another one's, or elsewhere than the call's shape
    /// says.
    Starts {
        /// Number of the sequence.
        sequence: usize,
        /// Its first row, and the next one's.
        given: [i64; 2],
        /// Rows of the call.
        rows: usize,
    },
    /// A sequence has no rows.
    NoRows {
        /// Number of the sequence.
        sequence: usize,
    },
    /// A sequence that is left out has sequences that are computed in front of it and behind it.
    LeftOutBetween {
        /// Number of the sequence.
        sequence: usize,
    },
    /// A sequence's line is not in the pool.
    NoLine {
        /// Number of the sequence.
        sequence: usize,
        /// Its line.
        given: i64,
        /// Lines of the pool.
        lines: usize,
    },
    /// A sequence writes a line that another one reads or writes, or that it writes itself for another block.
    SharedLine {
        /// The line.
        line: usize,
        /// Numbers of the sequences.
        sequences: [usize; 2],
    },
    /// A number of a sequence is outside of its range.
    Number {
        /// The tensor that holds the number.
        tensor: &'static str,
        /// What it counts.
        what: &'static str,
        /// Number of the sequence.
        sequence: usize,
        /// The number.
        given: i64,
        /// The least and the largest that would do.
        allowed: [i64; 2],
    },
    /// A line is too short for the rows of a sequence with accepted counts, so that it keeps what it had.
    FullLine {
        /// Number of the sequence.
        sequence: usize,
        /// Rows of the line.
        room: usize,
        /// As many as are needed.
        needed: usize,
    },
}

impl ConvFault {
    /// The tensor that holds the number.
    pub fn tensor(&self) -> &'static str {
        match self {
            ConvFault::Starts { .. } | ConvFault::NoRows { .. } | ConvFault::FullLine { .. } => "queryStartLoc",
            ConvFault::NoLine { .. } | ConvFault::SharedLine { .. } | ConvFault::LeftOutBetween { .. } => {
                "cacheIndices"
            }
            ConvFault::Number { tensor, .. } => tensor,
        }
    }
}

impl ContentFault for ConvFault {
    fn texts(&self) -> [String; 2] {
        match self {
            ConvFault::Starts { sequence, given: [first, end], rows } => [
                format!("rows {first} to {end} of sequence {sequence}"),
                format!("the {rows} rows of x, one sequence behind the other"),
            ],
            ConvFault::NoRows { sequence } => [format!("no row of sequence {sequence}"), "1 row or more".to_owned()],
            ConvFault::LeftOutBetween { sequence } => [
                format!("sequence {sequence} is left out between others"),
                "those that are left out at the beginning or at the end".to_owned(),
            ],
            ConvFault::NoLine { sequence, given, lines } => {
                [format!("line {given} of sequence {sequence}"), format!("0 to {}", lines.saturating_sub(1))]
            }
            ConvFault::SharedLine { line, sequences: [one, other] } if one == other => {
                [format!("line {line} twice for sequence {one}"), "a line for each block".to_owned()]
            }
            ConvFault::SharedLine { line, sequences: [one, other] } => {
                [format!("line {line} of sequences {one} and {other}"), "a line for each sequence".to_owned()]
            }
            ConvFault::Number { what, sequence, given, allowed: [least, most], .. } => {
                [format!("{given} {what} of sequence {sequence}"), format!("{least} to {most}")]
            }
            ConvFault::FullLine { sequence, room, needed } => [
                format!("a line of {room} rows for sequence {sequence}"),
                format!("at least {needed}, two of the window and its own"),
            ],
        }
    }

    fn fix(&self) -> Option<String> {
        let fix = match self {
            ConvFault::NoRows { .. } => "leave the sequence out of the call, or give it a row of padding".to_owned(),
            ConvFault::LeftOutBetween { .. } => "put the sequences of padding at the end".to_owned(),
            ConvFault::NoLine { .. } => "name a line of the pool, or make the pool with more lines".to_owned(),
            ConvFault::Number { tensor: "queryStartLoc", given, .. } => {
                format!("pass {given} or more as maxQueryLen, as plans do whose first sequences have as many rows")
            }
            ConvFault::Number { tensor: "numAcceptedTokens", given, allowed: [_, most], .. } if given > most => {
                let more = given.saturating_sub(*most);
                format!("give counts up to {most}, or make the pool with lines of {more} more rows")
            }
            ConvFault::Number { tensor: "numAcceptedTokens", .. } => "give counts from 1 on".to_owned(),
            ConvFault::Number { tensor: "numComputedTokens", .. } => "give the tokens in front of the rows".to_owned(),
            ConvFault::Number { .. } => {
                "count blocks from the sequence's first token on, by blockSize and numComputedTokens, and give the \
                 table a column for each"
                    .to_owned()
            }
            ConvFault::Starts { .. } => {
                "make queryStartLoc of the rows of x, and narrow a padded x to them, or give the rest to a sequence of \
                 padding"
                    .to_owned()
            }
            ConvFault::FullLine { needed, .. } => format!("make the pool with lines of {needed} rows"),
            ConvFault::SharedLine { .. } => return None,
        };
        Some(fix)
    }
}

shown_by_texts! { ConvFault }
