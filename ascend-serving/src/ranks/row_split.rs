//! What a rank writes and attends to in a step whose rows are divided over ranks.

use ascend_attention::Violation;

use crate::batch::BatchRequest;
use crate::kv::{BlockPool, CachedRows, MAX_INT32, PageTable};
use crate::rules;

use super::context_parallel::{ContextParallel, ContextSplit};
use super::paged_rows::PagedRows;
use super::zigzag::chunks;

/// A step whose rows are divided, as one rank computes it. The keys of all ranks come to a cache of the step, in which
/// each request begins with a block of its own, and each chunk of the rank's rows is a request with the keys up to its
/// end.
#[derive(Debug)]
pub(super) struct RowSplit {
    /// The rank's rows, by the chunk that they are of, or by row.
    pub(super) rows: PagedRows,
    /// For each of them the blocks of the step's cache.
    pub(super) table: PageTable,
    /// The blocks of the step's cache.
    pub(super) blocks: usize,
    /// The new tokens.
    pub(super) new: GatheredTokens,
    /// The slots of the gathered new tokens in the rank's own cache.
    pub(super) own_slots: Vec<i32>,
    /// The tokens in front of the step, if there are any, and those of them that the rank holds.
    pub(super) cached: Option<(GatheredTokens, CachedRows)>,
}

/// Tokens as they are gathered, one rank's behind the other's, filled up to those of the rank that has most.
#[derive(Debug)]
pub(super) struct GatheredTokens {
    /// The tokens of a rank, padding included.
    pub(super) of_rank: usize,
    /// The slots in the step's cache, with those of padding.
    pub(super) slots: Vec<i32>,
}

impl RowSplit {
    /// The part of `rank`, over a cache with the blocks of `pool`; where `by_row`, each row is a request of its own.
    ///
    /// # Errors
    /// [`POOL_SIZE`](rules::POOL_SIZE) for more keys than a cache has slots for; as for [`PageTable`].
    pub(super) fn new(
        split: &ContextSplit,
        division: ContextParallel,
        requests: &[BatchRequest<'_>],
        (rank, pool): (usize, &BlockPool),
        by_row: bool,
    ) -> Result<Self, Violation> {
        let (ranks, block_size) = (division.ranks(), pool.block_size());
        let mut blocks = 0;
        let firsts = requests.iter().map(|request| {
            let first = blocks;
            blocks += (request.cached + request.new).div_ceil(block_size);
            first
        });
        let firsts: Vec<usize> = firsts.collect();
        // The rows of a rank, by chunk: the request, and their positions in it.
        let chunks = |rank| {
            chunks(ranks, rank, requests.iter().map(|request| request.new)).map(|(index, rows)| {
                let cached = requests[index].cached;
                (index, cached + rows.start..cached + rows.end)
            })
        };
        let new: Vec<Vec<_>> = (0..ranks).map(|rank| chunks(rank).flat_map(each_of).collect()).collect();
        let mut cached = vec![Vec::new(); ranks];
        let mut held = CachedRows::new(block_size);
        for (index, request) in requests.iter().enumerate() {
            for (rank, cached) in cached.iter_mut().enumerate() {
                cached.extend(each_of((index, division.positions(request.cached, rank))));
            }
            held.push(request.row, 0..division.local_len(request.cached, rank))?;
        }
        let of_rank = |tokens: &[Vec<_>]| tokens.iter().map(Vec::len).max().unwrap_or(0);
        let [of_new, of_cached] = [of_rank(&new), of_rank(&cached)];
        // Padding goes behind all keys, to slots of its own.
        let keys = blocks * block_size;
        let padding = [(&new, of_new), (&cached, of_cached)]
            .map(|(tokens, of_rank)| ranks * of_rank - tokens.iter().map(Vec::len).sum::<usize>());
        let blocks = blocks + padding[0].max(padding[1]).div_ceil(block_size);
        if blocks > MAX_INT32 / block_size {
            return Err(Violation::new(
                &rules::POOL_SIZE,
                format_args!("{blocks} blocks of {block_size} tokens for all keys of a step"),
                format_args!("at most {}", MAX_INT32 / block_size),
                "split the batch",
            ));
        }
        let gathered = |tokens: Vec<Vec<(usize, usize)>>, of_rank: usize| {
            let mut padding = keys..;
            let slots = filled(tokens, of_rank).map(|token| match token {
                // Every slot is an INT32.
                Some((request, position)) => (firsts[request] * block_size + position) as i32,
                None => padding.next().unwrap_or(keys) as i32,
            });
            GatheredTokens { of_rank, slots: slots.collect() }
        };
        let (new, cached) = (gathered(new, of_new), gathered(cached, of_cached));

        let (pad, mut padded) = (pool.pad_policy(), 0);
        let own = split.slots(rank);
        let tokens = (0..ranks).map(|rank| split.rows(rank).into_iter().flatten().collect()).collect();
        let own_slots = filled::<usize>(tokens, of_new).map(|token| {
            let slot = token.and_then(|token| own.get(token)).copied();
            match slot.filter(|slot| !pad.is_padding(*slot, block_size)) {
                Some(slot) => Ok(slot),
                None => {
                    padded += 1;
                    pad.slot_of(padded - 1, block_size)
                }
            }
        });
        let own_slots = own_slots.collect::<Result<Vec<i32>, Violation>>()?;

        let chunks: Vec<_> = chunks(rank).collect();
        let single = by_row || chunks.iter().all(|(_, rows)| rows.len() == 1);
        let mut rows = PagedRows { single, ..PagedRows::default() };
        let all_blocks: Vec<usize> = (0..blocks).collect();
        let mut blocks_of_rows = Vec::new();
        let mut end = 0;
        for (index, chunk) in chunks {
            let ends = if single { chunk.start + 1..chunk.end + 1 } else { chunk.end..chunk.end + 1 };
            end += chunk.len();
            rows.q_ends.push_end(end)?;
            for keys in ends {
                rows.kv_lengths.push(keys)?;
                blocks_of_rows.push(&all_blocks[firsts[index]..][..keys.div_ceil(block_size)]);
            }
        }
        let table = PageTable::from_rows(&blocks_of_rows)?;
        let cached = (cached.of_rank > 0).then_some((cached, held));
        Ok(Self { rows, table, blocks, new, own_slots, cached })
    }

    /// The rows of keys that each rank sends to each other one, padding included.
    pub(super) fn sent_rows(&self) -> usize {
        self.new.of_rank + self.cached.as_ref().map_or(0, |(tokens, _)| tokens.of_rank)
    }
}

/// Each position of a request.
fn each_of((request, positions): (usize, impl Iterator<Item = usize>)) -> impl Iterator<Item = (usize, usize)> {
    positions.map(move |position| (request, position))
}

/// The tokens of each rank, filled up to as many, one rank's behind the other's.
fn filled<T>(tokens: Vec<Vec<T>>, of_rank: usize) -> impl Iterator<Item = Option<T>> {
    tokens.into_iter().flat_map(move |tokens| {
        let padding = of_rank - tokens.len();
        tokens.into_iter().map(Some).chain(std::iter::repeat_with(|| None).take(padding))
    })
}
