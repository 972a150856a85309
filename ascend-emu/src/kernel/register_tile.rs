//! The inner loop of products of matrices: the sums of a register tile.
//!
//! The left factor is read by rows, the right one by vectors of columns, each of which runs along the inner axis. A
//! tile of `ROWS` by `COLUMNS` vectors stays in registers, and the loop is loads and multiply-adds only: bounds are
//! checked before it.

use super::simd::{Simd, Vector};

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
    let (mut rows, mut columns) = (left, right);
    for r in 0..ROWS {
        rows[r] = &left[r][..inner];
    }
    for c in 0..COLUMNS {
        columns[c] = &right[c][..inner];
    }
    for k in 0..inner {
        let mut vectors = [simd.splat(0.0); COLUMNS];
        for c in 0..COLUMNS {
            vectors[c] = simd.load(&columns[c][k]);
        }
        for r in 0..ROWS {
            let factor = simd.splat(rows[r][k]);
            for c in 0..COLUMNS {
                sums[r][c] = simd.mul_add(factor, vectors[c], sums[r][c]);
            }
        }
    }
}
