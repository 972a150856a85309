//! Which argument plays which role in the computation.

use super::{Argument, Parameter};
use crate::attention_problem::TensorRole;

impl Argument {
    /// The tensor of a call that plays a role; `None` for roles that the operator has no argument for.
    pub const fn of_role(role: TensorRole) -> Option<Self> {
        let parameter = match role {
            TensorRole::Query => Parameter::Query,
            TensorRole::Key(0) => Parameter::Key,
            TensorRole::Value(0) => Parameter::Value,
            TensorRole::Mask => Parameter::AttenMask,
            TensorRole::Bias => Parameter::PseShift,
            TensorRole::ScoreScale => Parameter::DeqScale1,
            TensorRole::WeightScale => Parameter::QuantScale1,
            TensorRole::ProductScale => Parameter::DeqScale2,
            TensorRole::OutputScale => Parameter::QuantScale2,
            TensorRole::OutputOffset => Parameter::QuantOffset2,
            TensorRole::Output => Parameter::AttentionOut,
            _ => return None,
        };
        Some(Argument::element(parameter, 0))
    }
}
