//! Limits: of the cores that operators may use on a device, in a stream, from a thread; of the time that operators run
//! and streams wait.

use super::{answer, store};
use crate::lock::Lock;
use crate::runtime::context::{chip, current, known_device, stream, usable};
use crate::runtime::core_limits::{self as limits, CoreKind, CoreLimits};
use crate::runtime::event::limit_waits;
use crate::status::acl;
use ascend_sys::bindings::{aclError, aclrtDevResLimitType, aclrtStream};

pub unsafe extern "C" fn aclrtGetDeviceResLimit(
    deviceId: i32,
    type_: aclrtDevResLimitType,
    value: *mut u32,
) -> aclError {
    answer!(value, {
        let cores = CoreKind::new("aclrtGetDeviceResLimit", type_)?;
        known_device(deviceId)?;
        limits::of_device((deviceId, chip()), cores)
    })
}

pub unsafe extern "C" fn aclrtSetDeviceResLimit(deviceId: i32, type_: aclrtDevResLimitType, value: u32) -> aclError {
    const NAME: &str = "aclrtSetDeviceResLimit";
    acl(|| {
        let cores = CoreKind::new(NAME, type_)?;
        known_device(deviceId)?;
        limits::limit_device(NAME, (deviceId, chip()), cores, value)
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
    answer!(value, {
        let cores = CoreKind::new(NAME, type_)?;
        let stream = self::stream(NAME, stream)?;
        limits::of_stream(&stream.settings.limits, (current()?.device, chip()), cores)
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
        let stream = self::stream(NAME, stream)?;
        let mut limits = stream.settings.limits.lock();
        limits.set(NAME, chip(), cores, value)
    })
}

pub unsafe extern "C" fn aclrtResetStreamResLimit(stream: aclrtStream) -> aclError {
    acl(|| {
        let stream = self::stream("aclrtResetStreamResLimit", stream)?;
        *stream.settings.limits.lock() = CoreLimits::default();
        Ok(())
    })
}

pub unsafe extern "C" fn aclrtUseStreamResInCurrentThread(stream: aclrtStream) -> aclError {
    acl(|| {
        limits::use_stream(&self::stream("aclrtUseStreamResInCurrentThread", stream)?.settings.limits);
        Ok(())
    })
}

pub unsafe extern "C" fn aclrtUnuseStreamResInCurrentThread(stream: aclrtStream) -> aclError {
    acl(|| {
        limits::unuse_stream(&self::stream("aclrtUnuseStreamResInCurrentThread", stream)?.settings.limits);
        Ok(())
    })
}

pub unsafe extern "C" fn aclrtGetResInCurrentThread(type_: aclrtDevResLimitType, value: *mut u32) -> aclError {
    answer!(value, {
        let cores = CoreKind::new("aclrtGetResInCurrentThread", type_)?;
        limits::of_thread((current()?.device, chip()), cores)
    })
}

/// Microseconds of the unit in which limits are counted, that of products with 32-bit counters of nanoseconds.
const UNIT: u64 = (1 << 32) / 1000;

/// Largest multiple of the unit.
const MOST: u64 = 254;

/// Microseconds that an operator may run. The emulator reports the limit and does not enforce it.
static LIMIT: Lock<u64> = Lock::new(UNIT * MOST);

/// Sets the limit, rounded up to whole units (0 is the largest limit), and returns it.
fn set(microseconds: u64) -> u64 {
    let units = match microseconds {
        0 => MOST,
        some => some.div_ceil(UNIT).min(MOST),
    };
    *LIMIT.lock() = units * UNIT;
    units * UNIT
}

pub unsafe extern "C" fn aclrtSetOpExecuteTimeOut(timeout: u32) -> aclError {
    acl(|| {
        usable()?;
        set(u64::from(timeout) * 1_000_000);
        Ok(())
    })
}

pub unsafe extern "C" fn aclrtSetOpExecuteTimeOutV2(timeout: u64, actualTimeout: *mut u64) -> aclError {
    answer!(actualTimeout, {
        usable()?;
        set(timeout)
    })
}

pub unsafe extern "C" fn aclrtGetOpTimeOutInterval(interval: *mut u64) -> aclError {
    acl(|| {
        usable()?;
        // SAFETY: the caller's promise.
        unsafe { store("interval", interval, UNIT) }
    })
}

pub unsafe extern "C" fn aclrtGetOpExecuteTimeout(timeoutMs: *mut u32) -> aclError {
    acl(|| {
        usable()?;
        let milliseconds = u32::try_from(*LIMIT.lock() / 1000).unwrap_or(u32::MAX);
        // SAFETY: the caller's promise.
        unsafe { store("timeoutMs", timeoutMs, milliseconds) }
    })
}

pub unsafe extern "C" fn aclrtSetOpWaitTimeout(timeout: u32) -> aclError {
    acl(|| {
        usable()?;
        limit_waits(timeout);
        Ok(())
    })
}
