//! FusedCausalConv1d as an operator of the emulator.

use super::checked_call::{checked_call, declared_by_problem};
use super::convolution::{ConvOperator, Parameters, convolves};
use super::declared::{DeclaredOperator, Launch};
use crate::elements::{Elements, Reader};
use ascend_spec::operator::WalkedTensors as _;
use ascend_spec::ops::convolution::ConvProblem;
use ascend_spec::ops::fused_causal_conv1d::{Argument, Arguments, FusedConvCall, Parameter, Version};
use ascend_spec::{TensorDesc, fused_causal_conv1d_arguments};

checked_call! { FusedConvOperator: ConvProblem, target }

convolves! {
    FusedConvOperator of FusedConvCall,
    numbers of FusedConvCall, bias None, y Y, updates ConvStates
}

c_functions! {
    fused_causal_conv1d_arguments;
    1 V1: aclnnFusedCausalConv1dGetWorkspaceSize, aclnnFusedCausalConv1d => FusedConvOperator::new;
}
