//! Limits of the time that operators run and streams wait.

use super::store;
use crate::lock::Lock;
use crate::runtime::context::initialized;
use crate::runtime::event::limit_waits;
use crate::status::acl;
use ascend_sys::bindings::aclError;

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
        initialized()?;
        set(u64::from(timeout) * 1_000_000);
        Ok(())
    })
}

pub unsafe extern "C" fn aclrtSetOpExecuteTimeOutV2(
    timeout: u64,
    actualTimeout: *mut u64,
) -> aclError {
    acl(|| {
        super::not_null("actualTimeout", actualTimeout)?;
        initialized()?;
        // SAFETY: the caller's promise.
        unsafe { store("actualTimeout", actualTimeout, set(timeout)) }
    })
}

pub unsafe extern "C" fn aclrtGetOpTimeOutInterval(interval: *mut u64) -> aclError {
    acl(|| {
        initialized()?;
        // SAFETY: the caller's promise.
        unsafe { store("interval", interval, UNIT) }
    })
}

pub unsafe extern "C" fn aclrtGetOpExecuteTimeout(timeoutMs: *mut u32) -> aclError {
    acl(|| {
        initialized()?;
        let milliseconds = u32::try_from(*LIMIT.lock() / 1000).unwrap_or(u32::MAX);
        // SAFETY: the caller's promise.
        unsafe { store("timeoutMs", timeoutMs, milliseconds) }
    })
}

pub unsafe extern "C" fn aclrtSetOpWaitTimeout(timeout: u32) -> aclError {
    acl(|| {
        initialized()?;
        limit_waits(timeout);
        Ok(())
    })
}
