//! Limits of the cores that operators may use, by kind.

use crate::chip::Chip;
use crate::status::{Outcome, PARAM_INVALID, failure};
use ascend_sys::bindings::aclrtDevResLimitType;

/// A kind of core.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum CoreKind {
    Cube,
    Vector,
}

impl CoreKind {
    pub(crate) fn new(name: &str, given: aclrtDevResLimitType) -> Outcome<Self> {
        match given {
            aclrtDevResLimitType::ACL_RT_DEV_RES_CUBE_CORE => Ok(CoreKind::Cube),
            aclrtDevResLimitType::ACL_RT_DEV_RES_VECTOR_CORE => Ok(CoreKind::Vector),
            aclrtDevResLimitType(other) => Err(failure!(
                PARAM_INVALID,
                "{name}: type: given {other}, allowed: ACL_RT_DEV_RES_CUBE_CORE (0), ACL_RT_DEV_RES_VECTOR_CORE (1)"
            )),
        }
    }

    /// The number of cores of this kind that a chip has.
    pub(super) fn of(self, chip: Chip) -> u32 {
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
    pub(super) const NONE: CoreLimits = CoreLimits {
        cube: None,
        vector: None,
    };

    pub(super) fn get(self, kind: CoreKind) -> Option<u32> {
        match kind {
            CoreKind::Cube => self.cube,
            CoreKind::Vector => self.vector,
        }
    }

    /// Sets a limit, which must be at most the chip's number of cores.
    pub(super) fn set(&mut self, name: &str, chip: Chip, kind: CoreKind, value: u32) -> Outcome {
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
