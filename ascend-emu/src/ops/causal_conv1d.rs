//! CausalConv1d as an operator of the emulator.

use super::checked_call::{checked_call, declared_by_problem};
use super::convolution::{ConvOperator, Parameters, convolves};
use super::declared::{DeclaredOperator, Launch};
use crate::elements::{Elements, Reader};
use ascend_spec::operator::WalkedTensors as _;
use ascend_spec::ops::causal_conv1d::{Argument, Arguments, CausalConvCall, Parameter, Version};
use ascend_spec::ops::convolution::ConvProblem;
use ascend_spec::{TensorDesc, causal_conv1d_arguments};

checked_call! { CausalConvOperator: ConvProblem, target }

convolves! {
    CausalConvOperator of CausalConvCall,
    numbers of CausalConvCall, bias Some(Parameter::Bias), y Y, updates ConvStates
}

c_functions! {
    causal_conv1d_arguments;
    1 V1: aclnnCausalConv1dGetWorkspaceSize, aclnnCausalConv1d => CausalConvOperator::new;
}
