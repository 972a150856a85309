//! Processes that were forked from one that uses the emulator.
//!
//! A fork copies the forking thread alone. The threads of streams and of the kernels are missing in the child, and locks
//! that they held stay held: nothing queued would ever run, and any call might wait for ever. Each call in the child is
//! refused instead.

use crate::status::{INTERNAL, NOT_SUPPORTED, Outcome, failure};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, Ordering};

static FORKED: AtomicBool = AtomicBool::new(false);

unsafe extern "C" fn in_child() {
    FORKED.store(true, Ordering::Relaxed);
}

/// Lets children of this process know from now on that they are.
pub(crate) fn watch() -> Outcome {
    static REGISTERED: OnceLock<i32> = OnceLock::new();
    let status = *REGISTERED.get_or_init(|| {
        // SAFETY: the handler is a function of this library and does nothing but store a flag, which is allowed in the
        // child of a process with threads.
        unsafe { libc::pthread_atfork(None, None, Some(in_child)) }
    });
    match status {
        0 => Ok(()),
        error => Err(failure!(
            INTERNAL,
            "aclInit: pthread_atfork failed with error {error}"
        )),
    }
}

/// Refuses a call in a child.
pub(crate) fn refuse() -> Outcome {
    if !FORKED.load(Ordering::Relaxed) {
        return Ok(());
    }
    Err(failure!(
        NOT_SUPPORTED,
        "this process was forked after aclInit: streams and their work stay with the parent and would never be over here; \
         fork before aclInit, or start the child by exec"
    ))
}
