//! The micro-kernel of GEMM: the inner loop of products of matrices, over the sums of a register tile.
//!
//! The left factor is read by rows or by columns, the right one by vectors of columns, each of which runs along the
//! inner axis. A tile of `ROWS` by `COLUMNS` vectors stays in registers, and the loop is loads and multiply-adds only:
//! bounds are checked before it. A left factor by columns has its rows at constant distances, so that one register
//! addresses all of them.

use super::simd::{Simd, Vector, WIDTH};

/// Adds to a tile of sums the products of rows with vectors of columns, along an inner axis that is as long as the
/// columns, in its order.
#[inline(always)]
pub(super) fn multiply_add<S: Simd, const ROWS: usize, const COLUMNS: usize>(
    simd: S,
    left: [&[f32]; ROWS],
    right: [&[Vector]; COLUMNS],
    sums: &mut [[S::Register; COLUMNS]; ROWS],
) {
    let inner = right[0].len();
    let mut rows = left;
    for r in 0..ROWS {
        rows[r] = &left[r][..inner];
    }
    multiply_add_factors(simd, |r, k| rows[r][k], right, sums);
}

/// Adds to a tile of sums the products of columns, from one of their rows on, with vectors of columns, along an inner
/// axis that is as long as the latter, in its order.
#[inline(always)]
pub(super) fn multiply_add_columns<S: Simd, const ROWS: usize, const COLUMNS: usize>(
    simd: S,
    left: &[Vector],
    first: usize,
    right: [&[Vector]; COLUMNS],
    sums: &mut [[S::Register; COLUMNS]; ROWS],
) {
    let left = &left[..right[0].len()];
    assert!(first <= WIDTH - ROWS, "rows {first} to {} of {WIDTH}", first + ROWS);
    multiply_add_factors(simd, |r, k| left[k][first + r], right, sums);
}

/// Adds products with the left factor's element of a row and of a place along the inner axis.
#[inline(always)]
fn multiply_add_factors<S: Simd, const ROWS: usize, const COLUMNS: usize>(
    simd: S,
    factor: impl Fn(usize, usize) -> f32,
    right: [&[Vector]; COLUMNS],
    sums: &mut [[S::Register; COLUMNS]; ROWS],
) {
    let inner = right[0].len();
    let mut columns = right;
    for c in 0..COLUMNS {
        columns[c] = &right[c][..inner];
    }
    for k in 0..inner {
        let mut vectors = [simd.splat(0.0); COLUMNS];
        for c in 0..COLUMNS {
            let column = columns[c];
            vectors[c] = simd.load(&column[k]);
        }
        for (r, sums) in sums.iter_mut().enumerate() {
            let factor = simd.splat(factor(r, k));
            for c in 0..COLUMNS {
                sums[c] = simd.mul_add(factor, vectors[c], sums[c]);
            }
        }
    }
}
