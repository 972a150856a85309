//! LightningIndexer as an operator of the emulator.

use super::checked_call::{checked_call, declared_by_problem};
use super::declared::{DeclaredOperator, Launch, ParameterOf};
use super::sparse_contents;
use crate::elements::Elements;
use crate::kernel::element_view::ElementView;
use crate::kernel::lightning_indexer::{self, Buffers};
use crate::kernel::token_rows::TokenRows;
use crate::status::Outcome;
use ascend_spec::operator::{ArgumentList as _, WalkedTensors as _};
use ascend_spec::ops::lightning_indexer::{Argument, Arguments, IndexerCall, IndexerProblem, Parameter, Version};
use ascend_spec::ops::sparse_sequences::SparseContents;
use ascend_spec::{TensorDesc, lightning_indexer_arguments};

checked_call! { IndexerOperator: IndexerProblem, target }

impl DeclaredOperator for IndexerOperator {
    declared_by_problem! { with overruns }

    unsafe fn writes(&self, launch: &Launch<'_, Self>, visit: &mut dyn FnMut(&Elements)) {
        let call = self.arguments.call();
        let walked = |parameter| self.problem.walked(&call, parameter, self.arguments.tensor(parameter)?);
        let outputs = [Parameter::SparseIndices, Parameter::SparseValues];
        let outputs = outputs.into_iter().filter_map(|parameter| Some((parameter, walked(parameter)?, 0)));
        let sequences = (&self.problem.sequences, IndexerCall::CONTENTS[0]);
        // SAFETY: the caller's promise.
        unsafe { sparse_contents::write_rows(launch, sequences, outputs, visit) };
    }

    unsafe fn compute(&self, launch: &Launch<'_, Self>) -> Outcome {
        let values = Parameter::SparseValues;
        let desc = self.arguments.tensor(values);
        let walked = desc.and_then(|desc| self.problem.walked(&self.arguments.call(), values, desc));
        let values = walked.map(|desc| (values, desc));
        let tensors = [Parameter::Query, Parameter::Key, Parameter::Weights, Parameter::SparseIndices];
        // SAFETY: the caller's promise.
        unsafe { choose(launch, &self.problem, IndexerCall::CONTENTS, tensors, values, None) }
    }
}

/// Chooses keys: tensors are queries, keys, weights and indices, then scores as they are written and the scales of
/// queries and keys, where there are such.
///
/// # Errors
/// A device fault in strict mode, or where there is no host memory.
///
/// # Safety
///
/// As for [`DeclaredOperator::compute`].
pub(super) unsafe fn choose<O: DeclaredOperator>(
    launch: &Launch<'_, O>,
    problem: &IndexerProblem,
    contents: [ParameterOf<O>; 3],
    tensors: [ParameterOf<O>; 4],
    values: Option<(ParameterOf<O>, TensorDesc)>,
    scales: Option<[ParameterOf<O>; 2]>,
) -> Outcome {
    let desc = |parameter: ParameterOf<O>| launch.op.arguments().tensor(parameter.into());
    let source = |parameter| Some(TokenRows { desc: desc(parameter)?, base: launch.base(parameter) });
    let written = |(parameter, desc): (ParameterOf<O>, TensorDesc)| {
        let start = desc.byte_range().map_or(0, |range| range.start);
        ElementView::new(launch.base(parameter).wrapping_add(start as usize), desc)
    };
    let (Some(query), Some(key), Some(weights), Some(indices)) =
        (source(tensors[0]), source(tensors[1]), source(tensors[2]), desc(tensors[3]))
    else {
        return Ok(());
    };
    // SAFETY: the ranges of `touches` are live and locked for the task that runs this; the launch has found that the
    // outputs, the only tensors written, share no memory with them.
    let numbers = unsafe { sparse_contents::read(launch, &problem.sequences, contents) }?;
    let scales = scales.and_then(|[query, key]| Some([source(query)?, source(key)?]));
    let indices = written((tensors[3], *indices));
    let buffers = Buffers { query, key, weights, indices, values: values.map(written), scales };
    // SAFETY: the tensors are those of the checked call, whose bytes, those of `touches`, are live (the allocation
    // table let the launch in) and locked for the task that runs this; the launch has found the outputs apart from
    // everything else.
    let run = unsafe { lightning_indexer::run(problem, SparseContents::of(&numbers), &buffers) };
    run.map_err(|why| launch.fault(why))
}

c_functions! {
    lightning_indexer_arguments;
    1 V1: aclnnLightningIndexerGetWorkspaceSize, aclnnLightningIndexer => IndexerOperator::new;
}
