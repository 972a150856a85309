//! LightningIndexer as an operator of the emulator.

use super::declared::DeclaredOperator;
use super::entry_point::{executor_of, phase_one, phase_two};
use super::launch::Launch;
use super::one_version::{checked_call, declared_by_problem};
use super::sparse_contents;
use crate::fault::Fault;
use crate::kernel::lightning_indexer::{self, Buffers};
use crate::kernel::ring_update::Elements;
use crate::kernel::token_rows::TokenRows;
use crate::memory::DeviceMemory;
use crate::operator::Addresses;
use ascend_spec::operator::WalkedTensors as _;
use ascend_spec::ops::lightning_indexer::{Argument, Arguments, IndexerCall, IndexerProblem, Parameter, Version};
use ascend_spec::ops::sparse_sequences::SparseContents;
use ascend_spec::{TensorDesc, arguments_of_version, lightning_indexer_arguments};

checked_call! { IndexerOperator: IndexerProblem, target }

impl DeclaredOperator for IndexerOperator {
    declared_by_problem! {}

    fn overruns(&self) -> bool {
        self.problem.overruns
    }

    unsafe fn compute(&self, addresses: &Addresses, memory: &DeviceMemory) -> Result<(), Fault> {
        let Arguments {
            query: Some(query),
            key: Some(key),
            weights: Some(weights),
            sparse_indices: Some(indices),
            sparse_values: values,
            ..
        } = &self.arguments
        else {
            return Ok(());
        };
        if self.is_idle() {
            return Ok(());
        }
        // SAFETY: the caller's promise.
        let launch = unsafe { Launch::new(self, self.check, addresses, memory) }?;
        // SAFETY: the ranges of `touches` are live and locked for the task that runs this; the launch has found that
        // the outputs, the only tensors written, share no memory with them.
        let numbers = unsafe { sparse_contents::read(&launch, &self.problem.sequences, IndexerCall::CONTENTS) }?;
        let contents = SparseContents::of(&numbers);
        let source = |parameter: Parameter, desc| TokenRows { desc, base: launch.base(parameter) };
        let written = |parameter: Parameter, desc: &TensorDesc| Elements::new(launch.first(parameter), *desc);
        let values = values.as_ref().filter(|_| self.problem.values);
        let buffers = Buffers {
            query: source(Parameter::Query, query),
            key: source(Parameter::Key, key),
            weights: source(Parameter::Weights, weights),
            indices: written(Parameter::SparseIndices, indices),
            values: values.map(|desc| written(Parameter::SparseValues, desc)),
            scales: None,
        };
        // SAFETY: the tensors are those of the checked call, whose bytes, those of `touches`, are live (the allocation
        // table let the launch in) and locked for the task that runs this; the launch has found the outputs apart from
        // everything else.
        let run = unsafe { lightning_indexer::run(&self.problem, contents, &buffers) };
        run.map_err(|why| launch.fault(why))
    }
}

lightning_indexer_arguments! { arguments_of_version {
    1 phase_one { aclnnLightningIndexerGetWorkspaceSize, Arguments, executor_of(IndexerOperator::new) }
} }
phase_two!(aclnnLightningIndexer, Version::V1.symbol());
