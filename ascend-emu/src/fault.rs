//! Faults of a device.

use crate::status::Failure;

/// The failure of a device operation, which its stream keeps until the next synchronisation.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Fault {
    pub code: i32,
    pub message: String,
}

impl From<Fault> for Failure {
    fn from(fault: Fault) -> Self {
        Failure::new(fault.code, fault.message)
    }
}

impl From<Failure> for Fault {
    fn from(failure: Failure) -> Self {
        Fault {
            code: failure.code,
            message: failure.message.into_owned(),
        }
    }
}
