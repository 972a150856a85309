//! The folder that refused and failing calls are written into.

use std::collections::BTreeSet;
use std::fs;
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::sync::Mutex;

use super::Recorded;
use crate::case_file::CaseError;
use crate::case_file::file_access::write_new;
use crate::error::Result;
use crate::runtime::lock;

/// Most calls that a folder takes.
const MOST_CALLS: usize = 256;
/// Most bytes that one process writes.
const MOST_BYTES: u64 = 1 << 30;
/// Extensions of recorded calls: each number is used with only one of them.
const EXTENSIONS: [&str; 2] = ["safetensors", "jsonl"];

/// A folder, and what this process has written there.
#[derive(Debug)]
pub(super) struct Folder {
    path: PathBuf,
    written: Mutex<Written>,
}

#[derive(Debug, Default)]
struct Written {
    /// Lines of the calls that were taken so far.
    known: BTreeSet<String>,
    bytes: u64,
    full: bool,
}

impl Folder {
    pub(super) fn new(path: PathBuf) -> Self {
        Self { path, written: Mutex::default() }
    }

    /// Takes a call if this process has not taken it before and the folder has room. Returns whether it was taken.
    /// `line` is the call without its data.
    pub(super) fn takes(&self, line: &str) -> bool {
        let mut written = lock(&self.written);
        !written.full && written.known.len() < MOST_CALLS && written.known.insert(line.to_owned())
    }

    /// Whether nothing more can be written.
    pub(super) fn is_closed(&self) -> bool {
        lock(&self.written).full
    }

    /// Bytes of data that may still be written.
    pub(super) fn room(&self) -> u64 {
        MOST_BYTES.saturating_sub(lock(&self.written).bytes)
    }

    /// Writes a call. An error is logged and not returned: the program has an error of its own to handle.
    pub(super) fn write(&self, call: &Recorded, error: &str) {
        match self.store(call) {
            Ok(path) => tracing::warn!("recorded as {}: {error}", path.display()),
            Err(problem) => tracing::warn!("a failing call cannot be recorded: {problem}"),
        }
    }

    /// Lets nothing more be written.
    pub(super) fn close(&self) {
        lock(&self.written).full = true;
    }

    /// Writes a call.
    pub(super) fn store(&self, call: &Recorded) -> Result<PathBuf, CaseError> {
        let stored = call.write_into(&self.path);
        let mut written = lock(&self.written);
        match &stored {
            Ok(path) => {
                let bytes = fs::metadata(path).map_or(0, |file| file.len());
                written.bytes = written.bytes.saturating_add(bytes);
            }
            Err(CaseError::FolderFull { .. }) => written.full = true,
            Err(_) => {}
        }
        stored
    }
}

/// Writes a file under the first name that is free.
pub(super) fn write(folder: &Path, extension: &str, bytes: &[u8]) -> Result<PathBuf, CaseError> {
    let io = |path: &Path, source| CaseError::Io { path: path.to_owned(), source };
    fs::create_dir_all(folder).map_err(|source| io(folder, source))?;
    for number in 1..=MOST_CALLS {
        let path = |extension: &str| folder.join(format!("call-{number:03}.{extension}"));
        if EXTENSIONS.iter().any(|extension| path(extension).exists()) {
            continue;
        }
        let path = path(extension);
        // Another process may have taken the name meanwhile.
        if write_new(&path, |file| file.write_all(bytes)).map_err(|source| io(&path, source))? {
            return Ok(path);
        }
    }
    Err(CaseError::FolderFull { path: folder.to_owned(), most: MOST_CALLS })
}
