//! An emulated machine: a product, a CANN release, and the chip whose cores and cache are reported.

use crate::status::{ACLNN_RUNTIME, Outcome, failure};
use ascend_spec::ops::fused_infer_attention_score::Version;
use ascend_spec::{Cann, Soc, StridedKeys, Target, UnreleasedTarget};
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
    #[error("{name:?} is the name of no known product; allowed: {}", Soc::NAME_FORMS)]
    UnknownProduct {
        /// The name.
        name: String,
    },
    /// The release does not know the product.
    #[error(transparent)]
    Unreleased(#[from] UnreleasedTarget),
    /// The process has the largest number of machines, or of chip names, already.
    #[error("one more of the {what} that this process emulates; allowed: {most}")]
    TooMany {
        /// `machines` or their chip names, whichever are too many.
        what: &'static str,
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
        let unknown = || MachineError::UnknownProduct { name: soc_name.chars().take(80).collect() };
        let soc = Soc::from_name(soc_name).ok_or_else(unknown)?;
        Ok(Machine {
            soc_name: CString::new(soc_name).map_err(|_| unknown())?,
            behaviour: Behaviour { target: Target::new(soc, cann).released()?, operator: Version::newest_of(cann) },
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

    /// Sets what versions 1 to 4 of FusedInferAttentionScore do with strided keys on Atlas A2 and A3 in 9.1.
    #[must_use]
    pub fn strided_keys(mut self, reading: StridedKeys) -> Self {
        self.behaviour.target = self.behaviour.target.strided_keys(reading);
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
        self.target.cann.version()
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

/// Cores and cache of a chip. Operators do not depend on them.
///
/// The numbers are those of CANN's platform files, `data/platform_config/<chip>.ini` of the toolkit, section `SoCInfo`:
/// `cube_core_cnt` (`ai_core_cnt` in files without it), `vector_core_cnt`, `ai_cpu_cnt` and `l2_size`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Chip {
    /// Cube cores, which multiply matrices; AI cores on chips that do not separate cube from vector cores.
    pub cube_cores: u32,
    /// Vector cores.
    pub vector_cores: u32,
    /// AI CPUs: general-purpose cores that operators may use.
    pub cpu_cores: u32,
    /// Bytes of the second-level cache.
    pub cache: i64,
}

/// Bytes of a mebibyte.
const MIB: i64 = 1 << 20;

/// The chips by their names without `Ascend`: cube cores, vector cores, processors, mebibytes of cache.
const CHIPS: &[(&str, u32, u32, u32, i64)] = &[
    ("910B1", 24, 48, 6, 192),
    ("910B2", 24, 48, 6, 192),
    ("910B2C", 24, 48, 6, 192),
    ("910B3", 20, 40, 6, 192),
    ("910B4", 20, 40, 6, 96),
    ("910B4-1", 20, 40, 6, 168),
    ("910_9362", 20, 40, 6, 168),
    ("910_9363", 20, 40, 6, 168),
    ("910_9372", 20, 40, 6, 192),
    ("910_9381", 24, 48, 6, 192),
    ("910_9382", 24, 48, 6, 192),
    ("910_9391", 24, 48, 6, 192),
    ("910_9392", 24, 48, 6, 192),
    ("950DT_950x", 8, 16, 5, 32),
    ("950DT_950y", 8, 16, 5, 32),
    ("950DT_9571", 28, 56, 7, 128),
    ("950DT_9572", 28, 56, 7, 128),
    ("950DT_9573", 28, 56, 5, 112),
    ("950DT_9574", 28, 56, 5, 112),
    ("950DT_9575", 28, 56, 7, 128),
    ("950DT_9576", 28, 56, 7, 128),
    ("950DT_9577", 28, 56, 5, 112),
    ("950DT_9578", 28, 56, 5, 112),
    ("950DT_9581", 32, 64, 6, 128),
    ("950DT_9582", 32, 64, 6, 128),
    ("950DT_9583", 32, 64, 7, 112),
    ("950DT_9584", 32, 64, 7, 112),
    ("950DT_9585", 32, 64, 6, 128),
    ("950DT_9586", 32, 64, 6, 128),
    ("950DT_9587", 32, 64, 7, 112),
    ("950DT_9588", 32, 64, 7, 112),
    ("950DT_9591", 36, 72, 6, 128),
    ("950DT_9592", 36, 72, 6, 128),
    ("950DT_9595", 36, 72, 6, 128),
    ("950DT_9596", 36, 72, 6, 128),
    ("950DT_95A1", 36, 72, 6, 128),
    ("950DT_95A2", 36, 72, 6, 128),
    ("950PR_950z", 4, 8, 5, 16),
    ("950PR_9579", 28, 56, 7, 128),
    ("950PR_957b", 28, 56, 5, 112),
    ("950PR_957c", 28, 56, 5, 112),
    ("950PR_957d", 28, 56, 5, 96),
    ("950PR_9589", 32, 64, 6, 128),
    ("950PR_958b", 32, 64, 7, 112),
    ("950PR_9599", 36, 72, 6, 128),
    ("310P1", 10, 8, 8, 16),
    ("310P3", 8, 7, 7, 16),
    ("310P5", 8, 7, 8, 16),
    ("310P7", 8, 7, 8, 16),
    ("310B1", 1, 1, 4, 4),
    ("310B2", 1, 1, 4, 4),
    ("310B3", 1, 1, 4, 4),
    ("310B4", 1, 1, 4, 4),
    ("910A", 32, 0, 4, 32),
    ("910ProA", 32, 0, 4, 32),
    ("910ProB", 30, 0, 4, 32),
    ("910PremiumA", 32, 0, 4, 32),
];

impl Chip {
    fn by_name(name: &str) -> Option<Self> {
        let name = name.strip_prefix("Ascend")?;
        let mut chips = CHIPS.iter();
        let &(_, cube_cores, vector_cores, cpu_cores, cache) =
            chips.find(|(known, ..)| known.eq_ignore_ascii_case(name))?;
        Some(Chip { cube_cores, vector_cores, cpu_cores, cache: cache * MIB })
    }

    /// The chip with a name. An unknown name stands for the product's most common chip.
    pub(crate) fn named(name: &str, soc: Soc) -> Self {
        let known = Chip::by_name(name).or_else(|| Chip::by_name(soc.chip_name()));
        known.unwrap_or(Chip { cube_cores: 0, vector_cores: 0, cpu_cores: 0, cache: 0 })
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
        assert_eq!(chosen(Some("Ascend950PR_9599"), None).target(), Target::new(Soc::Ascend950, Cann::V9_1));
        assert_eq!(chosen(None, Some(Cann::V8_5)).target(), Target::new(Soc::AtlasA2, Cann::V8_5));
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
        assert_eq!(newest, [Version::V3, Version::V4, Version::V5, Version::V5, Version::V5]);
        // The headers of a development snapshot are newer than those of the release that it stands for.
        let snapshot = machine.operator(Version::V4);
        assert!(snapshot.behaviour.exports("aclnnFusedInferAttentionScoreV4"));
    }

    #[test]
    fn every_product_has_a_chip_and_no_name_stands_twice() {
        for soc in
            [Soc::AtlasA2, Soc::AtlasA3, Soc::Ascend950, Soc::AtlasInference, Soc::AtlasTraining, Soc::Atlas200I500A2]
        {
            assert!(Chip::by_name(soc.chip_name()).is_some(), "{soc}");
        }
        for (at, (name, ..)) in CHIPS.iter().enumerate() {
            assert!(CHIPS.iter().skip(at + 1).all(|(other, ..)| name != other));
            assert!(Soc::from_name(&format!("Ascend{name}")).is_some(), "{name}");
        }
    }

    #[test]
    fn a_chip_of_an_unknown_name_is_that_of_its_product() {
        let chip = |name| Chip::named(name, Soc::AtlasA2);
        assert_eq!(chip("Ascend910B1").cube_cores, 24);
        assert_eq!(chip("Ascend910B"), chip("Ascend910B3"));
    }
}
