//! RmsNorm as an operator of the emulator.

use super::checked_call::{checked_call, declared_by_problem};
use super::declared::{DeclaredOperator, Launch};
use crate::kernel::element_view::ElementView;
use crate::kernel::rms_norm::{self, Buffers};
use crate::status::Outcome;
use ascend_spec::ops::rms_norm::{Argument, Arguments, Parameter, RmsNormProblem, Version};
use ascend_spec::{TensorDesc, rms_norm_arguments};

checked_call! { RmsNormOperator: RmsNormProblem, target.soc }

impl DeclaredOperator for RmsNormOperator {
    declared_by_problem! { with overruns }

    fn in_place(&self) -> Option<[Parameter; 2]> {
        Some([Parameter::Y, Parameter::X])
    }

    unsafe fn compute(&self, launch: &Launch<'_, Self>) -> Outcome {
        let Arguments { x: Some(x), gamma: Some(gamma), y: Some(y), rstd: Some(rstd), .. } = &self.arguments else {
            return Ok(());
        };
        let elements = |parameter: Parameter, desc: &TensorDesc| ElementView::new(launch.first(parameter), *desc);
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

c_functions! {
    rms_norm_arguments;
    1 V1: aclnnRmsNormGetWorkspaceSize, aclnnRmsNorm => RmsNormOperator::new;
}
