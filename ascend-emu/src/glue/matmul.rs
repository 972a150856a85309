//! Matrix products, in double precision.

use super::argument::{Argument, Shape, broadcast};
use super::call::{Work, work};
use super::number::Number;
use super::view::View;
use crate::host_memory::try_repeat;
use crate::status::Outcome;
use rayon::prelude::*;

/// Receives a matrix of the product, with its place in the stack.
type Take<'a> = &'a mut dyn FnMut(&[usize], &[f64]) -> Result<(), String>;

/// A product of matrices, or of stacks of them, given by sizes.
struct Product {
    /// Sizes of the stack.
    stack: Shape,
    rows: usize,
    inner: usize,
    columns: usize,
    /// Whether the factors are vectors: a left vector gets a leading axis, a right vector a trailing one.
    vectors: [bool; 2],
}

impl Product {
    /// Checks the sizes by the rules of `torch.matmul`.
    fn new(a: &Argument, b: &Argument) -> Outcome<Self> {
        let vectors = [a.rank() == 1, b.rank() == 1];
        let (mut left, mut right) = (a.shape(), b.shape());
        if vectors[0] {
            left.insert(0, 1);
        }
        if vectors[1] {
            right.push(1);
        }
        let split = |argument: &Argument, shape: &Shape| -> Outcome<(Shape, usize, usize)> {
            match shape.as_slice() {
                [stack @ .., rows, columns] => Ok((stack.into(), *rows, *columns)),
                _ => Err(argument.refuse(argument.desc.shape, "at least 1 dimension")),
            }
        };
        let (left_stack, rows, inner) = split(a, &left)?;
        let (right_stack, height, columns) = split(b, &right)?;
        let stack = broadcast(&left_stack, &right_stack).filter(|_| inner == height);
        let Some(stack) = stack else {
            return Err(b.refuse(
                b.desc.shape,
                format_args!("a factor for {} with {inner} rows", a.desc.shape),
            ));
        };
        Ok(Product {
            stack,
            rows,
            inner,
            columns,
            vectors,
        })
    }

    /// The shape of the product.
    fn shape(&self) -> Shape {
        let mut shape = self.stack.clone();
        if !self.vectors[0] {
            shape.push(self.rows);
        }
        if !self.vectors[1] {
            shape.push(self.columns);
        }
        shape
    }

    /// Multiplies, and passes each matrix of the stack to `take`, with its place.
    fn compute(&self, a: &View, b: &View, take: Take<'_>) -> Result<(), String> {
        let with_stack = |view: &View, vector: Option<usize>, last: [usize; 2]| {
            let view = match vector {
                Some(axis) => view.insert_axis(axis),
                None => view.clone(),
            };
            let mut shape = self.stack.clone();
            shape.extend(last);
            view.broadcast(&shape)
        };
        let a = with_stack(a, self.vectors[0].then_some(0), [self.rows, self.inner]);
        let b = with_stack(b, self.vectors[1].then_some(1), [self.inner, self.columns]);
        View::places(&self.stack, &mut |place| {
            let matrix = |view: &View| view.part(0, place).read::<f64>();
            let (left, right) = (matrix(&a)?, matrix(&b)?);
            let mut product = try_repeat(0.0, self.rows.saturating_mul(self.columns))?;
            if self.inner > 0 && self.columns > 0 {
                let rows = product.par_chunks_mut(self.columns);
                rows.zip(left.par_chunks(self.inner))
                    .for_each(|(row, left)| {
                        for (&factor, right) in left.iter().zip(right.chunks(self.columns)) {
                            for (sum, &value) in row.iter_mut().zip(right) {
                                *sum += factor * value;
                            }
                        }
                    });
            }
            take(place, &product)
        })
    }
}

/// Multiplies two tensors by the rules of `torch.matmul`. The argument that chooses the kind of arithmetic is
/// ignored.
pub(super) fn matmul(
    a: Argument,
    b: Argument,
    out: Argument,
    _cube_math_type: i8,
) -> Outcome<Work> {
    let product = Product::new(&a, &b)?;
    let shape = product.shape();
    match shape.is_empty() {
        true => out.expect_reduced(&shape)?,
        false => out.expect_shape(&shape)?,
    }
    for argument in [a, b, out] {
        argument.domain()?;
    }
    work(move |views| {
        let to = views.of(&out);
        product.compute(views.of(&a), views.of(&b), &mut |place, values| {
            to.part(0, place).write(values);
            Ok(())
        })
    })
}

/// Multiplies tensors of a fixed rank.
pub(super) fn ranked(rank: usize) -> impl Fn(Argument, Argument, Argument, i8) -> Outcome<Work> {
    move |a, b, out, cube_math_type| {
        a.expect_rank(rank)?;
        b.expect_rank(rank)?;
        matmul(a, b, out, cube_math_type)
    }
}

/// Adds `beta` times a tensor and `alpha` times the product of two others.
pub(super) fn add_product(
    input: Argument,
    a: Argument,
    b: Argument,
    beta: Number,
    alpha: Number,
    out: Argument,
    _cube_math_type: i8,
) -> Outcome<Work> {
    let product = Product::new(&a, &b)?;
    let shape = product.shape();
    out.expect_shape(&shape)?;
    input.expect_broadcast(&shape)?;
    for argument in [input, a, b, out] {
        argument.domain()?;
    }
    let (beta, alpha) = (beta.real(), alpha.real());
    work(move |views| {
        let (input, to) = (views.of(&input).broadcast(&shape), views.of(&out));
        product.compute(views.of(&a), views.of(&b), &mut |place, values| {
            // If `beta` is 0 the input's content does not matter, even NaN.
            let mut sums = match beta {
                0.0 => try_repeat(0.0, values.len())?,
                _ => input.part(0, place).read::<f64>()?,
            };
            for (sum, &value) in sums.iter_mut().zip(values) {
                *sum = if beta == 0.0 { 0.0 } else { beta * *sum } + alpha * value;
            }
            to.part(0, place).write(&sums);
            Ok(())
        })
    })
}
