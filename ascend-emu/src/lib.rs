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
//! `ASCEND_EMU_DEVICES`, ...) and how it is watched (`ASCEND_EMU_CHECK`, `ASCEND_EMU_TRACE`, ...). They are read
//! once, at the first call. A value that is not allowed makes `aclInit` fail with a message that names it; a misspelt
//! name is reported on stderr.
//!
//! `ASCEND_RECORD=DIR` is for the shared library alone: `ascend-emu-c` writes calls of FusedInferAttentionScore as case
//! files, by [`observe`].
//!
//! # Compat and strict
//!
//! The emulator knows which bytes each queued piece of work reads and writes, and which work happens before which.
//! From that it reports misuse, as [`findings`]:
//!
//! | [`FindingKind`] | `compat` | `strict` |
//! |---|---|---|
//! | [`OutOfBounds`], at most one page past an allocation's last | goes on: hardware rounds allocations up | error |
//! | [`OutOfBounds`] beyond that, [`UseAfterFree`] | device fault; a copy by the host fails | error of the call |
//! | [`FreeInUse`] | the memory is freed once that work is over | error, nothing is freed |
//! | [`HostRace`], [`StreamRace`] | goes on, in some order | error |
//! | [`PageableCopy`] | waits for the stream, then copies, as hardware does | the same |
//! | [`UnwrittenRead`] | goes on: the bytes are zeros, or with `ASCEND_EMU_POISON=1` NaN | device fault |
//! | [`UnwrittenCopy`] | goes on | the same |
//! | [`RepeatedBlock`], [`SkippedEntry`], [`NonFiniteBias`], [`HiddenRow`] | goes on | device fault |
//! | [`MaskByte`], [`MaskTemplate`], [`SoftmaxOrder`] | goes on | device fault |
//! | [`BlockTable`] | goes on: the keys of that block count as zeros | device fault |
//! | [`SlotOutOfRange`] | goes on: the token is skipped | device fault, nothing is written |
//! | [`DuplicateSlot`] | goes on: the last token stays | device fault, nothing is written |
//! | [`EmptyRow`] | goes on: the row, or the next merge of it, becomes NaN | device fault, nothing is written |
//! | [`UnrecordedEvent`] | nothing is waited for | error |
//! | [`StalledReplay`], where the host waits without a time limit | goes on waiting | a timeout after a second |
//! | [`HostCrash`] | goes on as on aarch64, where a division by zero ends no process | error of the call |
//! | [`Leak`] | the memory is released | the memory is released |
//!
//! A device fault, status 507015, shows at the next synchronisation.
//!
//! With `ASCEND_EMU_CHECK=strict` a finding that spoils results ends its device: every later wait and copy fails with
//! 507015 and the finding's text, until `aclrtResetDevice` has ended the device's last use, or
//! `aclrtResetDeviceForce` or `aclrtDeviceTaskAbort` is called. All findings spoil results except those of copies,
//! events, stalled replays and leaks. [`check_scope`] ends no device.
//!
//! `ASCEND_EMU_CHECK=strict,-pageable_copy,-leak` leaves kinds of findings out, by [`FindingKind::name`]: they go on
//! as in `compat`, without a warning, and are counted in the line at the end of the process.
//!
//! In `compat` stderr names each kind of finding at each place once for each tensor, up to 16 tensors; a line at the
//! end of the process has the number of findings of each kind. A race is found from what was queued and waited for,
//! not from timing: the same program shows the same findings every time. [`check_scope`] chooses the mode for one
//! thread, [`inject`] makes one of its calls fail, [`live()`] counts handles and memory not given back.
//!
//! [`BlockTable`]: FindingKind::BlockTable
//! [`DuplicateSlot`]: FindingKind::DuplicateSlot
//! [`EmptyRow`]: FindingKind::EmptyRow
//! [`FreeInUse`]: FindingKind::FreeInUse
//! [`HiddenRow`]: FindingKind::HiddenRow
//! [`HostCrash`]: FindingKind::HostCrash
//! [`HostRace`]: FindingKind::HostRace
//! [`Leak`]: FindingKind::Leak
//! [`MaskByte`]: FindingKind::MaskByte
//! [`MaskTemplate`]: FindingKind::MaskTemplate
//! [`NonFiniteBias`]: FindingKind::NonFiniteBias
//! [`OutOfBounds`]: FindingKind::OutOfBounds
//! [`PageableCopy`]: FindingKind::PageableCopy
//! [`RepeatedBlock`]: FindingKind::RepeatedBlock
//! [`SkippedEntry`]: FindingKind::SkippedEntry
//! [`SlotOutOfRange`]: FindingKind::SlotOutOfRange
//! [`SoftmaxOrder`]: FindingKind::SoftmaxOrder
//! [`StalledReplay`]: FindingKind::StalledReplay
//! [`StreamRace`]: FindingKind::StreamRace
//! [`UnrecordedEvent`]: FindingKind::UnrecordedEvent
//! [`UnwrittenCopy`]: FindingKind::UnwrittenCopy
//! [`UnwrittenRead`]: FindingKind::UnwrittenRead
//! [`UseAfterFree`]: FindingKind::UseAfterFree
//!
//! # Unwritten memory
//!
//! The emulator records which bytes of each device allocation were written since it was handed out. A read of other
//! bytes of a paged cache is an [`UnwrittenRead`], which names the block and its tokens.
//!
//! - Attention reads the keys below each sequence's length that its geometry (causality, window) lets some row see,
//!   by way of the block table. Keys that a mask tensor hides are among them: hardware loads them, and a value that
//!   is NaN stays NaN when it is weighed with 0. The rest of a block, blocks that no row of the table names, and
//!   scales of rows that are not read may be anything. A row of the table that names only block 0 is padding, if it
//!   names it twice or the table has other rows, and none of its tokens was written.
//! - GatherPaKvCache reads the rows that lengths and table name.
//! - Other tensors may hold rows that are padding. They are not checked row by row: an input of attention is reported
//!   if none of its bytes was written and every sequence sees a key. Where memory is poisoned, what is computed from
//!   their bytes is NaN.
//! - A copy within a device copies the marks of its source, written or not, and is no finding; a copy to the host is
//!   an [`UnwrittenCopy`] if none of its bytes was written. Host memory, pinned or
//!   registered, counts as written, since the program writes it by itself.
//! - All of an output counts as written, also rows that an operator leaves alone; if an operator looks up the places
//!   that it writes to, only these places count. The workspace counts as written, and so do the outputs of work that
//!   failed.
//! - An allocator of the program's, such as PyTorch's, hands out parts of an allocation again: bytes that an earlier
//!   tensor wrote count as written.
//!
//! # Every call, decoded
//!
//! `ASCEND_EMU_TRACE=FILE` appends an object to the file for each call of a C function that comes by [`functions`] or
//! the shared library, once the call has returned. A file may be shared by threads and processes: lines do not mix.
//!
//! | name | what |
//! |---|---|
//! | `sequence` | the number of the call in its process, in the order in which calls began |
//! | `process`, `thread` | the operating system's numbers |
//! | `time` | when the call began, in seconds since 1970 |
//! | `function` | the C name |
//! | `arguments` | the values of the arguments, by the names of the headers |
//! | `out` | the values that a successful call has written through its pointers |
//! | `status`, `name` | what was returned, and CANN's name for it |
//! | `returned` | the result of a function that returns no status |
//! | `message` | for a failed call, the text that `aclGetRecentErrMsg` will return |
//! | `microseconds` | how long the call took |
//!
//! Numbers, texts and arrays of numbers are written as such, enumerators by CANN's names, handles and addresses as
//! `"0x.."`, null as null. An `aclTensor` is an object of its `handle`, `dtype`, `shape`, `format` and `address`, with
//! `strides`, `offset` and `storage` (the shape of its memory) if the shape does not imply them; a list is an array of
//! its members. The first 1024 numbers of an array are written, the first 64 members of a list and the first 4096 bytes
//! of a text; a text at the end of the array has the number of those left out. The variable takes effect when
//! [`functions`] is called: without it a call costs nothing more, and through the shared library one load of a byte.
//!
//! # Collectives
//!
//! `HcclCommInitRootInfo`, `HcclCommInitAll`, `HcclCreateSubCommConfig` and the operators of HCCL connect ranks that
//! are threads of one process or of several on one machine, on a device each. A call is queued on its stream, and the
//! host does not wait for the other ranks. A rank of another process asks the root's process first whether the
//! communicator has failed, for 10 s at most, and counts it as failed without an answer. Ranks that call other
//! operators, or with other arguments, all get a fault, status 507048, that names ranks and values; hardware would
//! wait. So do ranks that wait for one whose communicator, stream, device or process is gone, after a second those that
//! wait for each other, and after `ASCEND_EMU_COLLECTIVE_TIMEOUT` all others. The communicator then takes no more calls
//! (`HCCL_E_INTERNAL`).
//!
//! `HcclGetRootInfo` opens a Unix socket in the folder `ascend-emu-USER` of the system's temporary folder (`TMPDIR`),
//! which no other user reaches into; the root information has its path and random bytes, which every connection has to
//! send. The communicator lives in this process, which has to live until every rank has destroyed its part: a rank of
//! another process sends it what it calls and what it sends. The socket is removed with the communicator, and when the
//! process exits; one of a process that was killed by those who miss it, or a minute later by the next that opens a
//! socket. Processes count devices alike: rank 1 of a second process is on device 1 there, since device 0 has rank 0.
//!
//! - Sums are made in the order of the ranks and rounded to the element type at each step; on hardware the order
//!   depends on the algorithm.
//! - The first call of a kind does not hold up the host, and captured calls may meet calls that are not captured.
//! - The sanitizer knows what a rank's call touches of this rank's memory. It does not take a collective for an order
//!   between the ranks' streams.
//! - `HcclCreateSubCommConfig` waits for no other rank. Its number is free again when all ranks have destroyed the
//!   part.
//! - Communicators of rank tables and over machines are not emulated. Every process of one is of one user.
//!
//! # Differences from hardware
//!
//! - [`emulated_only`] has what no operator of an NPU computes; programs in C do not reach it.
//! - A wrong handle, a second destruction or a consumed executor is an error with a message; hardware crashes.
//! - A device fault leaves the device usable; only a stream in the mode `ACL_STOP_ON_FAILURE` takes no further work
//!   until it is aborted.
//! - Limits of cores, and of the time that an operator runs, are stored and reported, and not enforced; that of
//!   `aclrtSetOpWaitTimeout` is enforced. For a chip other than that of `ASCEND_EMU_SOC`, [`functions_of`] reports
//!   the cores of the product's most common chip.
//! - Numbers out of range become infinities: `aclrtSetDeviceSatMode` refuses the other mode.
//! - Devices reach each other's memory, and registered host memory, without being enabled to; queries return what the
//!   program has set. Registered host memory has the host's own address on the device.
//! - `aclrtUnmapMem` defers the unmapping of memory that queued work uses; until that work is over nothing can be
//!   mapped there. Physical memory is a device's, in units of 2 MiB.
//! - `aclrtLaunchHostFunc` calls on the stream's own thread. `aclrtValueWait` sees values that copies and fills write
//!   within a millisecond. If a stream waits for a notify or a value whose record or write is not queued, the
//!   sanitizer does not know what that wait comes after: it finds no race with that stream until the host has waited
//!   for it.
//! - Handles for other processes (`aclrtMemExportToShareableHandle`, IPC) are not emulated.
//! - `aclFinalize` releases nothing, and `aclInit` cannot be called again after it.
//! - `aclrtSynchronizeDevice` waits for the streams of the calling thread's context.
//! - A process that was forked after `aclInit` gets an error from every call, whose text says so.
//! - Workspaces are checked and not written.
//! - `GetMaxWorkspaceSize` does not read the values of length arrays, and its executor cannot be launched if the call
//!   has such arrays.
//! - `aclnnScatterPaKvCache` skips tokens with a negative slot; CANN's documents do not say what hardware does.
//! - The pages of the single operators in the book list further differences.
//! - A captured graph is replayed in one stream, in the order of recording.

#![warn(missing_docs)]

pub mod abi;
pub mod atb;
mod c_pointer;
mod collectives;
mod config;
mod descriptor;
mod elements;
pub mod emulated_only;
mod executor;
mod fault;
mod fault_plan;
mod finding_kind;
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
mod named_enum;
mod observe;
mod operator;
mod ops;
mod runtime;
mod sanitizer;
mod status;
mod trace;

pub use abi::{not_emulated, refused};
pub use config::{Check, CheckScope, check, check_scope};
pub use fault_plan::Site;
pub use finding_kind::{FindingKind, FindingKinds};
pub use injection::{Injection, inject};
pub use lints::report_lints;
pub use live::{Live, live};
pub use machine::{Machine, MachineError};
pub use observe::{ObservedCall, Observer, observe};
pub use sanitizer::{Allocation, Finding, MemoryLocation, allocation_at, findings};

/// The functions of the C ABI, which write each call to the file that `ASCEND_EMU_TRACE` names.
///
/// They call those of [`abi`], with the same contract. [`functions`] and the shared library provide these functions; a
/// program that calls `abi` itself is not traced.
pub mod traced {
    macro_rules! define {
        ($( [$library:ident] fn $name:ident ( $( $argument:ident : $type:ty ),* ) -> $result:ty ; )*) => {
            crate::trace::traced! { $( pub fn $name($( $argument: $type ),*) -> $result = crate::abi::$name; )* }
        };
    }

    ascend_sys::for_each_function! { define }
}

macro_rules! fill {
    ($( [$library:ident] fn $name:ident ( $( $argument:ident : $type:ty ),* ) -> $result:ty ; )*) => {
        /// The functions that a machine's release has, with what tells machines apart as the environment's machine
        /// has it.
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

/// Every function of the C ABI that the emulated release has, as this crate implements it. The environment chooses
/// the release and the product.
pub fn functions() -> ascend_sys::Functions {
    exported(&config::config().machine)
}

/// The functions of a machine that the caller chooses, whatever the environment says. A process may use several
/// machines side by side: each table makes its own use of the devices by `aclrtSetDevice`, and a call is made on the
/// machine of the calling thread's context.
///
/// Machines whose chips have other names and that are alike otherwise are one machine under several names: their
/// devices are the same.
///
/// # Errors
/// [`MachineError::TooMany`] if the process has asked for 32 machines of different products, releases or newest
/// operators, that of the environment among them, or for 128 names of chips.
pub fn functions_of(machine: &Machine) -> Result<ascend_sys::Functions, MachineError> {
    let index = machines::index_of(machine)?;
    let mut table = exported(machine);
    abi::fill_in(&mut table, index);
    Ok(table)
}
