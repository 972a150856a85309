//! KvQuantSparseFlashAttention as an operator of the emulator.

use super::declared::DeclaredOperator;
use super::entry_point::{executor_of, phase_one, phase_two};
use super::launch::Launch;
use super::listed_keys::ListedKeys;
use super::one_version::{checked_call, declared_by_problem};
use crate::elements::{Elements, Reader};
use crate::fault::Fault;
use crate::kernel::sparse_attention::{self, Buffers};
use crate::kernel::token_rows::TokenRows;
use crate::memory::DeviceMemory;
use crate::operator::Addresses;
use ascend_spec::operator::WalkedTensors as _;
use ascend_spec::ops::kv_quant_sparse_flash_attention::{
    Argument, Arguments, Parameter, QuantSparseFlashCall, Version,
};
use ascend_spec::ops::sparse_flash_attention::SparseFlashProblem;
use ascend_spec::ops::sparse_sequences::SparseContents;
use ascend_spec::{TensorDesc, arguments_of_version, kv_quant_sparse_flash_attention_arguments};

checked_call! { QuantSparseFlashOperator: SparseFlashProblem, target }

impl ListedKeys for QuantSparseFlashOperator {
    const CONTENTS: [Parameter; 3] = QuantSparseFlashCall::CONTENTS;
    const INDICES: Parameter = Parameter::SparseIndices;
    const KEYS: &'static [Parameter] = &[Parameter::Key];
    const VALUE: Parameter = Parameter::Value;
    const OUTPUTS: &'static [(Parameter, usize)] = &[(Parameter::AttentionOut, 0)];

    fn problem(&self) -> &SparseFlashProblem {
        &self.problem
    }

    fn walked(&self, parameter: Parameter) -> Option<TensorDesc> {
        let desc = self.arguments.tensor(parameter)?;
        (self.problem).walked(&self.arguments.call(), parameter, desc)
    }
}

impl DeclaredOperator for QuantSparseFlashOperator {
    declared_by_problem! {}

    fn overruns(&self) -> bool {
        self.problem.overruns
    }

    unsafe fn reads(&self, addresses: &Addresses, memory: &DeviceMemory, reader: &mut dyn Reader) {
        // SAFETY: the caller's promise.
        unsafe { self.read_listed(addresses, memory, reader) };
    }

    unsafe fn writes(&self, addresses: &Addresses, memory: &DeviceMemory, visit: &mut dyn FnMut(&Elements)) {
        // SAFETY: the caller's promise.
        unsafe { self.write_rows(addresses, memory, visit) };
    }

    unsafe fn compute(&self, addresses: &Addresses, memory: &DeviceMemory) -> Result<(), Fault> {
        let mut walked = [None; Parameter::ALL.len()];
        for &parameter in Parameter::ALL {
            walked[parameter as usize] = self.walked(parameter);
        }
        // SAFETY: the caller's promise.
        let launch = unsafe { Launch::new(self, self.check, addresses, memory) }?;
        let rows = |parameter: Parameter| {
            let desc = walked[parameter as usize].as_ref()?;
            let base = launch.base(parameter);
            Some(TokenRows { desc, base })
        };
        let (Some(query), Some(key), Some(out)) =
            (rows(Parameter::Query), rows(Parameter::Key), rows(Parameter::AttentionOut))
        else {
            return Ok(());
        };
        // SAFETY: the ranges of `touches` are live and locked for the task that runs this; the launch has found that
        // the outputs, the only tensors written, share no memory with them.
        let (numbers, lists) = unsafe { Self::numbers(&launch) }?;
        let buffers =
            Buffers { query, query_rope: None, key, key_rope: None, out, softmax: None, sinks: None, lists: &lists };
        // SAFETY: the tensors are those of the checked call, whose bytes, those of `touches`, are live (the allocation
        // table let the launch in) and locked for the task that runs this; the launch has found the outputs apart from
        // everything else.
        let run = unsafe { sparse_attention::run(&self.problem, SparseContents::of(&numbers), &buffers) };
        run.map_err(|why| launch.fault(why))
    }
}

kv_quant_sparse_flash_attention_arguments! { arguments_of_version {
    1 phase_one {
        aclnnKvQuantSparseFlashAttentionGetWorkspaceSize, Arguments, executor_of(QuantSparseFlashOperator::new)
    }
} }
phase_two!(aclnnKvQuantSparseFlashAttention, Version::V1.symbol());
