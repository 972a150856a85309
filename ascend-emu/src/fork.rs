//! Processes that were forked from one that uses the emulator.
//!
//! A fork copies the forking thread alone. The threads of streams and of the kernels are missing in the child, and
//! locks that they held stay held: nothing queued would ever run, and any call might wait for ever. Each call in the
//! child is refused instead, by [`status`](crate::status).

use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, Ordering};

static FORKED: AtomicBool = AtomicBool::new(false);

unsafe extern "C" fn in_child() {
    FORKED.store(true, Ordering::Relaxed);
}

/// Makes [`forked`] true in children of this process from now on. Fails with the system's error number.
pub(crate) fn watch() -> Result<(), i32> {
    static REGISTERED: OnceLock<i32> = OnceLock::new();
    let status = *REGISTERED.get_or_init(|| {
        // SAFETY: the handler is a function of this library and does nothing but store a flag, which is allowed in the
        // child of a process with threads.
        unsafe { libc::pthread_atfork(None, None, Some(in_child)) }
    });
    match status {
        0 => Ok(()),
        error => Err(error),
    }
}

/// Whether this process was forked from one that called [`watch`].
pub(crate) fn forked() -> bool {
    FORKED.load(Ordering::Relaxed)
}
