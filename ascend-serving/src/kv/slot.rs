//! Where a token of a sequence lies in a paged cache.
//!
//! A slot is a row of the cache seen as `[blocks * block_size, heads, dim]`: `block * block_size + place in the block`.

use std::num::NonZeroU64;
use std::ops::Range;

use ascend_attention::CallRule;
use ascend_attention::spec::geometry::ContextShard;
use ascend_attention::spec::scatter::{SlotFault, slot_faults};

use crate::refusal::{Refused, Rule, refused, room};

use super::pad::PadPolicy;

/// The largest number that tables and slots have on the device, INT32.
pub(crate) const MOST_BLOCK: usize = i32::MAX as usize;

/// Slots of a cache.
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
/// [`Rule::PoolSize`] for a block size of 0, [`Rule::TableRow`] for a position behind the row, [`Rule::SlotRange`] for a
/// slot beyond INT32.
pub fn slot(row: &[usize], position: usize, block_size: usize) -> Result<usize, Refused> {
    let (column, place) = place_of(position, block_size)?;
    slot_in(block_at(row, column, position)?, place, block_size)
}

/// The column of a token's block in its row of the table, and its place there.
fn place_of(position: usize, block_size: usize) -> Result<(usize, usize), Refused> {
    let column = position.checked_div(block_size);
    let place = position.checked_rem(block_size);
    column.zip(place).ok_or_else(no_block_size)
}

#[cold]
fn no_block_size() -> Refused {
    refused(
        Rule::PoolSize,
        "a block size of 0",
        "1 or more tokens",
        "give the cache's block size",
    )
}

fn block_at(row: &[usize], column: usize, position: usize) -> Result<usize, Refused> {
    row.get(column).copied().ok_or_else(|| {
        refused(
            Rule::TableRow,
            format_args!(
                "position {position} in column {column} of a row of {}",
                row.len()
            ),
            format_args!("columns below {}", row.len()),
            "allocate a block for the token first",
        )
    })
}

fn slot_in(block: usize, place: usize, block_size: usize) -> Result<usize, Refused> {
    let slot = block.saturating_mul(block_size).saturating_add(place);
    on_device(slot).map(|_| slot)
}

/// The block of a head, in a cache whose heads lie in different places of a block (BnNBsD): seen as
/// `[blocks * heads, block_size, D]`, each head of a block is a block of its own.
pub(super) fn head_block(block: usize, heads: usize, head: usize) -> usize {
    block.saturating_mul(heads).saturating_add(head)
}

/// The slot of a head of the token in a slot, where a head has a [block of its own](head_block).
pub(super) fn head_slot(slot: usize, block_size: usize, heads: usize, head: usize) -> usize {
    let block = slot.checked_div(block_size).unwrap_or(0);
    let place = slot.checked_rem(block_size).unwrap_or(0);
    let block = head_block(block, heads, head);
    block.saturating_mul(block_size).saturating_add(place)
}

/// A slot as the device has it.
pub(crate) fn on_device(slot: usize) -> Result<i32, Refused> {
    i32::try_from(slot).map_err(|_| {
        refused(
            Rule::SlotRange,
            slot,
            format_args!("at most {}", i32::MAX),
            "use a smaller cache: slots are INT32",
        )
    })
}

/// Adds the slots of the tokens at `positions`, as [`slot`] has them, block by block.
///
/// # Errors
/// As for [`slot`]; slots before the fault may have been added.
pub(crate) fn fill_slots(
    row: &[usize],
    positions: Range<usize>,
    block_size: usize,
    slots: &mut Vec<i32>,
) -> Result<(), Refused> {
    let mut position = positions.start;
    while position < positions.end {
        let (column, place) = place_of(position, block_size)?;
        let first = slot_in(block_at(row, column, position)?, place, block_size)?;
        let left = positions.end.saturating_sub(position);
        let run = block_size.saturating_sub(place).min(left);
        let end = position.saturating_add(run);
        // A run ends in its block, and has a token.
        let last = first.saturating_add(run.saturating_sub(1));
        room(
            slots,
            run,
            CallRule::LengthsOverflow,
            "add the tokens in several steps",
        )?;
        slots.extend(on_device(first)?..=on_device(last)?);
        position = end;
    }
    Ok(())
}

/// How blocks are divided over the ranks that share a long context: a table entry stands for `block_size` tokens on each
/// of `ranks` ranks, and runs of `interleave` tokens go to one rank after the other.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Interleave {
    ranks: usize,
    run: usize,
}

impl Interleave {
    /// `ranks` ranks, and `run` tokens after one another on each.
    ///
    /// # Errors
    /// [`Rule::RanksInterleave`] if either is 0.
    pub fn new(ranks: usize, run: usize) -> Result<Self, Refused> {
        if ranks == 0 || run == 0 {
            return Err(refused(
                Rule::RanksInterleave,
                format_args!("{ranks} ranks, runs of {run}"),
                "1 or more of each",
                "use 1 rank where the context is not divided",
            ));
        }
        Ok(Self { ranks, run })
    }

    /// Number of ranks.
    pub fn ranks(self) -> usize {
        self.ranks
    }

    /// Tokens after one another on one rank.
    pub fn run(self) -> usize {
        self.run
    }

    /// The rank that holds a position.
    pub fn rank_of(self, position: usize) -> usize {
        // Neither is 0.
        let run = position.checked_div(self.run).unwrap_or(0);
        run.checked_rem(self.ranks).unwrap_or(0)
    }

    /// Number of tokens that `rank` holds of the first `len`: never negative, and 0 for ranks that do not exist.
    pub fn local_len(self, len: usize, rank: usize) -> usize {
        let (ranks, run) = (self.ranks as u64, self.run as u64);
        let counts = NonZeroU64::new(ranks).zip(NonZeroU64::new(run));
        let shard = counts.and_then(|(ranks, run)| ContextShard::new(ranks, run, rank as u64));
        // No more than there are in all.
        shard.map_or(0, |shard| {
            usize::try_from(shard.local_len(len as u64)).unwrap_or(len)
        })
    }

    /// Refuses blocks that do not hold whole runs.
    pub(crate) fn check(self, block_size: usize) -> Result<(), Refused> {
        if block_size == 0 {
            return Err(no_block_size());
        }
        if !block_size.is_multiple_of(self.run) {
            return Err(refused(
                Rule::RanksInterleave,
                format_args!("blocks of {block_size} tokens, runs of {}", self.run),
                "a block size that is a multiple of the run",
                "choose a run that divides the block size",
            ));
        }
        Ok(())
    }

    /// The slot of `position` on `rank`, or `None` where another rank holds it.
    ///
    /// # Errors
    /// [`Rule::RanksInterleave`] if a block does not hold whole runs, otherwise as [`slot`].
    pub fn slot(
        self,
        row: &[usize],
        position: usize,
        block_size: usize,
        rank: usize,
    ) -> Result<Option<usize>, Refused> {
        self.check(block_size)?;
        if self.rank_of(position) != rank {
            return Ok(None);
        }
        // Tokens of a block of every rank, and of a round of runs.
        let (ranks, run) = (self.ranks, self.run);
        let (span, round) = (block_size.saturating_mul(ranks), run.saturating_mul(ranks));
        let divide = |a: usize, b: usize| a.checked_div(b).zip(a.checked_rem(b));
        let parts = divide(position, span).and_then(|(column, offset)| {
            let (rounds, _) = divide(offset, round)?;
            let (_, place) = divide(offset, run)?;
            let place = rounds.checked_mul(run)?.checked_add(place)?;
            Some((column, place))
        });
        // No size is 0, and both numbers are at most `position`.
        let Some((column, place)) = parts else {
            return Err(no_block_size());
        };
        slot_in(block_at(row, column, position)?, place, block_size).map(Some)
    }
}

/// A cache whose blocks are larger than what the kernel takes: each block of the cache is several of the kernel's.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct KernelBlocks {
    kernel_block: usize,
    times: usize,
}

impl KernelBlocks {
    /// Most blocks of the kernel in one of the cache.
    pub const MAX_TIMES: usize = 1 << 16;

    /// Blocks of `cache_block` tokens as blocks of `kernel_block` tokens.
    ///
    /// # Errors
    /// [`Rule::BlockSplit`] unless `cache_block` is a multiple of `kernel_block`, at most
    /// [`MAX_TIMES`](Self::MAX_TIMES) times as large, and neither is 0.
    pub fn new(cache_block: usize, kernel_block: usize) -> Result<Self, Refused> {
        let times = cache_block.checked_div(kernel_block).unwrap_or(0);
        let whole = cache_block.is_multiple_of(kernel_block);
        if !(1..=Self::MAX_TIMES).contains(&times) || !whole {
            return Err(refused(
                Rule::BlockSplit,
                format_args!("cache blocks of {cache_block}, kernel blocks of {kernel_block}"),
                format_args!(
                    "cache blocks of 1 to {} times {kernel_block} tokens",
                    Self::MAX_TIMES
                ),
                "choose the cache's block size as a multiple of the kernel's",
            ));
        }
        Ok(Self {
            kernel_block,
            times,
        })
    }

    /// Tokens in a block of the kernel.
    pub fn kernel_block(self) -> usize {
        self.kernel_block
    }

    /// Blocks of the kernel in one of the cache.
    pub fn times(self) -> usize {
        self.times
    }

    /// The row of a table in kernel blocks: block `id` becomes `id * times .. (id + 1) * times`.
    ///
    /// # Errors
    /// [`Rule::TableBlock`] for a block whose parts have no INT32 number, [`Rule::TableRow`] for a row that does not fit in
    /// the host's memory.
    pub fn split_row(self, row: &[usize]) -> Result<Vec<usize>, Refused> {
        let mut split = Vec::new();
        room(
            &mut split,
            row.len().saturating_mul(self.times),
            Rule::TableRow,
            "split only the filled part of a row",
        )?;
        let times = self.times;
        for &block in row {
            let parts = block.checked_mul(times);
            let parts = parts.and_then(|first| Some(first..first.checked_add(times)?));
            let Some(parts) = parts.filter(|parts| i32::try_from(parts.end).is_ok()) else {
                let most = MOST_BLOCK.checked_div(times).unwrap_or(0);
                return Err(refused(
                    Rule::TableBlock,
                    format_args!("block {block}"),
                    format_args!("0 to {}", most.saturating_sub(1)),
                    "split only the filled part of a row",
                ));
            };
            split.extend(parts);
        }
        Ok(split)
    }
}

/// Checks the slots of one step against a cache of `blocks` blocks of `block_size` tokens: each is padding, or inside the
/// cache and written once.
///
/// # Errors
/// [`Rule::SlotRange`] or [`Rule::SlotDuplicate`], for the first fault that [`slot_faults`] finds and padding does not
/// explain.
pub fn check_slots(
    slots: &[i32],
    blocks: usize,
    block_size: usize,
    pad: PadPolicy,
) -> Result<(), Refused> {
    let mut first = None;
    let capacity = capacity(blocks, block_size);
    slot_faults(slots, capacity as u64, &mut |fault| {
        if first.is_none() && !explained(&fault, pad, block_size) {
            first = Some(fault);
        }
    });
    match first {
        None => Ok(()),
        Some(fault) => Err(faulty(&fault, capacity)),
    }
}

/// Whether a fault is what padding looks like.
fn explained(fault: &SlotFault, pad: PadPolicy, block_size: usize) -> bool {
    let (SlotFault::Negative { slot, .. }
    | SlotFault::OutOfRange { slot, .. }
    | SlotFault::Duplicate { slot, .. }) = *fault;
    i32::try_from(slot).is_ok_and(|slot| pad.is_padding(slot, block_size))
}

#[cold]
fn faulty(fault: &SlotFault, capacity: usize) -> Refused {
    match *fault {
        SlotFault::Negative { token, slot } | SlotFault::OutOfRange { token, slot, .. } => refused(
            Rule::SlotRange,
            format_args!("slot {slot} of token {token}"),
            format_args!("0 to {}, or padding", capacity.saturating_sub(1)),
            "compute slots from the block table of this cache",
        ),
        SlotFault::Duplicate {
            token,
            earlier,
            slot,
        } => refused(
            Rule::SlotDuplicate,
            format_args!("slot {slot} for the tokens {earlier} and {token}"),
            "each slot once a step",
            "give the requests blocks of their own to write to",
        ),
    }
}

#[cfg(test)]
#[allow(
    clippy::unwrap_used,
    clippy::panic,
    reason = "a test fails by panicking"
)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn a_slot_is_block_and_place() {
        assert_eq!(slot(&[7, 3], 0, 16).unwrap(), 112);
        assert_eq!(slot(&[7, 3], 17, 16).unwrap(), 49);
        assert_eq!(slot(&[7, 3], 32, 16).unwrap_err().rule, Rule::TableRow);
        assert_eq!(slot(&[0], 0, 0).unwrap_err().rule, Rule::PoolSize);
        for block in [MOST_BLOCK, usize::MAX] {
            let error = slot(&[block], 0, 16).unwrap_err();
            assert_eq!(error.rule, Rule::SlotRange);
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

    #[test]
    fn cache_blocks_become_kernel_blocks() {
        let split = KernelBlocks::new(256, 128).unwrap();
        assert_eq!(split.split_row(&[0, 5]).unwrap(), [0, 1, 10, 11]);
        for (cache, kernel) in [(16, 128), (192, 128), (128, 0), (0, 128)] {
            let error = KernelBlocks::new(cache, kernel).unwrap_err();
            assert_eq!(error.rule, Rule::BlockSplit);
        }
        for block in [MOST_BLOCK, usize::MAX] {
            let error = split.split_row(&[block]).unwrap_err();
            assert_eq!(error.rule, Rule::TableBlock);
        }
    }

    #[test]
    fn faults_of_slots_are_named() {
        let skip = PadPolicy::SkipNegative;
        assert_eq!(check_slots(&[3, -1, 2, -1], 2, 2, skip), Ok(()));
        assert_eq!(
            check_slots(&[3, 4], 2, 2, skip).unwrap_err().rule,
            Rule::SlotRange
        );
        let twice = check_slots(&[3, -1, 3], 2, 2, skip).unwrap_err();
        assert_eq!(twice.rule, Rule::SlotDuplicate);
        assert_eq!(twice.given, "slot 3 for the tokens 0 and 2");
        let dump = PadPolicy::DumpSlot(0);
        assert_eq!(check_slots(&[0, 2, 0], 2, 2, dump), Ok(()));
        assert_eq!(
            check_slots(&[-1], 2, 2, dump).unwrap_err().rule,
            Rule::SlotRange
        );
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

        #[test]
        fn kernel_blocks_keep_every_slot(times in 1usize..6, kernel in 1usize..40, row in prop::collection::vec(0usize..50, 1..6)) {
            let cache = times * kernel;
            let split = KernelBlocks::new(cache, kernel).unwrap().split_row(&row).unwrap();
            for position in 0..cache * row.len() {
                prop_assert_eq!(slot(&row, position, cache), slot(&split, position, kernel));
            }
        }

        /// Every token is on one rank, in a slot of its own, and the ranks' lengths are what their tokens count.
        #[test]
        fn ranks_divide_a_context(ranks in 1usize..6, run in 1usize..5, runs in 1usize..5, blocks in 1usize..4, cut in 0usize..1000) {
            let share = Interleave::new(ranks, run).unwrap();
            let block_size = run * runs;
            let row: Vec<usize> = (0..blocks).map(|b| b * 3 + 1).collect();
            let len = cut % (block_size * ranks * blocks + 1);
            let mut held = vec![Vec::new(); ranks];
            for position in 0..len {
                let mut holders = 0;
                for (rank, held) in held.iter_mut().enumerate() {
                    if let Some(slot) = share.slot(&row, position, block_size, rank).unwrap() {
                        holders += 1;
                        prop_assert_eq!(rank, share.rank_of(position));
                        held.push(slot);
                    }
                }
                prop_assert_eq!(holders, 1);
            }
            for (rank, slots) in held.iter().enumerate() {
                prop_assert_eq!(slots.len(), share.local_len(len, rank));
                // A rank's tokens lie in order, as in a cache of their own.
                let own: Vec<usize> = (0..slots.len()).map(|p| slot(&row, p, block_size).unwrap()).collect();
                prop_assert_eq!(slots, &own);
            }
        }

        #[test]
        fn local_lengths_add_up(ranks in 1usize..2000, run in 1usize..2000, len in any::<usize>()) {
            let share = Interleave::new(ranks, run).unwrap();
            let sum: u128 = (0..ranks).map(|rank| share.local_len(len, rank) as u128).sum();
            prop_assert_eq!(sum, len as u128);
            prop_assert_eq!(share.local_len(len, ranks), 0);
        }
    }
}
