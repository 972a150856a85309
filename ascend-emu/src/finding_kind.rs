//! The kinds of misuse that the sanitizer finds, and sets of them.

use crate::named_enum::named_enum;
use std::fmt;

/// Defines the kinds: of each its name in variables, and what texts call it.
macro_rules! kinds {
    ($( $(#[$doc:meta])* $kind:ident = $name:literal, $title:literal; )*) => {
        named_enum! {
            /// Kinds of misuse, each with the name by which `ASCEND_EMU_CHECK` leaves it out.
            #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
            #[non_exhaustive]
            pub enum FindingKind {
                $( $(#[$doc])* $kind => $name, )*
            }
        }

        impl fmt::Display for FindingKind {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(match self {
                    $( FindingKind::$kind => $title, )*
                })
            }
        }
    };
}

kinds! {
    /// Memory was freed while queued work uses it, or without a synchronisation after that work.
    FreeInUse = "free_in_use", "memory freed while in use";
    /// Work refers to memory that was freed.
    UseAfterFree = "use_after_free", "use after free";
    /// Work or a copy reaches past the end of an allocation.
    OutOfBounds = "out_of_bounds", "out of bounds";
    /// The host reads or writes memory that queued work uses, without a synchronisation in between.
    HostRace = "host_race", "host access without synchronisation";
    /// Two streams use the same bytes, at least one writing, without an event in between.
    StreamRace = "stream_race", "race between streams";
    /// An asynchronous copy with host memory that is not pinned.
    PageableCopy = "pageable_copy", "asynchronous copy with pageable host memory";
    /// An operator reads rows of a paged cache, or a whole tensor, that nothing has written since the memory was
    /// handed out.
    UnwrittenRead = "unwritten_read", "read of unwritten memory";
    /// A copy takes memory to the host of which nothing has written a byte since it was handed out.
    UnwrittenCopy = "unwritten_copy", "copy of unwritten memory";
    /// A block table names a block that the cache does not have.
    BlockTable = "block_table", "block out of range";
    /// A row of a block table, or of sparse indices, names a block twice.
    RepeatedBlock = "repeated_block", "block named twice";
    /// A position bias holds an infinity or NaN.
    NonFiniteBias = "non_finite_bias", "infinity or NaN in a position bias";
    /// A row that no key is visible to: a mask hides from each row its own key and all keys before it, and so every key
    /// from the last row, like a causal mask whose sense is inverted; or a position bias has the lowest number of its
    /// type for every key of a row; or a mask of blocks names no block of keys for a row.
    HiddenRow = "hidden_row", "row whose every key is hidden";
    /// A mask of blocks has a byte that is neither 0 nor 1.
    MaskByte = "mask_byte", "byte of a mask that is neither 0 nor 1";
    /// A compressed mask of sparse modes 2 to 4 and 6 to 8 is not the template: a byte hides what it should show, or
    /// shows what it should hide. Every 16th column of the first row, the last row and the diagonal is looked at.
    MaskTemplate = "mask_template", "compressed mask that is not the template";
    /// Softmax statistics are read in another memory order than they were written in.
    SoftmaxOrder = "softmax_order", "softmax statistics in another order";
    /// A length on the device is negative, larger than its tensor, or an end before the one in front of it.
    SequenceLength = "sequence_length", "length of a sequence out of range";
    /// A slot mapping names a slot that the cache does not have.
    SlotOutOfRange = "slot_out_of_range", "slot out of range";
    /// A slot mapping names a slot twice.
    DuplicateSlot = "duplicate_slot", "slot named twice";
    /// A merge gets a row without keys in either part, which makes the row, or its next merge, NaN.
    EmptyRow = "empty_row", "row without keys in a merge";
    /// A row of sparse indices has entries that are not read, or it or a mask of blocks names a block behind the keys
    /// that the row may read.
    SkippedEntry = "skipped_entry", "entry of sparse indices left out";
    /// A synchronisation with an event that was never recorded.
    UnrecordedEvent = "unrecorded_event", "event never recorded";
    /// The host waits for a replayed graph, which waits for an event that nothing queued will record.
    StalledReplay = "stalled_replay", "replay that waits for ever";
    /// A device was reset while memory on it was still allocated.
    Leak = "leak", "memory leaked";
    /// A call with which the operator ends the host process, by a division by zero or through a wrong pointer.
    HostCrash = "host_crash", "end of the host process";
}

impl FindingKind {
    /// Whether results after the finding are meaningless. A finding about a wait for something other than work leaves
    /// them right.
    pub(crate) fn spoils_results(self) -> bool {
        !matches!(
            self,
            FindingKind::PageableCopy
                | FindingKind::UnwrittenCopy
                | FindingKind::UnrecordedEvent
                | FindingKind::StalledReplay
                | FindingKind::Leak
        )
    }

    /// Whether it is a warning in either mode, because right programs may do it.
    pub(crate) fn only_warns(self) -> bool {
        matches!(self, FindingKind::PageableCopy | FindingKind::UnwrittenCopy)
    }
}

/// A set of kinds of findings.
///
/// ```
/// use ascend_emu::{FindingKind, FindingKinds};
/// let kinds: FindingKinds = [FindingKind::PageableCopy].into_iter().collect();
/// assert!(kinds.contains(FindingKind::PageableCopy) && !kinds.contains(FindingKind::Leak));
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct FindingKinds(u32);

impl FindingKinds {
    const fn bit(kind: FindingKind) -> u32 {
        1 << kind as u32
    }

    /// Whether a kind is in the set.
    pub fn contains(self, kind: FindingKind) -> bool {
        self.0 & Self::bit(kind) != 0
    }

    /// The kinds of the set.
    pub fn iter(self) -> impl Iterator<Item = FindingKind> {
        let all = FindingKind::ALL.iter().copied();
        all.filter(move |&kind| self.contains(kind))
    }
}

impl FromIterator<FindingKind> for FindingKinds {
    fn from_iter<I: IntoIterator<Item = FindingKind>>(kinds: I) -> Self {
        let bits = kinds.into_iter().map(Self::bit);
        FindingKinds(bits.fold(0, |all, bit| all | bit))
    }
}

// A kind is a bit of a set.
const _: () = assert!(FindingKind::ALL.len() <= 32);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_kind_has_a_name_of_its_own_in_lower_case() {
        for &kind in FindingKind::ALL {
            assert_eq!(kind.name().parse(), Ok(kind));
            let lower = |c: char| c.is_ascii_lowercase() || c == '_';
            assert!(kind.name().chars().all(lower), "{}", kind.name());
            // The name is that of the variant in snake case.
            let variant = format!("{kind:?}").to_lowercase();
            assert_eq!(kind.name().replace('_', ""), variant);
        }
        assert_eq!("races".parse::<FindingKind>(), Err(()));
    }

    #[test]
    fn a_set_has_what_was_put_in() {
        let some = [FindingKind::Leak, FindingKind::FreeInUse];
        let set: FindingKinds = some.into_iter().collect();
        let listed: Vec<_> = set.iter().collect();
        assert_eq!(listed, [FindingKind::FreeInUse, FindingKind::Leak]);
        assert_eq!(FindingKinds::default().iter().count(), 0);
    }
}
