//! SparseFlashAttention as an operator of the emulator.

use super::declared::DeclaredOperator;
use super::entry_point::{executor_of, phase_one, phase_two};
use super::launch::Launch;
use super::listed_keys::ListedKeys;
use crate::config::{Check, check};
use crate::descriptor::DescribedTensor;
use crate::elements::{Elements, Reader};
use crate::fault::Fault;
use crate::kernel::ring_update::Elements as Logits;
use crate::kernel::sparse_attention::{self, Buffers};
use crate::kernel::token_rows::TokenRows;
use crate::lints;
use crate::memory::DeviceMemory;
use crate::operator::Addresses;
use crate::runtime::context;
use crate::status::Outcome;
use ascend_spec::operator::WalkedTensors as _;
use ascend_spec::ops::sparse_flash_attention::{
    Argument, Arguments, Parameter, SparseFlashCall, SparseFlashProblem, Version,
};
use ascend_spec::ops::sparse_sequences::SparseContents;
use ascend_spec::{TensorDesc, arguments_of_version, sparse_flash_attention_arguments};
use std::ops::Range;

/// A call that satisfies every rule.
#[derive(Debug)]
struct SparseFlashOperator {
    arguments: Arguments<TensorDesc>,
    version: Version,
    problem: SparseFlashProblem,
    /// How strictly misuse that is found on the device is treated.
    check: Check,
}

impl SparseFlashOperator {
    /// Checks a call of a version.
    fn new(arguments: &Arguments<DescribedTensor>, version: Version) -> Outcome<Self> {
        let arguments = arguments.map(|_, tensor| tensor.desc);
        let (call, target) = (arguments.call(), context::machine().target);
        let problem = call.check(version, target)?;
        lints::report_first(version.symbol(), &arguments, |allowed| call.lint(target, allowed))?;
        Ok(SparseFlashOperator { arguments, version, problem, check: check() })
    }
}

impl ListedKeys for SparseFlashOperator {
    const CONTENTS: [Parameter; 3] = SparseFlashCall::CONTENTS;
    const INDICES: Parameter = Parameter::SparseIndices;
    const KEYS: &'static [Parameter] = &[Parameter::Key, Parameter::KeyRope];
    const VALUE: Parameter = Parameter::Value;
    const OUTPUTS: &'static [(Parameter, usize)] =
        &[(Parameter::AttentionOut, 0), (Parameter::SoftmaxMax, 1), (Parameter::SoftmaxSum, 1)];

    fn problem(&self) -> &SparseFlashProblem {
        &self.problem
    }

    fn walked(&self, parameter: Parameter) -> Option<TensorDesc> {
        let desc = self.arguments.tensor(parameter)?;
        (self.problem).walked(&self.arguments.call(), parameter, desc)
    }
}

impl DeclaredOperator for SparseFlashOperator {
    type Arguments = Arguments<TensorDesc>;

    fn symbol(&self) -> &'static str {
        self.version.symbol()
    }

    fn version(&self) -> u8 {
        self.version.number()
    }

    fn arguments(&self) -> &Self::Arguments {
        &self.arguments
    }

    fn is_idle(&self) -> bool {
        self.problem.is_idle()
    }

    fn touches(&self, visit: &mut dyn FnMut(Argument, Range<u64>)) {
        let call = self.arguments.call();
        (self.problem).touches(&call, &mut |parameter, range| visit(parameter.into(), range));
    }

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
        let (Some(query), Some(query_rope), Some(key), Some(key_rope), Some(out)) = (
            rows(Parameter::Query),
            rows(Parameter::QueryRope),
            rows(Parameter::Key),
            rows(Parameter::KeyRope),
            rows(Parameter::AttentionOut),
        ) else {
            return Ok(());
        };
        // SAFETY: the ranges of `touches` are live and locked for the task that runs this; the launch has found that
        // the outputs, the only tensors written, share no memory with them.
        let (numbers, lists) = unsafe { Self::numbers(&launch) }?;
        let softmax = rows(Parameter::SoftmaxMax).zip(rows(Parameter::SoftmaxSum));
        let buffers = Buffers {
            query,
            query_rope: Some(query_rope),
            key,
            key_rope: Some(key_rope),
            out,
            softmax: softmax.map(|(max, sum)| [max, sum]),
            sinks: walked[Parameter::Sinks as usize].map(|desc| Logits::new(launch.first(Parameter::Sinks), desc)),
            lists: &lists,
        };
        // SAFETY: the tensors are those of the checked call, whose bytes, those of `touches`, are live (the allocation
        // table let the launch in) and locked for the task that runs this; the launch has found the outputs apart from
        // everything else.
        let run = unsafe { sparse_attention::run(&self.problem, SparseContents::of(&numbers), &buffers) };
        run.map_err(|why| launch.fault(why))
    }
}

fn new(version: Version) -> impl FnOnce(&Arguments<DescribedTensor>) -> Outcome<SparseFlashOperator> {
    move |arguments| SparseFlashOperator::new(arguments, version)
}

sparse_flash_attention_arguments! { arguments_of_version {
    1 phase_one {
        aclnnSparseFlashAttentionGetWorkspaceSize, Arguments, executor_of(new(Version::V1))
    }
} }
phase_two!(aclnnSparseFlashAttention, Version::V1.symbol());

sparse_flash_attention_arguments! { arguments_of_version {
    2 phase_one {
        aclnnSparseFlashAttentionV2GetWorkspaceSize, Arguments, executor_of(new(Version::V2))
    }
} }
phase_two!(aclnnSparseFlashAttentionV2, Version::V2.symbol());
