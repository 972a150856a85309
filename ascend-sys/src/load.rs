//! Opening the libraries.

use std::collections::BTreeSet;
use std::ffi::OsStr;
use std::fmt;
use std::mem::ManuallyDrop;
use std::path::{Path, PathBuf};
use std::{env, error, fs, io};

use crate::library::{CUSTOM, Library};
use crate::search::{CUSTOM_OPP, HOMES, OPP, Search};

/// The outcome of trying one path.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// The library is open.
    Opened,
    /// There is no such file.
    Absent,
    /// The file exists and cannot be opened: the loader's error text.
    Failed(String),
}

/// One path that was tried.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Attempt {
    /// The file looked for.
    pub file: &'static str,
    /// The path given to the loader; one without a folder means the loader's own search path. For an open library,
    /// the file that the loader found, if the system reports it.
    pub path: PathBuf,
    /// The outcome of trying this path.
    pub outcome: Outcome,
}

impl fmt::Display for Attempt {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.path.display())?;
        if self.path == Path::new(self.file) {
            f.write_str(" (on the loader's search path)")?;
        }
        match &self.outcome {
            Outcome::Opened => f.write_str(": opened"),
            Outcome::Absent => f.write_str(": no such file"),
            Outcome::Failed(text) => write!(f, ": {text}"),
        }
    }
}

/// Why the libraries could not be loaded.
///
/// Plain data: printing it needs nothing of the libraries. It lists which libraries are missing, every path tried
/// with its error, and what to set.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LoadError {
    /// The libraries that are needed and could not be opened.
    pub missing: Vec<Library>,
    /// Every path tried, in order.
    pub attempts: Vec<Attempt>,
    /// The variables that decide where to look, with their values.
    pub variables: Vec<(&'static str, Option<String>)>,
}

impl LoadError {
    /// Whether no file of any needed library was found: CANN is not installed, or not where this search looked.
    /// Otherwise a file exists and cannot be used.
    pub fn is_absent(&self) -> bool {
        self.attempts.iter().all(|attempt| attempt.outcome == Outcome::Absent)
    }

    /// Whether the files that cannot be opened need the driver's libraries, which come with the driver, not with the
    /// toolkit.
    pub fn lacks_driver(&self) -> bool {
        self.attempts.iter().any(|attempt| match &attempt.outcome {
            Outcome::Failed(text) => text.contains("libascend_hal.so") || text.contains("libdrvdsmi_host.so"),
            _ => false,
        })
    }
}

impl fmt::Display for LoadError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let missing: Vec<String> = self.missing.iter().map(|library| library.files().join(" or ")).collect();
        writeln!(f, "the libraries of CANN cannot be loaded; missing: {}", missing.join(", "))?;
        f.write_str("tried:\n")?;
        for attempt in &self.attempts {
            writeln!(f, "  {attempt}")?;
        }
        f.write_str("environment:\n")?;
        for (name, value) in &self.variables {
            writeln!(f, "  {name}{}", value.as_ref().map_or(" is not set".to_owned(), |v| format!("={v}")))?;
        }
        let advice = if self.is_absent() {
            "install the CANN toolkit and source its set_env.sh, or set ASCEND_HOME_PATH to its folder"
        } else if self.lacks_driver() {
            "install the driver of the NPU, or add the folder of its libraries to LD_LIBRARY_PATH"
        } else {
            "source set_env.sh of one complete CANN installation, so that its libraries find each other"
        };
        f.write_str(advice)
    }
}

impl error::Error for LoadError {}

/// Libraries in the order in which symbols are looked up.
pub(crate) struct Loaded {
    libraries: Vec<(&'static str, Opened)>,
    pub(crate) attempts: Vec<Attempt>,
}

/// A library that is never closed: CANN's libraries own threads that run their code, and pointers into them are
/// returned without a lifetime.
type Opened = ManuallyDrop<libloading::Library>;

impl Loaded {
    /// # Safety
    /// Runs the initialisers of all libraries that the search finds: they must be the libraries of CANN or
    /// equivalent.
    pub(crate) unsafe fn open(search: &Search) -> Result<Self, LoadError> {
        let mut attempts = Vec::new();
        let mut libraries = Vec::new();
        let mut missing = Vec::new();
        for library in Library::ALL {
            let before = libraries.len();
            for file in library.files() {
                let candidates = search.candidates(file);
                // SAFETY: the caller vouches for what the search finds.
                let opened = unsafe { open_first(file, candidates, &mut attempts) };
                libraries.extend(opened.map(|opened| (*file, opened)));
            }
            if libraries.len() == before && library.is_required() {
                missing.push(library);
            }
        }
        if !missing.is_empty() {
            let variables = [HOMES[0], HOMES[1], OPP, CUSTOM_OPP, "LD_LIBRARY_PATH"];
            let value = |name| env::var_os(name).map(|value| value.to_string_lossy().into_owned());
            return Err(LoadError { missing, attempts, variables: variables.map(|name| (name, value(name))).to_vec() });
        }
        // User-built operators need the other libraries, so they are opened last; they take precedence, so they are
        // searched first.
        let mut ordered = Vec::new();
        for path in search.candidates(CUSTOM) {
            // SAFETY: as above.
            let opened = unsafe { open_first(CUSTOM, vec![path], &mut attempts) };
            ordered.extend(opened.map(|opened| (CUSTOM, opened)));
        }
        // Operator libraries come before those that they build on; the transformer library before the general one.
        let rank = |file: &str| match file {
            "libopapi_transformer.so" => 0,
            "libopapi.so" => 1,
            "libnnopbase.so" => 2,
            _ => 3,
        };
        libraries.sort_by_key(|(file, _)| rank(file));
        ordered.append(&mut libraries);
        Ok(Self { libraries: ordered, attempts })
    }

    /// Looks a function up, first in its own library and then in all.
    ///
    /// # Safety
    /// `F` must be the type of a pointer to the function that `symbol` (with its NUL) names.
    pub(crate) unsafe fn find<F: Copy>(&self, library: Library, symbol: &'static [u8]) -> Option<F> {
        // User-built operators take precedence over CANN's, so operators are looked up in the order of the list.
        let own = self.libraries.iter().filter(|(file, _)| library != Library::Opapi && *file == library.file_name());
        let foreign = |file: &str| file == CUSTOM && symbol.starts_with(CANN_ONLY_PREFIX);
        own.chain(&self.libraries).filter(|(file, _)| !foreign(file)).find_map(|(_, opened)| {
            // SAFETY: the caller vouches for the type; `Option` of a function pointer is a nullable pointer.
            let symbol = unsafe { opened.get::<Option<F>>(symbol) };
            symbol.ok().and_then(|found| *found)
        })
    }
}

/// Prefix of functions that a user-built library has under CANN's name with another contract: vLLM-Ascend's takes
/// lengths that begin with the start of the first sequence. They are looked up in CANN's libraries only.
const CANN_ONLY_PREFIX: &[u8] = b"aclnnRecurrentGatedDeltaRule";

impl fmt::Debug for Loaded {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list().entries(self.libraries.iter().map(|(file, _)| file)).finish()
    }
}

/// Opens the first of the candidates that can be opened, and records all that were tried.
///
/// # Safety
/// As for [`Loaded::open`].
unsafe fn open_first(file: &'static str, candidates: Vec<PathBuf>, attempts: &mut Vec<Attempt>) -> Option<Opened> {
    for path in candidates {
        let searched = path == Path::new(file);
        let exists =
            searched || fs::symlink_metadata(&path).map_or_else(|e| e.kind() != io::ErrorKind::NotFound, |_| true);
        if !exists {
            attempts.push(Attempt { file, path, outcome: Outcome::Absent });
            continue;
        }
        // SAFETY: the caller vouches for what the search finds.
        match unsafe { open(path.as_os_str()) } {
            Ok(library) => {
                let path = if searched { mapped(file).unwrap_or(path) } else { path };
                attempts.push(Attempt { file, path, outcome: Outcome::Opened });
                return Some(ManuallyDrop::new(library));
            }
            Err(error) => {
                let text = error::Error::source(&error).map_or_else(|| error.to_string(), ToString::to_string);
                // The loader names the file that it lacks: the library itself, or one that it needs.
                let absent = searched && text.starts_with(file) && text.contains("No such file");
                let outcome = if absent { Outcome::Absent } else { Outcome::Failed(text) };
                attempts.push(Attempt { file, path, outcome });
            }
        }
    }
    None
}

/// # Safety
/// As for [`Loaded::open`].
#[cfg(unix)]
unsafe fn open(path: &OsStr) -> Result<libloading::Library, libloading::Error> {
    use libloading::os::unix::{Library, RTLD_GLOBAL, RTLD_LAZY};
    // Global, since operator libraries find the symbols of those opened before them; lazy, since some symbols do not
    // exist on every machine.
    // SAFETY: the caller vouches for the library's initialisers.
    unsafe { Library::open(Some(path), RTLD_LAZY | RTLD_GLOBAL) }.map(Into::into)
}

/// # Safety
/// As for [`Loaded::open`].
#[cfg(not(unix))]
unsafe fn open(path: &OsStr) -> Result<libloading::Library, libloading::Error> {
    // SAFETY: the caller vouches for the library's initialisers.
    unsafe { libloading::Library::new(path) }
}

/// The file of an open library that the loader found by itself.
fn mapped(file: &str) -> Option<PathBuf> {
    let maps = fs::read_to_string("/proc/self/maps").ok()?;
    let paths: BTreeSet<&Path> =
        maps.lines().filter_map(|line| line.find('/').map(|at| Path::new(&line[at..]))).collect();
    paths.into_iter().find(|path| path.file_name() == Some(OsStr::new(file))).map(Path::to_path_buf)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn error(outcomes: &[Outcome]) -> LoadError {
        let attempt = |outcome: &Outcome| Attempt {
            file: "libascendcl.so",
            path: "/cann/lib64/libascendcl.so".into(),
            outcome: outcome.clone(),
        };
        LoadError {
            missing: vec![Library::Ascendcl, Library::Opapi],
            attempts: outcomes.iter().map(attempt).collect(),
            variables: vec![("ASCEND_HOME_PATH", Some("/cann".into())), ("ASCEND_OPP_PATH", None)],
        }
    }

    #[test]
    fn an_absent_toolkit_is_told_from_a_broken_one() {
        let absent = error(&[Outcome::Absent]);
        assert!(absent.is_absent() && !absent.lacks_driver());
        assert_eq!(
            absent.to_string(),
            "the libraries of CANN cannot be loaded; missing: libascendcl.so, libopapi_transformer.so or libopapi.so\n\
             tried:\n  /cann/lib64/libascendcl.so: no such file\n\
             environment:\n  ASCEND_HOME_PATH=/cann\n  ASCEND_OPP_PATH is not set\n\
             install the CANN toolkit and source its set_env.sh, or set ASCEND_HOME_PATH to its folder"
        );

        let driver = "libascend_hal.so: cannot open shared object file: No such file or directory";
        let broken = error(&[Outcome::Failed(driver.into())]);
        assert!(!broken.is_absent() && broken.lacks_driver());
        assert!(broken.to_string().contains("install the driver"));

        let mixed = error(&[Outcome::Opened, Outcome::Absent]);
        assert!(!mixed.is_absent() && !mixed.lacks_driver());
        assert!(mixed.to_string().contains("one complete CANN installation"));
    }
}
