//! Requests of a step that are computed alike.

use std::ops::Range;

use ascend_attention::attention::{Cumulative, PerRequest};

use super::metadata::AttentionMetadata;

/// Consecutive requests of a step that are computed alike: all of them, those that decode, or the others.
#[derive(Clone, Debug)]
pub(crate) struct StepPart {
    /// Where their query tokens end, counted from their own first one.
    pub(crate) q_ends: Cumulative,
    pub(crate) kv_lengths: PerRequest,
    /// Their rows of the block table, dummies included.
    pub(crate) requests: Range<usize>,
    /// Their query tokens.
    pub(crate) tokens: Range<usize>,
}

impl StepPart {
    /// The whole step.
    pub(crate) fn all(metadata: &AttentionMetadata) -> Self {
        Self {
            q_ends: metadata.q_ends().clone(),
            kv_lengths: metadata.kv_lengths().clone(),
            requests: 0..metadata.table().requests(),
            tokens: 0..metadata.tokens(),
        }
    }

    /// The decodes, which come first, and the rest.
    pub(crate) fn split(metadata: &AttentionMetadata) -> [Self; 2] {
        let (decodes, rows) = (metadata.decodes(), metadata.decode_tokens());
        let (q, q_rest) = metadata.q_ends().split_at(decodes);
        let (kv, kv_rest) = metadata.kv_lengths().split_at(decodes);
        let part = |q_ends, kv_lengths, requests, tokens| Self { q_ends, kv_lengths, requests, tokens };
        let (requests, tokens) = (metadata.table().requests(), metadata.tokens());
        [part(q, kv, 0..decodes, 0..rows), part(q_rest, kv_rest, decodes..requests, rows..tokens)]
    }

    /// Whether each request has one query token.
    pub(crate) fn is_single(&self) -> bool {
        self.tokens.len() == self.requests.len()
    }

    /// Tokens that each request had cached before the step; dummies none.
    pub(crate) fn cached(&self) -> Vec<usize> {
        let lengths = self.q_ends.new_and_cached(&self.kv_lengths);
        lengths.map(|(_, cached)| cached).collect()
    }

    /// The query tokens of these requests, counted from the first of the part.
    pub(crate) fn rows(&self, requests: &[usize]) -> Vec<Range<usize>> {
        let starts = self.q_ends.with_zero();
        let rows = requests.iter();
        rows.map(|request| starts[*request]..starts[request + 1]).collect()
    }
}
