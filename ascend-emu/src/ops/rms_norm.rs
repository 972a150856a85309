//! RmsNorm as an operator of the emulator.

use super::declared::DeclaredOperator;
use super::entry_point::{executor_of, phase_one, phase_two};
use super::launch::Launch;
use crate::config::{Check, check};
use crate::descriptor::DescribedTensor;
use crate::fault::Fault;
use crate::kernel::ring_update::Elements;
use crate::kernel::rms_norm::{self, Buffers};
use crate::lints;
use crate::memory::DeviceMemory;
use crate::operator::Addresses;
use crate::runtime::context;
use crate::status::Outcome;
use ascend_spec::ops::rms_norm::{Argument, Arguments, Parameter, RmsNormProblem, Version};
use ascend_spec::{TensorDesc, arguments_of_version, rms_norm_arguments};
use std::ops::Range;

/// A call that satisfies every rule.
#[derive(Debug)]
struct RmsNormOperator {
    arguments: Arguments<TensorDesc>,
    problem: RmsNormProblem,
    /// How strictly misuse that is found on the device is treated.
    check: Check,
}

impl DeclaredOperator for RmsNormOperator {
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

    fn in_place(&self) -> Option<[Parameter; 2]> {
        Some([Parameter::Y, Parameter::X])
    }

    fn touches(&self, visit: &mut dyn FnMut(Argument, Range<u64>)) {
        let call = self.arguments.call();
        (self.problem).touches(&call, &mut |parameter, range| {
            visit(parameter.into(), range)
        });
    }

    unsafe fn compute(&self, at: &Addresses, memory: &DeviceMemory) -> Result<(), Fault> {
        let Arguments {
            x: Some(x),
            gamma: Some(gamma),
            y: Some(y),
            rstd: Some(rstd),
            ..
        } = &self.arguments
        else {
            return Ok(());
        };
        if self.is_idle() {
            return Ok(());
        }
        // SAFETY: the caller's promise.
        let launch = unsafe { Launch::new(self, self.check, at, memory) }?;
        let elements =
            |parameter: Parameter, desc: &TensorDesc| Elements::new(launch.first(parameter), *desc);
        let buffers = Buffers {
            x: elements(Parameter::X, x),
            gamma: elements(Parameter::Gamma, gamma),
            y: elements(Parameter::Y, y),
            rstd: elements(Parameter::Rstd, rstd),
        };
        // SAFETY: the tensors are those of the checked call, whose bytes, those of `touches`, are live (the allocation
        // table let the launch in) and locked for the task that runs this; the launch has found the outputs apart from
        // everything else, but for `y`, which may be `x`.
        let run = unsafe { rms_norm::run(&self.problem, [x.dtype, gamma.dtype], &buffers) };
        run.map_err(|why| launch.fault(why))
    }
}

fn new(arguments: &Arguments<DescribedTensor>) -> Outcome<RmsNormOperator> {
    let arguments = arguments.map(|_, tensor| tensor.desc);
    let (call, soc) = (arguments.call(), context::machine().target.soc);
    let problem = call.check(soc)?;
    lints::report_first(Version::V1.symbol(), &arguments, |allowed| {
        call.lint(soc, allowed)
    })?;
    Ok(RmsNormOperator {
        arguments,
        problem,
        check: check(),
    })
}

rms_norm_arguments! { arguments_of_version {
    1 phase_one { aclnnRmsNormGetWorkspaceSize, Arguments, executor_of(new) }
} }
phase_two!(aclnnRmsNorm, Version::V1.symbol());
