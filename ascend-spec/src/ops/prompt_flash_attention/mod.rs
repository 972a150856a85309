//! PromptFlashAttention: attention of several query rows over dense keys. It has rules of its own, followed by those
//! of FusedInferAttentionScore's prefill path.
//!
//! It is the fused attention of the Atlas inference series (310P) for prefill, and runs on Atlas A2 and A3. Calls
//! that its tiling refuses end with 561103; the refusal names the rule of FusedInferAttentionScore.

mod arguments;
mod call;
mod roles;
pub mod rules;
mod version;

pub use arguments::{Argument, Arguments, Parameter, PromptCall};
pub use version::Version;

use crate::contract::{CallContract, DescribedOperator, each_lint};
use crate::{Dims, Refusal, Rule, Target, TensorDesc, Violation};

/// PromptFlashAttention in the list of operators.
pub(crate) struct PromptFlashAttention;

impl DescribedOperator for PromptFlashAttention {
    type Version = Version;
    type Parameter = Parameter;

    fn rules() -> impl Iterator<Item = &'static Rule> {
        rules::RULES.iter().copied()
    }
}

impl CallContract for PromptFlashAttention {
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
}
