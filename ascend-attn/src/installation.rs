//! What is installed on this machine, judging by files.

use std::env;
use std::fs;
use std::path::{Path, PathBuf};

use ascend_attention::sys::{VARIABLES, VariableReader};
use ascend_attention::{file_version, toolkit_version};

/// Where the system's loader looks for libraries.
const LOADER: &str = "LD_LIBRARY_PATH";

/// Folders that the installers choose by default, below `/usr/local/Ascend` for root and `~/Ascend` for others.
const TOOLKITS: [&str; 2] = ["ascend-toolkit/latest", "latest"];

/// The variables with their values, `None` for one that is not set; variables of the emulation and of tests are
/// included only if they are set.
pub(super) fn variables() -> Vec<(&'static str, Option<String>)> {
    let value = |name| {
        let value = env::var_os(name).filter(|value| !value.is_empty())?;
        Some(value.to_string_lossy().into_owned())
    };
    let all = VARIABLES.iter().filter_map(|variable| {
        let always = matches!(variable.reader, VariableReader::Library | VariableReader::Doctor);
        let value = value(variable.name);
        (always || value.is_some()).then_some((variable.name, value))
    });
    all.chain([(LOADER, value(LOADER))]).collect()
}

/// A folder where a toolkit or a driver may be.
pub(super) struct Folder {
    pub(super) path: PathBuf,
    /// Why the folder was looked at.
    pub(super) source: &'static str,
    pub(super) exists: bool,
    /// The version that a file in it states, and that file.
    pub(super) version: Option<(String, PathBuf)>,
}

impl Folder {
    fn new(path: PathBuf, source: &'static str, version: impl FnOnce(&Path) -> Option<(String, PathBuf)>) -> Self {
        let version = version(&path);
        Self { exists: path.is_dir(), path, source, version }
    }
}

/// Folders where the toolkit may be: those that variables name, then the usual ones.
pub(super) fn toolkits() -> Vec<Folder> {
    let mut places: Vec<(PathBuf, &'static str)> = Vec::new();
    for name in ["ASCEND_HOME_PATH", "ASCEND_TOOLKIT_HOME"] {
        if let Some(value) = env::var_os(name).filter(|value| !value.is_empty()) {
            places.push((value.into(), name));
        }
    }
    let home = env::var_os("HOME").map(|home| Path::new(&home).join("Ascend"));
    for root in [Some(PathBuf::from("/usr/local/Ascend")), home].into_iter().flatten() {
        places.extend(TOOLKITS.map(|folder| (root.join(folder), "usual place")));
    }
    places.into_iter().map(|(path, source)| Folder::new(path, source, toolkit_version)).collect()
}

/// The folder of the driver.
pub(super) fn driver() -> Folder {
    let version = |folder: &Path| file_version(&folder.join("version.info"));
    match env::var_os("ASCEND_DRIVER_PATH").filter(|value| !value.is_empty()) {
        Some(path) => Folder::new(path.into(), "ASCEND_DRIVER_PATH", version),
        None => Folder::new("/usr/local/Ascend/driver".into(), "usual place", version),
    }
}

/// The device files that the driver makes: one for each NPU.
pub(super) fn device_files() -> Vec<String> {
    let mut files: Vec<(u32, String)> = fs::read_dir("/dev")
        .into_iter()
        .flatten()
        .filter_map(|entry| {
            let name = entry.ok()?.file_name().into_string().ok()?;
            let number = name.strip_prefix("davinci")?.parse().ok()?;
            Some((number, format!("/dev/{name}")))
        })
        .collect();
    files.sort();
    files.into_iter().map(|(_, file)| file).collect()
}
