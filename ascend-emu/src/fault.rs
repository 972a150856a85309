//! Faults of a device.

use crate::status::Failure;

/// What a device operation did wrong; kept by its stream until the next synchronisation.
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
