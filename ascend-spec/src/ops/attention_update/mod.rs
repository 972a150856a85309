//! AttentionUpdate: merges attention over parts of the keys by the log-sum-exps of the parts.
//!
//! With `L = ln sum(exp(lse_i))` the merged row is `sum(exp(lse_i - L) * out_i)`, which is attention over all the keys.

pub mod rules;
mod weights;

pub use weights::{visible, weigh};

use crate::Cann::V8_1;
use crate::contract::{CallContract, described_by};
use crate::operator::{OperatorVersion, versions};
use crate::{DType, Dims, Target, TensorDesc, Violation};
use std::ops::Range;

declare_operator! {
    /// Source: aclnnAttentionUpdate, parameter table.
    attention_update_arguments, "AttentionUpdate", #[derive(Copy)] UpdateCall<'a>;
    1 { lse: list, Lse, "lse", "Log-sum-exps of the parts, `[rows]` each." }
    1 { local_out: list, LocalOut, "localOut",
        "Attention over the parts, `[rows, D]` each, rows in the order of `lse`." }
    1 { update_type: int = 0, UpdateType, "updateType",
        "0: merges the attention alone. 1: also the log-sum-exps." }
    1 { out: output_mut, Out, "out", "Merged attention, `[rows, D]`." }
    1 { lse_out: output_mut, LseOut, "lseOut", "Merged log-sum-exps, `[rows]`; with `update_type` 1 only." }
}

versions! {
    /// The version of AttentionUpdate.
    pub enum Version {
        /// The only one.
        V1 = OperatorVersion::new(1, "aclnnAttentionUpdate", "after 8.1").on_a2_a3(V8_1).on_ascend950(V8_1),
    }
}

described_by! { AttentionUpdate, rules::RULES }

impl CallContract for AttentionUpdate {
    type Arguments = Arguments<TensorDesc>;

    fn check(
        arguments: &Self::Arguments,
        _: Version,
        target: Target,
        _: &mut dyn FnMut(Violation),
    ) -> Result<(), Violation> {
        arguments.call().check(target).map(drop)
    }

    fn imply_outputs(arguments: &mut Self::Arguments, _: &dyn Fn(&str) -> Option<Dims>) {
        let packed = |parts: &[TensorDesc]| {
            let part = parts.first()?;
            Some(TensorDesc::packed(part.dtype, part.shape))
        };
        arguments.out = arguments.out.or(packed(&arguments.local_out));
        let writes_lse = arguments.update_type == 1;
        arguments.lse_out = (arguments.lse_out).or_else(|| packed(&arguments.lse).filter(|_| writes_lse));
    }
}

/// A call of AttentionUpdate that holds every rule, resolved.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct UpdateProblem {
    /// Number of parts.
    pub parts: usize,
    /// Number of rows.
    pub rows: usize,
    /// Elements of a row.
    pub dim: usize,
    /// Type of the attention; log-sum-exps are `FLOAT`.
    pub dtype: DType,
    /// Whether the merged log-sum-exps are written.
    pub writes_lse: bool,
    /// Whether a log-sum-exp of +inf, with which attention marks a row without keys, counts as -inf, so that the part
    /// has weight 0; otherwise it makes the row NaN.
    pub infinity_is_empty: bool,
}

impl UpdateProblem {
    /// Calls `visit` with every tensor that the call touches and the bytes it touches, from the tensor's base
    /// address, by the strides of its description. Visits nothing without rows.
    pub fn touches(&self, call: &UpdateCall<'_>, visit: &mut dyn FnMut(Argument, Range<u64>)) {
        if self.rows == 0 {
            return;
        }
        for (argument, desc) in call.each_tensor() {
            let touched = match argument.parameter {
                Parameter::Lse | Parameter::LseOut => desc.walked([self.rows]),
                _ => desc.walked([self.rows, self.dim]),
            };
            visit(argument, touched);
        }
    }
}
