//! Limits of the cores that operators may use on a device, in a stream, from a thread. The emulator keeps and reports
//! the numbers; it computes on its own threads.

use crate::lock::Lock;
use crate::machine::Chip;
use crate::status::{Outcome, PARAM_INVALID, failure};
use ascend_sys::bindings::aclrtDevResLimitType;
use std::cell::RefCell;
use std::collections::BTreeMap;
use std::sync::{Arc, Weak};

/// A kind of core.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum CoreKind {
    Cube,
    Vector,
}

impl CoreKind {
    pub(crate) fn new(name: &str, kind: aclrtDevResLimitType) -> Outcome<Self> {
        match kind {
            aclrtDevResLimitType::ACL_RT_DEV_RES_CUBE_CORE => Ok(CoreKind::Cube),
            aclrtDevResLimitType::ACL_RT_DEV_RES_VECTOR_CORE => Ok(CoreKind::Vector),
            aclrtDevResLimitType(other) => Err(failure!(
                PARAM_INVALID,
                "{name}: type: given {other}, allowed: ACL_RT_DEV_RES_CUBE_CORE (0), ACL_RT_DEV_RES_VECTOR_CORE (1)"
            )),
        }
    }

    /// The number of cores of this kind that a chip has.
    fn of(self, chip: Chip) -> u32 {
        match self {
            CoreKind::Cube => chip.cube_cores,
            CoreKind::Vector => chip.vector_cores,
        }
    }
}

/// The limits that a program has set.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct CoreLimits {
    cube: Option<u32>,
    vector: Option<u32>,
}

impl CoreLimits {
    fn get(self, kind: CoreKind) -> Option<u32> {
        match kind {
            CoreKind::Cube => self.cube,
            CoreKind::Vector => self.vector,
        }
    }

    /// Sets a limit, which must be at most the chip's number of cores.
    pub(crate) fn set(&mut self, name: &str, chip: Chip, kind: CoreKind, value: u32) -> Outcome {
        let most = kind.of(chip);
        if value > most {
            return Err(failure!(
                PARAM_INVALID,
                "{name}: value: given {value}, allowed: 0 to {most}, the cores of the device"
            ));
        }
        match kind {
            CoreKind::Cube => self.cube = Some(value),
            CoreKind::Vector => self.vector = Some(value),
        }
        Ok(())
    }
}

/// The limits of each device.
static DEVICES: Lock<BTreeMap<i32, CoreLimits>> = Lock::new(BTreeMap::new());

thread_local! {
    /// The limits of the stream that apply to the thread.
    static USED: RefCell<Weak<Lock<CoreLimits>>> = const { RefCell::new(Weak::new()) };
}

/// `aclrtSetDeviceResLimit`, for a device with this chip.
pub(crate) fn limit_device(name: &str, (device, chip): (i32, Chip), kind: CoreKind, value: u32) -> Outcome {
    let mut devices = DEVICES.lock();
    devices.entry(device).or_default().set(name, chip, kind, value)
}

/// `aclrtResetDeviceResLimit`.
pub(crate) fn reset_device(device: i32) {
    DEVICES.lock().remove(&device);
}

/// The number of cores of a kind that operators may use on a device with this chip.
pub(crate) fn of_device((device, chip): (i32, Chip), kind: CoreKind) -> u32 {
    let limits = DEVICES.lock().get(&device).copied();
    let limit = limits.and_then(|limits| limits.get(kind));
    limit.unwrap_or_else(|| kind.of(chip))
}

/// The number of cores of a kind that operators may use in a stream with these limits, of a device with this chip.
pub(crate) fn of_stream(limits: &Lock<CoreLimits>, device: (i32, Chip), kind: CoreKind) -> u32 {
    let limits = *limits.lock();
    limits.get(kind).unwrap_or_else(|| of_device(device, kind))
}

/// `aclrtUseStreamResInCurrentThread`, for a stream with these limits.
pub(crate) fn use_stream(limits: &Arc<Lock<CoreLimits>>) {
    USED.with_borrow_mut(|used| *used = Arc::downgrade(limits));
}

/// `aclrtUnuseStreamResInCurrentThread`. Does nothing if the limits of another stream apply to the thread.
pub(crate) fn unuse_stream(limits: &Arc<Lock<CoreLimits>>) {
    USED.with_borrow_mut(|used| {
        if used.ptr_eq(&Arc::downgrade(limits)) {
            *used = Weak::new();
        }
    });
}

/// The number of cores of a kind that operators of the calling thread may use on a device with this chip.
pub(crate) fn of_thread(device: (i32, Chip), kind: CoreKind) -> u32 {
    match USED.with_borrow(Weak::upgrade) {
        Some(limits) => of_stream(&limits, device, kind),
        None => of_device(device, kind),
    }
}
