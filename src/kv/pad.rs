//! What padding tokens write.

use serde::{Deserialize, Serialize};

/// The slot that a padding token has. Engines disagree, so it is said.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum PadPolicy {
    /// A negative slot, which the writer skips wherever it stands in the list.
    #[default]
    SkipNegative,
    /// A slot of a block that no sequence ever gets, where padding may be written any number of times.
    DumpSlot(u32),
}

impl PadPolicy {
    /// The slot of a padding token.
    pub fn slot(self) -> i32 {
        match self {
            Self::SkipNegative => -1,
            Self::DumpSlot(slot) => i32::try_from(slot).unwrap_or(i32::MAX),
        }
    }

    /// Whether a slot is padding.
    pub fn is_padding(self, slot: i32) -> bool {
        match self {
            Self::SkipNegative => slot < 0,
            Self::DumpSlot(_) => slot == self.slot(),
        }
    }

    /// Blocks at the beginning of the cache that sequences must not get.
    pub fn reserved_blocks(self, block_size: u32) -> u32 {
        match self {
            Self::SkipNegative => 0,
            Self::DumpSlot(slot) => slot.checked_div(block_size).map_or(0, |block| block + 1),
        }
    }
}
