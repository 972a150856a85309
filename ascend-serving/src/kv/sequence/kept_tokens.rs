//! Which tokens a sequence keeps: forks, shared prefixes, and tokens that are cut off or given back.

use ascend_attention::Violation;

use crate::rules;

use super::Sequence;
use crate::kv::pool::Block;

impl Sequence {
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
    /// kept in layers of linear attention, [`SEQUENCE_IN_PROGRESS`](crate::rules::SEQUENCE_IN_PROGRESS) while a step is
    /// in progress there, and [`STATE_TORN`](crate::rules::STATE_TORN) after one that left layers out.
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
    /// preempted. Tokens that have moved ([`PagedKvCache::move_tokens`](crate::kv::PagedKvCache::move_tokens)) may move
    /// again then, also where none is removed. After an error the sequence is unchanged.
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
        self.entry.settle_moves();
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
    pub(super) fn drop_blocks_before(&mut self, position: usize) {
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
    pub(super) fn forget_written(&mut self) {
        let blocks = &self.blocks;
        self.written_by_step.retain(|block| holds(blocks, block));
    }

    /// The number of tokens in the blocks that are wholly before a position.
    pub(super) fn whole_blocks_before(&self, position: usize) -> usize {
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
        let shown_of = |tokens| self.causality.map_or(tokens, |causality| causality.shown_from(tokens));
        let least = (given_back..=len).find(|&tokens| shown_of(tokens) >= given_back);
        let (allowed, fix) = match (given_back, least) {
            (0, _) => (format!("0 to {len}"), "name a number of tokens within these"),
            (_, None) => ("0".to_owned(), "keep 0, and compute the tokens again"),
            (_, Some(least)) => (
                format!("0, or {least} to {len}"),
                "keep a number of tokens within these, and take drafts back before the next growth; for fewer tokens \
                 keep 0, and compute them again",
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
