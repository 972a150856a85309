//! The release of CANN that a runtime has, and how it is known.

use std::env;
use std::ffi::CStr;
use std::fmt;
use std::fs;
use std::io::Read;
use std::path::{Path, PathBuf};

use ascend_spec::{Cann, Release};
use ascend_sys::{Api, Origin, bindings as sys};

/// The release of CANN that calls are checked for, and why it is this one.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Installed {
    /// The contract that applies.
    pub release: Release,
    /// The version that CANN states, if it states one.
    pub version: Option<String>,
    /// Where the version was found.
    pub source: VersionSource,
}

/// Where the version of CANN was found.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum VersionSource {
    /// `aclsysGetCANNVersion` returned it.
    Call,
    /// A file of the toolkit states it.
    File(PathBuf),
    /// It was not found.
    Nothing,
}

impl Installed {
    /// Finds the version by the functions of a table, or else in the files beside the libraries that they come from.
    /// Where neither states one, the newest known release stands in.
    pub(super) fn of(api: &Api) -> Self {
        let stated = PACKAGES.into_iter().find_map(|package| stated(api, package));
        let called = stated.map(|version| (version, VersionSource::Call));
        let found = called.or_else(|| {
            let (version, file) = folders(api.origin()).find_map(|at| toolkit_version(&at))?;
            Some((version, VersionSource::File(file)))
        });
        let (version, source) = match found {
            Some((version, source)) => (Some(version), source),
            None => (None, VersionSource::Nothing),
        };
        Self { release: release_of(version.as_deref()), version, source }
    }

    /// Whether the contract is that of the installed release itself.
    pub fn is_known(&self) -> bool {
        let known = |version| matches!(Cann::of_version(version), Some(Release::Known(_)));
        self.version.as_deref().is_some_and(known)
    }
}

impl fmt::Display for Installed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "CANN {}", self.release.cann())?;
        if !self.is_known() {
            f.write_str(", the nearest release whose contract is known")?;
        }
        if self.release.cann().is_preview() {
            f.write_str(", a release that was not out when its contract was read and may differ from it")?;
        }
        let version = self.version.as_deref().unwrap_or("nothing");
        match &self.source {
            VersionSource::Call => write!(f, ": aclsysGetCANNVersion says {version}"),
            VersionSource::File(file) => write!(f, ": {} says {version}", file.display()),
            VersionSource::Nothing => {
                f.write_str(": neither aclsysGetCANNVersion nor a version file says which is installed")
            }
        }
    }
}

/// The contract for a version. For an unknown one it is the oldest or the newest contract, whichever is nearer.
fn release_of(version: Option<&str>) -> Release {
    let newest = Release::Newer(Cann::NEWEST);
    let Some(version) = version else {
        return newest;
    };
    Cann::of_version(version).unwrap_or_else(|| {
        let major = version.trim().split('.').next().map(str::parse::<u32>);
        match (major, Cann::ALL.first()) {
            (Some(Ok(..9)), Some(oldest)) => Release::Known(*oldest),
            _ => newest,
        }
    })
}

/// The packages that state which release it is, those first that every installation has.
const PACKAGES: [sys::aclCANNPackageName; 4] = [
    sys::aclCANNPackageName::ACL_PKG_NAME_CANN,
    sys::aclCANNPackageName::ACL_PKG_NAME_TOOLKIT,
    sys::aclCANNPackageName::ACL_PKG_NAME_OPP,
    sys::aclCANNPackageName::ACL_PKG_NAME_RUNTIME,
];

/// The version that CANN states of one of its packages; `None` if that is not installed.
fn stated(api: &Api, package: sys::aclCANNPackageName) -> Option<String> {
    let function = api.aclsysGetCANNVersion().ok()?;
    let mut version = sys::aclCANNPackageVersion {
        version: [0; 128],
        majorVersion: [0; 64],
        minorVersion: [0; 64],
        releaseVersion: [0; 64],
        patchVersion: [0; 64],
        reserved: [0; 128],
    };
    // SAFETY: `version` is a place for the result.
    let status = unsafe { function(package, &mut version) };
    if status != sys::ACL_SUCCESS {
        return None;
    }
    let text = version.version.map(|c| c.to_ne_bytes()[0]);
    let text = CStr::from_bytes_until_nul(&text).ok()?.to_str().ok()?;
    (!text.is_empty()).then(|| text.to_owned())
}

/// The toolkits that functions may come from: around the libraries that were opened, then those that variables name.
fn folders(origin: &Origin) -> impl Iterator<Item = PathBuf> {
    let around = origin.libraries();
    let around = around.filter_map(|(_, path)| Some(path.parent()?.parent()?.to_owned()));
    let named = ["ASCEND_HOME_PATH", "ASCEND_TOOLKIT_HOME"].map(env::var_os);
    let named = named.into_iter().flatten().filter(|value| !value.is_empty());
    // What is installed does not matter for functions that a program provides or emulates.
    let installed = !matches!(origin, Origin::Functions(_));
    around.chain(named.filter(move |_| installed).map(PathBuf::from))
}

/// The version that a file in the folder of a toolkit states, and that file.
pub fn toolkit_version(folder: &Path) -> Option<(String, PathBuf)> {
    let info = format!("{}-linux/ascend_toolkit_install.info", env::consts::ARCH);
    let files = [info.as_str(), "version.cfg", "compiler/version.info", "runtime/version.info", "opp/version.info"];
    files.into_iter().find_map(|file| file_version(&folder.join(file)))
}

/// Most bytes of a version file that are read.
const MOST_BYTES: u64 = 1 << 20;

/// The version that a version file of CANN states, and the file.
pub fn file_version(file: &Path) -> Option<(String, PathBuf)> {
    // A pipe or a device has no end.
    let regular = fs::metadata(file).ok()?.is_file();
    let opened = fs::File::open(file).ok().filter(|_| regular)?;
    let mut text = Vec::new();
    opened.take(MOST_BYTES).read_to_end(&mut text).ok()?;
    let version = version_in(&String::from_utf8_lossy(&text))?;
    Some((version, file.to_owned()))
}

/// The version that a version file of CANN states: the first line `version=...` in any case, or, in a `version.cfg`,
/// the last of `..._running_version=[...:8.1.RC1]`.
fn version_in(text: &str) -> Option<String> {
    let entries =
        || text.lines().filter_map(|line| line.split_once('=')).map(|(key, value)| (key.trim(), value.trim()));
    let plain = entries().find(|(key, _)| key.eq_ignore_ascii_case("version"));
    let running = || entries().find(|(key, _)| key.ends_with("running_version"));
    let (_, value) = plain.or_else(running)?;
    let value = value.trim_matches(['[', ']', '"']);
    let value = value.rsplit(':').next().unwrap_or(value);
    (!value.is_empty()).then(|| value.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_are_found_in_the_files_that_installers_write() {
        for (text, version) in [
            ("package_name=Ascend-cann-toolkit\nversion=8.1.RC1\narch=aarch64\n", Some("8.1.RC1")),
            ("Version=24.1.rc2\nascendhal_version=7.35\n", Some("24.1.rc2")),
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

    #[test]
    fn unknown_versions_have_the_nearest_known_contract() {
        for (version, cann, known) in [
            (Some("8.5.0"), Cann::V8_5, true),
            (Some("9.2.0"), Cann::V9_2, true),
            (Some("9.4.0"), Cann::NEWEST, false),
            (Some("8.0.RC3"), Cann::V8_1, false),
            (Some("rolling"), Cann::NEWEST, false),
            (None, Cann::NEWEST, false),
        ] {
            let installed = Installed {
                release: release_of(version),
                version: version.map(str::to_owned),
                source: VersionSource::Call,
            };
            assert_eq!(installed.release.cann(), cann, "{version:?}");
            assert_eq!(installed.is_known(), known, "{version:?}");
            let text = installed.to_string();
            assert_eq!(text.contains("nearest"), !known, "{text}");
            assert_eq!(text.contains("preview"), cann == Cann::V9_2, "{text}");
        }
    }
}
