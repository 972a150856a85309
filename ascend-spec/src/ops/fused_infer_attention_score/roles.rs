//! Which argument plays which role in the computation.

use super::{Argument, Parameter};
use crate::attention_problem::TensorRole;

impl Argument {
    /// The tensor of a call that plays a role; `None` for roles that the operator has no argument for.
    pub const fn of_role(role: TensorRole) -> Option<Self> {
        let parameter = match role {
            TensorRole::Query => Parameter::Query,
            TensorRole::Key(index) => return Some(Argument::element(Parameter::Key, index)),
            TensorRole::Value(index) => return Some(Argument::element(Parameter::Value, index)),
            TensorRole::QueryRope => Parameter::QueryRope,
            TensorRole::KeyRope => Parameter::KeyRope,
            TensorRole::KeyPrefix => Parameter::KeySharedPrefix,
            TensorRole::ValuePrefix => Parameter::ValueSharedPrefix,
            TensorRole::Mask => Parameter::AttenMask,
            TensorRole::Bias => Parameter::PseShift,
            TensorRole::Sink => Parameter::LearnableSink,
            TensorRole::BlockTable => Parameter::BlockTable,
            TensorRole::QueryPadding => Parameter::QueryPaddingSize,
            TensorRole::KeyPadding => Parameter::KvPaddingSize,
            TensorRole::QueryScale => Parameter::DequantScaleQuery,
            TensorRole::KeyScale => Parameter::KeyAntiquantScale,
            TensorRole::KeyOffset => Parameter::KeyAntiquantOffset,
            TensorRole::ValueScale => Parameter::ValueAntiquantScale,
            TensorRole::ValueOffset => Parameter::ValueAntiquantOffset,
            TensorRole::KeyValueScale => Parameter::AntiquantScale,
            TensorRole::KeyValueOffset => Parameter::AntiquantOffset,
            TensorRole::ScoreScale => Parameter::DeqScale1,
            TensorRole::WeightScale => Parameter::QuantScale1,
            TensorRole::ProductScale => Parameter::DeqScale2,
            TensorRole::OutputScale => Parameter::QuantScale2,
            TensorRole::OutputOffset => Parameter::QuantOffset2,
            TensorRole::Output => Parameter::AttentionOut,
            TensorRole::LogSumExp => Parameter::SoftmaxLse,
            TensorRole::DropMask | TensorRole::SoftmaxMax | TensorRole::SoftmaxSum => return None,
        };
        Some(Argument::element(parameter, 0))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use TensorRole as Role;

    #[test]
    fn no_argument_plays_two_roles() {
        let roles = [
            Role::Query,
            Role::Key(0),
            Role::Key(1),
            Role::Value(0),
            Role::Value(1),
            Role::QueryRope,
            Role::KeyRope,
            Role::KeyPrefix,
            Role::ValuePrefix,
            Role::Mask,
            Role::Bias,
            Role::Sink,
            Role::BlockTable,
            Role::QueryPadding,
            Role::KeyPadding,
            Role::QueryScale,
            Role::KeyScale,
            Role::KeyOffset,
            Role::ValueScale,
            Role::ValueOffset,
            Role::KeyValueScale,
            Role::KeyValueOffset,
            Role::ScoreScale,
            Role::WeightScale,
            Role::ProductScale,
            Role::OutputScale,
            Role::OutputOffset,
            Role::Output,
            Role::LogSumExp,
        ];
        let mut arguments = roles.map(|role| Argument::of_role(role).unwrap());
        arguments.sort_unstable();
        assert!(arguments.is_sorted_by(|a, b| a < b), "{arguments:?}");
    }
}
