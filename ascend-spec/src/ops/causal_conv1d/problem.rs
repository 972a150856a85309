//! What a call of CausalConv1d computes: its sequences, their lines, and numbers that lead elsewhere.

use super::rules::{CONTENTS, LEFT_OUT, SHARED};
use super::{CausalConvCall, Parameter};
use crate::content_fault::{ContentFault, check_faults, shown_by_texts};
use crate::operator::WalkedTensors;
use crate::{Dims, Rule, TensorDesc, Violation};
use std::collections::HashMap;
use std::ops::Range;

/// A call of CausalConv1d that holds every rule, resolved.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ConvProblem {
    /// Number of sequences, B.
    pub sequences: usize,
    /// Rows of all sequences, T.
    pub rows: usize,
    /// Rows of each sequence; `None` where queryStartLoc says it.
    pub fixed_rows: Option<usize>,
    /// Elements of a row.
    pub channels: usize,
    /// Rows of a window, W.
    pub width: usize,
    /// Lines of the pool.
    pub lines: usize,
    /// Rows of a line, C.
    pub line_rows: usize,
    /// Whether SiLU follows the sum.
    pub silu: bool,
    /// Whether every sequence goes on from its line.
    pub update: bool,
    /// The line of a sequence that is left out.
    pub pad: i64,
}

/// The numbers of a call that are known on the device alone; an absent tensor has none.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ConvContents<'a> {
    /// Number of each sequence's first row, and of all rows.
    pub starts: &'a [i64],
    /// The line of each sequence, or several of which the first counts.
    pub lines: &'a [i64],
    /// Whether each sequence goes on from its line.
    pub initial_state_mode: &'a [i64],
    /// Rows of its last step that each sequence goes on behind.
    pub accepted: &'a [i64],
}

/// A sequence of a call.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ConvRun {
    /// Its number.
    pub sequence: usize,
    /// Its rows.
    pub rows: Range<usize>,
    /// Its line.
    pub line: usize,
    /// The row of its line with which the window of its first row begins; `None` where that has zeros.
    pub first_row: Option<usize>,
    /// What its line begins with afterwards, counted in the rows in front of the sequence and its own as one.
    pub kept: Range<usize>,
}

/// A number on the device that leads elsewhere than to the sequence's own rows and line.
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
    /// A sequence's line is not in the pool, so that it is left out.
    NoLine {
        /// Number of the sequence.
        sequence: usize,
        /// Its line.
        given: i64,
        /// Lines of the pool.
        lines: usize,
    },
    /// Two sequences name one line.
    SharedLine {
        /// The line.
        line: usize,
        /// Numbers of the sequences.
        sequences: [usize; 2],
    },
    /// An accepted count leads to no window of the line.
    Accepted {
        /// Number of the sequence.
        sequence: usize,
        /// The count.
        given: i64,
        /// The largest that would do.
        most: usize,
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
            ConvFault::Starts { .. } | ConvFault::FullLine { .. } => "queryStartLoc",
            ConvFault::NoLine { .. } | ConvFault::SharedLine { .. } => "cacheIndices",
            ConvFault::Accepted { .. } => "numAcceptedTokens",
        }
    }

    /// The rule or lint that it breaks.
    pub fn rule(&self) -> &'static Rule {
        match self {
            ConvFault::Starts { .. } | ConvFault::Accepted { .. } => &CONTENTS,
            ConvFault::NoLine { .. } | ConvFault::FullLine { .. } => &LEFT_OUT,
            ConvFault::SharedLine { .. } => &SHARED,
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
            ConvFault::NoLine { sequence, given, lines } => {
                [format!("line {given} of sequence {sequence}"), format!("0 to {}", lines.saturating_sub(1))]
            }
            ConvFault::SharedLine { line, sequences: [one, other] } => {
                [format!("line {line} of sequences {one} and {other}"), "a line for each sequence".to_owned()]
            }
            ConvFault::Accepted { sequence, given, most } => {
                [format!("{given} accepted rows of sequence {sequence}"), format!("1 to {most}, as its line has rows")]
            }
            ConvFault::FullLine { sequence, room, needed } => [
                format!("a line of {room} rows for sequence {sequence}"),
                format!("at least {needed}, two of the window and its own"),
            ],
        }
    }
}

shown_by_texts! { ConvFault }

impl ConvProblem {
    /// Whether nothing is written.
    pub fn is_idle(&self) -> bool {
        self.rows == 0
    }

    /// Rows in front of a sequence that its first window needs.
    fn front(&self) -> usize {
        self.width.saturating_sub(1)
    }

    /// Follows the numbers on the device: each sequence with rows that is not left out by the line `padSlotId`, and the
    /// faults. A sequence whose rows or line are not the call's is left out, and so is one that begins in front of the
    /// end of one that was taken: no two have a row in common. One whose accepted count leads elsewhere goes on from
    /// the nearest window, and one whose line is too short leaves it as it was.
    pub fn runs<'a>(&'a self, contents: ConvContents<'a>) -> impl Iterator<Item = Result<ConvRun, ConvFault>> + 'a {
        let mut taken = 0;
        (0..self.sequences).flat_map(move |sequence| {
            let run = self.run(sequence, &contents).map(|run| {
                let run = run?;
                if run.rows.start < taken {
                    let given = [run.rows.start, run.rows.end].map(|row| row as i64);
                    return Err(ConvFault::Starts { sequence, given, rows: self.rows });
                }
                taken = run.rows.end;
                Ok(run)
            });
            let faults = match &run {
                Some(Ok(run)) => [self.accepted_fault(run.sequence, &contents), self.full_line(run)],
                _ => [None, None],
            };
            faults.into_iter().flatten().map(Err).chain(run)
        })
    }

    fn run(&self, sequence: usize, contents: &ConvContents<'_>) -> Option<Result<ConvRun, ConvFault>> {
        let rows = match self.rows_of(sequence, contents) {
            Ok(rows) if rows.is_empty() => return None,
            Ok(rows) => rows,
            Err(fault) => return Some(Err(fault)),
        };
        let columns = (contents.lines.len() / self.sequences.max(1)).max(1);
        let given = match contents.lines {
            [] => sequence as i64,
            lines => *lines.get(sequence.saturating_mul(columns))?,
        };
        if given == self.pad && !contents.lines.is_empty() {
            return None;
        }
        let Some(line) = usize::try_from(given).ok().filter(|&line| line < self.lines) else {
            return Some(Err(ConvFault::NoLine { sequence, given, lines: self.lines }));
        };
        let front = self.front();
        let (first_row, kept) = match contents.accepted.get(sequence) {
            // Two rows of the window, and all new ones: what the next step may go on behind.
            Some(&given) => {
                let first = given.saturating_sub(1).clamp(0, self.most_accepted().saturating_sub(1) as i64);
                (usize::try_from(first).ok(), 1..front.saturating_add(rows.len()))
            }
            None => {
                let goes_on = self.update || contents.initial_state_mode.get(sequence).is_some_and(|&mode| mode != 0);
                (goes_on.then_some(0), rows.len()..rows.len().saturating_add(front))
            }
        };
        Some(Ok(ConvRun { sequence, rows, line, first_row, kept }))
    }

    /// The rows of a sequence.
    fn rows_of(&self, sequence: usize, contents: &ConvContents<'_>) -> Result<Range<usize>, ConvFault> {
        let fixed = self
            .fixed_rows
            .map(|count| sequence.saturating_mul(count)..sequence.saturating_add(1).saturating_mul(count));
        let &[first, end] = contents.starts.get(sequence..sequence.saturating_add(2)).unwrap_or(&[]) else {
            return Ok(fixed.unwrap_or(0..0));
        };
        let rows = usize::try_from(first).ok().zip(usize::try_from(end).ok()).map(|(first, end)| first..end);
        let is_first = sequence == 0;
        let is_last = sequence.saturating_add(1) == self.sequences;
        let fits = |rows: &Range<usize>| {
            let within = rows.start <= rows.end && rows.end <= self.rows;
            let whole = (!is_first || rows.start == 0) && (!is_last || rows.end == self.rows);
            within && whole && fixed.as_ref().is_none_or(|fixed| fixed == rows)
        };
        rows.filter(fits).ok_or(ConvFault::Starts { sequence, given: [first, end], rows: self.rows })
    }

    /// The largest accepted count that leads to a window of a line.
    fn most_accepted(&self) -> usize {
        self.line_rows.saturating_sub(self.front()).saturating_add(1)
    }

    /// An accepted count that leads to no window of the line.
    fn accepted_fault(&self, sequence: usize, contents: &ConvContents<'_>) -> Option<ConvFault> {
        let &given = contents.accepted.get(sequence)?;
        let most = self.most_accepted();
        let fault = ConvFault::Accepted { sequence, given, most };
        usize::try_from(given).map_or(true, |count| !(1..=most).contains(&count)).then_some(fault)
    }

    /// A line that keeps what it had, since what the sequence would leave does not fit in it.
    fn full_line(&self, run: &ConvRun) -> Option<ConvFault> {
        let needed = run.kept.len();
        let fault = ConvFault::FullLine { sequence: run.sequence, room: self.line_rows, needed };
        (needed > self.line_rows).then_some(fault)
    }

    /// Whether a sequence's line is written.
    pub fn writes_line(&self, run: &ConvRun) -> bool {
        self.full_line(run).is_none()
    }

    /// The first line that two sequences name: nothing orders the writes of one and the reads of the other.
    pub fn shared_line(&self, contents: ConvContents<'_>) -> Option<ConvFault> {
        let mut owners = HashMap::new();
        self.runs(contents).filter_map(Result::ok).find_map(|run| {
            let owner = *owners.entry(run.line).or_insert(run.sequence);
            let sequences = [owner, run.sequence];
            (owner != run.sequence).then_some(ConvFault::SharedLine { line: run.line, sequences })
        })
    }

    /// The first fault of the numbers whose rule is not among the lints in `allowed` (by id).
    pub fn check_contents(&self, contents: ConvContents<'_>, allowed: &[&str]) -> Result<(), Violation> {
        let faults = self.runs(contents).filter_map(Result::err).chain(self.shared_line(contents));
        check_faults(faults, |fault| Some(fault.rule()).filter(|rule| !allowed.contains(&rule.id)))
    }
}

impl WalkedTensors<CausalConvCall> for ConvProblem {
    fn walked_shape(&self, _: &CausalConvCall, _: Parameter, desc: &TensorDesc) -> Option<Dims> {
        (!self.is_idle()).then_some(desc.shape)
    }
}
