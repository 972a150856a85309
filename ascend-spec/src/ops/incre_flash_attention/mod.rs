//! IncreFlashAttention: attention of one query row a sequence. It has a few rules of its own, followed by those of
//! FusedInferAttentionScore's decode path.
//!
//! It is the fused attention of the Atlas inference series (310P) for decode, and runs on Atlas A2 and A3.

mod arguments;
mod call;
mod roles;
pub mod rules;
mod version;

pub use arguments::{Argument, Arguments, IncreCall, Parameter};
pub use version::Version;

use crate::contract::{CallContract, DescribedOperator, each_lint};
use crate::{Dims, Refusal, Rule, Target, TensorDesc, Violation};

/// IncreFlashAttention in the list of operators.
pub(crate) struct IncreFlashAttention;

impl DescribedOperator for IncreFlashAttention {
    type Version = Version;
    type Parameter = Parameter;

    fn rules() -> impl Iterator<Item = &'static Rule> {
        rules::RULES.iter().copied()
    }
}

impl CallContract for IncreFlashAttention {
    type Arguments = Arguments<TensorDesc>;

    fn check(
        of: &Self::Arguments,
        version: Version,
        target: Target,
        report: &mut dyn FnMut(Violation),
    ) -> Result<(), Refusal> {
        let call = of.call();
        call.check(version, target)?;
        each_lint(|allowed| call.lint(version, allowed), report);
        Ok(())
    }

    fn computes(of: &Self::Arguments, version: Version) -> bool {
        let call = of.call();
        let mut given = call.given();
        given.all(|parameter| version.computes(parameter))
    }

    fn imply_outputs(of: &mut Self::Arguments, _: &dyn Fn(&str) -> Option<Dims>) {
        let implied = of.call().as_fused().implied_outputs().0;
        of.attention_out = of.attention_out.or(implied);
    }

    fn check_contents(
        of: &Self::Arguments,
        version: Version,
        _: Target,
        integers: &dyn Fn(&str) -> Vec<i64>,
    ) -> Result<(), Violation> {
        match of.call().content_bounds(version) {
            Ok(Some(bounds)) => bounds.admits_contents(of.block_table.as_ref(), integers),
            Err(Refusal::Violation(violation)) => Err(violation),
            Ok(None) | Err(Refusal::Unsupported(_)) => Ok(()),
        }
    }
}
