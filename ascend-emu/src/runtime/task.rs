//! Work that touches memory: what a stream runs and a graph records.

use crate::collectives;
use crate::config::{Check, config};
use crate::elements::{Elements, NamedTensor, Place, Reader};
use crate::fault;
use crate::memory::DeviceMemory;
use crate::operator::{Access, Addresses, Operator};
use crate::runtime::callback::HostCall;
use crate::runtime::notify::Notify;
use crate::runtime::stream_value::Comparison;
use crate::sanitizer::access_lock::lock_accesses;
use crate::sanitizer::{StreamId, allocation_table};
use crate::status::{DEVICE_INTERNAL, Outcome, failure, panic_text};
use rayon::{ThreadPool, ThreadPoolBuilder};
use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

/// One piece of work; the addresses of an operator's tensors are kept beside it.
#[derive(Clone)]
pub(crate) enum Task {
    Launch {
        op: Arc<dyn Operator>,
        workspace: usize,
        workspace_bytes: u64,
    },
    Copy {
        dst: usize,
        src: usize,
        bytes: u64,
    },
    Fill {
        dst: usize,
        value: u8,
        bytes: u64,
    },
    /// Calls a function of the program on the stream's thread.
    Call(HostCall),
    /// Calls a function of the program on the thread that runs the callbacks of a stream.
    Report {
        stream: StreamId,
        call: HostCall,
        /// Whether the stream waits for it.
        block: bool,
    },
    Raise(Arc<Notify>),
    /// Waits for a notify and clears it.
    AwaitNotify {
        notify: Arc<Notify>,
        limit: Option<Duration>,
    },
    /// Writes eight bytes.
    Write {
        address: usize,
        value: u64,
    },
    /// Waits for eight bytes.
    AwaitValue {
        address: usize,
        value: u64,
        comparison: Comparison,
    },
    /// Meets the other ranks of a communicator.
    Collective(collectives::MemberCall),
}

impl Task {
    pub(crate) fn name(&self) -> &'static str {
        match self {
            Task::Launch { op, .. } => op.name(),
            Task::Copy { .. } => "aclrtMemcpyAsync",
            Task::Fill { .. } => "aclrtMemsetAsync",
            Task::Call(_) => "aclrtLaunchHostFunc",
            Task::Report { .. } => "aclrtLaunchCallback",
            Task::Raise(_) => "aclrtRecordNotify",
            Task::AwaitNotify { .. } => "aclrtWaitAndResetNotify",
            Task::Write { .. } => "aclrtValueWrite",
            Task::AwaitValue { .. } => "aclrtValueWait",
            Task::Collective(call) => call.call.kind.function(),
        }
    }

    /// Visits every byte range that the task touches.
    pub(crate) fn accesses(&self, addresses: &Addresses, visit: &mut dyn FnMut(Access)) {
        let mut access = |address, bytes, write, what| visit(Access { address, bytes, write, what });
        match self {
            Task::Call(_) | Task::Report { .. } | Task::Raise(_) | Task::AwaitNotify { .. } => {}
            // Streams synchronise by the value, so its writes and waits are not a race: both count as reads.
            Task::Write { address, .. } | Task::AwaitValue { address, .. } => {
                access(*address, 8, false, "devAddr");
            }
            Task::Launch { op, workspace, workspace_bytes } => {
                access(*workspace, *workspace_bytes, true, "workspace");
                op.accesses(addresses, visit);
            }
            Task::Copy { dst, src, bytes } => {
                access(*src, *bytes, false, "src");
                access(*dst, *bytes, true, "dst");
            }
            Task::Fill { dst, bytes, .. } => access(*dst, *bytes, true, "devPtr"),
            Task::Collective(call) => call.call.accesses(visit),
        }
    }

    /// Ends a task that will never run, so that nothing waits for it.
    pub(crate) fn cancel(self) {
        match self {
            Task::Raise(notify) => notify.raise(),
            Task::Collective(call) => call.member.give_up(&call.call),
            _ => {}
        }
    }

    /// Hands over what the task reads and that must have been written. A copy may take the unwritten rest of a block
    /// with it. A copy to a device hands on what is unwritten; one to the host is handed over if none of its bytes
    /// was written.
    ///
    /// # Safety
    ///
    /// As for [`Task::run`].
    unsafe fn reads(&self, addresses: &Addresses, memory: &DeviceMemory, reader: &mut dyn Reader) {
        match self {
            // SAFETY: the caller's promise.
            Task::Launch { op, .. } => unsafe { op.reads(addresses, memory, reader) },
            Task::Copy { dst, src, bytes } if !memory.contains(*dst) => {
                let (what, bytes) = ("src", *bytes as usize);
                let tensor = NamedTensor { what, address: *src };
                let elements = Elements::new(tensor, *src, bytes, &[], None, Place::Copied);
                if let Some(elements) = elements
                    && reader.untouched(elements.bounds())
                {
                    reader.read(&elements);
                }
            }
            _ => {}
        }
    }

    /// Reports to the sanitizer what the task has written.
    ///
    /// # Safety
    ///
    /// As for [`Task::run`].
    unsafe fn report_written(&self, addresses: &Addresses, memory: &DeviceMemory) {
        match self {
            // SAFETY: the caller's promise.
            Task::Launch { op, .. } => allocation_table::wrote_elements(&mut |visit| unsafe {
                op.writes(addresses, memory, visit);
            }),
            Task::Copy { dst, src, bytes } => allocation_table::copied(*src, *dst, *bytes as usize),
            Task::Fill { dst, bytes, .. } => {
                allocation_table::wrote(*dst..dst.saturating_add(*bytes as usize));
            }
            _ => {}
        }
    }

    /// Does the task's work on memory; calls and waits are done by the stream. `scratch` is reused from task to task.
    /// In strict mode a read of unwritten bytes fails with a status.
    ///
    /// # Safety
    ///
    /// Every range that [`Task::accesses`] names is valid memory: device memory or pinned host memory that the
    /// allocation table has found live and keeps until the task is over, or host memory that the caller keeps valid.
    pub(crate) unsafe fn run(&self, addresses: &Addresses, judged: (Check, i32), scratch: &mut Vec<Access>) -> Outcome {
        let memory = DeviceMemory::get()?;
        scratch.clear();
        self.accesses(addresses, &mut |access| {
            if access.bytes > 0 {
                scratch.push(access);
            }
        });
        let locked = lock_accesses(scratch);
        let inspected = allocation_table::inspect_reads(
            self.name(),
            judged,
            // SAFETY: the ranges are live (the caller's promise) and locked.
            &mut |reader| unsafe { self.reads(addresses, memory, reader) },
        );
        let work = || match self {
            Task::Call(_)
            | Task::Report { .. }
            | Task::Raise(_)
            | Task::AwaitNotify { .. }
            | Task::Write { .. }
            | Task::AwaitValue { .. }
            | Task::Collective(_) => Ok(()),
            // SAFETY: the ranges are live (the caller's promise) and locked.
            Task::Launch { op, .. } => unsafe { launch(op.as_ref(), addresses, memory) },
            Task::Copy { dst, src, bytes } => {
                // SAFETY: both ranges are valid (the caller's promise) and locked, so no other thread touches them;
                // `copy` lets them overlap. Ranges that exist fit in the address space.
                unsafe {
                    std::ptr::copy(memory.host(*src), memory.host(*dst), *bytes as usize);
                }
                Ok(())
            }
            Task::Fill { dst, value, bytes } => {
                // SAFETY: the range is valid (the caller's promise) and locked, so no other thread touches it.
                unsafe { memory.host(*dst).write_bytes(*value, *bytes as usize) };
                Ok(())
            }
        };
        let outcome = inspected.and_then(|()| work());
        // The missing writes of a failed launch are no finding besides its fault.
        // SAFETY: the ranges are live (the caller's promise) and locked.
        unsafe { self.report_written(addresses, memory) };
        allocation_table::written(scratch.iter().filter(|access| access.write).map(|access| access.address));
        drop(locked);
        outcome
    }
}

impl fmt::Debug for Task {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())?;
        match self {
            Task::Call(_) | Task::Report { .. } => Ok(()),
            Task::Raise(notify) | Task::AwaitNotify { notify, .. } => {
                write!(f, " notify {}", notify.id)
            }
            Task::Write { address, value } => write!(f, " {value} at {address:#x}"),
            Task::AwaitValue { address, value, comparison } => write!(f, " {comparison:?} {value} at {address:#x}"),
            Task::Launch { workspace, workspace_bytes, .. } => {
                write!(f, " workspace {workspace:#x} ({workspace_bytes} bytes)")
            }
            Task::Copy { dst, src, bytes } => {
                write!(f, " from {src:#x} to {dst:#x} ({bytes} bytes)")
            }
            Task::Fill { dst, value, bytes } => write!(f, " {value} at {dst:#x} ({bytes} bytes)"),
            Task::Collective(call) => write!(f, " {:?}", call.call),
        }
    }
}

/// Runs an operator on the kernel threads. A panic in it is a device fault of its stream.
///
/// # Safety
///
/// As for [`Operator::run`].
unsafe fn launch(op: &dyn Operator, addresses: &Addresses, memory: &DeviceMemory) -> Outcome {
    let device = fault::device_of_thread();
    let body = || {
        fault::enter_device(device);
        // SAFETY: the caller's promise.
        let run = || unsafe { op.run(addresses, memory) };
        catch_unwind(AssertUnwindSafe(run)).unwrap_or_else(|payload| {
            Err(failure!(
                DEVICE_INTERNAL,
                "internal error of the emulator in {}: {}",
                op.name(),
                panic_text(payload.as_ref())
            ))
        })
    };
    match kernel_threads() {
        Some(pool) => pool.install(body),
        None => body(),
    }
}

/// The threads that operators compute on, shared by all streams; `None` if the system grants none.
fn kernel_threads() -> Option<&'static ThreadPool> {
    static POOL: OnceLock<Option<ThreadPool>> = OnceLock::new();
    POOL.get_or_init(|| {
        ThreadPoolBuilder::new().num_threads(config().threads).thread_name(|n| format!("ascend-emu-{n}")).build().ok()
    })
    .as_ref()
}
