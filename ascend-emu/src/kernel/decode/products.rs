//! The two matrix products of the decode kernel: dot products of queries with keys, and weighted sums of values.

use super::{DecodeBuffers, QUERIES, SCORES, SubTile, query_tiles};
use crate::kernel::kv::tile_rows::{TileRow, TileRows};
use crate::kernel::prefetch::{CACHE_LINE, PrefetchCursor};
use crate::kernel::simd::{Kernel, Shape, Simd, Vector, WIDTH};
use crate::kernel::tile_load::stride;
use std::ops::Range;

/// Rows of values that are added without a branch in between.
const UNROLL: usize = 4;

impl SubTile<'_> {
    /// Computes the products of the keys `range` with `R` queries from `query` on, `J` keys at a time.
    #[inline(always)]
    fn scores<S: Simd, K: TileRows, const R: usize, const J: usize>(
        &self,
        simd: S,
        buffers: &mut DecodeBuffers<'_>,
        query: usize,
        (keys, range): (K, &Range<usize>),
        mut cursor: PrefetchCursor,
    ) {
        let count = range.len();
        let vectors = buffers.queries.len() / QUERIES;
        let queries = buffers.queries[query * vectors..][..R * vectors].as_chunks::<R>().0;
        let scores = buffers.scores[query * SCORES..][..R * SCORES].as_flattened_mut();
        let of_steps = scores[range.start * R..].chunks_exact_mut(J * R);
        for (first, scores) in (0..count).step_by(J).zip(of_steps) {
            // Past the last key the first one is multiplied again: its products are overwritten by those of the next
            // keys, or are hidden.
            let mut rows = [keys.row(first); J];
            if first + J <= count {
                rows = keys.rows(first);
            } else {
                for (j, row) in rows.iter_mut().enumerate().take(count - first) {
                    *row = keys.row(first + j);
                }
            }
            assert!(rows.iter().all(|key| queries.len() <= key.vectors()));
            let mut sums = [[simd.zero_sum(); R]; J];
            for (i, queries) in queries.iter().enumerate() {
                let byte = i * K::BYTES;
                if byte.is_multiple_of(CACHE_LINE) {
                    for j in 0..J {
                        cursor.prefetch(j, byte);
                    }
                }
                let mut keys = [simd.splat(0.0); J];
                for j in 0..J {
                    keys[j] = rows[j].at(simd, i);
                }
                simd.dots(queries, keys, &mut sums);
            }
            cursor = cursor.after(J);
            let sum = |i: usize| sums[i / R][i % R];
            if let Ok(scores) = <&mut Vector>::try_from(&mut *scores) {
                let mut sums = [simd.zero_sum(); WIDTH];
                for (i, to) in sums.iter_mut().enumerate() {
                    *to = sum(i);
                }
                *scores = simd.horizontal_sums(sums);
            } else {
                for (four, scores) in scores.as_chunks_mut::<4>().0.iter_mut().enumerate() {
                    let sum = |i: usize| sum(4 * four + i);
                    *scores = simd.horizontal_sums_of_four([sum(0), sum(1), sum(2), sum(3)]);
                }
            }
        }
    }

    /// Adds the weighted values `range` to the output of `R` queries from `query` on, `C` columns at a time.
    #[inline(always)]
    fn add_values<S: Simd, V: TileRows, const R: usize, const C: usize>(
        &self,
        simd: S,
        buffers: &mut DecodeBuffers<'_>,
        query: usize,
        values: (V, &Range<usize>),
        cursor: PrefetchCursor,
    ) {
        let columns = buffers.out.len() / QUERIES;
        let mut column = 0;
        while column + C <= columns {
            self.add_value_columns::<S, V, R, C>(simd, buffers, (query, column), values, cursor);
            column += C;
        }
        while column < columns {
            self.add_value_columns::<S, V, R, 1>(simd, buffers, (query, column), values, cursor);
            column += 1;
        }
    }

    #[inline(always)]
    fn add_value_columns<S: Simd, V: TileRows, const R: usize, const C: usize>(
        &self,
        simd: S,
        buffers: &mut DecodeBuffers<'_>,
        (query, column): (usize, usize),
        (values, range): (V, &Range<usize>),
        mut cursor: PrefetchCursor,
    ) {
        let columns = buffers.out.len() / QUERIES;
        let weights = buffers.scores[query * SCORES..][..R * SCORES].as_flattened();
        let weights = &weights.as_chunks::<R>().0[range.clone()];
        let out = &mut buffers.out[query * columns..][..R * columns];
        let mut sums = [[simd.splat(0.0); C]; R];
        for r in 0..R {
            // The first values of a sub-tile rescale the output so far.
            let rescale = if range.start == 0 { buffers.rescale[query + r] } else { 1.0 };
            let rescale = simd.splat(rescale);
            for c in 0..C {
                let out = simd.load(&out[r * columns + column + c]);
                sums[r][c] = simd.multiply(out, rescale);
            }
        }
        // A pass over the rows prefetches the same columns of other rows. Where these are less than a cache line,
        // each pass prefetches whole lines of a share of the rows.
        let lines = (C * V::BYTES).div_ceil(CACHE_LINE);
        let shares = (CACHE_LINE / (C * V::BYTES)).clamp(1, UNROLL);
        let (share, byte) = (column / C % shares, column * V::BYTES / CACHE_LINE * CACHE_LINE);
        let values = values.skip_vectors(column);
        let (steps, rest) = weights.as_chunks::<UNROLL>();
        for (step, weights) in steps.iter().enumerate() {
            let rows: [V::Row; UNROLL] = values.rows(step * UNROLL);
            for j in 0..UNROLL {
                if j % shares == 0 {
                    for line in 0..lines {
                        cursor.prefetch(share + j, byte + line * CACHE_LINE);
                    }
                }
                add_row(simd, rows[j], &weights[j], &mut sums);
            }
            cursor = cursor.after(UNROLL);
        }
        for (j, weights) in rest.iter().enumerate() {
            let row = values.row(steps.len() * UNROLL + j);
            add_row(simd, row, weights, &mut sums);
        }
        for r in 0..R {
            for c in 0..C {
                simd.store(sums[r][c], &mut out[r * columns + column + c]);
            }
        }
    }

    /// Computes [`Outputs`] where some values are infinite or NaN: a key of weight 0, such as a hidden one, adds
    /// nothing.
    #[cold]
    pub(super) fn add_outputs_skipping_zero_weights(&self, buffers: &mut DecodeBuffers<'_>, values: &[Vector]) {
        let columns = buffers.out.len() / QUERIES;
        for (query, together) in query_tiles(self.count()) {
            for r in 0..together {
                let weights = buffers.scores[query * SCORES..].as_flattened().iter();
                let weights = weights.skip(r).step_by(together).take(self.rows.len());
                let out = &mut buffers.out[(query + r) * columns..][..columns];
                for out in out.as_flattened_mut() {
                    *out *= buffers.rescale[query + r];
                }
                let values = values.chunks(stride(columns));
                for (weight, values) in weights.zip(values).filter(|(weight, _)| **weight != 0.0) {
                    for (out, value) in out.iter_mut().zip(values) {
                        for (out, value) in out.iter_mut().zip(value) {
                            *out += weight * value;
                        }
                    }
                }
            }
        }
    }
}

/// Adds the first `COLUMNS` vectors of a row, times the weight of each query, to `sums`.
#[inline(always)]
fn add_row<S: Simd, R: TileRow, const QUERIES: usize, const COLUMNS: usize>(
    simd: S,
    row: R,
    weights: &[f32; QUERIES],
    sums: &mut [[S::Register; COLUMNS]; QUERIES],
) {
    let mut columns = [simd.splat(0.0); COLUMNS];
    for (c, column) in columns.iter_mut().enumerate() {
        *column = row.at(simd, c);
    }
    for r in 0..QUERIES {
        let weight = simd.splat(weights[r]);
        for c in 0..COLUMNS {
            sums[r][c] = simd.mul_add(weight, columns[c], sums[r][c]);
        }
    }
}

/// Computes the products of some keys of a sub-tile with every query.
pub(super) struct Scores<'a, 's, R> {
    pub(super) sub_tile: &'a SubTile<'a>,
    pub(super) buffers: &'a mut DecodeBuffers<'s>,
    pub(super) keys: R,
    /// The keys of the sub-tile whose products are computed.
    pub(super) range: Range<usize>,
    /// The rows to prefetch.
    pub(super) cursor: PrefetchCursor,
}

impl<R: TileRows> Kernel for Scores<'_, '_, R> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let (sub_tile, buffers, keys) = (self.sub_tile, self.buffers, (self.keys, &self.range));
        // Every query tile prefetches the same rows: prefetching a line that is in the cache already costs little.
        let cursor = self.cursor;
        for (query, together) in query_tiles(sub_tile.count()) {
            match (together, S::SHAPE) {
                (4, Shape::Wide) => sub_tile.scores::<S, R, 4, 4>(simd, buffers, query, keys, cursor),
                (4, Shape::Six) => sub_tile.scores::<S, R, 4, 3>(simd, buffers, query, keys, cursor),
                (4, Shape::Two) => sub_tile.scores::<S, R, 4, 1>(simd, buffers, query, keys, cursor),
                (2, Shape::Two) => sub_tile.scores::<S, R, 2, 2>(simd, buffers, query, keys, cursor),
                (2, _) => sub_tile.scores::<S, R, 2, 4>(simd, buffers, query, keys, cursor),
                (_, Shape::Two) => sub_tile.scores::<S, R, 1, 4>(simd, buffers, query, keys, cursor),
                _ => sub_tile.scores::<S, R, 1, 8>(simd, buffers, query, keys, cursor),
            }
        }
    }
}

/// Adds some values of a sub-tile, weighted, to the output of every query.
pub(super) struct Outputs<'a, 's, R> {
    pub(super) sub_tile: &'a SubTile<'a>,
    pub(super) buffers: &'a mut DecodeBuffers<'s>,
    pub(super) values: R,
    /// The keys of the sub-tile whose values are added.
    pub(super) range: Range<usize>,
    /// The rows to prefetch.
    pub(super) cursor: PrefetchCursor,
}

impl<R: TileRows> Kernel for Outputs<'_, '_, R> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let (sub_tile, buffers, values) = (self.sub_tile, self.buffers, (self.values, &self.range));
        let cursor = self.cursor;
        for (query, together) in query_tiles(sub_tile.count()) {
            match (together, S::SHAPE) {
                (4, Shape::Wide) => sub_tile.add_values::<S, R, 4, 4>(simd, buffers, query, values, cursor),
                (4, _) => sub_tile.add_values::<S, R, 4, 1>(simd, buffers, query, values, cursor),
                (2, Shape::Wide) => sub_tile.add_values::<S, R, 2, 4>(simd, buffers, query, values, cursor),
                (2, _) => sub_tile.add_values::<S, R, 2, 2>(simd, buffers, query, values, cursor),
                _ => sub_tile.add_values::<S, R, 1, 4>(simd, buffers, query, values, cursor),
            }
        }
    }
}
