//! Which argument plays which role in the computation.

use super::Parameter;
use crate::attention_problem::TensorRole;

impl Parameter {
    /// The parameter whose tensor plays a role; `None` for roles that the operator does not know.
    pub const fn of_role(role: TensorRole) -> Option<Self> {
        Some(match role {
            TensorRole::Query => Parameter::Query,
            TensorRole::Key(0) => Parameter::Key,
            TensorRole::Value(0) => Parameter::Value,
            TensorRole::QueryRope => Parameter::QueryRope,
            TensorRole::KeyRope => Parameter::KeyRope,
            TensorRole::Mask => Parameter::AttenMask,
            TensorRole::Bias => Parameter::RealShift,
            TensorRole::DropMask => Parameter::DropMask,
            TensorRole::Sink => Parameter::Sink,
            TensorRole::Output => Parameter::AttentionOut,
            TensorRole::SoftmaxMax => Parameter::SoftmaxMax,
            TensorRole::SoftmaxSum => Parameter::SoftmaxSum,
            _ => return None,
        })
    }
}
