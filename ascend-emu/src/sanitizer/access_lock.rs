//! Locks on the bytes that running work touches.
//!
//! Work on different streams, and the host's own copies, may touch the same bytes without any order between them:
//! that is the caller's mistake, which the sanitizer reports. So that it never becomes a data race of this process,
//! running work locks its bytes first: readers share the lock, a writer holds it alone.

use crate::lock::{Lock, Signal};
use crate::operator::Access;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct LockedRange {
    start: usize,
    end: usize,
    write: bool,
    holder: u64,
}

#[derive(Debug, Default)]
struct Locks {
    held: Vec<LockedRange>,
    holders: u64,
}

static LOCKS: Lock<Locks> = Lock::new(Locks { held: Vec::new(), holders: 0 });
static RELEASED: Signal = Signal::new();

/// The lock on bytes, held until dropped.
#[derive(Debug)]
#[must_use = "the bytes are locked only until this is dropped"]
pub(crate) struct AccessLock(u64);

/// Waits until no conflicting lock is held, then locks the given accesses. A thread takes all of its locks at once
/// and waits for none while it holds one, so there is no deadlock.
pub(crate) fn lock_accesses(accesses: &[Access]) -> AccessLock {
    let span = |access: &Access| {
        let bytes = usize::try_from(access.bytes).unwrap_or(usize::MAX);
        (access.address, access.address.saturating_add(bytes))
    };
    let mut locks = LOCKS.lock();
    while locks.held.iter().any(|held| {
        accesses.iter().any(|access| {
            let (start, end) = span(access);
            (held.write || access.write) && held.start < end && start < held.end
        })
    }) {
        locks = RELEASED.wait(locks, None);
    }
    locks.holders += 1;
    let holder = locks.holders;
    locks.held.extend(accesses.iter().map(|access| {
        let (start, end) = span(access);
        LockedRange { start, end, write: access.write, holder }
    }));
    AccessLock(holder)
}

impl Drop for AccessLock {
    fn drop(&mut self) {
        LOCKS.lock().held.retain(|held| held.holder != self.0);
        RELEASED.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::{AtomicBool, Ordering};
    use std::time::Duration;

    fn access(address: usize, bytes: u64, write: bool) -> Access {
        Access { address, bytes, write, what: "test" }
    }

    #[test]
    fn readers_share_and_writers_wait() {
        static DONE: AtomicBool = AtomicBool::new(false);
        let one = lock_accesses(&[access(0x10, 16, false)]);
        let two = lock_accesses(&[access(0x18, 16, false), access(0x20, 8, false)]);
        let apart = lock_accesses(&[access(0x100, 4, true)]);
        let writer = std::thread::spawn(|| {
            let _held = lock_accesses(&[access(0x1f, 1, true)]);
            DONE.store(true, Ordering::SeqCst);
        });
        std::thread::sleep(Duration::from_millis(20));
        assert!(!DONE.load(Ordering::SeqCst));
        drop(one);
        drop(two);
        writer.join().unwrap();
        assert!(DONE.load(Ordering::SeqCst));
        drop(apart);
    }
}
