//! Which argument plays which role in the computation.

use super::{Argument, Parameter};
use crate::attention_problem::TensorRole;

impl Argument {
    /// The tensor of a call that plays a role; `None` for roles that the operator has no argument for.
    pub const fn of_role(role: TensorRole) -> Option<Self> {
        let parameter = match role {
            TensorRole::Key(index) => return Some(Argument::element(Parameter::Key, index)),
            TensorRole::Value(index) => return Some(Argument::element(Parameter::Value, index)),
            TensorRole::Query => Parameter::Query,
            TensorRole::Mask => Parameter::AttenMask,
            TensorRole::Bias => Parameter::PseShift,
            TensorRole::BlockTable => Parameter::BlockTable,
            TensorRole::KeyPadding => Parameter::KvPaddingSize,
            TensorRole::KeyValueScale => Parameter::AntiquantScale,
            TensorRole::KeyValueOffset => Parameter::AntiquantOffset,
            TensorRole::ScoreScale => Parameter::DequantScale1,
            TensorRole::WeightScale => Parameter::QuantScale1,
            TensorRole::ProductScale => Parameter::DequantScale2,
            TensorRole::OutputScale => Parameter::QuantScale2,
            TensorRole::OutputOffset => Parameter::QuantOffset2,
            TensorRole::Output => Parameter::AttentionOut,
            _ => return None,
        };
        Some(Argument::element(parameter, 0))
    }
}
