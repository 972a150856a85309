//! The slot of a token of a sequence in a paged cache.
//!
//! A slot is a row of the cache seen as `[blocks * block_size, heads, dim]`:
//! `block * block_size + place in the block`.

use std::fmt;
use std::ops::Range;

use ascend_attention::Violation;

use crate::rules::{self, room};

/// The largest number of a table entry or slot on the device, INT32.
pub(crate) const MAX_INT32: usize = i32::MAX as usize;

/// Number of slots of a cache of `blocks` blocks of `block_size` tokens. Slots are numbered by INT32, so that all sums
/// and products of blocks, slots and positions in a cache that this accepts can be counted.
///
/// # Errors
/// [`POOL_SIZE`](crate::rules::POOL_SIZE) for a cache without slots, or with more than INT32 counts.
pub(crate) fn count_slots(blocks: usize, block_size: usize) -> Result<usize, Violation> {
    let slots = blocks.checked_mul(block_size);
    slots.filter(|slots| (1..=MAX_INT32).contains(slots)).ok_or_else(|| {
        Violation::new(
            &rules::POOL_SIZE,
            format_args!("{blocks} blocks of {block_size} tokens"),
            format_args!("1 or more of both, at most {MAX_INT32} slots in all"),
            "give the blocks and the block size of the cache",
        )
    })
}

/// Refuses a block size of 0, and one that INT32 does not count.
///
/// # Errors
/// [`POOL_SIZE`](crate::rules::POOL_SIZE).
pub(crate) fn check_block_size(block_size: usize) -> Result<(), Violation> {
    if (1..=MAX_INT32).contains(&block_size) {
        return Ok(());
    }
    Err(Violation::new(
        &rules::POOL_SIZE,
        format_args!("a block size of {block_size}"),
        format_args!("1 to {MAX_INT32} tokens"),
        "give the cache's block size",
    ))
}

/// The number of tokens of a request or sequence with these cached ones and new ones, which INT32 counts.
///
/// # Errors
/// [`LENGTHS_OVERFLOW`](crate::rules::LENGTHS_OVERFLOW), where `whose` names the request or sequence.
pub(crate) fn check_tokens(cached: usize, new: usize, whose: impl fmt::Display) -> Result<usize, Violation> {
    let len = cached.checked_add(new);
    len.filter(|len| *len <= MAX_INT32).ok_or_else(|| {
        Violation::new(
            &rules::LENGTHS_OVERFLOW,
            format_args!("{cached} cached and {new} new tokens of {whose}"),
            format_args!("at most {MAX_INT32}"),
            "end the request",
        )
    })
}

/// The slot of the token at `position`: `row[position / block_size] * block_size + position % block_size`.
///
/// # Errors
/// [`POOL_SIZE`](crate::rules::POOL_SIZE) for a block size that is 0 or no INT32,
/// [`TABLE_ROW`](crate::rules::TABLE_ROW) for a position past the end of the row,
/// [`SLOT_RANGE`](crate::rules::SLOT_RANGE) for a slot beyond INT32.
pub fn slot(row: &[usize], position: usize, block_size: usize) -> Result<usize, Violation> {
    check_block_size(block_size)?;
    let block = block_of(row, position / block_size, position)?;
    slot_in(block, position % block_size, block_size)
}

/// The block in a column of a row, which holds the token at `position`.
fn block_of(row: &[usize], column: usize, position: usize) -> Result<usize, Violation> {
    row.get(column).copied().ok_or_else(|| {
        Violation::new(
            &rules::TABLE_ROW,
            format_args!("position {position} in column {column} of a row of {}", row.len()),
            format_args!("columns below {}", row.len()),
            "allocate a block for the token first",
        )
    })
}

/// The slot of a place in a block, whatever the number of the block.
fn slot_in(block: usize, place: usize, block_size: usize) -> Result<usize, Violation> {
    let first = block.checked_mul(block_size);
    let slot = first.and_then(|first| first.checked_add(place));
    slot.filter(|slot| *slot <= MAX_INT32).ok_or_else(|| {
        Violation::new(
            &rules::SLOT_RANGE,
            format_args!("token {place} of block {block}, of {block_size} tokens"),
            format_args!("slots of at most {MAX_INT32}"),
            "use a smaller cache: slots are INT32",
        )
    })
}

/// The block of a head, in a cache with the heads of a block one after another (BnNBsD): seen as
/// `[blocks * heads, block_size, D]`, each head of a block is a block of its own.
pub(super) fn head_block(block: usize, heads: usize, head: usize) -> usize {
    block * heads + head
}

/// The slot of one head of the token in a slot, where each head has a [block of its own](head_block).
pub(super) fn head_slot(slot: usize, block_size: usize, heads: usize, head: usize) -> usize {
    head_block(slot / block_size, heads, head) * block_size + slot % block_size
}

/// The slot of a token where blocks have a stride of `step` blocks, counted in the memory from the first block on.
pub(super) fn spread_slot(slot: usize, block_size: usize, step: usize) -> usize {
    slot / block_size * step * block_size + slot % block_size
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
    check_block_size(block_size)?;
    let mut position = positions.start;
    while position < positions.end {
        let (column, place) = (position / block_size, position % block_size);
        let block = block_of(row, column, position)?;
        let run = (block_size - place).min(positions.end - position);
        let first = slot_in(block, place, block_size)?;
        let last = slot_in(block, place + run - 1, block_size)?;
        room(slots, run, &rules::LENGTHS_OVERFLOW, "add the tokens in several steps")?;
        // Both are INT32, as `slot_in` has checked.
        slots.extend(first as i32..=last as i32);
        position += run;
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
        for block_size in [0, MAX_INT32 + 1, usize::MAX] {
            let error = slot(&[0], 0, block_size).unwrap_err();
            assert_eq!(error.rule, &rules::POOL_SIZE);
        }
        for block in [MAX_INT32, usize::MAX] {
            let error = slot(&[block], 0, 16).unwrap_err();
            assert_eq!(error.rule, &rules::SLOT_RANGE);
            assert_eq!(error.allowed, "slots of at most 2147483647");
        }
    }

    #[test]
    fn heads_of_a_block_are_blocks() {
        let slots = |slot| [0, 1, 2].map(|head| head_slot(slot, 4, 3, head));
        assert_eq!((slots(0), slots(3)), ([0, 4, 8], [3, 7, 11]));
        assert_eq!(slots(9), [25, 29, 33]);
        assert_eq!(head_slot(9, 4, 1, 0), 9);
    }

    proptest! {
        #[test]
        fn slots_of_a_range_are_those_of_its_tokens(
            row in prop::collection::vec(0usize..50, 1..6),
            size in 1usize..9,
            cut in any::<[usize; 2]>(),
        ) {
            let tokens = size * row.len();
            let (a, b) = (cut[0] % (tokens + 1), cut[1] % (tokens + 1));
            let mut slots = Vec::new();
            fill_slots(&row, a.min(b)..a.max(b), size, &mut slots).unwrap();
            let each: Vec<i32> = (a.min(b)..a.max(b)).map(|p| slot(&row, p, size).unwrap() as i32).collect();
            prop_assert_eq!(slots, each);
        }
    }
}
