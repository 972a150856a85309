//! SparseFlashAttention as an operator of the emulator.

use super::checked_call::{checked_call, declared_by_problem};
use super::declared::{DeclaredOperator, Launch};
use super::listed_keys::{ListedKeys as _, attends_to_listed_keys, listed_keys};
use ascend_spec::operator::WalkedTensors as _;
use ascend_spec::ops::sparse_flash_attention::{
    Argument, Arguments, Parameter, SparseFlashCall, SparseFlashProblem, Version,
};
use ascend_spec::{TensorDesc, sparse_flash_attention_arguments};

checked_call! { SparseFlashOperator: SparseFlashProblem, target, version }

listed_keys! {
    SparseFlashOperator, SparseFlashCall,
    [
        Some(Parameter::Query),
        Some(Parameter::QueryRope),
        Some(Parameter::Key),
        Some(Parameter::KeyRope),
        Some(Parameter::AttentionOut),
        Some(Parameter::SoftmaxMax),
        Some(Parameter::SoftmaxSum),
        Some(Parameter::Sinks),
    ]
}

impl DeclaredOperator for SparseFlashOperator {
    declared_by_problem! { of a version }

    attends_to_listed_keys! {}
}

c_functions! {
    sparse_flash_attention_arguments of SparseFlashOperator;
    1 V1: aclnnSparseFlashAttentionGetWorkspaceSize, aclnnSparseFlashAttention;
    2 V2: aclnnSparseFlashAttentionV2GetWorkspaceSize, aclnnSparseFlashAttentionV2;
}
