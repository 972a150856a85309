//! LightningIndexer as an operator of the emulator.

use super::declared::DeclaredOperator;
use super::entry_point::{executor_of, phase_one, phase_two};
use super::launch::Launch;
use crate::config::{Check, check};
use crate::descriptor::DescribedTensor;
use crate::fault::Fault;
use crate::finding_kind::FindingKind;
use crate::kernel::lightning_indexer::{self, Buffers, Source};
use crate::kernel::ring_update::Elements;
use crate::lints;
use crate::memory::DeviceMemory;
use crate::operator::Addresses;
use crate::runtime::context;
use crate::status::Outcome;
use ascend_spec::ops::lightning_indexer::{
    Argument, Arguments, IndexerProblem, Parameter, Version,
};
use ascend_spec::ops::sparse_sequences::{Side, SparseContents, SparseFault};
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

/// Reports numbers on the device that lead outside of a tensor; in strict mode that is a device fault.
pub(super) fn inspect<O: DeclaredOperator>(
    launch: &Launch<'_, O>,
    fault: SparseFault,
    lengths: [&'static str; 2],
) -> Result<(), Fault> {
    let [of_query, of_key] = lengths;
    let (kind, tensor) = match fault {
        SparseFault::Length { side, .. } => {
            let tensor = match side {
                Side::Query => of_query,
                Side::Key => of_key,
            };
            (FindingKind::SequenceLength, tensor)
        }
        SparseFault::NoColumn { .. } => (FindingKind::SequenceLength, of_key),
        SparseFault::NoBlock { .. } => (FindingKind::BlockTable, "blockTable"),
    };
    launch.suspect(kind, tensor, format_args!("{tensor}: {fault}"))
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
        let numbers = |parameter: Parameter| {
            // SAFETY: the ranges of `touches` are live and locked for the task that runs this; the launch has found
            // that the outputs, the only tensors written, share no memory with them.
            unsafe { launch.integers(parameter) }
        };
        let query_lengths = numbers(Parameter::ActualSeqLengthsQuery)?;
        let key_lengths = numbers(Parameter::ActualSeqLengthsKey)?;
        let block_table = numbers(Parameter::BlockTable)?;
        let contents = SparseContents {
            query_lengths: &query_lengths,
            key_lengths: &key_lengths,
            block_table: &block_table,
        };
        let lengths = [
            Parameter::ActualSeqLengthsQuery,
            Parameter::ActualSeqLengthsKey,
        ];
        let lengths = lengths.map(Parameter::acl_name);
        let mut faults = self.problem.sequences.faults(contents);
        faults.try_for_each(|fault| inspect(&launch, fault, lengths))?;
        let source = |parameter: Parameter, desc| Source {
            desc,
            base: launch.base(parameter).cast_const(),
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
