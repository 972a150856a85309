//! FusedInferAttentionScore: the description of a call, its rules, and what a call that holds them computes.
//!
//! The rules are those of the operator's own checks in each release of [`Cann::ALL`](crate::Cann::ALL) on Atlas A2 and
//! A3, and from 9.0 on on Ascend 950; each states where it holds ([`Rule::scope`](crate::Rule::scope)). Which of the
//! operator's checkers judges a call depends on the release ([`Checker`]): most differences follow from it. What a
//! release takes and no kernel here computes is [`UNSUPPORTED`](crate::UNSUPPORTED), such as the INT8 output that 9.0
//! takes without a scale.

mod arguments;
mod cache;
mod call;
mod check;
mod head_shape;
mod implied;
mod mxfp8;
mod portability;
mod quantisation;
mod resolve;
mod routing;
pub mod rules;
mod version;

pub use arguments::{Argument, Arguments, FiaCall, Parameter};
pub use cache::Cache;
pub use call::{CheckedCall, Checker, Route};
pub use check::UnreadLengths;
pub use head_shape::HeadShape;
pub use quantisation::AntiquantMode;
pub(crate) use resolve::Verdict;
pub(crate) use rules::contents::BIAS;
pub use rules::contents::ContentBounds;
pub use version::Version;

use crate::attention_problem::{AttentionArguments, AttentionProblem, TensorRole, as_held, lint_bias};
use crate::contract::{CallContract, DescribedOperator};
use crate::{Dims, Rule, Target, TensorDesc, Violation};

/// FusedInferAttentionScore in the list of operators.
pub(crate) struct FusedInferAttentionScore;

impl DescribedOperator for FusedInferAttentionScore {
    type Version = Version;
    type Parameter = Parameter;

    fn rules() -> impl Iterator<Item = &'static Rule> {
        rules::all()
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
        Ok(Some(checked.problem.into_owned()))
    }

    fn of_role(role: TensorRole) -> Option<Argument> {
        Argument::of_role(role)
    }
}

impl CallContract for FusedInferAttentionScore {
    type Arguments = Arguments<TensorDesc>;

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
        let (attention_out, softmax_lse) = arguments.call().implied_outputs();
        arguments.attention_out = arguments.attention_out.or(attention_out);
        arguments.softmax_lse = arguments.softmax_lse.or(softmax_lse);
    }

    fn chosen_on(arguments: &Self::Arguments, at_least: u8, target: Target) -> Option<Version> {
        let at_least = Self::version(at_least).unwrap_or(Version::V1);
        Some(Version::chosen_on(&arguments.call(), at_least, target))
    }

    fn check_contents(
        arguments: &Self::Arguments,
        version: Version,
        target: Target,
        integers: &dyn Fn(&str) -> Vec<i64>,
    ) -> Result<(), Violation> {
        match arguments.call().check(version, target).map(|call| call.content_bounds()) {
            Ok(Some(bounds)) => bounds.admits_contents(arguments.block_table.as_ref(), integers),
            Ok(None) | Err(_) => Ok(()),
        }
    }

    fn lint_contents(
        arguments: &Self::Arguments,
        version: Version,
        target: Target,
        bytes: &dyn Fn(&str) -> Option<Vec<u8>>,
        report: &mut dyn FnMut(Violation),
    ) {
        let held = arguments.map(as_held::<Self::Arguments>);
        lint_bias(&held, (version, target), BIAS, bytes, report);
    }
}
