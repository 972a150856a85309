//! Operators that look at whole lines of elements along one axis or several.

use super::call::{Work, work};
use super::number::{Domain, Number, Wide};
use super::operand::{Operand, Shape, refuse};
use super::view::{View, Views};
use crate::status::Outcome;
use ascend_spec::DType;
use std::cmp::Ordering;

/// Which axes are looked at.
struct Axes {
    reduced: Vec<usize>,
    kept: Vec<usize>,
}

impl Axes {
    /// The axes that `dims` names; all if it names none.
    fn new(input: &Operand, parameter: &str, dims: &[i64]) -> Outcome<Self> {
        let mut reduced = Vec::new();
        for &dim in dims {
            let axis = input.axis(parameter, dim)?;
            if reduced.contains(&axis) {
                return Err(refuse(
                    input.operator,
                    parameter,
                    format_args!("{dims:?}"),
                    "each axis at most once",
                ));
            }
            reduced.push(axis);
        }
        if dims.is_empty() {
            reduced = (0..input.rank()).collect();
        }
        // A tensor without axes counts as one with one.
        reduced.retain(|&axis| axis < input.rank());
        reduced.sort_unstable();
        let kept = (0..input.rank())
            .filter(|axis| !reduced.contains(axis))
            .collect();
        Ok(Axes { reduced, kept })
    }

    /// Elements of each line.
    fn line(&self, input: &Operand) -> usize {
        let shape = input.shape();
        self.reduced.iter().map(|&axis| shape[axis]).product()
    }

    /// Refuses an output of another shape than is left.
    fn expect_output(&self, input: &Operand, keep: bool, out: &Operand) -> Outcome {
        let shape: Shape = (input.shape().iter().enumerate())
            .filter(|(axis, _)| keep || self.kept.contains(axis))
            .map(|(axis, &size)| if self.kept.contains(&axis) { size } else { 1 })
            .collect();
        out.expect_shape(&shape)
    }

    /// The view with the kept axes first, all others after them.
    fn arrange(&self, view: &View) -> View {
        let order: Vec<usize> = self.kept.iter().chain(&self.reduced).copied().collect();
        view.permute(&order)
    }

    /// Visits each line.
    fn lines<W: Wide>(&self, view: &View, visit: &mut dyn FnMut(&[W])) -> Result<(), String> {
        let arranged = self.arrange(view);
        let kept = &arranged.shape()[..self.kept.len()];
        View::places(kept, &mut |place| {
            let mut line = arranged.clone();
            for &at in place {
                line = line.at(0, at);
            }
            visit(&line.read::<W>()?);
            Ok(())
        })
    }
}

/// What is made of a line, in either kind of numbers.
#[derive(Clone, Copy)]
pub(super) struct Fold {
    pub int: fn(&[i64]) -> i64,
    pub real: fn(&[f64]) -> f64,
    /// Whether a line without elements has a result.
    pub of_nothing: bool,
}

/// The greatest, and its place: of several equal ones the first; NaN is greater than any number.
fn greatest<W: Wide>(values: &[W]) -> usize {
    best(values, |a, b| a > b)
}

/// The least, likewise; NaN is less than any number.
fn least<W: Wide>(values: &[W]) -> usize {
    best(values, |a, b| a < b)
}

fn best<W: Wide>(values: &[W], better: fn(W, W) -> bool) -> usize {
    let mut best = 0;
    for (i, &value) in values.iter().enumerate() {
        let so_far = values[best];
        if !so_far.is_nan() && (value.is_nan() || better(value, so_far)) {
            best = i;
        }
    }
    best
}

pub(super) const SUM: Fold = Fold {
    int: |values| {
        values
            .iter()
            .fold(0, |sum: i64, &value| sum.wrapping_add(value))
    },
    real: |values| values.iter().sum(),
    of_nothing: true,
};
pub(super) const PRODUCT: Fold = Fold {
    int: |values| {
        values
            .iter()
            .fold(1, |product: i64, &value| product.wrapping_mul(value))
    },
    real: |values| values.iter().product(),
    of_nothing: true,
};
pub(super) const MEAN: Fold = Fold {
    int: |values| {
        values.iter().fold(0, |sum: i64, &v| sum.wrapping_add(v)) / values.len().max(1) as i64
    },
    real: |values| values.iter().sum::<f64>() / values.len() as f64,
    of_nothing: true,
};
pub(super) const MAX: Fold = Fold {
    int: |values| values[greatest(values)],
    real: |values| values[greatest(values)],
    of_nothing: false,
};
pub(super) const MIN: Fold = Fold {
    int: |values| values[least(values)],
    real: |values| values[least(values)],
    of_nothing: false,
};
pub(super) const ANY: Fold = Fold {
    int: |values| i64::from(values.iter().any(|&value| value != 0)),
    real: |values| f64::from(values.iter().any(|&value| value != 0.0)),
    of_nothing: true,
};
pub(super) const ALL: Fold = Fold {
    int: |values| i64::from(values.iter().all(|&value| value != 0)),
    real: |values| f64::from(values.iter().all(|&value| value != 0.0)),
    of_nothing: true,
};
pub(super) const LOG_SUM_EXP: Fold = Fold {
    int: |_| 0,
    real: |values| {
        let greatest = values.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        let shift = if greatest.is_finite() { greatest } else { 0.0 };
        shift
            + values
                .iter()
                .map(|value| (value - shift).exp())
                .sum::<f64>()
                .ln()
    },
    of_nothing: true,
};

/// In what lines are computed: integers stay such unless the result is of a floating type.
fn line_domain(input: &Operand, out: &Operand) -> Outcome<Domain> {
    Ok(input.domain()?.with(out.domain()?))
}

/// One number for each line.
fn fold(fold: Fold, input: Operand, dims: &[i64], keep: bool, out: Operand) -> Outcome<Work> {
    let axes = Axes::new(&input, "dim", dims)?;
    axes.expect_output(&input, keep, &out)?;
    if !fold.of_nothing && axes.line(&input) == 0 && out.elements() > 0 {
        return Err(input.refuse(input.desc.shape, "at least one element to look at"));
    }
    let domain = line_domain(&input, &out)?;
    fn each<W: Wide>(
        axes: &Axes,
        views: &Views,
        [input, out]: [&Operand; 2],
        fold: fn(&[W]) -> W,
    ) -> Result<(), String> {
        let mut results = Vec::new();
        axes.lines::<W>(views.of(input), &mut |line| {
            results.push(fold(line));
        })?;
        views.of(out).write(&results);
        Ok(())
    }
    work(move |views| match domain {
        Domain::Int => each(&axes, views, [&input, &out], fold.int),
        Domain::Real => each(&axes, views, [&input, &out], fold.real),
    })
}

/// One number for each line along the axes that are named, all if none is.
pub(super) fn over(op: Fold) -> impl Fn(Operand, Vec<i64>, bool, Operand) -> Outcome<Work> {
    move |input, dims, keep, out| fold(op, input, &dims, keep, out)
}

/// As [`over`], with the output's type among the arguments.
pub(super) fn over_as(
    op: Fold,
) -> impl Fn(Operand, Vec<i64>, bool, DType, Operand) -> Outcome<Work> {
    move |input, dims, keep, dtype, out| {
        out.expect_dtype(dtype)?;
        fold(op, input, &dims, keep, out)
    }
}

/// One number for the whole tensor.
pub(super) fn whole(op: Fold) -> impl Fn(Operand, Operand) -> Outcome<Work> {
    move |input, out| fold(op, input, &[], false, out)
}

/// One number for the whole tensor, with the output's type among the arguments.
pub(super) fn whole_as(op: Fold) -> impl Fn(Operand, DType, Operand) -> Outcome<Work> {
    move |input, dtype, out| {
        out.expect_dtype(dtype)?;
        fold(op, input, &[], false, out)
    }
}

/// One number for each line along an axis, with the output's type among the arguments.
pub(super) fn along_as(op: Fold) -> impl Fn(Operand, i64, bool, DType, Operand) -> Outcome<Work> {
    move |input, dim, keep, dtype, out| {
        out.expect_dtype(dtype)?;
        fold(op, input, &[dim], keep, out)
    }
}

/// One real number for each line.
fn fold_real(
    input: Operand,
    dims: &[i64],
    keep: bool,
    out: Operand,
    fold: impl Fn(&[f64]) -> f64 + Send + Sync + 'static,
) -> Outcome<Work> {
    let axes = Axes::new(&input, "dim", dims)?;
    axes.expect_output(&input, keep, &out)?;
    for operand in [input, out] {
        expect_real(&operand)?;
    }
    work(move |views| {
        let mut results = Vec::new();
        axes.lines::<f64>(views.of(&input), &mut |line| results.push(fold(line)))?;
        views.of(&out).write(&results);
        Ok(())
    })
}

/// The norm of each line: of the power `p`, the number of elements that are not 0 for 0, the greatest or the least for
/// infinity.
pub(super) fn norm(
    input: Operand,
    p: Number,
    dims: Vec<i64>,
    keep: bool,
    dtype: DType,
    out: Operand,
) -> Outcome<Work> {
    out.expect_dtype(dtype)?;
    let p = p.real();
    fold_real(input, &dims, keep, out, move |line| {
        let sizes = line.iter().map(|value| value.abs());
        if p == f64::INFINITY {
            sizes.fold(0.0, f64::max)
        } else if p == f64::NEG_INFINITY {
            sizes.fold(f64::INFINITY, f64::min)
        } else if p == 0.0 {
            sizes.filter(|&size| size != 0.0).count() as f64
        } else if p == 2.0 {
            sizes.map(|size| size * size).sum::<f64>().sqrt()
        } else {
            sizes.map(|size| size.powf(p)).sum::<f64>().powf(1.0 / p)
        }
    })
}

/// Each line of the last axes, as many as the factors have, over the root of its mean square, times the factors.
pub(super) fn rms_norm(
    input: Operand,
    factors: Operand,
    epsilon: f64,
    out: Operand,
    scales: Operand,
) -> Outcome<Work> {
    let shape = input.shape();
    let first = (shape.len().checked_sub(factors.rank()))
        .filter(|&first| shape[first..] == *factors.shape());
    let Some(first) = first else {
        return Err(factors.refuse(
            factors.desc.shape,
            format_args!("the last dimensions of {}", input.desc.shape),
        ));
    };
    out.expect_shape(&shape)?;
    let lines: usize = shape[..first].iter().product();
    if scales.elements() != lines {
        return Err(scales.refuse(scales.desc.shape, format_args!("{lines} elements")));
    }
    for operand in [input, factors, out, scales] {
        expect_real(&operand)?;
    }
    work(move |views| {
        let factors = views.of(&factors).read::<f64>()?;
        let mut numbers = views.of(&input).read::<f64>()?;
        let mut found = Vec::new();
        for line in numbers.chunks_mut(factors.len().max(1)) {
            let squares: f64 = line.iter().map(|value| value * value).sum();
            let scale = 1.0 / (squares / line.len() as f64 + epsilon).sqrt();
            for (value, factor) in line.iter_mut().zip(&factors) {
                *value *= scale * factor;
            }
            found.push(scale);
        }
        views.of(&out).write(&numbers);
        views.of(&scales).write(&found);
        Ok(())
    })
}

/// The variance of each line, or its root; `correction` is taken off the count.
pub(super) fn variance(
    root: bool,
) -> impl Fn(Operand, Vec<i64>, i64, bool, Operand) -> Outcome<Work> {
    move |input, dims, correction, keep, out| {
        fold_real(input, &dims, keep, out, move |line| {
            let count = line.len() as f64;
            let mean = line.iter().sum::<f64>() / count;
            let squares: f64 = line.iter().map(|value| (value - mean).powi(2)).sum();
            let variance = squares / (count - correction as f64).max(0.0);
            if root { variance.sqrt() } else { variance }
        })
    }
}

/// Refuses a tensor of integers.
fn expect_real(operand: &Operand) -> Outcome {
    match operand.domain()? {
        Domain::Real => Ok(()),
        Domain::Int => Err(operand.refuse(operand.dtype(), "FLOAT, FLOAT16, BF16, DOUBLE")),
    }
}

/// A line of real numbers for each line.
fn each_line(
    input: Operand,
    dim: i64,
    out: Operand,
    change: impl Fn(&mut [f64]) + Send + Sync + 'static,
) -> Outcome<Work> {
    let axis = input.axis("dim", dim)?;
    out.expect_shape(&input.shape())?;
    input.domain()?;
    expect_real(&out)?;
    let axes = Axes::new(&input, "dim", &[axis as i64])?;
    work(move |views| {
        let arranged = axes.arrange(views.of(&out));
        let mut results = Vec::new();
        axes.lines::<f64>(views.of(&input), &mut |line| {
            let start = results.len();
            results.extend_from_slice(line);
            change(&mut results[start..]);
        })?;
        arranged.write(&results);
        Ok(())
    })
}

/// Exponentials over their sum, of each line along an axis.
pub(super) fn softmax(input: Operand, dim: i64, out: Operand) -> Outcome<Work> {
    each_line(input, dim, out, |line| {
        let greatest = line.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        for value in &mut *line {
            *value = (*value - greatest).exp();
        }
        let sum: f64 = line.iter().sum();
        for value in line {
            *value /= sum;
        }
    })
}

/// The logarithm of [`softmax`].
pub(super) fn log_softmax(input: Operand, dim: i64, out: Operand) -> Outcome<Work> {
    each_line(input, dim, out, |line| {
        let log_sum = (LOG_SUM_EXP.real)(line);
        for value in line {
            *value -= log_sum;
        }
    })
}

/// Sums of each line up to each place.
pub(super) fn cumulate(input: Operand, dim: i64, dtype: DType, out: Operand) -> Outcome<Work> {
    out.expect_dtype(dtype)?;
    out.expect_shape(&input.shape())?;
    let axis = input.axis("dim", dim)?;
    let axes = Axes::new(&input, "dim", &[axis as i64])?;
    let domain = line_domain(&input, &out)?;
    fn each<W: Wide>(
        axes: &Axes,
        views: &Views,
        [input, out]: [&Operand; 2],
        add: fn(W, W) -> W,
    ) -> Result<(), String> {
        let mut results = Vec::new();
        axes.lines::<W>(views.of(input), &mut |line| {
            let mut sum = W::default();
            results.extend(line.iter().map(|&value| {
                sum = add(sum, value);
                sum
            }));
        })?;
        axes.arrange(views.of(out)).write(&results);
        Ok(())
    }
    work(move |views| match domain {
        Domain::Int => each(&axes, views, [&input, &out], i64::wrapping_add),
        Domain::Real => each(&axes, views, [&input, &out], |a: f64, b| a + b),
    })
}

/// A line as an operator sees it that looks for elements.
struct Line<'a> {
    len: usize,
    /// Compares the elements at two places; NaN is the greatest number.
    order: &'a dyn Fn(usize, usize) -> Ordering,
    is_nan: &'a dyn Fn(usize) -> bool,
}

impl Line<'_> {
    /// The first place of the greatest or of the least element; NaN is both.
    fn extreme(&self, largest: bool) -> usize {
        let better = if largest {
            Ordering::Greater
        } else {
            Ordering::Less
        };
        let mut best = 0;
        for place in 0..self.len {
            if (self.is_nan)(place) {
                return place;
            }
            if (self.order)(place, best) == better {
                best = place;
            }
        }
        best
    }

    /// All places in the order of their elements; equal ones keep theirs.
    fn sorted(&self, descending: bool) -> Vec<usize> {
        let mut places: Vec<usize> = (0..self.len).collect();
        places.sort_by(|&a, &b| {
            let (a, b) = if descending { (b, a) } else { (a, b) };
            (self.order)(a, b)
        });
        places
    }
}

/// Finds elements in each line along an axis, as many in each: their values and their places.
fn find(
    input: Operand,
    axes: Axes,
    values: Option<Operand>,
    places: Operand,
    choose: impl Fn(Line<'_>) -> Vec<usize> + Send + Sync + 'static,
) -> Outcome<Work> {
    if let Some(values) = &values {
        values.expect_dtype(input.dtype())?;
    }
    places.expect_index()?;
    let domain = input.domain()?;
    // Without the axis, an output is in the order of the lines already.
    let rank = input.rank();
    let arrange = move |axes: &Axes, view: &View| match view.rank() == rank {
        true => axes.arrange(view),
        false => view.clone(),
    };
    fn each<W: Wide>(
        axes: &Axes,
        input: &View,
        choose: &dyn Fn(Line<'_>) -> Vec<usize>,
    ) -> Result<(Vec<W>, Vec<i64>), String> {
        let (mut values, mut places) = (Vec::new(), Vec::new());
        axes.lines::<W>(input, &mut |line| {
            let found = choose(Line {
                len: line.len(),
                order: &|a, b| match line[a].partial_cmp(&line[b]) {
                    Some(order) => order,
                    None => line[a].is_nan().cmp(&line[b].is_nan()),
                },
                is_nan: &|place| line[place].is_nan(),
            });
            values.extend(found.iter().map(|&place| line[place]));
            places.extend(found.iter().map(|&place| place as i64));
        })?;
        Ok((values, places))
    }
    work(move |views| {
        let from = views.of(&input);
        let to = values.map(|values| arrange(&axes, views.of(&values)));
        let found = match domain {
            Domain::Int => {
                let (found, places) = each::<i64>(&axes, from, &choose)?;
                to.inspect(|to| to.write(&found));
                places
            }
            Domain::Real => {
                let (found, places) = each::<f64>(&axes, from, &choose)?;
                to.inspect(|to| to.write(&found));
                places
            }
        };
        arrange(&axes, views.of(&places)).write(&found);
        Ok(())
    })
}

/// The greatest or the least element of each line along an axis.
fn extreme(
    largest: bool,
    input: Operand,
    (dim, keep): (i64, bool),
    values: Option<Operand>,
    places: Operand,
) -> Outcome<Work> {
    let axes = Axes::new(&input, "dim", &[dim])?;
    for out in values.iter().chain([&places]) {
        axes.expect_output(&input, keep, out)?;
    }
    if axes.line(&input) == 0 && places.elements() > 0 {
        return Err(input.refuse(
            input.desc.shape,
            format_args!("at least one element along axis {dim}"),
        ));
    }
    find(input, axes, values, places, move |line| {
        vec![line.extreme(largest)]
    })
}

/// The greatest or the least element of each line along an axis, and where it is.
pub(super) fn extreme_along(
    largest: bool,
) -> impl Fn(Operand, i64, bool, Operand, Operand) -> Outcome<Work> {
    move |input, dim, keep, values, places| {
        extreme(largest, input, (dim, keep), Some(values), places)
    }
}

/// Where the greatest or the least element of each line along an axis is.
pub(super) fn extreme_place(
    largest: bool,
) -> impl Fn(Operand, i64, bool, Operand) -> Outcome<Work> {
    move |input, dim, keep, places| extreme(largest, input, (dim, keep), None, places)
}

/// Lines in order. Equal elements keep theirs, asked for or not.
pub(super) fn sort(
    input: Operand,
    _stable: bool,
    dim: i64,
    descending: bool,
    values: Operand,
    places: Operand,
) -> Outcome<Work> {
    for out in [values, places] {
        out.expect_shape(&input.shape())?;
    }
    let axes = Axes::new(&input, "dim", &[dim])?;
    find(input, axes, Some(values), places, move |line| {
        line.sorted(descending)
    })
}

/// The `k` greatest or least elements of each line, in order, asked for or not.
pub(super) fn top(
    input: Operand,
    k: i64,
    dim: i64,
    largest: bool,
    _sorted: bool,
    values: Operand,
    places: Operand,
) -> Outcome<Work> {
    let axis = input.axis("dim", dim)?;
    let mut shape = input.shape();
    let most = shape.get(axis).copied().unwrap_or(1);
    let count = usize::try_from(k).ok().filter(|&k| k <= most);
    let Some(count) = count else {
        return Err(refuse(input.operator, "k", k, format_args!("0 to {most}")));
    };
    if let Some(size) = shape.get_mut(axis) {
        *size = count;
    }
    for out in [values, places] {
        out.expect_shape(&shape)?;
    }
    let axes = Axes::new(&input, "dim", &[dim])?;
    find(input, axes, Some(values), places, move |line| {
        let mut found = line.sorted(largest);
        found.truncate(count);
        found
    })
}
