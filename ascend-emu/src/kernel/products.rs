//! The two matrix products of a slab, which is a few panels of queries: queries with keys, weights with values.
//!
//! The loops are ordered so that what is used again lies in the first cache: the slab's queries, or a stretch of them along
//! the head dimension, while all keys pass; its weights and a few columns of values while all queries pass. Keys and
//! values of the tile come from the second cache once for each slab.
//!
//! Both loops are nothing but loads and multiply-adds: the rows of a stretch lie a constant apart, so that all of them are
//! found from one address, and what bounds there are to check is checked outside. With a pitch that depends on the head
//! dimension a step of AVX2's loops took 33 instructions instead of 21, and `full_2048_h8_d64` 169 ms instead of 114 on one
//! thread. Four keys at a time in the loop over values made AVX-512 spill.

use super::fetch::{PITCH, STRETCH, place};
use super::panel::Slab;
use super::simd::{Kernel, Shape, Simd, Vector, WIDTH};
use super::tile::KEYS;
use std::ops::Range;

/// Panels in a slab.
pub(super) const PANELS: usize = 3;

/// Queries in a slab.
pub(super) const LANES: usize = PANELS * WIDTH;

/// Elements of a row whose products are computed without a branch between them.
const STEP: usize = 4;

const _: () = assert!(LANES.is_multiple_of(Shape::ROWS));
const _: () = assert!(KEYS.is_multiple_of(Shape::ROWS));
const _: () = assert!(STRETCH.is_multiple_of(4) && WIDTH.is_multiple_of(STEP));

/// About how often the products of a slab ask for a share of the next tile, with keys and values of so many vectors.
pub(super) fn steps<S: Simd>(vectors: usize, columns: usize) -> usize {
    let (keys, queries, together) = match S::SHAPE {
        Shape::Wide => (8, 6, 4),
        Shape::Six => (6, 6, 1),
        Shape::Two => (2, 2, 1),
    };
    vectors.div_ceil(STRETCH) * (KEYS / keys) + columns.div_ceil(together) * (LANES / queries)
}

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

/// The panels, side by side, among which are all that see any of these keys.
#[inline(always)]
fn active(seen: &[Range<usize>], keys: Range<usize>) -> Range<usize> {
    let sees = |panel: &Range<usize>| panel.start < keys.end && keys.start < panel.end;
    let first = seen.iter().position(sees).unwrap_or(0);
    first..seen.iter().rposition(sees).map_or(first, |last| last + 1)
}

/// Products of the slab's queries with the keys that its panels see, in steps of a few keys.
pub(super) struct Score<'a, 's> {
    pub(super) slab: &'a mut Slab<'s>,
    /// Vectors of a key.
    pub(super) vectors: usize,
    /// The keys that each panel sees.
    pub(super) seen: &'a [Range<usize>],
}

impl Kernel for Score<'_, '_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let Score {
            slab,
            vectors,
            seen,
        } = self;
        for first in (0..vectors).step_by(STRETCH) {
            let along = first..vectors.min(first + STRETCH);
            match S::SHAPE {
                Shape::Wide => score_stretch::<S, 8>(simd, slab, vectors, &along, seen),
                Shape::Six => score_stretch::<S, 6>(simd, slab, vectors, &along, seen),
                Shape::Two => score_stretch::<S, 2>(simd, slab, vectors, &along, seen),
            }
        }
    }
}

#[inline(always)]
fn score_stretch<S: Simd, const ROWS: usize>(
    simd: S,
    slab: &mut Slab<'_>,
    vectors: usize,
    along: &Range<usize>,
    seen: &[Range<usize>],
) {
    let keys = union(seen);
    for first in (keys.start / ROWS * ROWS..keys.end).step_by(ROWS) {
        let panels = active(seen, first..first + ROWS);
        slab.requests.ask();
        let mut at = (first, panels.start);
        match (S::SHAPE, panels.len()) {
            (Shape::Wide, 3) => score_rows::<S, ROWS, 3>(simd, slab, vectors, along, at),
            (Shape::Wide, 2) => score_rows::<S, ROWS, 2>(simd, slab, vectors, along, at),
            _ => {
                for panel in panels {
                    at.1 = panel;
                    score_rows::<S, ROWS, 1>(simd, slab, vectors, along, at);
                }
            }
        }
    }
}

#[inline(always)]
fn score_rows<S: Simd, const ROWS: usize, const COLUMNS: usize>(
    simd: S,
    slab: &mut Slab<'_>,
    vectors: usize,
    along: &Range<usize>,
    (first, panel): (usize, usize),
) {
    let (of_panels, _) = slab.queries.as_chunks::<WIDTH>();
    let mut queries = [of_panels; COLUMNS];
    for (c, queries) in queries.iter_mut().enumerate() {
        *queries = &of_panels[(panel + c) * vectors..][along.clone()];
    }
    let rows = &slab.keys[place(first, along.start)..][..ROWS * PITCH];
    let scores = &mut slab.scores[first * PANELS + panel..][..(ROWS - 1) * PANELS + COLUMNS];
    let mut products = [[simd.splat(0.0); COLUMNS]; ROWS];
    if along.start > 0 {
        for r in 0..ROWS {
            for c in 0..COLUMNS {
                products[r][c] = simd.load(&scores[r * PANELS + c]);
            }
        }
    }
    for i in 0..along.len().min(STRETCH) {
        let (mut across, mut key) = ([&queries[0][i]; COLUMNS], [&rows[i]; ROWS]);
        for c in 0..COLUMNS {
            across[c] = &queries[c][i];
        }
        for r in 0..ROWS {
            key[r] = &rows[r * PITCH + i];
        }
        for first in (0..WIDTH).step_by(STEP) {
            for d in first..first + STEP {
                let mut of = [simd.splat(0.0); COLUMNS];
                for c in 0..COLUMNS {
                    of[c] = simd.load(&across[c][d]);
                }
                for r in 0..ROWS {
                    let key = simd.splat(key[r][d]);
                    for c in 0..COLUMNS {
                        products[r][c] = simd.mul_add(key, of[c], products[r][c]);
                    }
                }
            }
        }
    }
    for r in 0..ROWS {
        for c in 0..COLUMNS {
            simd.store(products[r][c], &mut scores[r * PANELS + c]);
        }
    }
}

/// Adds the weighted values to the output of the slab's first queries, whose panels have seen these keys.
pub(super) struct Weigh<'a, 's> {
    pub(super) slab: &'a mut Slab<'s>,
    /// Queries.
    pub(super) count: usize,
    /// The keys that each panel sees.
    pub(super) seen: &'a [Range<usize>],
    /// Whether all values are finite.
    pub(super) finite: bool,
}

impl Kernel for Weigh<'_, '_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let Weigh {
            slab,
            count,
            seen,
            finite,
        } = self;
        let columns = slab.columns;
        let mut column = 0;
        while column < columns {
            let left = if finite { columns - column } else { 1 };
            match (S::SHAPE, left) {
                (Shape::Wide, 4..) => {
                    weigh_queries::<S, 6, 4>(simd, slab, column, count, seen, finite);
                    column += 4;
                }
                (Shape::Wide, 2..) => {
                    weigh_queries::<S, 12, 2>(simd, slab, column, count, seen, finite);
                    column += 2;
                }
                (Shape::Wide, _) => {
                    weigh_queries::<S, 12, 1>(simd, slab, column, count, seen, finite);
                    column += 1;
                }
                (Shape::Six, _) => {
                    weigh_queries::<S, 6, 1>(simd, slab, column, count, seen, finite);
                    column += 1;
                }
                (Shape::Two, _) => {
                    weigh_queries::<S, 2, 1>(simd, slab, column, count, seen, finite);
                    column += 1;
                }
            }
        }
    }
}

#[inline(always)]
fn weigh_queries<S: Simd, const ROWS: usize, const COLUMNS: usize>(
    simd: S,
    slab: &mut Slab<'_>,
    column: usize,
    count: usize,
    seen: &[Range<usize>],
    finite: bool,
) {
    let mut query = 0;
    while query < count {
        // Fours where a step of six would compute as much for queries that do not exist.
        let rows = match (S::SHAPE, count - query) {
            (Shape::Six | Shape::Wide, 0..=4 | 7 | 8) => 4,
            _ => ROWS,
        };
        let last_panel = ((query + rows - 1) / WIDTH).min(seen.len() - 1);
        let keys = union(&seen[query / WIDTH..=last_panel]);
        let at = (query, column);
        match (keys.is_empty(), finite, rows) {
            (true, ..) => {}
            (_, false, _) => weigh_with_care(slab, at, rows, &keys),
            (_, _, 4) => weigh_columns::<S, 4, COLUMNS>(simd, slab, at, &keys),
            _ => weigh_columns::<S, ROWS, COLUMNS>(simd, slab, at, &keys),
        }
        query += rows;
        slab.requests.ask();
    }
}

#[inline(always)]
fn weigh_columns<S: Simd, const ROWS: usize, const COLUMNS: usize>(
    simd: S,
    slab: &mut Slab<'_>,
    (query, column): (usize, usize),
    keys: &Range<usize>,
) {
    let columns = slab.columns;
    let weights = &slab.scores.as_flattened()[keys.start * LANES..keys.end * LANES];
    let within = column % STRETCH;
    let values = &slab.values[place(keys.start, column - within)..][..keys.len() * PITCH];
    let (values, _) = values.as_chunks::<PITCH>();
    let decay = &slab.decay.as_flattened()[query..][..ROWS];
    let out = &mut slab.out[query * columns + column..][..(ROWS - 1) * columns + COLUMNS];
    let mut sums = [[simd.splat(0.0); COLUMNS]; ROWS];
    for r in 0..ROWS {
        for c in 0..COLUMNS {
            let out = simd.load(&out[r * columns + c]);
            sums[r][c] = simd.multiply(out, simd.splat(decay[r]));
        }
    }
    let (weights, _) = weights.as_chunks::<LANES>();
    for (weights, row) in weights.iter().zip(values) {
        let (weights, row) = (&weights[query..][..ROWS], &row[within..][..COLUMNS]);
        let mut of = [simd.splat(0.0); COLUMNS];
        for c in 0..COLUMNS {
            of[c] = simd.load(&row[c]);
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

/// One column of [`Weigh`] where some values are infinite or NaN: a key of weight 0, hidden perhaps, adds nothing.
#[cold]
fn weigh_with_care(
    slab: &mut Slab<'_>,
    (query, column): (usize, usize),
    rows: usize,
    keys: &Range<usize>,
) {
    let weights = slab.scores.as_flattened();
    for query in query..query + rows {
        let out = &mut slab.out[query * slab.columns + column];
        for out in out.iter_mut() {
            *out *= slab.decay.as_flattened()[query];
        }
        for key in keys.clone() {
            let weight = weights[key * LANES + query];
            if weight != 0.0 {
                let value: &Vector = &slab.values[place(key, column)];
                for (out, value) in out.iter_mut().zip(value) {
                    *out += weight * value;
                }
            }
        }
    }
}
