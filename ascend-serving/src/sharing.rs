//! What calls share: data behind locks whose holders may have panicked, and memory that is used from one call to the
//! next, and so belongs to one stream.

use std::sync::{Mutex, MutexGuard, PoisonError};

use ascend_attention::Stream;

use crate::error::{Error, Result};

/// Locks, also after a holder has panicked: the guarded data is never left half changed.
pub(crate) fn lock<T: ?Sized>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The stream of a step, whose workspace its launches share.
pub(crate) const STREAM_OF_STEP: &str = "the stream of the step, which orders the use of its workspace";

/// The stream that an object was planned on, which orders the use of the memory that its launches share.
#[derive(Clone, Copy, Debug)]
pub(crate) struct PlannedStream(usize);

impl PlannedStream {
    pub(crate) fn of(stream: &Stream) -> Self {
        Self(stream.as_raw().addr())
    }

    /// Refuses another stream than `planned`, on which a launch would write memory that work on this stream may still
    /// read.
    pub(crate) fn check(self, stream: &Stream, planned: &'static str) -> Result<()> {
        match stream.as_raw().addr() == self.0 {
            true => Ok(()),
            false => Err(Error::not_as_planned("stream", "another stream", planned)),
        }
    }
}
