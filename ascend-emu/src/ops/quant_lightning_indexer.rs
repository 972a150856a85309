//! QuantLightningIndexer as an operator of the emulator.

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
use ascend_spec::ops::lightning_indexer::IndexerProblem;
use ascend_spec::ops::quant_lightning_indexer::{Argument, Arguments, Parameter, QuantIndexerCall, Version};
use ascend_spec::ops::sparse_sequences::SparseContents;
use ascend_spec::{TensorDesc, arguments_of_version, quant_lightning_indexer_arguments};

checked_call! { QuantIndexerOperator: IndexerProblem, target }

impl DeclaredOperator for QuantIndexerOperator {
    declared_by_problem! {}

    unsafe fn compute(&self, addresses: &Addresses, memory: &DeviceMemory) -> Result<(), Fault> {
        let Arguments {
            query: Some(query),
            key: Some(key),
            weights: Some(weights),
            query_dequant_scale: Some(query_scale),
            key_dequant_scale: Some(key_scale),
            sparse_indices: Some(indices),
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
        // the output, the only tensor written, shares no memory with them.
        let numbers = unsafe { sparse_contents::read(&launch, &self.problem.sequences, QuantIndexerCall::CONTENTS) }?;
        let contents = SparseContents::of(&numbers);
        let source = |parameter: Parameter, desc| TokenRows { desc, base: launch.base(parameter) };
        let buffers = Buffers {
            query: source(Parameter::Query, query),
            key: source(Parameter::Key, key),
            weights: source(Parameter::Weights, weights),
            indices: Elements::new(launch.first(Parameter::SparseIndices), *indices),
            values: None,
            scales: Some([
                source(Parameter::QueryDequantScale, query_scale),
                source(Parameter::KeyDequantScale, key_scale),
            ]),
        };
        // SAFETY: the tensors are those of the checked call, whose bytes, those of `touches`, are live (the allocation
        // table let the launch in) and locked for the task that runs this; the launch has found the output apart from
        // everything else.
        let run = unsafe { lightning_indexer::run(&self.problem, contents, &buffers) };
        run.map_err(|why| launch.fault(why))
    }
}

quant_lightning_indexer_arguments! { arguments_of_version {
    1 phase_one {
        aclnnQuantLightningIndexerGetWorkspaceSize, Arguments, executor_of(QuantIndexerOperator::new)
    }
} }
phase_two!(aclnnQuantLightningIndexer, Version::V1.symbol());
