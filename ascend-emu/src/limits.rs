//! How many cores a program lets operators use. The emulator keeps the numbers and tells them; it computes on its own threads.

use crate::chip::Chip;
use crate::lock::Lock;
use crate::status::{Outcome, PARAM_INVALID, failure};
use crate::stream::Stream;
use ascend_sys::bindings::aclrtDevResLimitType;
use std::cell::RefCell;
use std::collections::BTreeMap;
use std::sync::{Arc, Weak};

/// Cores of a kind.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Cores {
    Cube,
    Vector,
}

impl Cores {
    pub(crate) fn new(name: &str, given: aclrtDevResLimitType) -> Outcome<Self> {
        match given {
            aclrtDevResLimitType::ACL_RT_DEV_RES_CUBE_CORE => Ok(Cores::Cube),
            aclrtDevResLimitType::ACL_RT_DEV_RES_VECTOR_CORE => Ok(Cores::Vector),
            aclrtDevResLimitType(other) => Err(failure!(
                PARAM_INVALID,
                "{name}: type: given {other}, allowed: ACL_RT_DEV_RES_CUBE_CORE (0), ACL_RT_DEV_RES_VECTOR_CORE (1)"
            )),
        }
    }

    /// How many the chip has.
    fn of_chip(self) -> u32 {
        let chip = Chip::current();
        match self {
            Cores::Cube => chip.cube_cores,
            Cores::Vector => chip.vector_cores,
        }
    }
}

/// Limits that a program has set.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Limits {
    cube: Option<u32>,
    vector: Option<u32>,
}

impl Limits {
    const NONE: Limits = Limits {
        cube: None,
        vector: None,
    };

    fn get(self, cores: Cores) -> Option<u32> {
        match cores {
            Cores::Cube => self.cube,
            Cores::Vector => self.vector,
        }
    }

    fn set(&mut self, name: &str, cores: Cores, value: u32) -> Outcome {
        let most = cores.of_chip();
        if value > most {
            return Err(failure!(
                PARAM_INVALID,
                "{name}: value: given {value}, allowed: 0 to {most}, the cores of the device"
            ));
        }
        match cores {
            Cores::Cube => self.cube = Some(value),
            Cores::Vector => self.vector = Some(value),
        }
        Ok(())
    }
}

/// Limits of devices.
static DEVICES: Lock<BTreeMap<i32, Limits>> = Lock::new(BTreeMap::new());

thread_local! {
    /// The stream whose limits the thread goes by.
    static USED: RefCell<Weak<Stream>> = const { RefCell::new(Weak::new()) };
}

/// `aclrtSetDeviceResLimit`.
pub(crate) fn limit_device(name: &str, device: i32, cores: Cores, value: u32) -> Outcome {
    DEVICES
        .lock()
        .entry(device)
        .or_default()
        .set(name, cores, value)
}

/// `aclrtResetDeviceResLimit`.
pub(crate) fn reset_device(device: i32) {
    DEVICES.lock().remove(&device);
}

/// Cores of a device that may be used.
pub(crate) fn of_device(device: i32, cores: Cores) -> u32 {
    let limits = DEVICES.lock().get(&device).copied();
    limits
        .and_then(|limits| limits.get(cores))
        .unwrap_or_else(|| cores.of_chip())
}

/// `aclrtSetStreamResLimit`.
pub(crate) fn limit_stream(name: &str, stream: &Stream, cores: Cores, value: u32) -> Outcome {
    stream.settings.limits.lock().set(name, cores, value)
}

/// `aclrtResetStreamResLimit`.
pub(crate) fn reset_stream(stream: &Stream) {
    *stream.settings.limits.lock() = Limits::NONE;
}

/// Cores that a stream of a device may use.
pub(crate) fn of_stream(stream: &Stream, device: i32, cores: Cores) -> u32 {
    let limits = *stream.settings.limits.lock();
    limits
        .get(cores)
        .unwrap_or_else(|| of_device(device, cores))
}

/// `aclrtUseStreamResInCurrentThread`.
pub(crate) fn use_stream(stream: &Arc<Stream>) {
    USED.with_borrow_mut(|used| *used = Arc::downgrade(stream));
}

/// `aclrtUnuseStreamResInCurrentThread`: of another stream than the thread goes by, it does nothing.
pub(crate) fn unuse_stream(stream: &Arc<Stream>) {
    USED.with_borrow_mut(|used| {
        if used.ptr_eq(&Arc::downgrade(stream)) {
            *used = Weak::new();
        }
    });
}

/// Cores that the calling thread may use of a device.
pub(crate) fn of_thread(device: i32, cores: Cores) -> u32 {
    match USED.with_borrow(Weak::upgrade) {
        Some(stream) => of_stream(&stream, device, cores),
        None => of_device(device, cores),
    }
}
