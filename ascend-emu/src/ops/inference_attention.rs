//! PromptFlashAttention and IncreFlashAttention as operators of the emulator.

use super::attention::{self, within_reach};
use super::declared::DeclaredOperator;
use super::launch::Launch;
use super::{attention_contents, attention_reads};
use crate::config::{Check, check};
use crate::elements::Reader;
use crate::fault::Fault;
use crate::kernel::Buffers;
use crate::memory::DeviceMemory;
use crate::operator::Addresses;
use ascend_spec::attention_problem::{AttentionProblem, TensorRole};
use ascend_spec::operator::{Argument, ArgumentList};
use ascend_spec::{Refusal, TensorDesc};
use std::ops::Range;
use std::ptr;

/// A call that satisfies every rule, of the operator with these arguments.
#[derive(Debug)]
pub(crate) struct InferenceAttention<A: ArgumentList> {
    arguments: A,
    symbol: &'static str,
    version: u8,
    /// What the call computes; `None` if it computes nothing.
    problem: Option<AttentionProblem<'static>>,
    /// Bytes of each tensor that a launch touches, from the tensor's base address.
    touches: Vec<(Argument<A::Parameter>, Range<u64>)>,
    /// Finds the argument with a role.
    of_role: fn(TensorRole) -> Option<Argument<A::Parameter>>,
    /// How strictly misuse that is found on the device is treated.
    check: Check,
}

impl<A: ArgumentList<Tensor = TensorDesc>> InferenceAttention<A> {
    /// Makes a checked call whose launch computes `problem`, or nothing if that is `None`.
    pub(crate) fn new(
        arguments: A,
        (symbol, version): (&'static str, u8),
        problem: Option<AttentionProblem<'static>>,
        of_role: fn(TensorRole) -> Option<Argument<A::Parameter>>,
    ) -> Result<Self, Refusal> {
        let mut touches = Vec::new();
        if let Some(problem) = &problem {
            within_reach(problem)?;
            problem.touches(&mut |role, range| {
                // A range that no memory could hold is refused by the allocation table.
                let range = range.unwrap_or(0..u64::MAX);
                touches.extend(of_role(role).map(|argument| (argument, range)));
            });
        }
        Ok(InferenceAttention {
            arguments,
            symbol,
            version,
            problem,
            touches,
            of_role,
            check: check(),
        })
    }
}

impl<A> DeclaredOperator for InferenceAttention<A>
where
    A: ArgumentList<Tensor = TensorDesc> + Send + Sync,
{
    type Arguments = A;

    fn symbol(&self) -> &'static str {
        self.symbol
    }

    fn version(&self) -> u8 {
        self.version
    }

    fn arguments(&self) -> &A {
        &self.arguments
    }

    fn is_idle(&self) -> bool {
        self.touches.is_empty()
    }

    fn touches(&self, visit: &mut dyn FnMut(Argument<A::Parameter>, Range<u64>)) {
        for (argument, range) in &self.touches {
            visit(*argument, range.clone());
        }
    }

    unsafe fn reads(&self, at: &Addresses, memory: &DeviceMemory, reader: &mut dyn Reader) {
        if let Some(problem) = &self.problem {
            // SAFETY: the caller's promise.
            unsafe { attention_reads::reads(self, problem, &self.of_role, (at, memory), reader) };
        }
    }

    unsafe fn compute(&self, at: &Addresses, memory: &DeviceMemory) -> Result<(), Fault> {
        let Some(problem) = &self.problem else {
            return Ok(());
        };
        // SAFETY: the caller's promise.
        let launch = unsafe { Launch::new(self, self.check, at, memory) }?;
        let base = |role: TensorRole| match (self.of_role)(role) {
            Some(argument) => launch.base(argument),
            None => ptr::null_mut(),
        };
        let buffers = Buffers(&base);
        let name = |role| (self.of_role)(role).map(Argument::acl_name);
        // SAFETY: the ranges that `AttentionProblem::touches` reports are those of `touches`: live (the allocation
        // table let the launch in), locked for the task that runs this, and, as the launch has found, with outputs
        // apart from everything else.
        unsafe { attention_contents::inspect(&launch, problem, &buffers, &name) }?;
        // SAFETY: as above.
        unsafe { attention::run(problem, &buffers) }
    }
}
