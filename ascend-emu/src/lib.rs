//! The C ABI of Huawei Ascend CANN on a CPU: runtime, streams, memory, fused attention for inference and training, and
//! the operators that fill and read its paged cache and merge its results.
//!
//! Not a mock: the same functions, the same two-phase calls, the same status codes, asynchronous streams on threads of
//! their own, and device memory that the host cannot touch. A program written for CANN runs against it, and learns what
//! it does wrong where hardware only computes wrong numbers.
//!
//! There are two ways in:
//!
//! - In process: [`functions`] fills an [`ascend_sys::Functions`] table, for [`ascend_sys::Api::from_functions`].
//! - As a shared library: the crate `ascend-emu-c` exports the C names, for programs in C and C++ and for loaders. They
//!   exist only there, so that a process can hold the emulator and CANN's own libraries side by side.
//!
//! ```
//! use ascend_sys::Api;
//!
//! let api = Api::from_functions(ascend_emu::functions(), "emulation");
//! let mut count = 0;
//! // SAFETY: `count` is valid for writing.
//! assert_eq!(unsafe { (api.aclrtGetDeviceCount()?)(&mut count) }, 0);
//! assert!(count >= 1);
//! # Ok::<(), ascend_sys::MissingSymbol>(())
//! ```
//!
//! # Environment
//!
//! [`ascend_sys::VARIABLES`] lists the variables that choose the machine (`ASCEND_EMU_SOC`, `ASCEND_EMU_CANN`,
//! `ASCEND_EMU_DEVICES`, ...) and how it is watched (`ASCEND_EMU_CHECK`, `ASCEND_EMU_TRACE`, ...). They are read once, at
//! the first call. A value that is not allowed makes `aclInit` fail with a message that names it; a misspelt name is told
//! on stderr.
//!
//! `ASCEND_RECORD=DIR` is for the shared library alone: `ascend-emu-c` writes calls of FusedInferAttentionScore as case
//! files, by [`observe`].
//!
//! # Compat and strict
//!
//! The emulator knows which bytes each queued piece of work reads and writes, and what comes after what. From that it
//! names misuse, as [`findings`]:
//!
//! | [`FindingKind`] | `compat` | `strict` |
//! |---|---|---|
//! | [`OutOfBounds`](FindingKind::OutOfBounds), at most one page past an allocation's last | goes on: hardware rounds allocations up | error |
//! | [`OutOfBounds`](FindingKind::OutOfBounds) beyond that, [`UseAfterFree`](FindingKind::UseAfterFree) | device fault 507015 at the next synchronisation; a copy by the host fails at once | error of the call |
//! | [`FreeInUse`](FindingKind::FreeInUse) | the memory is freed once that work is over | error, nothing is freed |
//! | [`HostRace`](FindingKind::HostRace), [`StreamRace`](FindingKind::StreamRace) | goes on, in some order | error |
//! | [`PageableCopy`](FindingKind::PageableCopy) | waits for the stream, then copies, as hardware does | the same |
//! | [`UnwrittenRead`](FindingKind::UnwrittenRead) | goes on: the bytes are zeros, or with `ASCEND_EMU_POISON=1` NaN | device fault |
//! | [`UnwrittenCopy`](FindingKind::UnwrittenCopy) | goes on | the same |
//! | [`RepeatedBlock`](FindingKind::RepeatedBlock), [`HiddenRow`](FindingKind::HiddenRow), [`SoftmaxOrder`](FindingKind::SoftmaxOrder) | goes on | device fault |
//! | [`InfiniteBias`](FindingKind::InfiniteBias) | goes on | the same |
//! | [`BlockTable`](FindingKind::BlockTable) | goes on: the keys of that block count as zeros | device fault 507015 at the next synchronisation |
//! | [`SlotOutOfRange`](FindingKind::SlotOutOfRange) | goes on: the token is skipped | device fault, nothing is written |
//! | [`DuplicateSlot`](FindingKind::DuplicateSlot) | goes on: the last token stays | device fault, nothing is written |
//! | [`EmptyRow`](FindingKind::EmptyRow) | goes on: the row, or the next merge of it, becomes NaN | device fault, nothing is written |
//! | [`UnrecordedEvent`](FindingKind::UnrecordedEvent) | nothing is waited for | error |
//! | [`StalledReplay`](FindingKind::StalledReplay), where the host waits without a time limit | goes on waiting | error after a second, with the code of a timeout |
//! | [`HostCrash`](FindingKind::HostCrash) | goes on as on aarch64, where a division by zero does not end the process: the call is taken, or refused with its status | error of the call |
//! | [`Leak`](FindingKind::Leak) | the memory is released | the memory is released |
//!
//! With `ASCEND_EMU_CHECK=strict` a finding that spoils results, which are all but those of copies, infinities, events, stalled
//! replays and leaks, ends its device: every later wait and copy fails with 507015 and the finding's text, until `aclrtResetDevice`
//! has ended the device's last use, or `aclrtResetDeviceForce` or `aclrtDeviceTaskAbort` is called. [`check_scope`] ends no
//! device.
//!
//! In `compat` each kind at each place is named on stderr once for each tensor, up to 16 tensors; the end of the process
//! says how many findings of each kind there were. A race is found from what was queued and waited for, not from
//! timing: the same program shows the same findings every time. [`check_scope`] chooses the mode for one thread,
//! [`inject`] makes one of its calls fail, [`live()`] counts handles and memory not given back.
//!
//! # Memory that nothing has written
//!
//! Each allocation of a device knows which of its bytes were written since it was handed out. A read of others in a paged cache
//! is an [`UnwrittenRead`](FindingKind::UnwrittenRead), which names the block and its tokens.
//!
//! - Attention reads the keys below each sequence's length that its geometry (causality, window) lets some row see, by
//!   way of the block table. Keys that a mask tensor hides are among them: hardware loads them, and a value that is NaN
//!   stays NaN when it is weighed with 0. The rest of a block, blocks that no row of the table names, and scales of rows
//!   that are not read may be anything. A row of the table that names block 0 alone is padding, if it does so twice or
//!   there are other rows, and none of its tokens was written.
//! - GatherPaKvCache reads the rows that lengths and table name.
//! - Other tensors may hold rows that are padding, and are not followed. Where memory is poisoned, what is computed from
//!   their bytes is NaN.
//! - A copy within a device hands on what its source is, and is no finding; a copy to the host of bytes of which none is
//!   written is an [`UnwrittenCopy`](FindingKind::UnwrittenCopy). Host memory, pinned or registered, counts as written, since the program writes it by itself.
//! - All of an output counts as written, also rows that an operator leaves alone; of operators that write to places that
//!   they look up, these places. So does the workspace, and what work should have written that failed.
//! - An allocator of the program's, such as PyTorch's, hands out parts of an allocation again: bytes that an earlier
//!   tensor wrote count as written.
//!
//! # Every call, decoded
//!
//! `ASCEND_EMU_TRACE=FILE` appends an object to the file for each call of a C function that comes by [`functions`] or the
//! shared library, once the call has returned. A file may be shared by threads and processes: lines do not mix.
//!
//! | name | what |
//! |---|---|
//! | `sequence` | the number of the call in its process, in the order in which calls began |
//! | `process`, `thread` | the operating system's numbers |
//! | `time` | when the call began, in seconds since 1970 |
//! | `function` | the C name |
//! | `arguments` | by the names of the headers: numbers; texts; enumerators by CANN's names; handles and addresses as `"0x.."`, null as null; of an `aclTensor` its `handle`, `dtype`, `shape`, `format` and `address`, and `strides`, `offset` and `storage` (the shape of its memory) if they say more; the same of each member of a list; the numbers of an array |
//! | `out` | what a call that succeeded has written through its pointers |
//! | `status`, `name` | what was returned, and CANN's name for it |
//! | `returned` | the same of functions that return no status |
//! | `message` | of a call that failed: what `aclGetRecentErrMsg` will tell |
//! | `microseconds` | how long the call took |
//!
//! Of arrays the first 1024 numbers are written, of lists the first 64 members, of texts 4096 bytes; a text at the end of
//! the array says how many are left out. [`functions`] decides when it is called: without the variable a call costs
//! nothing more, and through the shared library one load of a byte.
//!
//! # Differences from hardware
//!
//! - A wrong handle, a second destruction or a consumed executor is an error with a message; hardware crashes.
//! - A device fault leaves the device usable; only a stream in the mode `ACL_STOP_ON_FAILURE` takes no further work until
//!   it is aborted.
//! - Limits of cores, and of the time that an operator runs, are stored and reported, and not enforced; that of
//!   `aclrtSetOpWaitTimeout` is enforced. Of chips beside that of `ASCEND_EMU_SOC`,
//!   [`functions_of`] tells the cores of the product's most common one.
//! - Numbers out of range become infinities: `aclrtSetDeviceSatMode` refuses the other mode.
//! - Devices reach each other's memory, and registered host memory, without having been told so; what is asked about it is
//!   answered as the program has set it. Registered host memory has the host's own address on the device.
//! - `aclrtUnmapMem` puts off what queued work uses; until that is over nothing can be mapped there. Physical memory is a
//!   device's, in units of 2 MiB.
//! - `aclrtLaunchHostFunc` calls on the stream's own thread. `aclrtValueWait` sees values that copies and fills write within
//!   a millisecond. What a wait for a notify or a value that nobody has queued comes after is not known to the sanitizer: it
//!   finds no race with that stream until the host has waited for it.
//! - Handles for other processes (`aclrtMemExportToShareableHandle`, IPC) are not emulated.
//! - `aclFinalize` releases nothing, and `aclInit` cannot be called again after it.
//! - `aclrtSynchronizeDevice` waits for the streams of the calling thread's context.
//! - A process that was forked after `aclInit` gets an error from every call, whose text says so.
//! - Workspaces are checked and not written.
//! - `GetMaxWorkspaceSize` does not look at what length arrays hold, and its executor cannot be launched if there are any.
//! - `aclnnScatterPaKvCache` skips tokens with a negative slot; CANN's documents do not say what hardware does.
//! - What else single operators do otherwise stands on their pages of the book.
//! - A captured graph is replayed in one stream, in the order of recording.

#![warn(missing_docs)]

pub mod abi;
mod c_pointer;
mod chip;
mod config;
mod descriptor;
mod elements;
mod executor;
mod failed_device;
mod fault;
mod fault_plan;
mod fork;
#[cfg(feature = "glue")]
pub mod glue;
mod handle;
mod host_memory;
mod injection;
pub mod kernel;
mod lints;
mod live;
mod lock;
mod machine;
mod machines;
mod memory;
mod not_emulated;
mod observe;
mod operator;
mod ops;
mod runtime;
mod sanitizer;
mod status;
mod trace;
pub mod traced;

pub use config::{Check, CheckScope, check, check_scope};
pub use fault_plan::Site;
pub use injection::{Injection, inject};
pub use lints::report_lints;
pub use live::{Live, live};
pub use machine::{Machine, MachineError};
pub use not_emulated::{not_emulated, refused};
pub use observe::{ObservedCall, Observer, observe};
pub use sanitizer::{Allocation, Finding, FindingKind, MemoryLocation, allocation_at, findings};

macro_rules! fill {
    ($( [$library:ident] fn $name:ident ( $( $argument:ident : $type:ty ),* ) -> $result:ty ; )*) => {
        /// The functions that a machine's release has, with what tells machines apart as the environment's machine has it.
        fn exported(machine: &Machine) -> ascend_sys::Functions {
            let traces = trace::trace().is_some();
            ascend_sys::Functions {
                $( $name: match machine.behaviour().exports(stringify!($name)) {
                    true if traces => Some(traced::$name),
                    true => Some(abi::$name),
                    false => None,
                }, )*
            }
        }
    };
}

ascend_sys::for_each_function! { fill }

/// Every function of the C ABI that the emulated release has, as this crate implements it. The environment says which
/// release and which product that is.
pub fn functions() -> ascend_sys::Functions {
    exported(&config::config().machine)
}

/// The functions of a machine of the caller's choice, whatever the environment says. A process may use several machines
/// side by side: each table makes its own use of the devices by `aclrtSetDevice`, and a call is made on the machine of the
/// calling thread's context.
///
/// Machines whose chips have other names and that are alike otherwise are one machine under several names: their devices
/// are the same.
///
/// # Errors
/// [`MachineError::TooMany`] if the process has asked for 32 machines of different products, releases or newest operators,
/// that of the environment among them, or for 128 names of chips.
pub fn functions_of(machine: &Machine) -> Result<ascend_sys::Functions, MachineError> {
    let index = machines::index_of(machine)?;
    let mut table = exported(machine);
    abi::fill_in(&mut table, index);
    Ok(table)
}
