//! AttentionUpdate: merges attention over parts of the keys. [`merge`](crate::merge) is its safe interface.

use std::sync::Arc;

use ascend_spec::attention_update_arguments;
use ascend_spec::ops::attention_update::{Argument, Parameter, UpdateCall, Version};
use smallvec::SmallVec;

use crate::error::Result;
use crate::operator::{PreparedCall, Tensors, entry_points, phase_one};
use crate::runtime::Context;
use crate::tensor::AnyTensor;

entry_points! {
    attention_update_arguments, UpdateCall<'_>, AnyArguments::AttentionUpdate;
    Version::V1 => 1: aclnnAttentionUpdateGetWorkspaceSize, aclnnAttentionUpdate;
    {
        fn noun(self) -> &'static str {
            match self {
                Parameter::Lse => "softmax_lse",
                Parameter::LocalOut => "attention",
                Parameter::Out => "output.attention",
                Parameter::LseOut => "output.softmax_lse",
                Parameter::UpdateType => self.name(),
            }
        }
    }
}

/// What to do where the installed CANN has no such operator.
const INSTEAD: &str = "merge in host memory with merge_on_host";

/// Prepares a call that the contract has accepted, with one placeholder address for all tensors.
pub(crate) fn prepare(
    context: &Arc<Context>,
    call: &UpdateCall<'_>,
    is_idle: bool,
    stand_in: &AnyTensor,
) -> Result<PreparedCall<Parameter>> {
    if !is_idle {
        let api = context.runtime().api();
        phases_of(Version::V1).required(api, Version::V1.info(), INSTEAD)?;
    }
    PreparedCall::standing_in(context, call, Version::V1, is_idle, stand_in, &[])
}

/// No call of its own, for what launches others.
pub(crate) fn none(context: &Arc<Context>) -> PreparedCall<Parameter> {
    let no_tensors = UpdateCall { lse: &[], local_out: &[], update_type: 1, out: None, lse_out: None };
    PreparedCall::idle(context, &no_tensors, Version::V1)
}

/// The tensors of a launch in the operator's order: both outputs, log-sum-exps of the parts, then their attention. As
/// many parts as the operator takes fit without an allocation.
pub(crate) struct LaunchTensors {
    /// How many of the tensors are outputs: none for a call that is only planned.
    pub(crate) outputs: usize,
    pub(crate) tensors: SmallVec<[AnyTensor; 2 * UpdateCall::MAX_PARTS + 2]>,
}

impl Tensors<Parameter> for LaunchTensors {
    fn each<'t>(&'t self, mut visit: impl FnMut(Argument, &'t AnyTensor) -> Result<()>) -> Result<()> {
        let (outputs, parts) = self.tensors.split_at(self.outputs.min(self.tensors.len()));
        for (argument, tensor) in [Parameter::Out, Parameter::LseOut].into_iter().zip(outputs) {
            visit(argument.into(), tensor)?;
        }
        let (lse, local_out) = parts.split_at(parts.len() / 2);
        for (part, tensor) in lse.iter().enumerate() {
            visit(Argument::element(Parameter::Lse, part), tensor)?;
        }
        for (part, tensor) in local_out.iter().enumerate() {
            visit(Argument::element(Parameter::LocalOut, part), tensor)?;
        }
        Ok(())
    }
}
