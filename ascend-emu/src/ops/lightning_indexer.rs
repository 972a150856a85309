//! LightningIndexer as an operator of the emulator.

use super::declared::DeclaredOperator;
use super::entry_point::{executor_of, phase_one, phase_two};
use super::launch::Launch;
use super::sparse_contents;
use crate::config::{Check, check};
use crate::descriptor::DescribedTensor;
use crate::fault::Fault;
use crate::kernel::lightning_indexer::{self, Buffers};
use crate::kernel::ring_update::Elements;
use crate::kernel::token_rows::TokenRows;
use crate::lints;
use crate::memory::DeviceMemory;
use crate::operator::Addresses;
use crate::runtime::context;
use crate::status::Outcome;
use ascend_spec::ops::lightning_indexer::{
    Argument, Arguments, IndexerProblem, Parameter, Version,
};
use ascend_spec::ops::sparse_sequences::SparseContents;
use ascend_spec::{TensorDesc, arguments_of_version, lightning_indexer_arguments};
use std::ops::Range;

/// A call that satisfies every rule.
#[derive(Debug)]
struct IndexerOperator {
    arguments: Arguments<TensorDesc>,
    problem: IndexerProblem,
    /// How strictly misuse that is found on the device is treated.
    check: Check,
}

impl IndexerOperator {
    /// Checks a call.
    fn new(arguments: &Arguments<DescribedTensor>) -> Outcome<Self> {
        let arguments = arguments.map(|_, tensor| tensor.desc);
        let (call, target) = (arguments.call(), context::machine().target);
        let problem = call.check(target)?;
        lints::report_first(Version::V1.symbol(), &arguments, |allowed| {
            call.lint(target, allowed)
        })?;
        Ok(IndexerOperator {
            arguments,
            problem,
            check: check(),
        })
    }
}

impl DeclaredOperator for IndexerOperator {
    type Arguments = Arguments<TensorDesc>;

    fn symbol(&self) -> &'static str {
        Version::V1.symbol()
    }

    fn arguments(&self) -> &Self::Arguments {
        &self.arguments
    }

    fn is_idle(&self) -> bool {
        self.problem.is_idle()
    }

    fn overruns(&self) -> bool {
        self.problem.overruns
    }

    fn touches(&self, visit: &mut dyn FnMut(Argument, Range<u64>)) {
        let call = self.arguments.call();
        (self.problem).touches(&call, &mut |parameter, range| {
            visit(parameter.into(), range)
        });
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
        let numbers = unsafe {
            sparse_contents::read(&launch, &self.problem.sequences, IndexerProblem::CONTENTS)
        }?;
        let contents = SparseContents::of(&numbers);
        let source = |parameter: Parameter, desc| TokenRows {
            desc,
            base: launch.base(parameter),
        };
        let written =
            |parameter: Parameter, desc: &TensorDesc| Elements::new(launch.first(parameter), *desc);
        let values = values.as_ref().filter(|_| self.problem.values);
        let buffers = Buffers {
            query: source(Parameter::Query, query),
            key: source(Parameter::Key, key),
            weights: source(Parameter::Weights, weights),
            indices: written(Parameter::SparseIndices, indices),
            values: values.map(|desc| written(Parameter::SparseValues, desc)),
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
