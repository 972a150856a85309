//! CausalConv1d: the causal convolution in front of linear attention, over a pool of lines that keep the last rows of
//! each sequence.
//!
//! [`CausalConv1d`] describes a call, which is planned once and launched per layer as a [`CausalConvPlan`].

use std::sync::atomic::{AtomicBool, Ordering};

use ascend_spec::ops::causal_conv1d::{CausalConvCall, Parameter, Version};
use ascend_spec::ops::convolution::{ConvContents, ConvProblem};
use ascend_spec::{Violation, causal_conv1d_arguments};
use smallvec::SmallVec;

use crate::error::{Error, Result};
use crate::memory::Element;
use crate::operator::{AllowedLints, EntryPoints, NamedTensors, entry_points, lints_of, phase_one};
use crate::ops::delta_rule::require_held;
use crate::ops::known_numbers::{KnownNumbers, NumbersCheck, narrow, number, numbers};
use crate::ops::operation::{self, PlainCall, PlainOperation, Sealed};
use crate::rules::PACKAGE_TRUSTED;
use crate::runtime::{Platform, Runtime, Stream};
use crate::tensor::{AnyTensor, Tensor};

entry_points! {
    causal_conv1d_arguments, CausalConvCall, AnyArguments::CausalConv1d;
    Version::V1 => 1: aclnnCausalConv1dGetWorkspaceSize, aclnnCausalConv1d;
}

/// The places of lines and of accepted counts in [`CausalConvCall::CONTENTS`].
const LINES: usize = 1;
const ACCEPTED: usize = 3;

/// What to do where the installed libraries have no such operator.
const INSTEAD: &str = "install vLLM-Ascend's operator package and name it in ASCEND_CUSTOM_OPP_PATH, or convolve on \
     the host: CANN has no such operator";

/// Whether the program has vouched for the arguments of the installed package.
static TRUSTED: AtomicBool = AtomicBool::new(false);

/// Lets plans of [`CausalConv1d`] call the function of the installed package on an NPU, in the whole process.
/// Emulations need no such promise.
///
/// # Safety
/// `aclnnCausalConv1dGetWorkspaceSize` of the libraries that the process loads has the 14 arguments of
/// `include/aclnnop/aclnn_causal_conv1d.h`. Builds of vLLM-Ascend's package differ in them under one name, and nothing
/// tells one from the other: another build reads arguments that were never passed.
pub unsafe fn trust_package() {
    TRUSTED.store(true, Ordering::Relaxed);
}

/// Refuses a platform whose function may have other arguments.
pub(crate) fn vouched_for(runtime: &Runtime) -> Result<(), Violation> {
    if runtime.platform() == Platform::Npu && !TRUSTED.load(Ordering::Relaxed) {
        let given = "an installed package that the program has not vouched for";
        return Err(PACKAGE_TRUSTED.broken(given, "the build that `trust_package` describes"));
    }
    Ok(())
}

/// A sequence of a call: how many rows it has, and where its last ones are kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ConvSequence {
    /// Its rows in this call.
    pub rows: usize,
    /// Its line of the pool. A sequence without one is left out: nothing of it is computed, and its rows of the output
    /// keep what was there; those of an output that a `launch` makes are zeros. Rows of padding are such a sequence.
    pub line: Option<usize>,
    /// Whether it goes on from its line; otherwise what is in front of its first row is zeros.
    pub continues: bool,
}

/// The sequences of a call, one behind the other, each with a line of the pool.
///
/// The operator reads these numbers on the device, where it leaves out a sequence whose line is not in the pool. Made
/// here, the host knows them, and plans refuse numbers that lead elsewhere. They can be
/// [overwritten](Self::overwrite), for the next step of captured launches. Cloning shares the memory.
#[derive(Clone, Debug)]
pub struct ConvSequences {
    /// Those of [`CausalConvCall::CONTENTS`]: of the last two, all sequences have the one or the other.
    numbers: KnownNumbers<ConvCheck, 4>,
}

/// What a plan of a causal convolution requires of the numbers.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct ConvCheck {
    problem: ConvProblem,
    allowed: Vec<Box<str>>,
}

impl ConvCheck {
    /// What a call requires that may break the lints `allowed`.
    pub(super) fn new(problem: ConvProblem, allowed: &[&str]) -> Self {
        Self { problem, allowed: allowed.iter().map(|&id| id.into()).collect() }
    }

    pub(super) fn contents(&self, contents: ConvContents<'_>) -> Result<()> {
        let allowed: SmallVec<[&str; 4]> = self.allowed.iter().map(|id| &**id).collect();
        Ok(self.problem.check_contents(contents, &allowed)?)
    }
}

impl NumbersCheck<4> for ConvCheck {
    fn check(&self, numbers: &[Vec<i64>; 4]) -> Result<()> {
        self.contents(CausalConvCall::contents(numbers))
    }
}

/// The numbers of sequences without accepted counts: where they begin and the last one ends, their lines, and which of
/// them go on from their lines.
fn numbers_of(sequences: &[ConvSequence]) -> Result<[Vec<i64>; 4]> {
    let ends = sequences.iter().scan(0usize, |end, sequence| {
        *end = end.saturating_add(sequence.rows);
        Some(*end)
    });
    let starts = numbers("rows", [0].into_iter().chain(ends))?;
    let line = |sequence: &ConvSequence| match sequence.line {
        Some(line) => number("lines", line),
        None => Ok(NO_LINE),
    };
    let lines = sequences.iter().map(line).collect::<Result<_>>()?;
    let modes = sequences.iter().map(|sequence| i64::from(sequence.continues)).collect();
    Ok([starts, lines, modes, Vec::new()])
}

/// The line of a sequence that is left out: what `padSlotId` is where a call leaves it as it is.
pub(super) const NO_LINE: i64 = -1;

impl ConvSequences {
    /// The sequences of a call.
    ///
    /// # Errors
    /// [`ARGUMENT_VALUE`](crate::rules::ARGUMENT_VALUE) for no sequence, and numbers beyond INT32; otherwise as for
    /// [`Stream::upload`].
    pub fn new(stream: &Stream, sequences: &[ConvSequence]) -> Result<Self> {
        if sequences.is_empty() {
            return Err(Error::invalid("sequences", 0, "at least one").fix("leave the call out"));
        }
        Self::of_numbers(stream, numbers_of(sequences)?)
    }

    fn of_numbers(stream: &Stream, numbers: [Vec<i64>; 4]) -> Result<Self> {
        Ok(Self { numbers: KnownNumbers::upload(stream, "sequences", numbers, narrow)? })
    }

    /// Waits for a stream, then replaces the sequences by as many others, with as many rows in all: plans, and launches
    /// that were captured, read the new ones. Other streams that use the sequences have to be waited for before.
    ///
    /// # Errors
    /// [`ARGUMENT_VALUE`](crate::rules::ARGUMENT_VALUE) for another number of sequences, and for sequences with
    /// accepted counts; [`Error::Violation`] for what a plan refuses that was made of the sequences or of a clone of
    /// them, or a captured launch of such a plan, for as long as the plan or the graph is there. Nothing is replaced
    /// then.
    /// [`ARGUMENT_DEVICE`](crate::rules::ARGUMENT_DEVICE) for a stream of another device; as for
    /// [`Stream::synchronize`]. Where writing itself fails, the sequences are refused by plans, launches and replays
    /// until they are overwritten again. No other thread may queue work meanwhile that reads them.
    pub fn overwrite(&self, stream: &Stream, sequences: &[ConvSequence]) -> Result<()> {
        let (count, accepted) = (self.numbers.tensor(LINES).len(), self.has_accepted());
        if sequences.len() != count || accepted {
            let kind = if accepted { "sequences with accepted counts" } else { "sequences" };
            let given = format_args!("{} in place of {count} {kind}", sequences.len());
            return Err(Error::invalid("sequences", given, format_args!("{count}, without counts")).fix(
                match sequences.len() > count {
                    true => "make the sequences anew, with room for as many, or divide the step",
                    false => "fill up with sequences without rows, and make those with counts anew",
                },
            ));
        }
        self.numbers.overwrite(stream, numbers_of(sequences)?)
    }

    /// The sequences, each of which goes on behind this number of rows of the call before, of which the first counts:
    /// for windows of 4 rows and lines of 3 rows and one more for each draft. A call without counts comes before the
    /// first one with them, with counts of 1. All sequences go on from their lines.
    ///
    /// # Errors
    /// [`ARGUMENT_VALUE`](crate::rules::ARGUMENT_VALUE) for another number of counts than of sequences, and for
    /// sequences that do not go on from their lines; otherwise as for [`Stream::upload`].
    pub fn accepted(self, stream: &Stream, counts: &[usize]) -> Result<Self> {
        let [starts, lines, modes, _] = self.numbers.read(Clone::clone)?;
        if counts.len() != lines.len() || self.has_accepted() || modes.contains(&0) {
            let given = format_args!("{} counts for {} sequences", counts.len(), lines.len());
            return Err(Error::invalid("accepted", given, "a count for each sequence, all of which go on")
                .fix("make the sequences of this step anew, all with `continues`, and counts from the same batch"));
        }
        // Tensors of their own: clones of the sequences can be overwritten.
        Self::of_numbers(stream, [starts, lines, Vec::new(), numbers("accepted", counts.iter().copied())?])
    }

    /// Whether the sequences have accepted counts.
    fn has_accepted(&self) -> bool {
        self.numbers.given(ACCEPTED).is_some()
    }

    /// Whether some rows belong to sequences without a line, which the operator leaves out.
    fn has_unwritten(&self) -> Result<bool> {
        self.numbers.read(|[starts, lines, ..]| {
            let rows = starts.windows(2).map(|ends| matches!(ends, [start, end] if start < end));
            rows.zip(lines).any(|(has_rows, line)| has_rows && *line == NO_LINE)
        })
    }

    fn each(&self) -> impl Iterator<Item = (Parameter, &AnyTensor)> {
        self.numbers.each(CausalConvCall::CONTENTS)
    }
}

/// A call of CausalConv1d: each channel of a row becomes the sum of the `W` rows that end with it, each times a weight
/// of the channel, `W` from 2 to 4. What is in front of a sequence is in its line of the pool, which the call renews.
///
/// Describe it, plan it for tensors of certain shapes, and launch the [`CausalConvPlan`] once a layer. Rows, weights
/// and lines are of `f16`, or all of `bf16`, with a multiple of 16 channels.
///
/// Source: CausalConv1d of vLLM-Ascend's operator package, for Atlas A2, A3 and Ascend 950; no release of CANN has it.
/// On an NPU the program vouches for the installed build ([`trust_package`]).
///
/// ```
/// use ascend_attention::causal_conv::{CausalConv1d, ConvSequence, ConvSequences};
/// use ascend_attention::{Runtime, Tensor, bf16};
///
/// # fn main() -> ascend_attention::Result<()> {
/// # #[cfg(feature = "emulation")] {
/// let stream = Runtime::emulated()?.device(0)?.stream()?;
/// let rows = |numbers: &[f32]| numbers.iter().flat_map(|x| [bf16::from_f32(*x); 16]).collect::<Vec<_>>();
/// // Two lines of one row, and the sum of a row and twice the one before.
/// let lines = stream.upload(&rows(&[5.0, 0.0]), [2, 1, 16])?;
/// let weight = stream.upload(&rows(&[2.0, 1.0]), [2, 16])?;
/// let x = stream.upload(&rows(&[1.0, 3.0, 4.0]), [3, 16])?;
/// let sequences = ConvSequences::new(&stream, &[
///     ConvSequence { rows: 2, line: Some(0), continues: true },
///     ConvSequence { rows: 1, line: Some(1), continues: false },
/// ])?;
/// let plan = CausalConv1d::new().plan(&sequences, (&x, &weight, &lines))?;
/// let y = plan.launch(&stream, (&x, &weight, &lines))?.download(&stream)?;
/// assert_eq!([y[0], y[16], y[32]], [11.0, 5.0, 4.0].map(bf16::from_f32));
/// // Each line has its sequence's last row.
/// assert_eq!(lines.download(&stream)?[0], bf16::from_f32(3.0));
/// # }
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug, Default)]
#[must_use = "a description does nothing until planned"]
pub struct CausalConv1d {
    silu: bool,
    allowed: AllowedLints,
}

impl CausalConv1d {
    /// A call without an activation.
    pub fn new() -> Self {
        Self::default()
    }

    /// Applies SiLU, `x / (1 + exp(-x))`, to each sum: Qwen3-Next, Qwen3.5 and Kimi do.
    pub fn silu(mut self) -> Self {
        self.silu = true;
        self
    }

    /// Lets a call through that breaks this lint, such as `causal_conv.shared_line`. The strict emulation makes an
    /// error of it at the launch.
    pub fn allow_lint(mut self, id: &str) -> Self {
        self.allowed.lint(id);
        self
    }

    /// Checks a call of these sequences, and prepares it for tensors of these shapes and strides, whose rows are
    /// exactly those of the sequences: narrow those of a padded step. Nothing is launched, and the tensors are not
    /// kept.
    ///
    /// # Errors
    /// Before any function of the operator is called: [`Error::Violation`], also by
    /// [`PACKAGE_TRUSTED`] on an NPU with a package that the program has not vouched for;
    /// [`Error::UnknownProduct`], [`Error::MissingOperator`] where no package is installed,
    /// [`ARGUMENT_DEVICE`](crate::rules::ARGUMENT_DEVICE) for tensors of different devices. After that
    /// [`Error::Aclnn`], should the operator refuse the call nevertheless.
    #[doc(alias = "aclnnCausalConv1dGetWorkspaceSize")]
    pub fn plan<'a, T: Element>(
        &self,
        sequences: &ConvSequences,
        inputs: impl Into<ConvInputs<'a, T>>,
    ) -> Result<CausalConvPlan> {
        let inputs = inputs.into();
        let context = inputs.x.memory().context();
        let tensors: NamedTensors<'_, _> = Self::tensors(sequences, &inputs).collect();
        CausalConvCall::check_device(Version::V1, context, INSTEAD, tensors.iter().copied())?;
        vouched_for(context.runtime())?;
        let mut call = CausalConvCall {
            activation_mode: i64::from(self.silu),
            run_mode: i64::from(sequences.has_accepted()),
            ..CausalConvCall::default()
        };
        call.describe(&tensors);
        call.y = call.output();
        CausalConvPlan::of_call((&call, Version::V1), inputs.x, &tensors, || {
            let target = context.target()?;
            require_held(&[call.y], inputs.x)?;
            let problem = call.check(target)?;
            let allowed = self.allowed.ids(lints_of::<Version>)?;
            let numbers = sequences.numbers.require(ConvCheck::new(problem, &allowed))?;
            Ok((PlainOperation::new(sequences.clone(), [numbers]), problem.is_idle()))
        })
    }
}

/// What a launch reads, and the lines that it reads and writes. From rows, weights and lines.
#[derive(Clone, Copy, Debug)]
#[must_use = "a description of tensors does nothing until planned or launched"]
pub struct ConvInputs<'a, T: Element> {
    x: &'a Tensor<T>,
    weight: &'a Tensor<T>,
    bias: Option<&'a Tensor<T>>,
    lines: &'a Tensor<T>,
}

impl<'a, T: Element> From<(&'a Tensor<T>, &'a Tensor<T>, &'a Tensor<T>)> for ConvInputs<'a, T> {
    /// Rows `[T, channels]`, weights `[W, channels]`, which are the model's `[channels, W]` transposed, and lines
    /// `[lines, C, channels]`, of at least `W - 1` rows each.
    fn from((x, weight, lines): (&'a Tensor<T>, &'a Tensor<T>, &'a Tensor<T>)) -> Self {
        Self { x, weight, bias: None, lines }
    }
}

impl<'a, T: Element> ConvInputs<'a, T> {
    /// Sets what is added to each sum, `[channels]`.
    pub fn bias(mut self, bias: &'a Tensor<T>) -> Self {
        self.bias = Some(bias);
        self
    }

    fn each(&self) -> impl Iterator<Item = (Parameter, &'a AnyTensor)> {
        let given: [(_, Option<&'a AnyTensor>); 4] = [
            (Parameter::ConvStates, Some(self.lines)),
            (Parameter::X, Some(self.x)),
            (Parameter::Weight, Some(self.weight)),
            (Parameter::Bias, self.bias.map(|bias| &**bias)),
        ];
        given.into_iter().filter_map(|(parameter, tensor)| Some((parameter, tensor?)))
    }
}

/// A call of CausalConv1d that was checked and prepared. From [`CausalConv1d::plan`].
///
/// A launch reads and writes the lines, and writes rows of the shape of `x`.
pub type CausalConvPlan = operation::Plan<PlainOperation<CausalConv1d>>;

impl Sealed for CausalConv1d {}

impl PlainCall for CausalConv1d {
    type Inputs<'a, T: Element> = ConvInputs<'a, T>;
    type Output<T: Element> = Tensor<T>;
    type Parameter = Parameter;
    type Kept = ConvSequences;
    const OUTPUTS: &'static [Parameter] = &[Parameter::Y];

    fn tensors<'t, 'i: 't, T: Element>(
        sequences: &'t ConvSequences,
        inputs: &'t ConvInputs<'i, T>,
    ) -> impl Iterator<Item = (Parameter, &'t AnyTensor)> {
        inputs.each().chain(sequences.each())
    }

    fn first_unwritten(sequences: &ConvSequences) -> Result<Option<usize>> {
        Ok(sequences.has_unwritten()?.then_some(0))
    }
}
