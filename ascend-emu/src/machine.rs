//! An emulated machine: a product and a CANN release.

use crate::status::{ACLNN_RUNTIME, Outcome, failure};
use ascend_spec::ops::fused_infer_attention_score::Version;
use ascend_spec::{Cann, Soc, Target, UnreleasedTarget};
use std::ffi::{CStr, CString};

/// An emulated chip, and the CANN release that is installed with it.
///
/// ```
/// use ascend_emu::{Machine, functions_of};
/// use ascend_spec::Cann;
/// use ascend_sys::Api;
///
/// let machine = Machine::new("Ascend950PR_9599", Cann::V9_1).unwrap();
/// let api = Api::from_functions(functions_of(&machine).unwrap(), "Ascend 950");
/// assert!(api.aclnnFusedInferAttentionScoreV5().is_ok());
/// ```
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Machine {
    soc_name: CString,
    behaviour: Behaviour,
}

/// The differences between machines that a program notices, without the chip's name.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Behaviour {
    /// The product and release that operators are checked and computed for.
    pub target: Target,
    /// The newest version of FusedInferAttentionScore.
    pub operator: Version,
}

/// Why a machine cannot be emulated.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum MachineError {
    /// The chip's name is of no known form.
    #[error(
        "{name:?} is the name of no known product; allowed: {}",
        Soc::NAME_FORMS
    )]
    UnknownProduct {
        /// The name.
        name: String,
    },
    /// The release does not know the product.
    #[error(transparent)]
    Unreleased(#[from] UnreleasedTarget),
    /// The process has the largest number of machines, or of chip names, already.
    #[error("one more of the {given} that this process emulates; allowed: {most}")]
    TooMany {
        /// `machines` or their chip names, whichever are too many.
        given: &'static str,
        /// The largest number of them.
        most: usize,
    },
}

impl Default for Machine {
    /// An Atlas A2 (`Ascend910B3`) with the newest release.
    fn default() -> Self {
        Machine {
            soc_name: CString::new(Self::DEFAULT_SOC.chip_name()).unwrap_or_default(),
            behaviour: Behaviour {
                target: Target::new(Self::DEFAULT_SOC, Self::DEFAULT_CANN),
                operator: Version::newest_of(Self::DEFAULT_CANN),
            },
        }
    }
}

impl Machine {
    /// The release where none is chosen.
    pub const DEFAULT_CANN: Cann = Cann::NEWEST;
    /// The product where none is chosen.
    const DEFAULT_SOC: Soc = Soc::AtlasA2;

    /// A chip by its name, such as `Ascend910B3`, with a release.
    ///
    /// # Errors
    /// [`MachineError::UnknownProduct`], [`MachineError::Unreleased`].
    pub fn new(soc_name: &str, cann: Cann) -> Result<Self, MachineError> {
        let soc_name = soc_name.trim();
        let unknown = || MachineError::UnknownProduct {
            name: soc_name.chars().take(80).collect(),
        };
        let soc = Soc::from_name(soc_name).ok_or_else(unknown)?;
        Ok(Machine {
            soc_name: CString::new(soc_name).map_err(|_| unknown())?,
            behaviour: Behaviour {
                target: Target::new(soc, cann).released()?,
                operator: Version::newest_of(cann),
            },
        })
    }

    /// The machine of a chip and a release. `None` is the chip or the release of the default machine.
    ///
    /// # Errors
    /// As for [`Machine::new`].
    pub(crate) fn chosen(soc_name: Option<&str>, cann: Option<Cann>) -> Result<Self, MachineError> {
        let soc_name = soc_name.unwrap_or(Self::DEFAULT_SOC.chip_name());
        Machine::new(soc_name, cann.unwrap_or(Self::DEFAULT_CANN))
    }

    /// Changes the newest version of FusedInferAttentionScore that the machine has.
    #[must_use]
    pub fn operator(mut self, newest: Version) -> Self {
        self.behaviour.operator = newest;
        self
    }

    /// The product and release that operators are checked and computed for.
    pub fn target(&self) -> Target {
        self.behaviour.target
    }

    /// The newest version of FusedInferAttentionScore that the machine has.
    pub fn newest_operator(&self) -> Version {
        self.behaviour.operator
    }

    pub(crate) fn behaviour(&self) -> Behaviour {
        self.behaviour
    }

    /// The chip's name.
    pub(crate) fn soc_name(&self) -> &CStr {
        &self.soc_name
    }
}

impl Behaviour {
    /// Version of CANN that the machine reports.
    pub(crate) fn cann_version(&self) -> [u16; 3] {
        match self.target.cann {
            Cann::V8_1 => [8, 1, 0],
            Cann::V8_5 => [8, 5, 0],
            Cann::V9_0 => [9, 0, 0],
            // A release that is not known here reports the newest one.
            _ => [9, 1, 0],
        }
    }

    /// Refuses a version of FusedInferAttentionScore that the machine does not have.
    pub(crate) fn admits(&self, version: Version) -> Outcome {
        if version <= self.operator {
            return Ok(());
        }
        Err(failure!(
            ACLNN_RUNTIME,
            "{}: the emulated release has versions up to {}; ASCEND_EMU_CANN and ASCEND_EMU_OPERATOR choose others",
            version.symbol(),
            self.operator
        ))
    }

    /// Whether the machine's libraries export a function.
    pub(crate) fn exports(&self, function: &str) -> bool {
        match Version::of_function(function) {
            // A machine may have another newest version than its release ([`Machine::operator`]).
            Some(version) => version <= self.operator,
            None => ascend_spec::is_exported(function, self.target.cann),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn machines_that_there_are_none_of_are_refused() {
        let unknown = Machine::new("Kunpeng920", Cann::V9_1).unwrap_err();
        assert!(unknown.to_string().contains("Ascend910B1"), "{unknown}");
        let odd = Machine::new("Ascend9500000", Cann::V9_1).unwrap_err();
        assert!(matches!(odd, MachineError::UnknownProduct { .. }));
        for cann in [Cann::V8_1, Cann::V8_5] {
            let target = Target::new(Soc::Ascend950, cann);
            assert_eq!(
                Machine::new("Ascend950PR_9599", cann),
                Err(MachineError::Unreleased(UnreleasedTarget { target }))
            );
        }
        let chosen = |soc_name, cann| Machine::chosen(soc_name, cann).unwrap();
        assert_eq!(
            chosen(Some("Ascend950PR_9599"), None).target(),
            Target::new(Soc::Ascend950, Cann::V9_1)
        );
        assert_eq!(
            chosen(None, Some(Cann::V8_5)).target(),
            Target::new(Soc::AtlasA2, Cann::V8_5)
        );
        assert_eq!(chosen(None, None), Machine::default());
    }

    #[test]
    fn older_machines_lack_newer_versions() {
        let machine = Machine::new("Ascend910B3", Cann::V8_1).unwrap();
        for (function, there) in [
            ("aclInit", true),
            ("aclnnFusedInferAttentionScore", true),
            ("aclnnFusedInferAttentionScoreV3GetMaxWorkspaceSize", true),
            ("aclnnFusedInferAttentionScoreV4", false),
            ("aclnnFusedInferAttentionScoreV4GetWorkspaceSize", false),
            ("aclnnFusedInferAttentionScoreV5GetMaxWorkspaceSize", false),
        ] {
            assert_eq!(machine.behaviour.exports(function), there, "{function}");
        }
        let refusal = machine.behaviour.admits(Version::V4).unwrap_err().message;
        assert!(refusal.contains("up to V3"), "{refusal}");

        let newest = |cann| Machine::new("Ascend910B3", cann).unwrap().newest_operator();
        let newest = Cann::ALL.map(newest);
        assert_eq!(newest, [Version::V3, Version::V4, Version::V5, Version::V5]);
        // The headers of a development snapshot are newer than those of the release that it stands for.
        let snapshot = machine.operator(Version::V4);
        assert!(
            snapshot
                .behaviour
                .exports("aclnnFusedInferAttentionScoreV4")
        );
    }
}
