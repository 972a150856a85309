//! The two matrix products of the prefill kernel: queries with keys, and weights with values.
//!
//! Both are register-tiled: a step keeps as many sums as the registers hold, [`Shape`] rows by vectors. The loops are
//! ordered so that data that is read again stays in the L1 cache: the queries of a query tile, or a slice of them
//! along the head dimension, while the loop passes over all keys; its weights and a few columns of values while the
//! loop passes over all queries. Keys and values of the KV tile come from the L2 cache once for each query tile.
//!
//! The inner loops are loads and multiply-adds only. The rows of a slice are a constant distance apart, so all of
//! them are addressed from one register, and bounds are checked outside of the loops.

use super::buffers::QueryTile;
use super::{LANE_GROUPS, TILE_QUERIES};
use crate::kernel::TILE_KEYS;
use crate::kernel::simd::{Kernel, Shape, Simd, Vector, WIDTH};
use crate::kernel::tile_load::{PITCH, SLICE, tile_index};
use std::ops::Range;

/// Elements of a row whose products are computed without a branch in between.
const UNROLL: usize = 4;

const _: () = assert!(TILE_QUERIES.is_multiple_of(Shape::ROWS));
const _: () = assert!(TILE_KEYS.is_multiple_of(Shape::ROWS));
const _: () = assert!(SLICE.is_multiple_of(4) && WIDTH.is_multiple_of(UNROLL));

/// About how many times the products of `count` queries prefetch a share of the next KV tile, for keys of `vectors` and
/// values of `columns` vectors.
pub(super) fn prefetch_steps<S: Simd>(count: usize, vectors: usize, columns: usize) -> usize {
    let (keys, queries, together) = match S::SHAPE {
        Shape::Wide => (8, 6, 4),
        Shape::Six => (6, 6, 1),
        Shape::Two => (2, 2, 1),
    };
    let of_scores = count.div_ceil(TILE_QUERIES) * vectors.div_ceil(SLICE) * (TILE_KEYS / keys);
    of_scores + columns.div_ceil(together) * count.div_ceil(queries)
}

/// The smallest range that contains all of `ranges`.
pub(super) fn union(ranges: &[Range<usize>]) -> Range<usize> {
    let mut union = 0..0;
    for keys in ranges.iter().filter(|keys| !keys.is_empty()) {
        union = if union.is_empty() { keys.clone() } else { union.start.min(keys.start)..union.end.max(keys.end) };
    }
    union
}

/// The smallest range of lane groups that contains all that see any of `keys`.
#[inline(always)]
fn active(visible: &[Range<usize>], keys: Range<usize>) -> Range<usize> {
    let sees = |lane_group: &Range<usize>| lane_group.start < keys.end && keys.start < lane_group.end;
    let first = visible.iter().position(sees).unwrap_or(0);
    first..visible.iter().rposition(sees).map_or(first, |last| last + 1)
}

/// Computes the scores of a query tile: the products of its queries with the keys that they see.
pub(super) struct Scores<'a, 's> {
    pub(super) query_tile: &'a mut QueryTile<'s>,
    /// Vectors of a key.
    pub(super) vectors: usize,
    /// The keys that each lane group sees.
    pub(super) visible: &'a [Range<usize>],
}

impl Kernel for Scores<'_, '_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let Scores { query_tile, vectors, visible } = self;
        for first in (0..vectors).step_by(SLICE) {
            let along = first..vectors.min(first + SLICE);
            match S::SHAPE {
                Shape::Wide => score_slice::<S, 8>(simd, query_tile, vectors, &along, visible),
                Shape::Six => score_slice::<S, 6>(simd, query_tile, vectors, &along, visible),
                Shape::Two => score_slice::<S, 2>(simd, query_tile, vectors, &along, visible),
            }
        }
    }
}

#[inline(always)]
fn score_slice<S: Simd, const ROWS: usize>(
    simd: S,
    query_tile: &mut QueryTile<'_>,
    vectors: usize,
    along: &Range<usize>,
    visible: &[Range<usize>],
) {
    let keys = union(visible);
    for first in (keys.start / ROWS * ROWS..keys.end).step_by(ROWS) {
        let lane_groups = active(visible, first..first + ROWS);
        query_tile.prefetch.prefetch_share();
        let mut start = (first, lane_groups.start);
        match (S::SHAPE, lane_groups.len()) {
            (Shape::Wide, 3) => score_rows::<S, ROWS, 3>(simd, query_tile, vectors, along, start),
            (Shape::Wide, 2) => score_rows::<S, ROWS, 2>(simd, query_tile, vectors, along, start),
            _ => {
                for lane_group in lane_groups {
                    start.1 = lane_group;
                    score_rows::<S, ROWS, 1>(simd, query_tile, vectors, along, start);
                }
            }
        }
    }
}

#[inline(always)]
fn score_rows<S: Simd, const ROWS: usize, const COLUMNS: usize>(
    simd: S,
    query_tile: &mut QueryTile<'_>,
    vectors: usize,
    along: &Range<usize>,
    (first, lane_group): (usize, usize),
) {
    let (of_groups, _) = query_tile.queries.as_chunks::<WIDTH>();
    let mut queries = [of_groups; COLUMNS];
    for (c, queries) in queries.iter_mut().enumerate() {
        *queries = &of_groups[(lane_group + c) * vectors..][along.clone()];
    }
    let rows = &query_tile.keys[tile_index(first, along.start)..][..ROWS * PITCH];
    let scores = &mut query_tile.scores[first * LANE_GROUPS + lane_group..][..(ROWS - 1) * LANE_GROUPS + COLUMNS];
    let mut products = [[simd.splat(0.0); COLUMNS]; ROWS];
    if along.start > 0 {
        for r in 0..ROWS {
            for c in 0..COLUMNS {
                products[r][c] = simd.load(&scores[r * LANE_GROUPS + c]);
            }
        }
    }
    for i in 0..along.len().min(SLICE) {
        let (mut across, mut key) = ([&queries[0][i]; COLUMNS], [&rows[i]; ROWS]);
        for c in 0..COLUMNS {
            across[c] = &queries[c][i];
        }
        for r in 0..ROWS {
            key[r] = &rows[r * PITCH + i];
        }
        for first in (0..WIDTH).step_by(UNROLL) {
            for d in first..first + UNROLL {
                let mut columns = [simd.splat(0.0); COLUMNS];
                for c in 0..COLUMNS {
                    columns[c] = simd.load(&across[c][d]);
                }
                for r in 0..ROWS {
                    let key = simd.splat(key[r][d]);
                    for c in 0..COLUMNS {
                        products[r][c] = simd.mul_add(key, columns[c], products[r][c]);
                    }
                }
            }
        }
    }
    for r in 0..ROWS {
        for c in 0..COLUMNS {
            simd.store(products[r][c], &mut scores[r * LANE_GROUPS + c]);
        }
    }
}

/// Rescales the output of a query tile and adds the weighted values.
pub(super) struct Outputs<'a, 's> {
    pub(super) query_tile: &'a mut QueryTile<'s>,
    /// Number of queries.
    pub(super) count: usize,
    /// The keys that each lane group sees.
    pub(super) visible: &'a [Range<usize>],
    /// Whether all values are finite.
    pub(super) finite: bool,
}

impl Kernel for Outputs<'_, '_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let Outputs { query_tile, count, visible, finite } = self;
        let columns = query_tile.columns;
        let mut column = 0;
        while column < columns {
            let left = if finite { columns - column } else { 1 };
            match (S::SHAPE, left) {
                (Shape::Wide, 4..) => {
                    output_queries::<S, 6, 4>(simd, query_tile, column, count, visible, finite);
                    column += 4;
                }
                (Shape::Wide, 2..) => {
                    output_queries::<S, 12, 2>(simd, query_tile, column, count, visible, finite);
                    column += 2;
                }
                (Shape::Wide, _) => {
                    output_queries::<S, 12, 1>(simd, query_tile, column, count, visible, finite);
                    column += 1;
                }
                (Shape::Six, _) => {
                    output_queries::<S, 6, 1>(simd, query_tile, column, count, visible, finite);
                    column += 1;
                }
                (Shape::Two, _) => {
                    output_queries::<S, 2, 1>(simd, query_tile, column, count, visible, finite);
                    column += 1;
                }
            }
        }
    }
}

#[inline(always)]
fn output_queries<S: Simd, const ROWS: usize, const COLUMNS: usize>(
    simd: S,
    query_tile: &mut QueryTile<'_>,
    column: usize,
    count: usize,
    visible: &[Range<usize>],
    finite: bool,
) {
    let mut query = 0;
    while query < count {
        // Steps of four where a step of six would spend as much time on queries that do not exist.
        let rows = match (S::SHAPE, count - query) {
            (Shape::Six | Shape::Wide, 0..=4 | 7 | 8) => 4,
            _ => ROWS,
        };
        let last_group = ((query + rows - 1) / WIDTH).min(visible.len() - 1);
        let keys = union(&visible[query / WIDTH..=last_group]);
        let place = (query, column);
        match (keys.is_empty(), finite, rows) {
            (true, ..) => {}
            (_, false, _) => simd.outline(OutputsSkippingZeroWeights { query_tile, place, rows, keys }),
            (_, _, 4) => output_columns::<S, 4, COLUMNS>(simd, query_tile, place, &keys),
            _ => output_columns::<S, ROWS, COLUMNS>(simd, query_tile, place, &keys),
        }
        query += rows;
        query_tile.prefetch.prefetch_share();
    }
}

#[inline(always)]
fn output_columns<S: Simd, const ROWS: usize, const COLUMNS: usize>(
    simd: S,
    query_tile: &mut QueryTile<'_>,
    (query, column): (usize, usize),
    keys: &Range<usize>,
) {
    let columns = query_tile.columns;
    let weights = &query_tile.scores.as_flattened()[keys.start * TILE_QUERIES..keys.end * TILE_QUERIES];
    let within = column % SLICE;
    let values = &query_tile.values[tile_index(keys.start, column - within)..][..keys.len() * PITCH];
    let (values, _) = values.as_chunks::<PITCH>();
    let rescale = &query_tile.rescale.as_flattened()[query..][..ROWS];
    let out = &mut query_tile.out[query * columns + column..][..(ROWS - 1) * columns + COLUMNS];
    let mut sums = [[simd.splat(0.0); COLUMNS]; ROWS];
    for r in 0..ROWS {
        for c in 0..COLUMNS {
            let out = simd.load(&out[r * columns + c]);
            sums[r][c] = simd.multiply(out, simd.splat(rescale[r]));
        }
    }
    let (weights, _) = weights.as_chunks::<TILE_QUERIES>();
    for (weights, row) in weights.iter().zip(values) {
        let (weights, row) = (&weights[query..][..ROWS], &row[within..][..COLUMNS]);
        let mut columns = [simd.splat(0.0); COLUMNS];
        for c in 0..COLUMNS {
            columns[c] = simd.load(&row[c]);
        }
        for r in 0..ROWS {
            let weight = simd.splat(weights[r]);
            for c in 0..COLUMNS {
                sums[r][c] = simd.mul_add(weight, columns[c], sums[r][c]);
            }
        }
    }
    for r in 0..ROWS {
        for c in 0..COLUMNS {
            simd.store(sums[r][c], &mut out[r * columns + c]);
        }
    }
}

/// Computes one column of [`Outputs`] where some values are infinite or NaN: a key of weight 0, such as a hidden one,
/// adds nothing. Rows whose values are all finite get the bits that [`Outputs`] gives them.
struct OutputsSkippingZeroWeights<'a, 's> {
    query_tile: &'a mut QueryTile<'s>,
    /// The first query, and the column.
    place: (usize, usize),
    /// Number of queries.
    rows: usize,
    keys: Range<usize>,
}

impl Kernel for OutputsSkippingZeroWeights<'_, '_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let OutputsSkippingZeroWeights { query_tile, place: (query, column), rows, keys } = self;
        let weights = query_tile.scores.as_flattened();
        for query in query..query + rows {
            let out = &mut query_tile.out[query * query_tile.columns + column];
            let rescale = simd.splat(query_tile.rescale.as_flattened()[query]);
            let mut sum = simd.multiply(simd.load(out), rescale);
            for key in keys.clone() {
                let weight = weights[key * TILE_QUERIES + query];
                if weight != 0.0 {
                    let value: &Vector = &query_tile.values[tile_index(key, column)];
                    sum = simd.mul_add(simd.splat(weight), simd.load(value), sum);
                }
            }
            simd.store(sum, out);
        }
    }
}
