//! A capture in GLOBAL mode keeps every thread from disturbing calls.

use crate::bench::*;
use ascend_emu::abi::*;
use ascend_sys::bindings::aclmdlRICaptureMode;
use std::ptr::null_mut;

pub(crate) fn every_thread_is_kept_from_disturbing() {
    let bench = Bench::new();
    let stream = stream();
    let global = aclmdlRICaptureMode::ACL_MODEL_RI_CAPTURE_MODE_GLOBAL;
    ok(unsafe { aclmdlRICaptureBegin(stream, global) });
    let context = bench.context.addr();
    std::thread::spawn(move || unsafe {
        ok(aclrtSetCurrentContext(std::ptr::without_provenance_mut(context)));
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
