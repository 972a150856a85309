//! FlashAttentionScore and FlashAttentionVarLenScore: the attention operators of training, forward.
//!
//! All their versions are one operator with a growing list of arguments, so one [`FlashAttentionCall`] describes a
//! call of any of them. The rules are those of CANN 9.1 on Atlas A2 and A3; they are applied to older releases too,
//! and to Ascend 950, whose own checks are not known. Calls that the operator's shape inference or tiling refuses end
//! with 161001, as null pointers do.

mod arguments;
mod bias;
mod call;
mod check;
mod entry_points;
mod layout;
mod mask_kind;
mod problem;
mod resolve;
pub mod rules;
mod softmax_order;
mod var_len_arguments;
mod version;

pub use crate::attention_problem::Work;
pub use crate::geometry::Sequence;
pub use arguments::{Argument, Arguments, FlashAttentionCall, Parameter};
pub use bias::{Bias, BiasForm};
pub use layout::InputLayout;
pub use mask_kind::{FullMask, MaskKind};
pub use problem::FlashAttentionProblem;
pub use softmax_order::SoftmaxOrder;
pub use version::Version;

use crate::attention_problem::{AttentionArguments, AttentionProblem, TensorRole, as_held, lint_bias};
use crate::contract::{CallContract, DescribedOperator, exported_version};
use crate::operator::{EntryPoint, ParameterInfo};
use crate::{Cann, DType, Dims, Rule, Target, TensorDesc, Violation};

/// Either operator in the list of operators: both have one list of arguments, of which each version reads a part.
pub(crate) struct TrainingAttention<const PACKED: bool>;

/// FlashAttentionScore in the list of operators.
pub(crate) type FlashAttentionScore = TrainingAttention<false>;

/// FlashAttentionVarLenScore in the list of operators.
pub(crate) type FlashAttentionVarlenScore = TrainingAttention<true>;

impl<const PACKED: bool> DescribedOperator for TrainingAttention<PACKED> {
    type Version = Version;
    type Parameter = Parameter;

    /// Both operators have the same rules, which FlashAttentionScore lists.
    fn rules() -> impl Iterator<Item = &'static Rule> {
        rules::all().filter(|_| !PACKED)
    }

    /// The quantised form is in 9.0 and not in 9.1.
    fn exported(function: &str, cann: Cann) -> Option<bool> {
        match function {
            "aclnnFlashAttentionVarLenScoreV5GetMaxWorkspaceSize" => Some(cann >= Cann::V9_1),
            "aclnnQuantFlashAttentionScore" | "aclnnQuantFlashAttentionScoreGetWorkspaceSize" => {
                Some(cann == Cann::V9_0)
            }
            _ => exported_version::<Version>(function, cann),
        }
    }
}

impl AttentionArguments for Arguments<TensorDesc> {
    type Version = Version;

    fn resolve(
        &self,
        version: Version,
        target: Target,
        report: &mut dyn FnMut(Violation),
    ) -> Result<Option<AttentionProblem<'static>>, Violation> {
        let call = self.call();
        let checked = call.check(version, target)?;
        checked.each_lint(report);
        Ok(Some(checked.attention()?.into_owned()))
    }

    fn of_role(role: TensorRole) -> Option<Argument> {
        Parameter::of_role(role).map(Argument::from)
    }

    fn entry_point(version: Version) -> EntryPoint<Parameter> {
        version.entry_point()
    }
}

impl<const PACKED: bool> CallContract for TrainingAttention<PACKED> {
    type Arguments = Arguments<TensorDesc>;

    fn version(number: u8) -> Option<Version> {
        Version::numbered(PACKED, number)
    }

    fn check(
        arguments: &Self::Arguments,
        version: Version,
        target: Target,
        report: &mut dyn FnMut(Violation),
    ) -> Result<(), Violation> {
        arguments.call().check(version, target)?.each_lint(report);
        Ok(())
    }

    fn imply_outputs(arguments: &mut Self::Arguments, _: &dyn Fn(&str) -> Option<Dims>) {
        let reserved = TensorDesc::packed(DType::Float, Dims::of([0]));
        arguments.softmax_out = arguments.softmax_out.or(Some(reserved));
        let (attention_out, softmax) = arguments.call().implied_outputs().unzip();
        arguments.softmax_max = arguments.softmax_max.or(softmax);
        arguments.softmax_sum = arguments.softmax_sum.or(softmax);
        arguments.attention_out = arguments.attention_out.or(attention_out);
    }

    fn lint_contents(
        arguments: &Self::Arguments,
        version: Version,
        target: Target,
        bytes: &dyn Fn(&str) -> Option<Vec<u8>>,
        report: &mut dyn FnMut(Violation),
    ) {
        if let Ok(problem) = arguments.call().check(version, target)
            && matches!(problem.mask, MaskKind::Full(_))
            && let Some(mask) = bytes(Parameter::AttenMask.name())
            && let Err(loose) = problem.admits_mask(&mask)
        {
            report(loose);
        }
        let held = arguments.map(as_held::<Self::Arguments>);
        lint_bias(&held, (version, target), rules::pse::NUMBERS, bytes, report);
    }

    fn unread(arguments: &Self::Arguments, version: Version) -> Option<&'static ParameterInfo> {
        let read = arguments.call().read_by(version).to_arguments();
        let mut all = Parameter::ALL.iter().copied();
        let lost = all.find(|&parameter| {
            arguments.tensors(parameter) != read.tensors(parameter)
                || arguments.value(parameter) != read.value(parameter)
        });
        lost.map(Parameter::info)
    }
}
