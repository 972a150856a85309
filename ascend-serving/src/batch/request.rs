//! What a request computes in a step, as an engine knows it, and the checks of a request before a step.

use ascend_attention::Violation;

use crate::causality::Causality;
use crate::kv::{BlockPool, PoolId, Sequence, StepTokens, check_blocks_of, check_tokens, uncopied, used_of_row};
use crate::rules;

/// One request in a step.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub struct BatchRequest<'a> {
    /// Tokens whose keys were cached before the step.
    pub cached: usize,
    /// Query tokens of the step; the step caches their keys.
    pub new: usize,
    /// How many of the query tokens are drafts to verify, the last ones.
    pub drafts: usize,
    /// The request's row of the block table, with room for the new tokens.
    pub row: &'a [usize],
    /// The pool that the row's blocks are of, where that is known. A step refuses rows of several pools, and a cache
    /// refuses rows of another pool than its own.
    pub pool: Option<PoolId>,
    /// Tokens of the whole prompt, of which the query tokens may be a chunk, where that is known; equal for every
    /// chunk of a prompt. Backends that depend on where a prompt ends, such as TriangleMix, need it.
    pub prompt_len: Option<usize>,
    /// The sequence of the request, where there is one: a step is refused if it contradicts what was computed of the
    /// sequence, and the last layer of a step records what the step computed. Without a sequence the step is not
    /// checked in this way.
    pub sequence: Option<&'a Sequence>,
    /// Whether the step may compute tokens that a step has computed already.
    pub recompute: bool,
}

/// Requests are equal if their numbers, rows and sequences are.
impl PartialEq for BatchRequest<'_> {
    fn eq(&self, other: &Self) -> bool {
        let numbers = |r: &Self| (r.cached, r.new, r.drafts, r.pool, r.prompt_len, r.recompute);
        let sequence = |r: &Self| r.sequence.map(Sequence::stamp);
        numbers(self) == numbers(other) && self.row == other.row && sequence(self) == sequence(other)
    }
}

impl Eq for BatchRequest<'_> {}

impl<'a> BatchRequest<'a> {
    /// The last `new` tokens of a sequence, for which [`Attention::grow`](crate::Attention::grow) made room. More new
    /// tokens than the sequence has are refused when the step's metadata is made.
    ///
    /// **Grow once for every step, by all its tokens.** Without growth the last `new` tokens are those of the step
    /// before: such a step is refused when it begins ([`SEQUENCE_COMPUTED`](crate::rules::SEQUENCE_COMPUTED)). So is a
    /// step that leaves out tokens by which the sequence grew ([`SEQUENCE_GAP`](crate::rules::SEQUENCE_GAP)), and one
    /// whose sequence grew after its metadata was made ([`SEQUENCE_CHANGED`](crate::rules::SEQUENCE_CHANGED)).
    ///
    /// Tokens before a window that were given back ([`Sequence::drop_before`]) are left out: `cached` and `row` begin
    /// with the first token that is left, which shows the same keys to a layer with that window. A layer with a
    /// larger window is refused. Of a sequence of several groups of layers they are those of the first.
    pub fn of(sequence: &'a Sequence, new: usize) -> Self {
        Self {
            // None where there are fewer than the new tokens, which a step refuses.
            cached: (sequence.len() - sequence.given_back()).saturating_sub(new),
            new,
            drafts: 0,
            row: row_of(sequence),
            pool: Some(sequence.pool().id()),
            prompt_len: None,
            sequence: Some(sequence),
            recompute: false,
        }
    }

    /// This request in the cache of another group of layers, where as many tokens follow it as in the first. Refuses
    /// a group that has given back some of the new tokens, and a request whose sequence has no such group.
    pub(super) fn in_group(&self, group: usize) -> Result<Self, Violation> {
        let both = self.sequence.and_then(|sequence| Some((sequence, sequence.group(group)?)));
        let Some((sequence, part)) = both else {
            return Err(Violation::new(
                &rules::GROUP_LAYERS,
                "a request without a sequence",
                format_args!("one with a sequence in the cache of group {group}"),
                "make requests by `BatchRequest::of`, of sequences of `Attention::sequence`",
            ));
        };
        let kept = |part: &Sequence| part.len() - part.given_back();
        let behind = kept(sequence).saturating_sub(self.cached.saturating_add(self.new));
        let Some(cached) = kept(part).checked_sub(behind).and_then(|end| end.checked_sub(self.new)) else {
            return Err(Violation::new(
                &rules::SEQUENCE_LENGTH,
                format_args!("{} new tokens in front of {behind} others, in group {group} of the layers", self.new),
                format_args!("tokens among the last {}, which the group has not given back", kept(part)),
                "leave out the tokens that are given back; to compute them once more, `truncate` the sequence to 0, \
                 and grow and compute it from its first token",
            ));
        };
        let part = Self::of(part, self.new);
        Ok(Self { cached, drafts: self.drafts, prompt_len: self.prompt_len, recompute: self.recompute, ..part })
    }

    /// A request without a [`Sequence`]: `new` tokens after `cached` ones, in the blocks of a row of the table, which
    /// has room for them all.
    pub const fn in_row(row: &'a [usize], cached: usize, new: usize) -> Self {
        Self { cached, new, drafts: 0, row, pool: None, prompt_len: None, sequence: None, recompute: false }
    }

    /// Sets the length of the whole prompt.
    pub fn prompt_len(mut self, tokens: impl Into<Option<usize>>) -> Self {
        self.prompt_len = tokens.into();
        self
    }

    /// Computes tokens once more that a step has computed: the same tokens again, such as in a benchmark or a
    /// comparison. Otherwise a step that computes such tokens is refused, since its `grow` was forgotten
    /// ([`SEQUENCE_COMPUTED`](crate::rules::SEQUENCE_COMPUTED)). Tokens in a block that a fork or a prefix holds are
    /// refused all the same ([`TABLE_SHARED`](crate::rules::TABLE_SHARED)).
    pub fn recompute(mut self) -> Self {
        self.recompute = true;
        self
    }

    /// Marks the last `drafts` tokens as drafts.
    pub fn drafts(mut self, drafts: usize) -> Self {
        self.drafts = drafts;
        self
    }
}

/// Tokens of a request in a block that another sequence holds too, and reads or will read.
#[cold]
pub(super) fn shared_block(pool: &BlockPool, request: usize, block: usize, tokens: Option<&StepTokens>) -> Violation {
    let fix = match tokens {
        Some(tokens) if tokens.recompute && pool.computed_tokens(tokens.stamp) > Some(tokens.len) => {
            "drop what else holds the block, or compute the tokens in a sequence of their own: what others read is not \
             computed again"
                .into()
        }
        Some(tokens) if tokens.recompute || pool.computed_tokens(tokens.stamp) < Some(tokens.len) => {
            format!(
                "take the request's {} tokens back (`truncate` its sequence to {}) and `grow` by them again, which \
                 copies a shared block",
                tokens.len - tokens.cached,
                tokens.cached
            )
        }
        _ => "`grow` the sequence by its new tokens before the step, which copies a shared block".into(),
    };
    Violation::new(
        &rules::TABLE_SHARED,
        format_args!(
            "tokens of request {request} in block {block}, which another sequence or a prefix holds too, or which a \
             step was writing when this one was forked"
        ),
        "tokens in blocks that the sequence holds alone",
        fix,
    )
}

/// A sequence's row of the table, without the blocks that were given back.
fn row_of(sequence: &Sequence) -> &[usize] {
    let blocks = match sequence.given_back() {
        // Most sequences gave nothing back; they need no division.
        0 => 0,
        tokens => tokens / sequence.pool().block_size(),
    };
    &sequence.row()[blocks..]
}

/// Checks before a step, which name the request by its index.
impl BatchRequest<'_> {
    /// Returns the pool of a step whose earlier requests are of the pool `known`. Another pool is refused.
    pub(crate) fn join_pool(&self, request: usize, known: Option<PoolId>) -> Result<Option<PoolId>, Violation> {
        let own = self.sequence.map(|sequence| sequence.pool().id());
        match (known, own.or(self.pool)) {
            (Some(known), Some(pool)) if known != pool => Err(Violation::new(
                &rules::TABLE_POOL,
                format_args!("a row of {pool} for request {request}"),
                known,
                "make a step for each group of layers, with the sequences of its own pool",
            )),
            (known, pool) => Ok(known.or(pool)),
        }
    }

    /// Refuses tokens that the request's sequence does not have, has given back, or shares with another; and blocks
    /// that are not the sequence's.
    pub(crate) fn check_sequence(&self, request: usize, causality: Causality) -> Result<(), Violation> {
        let Some(sequence) = self.sequence else {
            return Ok(());
        };
        let (len, given_back) = (sequence.len(), sequence.given_back());
        let (cached, new, kept) = (self.cached, self.new, len - given_back);
        if let Some(block) = sequence.uncopied() {
            let column = sequence.row().iter().position(|own| *own == block);
            let first = column.unwrap_or(0) * sequence.pool().block_size();
            return Err(uncopied(format_args!("block {block} of request {request}, which begins with token {first}")));
        }
        if new > kept || cached > kept - new {
            return Err(Violation::new(
                &rules::SEQUENCE_LENGTH,
                format_args!(
                    "{new} new tokens of request {request}, whose sequence has {len}, {given_back} of them given back, \
                     behind {cached} cached ones"
                ),
                format_args!("at most {kept}, the cached ones included"),
                "grow the sequence by its new tokens before the step (`Attention::grow`), and say in \
                 `BatchRequest::of` by how many",
            ));
        }
        if !std::ptr::eq(self.row, row_of(sequence)) && self.row != row_of(sequence) {
            return Err(Violation::new(
                &rules::TABLE_ROW,
                format_args!("a row for request {request} that is not its sequence's"),
                "the row of the sequence that the request names",
                "make the request by `BatchRequest::of`; for a row of your own leave the sequence out \
                 (`BatchRequest::in_row`)",
            ));
        }
        self.check_unshared(request, sequence)?;
        self.check_given_back(request, given_back, causality)
    }

    /// The tokens of the request in its sequence, counted from the sequence's first one.
    pub(crate) fn step_tokens(&self, sequence: &Sequence) -> StepTokens {
        let cached = sequence.given_back() + self.cached;
        StepTokens { stamp: sequence.stamp(), cached, len: cached + self.new, recompute: self.recompute }
    }

    /// Refuses tokens in a block that another sequence holds too.
    fn check_unshared(&self, request: usize, sequence: &Sequence) -> Result<(), Violation> {
        let pool = sequence.pool();
        let tokens = self.step_tokens(sequence);
        let columns = tokens.cached / pool.block_size()..tokens.len.div_ceil(pool.block_size());
        let mut written = columns.filter_map(|column| sequence.block(column));
        let Some(block) = written.find(|block| block.is_read_by_others(self.recompute)) else {
            return Ok(());
        };
        Err(shared_block(pool, request, block.id(), Some(&tokens)))
    }

    /// Refuses a mask that shows tokens which the sequence has given back.
    fn check_given_back(&self, request: usize, given_back: usize, causality: Causality) -> Result<(), Violation> {
        let (allowed, fix) = match causality {
            Causality::Chunk(size) if !given_back.is_multiple_of(size.get()) => (
                format!("a multiple of {size}: whole chunks"),
                "give back the chunks in front of the next token's, whole",
            ),
            // The tokens that the request calls cached come after those that were given back.
            _ if causality.shown_from(given_back + self.cached) < given_back => (
                format!("a window of at most {} keys", self.cached + 1),
                "give back only what lies in front of the window of the next token; layers that see more have a \
                 sequence of their own",
            ),
            _ => return Ok(()),
        };
        Err(Violation::new(
            &rules::BLOCK_WINDOW,
            format_args!("{causality:?} over request {request}, whose first {given_back} tokens were given back"),
            allowed,
            fix,
        ))
    }

    /// The blocks of the request's row that hold `len` tokens, all of them below `blocks`.
    pub(super) fn used_blocks(
        &self,
        request: usize,
        len: usize,
        blocks: usize,
        block_size: usize,
    ) -> Result<&[usize], Violation> {
        // A sequence's row ends with the block of its last token; checking that takes no division.
        let columns = match self.row.len() {
            all if all <= blocks && ends_in(all, block_size, len) => all,
            _ => columns(len, block_size),
        };
        let used = used_of_row(Some(self.row), columns, (request, len), block_size)?;
        check_blocks_of(request, used, blocks)?;
        Ok(used)
    }

    /// Refuses a row that names a block twice, whose keys would count twice. The blocks of a sequence are its own;
    /// those of a window may be used in turn; and an engine's dummy requests may name block 0 throughout.
    pub(crate) fn check_repeated(&self, request: usize, used: &[usize], causality: Causality) -> Result<(), Violation> {
        let sees_all = matches!(causality, Causality::Causal | Causality::Bidirectional);
        if self.sequence.is_some() || !sees_all || used.len() < 2 {
            return Ok(());
        }
        let mut sorted = used.to_vec();
        sorted.sort_unstable();
        let pairs = sorted.iter().zip(sorted.iter().skip(1));
        let mut twice = pairs.filter(|(one, next)| one == next && **one != 0);
        match twice.next() {
            None => Ok(()),
            Some((block, _)) => Err(rules::TABLE_REPEATED
                .broken(format_args!("block {block} twice in the row of request {request}"), "each block once")),
        }
    }

    /// Checks the numbers of tokens, and returns how many the request has after the step, an INT32.
    pub(crate) fn check_lengths(&self, request: usize) -> Result<usize, Violation> {
        let Self { cached, new, drafts, .. } = *self;
        if new == 0 {
            return Err(Violation::new(
                &rules::BATCH_EMPTY,
                format_args!("no query token of request {request}"),
                "1 or more",
                "leave the request out of the step, or skip the step",
            ));
        }
        if drafts >= new {
            return Err(rules::DRAFT_COUNT.broken(
                format_args!("{drafts} drafts among {new} query tokens of request {request}"),
                format_args!("0 to {}", new - 1),
            ));
        }
        check_tokens(cached, new, format_args!("request {request}"))
    }

    /// Adds the request's query tokens to those of the earlier requests, of which a step has at most `most`.
    pub(crate) fn add_tokens(&self, request: usize, before: usize, most: usize) -> Result<usize, Violation> {
        let end = before.checked_add(self.new);
        end.filter(|end| *end <= most).ok_or_else(|| {
            Violation::new(
                &rules::LENGTHS_OVERFLOW,
                format_args!("{} query tokens of request {request} behind {before}", self.new),
                format_args!("{most} in a step"),
                "split the batch",
            )
        })
    }
}

/// Blocks that `len` tokens need, at least one.
pub(super) fn columns(len: usize, block_size: usize) -> usize {
    len.div_ceil(block_size).max(1)
}

/// Whether the last of `len` tokens is in the last of `blocks` blocks.
fn ends_in(blocks: usize, block_size: usize, len: usize) -> bool {
    let places = blocks * block_size;
    len > 0 && len <= places && places - len < block_size
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn rows_end_with_the_last_token_if_no_other_number_of_blocks_does(
            blocks in 0usize..9,
            block_size in 1usize..9,
            len in 0usize..70,
        ) {
            prop_assert_eq!(ends_in(blocks, block_size, len), len > 0 && len.div_ceil(block_size) == blocks);
        }
    }
}
