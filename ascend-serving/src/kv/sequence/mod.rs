//! The tokens that one request has in a paged cache.

mod growth;
mod kept_tokens;

use std::iter;

use ascend_attention::Violation;

use crate::causality::Causality;
use crate::rules;

use super::block_copy::uncopied;
use super::pool::{Block, BlockPool, CacheEntry, CopiesIn, SequenceEntry, SequenceStamp};
use super::request_state::RequestState;
use super::slot::slot;
pub use growth::Growth;
pub(crate) use growth::Room;

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

    /// What the layers see, where that may hide cached tokens.
    pub(crate) fn hiding(&self) -> Option<Causality> {
        self.causality
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
mod tests;
