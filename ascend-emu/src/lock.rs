//! Mutexes and condition variables that outlive a panic.
//!
//! A panic inside a call is turned into a status at the C boundary, so one call's panic must not make every later call
//! fail; the guarded state is kept consistent statement by statement.

use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

/// A mutex without poisoning.
#[derive(Debug, Default)]
pub(crate) struct Lock<T>(Mutex<T>);

impl<T> Lock<T> {
    pub(crate) const fn new(value: T) -> Self {
        Lock(Mutex::new(value))
    }

    pub(crate) fn lock(&self) -> MutexGuard<'_, T> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A condition variable for [`Lock`].
#[derive(Debug, Default)]
pub(crate) struct Signal(Condvar);

impl Signal {
    pub(crate) const fn new() -> Self {
        Signal(Condvar::new())
    }

    pub(crate) fn notify_all(&self) {
        self.0.notify_all();
    }

    /// Waits for a notification, at most until `deadline`. Wakes spuriously: callers loop over their condition.
    pub(crate) fn wait<'a, T>(&self, guard: MutexGuard<'a, T>, deadline: Option<Instant>) -> MutexGuard<'a, T> {
        match deadline {
            None => self.0.wait(guard).unwrap_or_else(PoisonError::into_inner),
            Some(deadline) => {
                let left = deadline.saturating_duration_since(Instant::now());
                self.0.wait_timeout(guard, left).unwrap_or_else(PoisonError::into_inner).0
            }
        }
    }
}

/// Whether a deadline has passed; `None` never passes.
pub(crate) fn expired(deadline: Option<Instant>) -> bool {
    deadline.is_some_and(|deadline| Instant::now() >= deadline)
}
