//! Files from elsewhere, read within a bound.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Read};
use std::path::Path;

use super::CaseError;

/// Reads a regular file of at most `most` bytes. Devices and pipes, which may have no end or no writer, are refused
/// before they are opened; a file that would wait for a writer gives what is there or an error.
///
/// # Errors
/// [`CaseError::NotAFile`], [`CaseError::TooLarge`]; [`CaseError::Io`] for what the system refuses.
pub fn read_file(path: impl AsRef<Path>, most: u64) -> Result<Vec<u8>, CaseError> {
    let path = path.as_ref();
    let trouble = |source| CaseError::Io {
        path: path.to_owned(),
        source,
    };
    let of = fs::metadata(path).map_err(trouble)?;
    if !of.is_file() {
        return Err(CaseError::NotAFile(path.to_owned()));
    }
    let too_large = || CaseError::TooLarge {
        path: path.to_owned(),
        most,
    };
    let len = usize::try_from(of.len()).map_err(|_| too_large())?;
    if of.len() > most {
        return Err(too_large());
    }
    let mut content = Vec::new();
    content
        .try_reserve_exact(len)
        .map_err(|_| trouble(io::ErrorKind::OutOfMemory.into()))?;
    // Files may grow meanwhile, and those of /proc report a length of 0.
    let file = open(path).map_err(trouble)?;
    if !file.metadata().map_err(trouble)?.is_file() {
        return Err(CaseError::NotAFile(path.to_owned()));
    }
    file.take(most.saturating_add(1))
        .read_to_end(&mut content)
        .map_err(trouble)?;
    match content.len() as u64 > most {
        true => Err(too_large()),
        false => Ok(content),
    }
}

/// Opens a file so that neither opening nor reading it waits for a writer.
fn open(path: &Path) -> io::Result<File> {
    let mut options = OpenOptions::new();
    options.read(true);
    #[cfg(all(
        target_os = "linux",
        any(target_arch = "x86_64", target_arch = "aarch64")
    ))]
    {
        use std::os::unix::fs::OpenOptionsExt as _;

        // The value of the kernel's `asm-generic/fcntl.h`, which holds for both architectures.
        const O_NONBLOCK: i32 = 0o4000;
        options.custom_flags(O_NONBLOCK);
    }
    options.open(path)
}
