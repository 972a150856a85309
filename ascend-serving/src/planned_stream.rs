//! Work that shares memory from one call to the next, and so belongs to one stream.

use ascend_attention::Stream;

use crate::error::{Error, Result};

/// The stream that an object was planned on, which orders the use of the memory that its launches share.
#[derive(Clone, Copy, Debug)]
pub(crate) struct PlannedStream(usize);

impl PlannedStream {
    pub(crate) fn of(stream: &Stream) -> Self {
        Self(stream.as_raw().addr())
    }

    /// Refuses another stream, on which a launch would write memory that work on this stream may still read.
    pub(crate) fn check(self, stream: &Stream) -> Result<()> {
        if stream.as_raw().addr() == self.0 {
            return Ok(());
        }
        Err(Error::not_as_planned(
            "stream",
            "another stream",
            "the stream of the step, which orders the use of its workspace",
        ))
    }
}
