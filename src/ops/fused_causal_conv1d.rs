//! FusedCausalConv1d: the causal convolution of CANN for Ascend 950, with windows of 3 rows, over a pool of lines that
//! keep the last rows of each sequence.
//!
//! [`FusedCausalConv1d`] describes a call, which is planned once and launched per layer as a [`FusedConvPlan`], or as an
//! [`InplaceFusedConvPlan`](crate::inplace_fused_causal_conv::InplaceFusedConvPlan) that writes to its rows.

use std::collections::HashMap;
use std::fmt;
use std::sync::Arc;

use ascend_spec::declared::AnyArguments;
use ascend_spec::ops::convolution::ConvProblem;
use ascend_spec::ops::fused_causal_conv1d::{FusedConvCall, Parameter, Version, rules};
use ascend_spec::{Cann, Release, TensorDesc, Violation, fused_causal_conv1d_arguments};

use crate::error::{Error, Result};
use crate::memory::Element;
use crate::operator::{AllowedLints, entry_points, lints_of, named_tensors, phase_one};
use crate::ops::causal_conv1d::{ConvCheck, NO_LINE};
use crate::ops::delta_rule::{narrow, number, too_many_values, wide};
use crate::ops::known_numbers::{KnownNumbers, NumbersCheck};
use crate::ops::operation::{self, Operation, Sealed, new_output};
use crate::runtime::{Platform, Queue, ReplayCheck, Runtime, Stream};
use crate::tensor::{AnyTensor, Tensor};

entry_points! {
    fused_causal_conv1d_arguments, FusedConvCall;
    Version::V1 => 1: aclnnFusedCausalConv1dGetWorkspaceSize, aclnnFusedCausalConv1d;
}

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
    /// The tensors of [`FusedConvCall::CONTENTS`].
    tensors: [Option<Tensor<i32>>; 7],
    /// What they hold.
    numbers: KnownNumbers<ConvCheck, 7>,
    /// Rows of a line.
    line_rows: usize,
    /// Tokens of a block.
    block_size: Option<usize>,
    /// Most rows of a sequence.
    most_rows: usize,
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
    /// As for [`Self::new`], for a sequence without a line for each block, also of rejected rows, for lines of blocks that
    /// are written and had by another block, and for blocks of fewer than 2 tokens.
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
        numbers: [Vec<i32>; 7],
    ) -> Result<Self> {
        let mut tensors = [const { None }; 7];
        for ((parameter, numbers), tensor) in FusedConvCall::CONTENTS.into_iter().zip(&numbers).zip(&mut tensors) {
            let uploaded = match (numbers.len(), parameter, block_size) {
                (0, ..) => continue,
                (count, Parameter::CacheIndices, Some(_)) => {
                    stream.upload(numbers, [sequences.len(), count / sequences.len()])?
                }
                (count, ..) => stream.upload(numbers, [count])?,
            };
            uploaded.freeze();
            *tensor = Some(uploaded);
        }
        let most_rows = sequences.iter().map(|sequence| sequence.rows).max().unwrap_or(0);
        let numbers = KnownNumbers::new("sequences", numbers.map(|numbers| wide(&numbers)));
        Ok(Self { tensors, numbers, line_rows, block_size, most_rows })
    }

    /// Waits for a stream, then replaces the sequences by as many others, with as many rows in all: plans, and launches
    /// that were captured, read the new ones. Other streams that use the sequences have to be waited for before. Each
    /// has at least one row, and none more than the longest of the first ones.
    ///
    /// # Errors
    /// [`ARGUMENT_VALUE`](crate::rules::ARGUMENT_VALUE) for another number of sequences, and as for
    /// [`new`](Self::new) or [`in_blocks`](Self::in_blocks), with as many blocks as the longest list of lines of the first ones;
    /// [`Error::Violation`] for what a plan refuses that was made of the sequences or of a clone of them, or a captured
    /// launch of such a plan, for as long as the plan or the graph is there. Nothing is replaced then.
    /// [`ARGUMENT_DEVICE`](crate::rules::ARGUMENT_DEVICE) for a stream of another device; as for
    /// [`Stream::synchronize`]. Where writing itself fails, the sequences are refused by plans, launches and replays
    /// until they are overwritten again. No other thread may queue work meanwhile that reads them.
    pub fn overwrite(&self, stream: &Stream, sequences: &[FusedConvSequence<'_>]) -> Result<()> {
        let [starts, lines, ..] = &self.tensors;
        let [count, lines] = [starts, lines].map(|tensor| tensor.as_ref().map_or(0, |tensor| tensor.len()));
        let count = count.saturating_sub(1);
        if sequences.len() != count {
            let given = format_args!("{} in place of {count} sequences", sequences.len());
            return Err(Error::invalid("sequences", given, count).fix(match self.block_size {
                _ if sequences.len() > count => "make the sequences anew, with room for as many, or divide the step",
                None => "fill up with rows of padding, as sequences without a line",
                Some(_) => "fill up with rows of padding, as sequences with scratch lines",
            }));
        }
        self.tensors.iter().flatten().try_for_each(|tensor| tensor.on("sequences", stream.context()))?;
        let columns = lines / count.max(1) - usize::from(self.block_size.is_some());
        let numbers = numbers_of(self.line_rows, self.block_size, columns, sequences)?;
        let tensors = self.tensors.each_ref().map(|tensor| tensor.as_ref().map(|tensor| &**tensor));
        self.numbers.overwrite(stream, tensors, numbers.map(|numbers| wide(&numbers)), narrow)
    }

    /// Whether some rows belong to sequences without a line, which the operator leaves out.
    fn has_unwritten(&self) -> Result<bool> {
        let no_line = |lines: &[i64]| lines.contains(&i64::from(NO_LINE));
        self.numbers.read(|[_, lines, ..]| self.block_size.is_none() && no_line(lines))
    }

    /// The tensor of each argument, by the names that an operator has for [`FusedConvCall::CONTENTS`].
    pub(super) fn each<P: Copy>(&self, parameters: [P; 7]) -> impl Iterator<Item = (P, &AnyTensor)> {
        parameters
            .into_iter()
            .zip(&self.tensors)
            .filter_map(|(parameter, tensor)| Some((parameter, &**tensor.as_ref()?)))
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
) -> Result<[Vec<i32>; 7]> {
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

/// A call of FusedCausalConv1d: each channel of a row becomes the sum of the 3 rows that end with it, each times a
/// weight of the channel. What is in front of a sequence is in a line of the pool, and the call renews the line.
///
/// Describe it, plan it for tensors of certain shapes, and launch the [`FusedConvPlan`] once a layer. Rows, weights and
/// lines are of `f16`, or all of `bf16`, with a multiple of 16 channels up to 16384, at least 64 where no sequence has more
/// than 8 rows.
///
/// The operator has neither a bias nor an activation; models with windows of 4 rows and SiLU convolve by
/// [`CausalConv1d`](crate::causal_conv::CausalConv1d).
///
/// Source: aclnnFusedCausalConv1d and aclnnInplaceFusedCausalConv1d, for Ascend 950 since CANN 9.1.
///
/// ```
/// use ascend_attention::fused_causal_conv::{FusedCausalConv1d, FusedConvSequence, FusedConvSequences};
/// use ascend_attention::spec::{Cann, Soc};
/// use ascend_attention::{Machine, Runtime, bf16};
///
/// # fn main() -> ascend_attention::Result<()> {
/// # #[cfg(feature = "emulation")] {
/// let stream = Runtime::emulated_as(&Machine::new(Soc::Ascend950, Cann::V9_1))?.device(0)?.stream()?;
/// let rows = |numbers: &[f32]| numbers.iter().flat_map(|x| [bf16::from_f32(*x); 64]).collect::<Vec<_>>();
/// // Two lines of two rows, and the sum of a row, twice the one before, and four times the one before that.
/// let lines = stream.upload(&rows(&[1.0, 5.0, 0.0, 0.0]), [2, 2, 64])?;
/// let weight = stream.upload(&rows(&[4.0, 2.0, 1.0]), [3, 64])?;
/// let x = stream.upload(&rows(&[1.0, 3.0, 4.0]), [3, 64])?;
/// let sequences = FusedConvSequences::new(&stream, 2, &[
///     FusedConvSequence { rows: 2, computed: 7, rejected: 0, lines: &[0] },
///     FusedConvSequence { rows: 1, computed: 0, rejected: 0, lines: &[1] },
/// ])?;
/// let plan = FusedCausalConv1d::new().plan(&sequences, (&x, &weight, &lines))?;
/// let y = plan.launch(&stream, (&x, &weight, &lines))?.download(&stream)?;
/// assert_eq!([y[0], y[64], y[128]], [15.0, 25.0, 4.0].map(bf16::from_f32));
/// // Each line ends with its sequence's last row.
/// assert_eq!(lines.download(&stream)?[64], bf16::from_f32(3.0));
/// # }
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug, Default)]
#[must_use = "a description does nothing until planned"]
pub struct FusedCausalConv1d {
    residual: bool,
    whole_windows: bool,
    allowed: AllowedLints,
}

impl FusedCausalConv1d {
    /// A call whose outputs are the sums.
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds each row to its sum, in front of the one rounding.
    #[doc(alias = "residualConnection")]
    pub fn residual(mut self) -> Self {
        self.residual = true;
        self
    }

    /// Makes sums zero whose windows begin in front of the sequence's first token, as Pangu V2 does; with
    /// [`residual`](Self::residual) the output is the row then.
    #[doc(alias = "convMode")]
    pub fn whole_windows(mut self) -> Self {
        self.whole_windows = true;
        self
    }

    /// Lets a call through that breaks this lint, such as `fused_conv.shared_line` of sequences without blocks. The
    /// strict emulation makes an error of it at the launch.
    pub fn allow_lint(mut self, id: &str) -> Self {
        self.allowed.lint(id);
        self
    }

    /// Checks a call of these sequences, and prepares it for tensors of these shapes and strides, whose rows are
    /// exactly those of the sequences: narrow those of a padded step. Nothing is launched, and the tensors are not
    /// kept.
    ///
    /// # Errors
    /// Before any function of the operator is called: [`Error::Violation`]; [`Error::UnknownProduct`],
    /// [`Error::MissingOperator`], [`ARGUMENT_VALUE`](crate::rules::ARGUMENT_VALUE) for `x` of other than 2 axes, and
    /// for lines of other rows than the sequences were made for,
    /// [`ARGUMENT_DEVICE`](crate::rules::ARGUMENT_DEVICE) for tensors of different devices. After that
    /// [`Error::Aclnn`], should the operator refuse the call nevertheless.
    #[doc(alias = "aclnnFusedCausalConv1dGetWorkspaceSize")]
    pub fn plan<'a, T: Element>(
        &self,
        sequences: &FusedConvSequences,
        inputs: impl Into<FusedConvInputs<'a, T>>,
    ) -> Result<FusedConvPlan> {
        let inputs = inputs.into();
        let context = inputs.x.memory().context();
        let given = inputs.each(INPUTS).chain(sequences.each(FusedConvCall::CONTENTS));
        let tensors = named_tensors(&[], &[], given);
        phases_of(Version::V1).admit(context, Version::V1.info(), rules::PRODUCT.fix, tensors.iter().copied())?;
        let call = self.call(sequences, &inputs)?;
        let call = FusedConvCall { y: call.output(), ..call };
        let recorded = AnyArguments::FusedCausalConv1d(call.to_arguments());
        FusedConvPlan::of_call(context, (&call, Version::V1), inputs.x, recorded, &tensors, || {
            let target = context.target()?;
            let y = call.y.filter(|y| y.byte_range().is_some()).ok_or_else(|| too_many_values(inputs.x))?;
            let problem = call.check(target)?;
            let allowed = self.allowed.ids(lints_of::<Version>)?;
            call.lint(target, &allowed)?;
            let numbers = [sequences.require(problem, &allowed)?];
            Ok((FusedConvOperation { sequences: sequences.clone(), numbers, y }, problem.is_idle()))
        })
    }

    /// Which lints the call may break.
    pub(super) fn allowed(&self) -> &AllowedLints {
        &self.allowed
    }

    /// The call without an output.
    pub(super) fn call<T: Element>(
        &self,
        sequences: &FusedConvSequences,
        inputs: &FusedConvInputs<'_, T>,
    ) -> Result<FusedConvCall> {
        released(inputs.x.memory().context().runtime())?;
        let shape = inputs.x.shape();
        if shape.len() != 2 {
            let given = format_args!("{shape:?}");
            return Err(Error::invalid("x", given, "2 axes, the rows of all sequences and their channels")
                .fix("view the rows as [rows, channels]: the sequences say which are whose"));
        }
        if let [_, rows, _] = *inputs.lines.shape()
            && rows != sequences.line_rows
        {
            let allowed = format_args!("{}, for which the sequences were made", sequences.line_rows);
            return Err(Error::invalid("lines", format_args!("{rows} rows of a line"), allowed)
                .fix("make the sequences with the rows of the lines"));
        }
        let desc = |tensor: &AnyTensor| Some(*tensor.desc());
        let numbers = sequences.tensors.each_ref().map(|tensor| tensor.as_ref().and_then(|tensor| desc(tensor)));
        let [query_start_loc, cache_indices, num_accepted_tokens, num_computed_tokens, first, last, initial] = numbers;
        let size = |size: usize| i64::try_from(size).unwrap_or(i64::MAX);
        Ok(FusedConvCall {
            x: desc(inputs.x),
            weight: desc(inputs.weight),
            conv_states: desc(inputs.lines),
            query_start_loc,
            cache_indices,
            num_accepted_tokens,
            num_computed_tokens,
            block_idx_first_scheduled_token: first,
            block_idx_last_scheduled_token: last,
            initial_state_idx: initial,
            max_query_len: size(sequences.most_rows),
            residual_connection: i64::from(self.residual),
            block_size: sequences.block_size.map_or(FusedConvCall::default().block_size, size),
            conv_mode: i64::from(self.whole_windows),
            ..FusedConvCall::default()
        })
    }
}

impl FusedConvSequences {
    /// Checks the numbers for a plan, and those that replace them.
    pub(super) fn require(&self, problem: ConvProblem, allowed: &[&str]) -> Result<Arc<dyn ReplayCheck>> {
        self.numbers.require(ConvCheck::new(problem, allowed))
    }
}

/// Refuses a CANN whose functions of these names may have 15 arguments, as those of a beta of 9.1 have.
pub(crate) fn released(runtime: &Runtime) -> Result<(), Violation> {
    let version = runtime.installed().version.as_deref();
    let is_released = match version {
        Some(version) => is_released(version),
        None => runtime.platform() != Platform::Npu,
    };
    match is_released {
        true => Ok(()),
        false => {
            let version = version.unwrap_or("of no version");
            let given = format_args!("CANN {version}, whose functions may have other arguments");
            Err(rules::PRODUCT.broken(given, "9.1.0 or newer"))
        }
    }
}

/// Whether a version is none of those that came before 9.1.0, which have letters: `9.1.0-beta.1`, `9.1.T5`.
fn is_released(version: &str) -> bool {
    let is_number = |part: &str| !part.is_empty() && part.bytes().all(|byte| byte.is_ascii_digit());
    Cann::of_version(version) != Some(Release::Known(Cann::V9_1)) || version.trim().split('.').all(is_number)
}

/// The parameters of [`FusedConvInputs`].
const INPUTS: [Parameter; 3] = [Parameter::ConvStates, Parameter::X, Parameter::Weight];

/// What a launch reads, and the lines that it reads and writes. From rows, weights and lines.
#[derive(Clone, Copy, Debug)]
#[must_use = "a description of tensors does nothing until planned or launched"]
pub struct FusedConvInputs<'a, T: Element> {
    pub(super) x: &'a Tensor<T>,
    weight: &'a Tensor<T>,
    lines: &'a Tensor<T>,
}

impl<'a, T: Element> From<(&'a Tensor<T>, &'a Tensor<T>, &'a Tensor<T>)> for FusedConvInputs<'a, T> {
    /// Rows `[T, channels]`, weights `[3, channels]`, which are the model's `[channels, 3]` transposed, and lines
    /// `[lines, C, channels]`, of at least 2 rows each. Rows and lines may have gaps between their rows.
    fn from((x, weight, lines): (&'a Tensor<T>, &'a Tensor<T>, &'a Tensor<T>)) -> Self {
        Self { x, weight, lines }
    }
}

impl<'a, T: Element> FusedConvInputs<'a, T> {
    /// Lines, rows and weights by the names that an operator has for them: what is written comes first.
    pub(super) fn each<P>(&self, parameters: [P; 3]) -> impl Iterator<Item = (P, &'a AnyTensor)> {
        let tensors: [&'a AnyTensor; 3] = [self.lines, self.x, self.weight];
        parameters.into_iter().zip(tensors)
    }
}

/// A call of FusedCausalConv1d that was checked and prepared. From [`FusedCausalConv1d::plan`].
///
/// A launch reads and writes the lines, and writes rows of the shape of `x`.
pub type FusedConvPlan = operation::Plan<FusedConvOperation>;

/// FusedCausalConv1d, as its [`FusedConvPlan`] knows it.
#[derive(Debug)]
pub struct FusedConvOperation {
    sequences: FusedConvSequences,
    numbers: [Arc<dyn ReplayCheck>; 1],
    y: TensorDesc,
}

impl Sealed for FusedConvOperation {}

impl Operation for FusedConvOperation {
    type Inputs<'a, T: Element> = FusedConvInputs<'a, T>;
    type Output<T: Element> = Tensor<T>;
    type Parameter = Parameter;

    fn output<T: Element>(&self, plan: &FusedConvPlan) -> Result<Tensor<T>> {
        new_output(plan.context(), Parameter::Y.name(), self.y)
    }

    fn launch<T: Element>(
        &self,
        plan: &FusedConvPlan,
        queue: &impl Queue,
        inputs: &FusedConvInputs<'_, T>,
        y: &mut Tensor<T>,
    ) -> Result<()> {
        let output: (_, &AnyTensor) = (Parameter::Y, y);
        let sequences = self.sequences.each(FusedConvCall::CONTENTS);
        let given = named_tensors(&[output], &[], inputs.each(INPUTS).chain(sequences));
        plan.queue(queue, &given, || Ok(())).flatten()
    }

    fn number_checks(&self) -> &[Arc<dyn ReplayCheck>] {
        &self.numbers
    }

    fn clear_unwritten<T: Element>(&self, stream: &Stream, y: &Tensor<T>) -> Result<()> {
        match self.sequences.has_unwritten()? {
            true => y.clear(stream),
            false => Ok(()),
        }
    }

    fn describe(&self, _: &FusedConvPlan, text: &mut fmt::DebugStruct<'_, '_>) {
        text.field("y", &self.y.shape);
    }
}

#[cfg(test)]
mod tests {
    use super::is_released;

    #[test]
    fn versions_before_the_first_release_may_have_other_arguments() {
        let early =
            ["9.1.0-beta.1", "9.1.0.beta1", "9.1.RC1.alpha002", " 9.1.0.Beta1", "9.1.T5.0.B117", "9.1.1-beta.1"];
        assert!(!early.into_iter().any(is_released));
        let others = ["9.1.0", "9.1", "9.1.1\n", "9.2.0-beta.1", "9.10.0-beta", "8.5.0.alpha001", ""];
        assert!(others.into_iter().all(is_released));
    }
}
