//! The tokens that one request has in a paged cache.

use std::iter;

use ascend_attention::Violation;

use crate::causality::Causality;
use crate::rules::{self, room};

use super::block_copy::{BlockCopy, uncopied};
use super::pool::{Block, BlockPool, CacheEntry, CopiesIn, SequenceEntry, SequenceStamp};
use super::request_state::RequestState;
use super::slot::{check_tokens, fill_slots, slot};

/// The cached tokens of one request: blocks, and how many tokens they hold.
///
/// A sequence may begin as a copy of another one ([`fork`](Sequence::fork),
/// [`share_prefix`](Sequence::share_prefix)): the blocks are shared until one of the two writes to a block that both
/// hold, which it then replaces by a copy of its own ([`Growth::copies`]).
///
/// A model with several groups of layers has a cache for each group, and a sequence of it
/// ([`Attention::sequence`](crate::Attention::sequence)) the request's tokens in all of them: it grows by
/// [`Attention::grow`](crate::Attention::grow), is cut, forked and shared in every group, and its pool, row and slots
/// are those of the first group; [`group`](Self::group) has the others. Where the model has layers of linear attention
/// ([`Attention::of_hybrid`](crate::Attention::of_hybrid)), the sequence also has a recurrent state for these layers.
/// After a step of at most `1 + drafts` tokens the state after each of its tokens is kept, otherwise only that after
/// the last. Such a sequence can be truncated, forked or shared only at a token whose state is kept, or at 0.
#[derive(Debug)]
pub struct Sequence {
    pool: BlockPool,
    blocks: Vec<Option<Block>>,
    /// The blocks' numbers, as the table has them.
    row: Vec<usize>,
    len: usize,
    /// The number of first tokens that were given back.
    given_back: usize,
    entry: SequenceEntry,
    /// The blocks that a step may still write which was in progress when the sequence was forked. Held once more, they
    /// stay shared, so that they are copied before the sequence writes to them though it is the last one that has them.
    written_by_step: Vec<Block>,
    /// Which keys the layers see, where growth gives back the tokens that they show no more.
    causality: Option<Causality>,
    /// Its tokens in the caches of the other groups of layers.
    others: Vec<Sequence>,
    /// The state of its tokens in layers of linear attention.
    state: Option<RequestState>,
}

/// The slots of the new tokens of a sequence that grew, and the copies to queue before they are written.
#[derive(Debug, Default)]
#[must_use = "new tokens go to these slots, after these copies"]
#[non_exhaustive]
pub struct Growth {
    /// The slot of each new token, in order: INT32, as in the list of a step's slots on the device.
    pub slots: Vec<i32>,
    /// Blocks to copy first, because the sequence shared them.
    pub copies: Vec<BlockCopy>,
}

/// Blocks that are reserved for more tokens of a sequence.
#[derive(Debug)]
pub(crate) struct Room {
    len: usize,
    /// The index of a shared block, and the block that replaces it.
    replaced: Option<(usize, Block)>,
    new: Vec<Block>,
    /// The copies to queue.
    pub(crate) copies: Vec<BlockCopy>,
    /// Memory for the slots.
    slots: Vec<i32>,
}

impl Sequence {
    /// A sequence without tokens.
    pub fn new(pool: &BlockPool) -> Self {
        Self {
            pool: pool.clone(),
            blocks: Vec::new(),
            row: Vec::new(),
            len: 0,
            given_back: 0,
            entry: SequenceEntry::new(pool, 0),
            written_by_step: Vec::new(),
            causality: None,
            others: Vec::new(),
            state: None,
        }
    }

    /// A sequence whose tokens fill these blocks, in every cache of the pool; the first ones may be given back.
    pub(crate) fn of_blocks(pool: &BlockPool, blocks: Vec<Option<Block>>) -> Self {
        let tokens = |blocks: usize| blocks * pool.block_size();
        let given_back = blocks.iter().take_while(|block| block.is_none()).count();
        let len = tokens(blocks.len());
        Self {
            pool: pool.clone(),
            row: (blocks.iter()).map(|block| block.as_ref().map_or(0, Block::id)).collect(),
            len,
            entry: SequenceEntry::new(pool, len),
            written_by_step: Vec::new(),
            given_back: tokens(given_back),
            blocks,
            causality: None,
            others: Vec::new(),
            state: None,
        }
    }

    /// Says which keys the layers see, so that growth gives back the tokens that they show no more. Where they show
    /// all, what is given back is left to the caller.
    pub(crate) fn seen_by(mut self, causality: Option<Causality>) -> Self {
        self.causality = causality.filter(|causality| causality.window().is_some());
        self
    }

    /// Adds sequences of the same tokens in the caches of other groups of layers.
    pub(crate) fn beside(mut self, others: impl Iterator<Item = Self>) -> Self {
        self.others.extend(others);
        self
    }

    /// Adds the state of the same tokens in layers of linear attention.
    pub(crate) fn with_state(mut self, state: Option<RequestState>) -> Self {
        self.state = state;
        self
    }

    /// The state of its tokens in layers of linear attention.
    pub(crate) fn state(&self) -> Option<&RequestState> {
        self.state.as_ref()
    }

    /// The tokens in the cache of a group of layers; for 0, the first, the sequence itself, with those of all groups.
    pub fn group(&self, group: usize) -> Option<&Self> {
        match group.checked_sub(1) {
            None => Some(self),
            Some(other) => self.others.get(other),
        }
    }

    /// The tokens in the cache of a group, to be changed.
    pub(crate) fn group_mut(&mut self, group: usize) -> Option<&mut Self> {
        match group.checked_sub(1) {
            None => Some(self),
            Some(other) => self.others.get_mut(other),
        }
    }

    /// The tokens in the cache of each group.
    pub(crate) fn groups(&self) -> impl Iterator<Item = &Self> + Clone {
        iter::once(self).chain(&self.others)
    }

    /// Refuses a sequence of another number of groups than `groups`.
    pub(crate) fn check_groups(&self, groups: usize) -> Result<(), Violation> {
        let own = self.others.len().saturating_add(1);
        match own == groups {
            true => Ok(()),
            false => Err(Violation::new(
                &rules::GROUP_LAYERS,
                format_args!("a sequence in the caches of {own} groups of layers"),
                format_args!("one in {groups}"),
                "make a sequence by `Attention::sequence`, and by the same attention its metadata, and what changes or \
                 counts its tokens (`grow`, `move_tokens`, `mark_computed`, `computed_tokens`, \
                 `queue_pending_copies`)",
            )),
        }
    }

    /// The number of first tokens that a step has computed; all of them in a pool without a cache of this crate.
    fn computed(&self) -> usize {
        let computed = self.pool.computed_tokens(self.stamp());
        computed.unwrap_or(usize::MAX).min(self.len)
    }

    /// The first token that growth keeps: the first that the first token which is not computed sees.
    fn first_kept(&self) -> usize {
        self.causality.map_or(0, |causality| causality.shown_from(self.computed()))
    }

    /// Keys that a step of `tokens` new tokens reads, once growing by them has given back what the window hides.
    pub(crate) fn keys_after(&self, tokens: usize) -> usize {
        let shown = match tokens {
            0 => 0,
            _ => self.first_kept(),
        };
        let given_back = self.given_back.max(self.whole_blocks_before(shown));
        self.len.saturating_sub(given_back).saturating_add(tokens)
    }

    /// Gives back the tokens before the window of the first token that is not computed, in every group.
    pub(crate) fn give_back(&mut self) {
        self.drop_blocks_before(self.first_kept());
        self.others.iter_mut().for_each(Self::give_back);
    }

    /// The block at an index, unless it was given back.
    pub(crate) fn block(&self, column: usize) -> Option<&Block> {
        self.blocks.get(column).and_then(Option::as_ref)
    }

    /// The pool of its blocks, of several groups that of the first.
    pub fn pool(&self) -> &BlockPool {
        &self.pool
    }

    /// Number of tokens, including those that were given back.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether it has no token.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Its row of the block table. Blocks before a window that were given back have the number 0, which no launch
    /// reads.
    pub fn row(&self) -> &[usize] {
        &self.row
    }

    /// The slot of a token.
    ///
    /// # Errors
    /// [`SEQUENCE_LENGTH`](crate::rules::SEQUENCE_LENGTH) for a token that it does not have, or has given back.
    pub fn slot(&self, position: usize) -> Result<usize, Violation> {
        if position >= self.len || position < self.given_back {
            return Err(Violation::new(
                &rules::SEQUENCE_LENGTH,
                format_args!("position {position}"),
                format_args!("at least {} and below {}", self.given_back, self.len),
                "ask for a token that is cached, and move accepted drafts before the others are cut off",
            ));
        }
        slot(&self.row, position, self.pool.block_size())
    }

    /// The number of first tokens that were given back ([`Sequence::drop_before`]), a multiple of the block size.
    pub fn given_back(&self) -> usize {
        self.given_back
    }

    /// The identity and version of the sequence.
    pub(crate) fn stamp(&self) -> SequenceStamp {
        self.entry.stamp()
    }

    /// Refuses more tokens than the sequence has; `fix` is the advice of the refusal.
    ///
    /// # Errors
    /// [`SEQUENCE_LENGTH`](crate::rules::SEQUENCE_LENGTH).
    pub(crate) fn check_count(&self, tokens: usize, fix: &'static str) -> Result<(), Violation> {
        if tokens <= self.len {
            return Ok(());
        }
        Err(Violation::new(
            &rules::SEQUENCE_LENGTH,
            format_args!("{tokens} tokens"),
            format_args!("at most {}, those of the sequence", self.len),
            fix,
        ))
    }

    /// The first of its blocks whose tokens were not copied yet ([`Growth::copies`]), so that no step may read it.
    ///
    /// Where several caches share the pool, each checks for itself when a step begins.
    pub(crate) fn uncopied(&self) -> Option<usize> {
        self.pool.first_uncopied(self.held_blocks(), CopiesIn::OnlyCache)
    }

    /// As [`uncopied`](Self::uncopied), in one cache of the pool.
    pub(crate) fn uncopied_in(&self, cache: &CacheEntry) -> Option<usize> {
        self.pool.first_uncopied(self.held_blocks(), CopiesIn::Cache(cache))
    }

    /// The numbers of its blocks that were not given back.
    pub(super) fn held_blocks(&self) -> impl Iterator<Item = usize> {
        self.blocks.iter().flatten().map(Block::id)
    }

    /// Makes room for `tokens` more tokens. After an error the sequence is unchanged.
    ///
    /// [`PagedKvCache::grow`](crate::kv::PagedKvCache::grow) does this and queues the copies, so that none is
    /// forgotten.
    ///
    /// # Errors
    /// [`POOL_EXHAUSTED`](crate::rules::POOL_EXHAUSTED); [`POOL_WAITING`](crate::rules::POOL_WAITING) if there will
    /// be enough blocks when the steps in flight are over; [`LENGTHS_OVERFLOW`](crate::rules::LENGTHS_OVERFLOW) for
    /// a sequence of more than INT32 tokens, or more than the host has memory for;
    /// [`GROUP_LAYERS`](crate::rules::GROUP_LAYERS) for one in the caches of several groups of layers.
    pub fn grow(&mut self, tokens: usize) -> Result<Growth, Violation> {
        self.check_groups(1)?;
        let room = self.reserve(tokens)?;
        self.settle(room)
    }

    /// Reserves blocks and host memory for `tokens` more tokens. Dropping them gives the blocks back.
    pub(crate) fn reserve(&mut self, tokens: usize) -> Result<Room, Violation> {
        let block_size = self.pool.block_size();
        let len = check_tokens(self.len, tokens, "a sequence")?;
        let first_written = self.len / block_size;
        // The sequence has a block for each of its tokens, and no others.
        let missing = len.div_ceil(block_size) - self.blocks.len();
        let written = self.blocks.get(first_written).and_then(Option::as_ref);
        let shared = written.filter(|block| tokens > 0 && block.is_shared());
        let own = usize::from(shared.is_some());
        let mut new = self.pool.take(missing + own)?.into_iter();
        let mut copies = Vec::new();
        let mut replaced = None;
        if let Some(from) = shared
            && let Some(own) = new.next()
        {
            copies.push(BlockCopy { from: from.to_copy(), to: own.id(), number: self.pool.await_copy(from, &own) });
            replaced = Some((first_written, own));
        }
        let (rule, fix) = (&rules::LENGTHS_OVERFLOW, "grow by fewer tokens");
        let mut slots = Vec::new();
        room(&mut self.blocks, missing, rule, fix)?;
        room(&mut self.row, missing, rule, fix)?;
        room(&mut slots, tokens, rule, fix)?;
        let new = new.collect();
        Ok(Room { len, replaced, new, copies, slots })
    }

    /// Reserves blocks for `tokens` more tokens. Waits for blocks that steps in flight may still read.
    pub(crate) fn reserve_in_time(&mut self, tokens: usize) -> Result<Room, Violation> {
        loop {
            match self.reserve(tokens) {
                Err(full) if full.rule == &rules::POOL_WAITING && self.pool.await_step() => {}
                outcome => return outcome,
            }
        }
    }

    /// Adds reserved blocks to the sequence.
    pub(crate) fn settle(&mut self, room: Room) -> Result<Growth, Violation> {
        let Room { len, replaced, new, copies, mut slots } = room;
        if let Some((column, own)) = replaced {
            self.row[column] = own.id();
            let replaced = self.blocks[column].replace(own);
            self.entry.give_up(replaced.into_iter());
            self.forget_written();
            self.entry.replace_block();
        }
        self.row.extend(new.iter().map(Block::id));
        self.blocks.extend(new.into_iter().map(Some));
        let block_size = self.pool.block_size();
        fill_slots(&self.row, self.len..len, block_size, &mut slots)?;
        if len > self.len {
            self.entry.change();
        }
        self.len = len;
        Ok(Growth { slots, copies })
    }

    /// A sequence with the same tokens in the same blocks. Their keys are those that steps have written, or are
    /// queued to write: fork after the step that computes a token. A step that writes a block which a fork holds is
    /// refused ([`TABLE_SHARED`](crate::rules::TABLE_SHARED)). A fork that is made while a step is in progress has no
    /// state in layers of linear attention, and is refused by the next step of such a model
    /// ([`STATE_TORN`](crate::rules::STATE_TORN)).
    pub fn fork(&self) -> Self {
        self.first(self.len)
    }

    /// A sequence with the first `tokens` tokens of this one. Later blocks get no further holder.
    fn first(&self, tokens: usize) -> Self {
        let block_size = self.pool.block_size();
        let kept = tokens.div_ceil(block_size);
        let blocks: Vec<_> = self.blocks.iter().take(kept).cloned().collect();
        let row: Vec<_> = self.row.iter().take(kept).copied().collect();
        let written = self.entry.written_from();
        let written = written.and_then(|before| blocks.get(before / block_size..));
        let written = written.into_iter().flatten().flatten();
        let earlier = self.written_by_step.iter();
        let earlier = earlier.filter(|block| holds(&blocks, block));
        Self {
            written_by_step: written.chain(earlier).cloned().collect(),
            pool: self.pool.clone(),
            blocks,
            row,
            len: tokens,
            given_back: self.given_back.min(tokens),
            entry: self.entry.fork(tokens),
            causality: self.causality,
            others: self.others.iter().map(|other| other.first(tokens)).collect(),
            state: self.state.as_ref().map(|state| state.fork(tokens)),
        }
    }

    /// A sequence that begins with the first `tokens` of this one, in the same blocks, which a step has computed, as
    /// for [`fork`](Self::fork).
    ///
    /// # Errors
    /// [`SEQUENCE_LENGTH`](crate::rules::SEQUENCE_LENGTH) if it has fewer, or gave back some of those that the next
    /// token sees: where layers have a window, a prefix can be shared while its end is still in the window, or is kept
    /// by a sequence of its own; [`STATE_KEPT`](crate::rules::STATE_KEPT) where the state behind these tokens is not
    /// kept in layers of linear attention, [`STATE_TORN`](crate::rules::STATE_TORN) while a step is in progress there,
    /// and after one that left layers out.
    pub fn share_prefix(&self, tokens: usize) -> Result<Self, Violation> {
        let shown = |part: &Self| part.causality.map_or(0, |causality| causality.shown_from(tokens));
        for part in self.groups() {
            if part.given_back > 0 && !part.keeps(tokens, shown(part)) {
                return Err(Violation::new(
                    &rules::SEQUENCE_LENGTH,
                    format_args!(
                        "a prefix of {tokens} tokens of a sequence of {} without its first {}",
                        part.len, part.given_back
                    ),
                    "a sequence that still has what the next token sees",
                    "share the prefix when its last token was cached, before giving blocks back, and keep that \
                     sequence",
                ));
            }
            part.check_kept(tokens, shown(part))?;
        }
        self.check_state(tokens)?;
        let mut prefix = self.first(tokens);
        for group in 0..=prefix.others.len() {
            if let Some(part) = prefix.group_mut(group) {
                part.drop_blocks_before(shown(part));
            }
        }
        Ok(prefix)
    }

    /// Removes the tokens from `tokens` on, such as drafts that were not accepted, or all when the request is
    /// preempted. After an error the sequence is unchanged.
    ///
    /// # Errors
    /// [`SEQUENCE_LENGTH`](crate::rules::SEQUENCE_LENGTH) if it has fewer, or for fewer than were given back, other
    /// than 0; [`STATE_KEPT`](crate::rules::STATE_KEPT) and [`STATE_TORN`](crate::rules::STATE_TORN) as for
    /// [`share_prefix`](Self::share_prefix), other than for 0.
    pub fn truncate(&mut self, tokens: usize) -> Result<(), Violation> {
        for part in self.groups() {
            // Without a causality the caller decides which tokens are given back.
            part.check_kept(tokens, part.causality.map_or(tokens, |causality| causality.shown_from(tokens)))?;
        }
        self.check_state(tokens)?;
        self.cut(tokens);
        Ok(())
    }

    /// Refuses a number of tokens behind which no state is kept in layers of linear attention.
    fn check_state(&self, tokens: usize) -> Result<(), Violation> {
        self.state.as_ref().map_or(Ok(()), |state| state.check_kept(tokens))
    }

    /// Removes the tokens from `tokens` on, which is checked.
    fn cut(&mut self, tokens: usize) {
        let kept = tokens.div_ceil(self.pool.block_size());
        let cut = self.blocks.drain(kept.min(self.blocks.len())..);
        self.entry.give_up(cut.flatten());
        self.row.truncate(kept);
        self.forget_written();
        if tokens < self.len {
            self.entry.cut(tokens);
        }
        self.len = tokens;
        self.given_back = self.given_back.min(tokens);
        self.others.iter_mut().for_each(|other| other.cut(tokens));
        if let Some(state) = &mut self.state {
            state.cut(tokens);
        }
    }

    /// Gives back the blocks that are wholly before `position`, the first token that a sliding window still shows. A
    /// step in flight may go on reading them. [`Attention::grow`](crate::Attention::grow) does so by itself for the
    /// sequences that it [makes](crate::Attention::sequence).
    ///
    /// # Errors
    /// [`BLOCK_WINDOW`](crate::rules::BLOCK_WINDOW) for a position past the end of the tokens;
    /// [`GROUP_LAYERS`](crate::rules::GROUP_LAYERS) for a sequence in the caches of several groups of layers.
    pub fn drop_before(&mut self, position: usize) -> Result<(), Violation> {
        self.check_groups(1)?;
        if position > self.len {
            return Err(Violation::new(
                &rules::BLOCK_WINDOW,
                format_args!("position {position}"),
                format_args!("at most {}", self.len),
                "give back what lies in front of the next query's window",
            ));
        }
        self.drop_blocks_before(position);
        Ok(())
    }

    /// Gives back the blocks that are wholly before `position`, one of its tokens or their end.
    fn drop_blocks_before(&mut self, position: usize) {
        let given_back = self.whole_blocks_before(position);
        if given_back <= self.given_back {
            return;
        }
        let whole = given_back / self.pool.block_size();
        self.row[..whole].fill(0);
        let front = self.blocks.iter_mut().take(whole);
        self.entry.give_up(front.filter_map(Option::take));
        self.forget_written();
        self.given_back = given_back;
        self.entry.change();
    }

    /// Lets go of blocks that it has no more.
    fn forget_written(&mut self) {
        let blocks = &self.blocks;
        self.written_by_step.retain(|block| holds(blocks, block));
    }

    /// The number of tokens in the blocks that are wholly before a position.
    fn whole_blocks_before(&self, position: usize) -> usize {
        position - position % self.pool.block_size()
    }

    /// Whether it can be cut to `tokens` tokens, where the next token sees those from `shown` on.
    fn keeps(&self, tokens: usize, shown: usize) -> bool {
        tokens == 0 || (tokens <= self.len && shown >= self.given_back)
    }

    /// Refuses to cut it to `tokens` tokens, where the next token sees those from `shown` on, if it does not have
    /// these.
    fn check_kept(&self, tokens: usize, shown: usize) -> Result<(), Violation> {
        if self.keeps(tokens, shown) {
            return Ok(());
        }
        let (len, given_back) = (self.len, self.given_back);
        let (allowed, fix) = match (given_back, self.causality) {
            (0, _) => (format!("0 to {len}"), "name a number of tokens within these"),
            (_, None) => (
                format!("0, or {given_back} to {len}"),
                "keep a number of tokens within these; for fewer than were given back keep 0, and compute the tokens \
                 again",
            ),
            (_, Some(_)) => (
                format!("0, or up to {len}, of which the next token sees none of the first {given_back}"),
                "take drafts back before the next growth, and begin anew where more is taken back",
            ),
        };
        let given = format_args!("{tokens} tokens");
        Err(Violation::new(&rules::SEQUENCE_LENGTH, given, allowed, fix))
    }
}

/// Whether a block is one of a sequence's that were not given back.
fn holds(blocks: &[Option<Block>], block: &Block) -> bool {
    let mut held = blocks.iter().flatten();
    held.any(|own| own.id() == block.id())
}

impl Drop for Sequence {
    fn drop(&mut self) {
        let blocks = self.blocks.drain(..).flatten();
        self.entry.give_up(blocks);
    }
}

impl CacheEntry {
    /// Refuses to mark tokens of a sequence as computed that it does not have, and while copies would overwrite them.
    pub(crate) fn check_marked(&self, sequence: &Sequence, tokens: usize) -> Result<(), Violation> {
        sequence.check_count(tokens, "grow the sequence by the tokens before they are written")?;
        match sequence.uncopied_in(self) {
            None => Ok(()),
            Some(block) => Err(uncopied(format_args!("tokens said to be computed, and block {block}"))),
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking")]
mod tests {
    use super::*;
    use crate::kv::PadPolicy;
    use proptest::prelude::*;

    fn pool(blocks: usize) -> BlockPool {
        BlockPool::new(blocks, 4, PadPolicy::SkipNegative).unwrap()
    }

    #[test]
    fn growing_is_all_or_nothing() {
        let pool = pool(2);
        let mut sequence = Sequence::new(&pool);
        assert_eq!(sequence.grow(5).unwrap().slots, [0, 1, 2, 3, 4]);
        let error = sequence.grow(4).unwrap_err();
        assert_eq!(error.rule, &rules::POOL_EXHAUSTED);
        let all = "asked for 25000 blocks; 0 free, 2 held, 0 waiting for steps in flight";
        assert_eq!(sequence.grow(100_000 - 5).unwrap_err().given, all.replace("25000", "24998"));
        assert_eq!((sequence.len(), sequence.row()), (5, &[0, 1][..]));
        assert_eq!(sequence.grow(3).unwrap().slots, [5, 6, 7]);
        assert_eq!(sequence.grow(usize::MAX).unwrap_err().rule, &rules::LENGTHS_OVERFLOW);
        assert_eq!(sequence.slot(8).unwrap_err().rule, &rules::SEQUENCE_LENGTH);
    }

    #[test]
    fn a_shared_block_is_copied_by_whoever_writes_first() {
        let pool = pool(4);
        let mut first = Sequence::new(&pool);
        let _ = first.grow(6).unwrap();
        let mut second = first.share_prefix(5).unwrap();
        assert_eq!(pool.held_blocks(), 2);
        let grown = second.grow(1).unwrap();
        assert_eq!(grown.slots, [9]);
        let copy = grown.copies.first().unwrap();
        assert_eq!((copy.from.id(), copy.to), (1, 2));
        // The copy still holds the shared block; without the copy only the first sequence does.
        drop(grown);
        assert!(first.grow(1).unwrap().copies.is_empty());
        assert_eq!((first.row(), second.row()), (&[0, 1][..], &[0, 2][..]));
        drop((first, second));
        assert_eq!(pool.held_blocks(), 0);
    }

    #[test]
    fn a_copy_is_awaited_as_long_as_somebody_holds_the_block() {
        let pool = pool(6);
        let cache = CacheEntry::new(&pool);
        let mut first = Sequence::new(&pool);
        let _ = first.grow(6).unwrap();
        let mut second = first.fork();
        let grown = second.grow(1).unwrap();
        let copy = grown.copies.first().unwrap();
        assert_eq!((first.uncopied(), second.uncopied()), (None, Some(2)));
        // Forks wait too, and prefixes that reach into the block.
        let mut third = second.fork();
        assert_eq!(second.share_prefix(5).unwrap().uncopied(), Some(2));
        assert_eq!(second.share_prefix(4).unwrap().uncopied(), None);
        // A copy from the block comes after the copy to it.
        let behind = third.grow(1).unwrap();
        let behind = behind.copies.first().unwrap();
        let error = behind.check_order(&cache).unwrap_err();
        assert_eq!(error.rule, &rules::BLOCK_UNCOPIED);
        assert_eq!(copy.copied().unwrap_err().rule, &rules::BLOCK_UNCOPIED);
        assert!(copy.is_awaited());
        copy.copied_in(&cache);
        behind.check_order(&cache).unwrap();
        assert_eq!((second.uncopied(), third.uncopied()), (None, Some(3)));
        // Growing keeps the mark; cutting before the block removes it.
        assert!(third.grow(1).unwrap().copies.is_empty());
        assert_eq!(third.uncopied(), Some(3));
        third.truncate(5).unwrap();
        assert_eq!(third.uncopied(), Some(3));
        third.truncate(4).unwrap();
        assert_eq!(third.uncopied(), None);
        assert!(!behind.is_awaited());
        // The block's next holder does not wait for the copy.
        let again = third.grow(1).unwrap();
        assert!(again.copies.is_empty());
        assert_eq!(third.row(), [0, 3]);
        behind.copied_in(&cache);
        // Preempted or ended, a sequence leaves nothing behind.
        for end in [true, false] {
            let mut fork = first.fork();
            let grown = fork.grow(1).unwrap();
            assert!(grown.copies.first().unwrap().is_awaited());
            if end {
                drop(fork);
            } else {
                fork.truncate(0).unwrap();
            }
            assert!(!grown.copies.first().unwrap().is_awaited());
        }
    }

    #[test]
    fn blocks_before_a_window_go_back() {
        let pool = pool(4);
        let mut sequence = Sequence::new(&pool);
        let _ = sequence.grow(11).unwrap();
        sequence.drop_before(9).unwrap();
        assert_eq!((sequence.row(), pool.held_blocks()), (&[0, 0, 2][..], 1));
        assert_eq!(sequence.slot(7).unwrap_err().rule, &rules::SEQUENCE_LENGTH);
        assert_eq!(sequence.slot(8).unwrap(), 8);
        assert_eq!(sequence.drop_before(12).unwrap_err().rule, &rules::BLOCK_WINDOW);
        assert_eq!(sequence.share_prefix(9).unwrap_err().rule, &rules::SEQUENCE_LENGTH);
        assert_eq!(sequence.truncate(5).unwrap_err().rule, &rules::SEQUENCE_LENGTH);
        sequence.truncate(0).unwrap();
        assert_eq!((sequence.len(), pool.held_blocks()), (0, 0));
    }

    #[test]
    fn a_sequence_that_shows_all_leaves_to_its_caller_what_is_given_back() {
        let pool = pool(4);
        let mut sequence = Sequence::new(&pool).seen_by(Some(Causality::Causal));
        let _ = sequence.grow(11).unwrap();
        sequence.drop_before(9).unwrap();
        sequence.truncate(9).unwrap();
        assert_eq!((sequence.len(), sequence.given_back()), (9, 8));
    }

    #[derive(Clone, Debug)]
    enum Act {
        Grow(usize, usize),
        Fork(usize, usize),
        Truncate(usize, usize),
        End(usize),
    }

    fn act() -> impl Strategy<Value = Act> {
        prop_oneof![
            4 => (any::<usize>(), 0usize..9).prop_map(|(n, t)| Act::Grow(n, t)),
            2 => (any::<usize>(), any::<usize>()).prop_map(|(n, t)| Act::Fork(n, t)),
            2 => (any::<usize>(), any::<usize>()).prop_map(|(n, t)| Act::Truncate(n, t)),
            1 => any::<usize>().prop_map(Act::End),
        ]
    }

    proptest! {
        /// A cache simulated by tokens with names: every sequence reads back exactly its own tokens, however blocks
        /// are shared.
        #[test]
        fn every_sequence_reads_its_own_tokens(acts in prop::collection::vec(act(), 1..80)) {
            let pool = pool(12);
            let entry = CacheEntry::new(&pool);
            let mut cache = [0usize; 48];
            let mut sequences: Vec<(Sequence, Vec<usize>)> = vec![(Sequence::new(&pool), Vec::new())];
            let mut next = 1;
            for act in acts {
                match act {
                    Act::Grow(n, tokens) => {
                        let place = n % sequences.len();
                        let (sequence, names) = &mut sequences[place];
                        if let Ok(grown) = sequence.grow(tokens) {
                            for copy in &grown.copies {
                                let from = copy.from.id() * 4;
                                cache.copy_within(from..from + 4, copy.to * 4);
                                prop_assert!(copy.check_order(&entry).is_ok() && copy.is_awaited());
                                copy.copied_in(&entry);
                            }
                            for slot in grown.slots {
                                cache[slot as usize] = next;
                                names.push(next);
                                next += 1;
                            }
                        }
                    }
                    Act::Fork(n, tokens) => {
                        let (sequence, names) = &sequences[n % sequences.len()];
                        let tokens = tokens % (sequence.len() + 1);
                        let prefix = (sequence.share_prefix(tokens).unwrap(), names[..tokens].to_vec());
                        sequences.push(prefix);
                    }
                    Act::Truncate(n, tokens) => {
                        let place = n % sequences.len();
                        let (sequence, names) = &mut sequences[place];
                        let tokens = tokens % (sequence.len() + 1);
                        sequence.truncate(tokens).unwrap();
                        names.truncate(tokens);
                    }
                    Act::End(n) if sequences.len() > 1 => { sequences.swap_remove(n % sequences.len()); }
                    Act::End(_) => {}
                }
                for (sequence, names) in &sequences {
                    for (position, name) in names.iter().enumerate() {
                        prop_assert_eq!(cache[sequence.slot(position).unwrap()], *name);
                    }
                }
            }
            drop(sequences);
            prop_assert_eq!(pool.held_blocks(), 0);
            prop_assert_eq!(pool.free_blocks(), 12);
        }
    }
}
