//! What padding tokens write.

use serde::{Deserialize, Serialize};

use ascend_attention::Violation;

use crate::rules;

use super::slot::{MAX_INT32, check_block_size};

/// The slots of padding tokens. Engines use different slots for it, so that the caller chooses one.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[non_exhaustive]
pub enum PadPolicy {
    /// A negative slot. CANN's documents do not say what the writer does with it; the operator's kernels skip it
    /// wherever it is in the list (the lint `slot_mapping.negative`).
    #[default]
    SkipNegative,
    /// Padding goes to blocks that no sequence ever gets: the block of this slot, and all blocks before it. The first
    /// padding token of a step gets this slot and later ones go round the slots of these blocks, so that no slot is
    /// repeated while there are as many slots as padding tokens. More padding tokens repeat some: what is written
    /// there is never read, but the emulation reports it, as an error where it is strict.
    ///
    /// A small slot, such as 0, costs one block; slot 1600 of blocks of 128 tokens costs 13.
    DumpSlot(u32),
}

impl PadPolicy {
    /// The slot of the first padding token of a step; [`PadPolicy::slot_of`] returns those of the others.
    ///
    /// # Errors
    /// [`PAD_SLOT`](crate::rules::PAD_SLOT) for a dump slot that is no INT32.
    pub fn slot(self) -> Result<i32, Violation> {
        match self {
            Self::SkipNegative => Ok(-1),
            Self::DumpSlot(slot) => i32::try_from(slot).map_err(|_| outside(slot, MAX_INT32 + 1)),
        }
    }

    /// Refuses a dump slot that a cache of `slots` slots (blocks times block size) does not have.
    ///
    /// # Errors
    /// [`PAD_SLOT`](crate::rules::PAD_SLOT).
    pub fn check(self, slots: usize) -> Result<(), Violation> {
        match self {
            Self::DumpSlot(slot) if slot as usize >= slots => Err(outside(slot, slots)),
            _ => self.slot().map(drop),
        }
    }

    /// The slot of padding token `nth` of a step, counted from 0, in a cache of blocks of `block_size` tokens.
    ///
    /// # Errors
    /// [`PAD_SLOT`](crate::rules::PAD_SLOT) for a slot that is no INT32, [`POOL_SIZE`](crate::rules::POOL_SIZE) for a
    /// block size that is 0 or no INT32.
    pub fn slot_of(self, nth: usize, block_size: usize) -> Result<i32, Violation> {
        let Self::DumpSlot(dump) = self else {
            return Ok(-1);
        };
        check_block_size(block_size)?;
        let reserved = self.reserved_slots(block_size);
        let slot = (dump as usize + nth % reserved) % reserved;
        i32::try_from(slot).map_err(|_| outside(dump, MAX_INT32 + 1))
    }

    /// Whether a slot is padding in a cache of blocks of `block_size` tokens.
    pub fn is_padding(self, slot: i32, block_size: usize) -> bool {
        match self {
            Self::SkipNegative => slot < 0,
            Self::DumpSlot(_) => usize::try_from(slot).is_ok_and(|slot| slot < self.reserved_slots(block_size)),
        }
    }

    /// The slot that a token is cached in; none for padding.
    pub(super) fn cached_slot(self, slot: i32, block_size: usize) -> Option<usize> {
        let cached = usize::try_from(slot).ok()?;
        (!self.is_padding(slot, block_size)).then_some(cached)
    }

    /// The lint of ScatterPaKvCache that padding would break; it has to be allowed.
    pub(super) fn allowed_lint(self) -> &'static str {
        match self {
            Self::SkipNegative => "slot_mapping.negative",
            Self::DumpSlot(_) => "slot_mapping.unique",
        }
    }

    fn reserved_slots(self, block_size: usize) -> usize {
        self.reserved_blocks(block_size) * block_size
    }

    /// Blocks at the beginning of the cache that sequences must not get; none where blocks have no tokens.
    pub fn reserved_blocks(self, block_size: usize) -> usize {
        match self {
            Self::DumpSlot(slot) if block_size > 0 => slot as usize / block_size + 1,
            Self::DumpSlot(_) | Self::SkipNegative => 0,
        }
    }
}

/// The refusal of a token whose slot is one that padding is written to.
#[cold]
pub(crate) fn written_over(pad: PadPolicy, token: usize) -> Violation {
    rules::SLOT_DUMP.broken(format_args!("{pad:?} for token {token}"), "a slot that padding is not written to")
}

#[cold]
fn outside(slot: u32, slots: usize) -> Violation {
    rules::PAD_SLOT.broken(format_args!("dump slot {slot}"), format_args!("below {slots}"))
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test fails by panicking")]
mod tests {
    use super::*;

    #[test]
    fn padding_goes_round_the_reserved_slots() {
        let pad = PadPolicy::DumpSlot(5);
        let slots: Vec<i32> = (0..8).map(|nth| pad.slot_of(nth, 4).unwrap()).collect();
        assert_eq!(slots, [5, 6, 7, 0, 1, 2, 3, 4]);
        assert!(slots.iter().all(|slot| pad.is_padding(*slot, 4)));
        assert!(!pad.is_padding(8, 4) && !pad.is_padding(-1, 4));
        assert_eq!(pad.slot_of(8, 4), Ok(5), "round again");
        assert_eq!(PadPolicy::DumpSlot(8).slot_of(8, 4), Ok(4));
        assert_eq!(PadPolicy::SkipNegative.slot_of(usize::MAX, 4), Ok(-1));
    }
}
