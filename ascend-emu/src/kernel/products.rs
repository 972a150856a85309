//! The two matrix products of a block: queries with keys, weights with values.
//!
//! The loops are ordered so that what is used again lies in the first cache: a panel's queries while all keys pass, two
//! columns of values while all queries pass.

use super::panel::Block;
use super::simd::{Shape, Simd, Vector, WIDTH};
use super::tile::KEYS;
use std::ops::Range;

/// The smallest range that holds all of these.
pub(super) fn union(ranges: &[Range<usize>]) -> Range<usize> {
    let mut union = 0..0;
    for keys in ranges.iter().filter(|keys| !keys.is_empty()) {
        union = if union.is_empty() {
            keys.clone()
        } else {
            union.start.min(keys.start)..union.end.max(keys.end)
        };
    }
    union
}

/// Products of the queries with the keys that their panels see, in steps of as many keys as there are rows.
#[inline(always)]
pub(super) fn score<S: Simd>(simd: S, block: &mut Block<'_>, dim: usize, seen: &[Range<usize>]) {
    let together = match S::SHAPE {
        Shape::TwelveTwice => 2,
        Shape::Two | Shape::Six => 1,
    };
    for (number, panels) in seen.chunks(together).enumerate() {
        let (panel, keys) = (number * together, union(panels));
        match (S::SHAPE, panels.len()) {
            (Shape::TwelveTwice, 2) => score_rows::<S, 12, 2>(simd, block, dim, panel, &keys),
            (Shape::TwelveTwice, _) => score_rows::<S, 12, 1>(simd, block, dim, panel, &keys),
            (Shape::Six, _) => score_rows::<S, 6, 1>(simd, block, dim, panel, &keys),
            (Shape::Two, _) => score_rows::<S, 2, 1>(simd, block, dim, panel, &keys),
        }
    }
}

#[inline(always)]
fn score_rows<S: Simd, const ROWS: usize, const COLUMNS: usize>(
    simd: S,
    block: &mut Block<'_>,
    dim: usize,
    panel: usize,
    keys: &Range<usize>,
) {
    let mut queries = [&block.queries[..0]; COLUMNS];
    for (c, queries) in queries.iter_mut().enumerate() {
        *queries = &block.queries[(panel + c) * dim..][..dim];
    }
    let stride = dim.next_multiple_of(WIDTH);
    let tile = block.keys.as_flattened();
    for first in (keys.start / ROWS * ROWS..keys.end).step_by(ROWS) {
        let tile = &tile[first * stride..][..ROWS * stride];
        let mut rows = [tile; ROWS];
        for (r, row) in rows.iter_mut().enumerate() {
            *row = &tile[r * stride..][..dim];
        }
        let mut products = [[simd.splat(0.0); COLUMNS]; ROWS];
        for d in 0..dim {
            let mut of = [simd.splat(0.0); COLUMNS];
            for c in 0..COLUMNS {
                of[c] = simd.load(&queries[c][d]);
            }
            for r in 0..ROWS {
                let key = simd.splat(rows[r][d]);
                for c in 0..COLUMNS {
                    products[r][c] = simd.mul_add(key, of[c], products[r][c]);
                }
            }
        }
        for (r, products) in products.iter().enumerate() {
            let scores = &mut block.scores[(first + r) * block.panels + panel..][..COLUMNS];
            for (score, product) in scores.iter_mut().zip(products) {
                simd.store(*product, score);
            }
        }
    }
}

/// Adds the weighted values to the output of `count` queries, whose panels have seen these keys.
#[inline(always)]
pub(super) fn weigh<S: Simd>(
    simd: S,
    block: &mut Block<'_>,
    count: usize,
    seen: &[Range<usize>],
    finite: bool,
) {
    match S::SHAPE {
        Shape::TwelveTwice => weigh_rows::<S, 12, 2>(simd, block, count, seen, finite),
        Shape::Six => weigh_rows::<S, 6, 1>(simd, block, count, seen, finite),
        Shape::Two => weigh_rows::<S, 2, 1>(simd, block, count, seen, finite),
    }
}

#[inline(always)]
fn weigh_rows<S: Simd, const ROWS: usize, const COLUMNS: usize>(
    simd: S,
    block: &mut Block<'_>,
    count: usize,
    seen: &[Range<usize>],
    finite: bool,
) {
    let columns = block.values.len() / KEYS;
    let mut column = 0;
    while column < columns {
        let whole = finite && column + COLUMNS <= columns;
        for query in (0..count).step_by(ROWS) {
            let last_panel = ((query + ROWS - 1) / WIDTH).min(seen.len() - 1);
            let keys = union(&seen[query / WIDTH..=last_panel]);
            if keys.is_empty() {
                continue;
            }
            let place = (query, column);
            if !finite {
                weigh_with_care::<ROWS>(block, place, &keys);
            } else if whole {
                weigh_columns::<S, ROWS, COLUMNS>(simd, block, place, &keys);
            } else {
                weigh_columns::<S, ROWS, 1>(simd, block, place, &keys);
            }
        }
        column += if whole { COLUMNS } else { 1 };
    }
}

#[inline(always)]
fn weigh_columns<S: Simd, const ROWS: usize, const COLUMNS: usize>(
    simd: S,
    block: &mut Block<'_>,
    (query, column): (usize, usize),
    keys: &Range<usize>,
) {
    let columns = block.values.len() / KEYS;
    let stride = block.panels * WIDTH;
    let weights = &block.scores.as_flattened()[keys.start * stride + query..];
    let mut values = [&block.values[..0]; COLUMNS];
    for (c, values) in values.iter_mut().enumerate() {
        *values = &block.values[(column + c) * KEYS..][keys.clone()];
    }
    let decay = &block.decay.as_flattened()[query..][..ROWS];
    let out = &mut block.out[query * columns + column..][..(ROWS - 1) * columns + COLUMNS];
    let mut sums = [[simd.splat(0.0); COLUMNS]; ROWS];
    for r in 0..ROWS {
        for c in 0..COLUMNS {
            let out = simd.load(&out[r * columns + c]);
            sums[r][c] = simd.multiply(out, simd.splat(decay[r]));
        }
    }
    for j in 0..values[0].len() {
        let weights = &weights[j * stride..][..ROWS];
        let mut of = [simd.splat(0.0); COLUMNS];
        for c in 0..COLUMNS {
            of[c] = simd.load(&values[c][j]);
        }
        for r in 0..ROWS {
            let weight = simd.splat(weights[r]);
            for c in 0..COLUMNS {
                sums[r][c] = simd.mul_add(weight, of[c], sums[r][c]);
            }
        }
    }
    for r in 0..ROWS {
        for c in 0..COLUMNS {
            simd.store(sums[r][c], &mut out[r * columns + c]);
        }
    }
}

/// One column of [`weigh`] where some values are infinite or NaN: a key of weight 0, hidden perhaps, adds nothing.
#[cold]
fn weigh_with_care<const ROWS: usize>(
    block: &mut Block<'_>,
    (query, column): (usize, usize),
    keys: &Range<usize>,
) {
    let columns = block.values.len() / KEYS;
    let stride = block.panels * WIDTH;
    let weights = block.scores.as_flattened();
    let values: &[Vector] = &block.values[column * KEYS..];
    for query in query..query + ROWS {
        let out = &mut block.out[query * columns + column];
        for out in out.iter_mut() {
            *out *= block.decay.as_flattened()[query];
        }
        for key in keys.clone() {
            let weight = weights[key * stride + query];
            if weight != 0.0 {
                for (out, value) in out.iter_mut().zip(&values[key]) {
                    *out += weight * value;
                }
            }
        }
    }
}
