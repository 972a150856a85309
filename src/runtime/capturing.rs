//! Which threads capture a graph, and what they must not do meanwhile.

use std::cell::Cell;
use std::marker::PhantomData;

use crate::error::{Error, Result};

thread_local! {
    static CAPTURING: Cell<bool> = const { Cell::new(false) };
}

/// The calling thread captures a graph until this is dropped.
#[derive(Debug)]
pub(crate) struct Scope(PhantomData<*const ()>);

/// Begins a capture on the calling thread.
///
/// # Errors
/// [`Error::Capturing`] if it captures already.
pub(crate) fn begin() -> Result<Scope> {
    refuse("another capture", "capture one graph after the other")?;
    CAPTURING.set(true);
    Ok(Scope(PhantomData))
}

impl Drop for Scope {
    fn drop(&mut self) {
        CAPTURING.set(false);
    }
}

/// Whether the calling thread captures a graph.
pub fn is_capturing() -> bool {
    CAPTURING.get()
}

/// Refuses what cannot become part of a graph while the calling thread captures one: it would happen now, and not when
/// the graph is replayed.
#[inline]
pub(crate) fn refuse(what: &'static str, instead: &'static str) -> Result<()> {
    if is_capturing() {
        return Err(refusal(what, instead));
    }
    Ok(())
}

#[cold]
fn refusal(what: &'static str, instead: &'static str) -> Error {
    Error::Capturing { what, instead }
}

/// Runs `body` without the refusals of a capture, for what the capture itself needs.
pub(crate) fn lifted<R>(body: impl FnOnce() -> R) -> R {
    struct Restore(bool);
    impl Drop for Restore {
        fn drop(&mut self) {
            CAPTURING.set(self.0);
        }
    }
    let _restore = Restore(CAPTURING.replace(false));
    body()
}
