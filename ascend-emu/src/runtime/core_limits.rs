//! How many cores of each kind a program lets operators use.

use crate::chip::Chip;
use crate::status::{Outcome, PARAM_INVALID, failure};
use ascend_sys::bindings::aclrtDevResLimitType;

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

    /// How many a chip has.
    pub(super) fn of(self, chip: Chip) -> u32 {
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
    pub(super) const NONE: Limits = Limits {
        cube: None,
        vector: None,
    };

    pub(super) fn get(self, cores: Cores) -> Option<u32> {
        match cores {
            Cores::Cube => self.cube,
            Cores::Vector => self.vector,
        }
    }

    /// Takes a limit, of at most as many cores as the chip has.
    pub(super) fn set(&mut self, name: &str, chip: Chip, cores: Cores, value: u32) -> Outcome {
        let most = cores.of(chip);
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
