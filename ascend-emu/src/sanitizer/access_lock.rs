//! Bytes that running work holds.
//!
//! Work on different streams, and the host's own copies, may touch the same bytes without any order between them: that
//! is the caller's mistake, which the ledger names. So that it stays a mistake of order and never becomes a data race
//! in this process, whoever touches bytes claims them first; conflicting claims wait for each other.

use crate::lock::{Lock, Signal};
use crate::operator::Access;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Claim {
    start: usize,
    end: usize,
    write: bool,
    holder: u64,
}

#[derive(Debug, Default)]
struct Claims {
    held: Vec<Claim>,
    holders: u64,
}

static CLAIMS: Lock<Claims> = Lock::new(Claims {
    held: Vec::new(),
    holders: 0,
});
static RELEASED: Signal = Signal::new();

/// The right to touch bytes, until dropped.
#[derive(Debug)]
#[must_use = "the bytes are held only until this is dropped"]
pub(crate) struct Held(u64);

/// Waits until no conflicting claim is held, then holds the given accesses. All are taken at once and nobody waits while
/// holding, so claims cannot block each other for ever.
pub(crate) fn claim(accesses: &[Access]) -> Held {
    let span = |access: &Access| {
        let bytes = usize::try_from(access.bytes).unwrap_or(usize::MAX);
        (access.address, access.address.saturating_add(bytes))
    };
    let mut claims = CLAIMS.lock();
    while claims.held.iter().any(|held| {
        accesses.iter().any(|access| {
            let (start, end) = span(access);
            (held.write || access.write) && held.start < end && start < held.end
        })
    }) {
        claims = RELEASED.wait(claims, None);
    }
    claims.holders += 1;
    let holder = claims.holders;
    claims.held.extend(accesses.iter().map(|access| {
        let (start, end) = span(access);
        Claim {
            start,
            end,
            write: access.write,
            holder,
        }
    }));
    Held(holder)
}

impl Drop for Held {
    fn drop(&mut self) {
        CLAIMS.lock().held.retain(|held| held.holder != self.0);
        RELEASED.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::{AtomicBool, Ordering};
    use std::time::Duration;

    fn access(address: usize, bytes: u64, write: bool) -> Access {
        Access {
            address,
            bytes,
            write,
            what: "test",
        }
    }

    #[test]
    fn readers_share_and_writers_wait() {
        static DONE: AtomicBool = AtomicBool::new(false);
        let one = claim(&[access(0x10, 16, false)]);
        let two = claim(&[access(0x18, 16, false), access(0x20, 8, false)]);
        let apart = claim(&[access(0x100, 4, true)]);
        let writer = std::thread::spawn(|| {
            let _held = claim(&[access(0x1f, 1, true)]);
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
