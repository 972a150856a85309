//! Files written whole or not at all.

use std::fs::{self, File, OpenOptions};
use std::io::{self, ErrorKind, Write as _};
use std::path::{Path, PathBuf};
use std::process;
use std::sync::atomic::{AtomicU64, Ordering};

use super::CaseError;

/// Writes a regular file: a new one beside it, which then takes its name. A reader at the same time sees the old content or
/// the new one. A link with this name is replaced, and the file that it leads to stays. Devices, pipes and folders, and links
/// to them, are refused.
///
/// # Errors
/// [`CaseError::Io`].
pub fn write_file(path: impl AsRef<Path>, bytes: &[u8]) -> Result<(), CaseError> {
    let path = path.as_ref();
    replace(path, bytes).map_err(|source| CaseError::Io {
        path: path.to_owned(),
        source,
    })
}

fn replace(path: &Path, bytes: &[u8]) -> io::Result<()> {
    // A link that leads nowhere is replaced like any other.
    let other = fs::metadata(path).is_ok_and(|of| !of.is_file());
    if other {
        return Err(io::Error::new(
            ErrorKind::InvalidInput,
            "there is a folder, device or pipe of this name: name a regular file",
        ));
    }
    let (temporary, mut file) = beside(path)?;
    let written = file
        .write_all(bytes)
        .and_then(|()| fs::rename(&temporary, path));
    if written.is_err() {
        // Half a file is none.
        let _ = fs::remove_file(&temporary);
    }
    written
}

/// A new file in the folder of another.
fn beside(path: &Path) -> io::Result<(PathBuf, File)> {
    static NUMBER: AtomicU64 = AtomicU64::new(0);
    if path.file_name().is_none() {
        return Err(io::Error::new(ErrorKind::InvalidInput, "no file's name"));
    }
    loop {
        let number = NUMBER.fetch_add(1, Ordering::Relaxed);
        let temporary = path.with_file_name(format!(".ascend-{}-{number}.tmp", process::id()));
        let made = OpenOptions::new()
            .write(true)
            .create_new(true)
            .open(&temporary);
        match made {
            Ok(file) => return Ok((temporary, file)),
            // Left by a process of the same number.
            Err(error) if error.kind() == ErrorKind::AlreadyExists => {}
            Err(error) => return Err(error),
        }
    }
}
