//! Limits of the cores that operators may use on a device, in a stream, from a thread.

use super::{not_null, store};
use crate::runtime::context::{current, known_device, stream};
use crate::runtime::core_limits::CoreKind;
use crate::runtime::resource_limits as limits;
use crate::status::acl;
use ascend_sys::bindings::{aclError, aclrtDevResLimitType, aclrtStream};

pub unsafe extern "C" fn aclrtGetDeviceResLimit(
    deviceId: i32,
    type_: aclrtDevResLimitType,
    value: *mut u32,
) -> aclError {
    acl(|| {
        not_null("value", value)?;
        let cores = CoreKind::new("aclrtGetDeviceResLimit", type_)?;
        known_device(deviceId)?;
        // SAFETY: the caller's promise.
        unsafe { store("value", value, limits::of_device(deviceId, cores)) }
    })
}

pub unsafe extern "C" fn aclrtSetDeviceResLimit(
    deviceId: i32,
    type_: aclrtDevResLimitType,
    value: u32,
) -> aclError {
    const NAME: &str = "aclrtSetDeviceResLimit";
    acl(|| {
        let cores = CoreKind::new(NAME, type_)?;
        known_device(deviceId)?;
        limits::limit_device(NAME, deviceId, cores, value)
    })
}

pub unsafe extern "C" fn aclrtResetDeviceResLimit(deviceId: i32) -> aclError {
    acl(|| {
        known_device(deviceId)?;
        limits::reset_device(deviceId);
        Ok(())
    })
}

pub unsafe extern "C" fn aclrtGetStreamResLimit(
    stream: aclrtStream,
    type_: aclrtDevResLimitType,
    value: *mut u32,
) -> aclError {
    const NAME: &str = "aclrtGetStreamResLimit";
    acl(|| {
        not_null("value", value)?;
        let cores = CoreKind::new(NAME, type_)?;
        let stream = self::stream(NAME, stream)?;
        let cores = limits::of_stream(&stream, current()?.device, cores);
        // SAFETY: the caller's promise.
        unsafe { store("value", value, cores) }
    })
}

pub unsafe extern "C" fn aclrtSetStreamResLimit(
    stream: aclrtStream,
    type_: aclrtDevResLimitType,
    value: u32,
) -> aclError {
    const NAME: &str = "aclrtSetStreamResLimit";
    acl(|| {
        let cores = CoreKind::new(NAME, type_)?;
        limits::limit_stream(NAME, &*self::stream(NAME, stream)?, cores, value)
    })
}

pub unsafe extern "C" fn aclrtResetStreamResLimit(stream: aclrtStream) -> aclError {
    acl(|| {
        limits::reset_stream(&*self::stream("aclrtResetStreamResLimit", stream)?);
        Ok(())
    })
}

pub unsafe extern "C" fn aclrtUseStreamResInCurrentThread(stream: aclrtStream) -> aclError {
    acl(|| {
        limits::use_stream(&self::stream("aclrtUseStreamResInCurrentThread", stream)?);
        Ok(())
    })
}

pub unsafe extern "C" fn aclrtUnuseStreamResInCurrentThread(stream: aclrtStream) -> aclError {
    acl(|| {
        limits::unuse_stream(&self::stream("aclrtUnuseStreamResInCurrentThread", stream)?);
        Ok(())
    })
}

pub unsafe extern "C" fn aclrtGetResInCurrentThread(
    type_: aclrtDevResLimitType,
    value: *mut u32,
) -> aclError {
    acl(|| {
        not_null("value", value)?;
        let cores = CoreKind::new("aclrtGetResInCurrentThread", type_)?;
        let cores = limits::of_thread(current()?.device, cores);
        // SAFETY: the caller's promise.
        unsafe { store("value", value, cores) }
    })
}
