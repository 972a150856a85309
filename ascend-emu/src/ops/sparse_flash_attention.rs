//! SparseFlashAttention as an operator of the emulator.

use super::declared::DeclaredOperator;
use super::entry_point::{executor_of, phase_one, phase_two};
use super::launch::Launch;
use super::sparse_contents;
use crate::config::{Check, check};
use crate::descriptor::DescribedTensor;
use crate::fault::Fault;
use crate::kernel::sparse_attention::{self, Buffers};
use crate::kernel::token_rows::TokenRows;
use crate::lints;
use crate::memory::DeviceMemory;
use crate::operator::Addresses;
use crate::runtime::context;
use crate::status::Outcome;
use ascend_spec::ops::sparse_flash_attention::{
    Argument, Arguments, Parameter, SparseFlashProblem, Version,
};
use ascend_spec::ops::sparse_sequences::SparseContents;
use ascend_spec::{TensorDesc, arguments_of_version, sparse_flash_attention_arguments};
use std::ops::Range;

/// A call that satisfies every rule.
#[derive(Debug)]
struct SparseFlashOperator {
    arguments: Arguments<TensorDesc>,
    problem: SparseFlashProblem,
    /// How strictly misuse that is found on the device is treated.
    check: Check,
}

impl SparseFlashOperator {
    /// Checks a call.
    fn new(arguments: &Arguments<DescribedTensor>) -> Outcome<Self> {
        let arguments = arguments.map(|_, tensor| tensor.desc);
        let (call, target) = (arguments.call(), context::machine().target);
        let problem = call.check(target)?;
        lints::report_first(Version::V1.symbol(), &arguments, |allowed| {
            call.lint(target, allowed)
        })?;
        Ok(SparseFlashOperator {
            arguments,
            problem,
            check: check(),
        })
    }
}

impl DeclaredOperator for SparseFlashOperator {
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
        let call = self.arguments.call();
        let mut walked = [None; Parameter::ALL.len()];
        for (argument, desc) in call.each_tensor() {
            let parameter = argument.parameter;
            walked[parameter as usize] = self.problem.walked(&call, parameter, desc);
        }
        // SAFETY: the caller's promise.
        let launch = unsafe { Launch::new(self, self.check, addresses, memory) }?;
        let rows = |parameter: Parameter| {
            let desc = walked[parameter as usize].as_ref()?;
            let base = launch.base(parameter);
            Some(TokenRows { desc, base })
        };
        let (Some(query), Some(query_rope), Some(key), Some(key_rope), Some(out)) = (
            rows(Parameter::Query),
            rows(Parameter::QueryRope),
            rows(Parameter::Key),
            rows(Parameter::KeyRope),
            rows(Parameter::AttentionOut),
        ) else {
            return Ok(());
        };
        let parameters = SparseFlashProblem::CONTENTS;
        // SAFETY: the ranges of `touches` are live and locked for the task that runs this; the launch has found that
        // the outputs, the only tensors written, share no memory with them.
        let (numbers, lists) = unsafe {
            let numbers = sparse_contents::read(&launch, &self.problem.sequences, parameters)?;
            (numbers, launch.integers(Parameter::SparseIndices)?)
        };
        let softmax = rows(Parameter::SoftmaxMax).zip(rows(Parameter::SoftmaxSum));
        let buffers = Buffers {
            query,
            query_rope,
            key,
            key_rope,
            out,
            softmax: softmax.map(|(max, sum)| [max, sum]),
            lists: &lists,
        };
        let contents = SparseContents::of(&numbers);
        // SAFETY: the tensors are those of the checked call, whose bytes, those of `touches`, are live (the allocation
        // table let the launch in) and locked for the task that runs this; the launch has found the outputs apart from
        // everything else.
        let run = unsafe { sparse_attention::run(&self.problem, contents, &buffers) };
        run.map_err(|why| launch.fault(why))
    }
}

sparse_flash_attention_arguments! { arguments_of_version {
    1 phase_one {
        aclnnSparseFlashAttentionGetWorkspaceSize, Arguments, executor_of(SparseFlashOperator::new)
    }
} }
phase_two!(aclnnSparseFlashAttention, Version::V1.symbol());
