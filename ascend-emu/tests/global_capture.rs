//! A capture in GLOBAL mode keeps every thread from disturbing calls: the only test of its process.

#![allow(
    clippy::undocumented_unsafe_blocks,
    reason = "each call keeps the contract of ascend_emu::abi: pointers are null or to locals"
)]
#![allow(clippy::unwrap_used, reason = "tests")]

mod bench;

use ascend_emu::abi::*;
use ascend_sys::bindings::aclmdlRICaptureMode;
use bench::*;
use std::ptr::null_mut;

#[test]
fn every_thread_is_kept_from_disturbing() {
    let bench = Bench::new();
    let stream = stream();
    let global = aclmdlRICaptureMode::ACL_MODEL_RI_CAPTURE_MODE_GLOBAL;
    ok(unsafe { aclmdlRICaptureBegin(stream, global) });
    let context = bench.context.addr();
    std::thread::spawn(move || unsafe {
        ok(aclrtSetCurrentContext(std::ptr::without_provenance_mut(
            context,
        )));
        let at = malloc(32);
        fails(aclrtMemset(at, 32, 0, 32), 107_030, &["aclrtMemset"]);
        // A thread that says it knows what it does may.
        let mut mode = aclmdlRICaptureMode::ACL_MODEL_RI_CAPTURE_MODE_THREAD_LOCAL;
        ok(aclmdlRICaptureThreadExchangeMode(&mut mode));
        ok(aclrtMemset(at, 32, 0, 32));
        free(at);
    })
    .join()
    .unwrap();
    let mut graph = null_mut();
    unsafe {
        ok(aclmdlRICaptureEnd(stream, &mut graph));
        ok(aclmdlRIDestroy(graph));
    }
    let at = malloc(32);
    free(at);
    destroy(stream);
}
