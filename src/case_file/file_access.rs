//! Files: read within a bound, and written whole or not at all.

use std::fs::{self, File, OpenOptions};
use std::io::{self, ErrorKind, Read as _, Write as _};
use std::path::{Path, PathBuf};
use std::process;
use std::sync::atomic::{AtomicU64, Ordering};

use super::CaseError;

/// Reads a regular file of at most `most` bytes. Devices and pipes, which may have no end or no writer, are refused
/// before they are opened; a file that would wait for a writer gives what is there or an error.
///
/// # Errors
/// [`CaseError::NotAFile`], [`CaseError::TooLarge`]; [`CaseError::Io`] for what the system refuses.
pub fn read_file(path: impl AsRef<Path>, most: u64) -> Result<Vec<u8>, CaseError> {
    let path = path.as_ref();
    let trouble = |source| CaseError::Io { path: path.to_owned(), source };
    let found = fs::metadata(path).map_err(trouble)?;
    if !found.is_file() {
        return Err(CaseError::NotAFile(path.to_owned()));
    }
    let too_large = || CaseError::TooLarge { path: path.to_owned(), most };
    let len = usize::try_from(found.len()).map_err(|_| too_large())?;
    if found.len() > most {
        return Err(too_large());
    }
    let mut content = Vec::new();
    content.try_reserve_exact(len).map_err(|_| trouble(io::ErrorKind::OutOfMemory.into()))?;
    // Files may grow meanwhile, and those of /proc report a length of 0.
    let file = open(path).map_err(trouble)?;
    if !file.metadata().map_err(trouble)?.is_file() {
        return Err(CaseError::NotAFile(path.to_owned()));
    }
    file.take(most.saturating_add(1)).read_to_end(&mut content).map_err(trouble)?;
    match content.len() as u64 > most {
        true => Err(too_large()),
        false => Ok(content),
    }
}

/// Opens a file so that neither opening nor reading it waits for a writer.
fn open(path: &Path) -> io::Result<File> {
    let mut options = OpenOptions::new();
    options.read(true);
    #[cfg(all(target_os = "linux", any(target_arch = "x86_64", target_arch = "aarch64")))]
    {
        use std::os::unix::fs::OpenOptionsExt as _;

        // The value of the kernel's `asm-generic/fcntl.h`, which holds for both architectures.
        const O_NONBLOCK: i32 = 0o4000;
        options.custom_flags(O_NONBLOCK);
    }
    options.open(path)
}

/// Writes a regular file by writing a new one beside it, which then takes its name. A reader at the same time sees
/// the old content or the new one. A link with this name is replaced, and the file that it leads to stays. Devices,
/// pipes and folders, and links to them, are refused.
///
/// # Errors
/// [`CaseError::Io`].
pub fn write_file(path: impl AsRef<Path>, bytes: &[u8]) -> Result<(), CaseError> {
    let path = path.as_ref();
    replace(path, bytes).map_err(|source| CaseError::Io { path: path.to_owned(), source })
}

fn replace(path: &Path, bytes: &[u8]) -> io::Result<()> {
    // A link that leads nowhere is replaced like any other.
    let other = fs::metadata(path).is_ok_and(|found| !found.is_file());
    if other {
        return Err(io::Error::new(
            ErrorKind::InvalidInput,
            "there is a folder, device or pipe of this name: name a regular file",
        ));
    }
    let (temporary, mut file) = beside(path)?;
    let written = file.write_all(bytes).and_then(|()| fs::rename(&temporary, path));
    if written.is_err() {
        // A file that was written only in part is removed.
        let _ = fs::remove_file(&temporary);
    }
    written
}

/// Writes a file under a temporary name and links it to `path`. Returns `false` if there is a file of that name
/// already.
pub(super) fn write_new(path: &Path, write: impl FnOnce(&mut File) -> io::Result<()>) -> io::Result<bool> {
    let (temporary, mut file) = beside(path)?;
    let named = write(&mut file).and_then(|()| match fs::hard_link(&temporary, path) {
        Err(error) if error.kind() != ErrorKind::AlreadyExists => take_name(&temporary, path),
        linked => linked,
    });
    // Already gone where it was renamed to `path`.
    let _ = fs::remove_file(&temporary);
    match named {
        Ok(()) => Ok(true),
        Err(error) if error.kind() == ErrorKind::AlreadyExists => Ok(false),
        Err(error) => Err(error),
    }
}

/// Renames a file to a name that is free, on a file system without hard links.
fn take_name(temporary: &Path, path: &Path) -> io::Result<()> {
    File::create_new(path)?;
    fs::rename(temporary, path).inspect_err(|_| {
        // An empty file is no case.
        let _ = fs::remove_file(path);
    })
}

/// Makes a temporary file in the folder of `path`.
fn beside(path: &Path) -> io::Result<(PathBuf, File)> {
    static NUMBER: AtomicU64 = AtomicU64::new(0);
    if path.file_name().is_none() {
        return Err(io::Error::new(ErrorKind::InvalidInput, "no file's name"));
    }
    loop {
        let number = NUMBER.fetch_add(1, Ordering::Relaxed);
        let temporary = path.with_file_name(format!(".ascend-{}-{number}.tmp", process::id()));
        let made = OpenOptions::new().write(true).create_new(true).open(&temporary);
        match made {
            Ok(file) => return Ok((temporary, file)),
            // An earlier process of the same id left the file.
            Err(error) if error.kind() == ErrorKind::AlreadyExists => {}
            Err(error) => return Err(error),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names(folder: &Path) -> Vec<String> {
        let entries = fs::read_dir(folder).unwrap();
        let mut names: Vec<_> = entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
        names.sort();
        names
    }

    #[test]
    fn a_new_file_has_its_name_only_when_it_is_whole() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("call");
        let half = |file: &mut File| {
            file.write_all(b"half")?;
            assert!(!path.exists());
            Err(io::Error::other("no space"))
        };
        assert_eq!(write_new(&path, half).unwrap_err().to_string(), "no space");
        assert!(names(folder.path()).is_empty());
        let whole = |file: &mut File| file.write_all(b"whole");
        assert!(write_new(&path, whole).unwrap());
        assert!(!write_new(&path, |file| file.write_all(b"other")).unwrap());
        assert_eq!(fs::read(&path).unwrap(), b"whole");
        assert_eq!(names(folder.path()), ["call"]);
    }

    #[test]
    fn a_name_is_taken_once_where_files_have_one_name_each() {
        let folder = tempfile::tempdir().unwrap();
        let [temporary, path] = ["temporary", "call"].map(|name| folder.path().join(name));
        fs::write(&temporary, b"whole").unwrap();
        take_name(&temporary, &path).unwrap();
        assert_eq!(fs::read(&path).unwrap(), b"whole");
        fs::write(&temporary, b"other").unwrap();
        let taken = take_name(&temporary, &path).unwrap_err();
        assert_eq!(taken.kind(), ErrorKind::AlreadyExists);
        assert_eq!(fs::read(&path).unwrap(), b"whole");
    }
}
