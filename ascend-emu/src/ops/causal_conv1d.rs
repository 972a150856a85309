//! CausalConv1d as an operator of the emulator.

use super::checked_call::{checked_call, declared_by_problem};
use super::convolution::{ConvOperator, Parameters, convolves};
use super::declared::DeclaredOperator;
use crate::config::Check;
use crate::elements::{Elements, Reader};
use crate::fault::Fault;
use crate::memory::DeviceMemory;
use crate::operator::Addresses;
use ascend_spec::operator::WalkedTensors as _;
use ascend_spec::ops::causal_conv1d::{Argument, Arguments, CausalConvCall, Parameter, Version};
use ascend_spec::ops::convolution::{ConvContents, ConvProblem};
use ascend_spec::{TensorDesc, causal_conv1d_arguments};

checked_call! { CausalConvOperator: ConvProblem, target }

impl ConvOperator<4> for CausalConvOperator {
    const PARAMETERS: Parameters<Parameter> = Parameters {
        x: Parameter::X,
        weight: Parameter::Weight,
        bias: Some(Parameter::Bias),
        conv_states: Parameter::ConvStates,
        y: Parameter::Y,
    };
    const CONTENTS: [Parameter; 4] = CausalConvCall::CONTENTS;
    const UPDATED: &'static [Parameter] = &[Parameter::ConvStates];

    fn problem(&self) -> &ConvProblem {
        &self.problem
    }

    fn strictness(&self) -> Check {
        self.check
    }

    fn contents(numbers: &[Vec<i64>; 4]) -> ConvContents<'_> {
        CausalConvCall::contents(numbers)
    }
}

impl DeclaredOperator for CausalConvOperator {
    convolves! {}
}

c_functions! {
    causal_conv1d_arguments;
    1 V1: aclnnCausalConv1dGetWorkspaceSize, aclnnCausalConv1d => CausalConvOperator::new;
}
