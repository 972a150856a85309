//! What is installed on this machine, as far as files tell.

use std::env;
use std::fs;
use std::path::{Path, PathBuf};

use ascend_attention::case;

/// The variables that decide what is found and used.
const VARIABLES: [&str; 7] = [
    "ASCEND_BACKEND",
    "ASCEND_HOME_PATH",
    "ASCEND_TOOLKIT_HOME",
    "ASCEND_OPP_PATH",
    "ASCEND_RT_VISIBLE_DEVICES",
    "ASCEND_DRIVER_PATH",
    "LD_LIBRARY_PATH",
];

/// Folders that the installers choose by default, below `/usr/local/Ascend` for root and `~/Ascend` for others.
const TOOLKITS: [&str; 2] = ["ascend-toolkit/latest", "latest"];

/// The values of the variables; `None` where one is not set.
pub(super) fn variables() -> Vec<(&'static str, Option<String>)> {
    VARIABLES
        .map(|name| {
            let value = env::var_os(name).map(|value| value.to_string_lossy().into_owned());
            (name, value.filter(|value| !value.is_empty()))
        })
        .into()
}

/// A folder where a toolkit or a driver may be.
pub(super) struct Folder {
    pub(super) path: PathBuf,
    /// Why it was looked at.
    pub(super) source: &'static str,
    pub(super) exists: bool,
    /// The version that a file in it states, and that file.
    pub(super) version: Option<(String, PathBuf)>,
}

/// Most bytes of a file that states a version.
const MOST_BYTES: u64 = 1 << 20;

impl Folder {
    fn new(path: PathBuf, source: &'static str, files: &[&str]) -> Self {
        let version = files.iter().find_map(|file| {
            let file = path.join(file);
            let text = case::read_file(&file, MOST_BYTES).ok()?;
            Some((version_in(&String::from_utf8_lossy(&text))?, file))
        });
        Self {
            exists: path.is_dir(),
            path,
            source,
            version,
        }
    }
}

/// Folders where the toolkit may be: those that variables name, then the usual ones.
pub(super) fn toolkits() -> Vec<Folder> {
    let info = format!("{}-linux/ascend_toolkit_install.info", env::consts::ARCH);
    let files = [
        info.as_str(),
        "version.cfg",
        "compiler/version.info",
        "runtime/version.info",
        "opp/version.info",
    ];
    let mut places: Vec<(PathBuf, &'static str)> = Vec::new();
    for name in ["ASCEND_HOME_PATH", "ASCEND_TOOLKIT_HOME"] {
        if let Some(value) = env::var_os(name).filter(|value| !value.is_empty()) {
            places.push((value.into(), name));
        }
    }
    let home = env::var_os("HOME").map(|home| Path::new(&home).join("Ascend"));
    for root in [Some(PathBuf::from("/usr/local/Ascend")), home]
        .into_iter()
        .flatten()
    {
        places.extend(TOOLKITS.map(|folder| (root.join(folder), "usual place")));
    }
    places
        .into_iter()
        .map(|(path, source)| Folder::new(path, source, &files))
        .collect()
}

/// The folder of the driver.
pub(super) fn driver() -> Folder {
    match env::var_os("ASCEND_DRIVER_PATH").filter(|value| !value.is_empty()) {
        Some(path) => Folder::new(path.into(), "ASCEND_DRIVER_PATH", &["version.info"]),
        None => Folder::new(
            "/usr/local/Ascend/driver".into(),
            "usual place",
            &["version.info"],
        ),
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

/// The version that a version file of CANN states: the first line `version=...` in any case, or, in a `version.cfg`,
/// the last of `..._running_version=[...:8.1.RC1]`.
fn version_in(text: &str) -> Option<String> {
    let entries = || {
        text.lines()
            .filter_map(|line| line.split_once('='))
            .map(|(key, value)| (key.trim(), value.trim()))
    };
    let plain = entries().find(|(key, _)| key.eq_ignore_ascii_case("version"));
    let running = || entries().find(|(key, _)| key.ends_with("running_version"));
    let (_, value) = plain.or_else(running)?;
    let value = value.trim_matches(['[', ']', '"']);
    let value = value.rsplit(':').next().unwrap_or(value);
    (!value.is_empty()).then(|| value.to_owned())
}

#[cfg(test)]
mod tests {
    use super::version_in;

    #[test]
    fn versions_are_found_in_the_files_that_installers_write() {
        for (text, version) in [
            (
                "package_name=Ascend-cann-toolkit\nversion=8.1.RC1\narch=aarch64\n",
                Some("8.1.RC1"),
            ),
            (
                "Version=24.1.rc2\nascendhal_version=7.35\n",
                Some("24.1.rc2"),
            ),
            (
                "# version: 1.0\nruntime_running_version=[7.7.0.1:8.1.RC1]\nruntime_upgrade_version=[x:y]\n",
                Some("8.1.RC1"),
            ),
            ("version=\n", None),
            ("no entry at all", None),
            ("", None),
        ] {
            assert_eq!(version_in(text).as_deref(), version, "{text:?}");
        }
    }
}
