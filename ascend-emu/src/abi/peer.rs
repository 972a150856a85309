//! Access of devices to each other's memory. In the emulation every device has it; what a program enables is kept and
//! reported.

use super::{not_null, refuse, store};
use crate::lock::Lock;
use crate::runtime::context::{current, device_exists, initialized, known_device};
use crate::status::{FEATURE_UNSUPPORTED, NULL_PARAM, Outcome, acl, failure};
use ascend_sys::bindings::aclError;
use std::collections::BTreeSet;

/// Pairs of a device and another whose memory it may access.
static OPEN: Lock<BTreeSet<(i32, i32)>> = Lock::new(BTreeSet::new());

/// Checks that two devices exist and differ.
fn pair(name: &str, device: i32, peer: i32) -> Outcome<(i32, i32)> {
    if device == peer {
        return Err(failure!(
            NULL_PARAM,
            "{name}: peerDeviceId: given {peer}, the device itself, allowed: another device"
        ));
    }
    device_exists(device)?;
    device_exists(peer)?;
    Ok((device, peer))
}

pub unsafe extern "C" fn aclrtDeviceCanAccessPeer(
    canAccessPeer: *mut i32,
    deviceId: i32,
    peerDeviceId: i32,
) -> aclError {
    acl(|| {
        not_null("canAccessPeer", canAccessPeer)?;
        initialized()?;
        pair("aclrtDeviceCanAccessPeer", deviceId, peerDeviceId)?;
        // SAFETY: the caller's promise.
        unsafe { store("canAccessPeer", canAccessPeer, 1) }
    })
}

pub unsafe extern "C" fn aclrtDeviceEnablePeerAccess(peerDeviceId: i32, flags: u32) -> aclError {
    const NAME: &str = "aclrtDeviceEnablePeerAccess";
    acl(|| {
        if flags != 0 {
            return Err(failure!(
                FEATURE_UNSUPPORTED,
                "{NAME}: flags: given {flags:#x}, allowed: 0"
            ));
        }
        let pair = pair(NAME, current()?.device, peerDeviceId)?;
        OPEN.lock().insert(pair);
        Ok(())
    })
}

pub unsafe extern "C" fn aclrtDeviceDisablePeerAccess(peerDeviceId: i32) -> aclError {
    const NAME: &str = "aclrtDeviceDisablePeerAccess";
    acl(|| {
        let pair = pair(NAME, current()?.device, peerDeviceId)?;
        if OPEN.lock().remove(&pair) {
            return Ok(());
        }
        Err(refuse(
            &format!("{NAME}: peerDeviceId"),
            peerDeviceId,
            "a device that aclrtDeviceEnablePeerAccess named",
        ))
    })
}

pub unsafe extern "C" fn aclrtDevicePeerAccessStatus(
    deviceId: i32,
    peerDeviceId: i32,
    status: *mut i32,
) -> aclError {
    acl(|| {
        not_null("status", status)?;
        known_device(deviceId)?;
        known_device(peerDeviceId)?;
        let open = OPEN.lock().contains(&(deviceId, peerDeviceId));
        // SAFETY: the caller's promise.
        unsafe { store("status", status, i32::from(open)) }
    })
}
