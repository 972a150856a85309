//! KvQuantSparseFlashAttention as an operator of the emulator.

use super::checked_call::{checked_call, declared_by_problem};
use super::declared::{DeclaredOperator, Launch};
use super::listed_keys::{ListedKeys as _, attends_to_listed_keys, listed_keys};
use ascend_spec::operator::WalkedTensors as _;
use ascend_spec::ops::kv_quant_sparse_flash_attention::{
    Argument, Arguments, Parameter, QuantSparseFlashCall, Version,
};
use ascend_spec::ops::sparse_flash_attention::SparseFlashProblem;
use ascend_spec::{TensorDesc, kv_quant_sparse_flash_attention_arguments};

checked_call! { QuantSparseFlashOperator: SparseFlashProblem, target }

listed_keys! {
    QuantSparseFlashOperator, QuantSparseFlashCall,
    [Some(Parameter::Query), None, Some(Parameter::Key), None, Some(Parameter::AttentionOut), None, None, None]
}

impl DeclaredOperator for QuantSparseFlashOperator {
    declared_by_problem! {}
    attends_to_listed_keys! {}
}

c_functions! {
    kv_quant_sparse_flash_attention_arguments;
    1 V1: aclnnKvQuantSparseFlashAttentionGetWorkspaceSize, aclnnKvQuantSparseFlashAttention
        => QuantSparseFlashOperator::new;
}
