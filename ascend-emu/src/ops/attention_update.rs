//! AttentionUpdate as an operator of the emulator.

use super::contiguous::gather;
use super::declared::{DeclaredOperator, Launch};
use crate::config::{Check, check};
use crate::descriptor::DescribedTensor;
use crate::finding_kind::FindingKind;
use crate::kernel::merge;
use crate::runtime::context;
use crate::status::Outcome;
use ascend_spec::ops::attention_update::{Argument, Arguments, Parameter, UpdateProblem, Version};
use ascend_spec::{TensorDesc, Violation, attention_update_arguments};
use std::ops::Range;
use std::ptr;

/// A call that satisfies every rule.
#[derive(Debug)]
struct UpdateOperator {
    arguments: Arguments<TensorDesc>,
    problem: UpdateProblem,
    /// How strictly misuse that is found on the device is treated.
    check: Check,
}

impl UpdateOperator {
    /// Checks a call.
    fn new(arguments: &Arguments<DescribedTensor>) -> Result<Self, Violation> {
        let arguments = arguments.map(|_, tensor| tensor.desc);
        let problem = arguments.call().check(context::machine().target)?;
        Ok(UpdateOperator { arguments, problem, check: check() })
    }
}

impl DeclaredOperator for UpdateOperator {
    type Arguments = Arguments<TensorDesc>;

    fn symbol(&self) -> &'static str {
        Version::V1.symbol()
    }

    fn arguments(&self) -> &Self::Arguments {
        &self.arguments
    }

    fn check(&self) -> Check {
        self.check
    }

    fn is_idle(&self) -> bool {
        self.problem.rows == 0
    }

    fn touches(&self, visit: &mut dyn FnMut(Argument, Range<u64>)) {
        self.problem.touches(&self.arguments.call(), visit);
    }

    unsafe fn compute(&self, launch: &Launch<'_, Self>) -> Outcome {
        let (mut lse, mut local_out) = (Vec::new(), Vec::new());
        let (mut out, mut lse_out) = (ptr::null_mut(), None);
        let mut copies = Vec::new();
        for (argument, desc) in self.arguments.each_tensor() {
            let first = launch.first(argument);
            let list = match argument.parameter {
                Parameter::Lse => &mut lse,
                Parameter::LocalOut => &mut local_out,
                Parameter::LseOut => {
                    lse_out = Some(first);
                    continue;
                }
                _ => {
                    out = first;
                    continue;
                }
            };
            if desc.is_contiguous() {
                list.push(first);
            } else {
                // SAFETY: the view's bytes are those of `touches`: live (the allocation table let the launch in) and
                // locked for the task that runs this.
                let copy = unsafe { gather(desc, launch.base(argument)) };
                let mut copy = copy.map_err(|why| launch.fault(why))?;
                list.push(copy.as_mut_ptr());
                copies.push(copy);
            }
        }
        let buffers = merge::Buffers { lse: &lse, local_out: &local_out, out, lse_out };
        // SAFETY: the places are those of `touches`, in the order of the lists and outputs, or copies of as many
        // elements: live (the allocation table let the launch in), locked for the task that runs this, and, as the
        // launch has found, with the outputs apart from everything else.
        unsafe {
            if let Some(row) = merge::empty_row(&self.problem, &buffers) {
                launch.suspect(FindingKind::EmptyRow, "lse", row)?;
            }
            merge::run(&self.problem, &buffers);
        }
        Ok(())
    }
}

c_functions! {
    attention_update_arguments;
    1 V1: aclnnAttentionUpdateGetWorkspaceSize, aclnnAttentionUpdate => UpdateOperator::new;
}
