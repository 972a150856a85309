//! QuantLightningIndexer as an operator of the emulator.

use super::checked_call::{checked_call, declared_by_problem};
use super::declared::{DeclaredOperator, Launch};
use super::lightning_indexer::choose;
use super::sparse_contents;
use crate::elements::Elements;
use crate::status::Outcome;
use ascend_spec::operator::WalkedTensors as _;
use ascend_spec::ops::lightning_indexer::IndexerProblem;
use ascend_spec::ops::quant_lightning_indexer::{Argument, Arguments, Parameter, QuantIndexerCall, Version};
use ascend_spec::{TensorDesc, quant_lightning_indexer_arguments};

checked_call! { QuantIndexerOperator: IndexerProblem, target }

impl DeclaredOperator for QuantIndexerOperator {
    declared_by_problem! {}

    unsafe fn writes(&self, launch: &Launch<'_, Self>, visit: &mut dyn FnMut(&Elements)) {
        let (call, indices) = (self.arguments.call(), Parameter::SparseIndices);
        let walked = self.arguments.tensor(indices).and_then(|desc| self.problem.walked(&call, indices, desc));
        let outputs = walked.map(|desc| (indices, desc, 0));
        let sequences = (&self.problem.sequences, QuantIndexerCall::CONTENTS[0]);
        // SAFETY: the caller's promise.
        unsafe { sparse_contents::write_rows(launch, sequences, outputs, visit) };
    }

    unsafe fn compute(&self, launch: &Launch<'_, Self>) -> Outcome {
        let tensors = [Parameter::Query, Parameter::Key, Parameter::Weights, Parameter::SparseIndices];
        let scales = [Parameter::QueryDequantScale, Parameter::KeyDequantScale];
        // SAFETY: the caller's promise.
        unsafe { choose(launch, &self.problem, QuantIndexerCall::CONTENTS, tensors, None, Some(scales)) }
    }
}

c_functions! {
    quant_lightning_indexer_arguments;
    1 V1: aclnnQuantLightningIndexerGetWorkspaceSize, aclnnQuantLightningIndexer => QuantIndexerOperator::new;
}
