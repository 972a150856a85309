//! ChunkGatedDeltaRule as an operator of the emulator.
//!
//! Chunks are computed in single precision; the kernel of the device rounds each product of a chunk to BF16.

use super::checked_call::{checked_call, declared_by_problem};
use super::declared::{DeclaredOperator, Launch};
use super::delta_rule::{DeltaOperator, Parameters, runs};
use crate::elements::{Elements, Reader};
use crate::kernel::delta_chunks;
use crate::status::Outcome;
use ascend_spec::operator::WalkedTensors as _;
use ascend_spec::ops::chunk_gated_delta_rule::{Argument, Arguments, Parameter, Version};
use ascend_spec::ops::delta_rule::{DeltaRuleContents, DeltaRuleProblem};
use ascend_spec::{TensorDesc, chunk_gated_delta_rule_arguments};

checked_call! { ChunkDeltaOperator: DeltaRuleProblem, target }

impl DeltaOperator for ChunkDeltaOperator {
    const PARAMETERS: Parameters<Parameter> = Parameters {
        query: Parameter::Query,
        key: Parameter::Key,
        value: Parameter::Value,
        beta: Parameter::Beta,
        g: Parameter::G,
        gk: None,
        states: [Parameter::InitialState, Parameter::FinalState],
        out: Parameter::Out,
    };

    fn problem(&self) -> &DeltaRuleProblem {
        &self.problem
    }

    fn walked(&self, parameter: Parameter) -> Option<TensorDesc> {
        self.arguments.tensor(parameter).copied()
    }
}

impl ChunkDeltaOperator {
    /// The lengths; none where there is no host memory for them, with which the launch fails.
    ///
    /// # Safety
    ///
    /// As for [`DeclaredOperator::run`].
    unsafe fn lengths(&self, launch: &Launch<'_, Self>) -> Vec<i64> {
        // SAFETY: the caller's promise.
        unsafe { launch.integers(Parameter::ActualSeqLengths) }.unwrap_or_default()
    }
}

impl DeclaredOperator for ChunkDeltaOperator {
    declared_by_problem! {}

    unsafe fn reads(&self, launch: &Launch<'_, Self>, reader: &mut dyn Reader) {
        // SAFETY: the caller's promise.
        let lengths = unsafe { self.lengths(launch) };
        let contents = DeltaRuleContents { lengths: &lengths, ..DeltaRuleContents::default() };
        self.read_runs(launch, contents, reader);
    }

    unsafe fn writes(&self, launch: &Launch<'_, Self>, visit: &mut dyn FnMut(&Elements)) {
        // SAFETY: the caller's promise.
        let lengths = unsafe { self.lengths(launch) };
        let contents = DeltaRuleContents { lengths: &lengths, ..DeltaRuleContents::default() };
        self.write_runs(launch, contents, visit);
    }

    unsafe fn compute(&self, launch: &Launch<'_, Self>) -> Outcome {
        // SAFETY: the ranges of `touches` are live and locked for the task that runs this; the launch has found that
        // the outputs, the only tensors written, share no memory with them.
        let lengths = unsafe { launch.integers(Parameter::ActualSeqLengths) }?;
        let contents = DeltaRuleContents { lengths: &lengths, ..DeltaRuleContents::default() };
        let (runs, shared) = runs(launch, &self.problem, contents)?;
        let Some(buffers) = self.buffers(launch, &[]) else {
            return Ok(());
        };
        // SAFETY: the tensors are those of the checked call, whose bytes, those of `touches`, are live (the allocation
        // table let the launch in) and locked for the task that runs this; the launch has found the outputs apart from
        // everything else; the runs keep to the tokens.
        unsafe { delta_chunks::run(&self.problem, (&runs, shared), &buffers) };
        Ok(())
    }
}

c_functions! {
    chunk_gated_delta_rule_arguments;
    1 V1: aclnnChunkGatedDeltaRuleGetWorkspaceSize, aclnnChunkGatedDeltaRule => ChunkDeltaOperator::new;
}
