//! AttentionUpdate: merges attention over parts of the keys by the log-sum-exps of the parts.
//!
//! With `L = ln sum(exp(lse_i))` the merged row is `sum(exp(lse_i - L) * out_i)`, which is attention over all the keys.

mod arguments;
mod problem;
pub mod rules;
mod weights;

pub use arguments::{Argument, Arguments, Parameter, UpdateCall};
pub use problem::UpdateProblem;
pub use weights::{Real, visible, weigh};

use crate::Cann::V8_1;
use crate::contract::{CallContract, DescribedOperator};
use crate::operator::{OperatorVersion, versions};
use crate::{Dims, Rule, Target, TensorDesc, Violation};

versions! {
    /// The version of AttentionUpdate.
    pub enum Version {
        /// The only one.
        V1 = OperatorVersion::new(1, "aclnnAttentionUpdate", "after 8.1").on_a2_a3(V8_1).on_ascend950(V8_1),
    }
}

/// AttentionUpdate in the list of operators.
pub(crate) struct AttentionUpdate;

impl DescribedOperator for AttentionUpdate {
    type Version = Version;
    type Parameter = Parameter;

    fn rules() -> impl Iterator<Item = &'static Rule> {
        rules::RULES.iter().copied()
    }
}

impl CallContract for AttentionUpdate {
    type Arguments = Arguments<TensorDesc>;

    fn check(
        of: &Self::Arguments,
        _: Version,
        target: Target,
        _: &mut dyn FnMut(Violation),
    ) -> Result<(), Violation> {
        of.call().check(target).map(drop)
    }

    fn imply_outputs(of: &mut Self::Arguments, _: &dyn Fn(&str) -> Option<Dims>) {
        let packed = |parts: &[TensorDesc]| {
            let part = parts.first()?;
            Some(TensorDesc::packed(part.dtype, part.shape))
        };
        of.out = of.out.or(packed(&of.local_out));
        let writes_lse = of.update_type == 1;
        of.lse_out = (of.lse_out).or_else(|| packed(&of.lse).filter(|_| writes_lse));
    }
}
