//! Where libraries are searched for.

use std::env;
use std::ffi::OsString;
use std::fs;
use std::path::{Path, PathBuf};

use crate::library::{CUSTOM, Library};

/// Variables that name the folder of the installed toolkit.
pub(crate) const HOMES: [&str; 2] = ["ASCEND_HOME_PATH", "ASCEND_TOOLKIT_HOME"];
/// The variable that names the folder of the operator packages.
pub(crate) const OPP: &str = "ASCEND_OPP_PATH";
/// The variable that names folders of single operator packages, between colons, the first of which comes first.
pub(crate) const CUSTOM_OPP: &str = "ASCEND_CUSTOM_OPP_PATH";
/// The folder of an operator package that has its library.
const OP_API: &str = "op_api/lib";

/// Folders that the dynamic loader searches by itself, besides those in its cache and in a program's run path.
const SYSTEM: [&str; 5] = ["/lib64", "/usr/lib64", "/lib", "/usr/lib", "/usr/local/lib"];

/// An ordered list of places in which libraries are searched for.
///
/// [`Search::standard`] is what [`Api::load`](crate::Api::load) uses. Other lists are for programs that ship their
/// own libraries and for tests that must not find an installed toolkit:
///
/// ```
/// use ascend_sys::{Api, Search};
///
/// let nowhere = Search::new().folder("/nonexistent");
/// assert!(!nowhere.is_available());
/// // SAFETY: nothing is there, so no foreign code runs.
/// let error = unsafe { Api::load_with(&nowhere) }.unwrap_err();
/// assert!(error.is_absent());
/// assert!(error.to_string().contains("/nonexistent/libascendcl.so"));
/// ```
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Search {
    folders: Vec<PathBuf>,
    custom: Vec<PathBuf>,
    loader_path: bool,
}

impl Search {
    /// A search without places.
    pub fn new() -> Self {
        Self::default()
    }

    /// The installed toolkit as the environment names it, then the dynamic loader's own search path.
    pub fn standard() -> Self {
        Self::new().environment().loader_path()
    }

    /// Adds a folder that contains the libraries themselves.
    #[must_use]
    pub fn folder(mut self, folder: impl Into<PathBuf>) -> Self {
        let folder = folder.into();
        if !self.folders.contains(&folder) {
            self.folders.push(folder);
        }
        self
    }

    /// Adds `$ASCEND_HOME_PATH/lib64`, `$ASCEND_TOOLKIT_HOME/lib64` and, for operators that users built, `op_api/lib`
    /// of each folder that `ASCEND_CUSTOM_OPP_PATH` names between colons, then `$ASCEND_OPP_PATH/vendors/*/op_api/lib`;
    /// variables that are not set add nothing.
    #[must_use]
    pub fn environment(self) -> Self {
        self.environment_from(|name| env::var_os(name))
    }

    fn environment_from(mut self, variable: impl Fn(&str) -> Option<OsString>) -> Self {
        let variable = |name| variable(name).filter(|value| !value.is_empty());
        for home in HOMES.iter().filter_map(|name| variable(name)) {
            self = self.folder(Path::new(&home).join("lib64"));
        }
        // A folder that the variable names and that has no library is kept, so that an account of what was tried has
        // it.
        let named = variable(CUSTOM_OPP).unwrap_or_default();
        let named = env::split_paths(&named).filter(|package| !package.as_os_str().is_empty());
        let installed = variable(OPP).map(|opp| custom_packages(Path::new(&opp))).unwrap_or_default();
        for folder in named.map(|package| package.join(OP_API)).chain(installed) {
            if !self.custom.contains(&folder) {
                self.custom.push(folder);
            }
        }
        self
    }

    /// Adds the dynamic loader's own search path: `LD_LIBRARY_PATH`, the loader's cache, the system's folders.
    #[must_use]
    pub fn loader_path(mut self) -> Self {
        self.loader_path = true;
        self
    }

    /// The folders added so far, in order.
    pub fn folders(&self) -> impl Iterator<Item = &Path> {
        self.folders.iter().map(PathBuf::as_path)
    }

    /// Whether a file of each needed library exists. Opens nothing and runs no foreign code, so it is cheap, cannot
    /// fail, and does not prove that loading succeeds. Libraries in folders that only the loader's cache or a
    /// program's run path names are not found.
    pub fn is_available(&self) -> bool {
        let mut folders = self.folders.clone();
        if self.loader_path {
            if let Some(path) = env::var_os("LD_LIBRARY_PATH") {
                folders.extend(env::split_paths(&path).filter(|p| !p.as_os_str().is_empty()));
            }
            folders.extend(SYSTEM.map(PathBuf::from));
        }
        let present = |file: &&'static str| folders.iter().any(|folder| folder.join(file).is_file());
        let mut needed = Library::ALL.into_iter().filter(|library| library.is_required());
        needed.all(|library| library.files().iter().any(present))
    }

    /// The paths to open for a file, in order. The loader searches for a path without a folder by itself.
    pub(crate) fn candidates(&self, file: &str) -> Vec<PathBuf> {
        let folders = match file {
            CUSTOM => &self.custom,
            _ => &self.folders,
        };
        let mut candidates: Vec<PathBuf> = folders.iter().map(|folder| folder.join(file)).collect();
        if self.loader_path && file != CUSTOM {
            candidates.push(PathBuf::from(file));
        }
        candidates
    }
}

/// The folders of the operator packages that users installed, by name of their vendor.
fn custom_packages(opp: &Path) -> Vec<PathBuf> {
    let Ok(vendors) = fs::read_dir(opp.join("vendors")) else {
        return Vec::new();
    };
    let mut folders: Vec<PathBuf> = vendors
        .filter_map(Result::ok)
        .map(|vendor| vendor.path().join(OP_API))
        .filter(|folder| folder.join(CUSTOM).is_file())
        .collect();
    folders.sort();
    folders
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_order_is_explicit_then_environment_then_loader() {
        let variables = |name: &str| match name {
            "ASCEND_HOME_PATH" => Some("/home-path".into()),
            "ASCEND_TOOLKIT_HOME" => Some("/toolkit".into()),
            _ => None,
        };
        let search = Search::new().folder("/explicit").environment_from(variables).loader_path();
        let expected =
            ["/explicit/libopapi.so", "/home-path/lib64/libopapi.so", "/toolkit/lib64/libopapi.so", "libopapi.so"];
        assert_eq!(search.candidates("libopapi.so"), expected.map(PathBuf::from));
        assert!(search.candidates(CUSTOM).is_empty());
    }

    #[test]
    fn equal_and_empty_variables_add_no_second_folder() {
        let same = Search::new().environment_from(|_| Some("/cann".into()));
        assert_eq!(same.folders().collect::<Vec<_>>(), [Path::new("/cann/lib64")]);
        let empty = Search::new().environment_from(|_| Some(OsString::new()));
        assert_eq!(empty, Search::new());
    }

    #[test]
    fn custom_packages_are_found_by_vendor_name() {
        let opp = tempfile::tempdir().unwrap();
        for vendor in ["zeta", "alpha", "empty"] {
            let folder = opp.path().join("vendors").join(vendor).join("op_api/lib");
            fs::create_dir_all(&folder).unwrap();
            if vendor != "empty" {
                fs::write(folder.join(CUSTOM), "").unwrap();
            }
        }
        let root = opp.path().as_os_str().to_owned();
        let search = Search::new().environment_from(|name| (name == OPP).then(|| root.clone()));
        let expected =
            ["alpha", "zeta"].map(|vendor| opp.path().join("vendors").join(vendor).join("op_api/lib").join(CUSTOM));
        assert_eq!(search.candidates(CUSTOM), expected);

        // Folders that are named one by one come first, in their order, and none twice.
        let named = format!("/zeta:{0}/vendors/zeta/::{0}/vendors/zeta:/empty", opp.path().display());
        let search = Search::new().environment_from(|name| match name {
            CUSTOM_OPP => Some(named.clone().into()),
            _ => (name == OPP).then(|| root.clone()),
        });
        let [alpha, zeta] = expected;
        let library = |package: &str| Path::new(package).join(OP_API).join(CUSTOM);
        assert_eq!(search.candidates(CUSTOM), [library("/zeta"), zeta, library("/empty"), alpha]);
    }

    #[test]
    fn availability_needs_a_file_of_each_library() {
        let folder = tempfile::tempdir().unwrap();
        let search = Search::new().folder(folder.path());
        for file in ["libascendcl.so", "libnnopbase.so", "libopapi_transformer.so"] {
            assert!(!search.is_available());
            fs::write(folder.path().join(file), "").unwrap();
        }
        assert!(search.is_available());
    }
}
