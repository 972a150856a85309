//! The cached tokens of a batch in chunks that fit a workspace.

use std::ops::Range;

use ascend_attention::Violation;

use crate::rules;

/// The cached tokens of the requests that have any, in chunks of bounded size.
///
/// A chunk has a part of equal length of each request that has cached tokens left. Requests are ordered by their
/// number of cached tokens, most first, so that the requests of a chunk are always the first ones.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct ContextChunks {
    /// Requests with cached tokens.
    pub(super) order: Vec<usize>,
    pub(super) chunks: Vec<ContextChunk>,
}

/// Part of the cached tokens.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct ContextChunk {
    /// For each of the first requests of the order, the positions of its tokens in the chunk.
    pub(super) positions: Vec<Range<usize>>,
}

impl ContextChunk {
    pub(super) fn tokens(&self) -> usize {
        self.positions.iter().map(|range| range.len()).sum()
    }
}

impl ContextChunks {
    /// Most chunks; each is one call a layer.
    const MAX_CHUNKS: usize = 1 << 16;

    /// Divides the cached tokens into chunks of at most `capacity` tokens. All but the last end with a block where
    /// they can.
    ///
    /// # Errors
    /// [`LATENT_WORKSPACE`](crate::rules::LATENT_WORKSPACE) if a chunk cannot hold a token of each request, or there
    /// are more than [`MAX_CHUNKS`](Self::MAX_CHUNKS).
    pub(super) fn new(cached: &[usize], capacity: usize, block_size: usize) -> Result<Self, Violation> {
        let cached_tokens = |request: &usize| cached.get(*request).copied().unwrap_or(0);
        let mut order: Vec<usize> = (0..cached.len()).filter(|r| cached_tokens(r) > 0).collect();
        // The sort is stable: requests of equal length stay in the order of the batch.
        order.sort_by_key(|request| std::cmp::Reverse(cached_tokens(request)));
        if capacity < order.len() {
            return Err(rules::LATENT_WORKSPACE.broken(
                format_args!("room for {capacity} tokens, {} requests with cached tokens", order.len()),
                "a token of each",
            ));
        }
        let mut chunks = Vec::new();
        let mut start = 0usize;
        loop {
            let left = order.iter().take_while(|request| cached_tokens(request) > start);
            let requests = left.count();
            let Some(share) = capacity.checked_div(requests) else {
                break;
            };
            if chunks.len() >= Self::MAX_CHUNKS {
                return Err(rules::LATENT_WORKSPACE.broken(
                    format_args!("room for {capacity} tokens, {} chunks", chunks.len()),
                    format_args!("at most {} chunks", Self::MAX_CHUNKS),
                ));
            }
            let end = start.saturating_add(share);
            let whole = end.saturating_sub(end.checked_rem(block_size).unwrap_or(0));
            let longest = order.first().map_or(0, cached_tokens);
            let end = if whole > start && end < longest { whole } else { end };
            let positions = order.iter().take(requests);
            chunks.push(ContextChunk { positions: positions.map(|r| start..end.min(cached_tokens(r))).collect() });
            start = end;
        }
        Ok(Self { order, chunks })
    }

    /// Whether the requests of the chunks are the first ones of the batch, in its order.
    pub(super) fn in_place(&self) -> bool {
        self.order.iter().enumerate().all(|(at, r)| at == *r)
    }

    /// Tokens of the largest chunk; `None` without chunks.
    pub(super) fn longest(&self) -> Option<usize> {
        self.chunks.iter().map(ContextChunk::tokens).max()
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test fails by panicking")]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn chunks_end_with_blocks_where_they_can() {
        let chunks = ContextChunks::new(&[0, 9, 40, 9], 40, 8).unwrap();
        assert_eq!(chunks.order, [2, 1, 3]);
        let positions: Vec<_> = chunks.chunks.iter().map(|c| c.positions.clone()).collect();
        assert_eq!(positions[0], [0..8, 0..8, 0..8]);
        assert_eq!(positions[1], [8..16, 8..9, 8..9]);
        assert_eq!((positions.len(), positions[2].len()), (3, 1));
        assert_eq!(positions[2][0], 16..40);
        assert!(!chunks.in_place() && chunks.longest() == Some(24));
        let none = ContextChunks::new(&[0, 0], 0, 8).unwrap();
        assert!(none.longest().is_none() && none.in_place());
        let most = ContextChunks::MAX_CHUNKS;
        for (cached, capacity) in [(&[5, 5][..], 1), (&[most + 1], 1)] {
            let error = ContextChunks::new(cached, capacity, 8).unwrap_err();
            assert_eq!((error.rule, &*error.fix), (&rules::LATENT_WORKSPACE, rules::LATENT_WORKSPACE.fix));
        }
        assert_eq!(ContextChunks::new(&[most], 1, 8).unwrap().chunks.len(), most);
    }

    proptest! {
        /// Every cached token is in one chunk, in order, and no chunk is empty or too large.
        #[test]
        fn chunks_are_the_cached_tokens(
            cached in prop::collection::vec(0usize..200, 0..6),
            capacity in 6usize..300,
            block_size in 0usize..40,
        ) {
            let chunks = ContextChunks::new(&cached, capacity, block_size).unwrap();
            let mut next = vec![0; cached.len()];
            for chunk in &chunks.chunks {
                prop_assert!((1..=capacity).contains(&chunk.tokens()));
                for (positions, request) in chunk.positions.iter().zip(&chunks.order) {
                    prop_assert_eq!(positions.start, next[*request]);
                    prop_assert!(positions.start < positions.end);
                    next[*request] = positions.end;
                }
            }
            prop_assert_eq!(next, cached);
        }
    }
}
