//! What padding tokens write.

use serde::{Deserialize, Serialize};

use super::refusal::{Refused, Rule, refused};

/// The slot that a padding token has. Engines disagree, so it is said.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum PadPolicy {
    /// A negative slot, which the writer skips wherever it stands in the list.
    #[default]
    SkipNegative,
    /// A slot of a block that no sequence ever gets, where padding may be written any number of times.
    DumpSlot(usize),
}

impl PadPolicy {
    /// The slot of a padding token.
    ///
    /// # Errors
    /// [`Rule::PadSlot`] for a dump slot that is no INT32.
    pub fn slot(self) -> Result<i32, Refused> {
        match self {
            Self::SkipNegative => Ok(-1),
            Self::DumpSlot(slot) => i32::try_from(slot).map_err(|_| outside(slot, 1 << 31)),
        }
    }

    /// Refuses a dump slot that a cache of `slots` slots (blocks times block size) does not have.
    ///
    /// # Errors
    /// [`Rule::PadSlot`].
    pub fn check(self, slots: usize) -> Result<(), Refused> {
        match self {
            Self::DumpSlot(slot) if slot >= slots => Err(outside(slot, slots)),
            _ => self.slot().map(drop),
        }
    }

    /// Whether a slot is padding.
    pub fn is_padding(self, slot: i32) -> bool {
        match self {
            Self::SkipNegative => slot < 0,
            Self::DumpSlot(dump) => usize::try_from(slot) == Ok(dump),
        }
    }

    /// Blocks at the beginning of the cache that sequences must not get.
    pub fn reserved_blocks(self, block_size: usize) -> usize {
        match self {
            Self::SkipNegative => 0,
            Self::DumpSlot(slot) => {
                let block = slot.checked_div(block_size);
                block.map_or(0, |block| block.saturating_add(1))
            }
        }
    }
}

#[cold]
fn outside(slot: usize, slots: usize) -> Refused {
    refused(
        Rule::PadSlot,
        format_args!("dump slot {slot}"),
        format_args!("below {slots}"),
        "write padding to a slot of the cache, or skip it by a negative slot",
    )
}
