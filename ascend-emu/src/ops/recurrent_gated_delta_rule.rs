//! RecurrentGatedDeltaRule as an operator of the emulator.

use super::checked_call::{checked_call, declared_by_problem};
use super::declared::{DeclaredOperator, Launch};
use super::delta_rule::{DeltaOperator, Parameters, runs};
use crate::elements::{Elements, Reader};
use crate::kernel::delta_rule;
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
    /// As for [`DeclaredOperator::run`].
    unsafe fn numbers(&self, launch: &Launch<'_, Self>) -> [Vec<i64>; 3] {
        // SAFETY: the caller's promise.
        let held = |parameter| unsafe { launch.integers(parameter) }.unwrap_or_default();
        RecurrentDeltaCall::CONTENTS.map(held)
    }
}

impl DeclaredOperator for RecurrentDeltaOperator {
    declared_by_problem! { with overruns }

    const UPDATED: &'static [Parameter] = &[Parameter::State];

    unsafe fn reads(&self, launch: &Launch<'_, Self>, reader: &mut dyn Reader) {
        // SAFETY: the caller's promise.
        let [lengths, slots, accepted] = &unsafe { self.numbers(launch) };
        self.read_runs(launch, DeltaRuleContents { lengths, slots, accepted }, reader);
    }

    unsafe fn writes(&self, launch: &Launch<'_, Self>, visit: &mut dyn FnMut(&Elements)) {
        // SAFETY: the caller's promise.
        let [lengths, slots, accepted] = &unsafe { self.numbers(launch) };
        self.write_runs(launch, DeltaRuleContents { lengths, slots, accepted }, visit);
    }

    unsafe fn compute(&self, launch: &Launch<'_, Self>) -> Outcome {
        // SAFETY: the ranges of `touches` are live and locked for the task that runs this; the launch has found that
        // the tensors that are written share no memory with them.
        let numbers = RecurrentDeltaCall::CONTENTS.map(|parameter| unsafe { launch.integers(parameter) });
        let [lengths, slots, accepted] = numbers;
        let (lengths, slots, accepted) = (lengths?, slots?, accepted?);
        let contents = DeltaRuleContents { lengths: &lengths, slots: &slots, accepted: &accepted };
        let (runs, shared) = runs(launch, &self.problem, contents)?;
        let Some(buffers) = self.buffers(launch, &slots) else {
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
