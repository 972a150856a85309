//! AttentionUpdate as an operator of the emulator.

use super::declared::DeclaredOperator;
use super::entry_point::{phase_one, phase_two};
use super::launch::Launch;
use super::phase_one::executor_of;
use crate::config::{Check, check};
use crate::descriptor::Described;
use crate::fault::Fault;
use crate::host_memory::{HostMemoryExhausted, try_with_capacity};
use crate::kernel::merge;
use crate::memory::DeviceMemory;
use crate::operator::Addresses;
use crate::runtime::context;
use crate::sanitizer::FindingKind;
use ascend_spec::ops::attention_update::{Argument, Arguments, Parameter, UpdateProblem, Version};
use ascend_spec::{
    Target, TensorDesc, Violation, arguments_of_version, attention_update_arguments,
};
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
    fn new(arguments: Arguments<TensorDesc>, target: Target) -> Result<Self, Violation> {
        let problem = arguments.call().check(target)?;
        Ok(UpdateOperator {
            arguments,
            problem,
            check: check(),
        })
    }
}

/// Copies the elements of a view of one or two axes to contiguous memory.
///
/// # Errors
/// There is no host memory for the elements.
///
/// # Safety
///
/// `first` is the first of the bytes that [`TensorDesc::byte_range`] counts, which are live and written by no other
/// thread.
unsafe fn side_by_side(
    desc: &TensorDesc,
    first: *const u8,
) -> Result<Vec<u8>, HostMemoryExhausted> {
    let axis = |axis: usize| {
        let dim = desc.shape.get(axis).copied().unwrap_or(1);
        (dim, desc.strides.get(axis).copied().unwrap_or(0))
    };
    let ((rows, down), (columns, across)) = (axis(0), axis(1));
    let size = desc.dtype.bits() as usize / 8;
    let start = desc.byte_range().map_or(0, |range| range.start as usize);
    let count = |dim: i64| usize::try_from(dim).unwrap_or(usize::MAX);
    let elements = count(rows).saturating_mul(count(columns));
    let mut copy = try_with_capacity(elements.saturating_mul(size))?;
    for row in 0..rows {
        for column in 0..columns {
            let element = desc.offset + row * down + column * across;
            let place = (element as usize * size).saturating_sub(start);
            // SAFETY: every element of the view lies within its range of bytes, which starts at `first` by the
            // caller's promise.
            copy.extend_from_slice(unsafe { std::slice::from_raw_parts(first.add(place), size) });
        }
    }
    Ok(copy)
}

impl DeclaredOperator for UpdateOperator {
    type Arguments = Arguments<TensorDesc>;

    fn symbol(&self) -> &'static str {
        Version::V1.symbol()
    }

    fn arguments(&self) -> &Self::Arguments {
        &self.arguments
    }

    fn is_idle(&self) -> bool {
        self.problem.rows == 0
    }

    fn touches(&self, visit: &mut dyn FnMut(Argument, Range<u64>)) {
        self.problem.touches(&self.arguments.call(), visit);
    }

    unsafe fn compute(&self, at: &Addresses, memory: &DeviceMemory) -> Result<(), Fault> {
        if self.is_idle() {
            return Ok(());
        }
        // SAFETY: the caller's promise.
        let launch = unsafe { Launch::new(self, self.check, at, memory) }?;
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
                // SAFETY: `first` is the start of the view's bytes in `touches`: live (the allocation table let the
                // launch in) and locked for the task that runs this.
                let copy = unsafe { side_by_side(desc, first) };
                let mut copy = copy.map_err(|why| launch.fault(why))?;
                list.push(copy.as_mut_ptr());
                copies.push(copy);
            }
        }
        let buffers = merge::Buffers {
            lse: &lse,
            local_out: &local_out,
            out,
            lse_out,
        };
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

fn new(arguments: &Arguments<Described>) -> Result<UpdateOperator, Violation> {
    let descs = arguments.map(|_, tensor| tensor.desc);
    UpdateOperator::new(descs, context::machine().target)
}

attention_update_arguments! { arguments_of_version {
    1 phase_one { aclnnAttentionUpdateGetWorkspaceSize, Arguments, executor_of(new) }
} }
phase_two!(aclnnAttentionUpdate, Version::V1.symbol());
