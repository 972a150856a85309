//! The prefill kernel: attention of a block of many queries that share a key head.
//!
//! The algorithm is FlashAttention-2 (Dao 2023). The outer loop, over query blocks, is in `schedule`; this kernel
//! passes over the KV tiles that its query block sees. For each KV tile it loads keys and values, widened to single
//! precision, and then, for one query tile after the other,
//!
//! 1. computes the scores, `S = Q Kᵀ`;
//! 2. updates the online softmax (Milakov and Gimelshein 2018): the running maximum `m`, the weights `P = 2^(S - m)`
//!    and the running sum;
//! 3. rescales the output by `2^(m_old - m)` and adds `P V`.
//!
//! Division by the sum comes last, in `epilogue`. KV tiles that no query sees are skipped.
//!
//! # Tiles
//!
//! | piece | size | why |
//! |---|---|---|
//! | query block | [`QUERIES`] queries | each KV tile is loaded once for it; queries and output stay in the L2 cache |
//! | query tile | three lane groups | its scores of a KV tile stay in the L1 cache |
//! | lane group | 16 queries | one query in each lane of a vector |
//! | KV tile | [`TILE_KEYS`] keys | the output is rescaled once for it |
//!
//! Scores are stored with keys down and queries across: a vector holds one key's scores of a lane group. Neither keys
//! nor values need transposing, and maxima, exponentials and sums of the softmax work on whole vectors.

mod buffers;
mod products;
mod softmax;

use super::TILE_KEYS;
use super::attention::Attention;
use super::attention::{Task, TaskContext};
use super::mask::DropMask;
use super::online_softmax::OnlineSoftmax;
use super::prefetch::TilePrefetch;
use super::sequence::Sequence;
use super::simd::{Kernel, Simd, Vector, WIDTH, all_finite};
use super::tile_load::{Destination, TileLoad};
use super::visibility::{Lanes, find_visible};
use ascend_spec::Tile;
use buffers::{BlockBuffers, QueryTile};
use products::{Outputs, Scores, union};
use softmax::UpdateSoftmax;
use std::ops::Range;

/// Queries of a query block.
pub(crate) const QUERIES: usize = 384;

/// Lane groups of a query tile.
pub(super) const LANE_GROUPS: usize = 3;

/// Queries of a query tile.
const TILE_QUERIES: usize = LANE_GROUPS * WIDTH;

/// Query tiles of a query block.
const QUERY_TILES: usize = QUERIES / TILE_QUERIES;

/// Number of KV tiles that are skipped together if no query sees any of them.
const SKIPPED_TILES: usize = 16;

const _: () = assert!((QUERIES / 2).is_multiple_of(TILE_QUERIES));

/// A block of queries of one key head, and the keys that it attends to.
#[derive(Clone, Copy)]
struct QueryBlock<'a> {
    attention: &'a Attention,
    sequence: &'a Sequence,
    task: &'a Task,
    /// Whether the values are the beginning of the keys, so that one loaded tile serves as both.
    values_are_keys: bool,
}

/// Computes the products of the queries of a tile, transposed, with the keys of a KV tile that each lane group sees;
/// rows have `vectors` vectors. Score vector `key * LANE_GROUPS + lane_group` gets those of a key.
#[inline(always)]
pub(super) fn score_tile<S: Simd>(
    simd: S,
    [queries, keys]: [&[Vector]; 2],
    vectors: usize,
    visible: &[Range<usize>],
    scores: &mut [Vector],
) {
    let mut query_tile = QueryTile {
        queries,
        keys,
        values: &[],
        scores,
        out: &mut [],
        columns: 0,
        max: &mut [],
        sum: &mut [],
        rescale: [[1.0; WIDTH]; LANE_GROUPS],
        prefetch: &mut TilePrefetch::none(),
    };
    simd.outline(Scores { query_tile: &mut query_tile, vectors, visible });
}

/// Runs the prefill kernel on a task: computes running maximum, running sum and output of each of its queries.
pub(crate) struct Attend<'a, 's>(pub(crate) TaskContext<'a, 's>);

impl<'s> Kernel for Attend<'_, 's> {
    type Output = OnlineSoftmax<'s>;

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) -> OnlineSoftmax<'s> {
        attend(simd, self.0)
    }
}

#[inline(always)]
fn attend<'s, S: Simd>(simd: S, context: TaskContext<'_, 's>) -> OnlineSoftmax<'s> {
    let block = QueryBlock {
        attention: context.attention,
        sequence: context.sequence,
        task: context.task,
        values_are_keys: context.attention.values_are_keys(context.sequence),
    };
    let mut buffers = BlockBuffers::new(context.scratch, block);
    block.pack_queries(simd, &mut buffers);
    let (count, columns) = (block.count(), block.attention.columns());
    // A hidden key adds nothing, even if its value is infinite or NaN, but the fast products multiply it by its
    // weight 0, which gives NaN. Only where the output is not finite are the values checked, and the block computed
    // again.
    for check_finite in [false, true] {
        buffers.clear();
        block.attend_tiles(simd, &mut buffers, check_finite);
        if all_finite(simd, &buffers.out[..count * columns]) {
            break;
        }
    }
    let BlockBuffers { out, max, sum, .. } = buffers;
    OnlineSoftmax {
        max: &mut max.as_flattened_mut()[..count],
        sum: &mut sum.as_flattened_mut()[..count],
        out: &mut out[..count * columns],
    }
}

impl QueryBlock<'_> {
    /// Number of queries.
    fn count(self) -> usize {
        self.task.queries.len().min(QUERIES)
    }

    /// Number of lane groups.
    fn lane_groups(self) -> usize {
        self.count().div_ceil(WIDTH)
    }

    /// The queries of a lane group.
    #[inline(always)]
    fn queries(self, lane_group: usize) -> Range<usize> {
        let start = self.task.queries.start + lane_group * WIDTH;
        start..self.task.queries.end.min(start + WIDTH)
    }

    /// Widens the queries and transposes each lane group, so that a vector holds one element of its 16 queries. Rows
    /// past the sequence's length become zeros.
    #[inline(always)]
    fn pack_queries<S: Simd>(self, simd: S, buffers: &mut BlockBuffers<'_>) {
        let (attention, sequence, task) = (self.attention, self.sequence, self.task);
        let vectors = attention.vectors();
        // The key tile is not in use yet.
        let wide = &mut buffers.keys[..WIDTH * vectors];
        let rows = sequence.geometry.q_len() as usize;
        for group in 0..self.lane_groups() {
            for lane in 0..WIDTH {
                let query = task.queries.start + group * WIDTH + lane;
                let (row, head) = attention.row_and_head(task.kv_head, query);
                let wide = &mut wide[lane * vectors..][..vectors];
                if query < task.queries.end && row < rows {
                    attention.read_query(simd, sequence, (row, head), wide, 1);
                } else {
                    wide.fill([0.0; WIDTH]);
                }
            }
            let packed = &mut buffers.queries[group * vectors * WIDTH..][..vectors * WIDTH];
            for (i, packed) in packed.as_chunks_mut::<WIDTH>().0.iter_mut().enumerate() {
                let mut rows = [[0.0; WIDTH]; WIDTH];
                for (lane, row) in rows.iter_mut().enumerate() {
                    *row = wide[lane * vectors + i];
                }
                *packed = simd.transpose(&rows);
            }
        }
    }

    /// Attends to all KV tiles that some query sees.
    #[inline(always)]
    fn attend_tiles<S: Simd>(self, simd: S, buffers: &mut BlockBuffers<'_>, check_finite: bool) {
        let (sequence, keys) = (self.sequence, &self.task.keys);
        let rows = self.attention.rows(&self.task.queries);
        let mut first = keys.start;
        while first < keys.end {
            let many = first as u64..keys.end.min(first + SKIPPED_TILES * TILE_KEYS) as u64;
            if sequence.geometry.tile(rows.clone(), many.clone()) == Tile::None {
                first = many.end as usize;
                continue;
            }
            let tile = first..keys.end.min(first + TILE_KEYS);
            first = tile.end;
            let visible = self.find_visible(&tile, buffers);
            if !visible.is_empty() {
                let finite = self.load(simd, &tile, visible, buffers, check_finite);
                let next = first..keys.end.min(first + TILE_KEYS);
                self.prefetch::<S>(next, &mut buffers.prefetch);
                self.attend_tile(simd, tile.start, buffers, finite || !check_finite);
            }
        }
    }

    /// Finds which keys of a KV tile each query tile sees. Returns the range of keys that some query sees.
    #[inline(always)]
    fn find_visible(self, tile: &Range<usize>, buffers: &mut BlockBuffers<'_>) -> Range<usize> {
        let (attention, sequence) = (self.attention, self.sequence);
        let group = attention.group;
        let mut all = 0..0;
        for lane_group in 0..self.lane_groups() {
            let queries = self.queries(lane_group);
            let rows = attention.rows(&queries);
            let lanes = Lanes { kv_head: self.task.kv_head, group, queries };
            let keys = (tile, self.task.keys.end);
            let window = &mut buffers.mask_windows[lane_group];
            let of_tile = &mut buffers.visibility[lane_group / LANE_GROUPS];
            let lane_group = lane_group % LANE_GROUPS;
            let hidden = &mut of_tile.hidden[lane_group];
            (of_tile.keys[lane_group], of_tile.mixed[lane_group]) =
                find_visible(attention, sequence, rows, keys, &lanes, window, hidden);
            all = union(&[all, of_tile.keys[lane_group].clone()]);
        }
        all
    }

    /// Loads the keys `visible` of a KV tile, and their values. With `check_finite`, returns whether the values are
    /// finite.
    #[inline(always)]
    fn load<S: Simd>(
        self,
        simd: S,
        tile: &Range<usize>,
        visible: Range<usize>,
        buffers: &mut BlockBuffers<'_>,
        check_finite: bool,
    ) -> bool {
        let load = TileLoad {
            attention: self.attention,
            sequence: self.sequence,
            kv_head: self.task.kv_head,
            rows: tile.start + visible.start..tile.start + visible.end,
            check_finite,
        };
        let keys = Destination::Tile { tile: &mut *buffers.keys, first: visible.start, row: &mut *buffers.row };
        let finite = load.keys(simd, keys);
        if self.values_are_keys {
            return finite;
        }
        let values = Destination::Tile { tile: &mut *buffers.values, first: visible.start, row: &mut *buffers.row };
        load.values(simd, values)
    }

    /// Sets the rows of the next KV tile to be prefetched while the products of this one are computed.
    fn prefetch<S: Simd>(self, next: Range<usize>, prefetch: &mut TilePrefetch) {
        let (kv, head) = (&self.sequence.kv, self.task.kv_head);
        prefetch.clear();
        kv.prefetch(&kv.key, head, &next, prefetch);
        if !self.values_are_keys {
            kv.prefetch(&kv.value, head, &next, prefetch);
        }
        let (vectors, columns) = (self.attention.vectors(), self.attention.columns());
        prefetch.spread(products::prefetch_steps::<S>(self.count(), vectors, columns));
    }

    /// Attends to the loaded KV tile whose first key is `first`, one query tile after the other.
    #[inline(always)]
    fn attend_tile<S: Simd>(self, simd: S, first: usize, buffers: &mut BlockBuffers<'_>, finite: bool) {
        let attention = self.attention;
        let (vectors, columns) = (attention.vectors(), attention.columns());
        let values = if self.values_are_keys { &*buffers.keys } else { &*buffers.values };
        let lane_groups = self.lane_groups();
        let query_tiles = lane_groups.div_ceil(LANE_GROUPS);
        for (number, of_tile) in buffers.visibility[..query_tiles].iter().enumerate() {
            let first_group = number * LANE_GROUPS;
            let visible = &of_tile.keys[..(lane_groups - first_group).min(LANE_GROUPS)];
            let all = union(visible);
            if all.is_empty() {
                continue;
            }
            // Vectors of a lane group, one for each element of a query.
            let of_group = vectors * WIDTH;
            let mut query_tile = QueryTile {
                queries: &buffers.queries[first_group * of_group..][..LANE_GROUPS * of_group],
                keys: buffers.keys,
                values,
                scores: buffers.scores,
                out: &mut buffers.out[number * TILE_QUERIES * columns..][..TILE_QUERIES * columns],
                columns,
                max: &mut buffers.max[first_group..][..LANE_GROUPS],
                sum: &mut buffers.sum[first_group..][..LANE_GROUPS],
                rescale: [[1.0; WIDTH]; LANE_GROUPS],
                prefetch: &mut buffers.prefetch,
            };
            simd.outline(Scores { query_tile: &mut query_tile, vectors, visible });
            for (lane_group, visible) in visible.iter().enumerate() {
                if attention.rescales() || attention.bias.is_some() {
                    let queries = self.queries(first_group + lane_group);
                    self.add_bias(simd, &mut query_tile, (lane_group, queries, visible), first);
                }
                simd.outline(UpdateSoftmax {
                    attention,
                    query_tile: &mut query_tile,
                    lane_group,
                    visible,
                    hidden: of_tile.mixed[lane_group].then_some(&of_tile.hidden[lane_group]),
                    all: &all,
                });
                if let Some(dropout) = &attention.dropout {
                    let queries = self.queries(first_group + lane_group);
                    let weights = (dropout, lane_group, queries, visible);
                    self.drop_weights(&mut query_tile, weights, first);
                }
            }
            simd.outline(Outputs {
                query_tile: &mut query_tile,
                count: (self.count() - number * TILE_QUERIES).min(TILE_QUERIES),
                visible,
                finite,
            });
        }
    }

    /// Drops weights of a lane group. The keys `visible` count from key `first`.
    fn drop_weights(
        self,
        query_tile: &mut QueryTile<'_>,
        (dropout, lane_group, queries, visible): (&DropMask, usize, Range<usize>, &Range<usize>),
        first: usize,
    ) {
        let Some(dropped) = &self.sequence.dropped else {
            return;
        };
        let weights = &mut query_tile.scores[visible.start * LANE_GROUPS..visible.end * LANE_GROUPS];
        for (lane, query) in queries.enumerate() {
            let (row, head) = self.attention.row_and_head(self.task.kv_head, query);
            let first_bit = dropped.at(0, head, row) as u64;
            let of_query = weights.iter_mut().skip(lane_group).step_by(LANE_GROUPS);
            for (key, weights) in (first + visible.start..).zip(of_query) {
                if !dropout.keeps(first_bit + key as u64) {
                    weights[lane] = 0.0;
                }
            }
        }
    }

    /// Scales the scores of a lane group, unless the queries were scaled, caps them, and adds the position bias. The
    /// keys `visible` count from key `first`.
    #[inline(always)]
    fn add_bias<S: Simd>(
        self,
        simd: S,
        query_tile: &mut QueryTile<'_>,
        (lane_group, queries, visible): (usize, Range<usize>, &Range<usize>),
        first: usize,
    ) {
        let (attention, sequence) = (self.attention, self.sequence);
        let keys = first + visible.start..first + visible.end;
        let scores = &mut query_tile.scores[visible.start * LANE_GROUPS..visible.end * LANE_GROUPS];
        attention.rescale(scores.iter_mut().skip(lane_group).step_by(LANE_GROUPS).flatten());
        for (lane, query) in queries.enumerate() {
            let (row, head) = attention.row_and_head(self.task.kv_head, query);
            if row as u64 >= sequence.geometry.q_len() {
                break;
            }
            let mut bias = [[0.0; WIDTH]; TILE_KEYS / WIDTH];
            if !attention.read_bias(simd, sequence, (row, head), &keys, &mut bias) {
                break;
            }
            let scores = scores.iter_mut().skip(lane_group).step_by(LANE_GROUPS);
            for (score, bias) in scores.zip(bias.as_flattened()) {
                score[lane] += bias;
            }
        }
    }
}
