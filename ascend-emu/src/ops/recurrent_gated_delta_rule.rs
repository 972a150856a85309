//! RecurrentGatedDeltaRule as an operator of the emulator.

use super::declared::DeclaredOperator;
use super::delta_rule::{Parameters, buffers, runs};
use super::entry_point::{executor_of, phase_one, phase_two};
use super::launch::{Launch, refuse_two_places};
use super::one_version::{checked_call, declared_by_problem};
use crate::fault::Fault;
use crate::kernel::delta_rule;
use crate::memory::DeviceMemory;
use crate::operator::Addresses;
use ascend_spec::operator::WalkedTensors as _;
use ascend_spec::ops::delta_rule::{DeltaRuleContents, DeltaRuleProblem};
use ascend_spec::ops::recurrent_gated_delta_rule::{Argument, Arguments, Parameter, RecurrentDeltaCall, Version};
use ascend_spec::{TensorDesc, arguments_of_version, recurrent_gated_delta_rule_arguments};

checked_call! { RecurrentDeltaOperator: DeltaRuleProblem, target }

impl RecurrentDeltaOperator {
    fn walked(&self, parameter: Parameter) -> Option<TensorDesc> {
        let desc = self.arguments.tensor(parameter)?;
        self.problem.walked(&self.arguments.call(), parameter, desc)
    }
}

impl DeclaredOperator for RecurrentDeltaOperator {
    declared_by_problem! {}

    fn overruns(&self) -> bool {
        self.problem.overruns
    }

    unsafe fn compute(&self, addresses: &Addresses, memory: &DeviceMemory) -> Result<(), Fault> {
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
        let parameters = Parameters {
            query: Parameter::Query,
            key: Parameter::Key,
            value: Parameter::Value,
            beta: Parameter::Beta,
            g: Parameter::G,
            gk: Some(Parameter::Gk),
            states: [Parameter::State; 2],
            out: Parameter::Out,
        };
        let walked = |parameter| match parameter {
            Parameter::Out if self.problem.loses_out => None,
            _ => self.walked(parameter),
        };
        let Some(buffers) = buffers(&launch, parameters, walked, &slots) else {
            return Ok(());
        };
        // SAFETY: the tensors are those of the checked call, whose bytes, those of `touches`, are live (the allocation
        // table let the launch in) and locked for the task that runs this; the launch has found what is written apart
        // from everything else; the runs keep to the tokens and to the pool.
        unsafe { delta_rule::run(&self.problem, (&runs, shared), &buffers) };
        Ok(())
    }
}

recurrent_gated_delta_rule_arguments! { arguments_of_version {
    1 phase_one {
        aclnnRecurrentGatedDeltaRuleGetWorkspaceSize, Arguments, executor_of(RecurrentDeltaOperator::new)
    }
} }
phase_two!(aclnnRecurrentGatedDeltaRule, Version::V1.symbol());
