//! RecurrentGatedDeltaRule as an operator of the emulator.

use super::checked_call::{checked_call, declared_by_problem};
use super::declared::DeclaredOperator;
use super::delta_rule::{DeltaOperator, Parameters, runs};
use super::launch::{Launch, integers, refuse_two_places};
use crate::elements::{Elements, Reader};
use crate::kernel::delta_rule;
use crate::memory::DeviceMemory;
use crate::operator::Addresses;
use crate::status::Outcome;
use ascend_spec::operator::WalkedTensors as _;
use ascend_spec::ops::delta_rule::{DeltaRuleContents, DeltaRuleProblem};
use ascend_spec::ops::recurrent_gated_delta_rule::{Argument, Arguments, Parameter, RecurrentDeltaCall, Version};
use ascend_spec::{TensorDesc, recurrent_gated_delta_rule_arguments};

checked_call! { RecurrentDeltaOperator: DeltaRuleProblem, target }

impl DeltaOperator for RecurrentDeltaOperator {
    const PARAMETERS: Parameters<Parameter> = Parameters {
        query: Parameter::Query,
        key: Parameter::Key,
        value: Parameter::Value,
        beta: Parameter::Beta,
        g: Parameter::G,
        gk: Some(Parameter::Gk),
        states: [Parameter::State; 2],
        out: Parameter::Out,
    };

    fn problem(&self) -> &DeltaRuleProblem {
        &self.problem
    }

    fn walked(&self, parameter: Parameter) -> Option<TensorDesc> {
        if parameter == Parameter::Out && self.problem.loses_out {
            return None;
        }
        let desc = self.arguments.tensor(parameter)?;
        self.problem.walked(&self.arguments.call(), parameter, desc)
    }
}

impl RecurrentDeltaOperator {
    /// Lengths, slots and accepted counts; none where there is no host memory for them, with which the launch fails.
    ///
    /// # Safety
    ///
    /// As for [`DeclaredOperator::compute`].
    unsafe fn numbers(&self, addresses: &Addresses, memory: &DeviceMemory) -> [Vec<i64>; 3] {
        // SAFETY: the caller's promise.
        let held = |parameter| unsafe { integers(self, memory, addresses, parameter) }.unwrap_or_default();
        RecurrentDeltaCall::CONTENTS.map(held)
    }
}

impl DeclaredOperator for RecurrentDeltaOperator {
    declared_by_problem! { with overruns }

    unsafe fn reads(&self, addresses: &Addresses, memory: &DeviceMemory, reader: &mut dyn Reader) {
        // SAFETY: the caller's promise.
        let [lengths, slots, accepted] = &unsafe { self.numbers(addresses, memory) };
        self.read_runs(addresses, DeltaRuleContents { lengths, slots, accepted }, reader);
    }

    unsafe fn writes(&self, addresses: &Addresses, memory: &DeviceMemory, visit: &mut dyn FnMut(&Elements)) {
        // SAFETY: the caller's promise.
        let [lengths, slots, accepted] = &unsafe { self.numbers(addresses, memory) };
        self.write_runs(addresses, DeltaRuleContents { lengths, slots, accepted }, visit);
    }

    unsafe fn compute(&self, addresses: &Addresses, memory: &DeviceMemory) -> Outcome {
        if self.is_idle() {
            return Ok(());
        }
        refuse_two_places(self, addresses, &[Parameter::State])?;
        // SAFETY: the caller's promise.
        let launch = unsafe { Launch::new(self, self.check, addresses, memory) }?;
        // SAFETY: the ranges of `touches` are live and locked for the task that runs this; the launch has found that
        // the tensors that are written share no memory with them.
        let numbers = RecurrentDeltaCall::CONTENTS.map(|parameter| unsafe { launch.integers(parameter) });
        let [lengths, slots, accepted] = numbers;
        let (lengths, slots, accepted) = (lengths?, slots?, accepted?);
        let contents = DeltaRuleContents { lengths: &lengths, slots: &slots, accepted: &accepted };
        let (runs, shared) = runs(&launch, &self.problem, contents)?;
        let Some(buffers) = self.buffers(&launch, &slots) else {
            return Ok(());
        };
        // SAFETY: the tensors are those of the checked call, whose bytes, those of `touches`, are live (the allocation
        // table let the launch in) and locked for the task that runs this; the launch has found what is written apart
        // from everything else; the runs keep to the tokens and to the pool.
        unsafe { delta_rule::run(&self.problem, (&runs, shared), &buffers) };
        Ok(())
    }
}

c_functions! {
    recurrent_gated_delta_rule_arguments;
    1 V1: aclnnRecurrentGatedDeltaRuleGetWorkspaceSize, aclnnRecurrentGatedDeltaRule => RecurrentDeltaOperator::new;
}
