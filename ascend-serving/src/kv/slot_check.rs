//! Checks of a step's slots against their cache.

use ascend_attention::Violation;
use ascend_attention::spec::ops::scatter_pa_kv_cache::{SlotFault, slot_faults};

use crate::rules;

use super::pad::PadPolicy;
use super::slot::count_slots;

/// Checks the slots of one step against a cache of `blocks` blocks of `block_size` tokens: each is padding, or inside
/// the cache and written once.
///
/// # Errors
/// [`POOL_SIZE`](crate::rules::POOL_SIZE) for a cache without slots, or with more than INT32 counts;
/// [`SLOT_RANGE`](crate::rules::SLOT_RANGE) or [`SLOT_DUPLICATE`](crate::rules::SLOT_DUPLICATE) for the first fault
/// that [`slot_faults`] finds and that is not padding.
pub fn check_slots(slots: &[i32], blocks: usize, block_size: usize, pad: PadPolicy) -> Result<(), Violation> {
    let mut first = None;
    let count = count_slots(blocks, block_size)?;
    slot_faults(slots, count as u64, &mut |fault| {
        if first.is_none() && !explained(&fault, pad, block_size) {
            first = Some(fault);
        }
    });
    match first {
        None => Ok(()),
        Some(fault) => Err(faulty(&fault, count)),
    }
}

/// Whether a fault is caused by padding.
fn explained(fault: &SlotFault, pad: PadPolicy, block_size: usize) -> bool {
    let (SlotFault::Negative { slot, .. } | SlotFault::OutOfRange { slot, .. } | SlotFault::Duplicate { slot, .. }) =
        *fault;
    i32::try_from(slot).is_ok_and(|slot| pad.is_padding(slot, block_size))
}

#[cold]
fn faulty(fault: &SlotFault, slots: usize) -> Violation {
    match *fault {
        SlotFault::Negative { token, slot } | SlotFault::OutOfRange { token, slot, .. } => rules::SLOT_RANGE
            .broken(format_args!("slot {slot} of token {token}"), format_args!("0 to {}, or padding", slots - 1)),
        SlotFault::Duplicate { token, earlier, slot } => rules::SLOT_DUPLICATE
            .broken(format_args!("slot {slot} for the tokens {earlier} and {token}"), "each slot once a step"),
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test fails by panicking")]
mod tests {
    use super::*;

    #[test]
    fn faults_of_slots_are_named() {
        let skip = PadPolicy::SkipNegative;
        assert_eq!(check_slots(&[3, -1, 2, -1], 2, 2, skip), Ok(()));
        assert_eq!(check_slots(&[3, 4], 2, 2, skip).unwrap_err().rule, &rules::SLOT_RANGE);
        let twice = check_slots(&[3, -1, 3], 2, 2, skip).unwrap_err();
        assert_eq!(twice.rule, &rules::SLOT_DUPLICATE);
        assert_eq!(twice.given, "slot 3 for the tokens 0 and 2");
        for (blocks, block_size) in [(0, 2), (2, 0), (usize::MAX, 2), (1 << 16, 1 << 15)] {
            let refused = check_slots(&[], blocks, block_size, skip).unwrap_err();
            assert_eq!(refused.rule, &rules::POOL_SIZE);
        }
        let dump = PadPolicy::DumpSlot(0);
        assert_eq!(check_slots(&[0, 2, 0], 2, 2, dump), Ok(()));
        assert_eq!(check_slots(&[-1], 2, 2, dump).unwrap_err().rule, &rules::SLOT_RANGE);
    }
}
