//! Executors: what phase one prepares and phase two runs.

use crate::descriptor::TENSORS;
use crate::fault_plan::Site;
use crate::handle::{Kind, Table};
use crate::injection::strike;
use crate::lock::Lock;
use crate::operator::{Addresses, Operator, TensorPosition};
use crate::runtime::context;
use crate::runtime::task::Task;
use crate::sanitizer::allocation_table::{MemoryLocation, bytes_from};
use crate::status::{ACLNN_INNER_NULLPTR, ACLNN_INVALID, ACLNN_NULLPTR, ACLNN_RUNTIME, Failure, Outcome, failure};
use std::ffi::c_void;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

pub(crate) static EXECUTORS: Table<Executor> = Table::new(Kind::Executor);

/// A prepared call.
pub(crate) struct Executor {
    op: Arc<dyn Operator>,
    addresses: Lock<Addresses>,
    workspace_bytes: u64,
    repeatable: AtomicBool,
    /// Whether phase two has used the executor, which is not repeatable.
    consumed: AtomicBool,
}

/// Device faults, which show at the next synchronisation.
const DEVICE_FAULTS: std::ops::RangeInclusive<i32> = 507_000..=507_899;

impl Executor {
    pub(crate) fn new(op: Arc<dyn Operator>, addresses: Addresses, workspace_bytes: u64) -> Self {
        Executor {
            op,
            addresses: Lock::new(addresses),
            workspace_bytes,
            repeatable: AtomicBool::new(false),
            consumed: AtomicBool::new(false),
        }
    }

    /// Bytes of workspace that a launch needs.
    pub(crate) fn workspace_bytes(&self) -> u64 {
        self.workspace_bytes
    }

    /// `aclSetAclOpExecutorRepeatable`.
    pub(crate) fn make_repeatable(&self) {
        self.repeatable.store(true, Ordering::Release);
    }

    /// Refuses a workspace that the operator would overrun.
    fn check_workspace(&self, name: &str, workspace: usize, bytes: u64) -> Outcome {
        let needed = self.workspace_bytes;
        if needed == 0 {
            return Ok(());
        }
        if bytes < needed {
            return Err(failure!(
                ACLNN_INVALID,
                "{name}: workspaceSize: given {bytes} bytes, allowed: at least the {needed} that phase one asked for"
            ));
        }
        if workspace == 0 {
            return Err(failure!(ACLNN_NULLPTR, "{name}: workspace is null, but phase one asked for {needed} bytes"));
        }
        let Some((MemoryLocation::Device(_), left)) = bytes_from(workspace) else {
            return Err(failure!(
                ACLNN_INVALID,
                "{name}: workspace at {workspace:#x} is not device memory from aclrtMalloc"
            ));
        };
        if left < needed {
            return Err(failure!(
                ACLNN_INVALID,
                "{name}: workspace at {workspace:#x} has {left} bytes left in its allocation, allowed: at least \
                 {needed}"
            ));
        }
        Ok(())
    }

    /// Queues the call with the addresses it has now.
    pub(crate) fn queue(&self, name: &str, workspace: usize, bytes: u64, stream: *const c_void) -> Outcome {
        if let Some(why) = self.op.unlaunchable() {
            return Err(failure!(ACLNN_INNER_NULLPTR, "{name}: {why}"));
        }
        self.check_workspace(name, workspace, bytes)?;
        let stream = context::stream(name, stream).map_err(Failure::of_runtime)?;
        if let Err(failure) = strike(Site::Launch) {
            if !DEVICE_FAULTS.contains(&failure.code) {
                return Err(failure);
            }
            return (stream.submit_fault(self.op.name(), failure)).map_err(Failure::of_runtime);
        }
        let task = Task::Launch { op: Arc::clone(&self.op), workspace, workspace_bytes: self.workspace_bytes };
        let addresses = self.addresses.lock();
        stream.submit(task, Some(&addresses), ACLNN_RUNTIME)?;
        drop(addresses);
        self.op.store_shape(&|| {
            // A recorded launch has not run.
            if stream.records() {
                return Ok(());
            }
            stream.wait(self.op.name()).map_err(Failure::of_runtime)
        })
    }

    fn change(
        &self,
        name: &str,
        position: TensorPosition,
        tensor: *const c_void,
        address: usize,
        slot: impl FnOnce(&mut Addresses) -> Option<&mut usize>,
    ) -> Outcome {
        let desc = self.op.tensor(position).ok_or_else(|| {
            failure!(ACLNN_INVALID, "{name}: {} was prepared without a tensor at {position:?}", self.op.name())
        })?;
        if tensor.is_null() {
            return Err(failure!(ACLNN_NULLPTR, "{name}: tensor is null"));
        }
        if is_in_list(position) {
            // A list has no description of its own; its tensors were checked when the call was prepared.
            crate::descriptor::TENSOR_LISTS.get(tensor)?;
        } else {
            let described = TENSORS.get(tensor)?.get().desc;
            if described != *desc {
                return Err(failure!(
                    ACLNN_INVALID,
                    "{name}: given {described}, allowed: {desc}, as prepared: only addresses may change"
                ));
            }
        }
        let mut addresses = self.addresses.lock();
        match slot(&mut addresses) {
            Some(kept) => {
                *kept = address;
                Ok(())
            }
            None => Err(failure!(ACLNN_INVALID, "{name}: there is no {position:?}")),
        }
    }

    /// `aclSetInputTensorAddr`.
    pub(crate) fn set_input(&self, name: &str, index: usize, tensor: *const c_void, address: usize) -> Outcome {
        self.change(name, TensorPosition::Input(index), tensor, address, |at| {
            at.inputs.get_mut(self.op.input_index(index)?)
        })
    }

    /// `aclSetOutputTensorAddr`.
    pub(crate) fn set_output(&self, name: &str, index: usize, tensor: *const c_void, address: usize) -> Outcome {
        self.change(name, TensorPosition::Output(index), tensor, address, |at| {
            at.outputs.get_mut(self.op.output_index(index)?)
        })
    }

    /// `aclSetTensorAddr`: inputs first, then outputs.
    pub(crate) fn set_any(&self, name: &str, index: usize, tensor: *const c_void, address: usize) -> Outcome {
        match index.checked_sub(self.op.inputs()) {
            None => self.set_input(name, index, tensor, address),
            Some(output) => self.set_output(name, output, tensor, address),
        }
    }

    /// `aclSetDynamicInputTensorAddr`.
    pub(crate) fn set_element(
        &self,
        name: &str,
        input: usize,
        element: usize,
        tensors: *const c_void,
        address: usize,
    ) -> Outcome {
        let list = self
            .op
            .list(input)
            .ok_or_else(|| failure!(ACLNN_INVALID, "{name}: input {input} of {} is no list", self.op.name()))?;
        let position = TensorPosition::Element { input, element };
        self.change(name, position, tensors, address, |at| at.lists.get_mut(list)?.get_mut(element))
    }

    /// The failure of a call that sets an element of an output list; no operator has output lists.
    pub(crate) fn refuse_output_list(&self, name: &str, index: usize) -> Failure {
        failure!(ACLNN_INVALID, "{name}: output {index} of {} is no list", self.op.name())
    }

    /// Whether an index counted over inputs and outputs is an output.
    pub(crate) fn is_output(&self, index: usize) -> bool {
        (self.op.inputs()..self.op.inputs().saturating_add(self.op.outputs())).contains(&index)
    }
}

fn is_in_list(position: TensorPosition) -> bool {
    matches!(position, TensorPosition::Element { .. })
}

/// The failure of the latest phase one, of any thread, that gave no executor.
static REFUSED: Lock<Option<Failure>> = Lock::new(None);

/// Remembers why a phase one gave no executor.
pub(crate) fn refused(why: &Failure) {
    *REFUSED.lock() = Some(why.clone());
}

/// The failure of a phase two without an executor. It includes the failure of the latest phase one, of any thread,
/// for callers that did not check the status of phase one.
#[cold]
fn without_executor(name: &str, null: Failure) -> Failure {
    match &*REFUSED.lock() {
        Some(why) => failure!(
            null.code,
            "{name}: {}; the latest phase one that gave none ended with {}: {}",
            null.message,
            why.code,
            why.message
        ),
        None => null,
    }
}

/// Queues a prepared call (phase two). This ends an executor that is not repeatable, unless the call is refused.
pub(crate) fn launch(
    name: &str,
    workspace: usize,
    workspace_bytes: u64,
    executor: *const c_void,
    stream: *const c_void,
) -> Outcome {
    let found = match EXECUTORS.get(executor) {
        Err(null) if executor.is_null() => return Err(without_executor(name, null)),
        found => found?,
    };
    if found.repeatable.load(Ordering::Acquire) {
        return found.queue(name, workspace, workspace_bytes, stream);
    }
    if found.consumed.swap(true, Ordering::AcqRel) {
        return Err(failure!(
            ACLNN_INVALID,
            "{name}: the executor was already used by phase two; it was not made repeatable"
        ));
    }
    match found.queue(name, workspace, workspace_bytes, stream) {
        Ok(()) => EXECUTORS.remove(executor).map(drop),
        Err(failure) => {
            found.consumed.store(false, Ordering::Release);
            Err(failure)
        }
    }
}
