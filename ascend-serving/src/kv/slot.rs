//! The slot of a token of a sequence in a paged cache.
//!
//! A slot is a row of the cache seen as `[blocks * block_size, heads, dim]`:
//! `block * block_size + place in the block`.

use std::ops::Range;

use ascend_attention::Violation;

use crate::rules::{self, room};

/// The largest number of a table entry or slot on the device, INT32.
pub(crate) const MAX_INT32: usize = i32::MAX as usize;

/// Number of slots of a cache.
pub(crate) fn capacity(blocks: usize, block_size: usize) -> usize {
    blocks.saturating_mul(block_size)
}

/// Tokens from a position to the end of its block; 0 for a block size of 0.
pub(super) fn rest_of_block(position: usize, block_size: usize) -> usize {
    let place = position.checked_rem(block_size).unwrap_or(0);
    block_size.saturating_sub(place)
}

/// The slot of the token at `position`: `row[position / block_size] * block_size + position % block_size`.
///
/// # Errors
/// [`POOL_SIZE`](crate::rules::POOL_SIZE) for a block size of 0, [`TABLE_ROW`](crate::rules::TABLE_ROW) for a
/// position past the end of the row, [`SLOT_RANGE`](crate::rules::SLOT_RANGE) for a slot beyond INT32.
pub fn slot(row: &[usize], position: usize, block_size: usize) -> Result<usize, Violation> {
    let (column, place) = place_of(position, block_size)?;
    slot_in(block_at(row, column, position)?, place, block_size)
}

/// The column of a token's block in its row of the table, and its place in the block.
fn place_of(position: usize, block_size: usize) -> Result<(usize, usize), Violation> {
    let column = position.checked_div(block_size);
    let place = position.checked_rem(block_size);
    column.zip(place).ok_or_else(no_block_size)
}

#[cold]
pub(super) fn no_block_size() -> Violation {
    Violation::new(
        &rules::POOL_SIZE,
        "a block size of 0",
        "1 or more tokens",
        "give the cache's block size",
    )
}

pub(super) fn block_at(row: &[usize], column: usize, position: usize) -> Result<usize, Violation> {
    row.get(column).copied().ok_or_else(|| {
        Violation::new(
            &rules::TABLE_ROW,
            format_args!(
                "position {position} in column {column} of a row of {}",
                row.len()
            ),
            format_args!("columns below {}", row.len()),
            "allocate a block for the token first",
        )
    })
}

pub(super) fn slot_in(block: usize, place: usize, block_size: usize) -> Result<usize, Violation> {
    let slot = block.saturating_mul(block_size).saturating_add(place);
    on_device(slot).map(|_| slot)
}

/// The block of a head, in a cache with the heads of a block one after another (BnNBsD): seen as
/// `[blocks * heads, block_size, D]`, each head of a block is a block of its own.
pub(super) fn head_block(block: usize, heads: usize, head: usize) -> usize {
    block.saturating_mul(heads).saturating_add(head)
}

/// The slot of one head of the token in a slot, where each head has a [block of its own](head_block).
pub(super) fn head_slot(slot: usize, block_size: usize, heads: usize, head: usize) -> usize {
    let block = slot.checked_div(block_size).unwrap_or(0);
    let place = slot.checked_rem(block_size).unwrap_or(0);
    let block = head_block(block, heads, head);
    block.saturating_mul(block_size).saturating_add(place)
}

/// A slot as INT32, for the device.
pub(crate) fn on_device(slot: usize) -> Result<i32, Violation> {
    i32::try_from(slot).map_err(|_| {
        Violation::new(
            &rules::SLOT_RANGE,
            slot,
            format_args!("at most {}", i32::MAX),
            "use a smaller cache: slots are INT32",
        )
    })
}

/// Appends the slots of the tokens at `positions`, as [`slot`] computes them, block by block.
///
/// # Errors
/// As for [`slot`]; slots before the fault may have been added.
pub(crate) fn fill_slots(
    row: &[usize],
    positions: Range<usize>,
    block_size: usize,
    slots: &mut Vec<i32>,
) -> Result<(), Violation> {
    let mut position = positions.start;
    while position < positions.end {
        let (column, place) = place_of(position, block_size)?;
        let first = slot_in(block_at(row, column, position)?, place, block_size)?;
        let left = positions.end.saturating_sub(position);
        let run = block_size.saturating_sub(place).min(left);
        let end = position.saturating_add(run);
        // A run ends in its block, and has at least one token.
        let last = first.saturating_add(run.saturating_sub(1));
        room(
            slots,
            run,
            &rules::LENGTHS_OVERFLOW,
            "add the tokens in several steps",
        )?;
        slots.extend(on_device(first)?..=on_device(last)?);
        position = end;
    }
    Ok(())
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test fails by panicking")]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn a_slot_is_block_and_place() {
        assert_eq!(slot(&[7, 3], 0, 16).unwrap(), 112);
        assert_eq!(slot(&[7, 3], 17, 16).unwrap(), 49);
        assert_eq!(slot(&[7, 3], 32, 16).unwrap_err().rule, &rules::TABLE_ROW);
        assert_eq!(slot(&[0], 0, 0).unwrap_err().rule, &rules::POOL_SIZE);
        for block in [MAX_INT32, usize::MAX] {
            let error = slot(&[block], 0, 16).unwrap_err();
            assert_eq!(error.rule, &rules::SLOT_RANGE);
            assert_eq!(error.allowed, "at most 2147483647");
        }
    }

    #[test]
    fn heads_of_a_block_are_blocks() {
        let slots = |slot| [0, 1, 2].map(|head| head_slot(slot, 4, 3, head));
        assert_eq!((slots(0), slots(3)), ([0, 4, 8], [3, 7, 11]));
        assert_eq!(slots(9), [25, 29, 33]);
        assert_eq!(head_slot(9, 4, 1, 0), 9);
        assert_eq!(head_slot(9, 0, 1, 0), 0);
    }

    proptest! {
        #[test]
        fn slots_of_a_range_are_those_of_its_tokens(row in prop::collection::vec(0usize..50, 1..6), size in 1usize..9, cut in any::<[usize; 2]>()) {
            let tokens = size * row.len();
            let (a, b) = (cut[0] % (tokens + 1), cut[1] % (tokens + 1));
            let mut slots = Vec::new();
            fill_slots(&row, a.min(b)..a.max(b), size, &mut slots).unwrap();
            let each: Vec<i32> = (a.min(b)..a.max(b)).map(|p| slot(&row, p, size).unwrap() as i32).collect();
            prop_assert_eq!(slots, each);
        }

    }
}
