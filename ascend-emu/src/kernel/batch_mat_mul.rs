//! Products of matrices, as the operator BatchMatMul computes them.
//!
//! Blocked as in Goto and van de Geijn, "Anatomy of High-Performance Matrix Multiplication" (2008): the right factor
//! is packed by vectors of columns; a task owns some rows of the left one and passes over the columns, with a
//! register tile of sums for each step. Sums are in single precision, in the order of the inner axis, and rounded
//! once to the output's type; a result depends on the call and the instruction set alone.

use super::register_tile::multiply_add;
use super::simd::{Kernel, Level, Shape, Simd, Vector, WIDTH};
use super::tensor::input::InputTensor;
use super::tensor::output::OutputTensor;
use super::tensor::strided::Sizes;
use super::token_rows::TokenRows;
use ascend_spec::ops::batch_mat_mul::BatchMatMulProblem;
use ascend_spec::ops::sparse_sequences::TokenLayout;
use rayon::prelude::*;
use std::ops::Range;

/// Number of vectors of columns that are packed together.
const PANEL: usize = 4;

/// Elements of the inner axis that a pass over the columns takes: as many rows of a tile stay in the caches.
const INNER: usize = 256;

/// Largest number of rows of a task.
const ROWS: usize = 48;

/// Largest number of floats in a task's rows of products; a task with longer rows takes fewer of them.
const FLOATS: usize = 1 << 20;

const _: () = assert!(ROWS.is_multiple_of(Shape::ROWS));

/// Multiplies. Runs on the current rayon pool.
///
/// # Errors
/// There is no host memory for the buffers.
///
/// # Safety
///
/// Every element of the factors may be read, and every element of `out` read and written by no other thread, for the
/// duration of the call; `out` shares no memory with the factors. The descriptions are those of the call that
/// `problem` was made from. Alignment is not required.
pub(crate) unsafe fn run(
    problem: &BatchMatMulProblem,
    [left, right]: [TokenRows<'_>; 2],
    out: TokenRows<'_>,
) -> Result<(), String> {
    let &BatchMatMulProblem { batch, rows, inner, columns } = problem;
    let matrices = |tensor: &TokenRows<'_>, rows, dim| {
        let (mut all, sizes) = tensor.rows(TokenLayout::Bsnd);
        // If the first axis is 1, its matrix is used for every product.
        if sizes.batch == 1 {
            all.view.batch = 0;
        }
        (all, Sizes { batch, heads: 1, rows, dim })
    };
    let input = |factor: TokenRows<'_>, rows, dim| {
        let (rows, sizes) = matrices(&factor, rows, dim);
        // SAFETY: the caller's promise.
        unsafe { InputTensor::new(factor.base, &rows, sizes, factor.types()) }
    };
    let (of_left, of_right) = (input(left, rows, inner), input(right, inner, columns));
    let (of_rows, sizes) = matrices(&out, rows, columns);
    // SAFETY: the caller's promise; threads write different rows, and if rows share memory only one thread writes.
    let of_out = unsafe { OutputTensor::new(out.base, &of_rows, sizes, out.types(), None) };
    let level = Level::chosen();
    let width = columns.div_ceil(WIDTH);
    let step = FLOATS.checked_div(width * WIDTH).unwrap_or(ROWS);
    let step = step.clamp(1, ROWS);
    let mut panels = vectors(width.next_multiple_of(PANEL), inner)?;
    let serves_all = right.desc.shape.first() == Some(&1);
    for matrix in 0..batch {
        if inner > 0 && (matrix == 0 || !serves_all) {
            let packed = panels.par_chunks_mut(PANEL * inner).enumerate();
            packed.for_each(|(panel, packed)| {
                let first = panel * PANEL * WIDTH;
                level.run(Pack {
                    from: &of_right,
                    matrix,
                    inner,
                    columns: first.min(columns)..(first + PANEL * WIDTH).min(columns),
                    packed,
                });
            });
        }
        let task = |first: usize| -> Result<(), String> {
            let rows = first..(first + step).min(rows);
            let padded = rows.len().next_multiple_of(Shape::ROWS);
            let mut tile = Tile { left: vectors(padded, inner.div_ceil(WIDTH))?, out: vectors(padded, width)? };
            level.run(Multiply {
                left: &of_left,
                panels: &panels,
                out: &of_out,
                matrix,
                rows,
                inner,
                width,
                tile: &mut tile,
            });
            Ok(())
        };
        let firsts = 0..rows.div_ceil(step);
        match of_out.is_disjoint() {
            true => (firsts.into_par_iter()).try_for_each(|index| task(index * step))?,
            false => firsts.into_iter().try_for_each(|index| task(index * step))?,
        }
    }
    Ok(())
}

/// Allocates vectors of zeros.
fn vectors(rows: usize, width: usize) -> Result<Vec<Vector>, String> {
    let mut vectors = Vec::new();
    let count = rows.checked_mul(width);
    let reserved = count.and_then(|count| vectors.try_reserve_exact(count).ok().map(|()| count));
    match reserved {
        Some(count) => {
            vectors.resize(count, [0.0; WIDTH]);
            Ok(vectors)
        }
        None => Err(format!("no host memory for {rows} rows of {width} vectors")),
    }
}

/// Packs columns of the right factor: for each vector of columns, the whole inner axis.
struct Pack<'a> {
    from: &'a InputTensor,
    matrix: usize,
    inner: usize,
    columns: Range<usize>,
    packed: &'a mut [Vector],
}

impl Kernel for Pack<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let Pack { from, matrix, inner, columns, packed } = self;
        let ignored = &mut simd.splat(0.0);
        for row in 0..inner {
            let place = (matrix, 0, row);
            let to = &mut packed[row..];
            from.read(simd, place, columns.clone(), to, inner, ignored);
        }
    }
}

/// The rows of a task: rows of the left factor, and rows of products.
struct Tile {
    left: Vec<Vector>,
    out: Vec<Vector>,
}

/// Computes some rows of a product.
struct Multiply<'a> {
    left: &'a InputTensor,
    panels: &'a [Vector],
    out: &'a OutputTensor,
    matrix: usize,
    rows: Range<usize>,
    inner: usize,
    /// Vectors of a row of the product.
    width: usize,
    tile: &'a mut Tile,
}

impl Kernel for Multiply<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let Multiply { left, panels, out, matrix, rows, inner, width, tile } = self;
        let ignored = &mut simd.splat(0.0);
        let pitch = inner.div_ceil(WIDTH);
        for (index, row) in rows.clone().enumerate() {
            let to = &mut tile.left[index * pitch..][..pitch];
            left.read(simd, (matrix, 0, row), 0..inner, to, 1, ignored);
        }
        for first in (0..inner).step_by(INNER) {
            let mut part = Part {
                panels,
                tile: &mut *tile,
                rows: rows.len(),
                along: first..inner.min(first + INNER),
                inner,
                width,
            };
            match S::SHAPE {
                Shape::Wide => {
                    let panelled = width - width % PANEL;
                    part.multiply::<S, 6, PANEL>(simd, 0..panelled);
                    part.multiply::<S, 12, 1>(simd, panelled..width);
                }
                Shape::Six => part.multiply::<S, 6, 1>(simd, 0..width),
                Shape::Two => part.multiply::<S, 2, 1>(simd, 0..width),
            }
        }
        for (index, row) in rows.enumerate() {
            let values = &mut tile.out[index * width..][..width];
            out.write_row(simd, (matrix, 0, row), values, true);
        }
    }
}

/// Adds the products of all rows of a tile along a part of the inner axis.
struct Part<'a> {
    panels: &'a [Vector],
    tile: &'a mut Tile,
    rows: usize,
    along: Range<usize>,
    inner: usize,
    /// Vectors of a row of the product.
    width: usize,
}

impl Part<'_> {
    /// Adds the products of `columns` vectors of columns, `COLUMNS` at a time; their number is a multiple of
    /// `COLUMNS`.
    #[inline(always)]
    fn multiply<S: Simd, const ROWS: usize, const COLUMNS: usize>(&mut self, simd: S, columns: Range<usize>) {
        let Self { panels, ref mut tile, rows, ref along, inner, width } = *self;
        let pitch = inner.div_ceil(WIDTH) * WIDTH;
        let left = tile.left.as_flattened();
        for column in columns.step_by(COLUMNS) {
            let mut right = [panels; COLUMNS];
            for (c, right) in right.iter_mut().enumerate() {
                *right = &panels[(column + c) * inner..][along.clone()];
            }
            for first in (0..rows).step_by(ROWS) {
                let mut of_rows = [left; ROWS];
                for (r, row) in of_rows.iter_mut().enumerate() {
                    *row = &left[(first + r) * pitch..][along.clone()];
                }
                let out = &mut tile.out[first * width + column..][..(ROWS - 1) * width + COLUMNS];
                let mut sums = [[simd.splat(0.0); COLUMNS]; ROWS];
                for r in 0..ROWS {
                    for c in 0..COLUMNS {
                        sums[r][c] = simd.load(&out[r * width + c]);
                    }
                }
                multiply_add(simd, of_rows, right, &mut sums);
                for r in 0..ROWS {
                    for c in 0..COLUMNS {
                        simd.store(sums[r][c], &mut out[r * width + c]);
                    }
                }
            }
        }
    }
}
