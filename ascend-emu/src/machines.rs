//! The machines that a process emulates: products and CANN releases side by side.
//!
//! The functions of the C ABI have no state, so that the device's context has the machine: a function table has its own
//! `aclrtSetDevice`, and calls in the context that it makes are calls on its machine.

use crate::config::config;
use crate::lock::Lock;
use crate::machine::{Behaviour, Machine, MachineError};
use std::ffi::{CStr, CString};
use std::sync::OnceLock;

/// Largest number of machines of a process with different behaviour, that of the environment included.
pub(crate) const MACHINES: usize = 32;

/// Largest number of chip names of a process, that of the environment included.
pub(crate) const NAMES: usize = 128;

/// The machines after that of the environment, in the order of their first use.
static OTHERS: [OnceLock<Behaviour>; MACHINES - 1] = [const { OnceLock::new() }; MACHINES - 1];

/// The names of chips after that of the environment.
static OTHER_NAMES: [OnceLock<CString>; NAMES - 1] = [const { OnceLock::new() }; NAMES - 1];

/// Where the process keeps the behaviour and the chip name of a machine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct MachineIndex {
    /// Index of the behaviour.
    pub behaviour: usize,
    /// Index of the chip's name.
    pub name: usize,
}

/// The index of a machine. A new machine takes a free one.
pub(crate) fn index_of(machine: &Machine) -> Result<MachineIndex, MachineError> {
    static TAKING: Lock<()> = Lock::new(());
    let own = &config().machine;
    let _alone = TAKING.lock();
    let full = |what, most| move || MachineError::TooMany { what, most };
    let behaviour = match machine.behaviour() == own.behaviour() {
        true => 0,
        false => {
            let place = place_of(&OTHERS, &machine.behaviour());
            place.ok_or_else(full("different machines", MACHINES))?
        }
    };
    let name = match machine.soc_name() == own.soc_name() {
        true => 0,
        false => {
            let place = place_of(&OTHER_NAMES, &machine.soc_name().to_owned());
            place.ok_or_else(full("chip names", NAMES))?
        }
    };
    Ok(MachineIndex { behaviour, name })
}

/// The place of a value, counted from 1. A new value takes a free place.
fn place_of<T: Clone + PartialEq>(places: &[OnceLock<T>], value: &T) -> Option<usize> {
    let mut places = places.iter().zip(1..);
    let found = places.find(|(place, _)| place.get_or_init(|| value.clone()) == value);
    found.map(|(_, number)| number)
}

/// The behaviour at an index; 0 is that of the environment's machine.
pub(crate) fn behaviour_at(index: usize) -> Behaviour {
    let other = index.checked_sub(1).and_then(|place| OTHERS.get(place)?.get());
    other.copied().unwrap_or(config().machine.behaviour())
}

/// The chip's name at an index; 0 is that of the environment's machine.
pub(crate) fn soc_name_at(index: usize) -> &'static CStr {
    let other = index.checked_sub(1).and_then(|place| OTHER_NAMES.get(place)?.get());
    other.map_or_else(|| config().machine.soc_name(), CString::as_c_str)
}

#[cfg(test)]
mod tests {
    use super::*;
    use ascend_spec::Cann;
    use ascend_spec::ops::fused_infer_attention_score::Version;

    #[test]
    fn each_machine_has_an_index_of_its_own() {
        let machine = |soc: &str, cann| Machine::new(soc, cann).unwrap();
        let old = machine("Ascend910B3", Cann::V8_5).operator(Version::V2);
        let new = machine("Ascend950PR_9599", Cann::V9_1);
        let (a, b) = (index_of(&old).unwrap(), index_of(&new).unwrap());
        assert_ne!(a.behaviour, b.behaviour);
        assert_eq!(index_of(&old.clone()), Ok(a));
        for (machine, index) in [(&old, a), (&new, b)] {
            assert_eq!(behaviour_at(index.behaviour), machine.behaviour());
            assert_eq!(soc_name_at(index.name), machine.soc_name());
        }
        let own = MachineIndex { behaviour: 0, name: 0 };
        assert_eq!(index_of(&config().machine), Ok(own));
        assert_eq!(behaviour_at(0), config().machine.behaviour());
        assert_eq!(soc_name_at(0), config().machine.soc_name());
    }

    #[test]
    fn names_that_differ_in_nothing_take_no_machines_away() {
        let name = |number: usize| format!("Ascend910_93{number:02}");
        let indices = (0..100).map(|number| {
            let machine = Machine::new(&name(number), Cann::V9_0).unwrap();
            let index = index_of(&machine).unwrap();
            assert_eq!(soc_name_at(index.name).to_str(), Ok(name(number).as_str()));
            index.behaviour
        });
        let indices: Vec<_> = indices.collect();
        assert!(indices.iter().all(|index| *index == indices[0]), "{indices:?}");
    }
}
