//! Requests of a model with several kinds of layers: a sequence in each cache, and the metadata of each kind.

use ascend_attention::Violation;

use crate::batch::{AttentionMetadata, AttentionState, BatchRequest, BatchSettings, Causality};
use crate::kv::Sequence;
use crate::rules;

/// The cached tokens of one request in each group of layers: every group counts all tokens, but groups with a window
/// keep only the blocks that the next token's window shows. From
/// [`GroupedAttention::sequence`](crate::GroupedAttention::sequence).
#[derive(Debug)]
pub struct GroupedSequence {
    pub(crate) parts: Vec<(Sequence, Causality)>,
}

impl GroupedSequence {
    /// Number of tokens, including those that windowed groups gave back.
    pub fn len(&self) -> usize {
        self.parts.first().map_or(0, |(sequence, _)| sequence.len())
    }

    /// Whether it has no token.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The sequence in the cache of a group.
    pub fn group(&self, group: usize) -> Option<&Sequence> {
        self.parts.get(group).map(|(sequence, _)| sequence)
    }

    /// A sequence that begins with the first `tokens` of this one, in the same blocks.
    ///
    /// # Errors
    /// [`SEQUENCE_LENGTH`](crate::rules::SEQUENCE_LENGTH) if it has fewer, or a windowed group gave back some of
    /// those that the next token sees: a prefix can be shared while its end is still in the window, or is kept by a
    /// sequence of its own.
    pub fn share_prefix(&self, tokens: usize) -> Result<Self, Violation> {
        let parts = self.parts.iter().map(|(sequence, causality)| {
            let prefix = sequence.share_behind(tokens, causality.shown_from(tokens))?;
            Ok((prefix, *causality))
        });
        Ok(Self { parts: parts.collect::<Result<_, Violation>>()? })
    }

    /// A sequence with the same tokens in the same blocks of every group: [`Sequence::fork`].
    pub fn fork(&self) -> Self {
        let parts = self.parts.iter();
        let parts = parts.map(|(sequence, causality)| (sequence.fork(), *causality));
        Self { parts: parts.collect() }
    }

    /// Removes the tokens from `tokens` on, such as drafts that were not accepted, or all when the request is
    /// preempted. After an error the sequence is unchanged.
    ///
    /// # Errors
    /// [`SEQUENCE_LENGTH`](crate::rules::SEQUENCE_LENGTH) if it has fewer, or for fewer than a windowed group gave
    /// back, other than 0.
    pub fn truncate(&mut self, tokens: usize) -> Result<(), Violation> {
        for (sequence, causality) in &self.parts {
            if !sequence.keeps(tokens, causality.shown_from(tokens)) {
                return Err(Violation::new(
                    &rules::SEQUENCE_LENGTH,
                    format_args!("{tokens} tokens"),
                    format_args!(
                        "0, or up to {}, of which the next token sees none of the first {}",
                        sequence.len(),
                        sequence.given_back()
                    ),
                    "take drafts back before the next growth, and begin anew where more is taken back",
                ));
            }
        }
        let mut parts = self.parts.iter_mut();
        parts.try_for_each(|(sequence, _)| sequence.truncate(tokens))
    }

    /// Keys that a step of `tokens` new tokens reads in a group, once growing by them has given back what the window
    /// hides.
    pub(crate) fn keys_of(&self, group: usize, tokens: usize) -> Option<usize> {
        let (sequence, causality) = self.parts.get(group)?;
        let shown = match tokens {
            0 => 0,
            _ => causality.shown_from(computed(sequence)),
        };
        let front = sequence.whole_blocks_before(shown);
        let given_back = sequence.given_back().max(front);
        let left = sequence.len().saturating_sub(given_back);
        Some(left.saturating_add(tokens))
    }

    /// Gives back the tokens before the window of the first token that is not computed.
    pub(crate) fn give_back(&mut self) -> Result<(), Violation> {
        for (sequence, causality) in &mut self.parts {
            sequence.drop_before(causality.shown_from(computed(sequence)))?;
        }
        Ok(())
    }
}

/// The number of first tokens that a step has computed; all of them in a pool without a cache of this crate.
fn computed(sequence: &Sequence) -> usize {
    let computed = sequence.pool().computed_tokens(sequence.stamp());
    computed.unwrap_or(usize::MAX).min(sequence.len())
}

/// One request in a step of a model with several kinds of layers.
#[derive(Clone, Copy, Debug)]
pub struct GroupedRequest<'a> {
    sequence: &'a GroupedSequence,
    new: usize,
    drafts: usize,
    prompt_len: Option<usize>,
    recompute: bool,
}

impl<'a> GroupedRequest<'a> {
    /// The last `new` tokens of a sequence, by which [`GroupedAttention::grow`](crate::GroupedAttention::grow) made
    /// it longer.
    pub fn of(sequence: &'a GroupedSequence, new: usize) -> Self {
        Self { sequence, new, drafts: 0, prompt_len: None, recompute: false }
    }

    /// Sets the length of the whole prompt: [`BatchRequest::prompt_len`].
    pub fn prompt_len(mut self, tokens: impl Into<Option<usize>>) -> Self {
        self.prompt_len = tokens.into();
        self
    }

    /// Computes tokens once more that a step has computed, as [`BatchRequest::recompute`] does.
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

/// What the attention calls of one step share in each group of layers: one [`AttentionMetadata`] a group, of the same
/// requests. From [`GroupedAttention::metadata`](crate::GroupedAttention::metadata).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GroupedMetadata {
    /// The metadata of each group; at least one.
    pub(crate) groups: Vec<AttentionMetadata>,
}

/// The requests of a step, with their sequences in one group.
fn requests_of_group<'a>(requests: &[GroupedRequest<'a>], group: usize) -> Vec<BatchRequest<'a>> {
    let parts = requests.iter().filter_map(|request| {
        let sequence = request.sequence.group(group)?;
        let mut part = BatchRequest::of(sequence, request.new).drafts(request.drafts);
        part.prompt_len = request.prompt_len;
        part.recompute = request.recompute;
        Some(part)
    });
    let mut all = Vec::with_capacity(requests.len());
    all.extend(parts);
    all
}

impl GroupedMetadata {
    pub(crate) fn new(
        requests: &[GroupedRequest<'_>],
        settings: impl Iterator<Item = BatchSettings>,
    ) -> Result<Self, Violation> {
        let groups = settings
            .enumerate()
            .map(|(group, settings)| AttentionMetadata::new(&requests_of_group(requests, group), settings));
        let groups: Vec<AttentionMetadata> = groups.collect::<Result<_, Violation>>()?;
        if groups.is_empty() {
            return Err(Violation::new(
                &rules::GROUP_LAYERS,
                "no group of layers",
                "1 or more",
                "make the metadata with `GroupedAttention::metadata`",
            ));
        }
        let metadata = Self { groups };
        metadata.has_all(requests)?;
        Ok(metadata)
    }

    /// Computes the metadata of the next step, in the same memory. After an error the metadata has no request.
    ///
    /// # Errors
    /// As for [`GroupedAttention::metadata`](crate::GroupedAttention::metadata).
    pub fn renew(&mut self, requests: &[GroupedRequest<'_>]) -> Result<(), Violation> {
        let mut groups = self.groups.iter_mut().enumerate();
        let outcome = groups.try_for_each(|(at, group)| group.renew(&requests_of_group(requests, at)));
        let outcome = outcome.and_then(|()| self.has_all(requests));
        if outcome.is_err() {
            self.groups.iter_mut().for_each(AttentionMetadata::forget);
        }
        outcome
    }

    /// Refuses requests whose sequences lack a group.
    fn has_all(&self, requests: &[GroupedRequest<'_>]) -> Result<(), Violation> {
        if self.groups.iter().all(|group| group.requests() == requests.len()) {
            return Ok(());
        }
        Err(Violation::new(
            &rules::GROUP_LAYERS,
            format_args!("sequences of other groups than these {}", self.groups.len()),
            "sequences of `GroupedAttention::sequence`",
            "make sequences and metadata with the same attention",
        ))
    }

    /// Adds dummy requests until there are `tokens` query tokens: [`AttentionMetadata::pad_to`] in each group.
    ///
    /// # Errors
    /// As for [`AttentionMetadata::pad_to`].
    pub fn pad_to(&mut self, tokens: usize) -> Result<(), Violation> {
        for group in &mut self.groups {
            group.pad_to(tokens)?;
        }
        Ok(())
    }

    /// The metadata of a group.
    pub fn group(&self, group: usize) -> Option<&AttentionMetadata> {
        self.groups.get(group)
    }

    /// The kind of the step, by the metadata of the first group.
    pub fn state(&self) -> AttentionState {
        let first = self.groups.first();
        first.map_or(AttentionState::DecodeOnly, AttentionMetadata::state)
    }

    /// Number of real requests.
    pub fn requests(&self) -> usize {
        self.groups.first().map_or(0, AttentionMetadata::requests)
    }

    /// Number of query tokens of the real requests.
    pub fn actual_tokens(&self) -> usize {
        let first = self.groups.first();
        first.map_or(0, AttentionMetadata::actual_tokens)
    }

    /// Number of query tokens, padding included.
    pub fn tokens(&self) -> usize {
        self.groups.first().map_or(0, AttentionMetadata::tokens)
    }
}
