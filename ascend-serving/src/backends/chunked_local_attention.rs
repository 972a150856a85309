//! Attention within fixed chunks of the context, by virtual requests, one for each chunk.
//!
//! With chunks of C tokens a query sees, causally, the keys of its own chunk alone. An operator with causal attention
//! computes it if each piece of a request within one chunk becomes a request of its own.

use std::num::{NonZeroU64, NonZeroUsize};

use ascend_attention::attention::PerRequest;
use ascend_attention::spec::geometry::LocalChunks;
use ascend_attention::{Element, Violation};

use crate::batch::LayerMask;
use crate::causality::Causality;
use crate::error::Result;
use crate::kv::PageTable;
use crate::rules;

use super::program::StepProgram;
use super::step_call::StepCall;
use super::step_context::StepContext;

pub(super) fn program<T: Element>(step: &StepContext<'_>) -> Result<StepProgram<T>> {
    let LayerMask::Causality(Causality::Chunk(chunk)) = step.mask else {
        return Err(Violation::new(
            &rules::BACKEND_CHUNK,
            format_args!("{:?}", step.mask),
            "chunks",
            "add a backend for other masks behind this one",
        )
        .into());
    };
    let metadata = step.metadata;
    let new = metadata.new_and_cached().map(|(new, _)| new);
    let lengths = new.zip(metadata.kv_lengths().lengths().iter().copied());
    let pieces = Pieces::of(lengths, metadata.table(), metadata.settings().block_size(), *chunk)?;
    let ends = pieces.q_lengths.cumulative()?;
    let mask = Causality::Causal.mask(&step.stream.device().masks())?;
    let call = match metadata.state().reads_cache() {
        true => StepCall::packed(ends, pieces.kv_lengths).blocks(pieces.blocks),
        false => StepCall::over_own_keys(ends),
    };
    Ok(call.mask(mask).into())
}

/// The pieces of requests within one chunk each, in the order of their tokens.
#[derive(Debug, Default)]
struct Pieces {
    q_lengths: PerRequest,
    kv_lengths: PerRequest,
    /// The blocks of each chunk.
    blocks: Vec<Vec<usize>>,
}

impl Pieces {
    /// Divides requests with these numbers of new tokens, and of keys with these among them.
    fn of(
        lengths: impl Iterator<Item = (usize, usize)>,
        table: &PageTable,
        block_size: usize,
        chunk: NonZeroUsize,
    ) -> Result<Self, Violation> {
        let size = NonZeroU64::new(chunk.get() as u64);
        let Some(size) = size.filter(|_| chunk.get().is_multiple_of(block_size)) else {
            // A chunk would begin within a block.
            return Err(rules::CHUNK_SIZE.broken(
                format_args!("chunks of {chunk} tokens in blocks of {block_size}"),
                format_args!("1 token or more, a multiple of the {block_size} of a block"),
            ));
        };
        let mut pieces = Self::default();
        for (request, (new, keys)) in lengths.enumerate() {
            let used = table.used(request, keys, block_size)?;
            let chunks = LocalChunks::new(size, new as u64, keys as u64);
            for piece in chunks.virtual_sequences() {
                let (start, keys) = (piece.kv_start as usize, piece.kv_len as usize);
                pieces.q_lengths.push(piece.q_len as usize)?;
                pieces.kv_lengths.push(keys)?;
                pieces.blocks.push(used[start / block_size..(start + keys).div_ceil(block_size)].to_vec());
            }
        }
        Ok(pieces)
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test fails by panicking")]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn table(kv: &[usize], page: usize) -> PageTable {
        let row = |(request, len): (usize, &usize)| -> Vec<usize> {
            let pages = len.div_ceil(page);
            (0..pages).map(|page| request * 100 + page).collect()
        };
        let rows: Vec<Vec<usize>> = (0..).zip(kv).map(row).collect();
        PageTable::from_rows(&rows).unwrap()
    }

    /// Pieces of requests with these new tokens and keys.
    fn pieces(lengths: &[(usize, usize)], page: usize, chunk: usize) -> Result<Pieces, Violation> {
        let keys: Vec<usize> = lengths.iter().map(|(_, keys)| *keys).collect();
        Pieces::of(lengths.iter().copied(), &table(&keys, page), page, NonZeroUsize::new(chunk).unwrap())
    }

    /// The example of SGLang's documentation: queries of 4, 10 and 5 tokens, 6, 17 and 9 keys, chunks of 4.
    #[test]
    fn three_requests_become_eight() {
        let pieces = pieces(&[(4, 6), (10, 17), (5, 9)], 2, 4).unwrap();
        assert_eq!(pieces.q_lengths.lengths(), [2, 2, 1, 4, 4, 1, 4, 1]);
        assert_eq!(pieces.kv_lengths.lengths(), [4, 2, 4, 4, 4, 1, 4, 1]);
        let blocks = [&[0, 1][..], &[2], &[102, 103], &[104, 105], &[106, 107], &[108], &[202, 203], &[204]];
        assert_eq!(pieces.blocks, blocks);
    }

    #[test]
    fn chunks_that_break_pages_are_refused() {
        for (page, chunk) in [(16, 8), (16, 24)] {
            assert_eq!(pieces(&[(4, 4)], page, chunk).unwrap_err().rule, &rules::CHUNK_SIZE);
        }
    }

    proptest! {
        /// Each query sees, bottom-right causally in its piece, exactly the keys up to itself in its chunk.
        #[test]
        fn pieces_see_their_chunk(
            requests in prop::collection::vec((0usize..40, 0usize..40), 1..5),
            page in 1usize..5,
            pages in 1usize..5,
        ) {
            let chunk = page * pages;
            let lengths: Vec<_> = requests.iter().map(|(new, cached)| (*new, new + cached)).collect();
            let pieces = pieces(&lengths, page, chunk).unwrap();
            let slot = |row: &[usize], position| crate::kv::slot(row, position, page).unwrap();
            let mut seen = Vec::new();
            for (piece, row) in pieces.blocks.iter().enumerate() {
                let (rows, keys) = (pieces.q_lengths.lengths()[piece], pieces.kv_lengths.lengths()[piece]);
                let keys_of = |i: usize| (0..keys).filter(move |key| key + rows <= i + keys);
                seen.extend((0..rows).map(|i| keys_of(i).map(|key| slot(row, key)).collect::<Vec<_>>()));
            }
            let keys: Vec<usize> = lengths.iter().map(|(_, keys)| *keys).collect();
            let table = table(&keys, page);
            let mut wanted = Vec::new();
            for (request, (new, keys)) in lengths.iter().enumerate() {
                for position in keys - new..*keys {
                    let keys = position / chunk * chunk..=position;
                    wanted.push(keys.map(|key| slot(table.row(request).unwrap(), key)).collect::<Vec<_>>());
                }
            }
            prop_assert_eq!(seen, wanted);
        }
    }
}
