//! Communicators and collectives through their C functions: results against a plain model, and what ranks that do not
//! agree, do not come or wait for each other are told.

#![allow(
    clippy::undocumented_unsafe_blocks,
    reason = "each call keeps the contract of ascend_emu::abi: pointers are null or to live objects"
)]
#![allow(clippy::unwrap_used, clippy::panic, reason = "tests")]

mod communicators;
mod differences;
mod killed;
mod messages;
mod model;
mod processes;
mod refusals;
mod results;
mod split;
mod streams;
mod team;

use ascend_emu::abi::*;
use ascend_sys::bindings::{self as sys, HcclComm, HcclResult, HcclRootInfo, aclrtStream};
use ascend_testing::workbench as bench;
use bench::*;
use std::ffi::c_void;
use std::ptr::null_mut;
use std::sync::{Mutex, MutexGuard, Once, PoisonError};

/// Most ranks that a test has.
const RANKS: u32 = 8;

/// Keeps other tests of this process away, and shows at its end that nothing is left.
struct Alone {
    _guard: MutexGuard<'static, ()>,
    clean: bool,
    /// Made last and given up first.
    bench: Option<Bench>,
}

fn alone() -> Alone {
    static ONE: Mutex<()> = Mutex::new(());
    static DEVICES: Once = Once::new();
    // What a test that failed has left is no failure of the others.
    let (guard, clean) = match ONE.lock() {
        Ok(guard) => (guard, true),
        Err(poisoned) => (PoisonError::into_inner(poisoned), false),
    };
    // SAFETY: every test begins here, and no other thread of this process reads the environment.
    DEVICES.call_once(|| unsafe {
        std::env::set_var("ASCEND_EMU_DEVICES", RANKS.to_string());
        std::env::set_var("TMPDIR", team::temporary());
    });
    team::make_temporary();
    Alone { _guard: guard, clean, bench: Some(Bench::new()) }
}

impl Drop for Alone {
    fn drop(&mut self) {
        self.bench = None;
        if self.clean && !std::thread::panicking() {
            let live = ascend_emu::live();
            assert!(live.is_empty(), "{live:?}");
            team::assert_no_socket();
            team::remove_temporary();
        }
    }
}

/// Asserts success.
#[track_caller]
fn fine(result: HcclResult) {
    assert_eq!(result, HcclResult::HCCL_SUCCESS, "{}", message());
}

/// Asserts a failure with a result and a message that has all these parts.
#[track_caller]
fn refused(result: HcclResult, code: HcclResult, parts: &[&str]) {
    let message = message();
    assert_eq!(result, code, "{message}");
    for part in parts {
        assert!(message.contains(part), "`{part}` is not in `{message}`");
    }
}

/// Asserts that a call fails, on the host or on its stream, with a message that has these parts.
#[track_caller]
fn fails_somewhere(one: &Rank, result: HcclResult, parts: &[&str]) {
    match result {
        HcclResult::HCCL_SUCCESS => one.fails(parts),
        _ => refused(result, HcclResult::HCCL_E_INTERNAL, parts),
    }
}

/// Root information.
fn root_info() -> HcclRootInfo {
    let mut info = HcclRootInfo { internal: [0; sys::HCCL_ROOT_INFO_BYTES as usize] };
    fine(unsafe { HcclGetRootInfo(&mut info) });
    info
}

/// One rank on its thread, with a context and a stream.
struct Rank {
    rank: u32,
    size: u32,
    comm: HcclComm,
    stream: aclrtStream,
    context: *mut c_void,
}

impl Rank {
    fn index(&self) -> usize {
        self.rank as usize
    }

    fn sync(&self) {
        ok(unsafe { aclrtSynchronizeStream(self.stream) });
    }

    /// Asserts that the stream failed as a collective does, with a message that has these parts.
    #[track_caller]
    fn fails(&self, parts: &[&str]) {
        fails(unsafe { aclrtSynchronizeStream(self.stream) }, 507_048, parts);
    }

    fn destroy_comm(&mut self) {
        fine(unsafe { HcclCommDestroy(std::mem::replace(&mut self.comm, null_mut())) });
    }
}

/// Enters a context of its own on a device.
fn enter(device: u32) -> *mut c_void {
    let mut context = null_mut();
    ok(unsafe { aclrtCreateContext(&mut context, device as i32) });
    context
}

/// Runs `body` as each of the ranks of a communicator, and returns what they return in the order of the ranks.
fn world<T: Send>(size: u32, body: impl Fn(&mut Rank) -> T + Sync) -> Vec<T> {
    ranks(size, 0..size, &root_info(), body)
}

/// Runs `body` as some of the ranks of a communicator.
fn ranks<T: Send>(
    size: u32,
    own: std::ops::Range<u32>,
    info: &HcclRootInfo,
    body: impl Fn(&mut Rank) -> T + Sync,
) -> Vec<T> {
    let body = |rank| {
        let context = enter(rank);
        let mut comm = null_mut();
        fine(unsafe { HcclCommInitRootInfo(size, info, rank, &mut comm) });
        let mut one = Rank { rank, size, comm, stream: stream(), context };
        let result = body(&mut one);
        fine(unsafe { HcclCommDestroy(one.comm) });
        if !one.stream.is_null() {
            destroy(one.stream);
        }
        ok(unsafe { aclrtDestroyContext(one.context) });
        result
    };
    std::thread::scope(|scope| {
        let ranks: Vec<_> = own.map(|rank| scope.spawn(move || body(rank))).collect();
        ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
    })
}
