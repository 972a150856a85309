//! Checks of a request before a step: its tokens can be counted, and its sequence has them.

use ascend_attention::Violation;

use crate::kv::{GroupId, MAX_INT32, uncopied};
use crate::rules;

use super::causality::Causality;
use super::request::BatchRequest;

impl BatchRequest<'_> {
    /// The pool of a step whose earlier requests are of the pool `known`, and whose request `at` is this one. Another
    /// pool is refused.
    pub(crate) fn in_group(
        &self,
        at: usize,
        known: Option<GroupId>,
    ) -> Result<Option<GroupId>, Violation> {
        let own = self.sequence.map(|sequence| sequence.pool().group());
        match (known, own.or(self.group)) {
            (Some(known), Some(group)) if known != group => Err(Violation::new(
                &rules::TABLE_GROUP,
                format_args!("a row of {group} for request {at}"),
                known,
                "make a step for each group of layers, with the sequences of its own pool",
            )),
            (known, group) => Ok(known.or(group)),
        }
    }

    /// Refuses tokens that the request's sequence does not have, or has given back.
    pub(crate) fn check_sequence(&self, at: usize, causality: Causality) -> Result<(), Violation> {
        let Some(sequence) = self.sequence else {
            return Ok(());
        };
        let (len, given_back, new) = (sequence.len(), sequence.given_back(), self.new);
        if let Some(block) = sequence.uncopied() {
            return Err(uncopied(format_args!("block {block} of request {at}")));
        }
        if new > len.saturating_sub(given_back) {
            return Err(Violation::new(
                &rules::SEQUENCE_LENGTH,
                format_args!(
                    "{new} new tokens of request {at}, whose sequence has {len}, {given_back} of them given back"
                ),
                format_args!("at most {}", len.saturating_sub(given_back)),
                "grow the sequence by its new tokens before the step (`Attention::grow`), and say in `BatchRequest::of` by how many",
            ));
        }
        if let Causality::Chunk(size) = causality
            && !given_back.is_multiple_of(size.get())
        {
            return Err(Violation::new(
                &rules::BLOCK_WINDOW,
                format_args!(
                    "{causality:?} over request {at}, whose first {given_back} tokens were given back"
                ),
                format_args!("a multiple of {size}: whole chunks"),
                "give back the chunks in front of the next token's, whole",
            ));
        }
        // The tokens that the request calls cached come after those that were given back.
        let cached = given_back.saturating_add(self.cached);
        if causality.shown_from(cached) < given_back {
            return Err(Violation::new(
                &rules::BLOCK_WINDOW,
                format_args!(
                    "{causality:?} over request {at}, whose first {given_back} tokens were given back"
                ),
                format_args!("a window of at most {} keys", self.cached.saturating_add(1)),
                "give back only what lies in front of the window of the next token, and keep a sequence of its own for \
                 layers that see more",
            ));
        }
        Ok(())
    }

    /// Refuses a row that names a block twice, whose keys would count twice. The blocks of a sequence are its own;
    /// those of a window may be used in turn; and 0 may stand for blocks of padding.
    pub(crate) fn check_blocks(
        &self,
        at: usize,
        used: &[usize],
        causality: Causality,
    ) -> Result<(), Violation> {
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
            Some((block, _)) => Err(Violation::new(
                &rules::TABLE_REPEATED,
                format_args!("block {block} twice in the row of request {at}"),
                "each block once",
                "name each block of the request once, in the order of its tokens",
            )),
        }
    }

    /// The request's tokens after the step.
    pub(crate) fn check_lengths(&self, at: usize) -> Result<usize, Violation> {
        let Self {
            cached,
            new,
            drafts,
            ..
        } = *self;
        if new == 0 {
            return Err(Violation::new(
                &rules::BATCH_EMPTY,
                format_args!("no query token of request {at}"),
                "1 or more",
                "leave the request out of the step, or skip the step",
            ));
        }
        if drafts >= new {
            return Err(Violation::new(
                &rules::DRAFT_COUNT,
                format_args!("{drafts} drafts among {new} query tokens of request {at}"),
                format_args!("0 to {}", new.saturating_sub(1)),
                "count the last certain token among the query tokens",
            ));
        }
        let len = cached.checked_add(new);
        len.filter(|len| *len <= MAX_INT32).ok_or_else(|| {
            Violation::new(
                &rules::LENGTHS_OVERFLOW,
                format_args!("{cached} cached and {new} new tokens of request {at}"),
                format_args!("at most {MAX_INT32}"),
                "end the request",
            )
        })
    }

    /// The end of the request's query tokens in a step, where the earlier requests have `before` query tokens.
    pub(crate) fn end_of_tokens(
        &self,
        at: usize,
        before: usize,
        most: usize,
    ) -> Result<usize, Violation> {
        let end = before.checked_add(self.new);
        end.filter(|end| *end <= most).ok_or_else(|| {
            Violation::new(
                &rules::LENGTHS_OVERFLOW,
                format_args!("{} query tokens of request {at} behind {before}", self.new),
                format_args!("{most} in a step"),
                "split the batch",
            )
        })
    }
}
