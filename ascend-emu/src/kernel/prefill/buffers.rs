//! The buffers of a query block, in the working memory of a thread.

use super::{LANE_GROUPS, QUERY_TILES, QueryBlock, TILE_QUERIES};
use crate::kernel::TILE_KEYS;
use crate::kernel::prefetch::TilePrefetch;
use crate::kernel::scratch::{Scratch, take};
use crate::kernel::simd::{Vector, WIDTH};
use crate::kernel::tile_load::tile_vectors;
use crate::kernel::visibility::HiddenLanes;
use crate::kernel::visibility::{MaskWindow, WINDOW_KEYS};
use std::ops::Range;

/// Which keys of a KV tile a query tile sees, for each of its lane groups. Keys count from the first of the KV tile.
#[derive(Clone)]
pub(super) struct TileVisibility {
    /// The range of keys that some query of the lane group sees.
    pub(super) keys: [Range<usize>; LANE_GROUPS],
    /// Whether some of these keys are hidden from some queries.
    pub(super) mixed: [bool; LANE_GROUPS],
    /// The queries that each key is hidden from, where `mixed`.
    pub(super) hidden: [HiddenLanes; LANE_GROUPS],
}

/// The buffers of a query block.
pub(super) struct BlockBuffers<'s> {
    /// Queries, transposed: for each lane group, element `d` of its queries.
    pub(super) queries: &'s mut [Vector],
    /// Keys of a KV tile, in slices.
    pub(super) keys: &'s mut [Vector],
    /// Values of a KV tile, in slices.
    pub(super) values: &'s mut [Vector],
    /// One query, key or value.
    pub(super) row: &'s mut [Vector],
    /// Scores of a query tile.
    pub(super) scores: &'s mut [Vector],
    /// Output of each query, row by row, not yet divided by the running sum.
    pub(super) out: &'s mut [Vector],
    /// Running maximum of each query.
    pub(super) max: &'s mut [Vector],
    /// Running sum of each query.
    pub(super) sum: &'s mut [Vector],
    /// What the mask tensor hides from each lane group.
    pub(super) mask_windows: [MaskWindow<'s>; QUERY_TILES * LANE_GROUPS],
    /// What each query tile sees of the KV tile.
    pub(super) visibility: [TileVisibility; QUERY_TILES],
    /// Rows of the next KV tile.
    pub(super) prefetch: TilePrefetch,
}

/// A query tile at work on a KV tile.
pub(super) struct QueryTile<'s> {
    /// Queries, transposed.
    pub(super) queries: &'s [Vector],
    /// Keys of the KV tile, in slices.
    pub(super) keys: &'s [Vector],
    /// Values of the KV tile, in slices.
    pub(super) values: &'s [Vector],
    /// For each key the scores of all queries; the softmax replaces them by weights.
    pub(super) scores: &'s mut [Vector],
    /// Output of each query, not yet divided by the running sum.
    pub(super) out: &'s mut [Vector],
    /// Vectors of an output.
    pub(super) columns: usize,
    /// Running maximum of each query.
    pub(super) max: &'s mut [Vector],
    /// Running sum of each query.
    pub(super) sum: &'s mut [Vector],
    /// Factor by which the KV tile rescales the output of each query.
    pub(super) rescale: [Vector; LANE_GROUPS],
    /// Rows of the next KV tile.
    pub(super) prefetch: &'s mut TilePrefetch,
}

impl<'s> BlockBuffers<'s> {
    /// The buffers of `block`, all of them within `scratch`.
    pub(super) fn new(scratch: &'s mut Scratch, block: QueryBlock<'_>) -> Self {
        let (key_vectors, columns) = (block.attention.vectors(), block.attention.columns());
        let query_tiles = block.count().div_ceil(TILE_QUERIES);
        let sizes = [
            query_tiles * LANE_GROUPS * key_vectors * WIDTH,
            tile_vectors(key_vectors),
            if block.values_are_keys { 0 } else { tile_vectors(columns) },
            key_vectors.max(columns),
            TILE_KEYS * LANE_GROUPS,
            query_tiles * TILE_QUERIES * columns,
            query_tiles * LANE_GROUPS,
            query_tiles * LANE_GROUPS,
        ];
        let of_group = block.attention.mask.as_ref().map_or(0, |_| WINDOW_KEYS);
        let (mut rest, mut bits) = scratch.vectors_and_bits(sizes.iter().sum(), query_tiles * LANE_GROUPS * of_group);
        let [queries, keys, values, row, scores, out, max, sum] = sizes.map(|size| take(&mut rest, size));
        BlockBuffers {
            queries,
            keys,
            values,
            row,
            scores,
            out,
            max,
            sum,
            mask_windows: std::array::from_fn(|lane_group| {
                let size = if lane_group < query_tiles * LANE_GROUPS { of_group } else { 0 };
                MaskWindow::new(take(&mut bits, size))
            }),
            visibility: [const {
                TileVisibility {
                    keys: [const { 0..0 }; LANE_GROUPS],
                    mixed: [false; LANE_GROUPS],
                    hidden: [[0; TILE_KEYS]; LANE_GROUPS],
                }
            }; QUERY_TILES],
            prefetch: TilePrefetch::none(),
        }
    }

    /// Resets output, running maximum and running sum.
    pub(super) fn clear(&mut self) {
        self.out.fill([0.0; WIDTH]);
        self.max.fill([f32::NEG_INFINITY; WIDTH]);
        self.sum.fill([0.0; WIDTH]);
    }
}
