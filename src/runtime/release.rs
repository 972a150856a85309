//! Which release of CANN a runtime is of.

use std::ffi::CStr;

use ascend_spec::{Cann, Release};
use ascend_sys::{Api, bindings as sys};

/// The packages that say which release it is, those that everybody has first.
const PACKAGES: [sys::aclCANNPackageName; 4] = [
    sys::aclCANNPackageName::ACL_PKG_NAME_CANN,
    sys::aclCANNPackageName::ACL_PKG_NAME_TOOLKIT,
    sys::aclCANNPackageName::ACL_PKG_NAME_OPP,
    sys::aclCANNPackageName::ACL_PKG_NAME_RUNTIME,
];

/// The release whose contract holds for the functions of a table: that of the version that CANN states, and where it
/// states none that is known, the newest.
pub(super) fn of(api: &Api) -> Release {
    let stated = PACKAGES.into_iter().find_map(|package| {
        let version = stated(api, package)?;
        Cann::of_version(&version)
    });
    stated.unwrap_or(Release::Newer(Cann::NEWEST))
}

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
