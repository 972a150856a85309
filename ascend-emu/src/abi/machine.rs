//! Functions that depend on the emulated machine: setting its devices, and querying its name and version.
//!
//! Each function exists once for every machine index; the C names are those of index 0, the machine of the environment.

use super::{answer, not_null, refuse, store};
use crate::machines::{MACHINES, MachineIndex, NAMES, behaviour_at, soc_name_at};
use crate::runtime::context;
use crate::status::{Outcome, acl};
use ascend_sys::bindings::{aclCANNPackageName, aclCANNPackageVersion, aclError, aclrtContext};
use std::ffi::{CStr, c_char};

unsafe extern "C" fn set_device<const INDEX: usize>(device_id: i32) -> aclError {
    acl(|| context::set_device(device_id, INDEX))
}

unsafe extern "C" fn reset_device<const INDEX: usize>(device_id: i32) -> aclError {
    acl(|| context::reset_device(device_id, INDEX, false))
}

unsafe extern "C" fn reset_device_force<const INDEX: usize>(device_id: i32) -> aclError {
    acl(|| context::reset_device(device_id, INDEX, true))
}

unsafe extern "C" fn create_context<const INDEX: usize>(context: *mut aclrtContext, device_id: i32) -> aclError {
    answer!(context, {
        let id = context::create(device_id, INDEX)?;
        id.raw()
    })
}

unsafe extern "C" fn soc_name<const NAME: usize>() -> *const c_char {
    soc_name_at(NAME).as_ptr()
}

/// Copies a text into a C array, which ends in NUL.
fn fill<const N: usize>(array: &mut [c_char; N], text: &str) {
    *array = [0; N];
    for (to, byte) in array.iter_mut().take(N - 1).zip(text.bytes()) {
        *to = byte as c_char;
    }
}

fn version_text(index: usize) -> String {
    let parts = behaviour_at(index).cann_version();
    parts.map(|part| part.to_string()).join(".")
}

unsafe extern "C" fn cann_version<const INDEX: usize>(
    name: aclCANNPackageName,
    version: *mut aclCANNPackageVersion,
) -> aclError {
    acl(|| {
        if name.0 > aclCANNPackageName::ACL_PKG_NAME_DRIVER.0 {
            return Err(refuse("name", name.0, "an aclCANNPackageName, 0 to 7"));
        }
        let mut filled = aclCANNPackageVersion {
            version: [0; 128],
            majorVersion: [0; 64],
            minorVersion: [0; 64],
            releaseVersion: [0; 64],
            patchVersion: [0; 64],
            reserved: [0; 128],
        };
        let parts = behaviour_at(INDEX).cann_version();
        let [major, minor, patch] = parts.map(|part| part.to_string());
        fill(&mut filled.version, &version_text(INDEX));
        fill(&mut filled.majorVersion, &major);
        fill(&mut filled.minorVersion, &minor);
        fill(&mut filled.patchVersion, &patch);
        // SAFETY: the caller's promise.
        unsafe { store("version", version, filled) }
    })
}

/// Checks the name of a package: all have the machine's version.
///
/// # Safety
///
/// `name` is null or a NUL-terminated text.
unsafe fn package(name: *const c_char) -> Outcome {
    not_null("pkgName", name)?;
    // SAFETY: not null, so a NUL-terminated text.
    let text = unsafe { CStr::from_ptr(name) };
    if text.is_empty() {
        return Err(refuse("pkgName", "an empty text", "the name of a package"));
    }
    Ok(())
}

unsafe extern "C" fn version_string<const INDEX: usize>(name: *mut c_char, version: *mut c_char) -> aclError {
    acl(|| {
        // SAFETY: the caller's promise.
        unsafe { package(name) }?;
        not_null("versionStr", version)?;
        let text = version_text(INDEX);
        for (place, byte) in text.bytes().chain([0]).enumerate() {
            // SAFETY: the array has ACL_PKG_VERSION_MAX_SIZE (128) characters, the text is far shorter.
            unsafe { version.add(place).write(byte as c_char) };
        }
        Ok(())
    })
}

unsafe extern "C" fn version_number<const INDEX: usize>(name: *mut c_char, version: *mut i32) -> aclError {
    acl(|| {
        // SAFETY: the caller's promise.
        unsafe { package(name) }?;
        let [major, minor, patch] = behaviour_at(INDEX).cann_version().map(i32::from);
        let number = (major * 100 + minor) * 100 + patch;
        // SAFETY: the caller's promise.
        unsafe { store("versionNum", version, number) }
    })
}

macro_rules! of_machine {
    ($($name:ident = $generic:ident ( $($argument:ident: $type:ty),* ) -> $result:ty;)*) => {
        /// The functions of one machine.
        struct Functions {
            $($name: unsafe extern "C" fn($($type),*) -> $result,)*
        }

        impl Functions {
            const fn of<const INDEX: usize>() -> Self {
                Functions { $($name: of_index::$name::<INDEX>,)* }
            }
        }

        /// The functions of one machine, traced.
        mod of_index {
            use super::*;

            crate::trace::traced! {
                $(pub(super) fn $name<const INDEX: usize>($($argument: $type),*) -> $result
                    = super::$generic::<INDEX>;)*
            }
        }

        $(
            pub unsafe extern "C" fn $name($($argument: $type),*) -> $result {
                // SAFETY: the caller's promise is that of the function for index 0.
                unsafe { $generic::<0>($($argument),*) }
            }
        )*

        fn fill_in_behaviour(table: &mut ascend_sys::Functions, index: usize) {
            if let Some(functions) = EACH.get(index) {
                $(table.$name = Some(functions.$name);)*
            }
        }
    };
}

of_machine! {
    aclrtSetDevice = set_device(deviceId: i32) -> aclError;
    aclrtResetDevice = reset_device(deviceId: i32) -> aclError;
    aclrtResetDeviceForce = reset_device_force(deviceId: i32) -> aclError;
    aclrtCreateContext = create_context(context: *mut aclrtContext, deviceId: i32) -> aclError;
    aclsysGetCANNVersion = cann_version(name: aclCANNPackageName, version: *mut aclCANNPackageVersion) -> aclError;
    aclsysGetVersionStr = version_string(pkgName: *mut c_char, versionStr: *mut c_char) -> aclError;
    aclsysGetVersionNum = version_number(pkgName: *mut c_char, versionNum: *mut i32) -> aclError;
}

/// The name of the chip of the environment's machine.
///
/// # Safety
///
/// Safe to call at any time; `unsafe` as each function of the C ABI.
pub unsafe extern "C" fn aclrtGetSocName() -> *const c_char {
    // SAFETY: the function has no precondition.
    unsafe { soc_name::<0>() }
}

/// Writes the functions of the machine with an index to a table.
pub(crate) fn fill_in(table: &mut ascend_sys::Functions, index: MachineIndex) {
    fill_in_behaviour(table, index.behaviour);
    if let Some(name) = EACH_NAME.as_flattened().get(index.name) {
        table.aclrtGetSocName = Some(*name);
    }
}

macro_rules! each {
    ($($index:literal)*) => { [$(Functions::of::<$index>()),*] };
}

static EACH: [Functions; MACHINES] = each! {
    0 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19 20 21 22 23 24 25 26 27 28 29 30 31
};

type Name = unsafe extern "C" fn() -> *const c_char;

/// The function of each name, traced.
mod of_name {
    use std::ffi::c_char;

    crate::trace::traced! {
        pub(super) fn aclrtGetSocName<const NAME: usize>() -> *const c_char = super::soc_name::<NAME>;
    }
}

macro_rules! each_name {
    (row $row:literal: $($column:literal)*) => { [$(of_name::aclrtGetSocName::<{ $row * 16 + $column }>),*] };
    ($($row:literal)*) => { [$(each_name!(row $row: 0 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15)),*] };
}

static EACH_NAME: [[Name; 16]; NAMES / 16] = each_name! { 0 1 2 3 4 5 6 7 };
