//! Which argument plays which role in the computation.

use super::Operand;
use crate::attention_problem::TensorRole;

impl Operand {
    /// The tensor of a call that plays a role.
    pub const fn of_role(role: TensorRole) -> Self {
        match role {
            TensorRole::Query => Operand::Query,
            TensorRole::Key(index) => Operand::Key(index),
            TensorRole::Value(index) => Operand::Value(index),
            TensorRole::QueryRope => Operand::QueryRope,
            TensorRole::KeyRope => Operand::KeyRope,
            TensorRole::KeyPrefix => Operand::KeySharedPrefix,
            TensorRole::ValuePrefix => Operand::ValueSharedPrefix,
            TensorRole::Mask => Operand::AttenMask,
            TensorRole::Bias => Operand::PseShift,
            TensorRole::Sink => Operand::LearnableSink,
            TensorRole::BlockTable => Operand::BlockTable,
            TensorRole::QueryPadding => Operand::QueryPaddingSize,
            TensorRole::KeyPadding => Operand::KvPaddingSize,
            TensorRole::QueryScale => Operand::DequantScaleQuery,
            TensorRole::KeyScale => Operand::KeyAntiquantScale,
            TensorRole::KeyOffset => Operand::KeyAntiquantOffset,
            TensorRole::ValueScale => Operand::ValueAntiquantScale,
            TensorRole::ValueOffset => Operand::ValueAntiquantOffset,
            TensorRole::KeyValueScale => Operand::AntiquantScale,
            TensorRole::KeyValueOffset => Operand::AntiquantOffset,
            TensorRole::ScoreScale => Operand::DeqScale1,
            TensorRole::WeightScale => Operand::QuantScale1,
            TensorRole::ProductScale => Operand::DeqScale2,
            TensorRole::OutputScale => Operand::QuantScale2,
            TensorRole::OutputOffset => Operand::QuantOffset2,
            TensorRole::Output => Operand::AttentionOut,
            TensorRole::LogSumExp => Operand::SoftmaxLse,
        }
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
        let mut operands = roles.map(Operand::of_role);
        operands.sort_unstable();
        assert!(operands.is_sorted_by(|a, b| a < b), "{operands:?}");
    }
}
