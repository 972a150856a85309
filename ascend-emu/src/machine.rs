//! The machines that a process emulates: products and CANN releases side by side.
//!
//! The functions of the C ABI carry no state, so that what tells one machine from another is the device's context: a
//! function table has its own `aclrtSetDevice`, and whatever is done in the context that it makes is done on its machine.

use crate::config::config;
use crate::lock::Lock;
use crate::status::{ACLNN_RUNTIME, Outcome, failure};
use ascend_spec::fia::Version;
use ascend_spec::{Cann, Soc, Target};
use std::ffi::CString;
use std::sync::OnceLock;

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
    target: Target,
    operator: Version,
}

impl Default for Machine {
    /// An Atlas A2 (`Ascend910B3`) with the newest release.
    fn default() -> Self {
        Machine {
            soc_name: c"Ascend910B3".to_owned(),
            target: Target::new(Soc::AtlasA2, Self::DEFAULT_CANN),
            operator: Version::newest_of(Self::DEFAULT_CANN),
        }
    }
}

impl Machine {
    /// The release where none is chosen.
    pub const DEFAULT_CANN: Cann = Cann::NEWEST;

    /// A chip by its name, such as `Ascend910B3`, with a release; `None` if the name is of no known product.
    pub fn new(soc_name: &str, cann: Cann) -> Option<Self> {
        let soc_name = soc_name.trim();
        let target = Target::new(Soc::from_name(soc_name)?, cann);
        Some(Machine {
            soc_name: CString::new(soc_name).ok()?,
            target,
            operator: Version::newest_of(cann),
        })
    }

    /// The machine with another chip; `None` if the name is of no known product.
    pub(crate) fn with_soc(self, soc_name: &str) -> Option<Self> {
        let other = Machine::new(soc_name, self.target.cann)?;
        Some(other.operator(self.operator))
    }

    /// The machine with another release, and the entry points of that.
    pub(crate) fn with_cann(mut self, cann: Cann) -> Self {
        self.target.cann = cann;
        self.operator = Version::newest_of(cann);
        self
    }

    /// The machine with another newest version of the attention operator than its release has.
    #[must_use]
    pub fn operator(mut self, newest: Version) -> Self {
        self.operator = newest;
        self
    }

    /// What its operators are checked and computed for.
    pub fn target(&self) -> Target {
        self.target
    }

    /// The newest version of the attention operator that there is.
    pub fn newest_operator(&self) -> Version {
        self.operator
    }

    pub(crate) fn soc_name(&self) -> &CString {
        &self.soc_name
    }

    /// Version of CANN that the machine passes for.
    pub(crate) fn cann_version(&self) -> [u16; 3] {
        match self.target.cann {
            Cann::V8_1 => [8, 1, 0],
            Cann::V8_5 => [8, 5, 0],
            Cann::V9_0 => [9, 0, 0],
            // Every release that is yet to be told apart begins as the newest.
            _ => [9, 1, 0],
        }
    }

    /// Refuses a version of the attention operator that the machine does not have.
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
        let version = Version::of_function(function);
        version.is_none_or(|version| version <= self.operator)
    }
}

/// Most machines of a process, that of the environment among them.
pub(crate) const SLOTS: usize = 32;

/// The machines after that of the environment, in the order in which they were asked for.
static OTHERS: [OnceLock<Machine>; SLOTS - 1] = [const { OnceLock::new() }; SLOTS - 1];

/// The slot of a machine, which takes a free one if it has none yet; `None` if all are taken.
pub(crate) fn slot_of(machine: &Machine) -> Option<usize> {
    static TAKING: Lock<()> = Lock::new(());
    if *machine == config().machine {
        return Some(0);
    }
    let _alone = TAKING.lock();
    let mut places = OTHERS.iter().zip(1..);
    let found = places.find(|(place, _)| place.get_or_init(|| machine.clone()) == machine);
    found.map(|(_, slot)| slot)
}

/// The machine of a slot; 0 is that of the environment.
pub(crate) fn machine_at(slot: usize) -> &'static Machine {
    let other = slot
        .checked_sub(1)
        .and_then(|place| OTHERS.get(place)?.get());
    other.unwrap_or_else(|| &config().machine)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_machine_has_a_slot_of_its_own() {
        let machine = |soc: &str, cann| Machine::new(soc, cann).unwrap();
        let old = machine("Ascend910B3", Cann::V8_5).operator(Version::V2);
        let new = machine("Ascend950PR_9599", Cann::V9_1);
        let (a, b) = (slot_of(&old).unwrap(), slot_of(&new).unwrap());
        assert_ne!(a, b);
        assert_eq!(slot_of(&old.clone()), Some(a));
        assert_eq!((machine_at(a), machine_at(b)), (&old, &new));
        assert_eq!(slot_of(&config().machine), Some(0));
        assert_eq!(machine_at(0), &config().machine);
        assert_eq!(Machine::new("Kunpeng920", Cann::V9_1), None);
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
            assert_eq!(machine.exports(function), there, "{function}");
        }
        let refusal = machine.admits(Version::V4).unwrap_err().message;
        assert!(refusal.contains("up to V3"), "{refusal}");

        let newest = |cann| Machine::new("Ascend910B3", cann).unwrap().newest_operator();
        let newest = Cann::ALL.map(newest);
        assert_eq!(newest, [Version::V3, Version::V4, Version::V5, Version::V5]);
        // The headers of a development snapshot are newer than those of the release that it stands for.
        let snapshot = machine.operator(Version::V4);
        assert!(snapshot.exports("aclnnFusedInferAttentionScoreV4"));
    }
}
