//! FusedCausalConv1d: the causal convolution of CANN for Ascend 950, with windows of 3 rows, over a pool of lines that
//! keep the last rows of each sequence.
//!
//! [`FusedCausalConv1d`] describes a call, which is planned once and launched per layer as a [`FusedConvPlan`], or as
//! an [`InplaceFusedConvPlan`](crate::inplace_fused_causal_conv::InplaceFusedConvPlan) that writes to its rows.

use ascend_spec::ops::fused_causal_conv1d::{FusedConvCall, Parameter, Version, rules};
use ascend_spec::{Cann, Release, Violation, fused_causal_conv1d_arguments};

use crate::error::{Error, Result};
use crate::memory::Element;
use crate::operator::{AllowedLints, EntryPoints, NamedTensors, entry_points, lints_of, phase_one};
use crate::ops::delta_rule::require_held;
use crate::ops::operation::{self, PlainCall, PlainOperation, Sealed};
use crate::runtime::{Platform, Runtime};
use crate::tensor::{AnyTensor, Tensor};

pub use crate::ops::fused_conv_sequences::{FusedConvSequence, FusedConvSequences};

entry_points! {
    fused_causal_conv1d_arguments, FusedConvCall, AnyArguments::FusedCausalConv1d;
    Version::V1 => 1: aclnnFusedCausalConv1dGetWorkspaceSize, aclnnFusedCausalConv1d;
}

/// A call of FusedCausalConv1d: each channel of a row becomes the sum of the 3 rows that end with it, each times a
/// weight of the channel. What is in front of a sequence is in a line of the pool, and the call renews the line.
///
/// Describe it, plan it for tensors of certain shapes, and launch the [`FusedConvPlan`] once a layer. Rows, weights and
/// lines are of `f16`, or all of `bf16`, with a multiple of 16 channels up to 16384, at least 64 where no sequence has
/// more than 8 rows.
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
        let tensors: NamedTensors<'_, _> = Self::tensors(sequences, &inputs).collect();
        FusedConvCall::check_device(Version::V1, context, rules::PRODUCT.fix, tensors.iter().copied())?;
        let mut call = self.call(sequences, &inputs)?;
        call.describe(&tensors);
        call.y = call.output();
        FusedConvPlan::of_call((&call, Version::V1), inputs.x, &tensors, || {
            let target = context.target()?;
            require_held(&[call.y], inputs.x)?;
            let problem = call.check(target)?;
            let allowed = self.allowed.ids(lints_of::<Version>)?;
            call.lint(target, &allowed)?;
            let numbers = sequences.require(problem, &allowed)?;
            Ok((PlainOperation::new(sequences.clone(), [numbers]), problem.is_idle()))
        })
    }

    /// Which lints the call may break.
    pub(super) fn allowed(&self) -> &AllowedLints {
        &self.allowed
    }

    /// The call without tensors.
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
        let size = |size: usize| i64::try_from(size).unwrap_or(i64::MAX);
        Ok(FusedConvCall {
            max_query_len: size(sequences.most_rows),
            residual_connection: i64::from(self.residual),
            block_size: sequences.block_size.map_or(FusedConvCall::default().block_size, size),
            conv_mode: i64::from(self.whole_windows),
            ..FusedConvCall::default()
        })
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
pub type FusedConvPlan = operation::Plan<PlainOperation<FusedCausalConv1d>>;

impl Sealed for FusedCausalConv1d {}

impl PlainCall for FusedCausalConv1d {
    type Inputs<'a, T: Element> = FusedConvInputs<'a, T>;
    type Output<T: Element> = Tensor<T>;
    type Parameter = Parameter;
    type Kept = FusedConvSequences;
    const OUTPUTS: &'static [Parameter] = &[Parameter::Y];

    fn tensors<'t, 'i: 't, T: Element>(
        sequences: &'t FusedConvSequences,
        inputs: &'t FusedConvInputs<'i, T>,
    ) -> impl Iterator<Item = (Parameter, &'t AnyTensor)> {
        inputs.each(INPUTS).chain(sequences.each(FusedConvCall::CONTENTS))
    }

    fn first_unwritten(sequences: &FusedConvSequences) -> Result<Option<usize>> {
        Ok(sequences.has_unwritten()?.then_some(0))
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
