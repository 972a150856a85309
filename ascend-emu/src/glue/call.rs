//! Both phases of a call.

use super::operand::Role;
use super::parameter::{Arguments, Given};
use super::view::{Views, range};
use crate::abi::phase_one;
use crate::executor;
use crate::fault::Fault;
use crate::memory::DeviceMemory;
use crate::operator::{Access, Addresses, Operator, Slot};
use crate::status::{AICORE_EXCEPTION, Outcome, aclnn};
use ascend_spec::TensorDesc;
use ascend_sys::bindings::{aclOpExecutor, aclrtStream};
use std::ffi::c_void;

/// What a launch does. A text says what the data are that the operator cannot compute with.
pub(super) type Work = Box<dyn Fn(&Views) -> Result<(), String> + Send + Sync>;

/// Work from a closure.
pub(super) fn work(
    body: impl Fn(&Views) -> Result<(), String> + Send + Sync + 'static,
) -> Outcome<Work> {
    Ok(Box::new(body))
}

/// A call that phase one has taken.
struct GlueOperator {
    name: &'static str,
    tensors: Vec<Given>,
    inputs: usize,
    outputs: usize,
    lists: Vec<usize>,
    work: Work,
}

impl Operator for GlueOperator {
    fn name(&self) -> &'static str {
        self.name
    }

    fn inputs(&self) -> usize {
        self.inputs
    }

    fn outputs(&self) -> usize {
        self.outputs
    }

    fn list(&self, input: usize) -> Option<usize> {
        self.lists.iter().position(|&list| list == input)
    }

    fn operand(&self, slot: Slot) -> Option<&TensorDesc> {
        let given = self.tensors.iter().find(|given| given.slot == slot);
        given.map(|given| &given.desc)
    }

    fn accesses(&self, at: &Addresses, visit: &mut dyn FnMut(Access)) {
        for given in &self.tensors {
            let range = range(given, at);
            visit(Access {
                address: range.start,
                bytes: range.len() as u64,
                write: given.role != Role::Read,
                what: given.name,
            });
        }
    }

    fn run(&self, at: &Addresses, memory: &DeviceMemory) -> Result<(), Fault> {
        // SAFETY: the ranges are those of `accesses`: live (the ledger let the launch in), and claimed by the task that
        // runs this.
        let views = unsafe { Views::new(&self.tensors, at, memory) };
        (self.work)(&views).map_err(|why| Fault {
            code: AICORE_EXCEPTION,
            message: format!("{}: {why}", self.name),
        })
    }
}

/// Phase one: `check` reads the arguments and says what there is to do.
///
/// # Safety
///
/// The pointers are null or valid for writing.
pub(super) unsafe fn prepare(
    name: &'static str,
    workspace_size: *mut u64,
    executor: *mut *mut aclOpExecutor,
    check: &mut dyn FnMut(&mut Arguments) -> Outcome<Work>,
) -> i32 {
    let make = || {
        let mut arguments = Arguments::new(name);
        let work = check(&mut arguments)?;
        let Arguments {
            tensors,
            addresses,
            inputs,
            outputs,
            lists,
            ..
        } = arguments;
        let operator = GlueOperator {
            name,
            tensors,
            inputs,
            outputs,
            lists,
            work,
        };
        // None of them needs a workspace.
        Ok((operator, addresses, true))
    };
    // SAFETY: the caller's promise.
    aclnn(|| unsafe { phase_one(workspace_size, executor, make) })
}

/// Phase two.
pub(super) fn launch(
    name: &str,
    workspace: *mut c_void,
    bytes: u64,
    executor: *mut aclOpExecutor,
    stream: aclrtStream,
) -> i32 {
    aclnn(|| executor::launch(name, workspace.addr(), bytes, executor.cast(), stream))
}
