//! RecurrentGatedDeltaRule as an operator of the emulator.

use super::declared::DeclaredOperator;
use super::delta_rule::{runs, tensor};
use super::entry_point::{executor_of, phase_one, phase_two};
use super::launch::{Launch, refuse_two_places};
use super::one_version::{checked_call, declared_by_problem};
use crate::fault::Fault;
use crate::kernel::delta_rule::{self, Buffers};
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
        let own = |parameter: Parameter| tensor(&launch, parameter, self.walked(parameter));
        let (Some(query), Some(key), Some(value), Some(beta), Some(state)) = (
            own(Parameter::Query),
            own(Parameter::Key),
            own(Parameter::Value),
            own(Parameter::Beta),
            own(Parameter::State),
        ) else {
            return Ok(());
        };
        let buffers = Buffers {
            query,
            key,
            value,
            beta,
            g: own(Parameter::G),
            gk: own(Parameter::Gk),
            begin: state,
            end: state,
            out: own(Parameter::Out).filter(|_| !self.problem.loses_out),
            slots: &slots,
        };
        // SAFETY: the tensors are those of the checked call, whose bytes, those of `touches`, are live (the allocation
        // table let the launch in) and locked for the task that runs this; the launch has found what is written apart
        // from everything else; the runs keep to the tokens and to the pool.
        let run = unsafe { delta_rule::run(&self.problem, (&runs, shared), &buffers) };
        run.map_err(|why| launch.fault(why))
    }
}

recurrent_gated_delta_rule_arguments! { arguments_of_version {
    1 phase_one {
        aclnnRecurrentGatedDeltaRuleGetWorkspaceSize, Arguments, executor_of(RecurrentDeltaOperator::new)
    }
} }
phase_two!(aclnnRecurrentGatedDeltaRule, Version::V1.symbol());
