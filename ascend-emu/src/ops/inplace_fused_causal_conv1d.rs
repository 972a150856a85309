//! InplaceFusedCausalConv1d as an operator of the emulator.

use super::checked_call::{checked_call, declared_by_problem};
use super::convolution::{ConvOperator, Parameters, convolves};
use super::declared::{DeclaredOperator, Launch};
use crate::elements::{Elements, Reader};
use ascend_spec::operator::WalkedTensors as _;
use ascend_spec::ops::convolution::ConvProblem;
use ascend_spec::ops::fused_causal_conv1d::FusedConvCall;
use ascend_spec::ops::inplace_fused_causal_conv1d::{Argument, Arguments, InplaceFusedConvCall, Parameter, Version};
use ascend_spec::{TensorDesc, inplace_fused_causal_conv1d_arguments};

checked_call! { InplaceFusedConvOperator: ConvProblem, target }

convolves! {
    InplaceFusedConvOperator of InplaceFusedConvCall,
    numbers of FusedConvCall, bias None, y X, updates X ConvStates
}

c_functions! {
    inplace_fused_causal_conv1d_arguments;
    1 V1: aclnnInplaceFusedCausalConv1dGetWorkspaceSize, aclnnInplaceFusedCausalConv1d => InplaceFusedConvOperator::new;
}
