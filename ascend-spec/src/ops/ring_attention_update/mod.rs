//! RingAttentionUpdate: merges two outputs of FlashAttentionScore, each over a part of the keys, into the output over
//! both parts.
//!
//! Each part has the maximum and the sum of each row beside its attention, in the orders in which FlashAttentionScore
//! writes them ([`SoftmaxOrder`](crate::ops::flash_attention_score::SoftmaxOrder)).

mod arguments;
mod merge;
mod problem;
pub mod rules;
mod version;

pub use arguments::{Argument, Arguments, Parameter, RingUpdateCall};
pub use merge::{Merged, Part, admits, admits_keyless, merge};
pub use problem::RingUpdateProblem;
pub use version::Version;

use crate::contract::{CallContract, DescribedOperator, each_lint};
use crate::{DType, Dims, Rule, Target, TensorDesc, Violation};

/// RingAttentionUpdate in the list of operators.
pub(crate) struct RingAttentionUpdate;

impl DescribedOperator for RingAttentionUpdate {
    type Version = Version;
    type Parameter = Parameter;

    fn rules() -> impl Iterator<Item = &'static Rule> {
        rules::RULES.iter().copied()
    }
}

impl CallContract for RingAttentionUpdate {
    type Arguments = Arguments<TensorDesc>;

    fn check(
        of: &Self::Arguments,
        version: Version,
        target: Target,
        report: &mut dyn FnMut(Violation),
    ) -> Result<(), Violation> {
        let call = of.call();
        call.check(version, target)?;
        each_lint(|allowed| call.lint(allowed), report);
        Ok(())
    }

    fn imply_outputs(of: &mut Self::Arguments, _: &dyn Fn(&str) -> Option<Dims>) {
        let packed = |desc: TensorDesc, dtype| TensorDesc::packed(dtype, desc.shape);
        let attn = of.prev_attn_out.map(|desc| packed(desc, desc.dtype));
        let softmax = of.prev_softmax_max.map(|desc| packed(desc, DType::Float));
        of.attn_out = of.attn_out.or(attn);
        of.softmax_max = of.softmax_max.or(softmax);
        of.softmax_sum = of.softmax_sum.or(softmax);
    }

    fn check_contents(
        of: &Self::Arguments,
        version: Version,
        target: Target,
        integers: &dyn Fn(&str) -> Vec<i64>,
    ) -> Result<(), Violation> {
        match of.call().check(version, target) {
            Ok(problem) => problem.admits_lengths(&integers(Parameter::ActualSeqQlen.name())),
            Err(_) => Ok(()),
        }
    }
}
