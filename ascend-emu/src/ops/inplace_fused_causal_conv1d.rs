//! InplaceFusedCausalConv1d as an operator of the emulator.

use super::checked_call::{checked_call, declared_by_problem};
use super::convolution::{ConvOperator, Parameters, convolves};
use super::declared::DeclaredOperator;
use crate::config::Check;
use crate::elements::{Elements, Reader};
use crate::fault::Fault;
use crate::memory::DeviceMemory;
use crate::operator::Addresses;
use ascend_spec::operator::WalkedTensors as _;
use ascend_spec::ops::convolution::{ConvContents, ConvProblem};
use ascend_spec::ops::fused_causal_conv1d::FusedConvCall;
use ascend_spec::ops::inplace_fused_causal_conv1d::{Argument, Arguments, InplaceFusedConvCall, Parameter, Version};
use ascend_spec::{TensorDesc, inplace_fused_causal_conv1d_arguments};

checked_call! { InplaceFusedConvOperator: ConvProblem, target }

impl ConvOperator<7> for InplaceFusedConvOperator {
    const PARAMETERS: Parameters<Parameter> = Parameters {
        x: Parameter::X,
        weight: Parameter::Weight,
        bias: None,
        conv_states: Parameter::ConvStates,
        y: Parameter::X,
    };
    const CONTENTS: [Parameter; 7] = InplaceFusedConvCall::CONTENTS;
    const UPDATED: &'static [Parameter] = &[Parameter::X, Parameter::ConvStates];

    fn problem(&self) -> &ConvProblem {
        &self.problem
    }

    fn strictness(&self) -> Check {
        self.check
    }

    fn contents(numbers: &[Vec<i64>; 7]) -> ConvContents<'_> {
        FusedConvCall::contents(numbers)
    }
}

impl DeclaredOperator for InplaceFusedConvOperator {
    convolves! {}
}

c_functions! {
    inplace_fused_causal_conv1d_arguments;
    1 V1: aclnnInplaceFusedCausalConv1dGetWorkspaceSize, aclnnInplaceFusedCausalConv1d => InplaceFusedConvOperator::new;
}
