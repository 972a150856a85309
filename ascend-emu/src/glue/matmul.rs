//! Matrix products, in double precision.

use super::argument::{Argument, Shape, broadcast, refuse};
use super::call::{Work, work};
use super::number::Number;
use super::reduce;
use super::view::View;
use crate::host_memory::{HostMemoryExhausted, try_repeat};
use crate::runtime::context;
use crate::status::Outcome;
use ascend_spec::Soc;
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
            return Err(b.refuse(b.desc.shape, format_args!("a factor for {} with {inner} rows", a.desc.shape)));
        };
        Ok(Product { stack, rows, inner, columns, vectors })
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
            let sizes = [self.rows, self.inner, self.columns];
            take(place, &product_of(sizes, &left, &right)?)
        })
    }
}

/// Multiplies two matrices, whose sizes are the rows of the first, what both share, and the columns of the second.
pub(super) fn product_of(
    [rows, inner, columns]: [usize; 3],
    left: &[f64],
    right: &[f64],
) -> Result<Vec<f64>, HostMemoryExhausted> {
    let mut product = try_repeat(0.0, rows.saturating_mul(columns))?;
    if inner > 0 && columns > 0 {
        let rows = product.par_chunks_mut(columns);
        rows.zip(left.par_chunks(inner)).for_each(|(row, left)| {
            for (&factor, right) in left.iter().zip(right.chunks(columns)) {
                for (sum, &value) in row.iter_mut().zip(right) {
                    *sum += factor * value;
                }
            }
        });
    }
    Ok(product)
}

/// Multiplies two tensors by the rules of `torch.matmul`. The argument that chooses the kind of arithmetic is
/// ignored.
pub(super) fn matmul(a: Argument, b: Argument, out: Argument, _cube_math_type: i8) -> Outcome<Work> {
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

/// Multiplies stacks of matrices whose axes are in another order; the stack is the second axis of the output. With a
/// factor above 1, the stack is cut into that number of groups, the first axis of the output, while the columns of a
/// group's matrices stand side by side.
#[allow(clippy::too_many_arguments, reason = "the operator's parameters")]
pub(super) fn transposed_batches(
    a: Argument,
    b: Argument,
    bias: Option<Argument>,
    scale: Option<Argument>,
    order_a: Vec<i64>,
    order_b: Vec<i64>,
    order_out: Vec<i64>,
    _cube_math_type: i8,
    groups: i32,
    out: Argument,
) -> Outcome<Work> {
    /// What a size must be less than.
    const MOST: usize = 1 << 16;
    let operator = a.operator;
    let soc = context::machine().target.soc;
    if let Some(given) = [bias, scale].iter().flatten().next() {
        return Err(given.refuse(given.desc, "null"));
    }
    for tensor in [a, b] {
        tensor.expect_rank(3)?;
        reduce::expect_real(&tensor)?;
        if tensor.elements() == 0 {
            return Err(tensor.refuse(tensor.desc.shape, "at least one element"));
        }
    }
    reduce::expect_real(&out)?;
    let axes = |name: &str, order: &[i64], allowed: &[[usize; 3]]| {
        let chosen = allowed.iter().find(|axes| axes.iter().map(|&axis| axis as i64).eq(order.iter().copied()));
        chosen.copied().ok_or_else(|| refuse(operator, name, format_args!("{order:?}"), format_args!("{allowed:?}")))
    };
    let of_b: &[[usize; 3]] = match soc {
        Soc::Ascend950 => &[[0, 1, 2], [0, 2, 1]],
        _ => &[[0, 1, 2]],
    };
    let axes_a = axes("permX1", &order_a, &[[0, 1, 2], [1, 0, 2]])?;
    let axes_b = axes("permX2", &order_b, of_b)?;
    axes("permY", &order_out, &[[1, 0, 2]])?;
    let [stack, rows, inner] = axes_a.map(|axis| a.shape()[axis]);
    let [own_stack, height, columns] = axes_b.map(|axis| b.shape()[axis]);
    if (own_stack, height) != (stack, inner) {
        return Err(b.refuse(b.desc.shape, format_args!("{stack} factors for {} with {inner} rows each", a.desc.shape)));
    }
    if soc != Soc::Ascend950 {
        if !inner.is_multiple_of(128) || !columns.is_multiple_of(128) {
            let allowed = "rows and columns that are multiples of 128";
            return Err(b.refuse(b.desc.shape, allowed));
        }
        // A line of the first factor, whose stack is inside of its rows if its axes are in another order.
        let line = if axes_a[0] == 0 { inner } else { inner.saturating_mul(stack) };
        if line >= MOST {
            let allowed =
                format_args!("rows of less than {MOST} elements, the stack's together if it is the second axis");
            return Err(a.refuse(a.desc.shape, allowed));
        }
        if stack >= MOST || columns >= MOST {
            return Err(b.refuse(b.desc.shape, format_args!("sizes below {MOST}")));
        }
    }
    let count = usize::try_from(groups).ok().filter(|&count| count > 0 && stack.is_multiple_of(count));
    let Some(count) = count else {
        let allowed = format_args!("a divisor of {stack}");
        return Err(refuse(operator, "batchSplitFactor", groups, allowed));
    };
    let each = stack / count;
    out.expect_shape(&match count {
        1 => [rows, stack, columns],
        _ => [count, rows, each * columns],
    })?;
    let product = Product { stack: Shape::from_slice(&[stack]), rows, inner, columns, vectors: [false, false] };
    work(move |views| {
        let (a, b) = (views.of(&a).permute(&axes_a), views.of(&b).permute(&axes_b));
        let to = views.of(&out);
        product.compute(&a, &b, &mut |place, values| {
            let number = place[0];
            match count {
                1 => to.at(1, number).write(values),
                _ => {
                    let group = to.at(0, number / each);
                    group.narrow(1, number % each * columns, columns).write(values);
                }
            }
            Ok(())
        })
    })
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
