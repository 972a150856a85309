//! CausalConv1d of vLLM-Ascend's operator package: the causal convolution in front of linear attention, each channel
//! by itself, over lines of a pool that keep the last rows of each sequence. CANN has no operator of this name.
//!
//! The window of a row is the row and the `W - 1` before it, of the same sequence: `y = Σ weight[j] window[j] + bias`,
//! followed by SiLU where it is asked for. What is in front of a sequence's first row is the first `W - 1` rows of its
//! line, or zeros. Afterwards the line begins with the last `W - 1` rows.
//!
//! A sequence with accepted counts (`W` is 4) has longer lines: the last step's window, then its rows. The count says
//! behind which of them the sequence goes on, and the line becomes two rows of that window and the new rows.
//!
//! Where sequences begin, their lines and the counts are numbers on the device: [`ConvProblem::runs`] follows them, and
//! finds those that lead elsewhere.

use crate::Cann::{V8_5, V9_0};
use crate::DType::{Bf16, Bool, Float16, Int32, Int64};
use crate::allowed::{Checked, Multiples, Named, Noted, Rank};
use crate::contract::{CallContract, checked_for, described_by};
use crate::operator::{OperatorVersion, WalkedTensors, versions};
use crate::rule::{require, rules};
use crate::{DType, Dims, Rule, Target, TensorDesc, Violation};
use std::collections::HashMap;
use std::fmt;
use std::ops::Range;

/// Passes the tokens `$with` and then the table of arguments to the macro `$then`; [`operator`](crate::operator)
/// describes the table's form.
///
/// Source: CausalConv1d of vLLM-Ascend's operator package.
#[doc(hidden)]
#[macro_export]
#[rustfmt::skip]
macro_rules! causal_conv1d_arguments {
    ($then:ident $with:tt) => {
        $then! { $with
            1 { x: tensor, X, "x", "Rows, `[T, dim]` of all sequences, or `[B, L, dim]`." }
            1 { weight: tensor, Weight, "weight", "Weights, `[W, dim]`; that of the row itself is the last." }
            1 { bias: tensor, Bias, "bias", "What is added to each sum, `[dim]`; null is nothing." }
            1 { conv_states: inout, ConvStates, "convStates", "The pool of lines, `[lines, C, dim]`." }
            1 { query_start_loc: tensor, QueryStartLoc, "queryStartLoc",
                "Number of each sequence's first row, and of all rows at the end, `[B + 1]`. Null where every sequence \
                 has L rows, in mode 1 also one row of `[T, dim]`." }
            1 { cache_indices: tensor, CacheIndices, "cacheIndices",
                "The line of each sequence, `[B]`, or the first of each row, `[B, n]`; null is its own number." }
            1 { initial_state_mode: tensor, InitialStateMode, "initialStateMode",
                "Whether each sequence goes on from its line, `[B]`, in mode 0; null is from zeros." }
            1 { num_accepted_tokens: tensor, NumAcceptedTokens, "numAcceptedTokens",
                "Rows of each sequence's last step that it goes on behind, `[B]`, in mode 1 of width 4." }
            1 { activation_mode: int = 0, ActivationMode, "activationMode", "1 is SiLU behind the sum, 0 none." }
            1 { pad_slot_id: int = -1, PadSlotId, "padSlotId", "The line of a sequence that is left out." }
            1 { run_mode: int = 0, RunMode, "runMode",
                "0: a sequence goes on from its line where `initial_state_mode` says so. 1: each does." }
            1 { y: output, Y, "y", "The convolved rows, with the shape of `x`." }
        }
    };
}

causal_conv1d_arguments! { declare_arguments { "CausalConv1d", #[derive(Copy)] CausalConvCall } }

versions! {
    /// The version of CausalConv1d.
    pub enum Version {
        /// The only one.
        V1 = OperatorVersion::new(1, "aclnnCausalConv1d", "8.5 with vLLM-Ascend's operator package")
            .exported_since(V8_5).on_a2_a3(V8_5).on_ascend950(V9_0),
    }
}

/// The rules of CausalConv1d.
pub mod rules {
    use super::*;

    rules! {
        in Scope::ALL.since(V8_5);
        PRODUCT = "causal_conv.product", FIND_KERNEL_ERROR, V1, "CausalConv1d package, products" in Scope::ALL,
            "the package is made for the product and the release",
            "run on Atlas A2, Atlas A3 or Ascend 950 with CANN 8.5 or newer";
        REQUIRED = "causal_conv.required", TILING_ERROR, V1, "CausalConv1d package, inputs",
            "x, weight, convStates and y are given",
            "pass rows, weights, a pool of lines and an output";
        MODE = "causal_conv.mode", TILING_ERROR, V1, "CausalConv1d package, attributes",
            "activationMode and runMode are 0 or 1",
            "pass 1 for SiLU or 0 for none; as runMode 0 for prompts or 1 for decoding";
        DTYPE = "causal_conv.dtype", TILING_ERROR, V1, "CausalConv1d package, dtypes",
            "x, weight, bias, convStates and y are all FLOAT16 or all BF16, queryStartLoc, cacheIndices and "
            "numAcceptedTokens INT32, initialStateMode BOOL, INT32 or INT64",
            "convert the named tensor to one of the allowed dtypes";
        FORMAT = "causal_conv.format", TILING_ERROR, V1, "CausalConv1d package, formats",
            "tensors are in a plain format such as ND, with dimensions of at least 0 whose bytes can be addressed",
            "describe the tensor as ND, with a shape that memory can hold";
        CONTIGUOUS = "causal_conv.contiguous", TILING_ERROR, V1, "CausalConv1d package, which does not say",
            "convStates and y are contiguous: what a build of the package does with views of them is not known",
            "pass tensors of their own, and copy to where the view is";
        RANK = "causal_conv.rank", TILING_ERROR, V1, "CausalConv1d package, shapes",
            "x has 2 or 3 axes, weight 2, convStates 3, cacheIndices 1 or 2, the other tensors 1",
            "describe the tensor with as many axes";
        CHANNELS = "causal_conv.channels", TILING_ERROR, V1, "CausalConv1d package, shapes",
            "a row has a multiple of 16 elements",
            "pad the channels of rows, weights and lines to a multiple of 16";
        WIDTH = "causal_conv.width", TILING_ERROR, V1, "CausalConv1d package, shapes",
            "a window has 2 to 4 rows",
            "sum the products of a wider window on the host";
        SHAPE = "causal_conv.shape", TILING_ERROR, V1, "CausalConv1d package, shapes",
            "weight, bias, convStates and y have the channels of x, y its shape, and queryStartLoc, cacheIndices, "
            "initialStateMode and numAcceptedTokens the sequences of the call",
            "give tensors of the same rows, channels and sequences";
        EMPTY = "causal_conv.empty", TILING_ERROR, V1, "CausalConv1d package, shapes",
            "there are sequences, and rows in each of x [B, L, dim]",
            "leave the call out where there is nothing to compute";
        LINES = "causal_conv.lines", TILING_ERROR, V1, "CausalConv1d package, convStates",
            "there are lines, without cacheIndices one for each sequence",
            "give the pool a line for each sequence, or say by cacheIndices which lines are meant";
        LINE_ROWS = "causal_conv.line_rows", TILING_ERROR, V1, "CausalConv1d package, convStates",
            "a line has a row for each of a window but the last, with numAcceptedTokens and x [B, L, dim] L + 2",
            "make the pool with longer lines";
        STARTS = "causal_conv.starts", TILING_ERROR, V1, "CausalConv1d package, queryStartLoc",
            "queryStartLoc is given in mode 0 with x [T, dim]",
            "give the number of each sequence's first row, and behind them that of all rows";
        HISTORY = "causal_conv.history", TILING_ERROR, V1, "CausalConv1d package, initialStateMode",
            "initialStateMode is null in mode 1, in which every sequence goes on from its line",
            "leave initialStateMode out, or compute in mode 0";
        ACCEPTED = "causal_conv.accepted", TILING_ERROR, V1, "CausalConv1d package, numAcceptedTokens",
            "numAcceptedTokens is given in mode 1 of width 4 alone",
            "leave numAcceptedTokens out, and keep the lines behind accepted rows yourself";
        CONTENTS = "causal_conv.contents", Overrun("rows of other memory are read or written"), V1,
            "CausalConv1d package, kernel",
            "queryStartLoc begins with 0, does not decrease and ends with the rows of x, and accepted counts are those "
            "of a line's rows",
            "make starts and counts from one batch";
        LEFT_OUT = "causal_conv.left_out", Lint("rows of y keep what was there, or a line what it had"), V1,
            "CausalConv1d package, kernel",
            "each sequence has a line of the pool, which has room for its rows where there are accepted counts",
            "give each sequence a line, and leave sequences without rows out of the call";
        SHARED = "causal_conv.shared_line", Lint("a line that is read may be another than is meant"), V1,
            "CausalConv1d package, kernel",
            "no two sequences name one line",
            "give each sequence a line of its own, and copy one that two sequences begin with";
    }
}

use rules::*;

described_by! { CausalConv1d, RULES }

/// Width of the window with which a call takes accepted counts.
const ACCEPTED_WIDTH: i64 = 4;

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
    pub history: &'a [i64],
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
    pub history: Option<usize>,
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

    /// What is there, and what would do.
    pub fn texts(&self) -> [String; 2] {
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

impl fmt::Display for ConvFault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let [given, allowed] = self.texts();
        write!(f, "{given}, allowed: {allowed}")
    }
}

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
        let (history, kept) = match contents.accepted.get(sequence) {
            // Two rows of the window, and all new ones: what the next step may go on behind.
            Some(&given) => {
                let first = given.saturating_sub(1).clamp(0, self.most_accepted().saturating_sub(1) as i64);
                (usize::try_from(first).ok(), 1..front.saturating_add(rows.len()))
            }
            None => {
                let goes_on = self.update || contents.history.get(sequence).is_some_and(|&mode| mode != 0);
                (goes_on.then_some(0), rows.len()..rows.len().saturating_add(front))
            }
        };
        Some(Ok(ConvRun { sequence, rows, line, history, kept }))
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
        match faults.into_iter().find(|fault| !allowed.contains(&fault.rule().id)) {
            None => Ok(()),
            Some(fault) => {
                let [given, allowed] = fault.texts();
                Err(fault.rule().broken(given, allowed))
            }
        }
    }
}

impl CallContract for CausalConv1d {
    const KEEPS_ELEMENTS: bool = true;

    checked_for! { target }

    fn imply_outputs(arguments: &mut Self::Arguments, _: &dyn Fn(&str) -> Option<Dims>) {
        arguments.y = arguments.y.or_else(|| arguments.call().output());
    }

    fn check_contents(
        arguments: &Self::Arguments,
        _: Version,
        target: Target,
        integers: &dyn Fn(&str) -> Vec<i64>,
    ) -> Result<(), Violation> {
        let Ok(problem) = arguments.call().check(target) else {
            return Ok(());
        };
        let [starts, lines, history, accepted] = CausalConvCall::CONTENTS.map(|parameter| integers(parameter.name()));
        let contents = ConvContents { starts: &starts, lines: &lines, history: &history, accepted: &accepted };
        problem.check_contents(contents, &[LEFT_OUT.id, SHARED.id])
    }
}

impl CausalConvCall {
    /// The tensors whose numbers lead to rows and lines: starts, lines, which sequences go on, and accepted counts.
    pub const CONTENTS: [Parameter; 4] =
        [Parameter::QueryStartLoc, Parameter::CacheIndices, Parameter::InitialStateMode, Parameter::NumAcceptedTokens];

    /// The output, as the rows imply it.
    pub fn output(&self) -> Option<TensorDesc> {
        let x = self.x?;
        Some(TensorDesc::packed(x.dtype, x.shape))
    }

    /// Checks the call against the contract of the operator on `target`, and resolves it. The contents of starts,
    /// lines and accepted counts are not checked.
    ///
    /// Allocates nothing unless it refuses.
    ///
    /// # Errors
    /// [`Violation`] by the first broken rule.
    pub fn check(&self, target: Target) -> Result<ConvProblem, Violation> {
        let allowed = "Atlas A2, A3 and Ascend 950 with 8.5 or newer";
        require!(Version::V1.runs_on(target), PRODUCT, target, allowed);
        let x = REQUIRED.requires(self.x, "x")?;
        let weight = REQUIRED.requires(self.weight, "weight")?;
        let states = REQUIRED.requires(self.conv_states, "convStates")?;
        let y = REQUIRED.requires(self.y, "y")?;
        MODE.takes(Named("activationMode", self.activation_mode), 0..=1)?;
        MODE.takes(Named("runMode", self.run_mode), 0..=1)?;
        let update = self.run_mode == 1;
        self.dtypes(&x)?;
        FORMAT.plain(self)?;
        FORMAT.addressable(self)?;
        for (name, desc) in [("convStates", &states), ("y", &y)] {
            let given = format_args!("{name} {} strides {}", desc.shape, desc.strides);
            require!(desc.is_contiguous(), CONTIGUOUS, given, "row-major strides");
        }
        require!(
            matches!(x.shape.rank(), 2 | 3),
            RANK,
            format_args!("x {}", x.shape),
            "2 axes, rows and channels, or 3, sequences before them",
        );
        RANK.takes(Named("weight", weight.shape), Rank(2))?;
        RANK.takes(Named("convStates", states.shape), Rank(3))?;
        let axis = |desc: &TensorDesc, axis: usize| desc.shape.get(axis).copied().unwrap_or(0);
        let channels = axis(&x, x.shape.rank().saturating_sub(1));
        CHANNELS.takes(Noted(channels, "channels"), Multiples(16, ..=i64::MAX))?;
        require!(channels > 0, CHANNELS, "no channels", "multiples of 16, at least 16");
        let [width, lines, line_rows] = [axis(&weight, 0), axis(&states, 0), axis(&states, 1)];
        WIDTH.takes(Noted(width, "rows of weights"), 2..=4)?;
        self.is("weight", Some(&weight), &[width, channels])?;
        self.is("bias", self.bias.as_ref(), &[channels])?;
        self.is("convStates", Some(&states), &[lines, line_rows, channels])?;
        self.is("y", Some(&y), &x.shape)?;
        let (sequences, each) = self.sequences(&x, update)?;
        HISTORY.forbids([("initialStateMode", update && self.initial_state_mode.is_some())])?;
        let accepts = update && width == ACCEPTED_WIDTH;
        ACCEPTED.forbids([("numAcceptedTokens", !accepts && self.num_accepted_tokens.is_some())])?;
        self.is("queryStartLoc", self.query_start_loc.as_ref(), &[sequences.saturating_add(1)])?;
        self.is("initialStateMode", self.initial_state_mode.as_ref(), &[sequences])?;
        self.is("numAcceptedTokens", self.num_accepted_tokens.as_ref(), &[sequences])?;
        if let Some(indices) = &self.cache_indices {
            let ranks = matches!(indices.shape.rank(), 1 | 2);
            require!(ranks, RANK, format_args!("cacheIndices {}", indices.shape), "1 or 2 axes");
            let columns = indices.shape.get(1).copied().unwrap_or(1).max(1);
            let wanted = [sequences, columns];
            self.is("cacheIndices", Some(indices), &wanted[..indices.shape.rank()])?;
        }
        let least = if self.cache_indices.is_some() { 1 } else { sequences.max(1) };
        LINES.takes(Noted(lines, "lines"), least..)?;
        let wanted = match (self.num_accepted_tokens, x.shape.rank()) {
            (Some(_), 3) => axis(&x, 1).saturating_add(2),
            _ => 0,
        };
        LINE_ROWS.takes(Noted(line_rows, "rows of a line"), wanted.max(width.saturating_sub(1))..)?;
        let count = |size: i64| usize::try_from(size).unwrap_or(0);
        Ok(ConvProblem {
            sequences: count(sequences),
            rows: x.shape[..x.shape.rank() - 1].iter().map(|&axis| count(axis)).product(),
            fixed_rows: each.map(count),
            channels: count(channels),
            width: count(width),
            lines: count(lines),
            line_rows: count(line_rows),
            silu: self.activation_mode == 1,
            update,
            pad: self.pad_slot_id,
        })
    }

    /// The sequences of a call, and the rows of each where no tensor says them.
    fn sequences(&self, x: &TensorDesc, update: bool) -> Result<(i64, Option<i64>), Violation> {
        let starts = self.query_start_loc.as_ref();
        if let Some(starts) = starts {
            RANK.takes(Named("queryStartLoc", starts.shape), Rank(1))?;
            EMPTY.takes(Noted(starts.shape[0].saturating_sub(1), "sequences of queryStartLoc"), 1..)?;
        }
        let rows = x.shape[0];
        if x.shape.rank() == 3 {
            EMPTY.takes(Noted(rows, "sequences"), 1..)?;
            EMPTY.takes(Noted(x.shape[1], "rows of a sequence"), 1..)?;
            return Ok((rows, Some(x.shape[1])));
        }
        match starts.map(|starts| starts.shape[0].saturating_sub(1)) {
            // As many sequences as rows: the operator takes a row for each, whatever the starts say.
            Some(sequences) => Ok((sequences, (update && sequences == rows).then_some(1))),
            None if update => {
                EMPTY.takes(Noted(rows, "sequences"), 1..)?;
                Ok((rows, Some(1)))
            }
            None => {
                STARTS.requires(starts, "queryStartLoc")?;
                Ok((0, None))
            }
        }
    }

    /// No lint of the operator is about what a call describes; those about numbers on the device are found there.
    ///
    /// # Errors
    /// None.
    pub fn lint(&self, _: Target, _: &[&str]) -> Result<(), Violation> {
        Ok(())
    }

    fn dtypes(&self, x: &TensorDesc) -> Checked {
        DTYPE.takes(Named("x", x.dtype), [Float16, Bf16])?;
        for (argument, desc) in self.each_tensor() {
            let allowed: &[DType] = match argument.parameter {
                Parameter::InitialStateMode => &[Bool, Int32, Int64],
                Parameter::QueryStartLoc | Parameter::CacheIndices | Parameter::NumAcceptedTokens => &[Int32],
                _ => &[x.dtype],
            };
            DTYPE.takes(Named(argument.acl_name(), desc.dtype), allowed)?;
        }
        Ok(())
    }

    /// Checks that a tensor, if it is given, has this shape.
    fn is(&self, name: &str, desc: Option<&TensorDesc>, shape: &[i64]) -> Checked {
        let (Some(desc), Some(wanted)) = (desc, Dims::new(shape)) else {
            return Ok(());
        };
        RANK.takes(Named(name, desc.shape), Rank(shape.len()))?;
        SHAPE.takes(Named(name, desc.shape), wanted)
    }
}

impl WalkedTensors<CausalConvCall> for ConvProblem {
    fn walked_shape(&self, _: &CausalConvCall, _: Parameter, desc: &TensorDesc) -> Option<Dims> {
        (!self.is_idle()).then_some(desc.shape)
    }
}
