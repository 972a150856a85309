//! Rules for the content of a slot mapping, which a caller who has the numbers can check.

use super::rules::{SLOT_DUPLICATE, SLOT_NEGATIVE, SLOT_RANGE};
use crate::{Rule, Violation};
use std::fmt;

/// A fault in a slot mapping: a slot outside of the cache, or one that an earlier token has too.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum SlotFault {
    /// The slot is beyond the last slot of the cache.
    OutOfRange {
        /// Index of the token in the mapping.
        token: usize,
        /// The slot.
        slot: i64,
        /// Number of slots in the cache.
        slots: u64,
    },
    /// The slot is also that of an earlier token: which of the two tokens is stored is undefined.
    Duplicate {
        /// Index of the token in the mapping.
        token: usize,
        /// Index of the earlier token.
        earlier: usize,
        /// The slot.
        slot: i64,
    },
    /// The slot is below 0, which marks padding.
    Negative {
        /// Index of the token in the mapping.
        token: usize,
        /// The slot.
        slot: i64,
    },
}

impl SlotFault {
    /// The lint that the slot breaks.
    pub fn rule(&self) -> &'static Rule {
        match self {
            SlotFault::OutOfRange { .. } => &SLOT_RANGE,
            SlotFault::Duplicate { .. } => &SLOT_DUPLICATE,
            SlotFault::Negative { .. } => &SLOT_NEGATIVE,
        }
    }

    /// This fault as a violation of its lint.
    pub fn violation(&self) -> Violation {
        let rule = self.rule();
        match self {
            SlotFault::OutOfRange { slots, .. } => {
                let last = slots.saturating_sub(1);
                rule.broken(self, format_args!("0 to {last}, as the cache has {slots} slots"))
            }
            SlotFault::Duplicate { .. } => rule.broken(self, "each slot once"),
            SlotFault::Negative { .. } => rule.broken(self, "0 and above"),
        }
    }
}

impl fmt::Display for SlotFault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            SlotFault::OutOfRange { token, slot, slots } => {
                write!(f, "token {token} goes to slot {slot} of {slots}")
            }
            SlotFault::Duplicate { token, earlier, slot } => {
                write!(f, "tokens {earlier} and {token} go to slot {slot}")
            }
            SlotFault::Negative { token, slot } => write!(f, "token {token} goes to slot {slot}"),
        }
    }
}

/// Calls `visit` with every fault of a slot mapping for a cache of `slots` slots: first the slots outside the cache, by
/// token, then the duplicates, by slot. Allocates nothing for slots that ascend.
pub fn slot_faults<S: Copy + Into<i64>>(mapping: &[S], slots: u64, visit: &mut dyn FnMut(SlotFault)) {
    numbered_slot_faults(mapping.iter().map(|&slot| slot.into()).enumerate(), slots, visit);
}

/// As [`slot_faults`], of some tokens, each with its number and its slot.
pub(crate) fn numbered_slot_faults(
    mapping: impl Iterator<Item = (usize, i64)> + Clone,
    slots: u64,
    visit: &mut dyn FnMut(SlotFault),
) {
    let mut ascending = true;
    let mut last = None;
    for (token, slot) in mapping.clone() {
        match u64::try_from(slot) {
            Err(_) => visit(SlotFault::Negative { token, slot }),
            Ok(place) if place >= slots => visit(SlotFault::OutOfRange { token, slot, slots }),
            Ok(_) => {
                ascending &= last.is_none_or(|last| last < slot);
                last = Some(slot);
            }
        }
    }
    if ascending {
        return;
    }
    let inside = |slot: i64| u64::try_from(slot).is_ok_and(|place| place < slots);
    let mut sorted: Vec<(i64, usize)> =
        mapping.filter(|&(_, slot)| inside(slot)).map(|(token, slot)| (slot, token)).collect();
    sorted.sort_unstable();
    for pair in sorted.windows(2) {
        if let &[(slot, earlier), (same, token)] = pair
            && slot == same
        {
            visit(SlotFault::Duplicate { token, earlier, slot });
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn faults(mapping: &[i64], slots: u64) -> Vec<SlotFault> {
        let mut found = Vec::new();
        slot_faults(mapping, slots, &mut |fault| found.push(fault));
        found
    }

    #[test]
    fn each_kind_is_named_with_its_token() {
        assert_eq!(faults(&[], 0), []);
        assert_eq!(faults(&[3, 0, 7], 8), []);
        let found = faults(&[5, -1, 8, 5, i64::MIN, i64::MAX, 5], 8);
        let texts: Vec<String> = found.iter().map(SlotFault::to_string).collect();
        assert_eq!(
            texts,
            [
                "token 1 goes to slot -1",
                "token 2 goes to slot 8 of 8",
                "token 4 goes to slot -9223372036854775808",
                "token 5 goes to slot 9223372036854775807 of 8",
                "tokens 0 and 3 go to slot 5",
                "tokens 3 and 6 go to slot 5",
            ]
        );
        let text = found[1].violation().to_string();
        assert!(text.starts_with("slot_mapping.range:"), "{text}");
        assert!(text.contains("0 to 7"), "{text}");
    }

    proptest! {
        #[test]
        fn faults_are_those_of_the_definition(mapping in prop::collection::vec(-3i64..24, 0..40), slots in 0u64..20) {
            let found = faults(&mapping, slots);
            for (token, &slot) in mapping.iter().enumerate() {
                let is_listed = |fault: &SlotFault| matches!(*fault,
                    SlotFault::OutOfRange { token: t, .. } | SlotFault::Duplicate { token: t, .. }
                    | SlotFault::Negative { token: t, .. } if t == token);
                let mine: Vec<_> = found.iter().filter(|fault| is_listed(fault)).collect();
                let outside = slot < 0 || slot as u64 >= slots;
                let earlier = mapping[..token].iter().rposition(|&other| other == slot);
                match (mine.as_slice(), outside, earlier) {
                    ([SlotFault::Negative { .. }], true, _) => prop_assert!(slot < 0),
                    ([SlotFault::OutOfRange { .. }], true, _) => prop_assert!(slot >= 0),
                    ([SlotFault::Duplicate { earlier, .. }], false, Some(want)) => prop_assert_eq!(*earlier, want),
                    ([], false, None) => {}
                    other => prop_assert!(false, "{:?}", other),
                }
            }
        }
    }
}
