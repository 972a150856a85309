//! Standard output whose reader may go away.

use std::fmt::Display;
use std::io::{self, ErrorKind, StdoutLock, Write as _};

use super::Stop;

/// Standard output, line by line. A closed pipe is an ordinary end, not a panic.
pub(super) struct Output(StdoutLock<'static>);

impl Output {
    pub(super) fn standard() -> Self {
        Self(io::stdout().lock())
    }

    /// Writes one line at once, so that a reader sees it when it is known.
    pub(super) fn line(&mut self, line: impl Display) -> Result<(), Stop> {
        let written = writeln!(self.0, "{line}").and_then(|()| self.0.flush());
        written.map_err(|error| match error.kind() {
            ErrorKind::BrokenPipe => Stop::Closed,
            _ => Stop::Trouble(format!("the output cannot be written: {error}")),
        })
    }
}

/// Writes a message to standard error, ignoring errors.
pub(super) fn complain(message: &str) {
    let _ = writeln!(io::stderr(), "error: {message}");
}

/// Writes a remark on the output to standard error, ignoring errors.
pub(super) fn remark(message: &str) {
    let _ = writeln!(io::stderr(), "note: {message}");
}
