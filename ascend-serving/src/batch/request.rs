//! What a request computes in a step, as an engine knows it.

use crate::kv::{GroupId, Sequence};

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
    pub group: Option<GroupId>,
    /// Tokens of the whole prompt, of which the query tokens may be a chunk, where that is known; equal for every
    /// chunk of a prompt. Backends that depend on where a prompt ends, such as TriangleMix, need it.
    pub prompt_len: Option<usize>,
    /// The sequence of the request, where there is one: a step is refused if it contradicts what was computed of the
    /// sequence, and a step that ends records what it computed. Without a sequence the step is not checked in this
    /// way.
    pub sequence: Option<&'a Sequence>,
}

/// Requests are equal if their numbers, rows and sequences are.
impl PartialEq for BatchRequest<'_> {
    fn eq(&self, other: &Self) -> bool {
        let numbers = |of: &Self| (of.cached, of.new, of.drafts, of.group, of.prompt_len);
        let sequence = |of: &Self| of.sequence.map(Sequence::stamp);
        numbers(self) == numbers(other)
            && self.row == other.row
            && sequence(self) == sequence(other)
    }
}

impl Eq for BatchRequest<'_> {}

impl<'a> BatchRequest<'a> {
    /// The last `new` tokens of a sequence, for which [`Attention::grow`](crate::Attention::grow) made room. More new
    /// tokens than the sequence has are refused when the step's metadata is made.
    ///
    /// **Grow once for every step, by all its tokens.** Without growth the last `new` tokens are those of the step
    /// before, and their keys and values are overwritten: this cannot be told from computing the same tokens once
    /// more, which is allowed. A step that leaves out tokens by which the sequence grew is refused when it begins
    /// ([`SEQUENCE_GAP`](crate::rules::SEQUENCE_GAP)), as is one whose sequence grew after its metadata was made
    /// ([`SEQUENCE_CHANGED`](crate::rules::SEQUENCE_CHANGED)).
    ///
    /// Tokens before a window that were given back ([`Sequence::drop_before`]) are left out: `cached` and `row` begin
    /// with the first token that is left, which shows the same keys to a layer with that window. A layer with a
    /// larger window is refused.
    pub fn of(sequence: &'a Sequence, new: usize) -> Self {
        let (len, given_back) = (sequence.len(), sequence.given_back());
        let block_size = sequence.pool().block_size();
        let blocks = match given_back {
            // Most sequences gave nothing back; they need no division.
            0 => 0,
            _ => given_back.checked_div(block_size).unwrap_or(0),
        };
        Self {
            cached: len.saturating_sub(new).saturating_sub(given_back),
            new,
            drafts: 0,
            row: sequence.row().get(blocks..).unwrap_or(&[]),
            group: Some(sequence.pool().group()),
            prompt_len: None,
            sequence: Some(sequence),
        }
    }

    /// A request without a [`Sequence`]: `new` tokens after `cached` ones, in the blocks of a row of the table, which
    /// has room for them all.
    pub const fn in_row(row: &'a [usize], cached: usize, new: usize) -> Self {
        Self {
            cached,
            new,
            drafts: 0,
            row,
            group: None,
            prompt_len: None,
            sequence: None,
        }
    }

    /// Sets the length of the whole prompt.
    pub fn prompt_len(mut self, tokens: impl Into<Option<usize>>) -> Self {
        self.prompt_len = tokens.into();
        self
    }

    /// Marks the last `drafts` tokens as drafts.
    pub fn drafts(mut self, drafts: usize) -> Self {
        self.drafts = drafts;
        self
    }
}
