//! Limits of the cores that operators may use on a device, in a stream, from a thread. The emulator keeps and reports
//! the numbers; it computes on its own threads.

use super::context;
use super::core_limits::{CoreKind, CoreLimits};
use super::stream::Stream;
use crate::lock::Lock;
use crate::status::Outcome;
use std::cell::RefCell;
use std::collections::BTreeMap;
use std::sync::{Arc, Weak};

/// The limits of each device.
static DEVICES: Lock<BTreeMap<i32, CoreLimits>> = Lock::new(BTreeMap::new());

thread_local! {
    /// The stream whose limits apply to the thread.
    static USED: RefCell<Weak<Stream>> = const { RefCell::new(Weak::new()) };
}

/// `aclrtSetDeviceResLimit`.
pub(crate) fn limit_device(name: &str, device: i32, kind: CoreKind, value: u32) -> Outcome {
    DEVICES
        .lock()
        .entry(device)
        .or_default()
        .set(name, context::chip(), kind, value)
}

/// `aclrtResetDeviceResLimit`.
pub(crate) fn reset_device(device: i32) {
    DEVICES.lock().remove(&device);
}

/// The number of cores of a kind that operators may use on a device.
pub(crate) fn of_device(device: i32, kind: CoreKind) -> u32 {
    let limits = DEVICES.lock().get(&device).copied();
    limits
        .and_then(|limits| limits.get(kind))
        .unwrap_or_else(|| kind.of(context::chip()))
}

/// `aclrtSetStreamResLimit`.
pub(crate) fn limit_stream(name: &str, stream: &Stream, kind: CoreKind, value: u32) -> Outcome {
    stream
        .settings
        .limits
        .lock()
        .set(name, context::chip(), kind, value)
}

/// `aclrtResetStreamResLimit`.
pub(crate) fn reset_stream(stream: &Stream) {
    *stream.settings.limits.lock() = CoreLimits::NONE;
}

/// The number of cores of a kind that operators may use in a stream of a device.
pub(crate) fn of_stream(stream: &Stream, device: i32, kind: CoreKind) -> u32 {
    let limits = *stream.settings.limits.lock();
    limits.get(kind).unwrap_or_else(|| of_device(device, kind))
}

/// `aclrtUseStreamResInCurrentThread`.
pub(crate) fn use_stream(stream: &Arc<Stream>) {
    USED.with_borrow_mut(|used| *used = Arc::downgrade(stream));
}

/// `aclrtUnuseStreamResInCurrentThread`. Does nothing if the limits of another stream apply to the thread.
pub(crate) fn unuse_stream(stream: &Arc<Stream>) {
    USED.with_borrow_mut(|used| {
        if used.ptr_eq(&Arc::downgrade(stream)) {
            *used = Weak::new();
        }
    });
}

/// The number of cores of a kind that operators of the calling thread may use on a device.
pub(crate) fn of_thread(device: i32, kind: CoreKind) -> u32 {
    match USED.with_borrow(Weak::upgrade) {
        Some(stream) => of_stream(&stream, device, kind),
        None => of_device(device, kind),
    }
}
