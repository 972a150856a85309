//! Causal convolution: what calls of its operators compute, the sequences and the lines of a pool that keep their last
//! rows, and numbers on the device that lead elsewhere.
//!
//! The window of a row is the row and the `W - 1` before it, of the same sequence, each channel by itself:
//! `y = Σ weight[j] window[j]`. What is in front of a sequence's first row is in a line of the pool, or zeros, and the
//! call leaves the last rows of the sequence in a line. The operators differ in where in a line these rows are:
//! [CausalConv1d](super::causal_conv1d) fills lines from their beginning,
//! [FusedCausalConv1d](super::fused_causal_conv1d) from their end.

mod fault;

pub use fault::ConvFault;

use crate::content_fault::check_faults;
use crate::operator::{ArgumentList, WalkedTensors};
use crate::{DType, Dims, Rule, TensorDesc, Violation};
use std::collections::HashMap;
use std::ops::Range;

/// A call of an operator of causal convolution that holds every rule, resolved.
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
    /// The line of a sequence that is left out.
    pub pad_slot_id: i64,
    /// What is particular to the operator.
    pub form: ConvForm,
    /// The operator's rules of the numbers on the device.
    pub rules: ContentRules,
}

/// The rules and lints that faults of the numbers on the device break.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ContentRules {
    /// Numbers lead outside of the call's tensors.
    pub contents: &'static Rule,
    /// Sequences, or their lines, stay as they were.
    pub left_out: &'static Rule,
    /// Lines that are written are read or written elsewhere.
    pub shared: &'static Rule,
}

/// What is particular to an operator of causal convolution.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ConvForm {
    /// CausalConv1d of vLLM-Ascend's package.
    Package {
        /// Whether SiLU follows the sum.
        silu: bool,
        /// Whether every sequence goes on from its line.
        update: bool,
    },
    /// FusedCausalConv1d of CANN, or its in-place form.
    Fused(FusedConv),
}

/// What is particular to a call of FusedCausalConv1d.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FusedConv {
    /// Whether the row itself is added to its sum.
    pub residual: bool,
    /// Whether outputs are zero whose windows begin in front of the sequence's first token.
    pub whole_windows: bool,
    /// Whether the kernel for few rows of a sequence runs.
    pub few_rows: bool,
    /// Most rows of a sequence; `None` where the call does not say.
    pub most_rows: Option<usize>,
    /// Tokens of a block, where the last rows in front of each block's end are kept for prefix caching.
    pub block_size: Option<usize>,
}

/// The numbers of a call that are known on the device alone; an absent tensor has none.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ConvContents<'a> {
    /// Number of each sequence's first row, and of all rows.
    pub starts: &'a [i64],
    /// The line of each sequence, or several: those of its blocks, or of which the first counts.
    pub lines: &'a [i64],
    /// Whether each sequence goes on from its line.
    pub initial_state_mode: &'a [i64],
    /// The row of its line, counted from 1, with which the first window of each sequence begins. Where a line has the
    /// rows of the last call behind one of its window, that is the number of accepted rows.
    pub accepted: &'a [i64],
    /// Tokens in front of each sequence's first row.
    pub computed: &'a [i64],
    /// The block with each sequence's first row.
    pub first_block: &'a [i64],
    /// The block with each sequence's last row, whose line keeps the last rows.
    pub last_block: &'a [i64],
    /// The block from whose line each sequence goes on.
    pub initial_block: &'a [i64],
}

/// A sequence of a call.
///
/// Its padded rows are those of its line from row 0 to the last one in front of its first row, then its own. Where it
/// does not go on from a line they are `W - 1` rows of zeros, then its own.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ConvRun {
    /// Its number.
    pub sequence: usize,
    /// Its rows.
    pub rows: Range<usize>,
    /// The line that it goes on from; `None` where its first window has zeros.
    pub history: Option<usize>,
    /// The padded row with which the window of its first row begins.
    pub first_row: usize,
    /// What lines hold afterwards.
    pub kept: Vec<KeptRows>,
    /// The number of its first outputs that are zero.
    pub zeroed: usize,
}

/// Rows that a call leaves in a line.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KeptRows {
    /// The line.
    pub line: usize,
    /// The row of the line that the first of them goes to.
    pub row: usize,
    /// Which padded rows of the sequence they are.
    pub padded: Range<usize>,
}

/// A sequence that is computed, with the faults that change how, or why it is left out.
type Found = Result<(ConvRun, [Option<ConvFault>; 2]), ConvFault>;

impl ConvProblem {
    /// Whether nothing is written.
    pub fn is_idle(&self) -> bool {
        self.rows == 0
    }

    /// Rows in front of a sequence that its first window needs.
    pub fn front(&self) -> usize {
        self.width.saturating_sub(1)
    }

    /// Follows the numbers on the device: each sequence with rows that is not left out by the line `padSlotId`, and the
    /// faults. A sequence whose rows or lines are not the call's is left out, and so is one that begins in front of the
    /// end of one that was taken: no two have a row in common. One whose accepted count leads elsewhere goes on from
    /// the nearest window, and one whose line is too short leaves it as it was.
    pub fn runs<'a>(&'a self, contents: ConvContents<'a>) -> impl Iterator<Item = Result<ConvRun, ConvFault>> + 'a {
        let mut taken = 0;
        let mut left_out_behind = None;
        (0..self.sequences).flat_map(move |sequence| {
            let mut faults = [None; 3];
            let run = match self.run(sequence, &contents) {
                Some(Ok((run, _))) if run.rows.start < taken => {
                    let given = [run.rows.start, run.rows.end].map(|row| row as i64);
                    Some(Err(ConvFault::Starts { sequence, given, rows: self.rows }))
                }
                Some(Ok((run, [one, other]))) => {
                    taken = run.rows.end;
                    faults = [one, other, left_out_behind.take()];
                    Some(Ok(run))
                }
                Some(Err(fault)) => Some(Err(fault)),
                None => {
                    // CausalConv1d leaves sequences out wherever they are.
                    if taken > 0 && matches!(self.form, ConvForm::Fused(_)) {
                        left_out_behind = left_out_behind.or(Some(ConvFault::LeftOutBetween { sequence }));
                    }
                    None
                }
            };
            faults.into_iter().flatten().map(Err).chain(run)
        })
    }

    /// A sequence of the call; `None` for one that is left out without a fault.
    fn run(&self, sequence: usize, contents: &ConvContents<'_>) -> Option<Found> {
        let rows = match (self.rows_of(sequence, contents), self.form) {
            (Ok(rows), ConvForm::Package { .. }) if rows.is_empty() => return None,
            (Ok(rows), ConvForm::Fused(_)) if rows.is_empty() => return Some(Err(ConvFault::NoRows { sequence })),
            (Ok(rows), ConvForm::Fused(FusedConv { most_rows: Some(most), .. })) if rows.len() > most => {
                let (given, allowed) = (rows.len() as i64, [1, most as i64]);
                let (tensor, what) = ("queryStartLoc", "rows");
                return Some(Err(ConvFault::Number { tensor, what, sequence, given, allowed }));
            }
            (Ok(rows), _) => rows,
            (Err(fault), _) => return Some(Err(fault)),
        };
        let is_left_out =
            contents.lines.get(sequence.saturating_mul(self.columns(contents))) == Some(&self.pad_slot_id);
        let run = match self.form {
            ConvForm::Fused(form) if form.block_size.is_some() => self.fused_run(form, sequence, rows, contents),
            _ if is_left_out => return None,
            ConvForm::Fused(form) => self.fused_run(form, sequence, rows, contents),
            ConvForm::Package { update, .. } => self.package_run(update, sequence, rows, contents),
        };
        Some(run)
    }

    /// Lines that are named for each sequence.
    fn columns(&self, contents: &ConvContents<'_>) -> usize {
        (contents.lines.len() / self.sequences.max(1)).max(1)
    }

    /// The line of a sequence in a column.
    fn line(&self, sequence: usize, column: usize, contents: &ConvContents<'_>) -> Result<usize, ConvFault> {
        let at = sequence.saturating_mul(self.columns(contents)).saturating_add(column);
        let given = match contents.lines {
            [] => sequence as i64,
            lines => lines.get(at).copied().unwrap_or(-1),
        };
        let line = usize::try_from(given).ok().filter(|&line| line < self.lines);
        line.ok_or(ConvFault::NoLine { sequence, given, lines: self.lines })
    }

    fn package_run(&self, update: bool, sequence: usize, rows: Range<usize>, contents: &ConvContents<'_>) -> Found {
        let line = self.line(sequence, 0, contents)?;
        let (accepted, fault) = self.behind_accepted(sequence, contents, 1);
        let goes_on = update || contents.initial_state_mode.get(sequence).is_some_and(|&mode| mode != 0);
        let (first_row, front) = (accepted.unwrap_or(0), self.front());
        // With accepted counts two rows of the window, and all new ones: what the next step may go on behind.
        let needed = if accepted.is_some() { front.saturating_add(rows.len()).saturating_sub(1) } else { front };
        let end = first_row.saturating_add(front).saturating_add(rows.len());
        let full = ConvFault::FullLine { sequence, room: self.line_rows, needed };
        let full = (needed > self.line_rows).then_some(full);
        let kept = KeptRows { line, row: 0, padded: end.saturating_sub(needed)..end };
        let kept = if full.is_some() { Vec::new() } else { vec![kept] };
        let run = ConvRun { sequence, rows, history: goes_on.then_some(line), first_row, kept, zeroed: 0 };
        Ok((run, [fault, full]))
    }

    fn fused_run(&self, form: FusedConv, sequence: usize, rows: Range<usize>, contents: &ConvContents<'_>) -> Found {
        let within = |(tensor, what), given: i64, [least, most]: [usize; 2]| {
            let number = usize::try_from(given).ok().filter(|number| (least..=most).contains(number));
            let allowed = [least, most].map(|bound| bound as i64);
            number.ok_or(ConvFault::Number { tensor, what, sequence, given, allowed })
        };
        let own = |numbers: &[i64]| numbers.get(sequence).copied();
        let count = rows.len();
        let computed = own(contents.computed)
            .map(|given| within(("numComputedTokens", "computed tokens"), given, [0, i32::MAX as usize]))
            .transpose()?;
        let front = self.front();
        let begins = computed == Some(0);
        let (accepted, fault) = match begins {
            true => (Some(0), None),
            false => self.behind_accepted(sequence, contents, i64::from(form.few_rows)),
        };
        let first_row = accepted.unwrap_or(self.line_rows.saturating_sub(front));
        let end = first_row.saturating_add(front).saturating_add(count);
        let last = end.saturating_sub(self.line_rows)..end;
        let keep = |column, padded: Range<usize>| {
            let line = self.line(sequence, column, contents)?;
            Ok(KeptRows { line, row: self.line_rows.saturating_sub(padded.len()), padded })
        };
        let (initial, kept) = match form.block_size {
            None => (0, vec![keep(0, last)?]),
            Some(size) => {
                let columns = self.columns(contents);
                let block = |what, numbers, allowed| within(what, own(numbers).unwrap_or(0), allowed);
                // The blocks that end within the rows, without the last one, whose line has the last rows.
                let before = computed.unwrap_or(0) % size.max(1);
                let ends = before.saturating_add(count).saturating_sub(1) / size.max(1);
                let to = ("blockIdxLastScheduledToken", "as last block");
                let to = block(to, contents.last_block, [ends, columns.saturating_sub(1)])?;
                let from = ("blockIdxFirstScheduledToken", "as first block");
                let from = block(from, contents.first_block, [to.saturating_sub(ends); 2])?;
                let initial = block(("initialStateIdx", "as initial block"), contents.initial_block, [0, to])?;
                let boundary = |end: usize| {
                    let rows = end.saturating_add(1).saturating_mul(size).saturating_sub(before);
                    rows.saturating_add(first_row)
                };
                let ends = (0..ends).map(|end| {
                    let boundary = boundary(end);
                    keep(from.saturating_add(end), boundary..boundary.saturating_add(front))
                });
                (initial, [keep(to, last)].into_iter().chain(ends).collect::<Result<_, _>>()?)
            }
        };
        let history = (!begins).then(|| self.line(sequence, initial, contents)).transpose()?;
        let zeroed = match form.whole_windows {
            true => front.saturating_sub(computed.unwrap_or(0)).min(count),
            false => 0,
        };
        Ok((ConvRun { sequence, rows, history, first_row, kept, zeroed }, [fault, None]))
    }

    /// The rows of a sequence.
    fn rows_of(&self, sequence: usize, contents: &ConvContents<'_>) -> Result<Range<usize>, ConvFault> {
        let fixed = self
            .fixed_rows
            .map(|count| sequence.saturating_mul(count)..sequence.saturating_add(1).saturating_mul(count));
        if let (Some(rows), ConvForm::Fused(_)) = (&fixed, self.form) {
            // FusedCausalConv1d does not read starts then.
            return Ok(rows.clone());
        }
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

    /// The row of its line with which the first window of a sequence with an accepted count begins, or the nearest one,
    /// and the count if it leads to no window. Counts begin with `least`; 0 counts as 1.
    fn behind_accepted(
        &self,
        sequence: usize,
        contents: &ConvContents<'_>,
        least: i64,
    ) -> (Option<usize>, Option<ConvFault>) {
        let Some(&given) = contents.accepted.get(sequence) else {
            return (None, None);
        };
        let most = self.line_rows.saturating_sub(self.front()).saturating_add(1) as i64;
        let row = usize::try_from(given.saturating_sub(1).clamp(0, most - 1)).unwrap_or(0);
        let (tensor, what, allowed) = ("numAcceptedTokens", "accepted rows", [least, most]);
        let fault = ConvFault::Number { tensor, what, sequence, given, allowed };
        (Some(row), (given < least || given > most).then_some(fault))
    }

    /// The first line that one sequence writes and another one reads or writes, or that one writes twice: nothing
    /// orders these.
    pub fn shared_line(&self, contents: ConvContents<'_>) -> Option<ConvFault> {
        let mut writers = HashMap::new();
        let runs = || self.runs(contents).filter_map(Result::ok);
        let shared = |line, owner, sequence| ConvFault::SharedLine { line, sequences: [owner, sequence] };
        let twice = runs().find_map(|run| {
            let mut kept = run.kept.iter();
            kept.find_map(|kept| Some(shared(kept.line, writers.insert(kept.line, run.sequence)?, run.sequence)))
        });
        twice.or_else(|| {
            runs().find_map(|run| {
                let (line, &owner) = run.history.and_then(|line| Some((line, writers.get(&line)?)))?;
                (owner != run.sequence).then_some(shared(line, owner, run.sequence))
            })
        })
    }

    /// The rule or lint that a fault breaks.
    pub fn rule_of(&self, fault: &ConvFault) -> &'static Rule {
        let ContentRules { contents, left_out, shared } = self.rules;
        match (fault, self.form) {
            (ConvFault::SharedLine { .. }, _) => shared,
            // CausalConv1d leaves such a sequence out, and FusedCausalConv1d does not look.
            (ConvFault::NoLine { .. }, ConvForm::Package { .. }) => left_out,
            (ConvFault::NoRows { .. } | ConvFault::LeftOutBetween { .. } | ConvFault::FullLine { .. }, _) => left_out,
            (ConvFault::Starts { .. } | ConvFault::Number { .. } | ConvFault::NoLine { .. }, _) => contents,
        }
    }

    /// Reports each lint that the numbers break, once.
    pub fn lint_contents(&self, contents: ConvContents<'_>, report: &mut dyn FnMut(Violation)) {
        let mut known = vec![self.rules.contents.id];
        while let Err(lint) = self.check_contents(contents, &known) {
            known.push(lint.rule.id);
            report(lint);
        }
    }

    /// The first fault of the numbers whose rule is not among the lints in `allowed` (by id).
    pub fn check_contents(&self, contents: ConvContents<'_>, allowed: &[&str]) -> Result<(), Violation> {
        let faults = self.runs(contents).filter_map(Result::err).chain(self.shared_line(contents));
        check_faults(faults, |fault| Some(self.rule_of(fault)).filter(|rule| !allowed.contains(&rule.id)))
    }
}

/// `CallContract::check_contents` and `lint_contents` of an operator of causal convolution, whose call has `check` for a
/// target and `CONTENTS`. `$numbers` is the call whose numbers it has.
macro_rules! checked_by_numbers {
    ($call:ident, $numbers:ident) => {
        fn check_contents(
            arguments: &Self::Arguments,
            _: Version,
            target: $crate::Target,
            integers: &dyn Fn(&str) -> Vec<i64>,
        ) -> Result<(), $crate::Violation> {
            let Ok(problem) = arguments.call().check(target) else {
                return Ok(());
            };
            let numbers = $call::CONTENTS.map(|parameter| integers(parameter.name()));
            let rules = problem.rules;
            problem.check_contents($numbers::contents(&numbers), &[rules.left_out.id, rules.shared.id])
        }

        fn lint_contents(
            arguments: &Self::Arguments,
            _: Version,
            target: $crate::Target,
            bytes: &dyn Fn(&str) -> Option<Vec<u8>>,
            report: &mut dyn FnMut($crate::Violation),
        ) {
            let Ok(problem) = arguments.call().check(target) else {
                return;
            };
            let mut numbers = [const { Vec::new() }; $call::CONTENTS.len()];
            for (numbers, parameter) in numbers.iter_mut().zip($call::CONTENTS) {
                let Some(desc) = arguments.tensor(parameter) else { continue };
                let Some(bytes) = bytes(parameter.name()) else { return };
                *numbers = $crate::ops::convolution::numbers_in(desc.dtype, &bytes);
            }
            problem.lint_contents($numbers::contents(&numbers), report);
        }
    };
}

pub(crate) use checked_by_numbers;

/// The numbers of a tensor of this type, little-endian.
pub(crate) fn numbers_in(dtype: DType, bytes: &[u8]) -> Vec<i64> {
    match dtype {
        DType::Bool => bytes.iter().copied().map(i64::from).collect(),
        DType::Int64 => bytes.as_chunks().0.iter().map(|&number| i64::from_le_bytes(number)).collect(),
        _ => bytes.as_chunks().0.iter().map(|&number| i64::from(i32::from_le_bytes(number))).collect(),
    }
}

/// A launch touches all of each tensor.
impl<C: ArgumentList<Tensor = TensorDesc>> WalkedTensors<C> for ConvProblem {
    fn walked_shape(&self, _: &C, _: C::Parameter, desc: &TensorDesc) -> Option<Dims> {
        (!self.is_idle()).then_some(desc.shape)
    }
}
