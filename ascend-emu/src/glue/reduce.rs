//! Operators that look at whole lines of elements along one axis or several.

use super::argument::{Argument, Shape, refuse};
use super::call::{Work, work};
use super::number::{Domain, Number, WideElement};
use super::view::View;
use crate::host_memory::try_with_capacity;
use crate::status::Outcome;
use ascend_spec::DType;

/// The axes that are reduced, and those that are kept.
pub(super) struct Axes {
    reduced: Vec<usize>,
    kept: Vec<usize>,
}

impl Axes {
    /// The axes that `dims` names; all if it names none.
    pub(super) fn new(input: &Argument, parameter: &str, dims: &[i64]) -> Outcome<Self> {
        let mut reduced = Vec::new();
        for &dim in dims {
            let axis = input.axis(parameter, dim)?;
            if reduced.contains(&axis) {
                return Err(refuse(input.operator, parameter, format_args!("{dims:?}"), "each axis at most once"));
            }
            reduced.push(axis);
        }
        if dims.is_empty() {
            reduced = (0..input.rank()).collect();
        }
        // A tensor without axes counts as one with a single axis.
        reduced.retain(|&axis| axis < input.rank());
        reduced.sort_unstable();
        let kept = (0..input.rank()).filter(|axis| !reduced.contains(axis)).collect();
        Ok(Axes { reduced, kept })
    }

    /// The number of elements of each line.
    pub(super) fn line(&self, input: &Argument) -> usize {
        let shape = input.shape();
        self.reduced.iter().map(|&axis| shape[axis]).product()
    }

    /// Refuses an output whose shape is not that of the result.
    pub(super) fn expect_output(&self, input: &Argument, keep: bool, out: &Argument) -> Outcome {
        let shape: Shape = (input.shape().iter().enumerate())
            .filter(|(axis, _)| keep || self.kept.contains(axis))
            .map(|(axis, &size)| if self.kept.contains(&axis) { size } else { 1 })
            .collect();
        out.expect_reduced(&shape)
    }

    /// Permutes a view so that the kept axes come first and the reduced axes after them.
    pub(super) fn arrange(&self, view: &View) -> View {
        let order: Vec<usize> = self.kept.iter().chain(&self.reduced).copied().collect();
        view.permute(&order)
    }

    /// Visits each line.
    pub(super) fn lines<W: WideElement>(
        &self,
        view: &View,
        visit: &mut dyn FnMut(&[W]) -> Result<(), String>,
    ) -> Result<(), String> {
        let arranged = self.arrange(view);
        let kept = &arranged.shape()[..self.kept.len()];
        View::places(kept, &mut |place| visit(&arranged.part(0, place).read::<W>()?))
    }

    /// Writes a number for each line of a view, which `fold` computes.
    fn fold_lines<W: WideElement>(&self, [input, out]: [&View; 2], fold: impl Fn(&[W]) -> W) -> Result<(), String> {
        let mut results = try_with_capacity(self.count(input))?;
        self.lines::<W>(input, &mut |line| {
            results.push(fold(line));
            Ok(())
        })?;
        out.write(&results);
        Ok(())
    }

    /// Writes a line for each line of a view, which `change` makes of it.
    fn change_lines<W: WideElement>(&self, [input, out]: [&View; 2], change: impl Fn(&mut [W])) -> Result<(), String> {
        let mut results = try_with_capacity(input.elements())?;
        self.lines::<W>(input, &mut |line| {
            let start = results.len();
            results.extend_from_slice(line);
            change(&mut results[start..]);
            Ok(())
        })?;
        self.arrange(out).write(&results);
        Ok(())
    }

    /// The number of lines.
    pub(super) fn count(&self, view: &View) -> usize {
        self.kept.iter().map(|&axis| view.shape()[axis]).product()
    }
}

/// A function from a line to a number, for integers and for real numbers.
#[derive(Clone, Copy)]
pub(super) struct Fold {
    pub int: fn(&[i64]) -> i64,
    pub real: fn(&[f64]) -> f64,
    /// Whether a line without elements has a result.
    pub of_nothing: bool,
}

/// The index of the greatest element: the first of equal ones; NaN counts as greater than any number.
pub(super) fn greatest<W: WideElement>(values: &[W]) -> usize {
    best(values, |a, b| a > b)
}

/// The index of the least element: the first of equal ones; NaN counts as less than any number.
pub(super) fn least<W: WideElement>(values: &[W]) -> usize {
    best(values, |a, b| a < b)
}

fn best<W: WideElement>(values: &[W], better: fn(W, W) -> bool) -> usize {
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
    int: |values| values.iter().fold(0, |sum: i64, &value| sum.wrapping_add(value)),
    real: |values| values.iter().sum(),
    of_nothing: true,
};
pub(super) const PRODUCT: Fold = Fold {
    int: |values| values.iter().fold(1, |product: i64, &value| product.wrapping_mul(value)),
    real: |values| values.iter().product(),
    of_nothing: true,
};
pub(super) const MEAN: Fold = Fold {
    int: |values| values.iter().fold(0, |sum: i64, &v| sum.wrapping_add(v)) / values.len().max(1) as i64,
    real: |values| values.iter().sum::<f64>() / values.len() as f64,
    of_nothing: true,
};
pub(super) const MAX: Fold =
    Fold { int: |values| values[greatest(values)], real: |values| values[greatest(values)], of_nothing: false };
pub(super) const MIN: Fold =
    Fold { int: |values| values[least(values)], real: |values| values[least(values)], of_nothing: false };
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

/// The domain in which lines are computed: integers, unless input or output has a floating-point type.
fn line_domain(input: &Argument, out: &Argument) -> Outcome<Domain> {
    Ok(input.domain()?.with(out.domain()?))
}

/// Reduces each line to one number.
fn fold(fold: Fold, input: Argument, dims: &[i64], keep: bool, out: Argument) -> Outcome<Work> {
    let axes = Axes::new(&input, "dim", dims)?;
    axes.expect_output(&input, keep, &out)?;
    if !fold.of_nothing && axes.line(&input) == 0 && out.elements() > 0 {
        return Err(input.refuse(input.desc.shape, "at least one element to look at"));
    }
    let domain = line_domain(&input, &out)?;
    work(move |views| {
        let tensors = [views.of(&input), views.of(&out)];
        match domain {
            Domain::Int => axes.fold_lines(tensors, fold.int),
            Domain::Real => axes.fold_lines(tensors, fold.real),
        }
    })
}

/// Reduces each line along the named axes to one number; without names, along all axes.
pub(super) fn over(op: Fold) -> impl Fn(Argument, Vec<i64>, bool, Argument) -> Outcome<Work> {
    move |input, dims, keep, out| fold(op, input, &dims, keep, out)
}

/// Reduces as [`over`] does; the output's type is an argument.
pub(super) fn over_as(op: Fold) -> impl Fn(Argument, Vec<i64>, bool, DType, Argument) -> Outcome<Work> {
    move |input, dims, keep, dtype, out| {
        out.expect_dtype(dtype)?;
        fold(op, input, &dims, keep, out)
    }
}

/// Reduces the whole tensor to one number.
pub(super) fn whole(op: Fold) -> impl Fn(Argument, Argument) -> Outcome<Work> {
    move |input, out| fold(op, input, &[], false, out)
}

/// Reduces the whole tensor to one number; the output's type is an argument.
pub(super) fn whole_as(op: Fold) -> impl Fn(Argument, DType, Argument) -> Outcome<Work> {
    move |input, dtype, out| {
        out.expect_dtype(dtype)?;
        fold(op, input, &[], false, out)
    }
}

/// Reduces each line along an axis to one number; the output's type is an argument.
pub(super) fn along_as(op: Fold) -> impl Fn(Argument, i64, bool, DType, Argument) -> Outcome<Work> {
    move |input, dim, keep, dtype, out| {
        out.expect_dtype(dtype)?;
        fold(op, input, &[dim], keep, out)
    }
}

/// Reduces each line to one real number; `real` has the tensors that must not hold integers, at least the output.
fn fold_real(
    input: Argument,
    dims: &[i64],
    keep: bool,
    out: Argument,
    real: &[Argument],
    fold: impl Fn(&[f64]) -> f64 + Send + Sync + 'static,
) -> Outcome<Work> {
    let axes = Axes::new(&input, "dim", dims)?;
    axes.expect_output(&input, keep, &out)?;
    for argument in real {
        expect_real(argument)?;
    }
    work(move |views| axes.fold_lines([views.of(&input), views.of(&out)], &fold))
}

/// The logarithm of the sum of the exponentials of a line.
fn log_of_exponentials(line: &[f64]) -> f64 {
    let greatest = line.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    let shift = if greatest.is_finite() { greatest } else { 0.0 };
    let sum: f64 = line.iter().map(|value| (value - shift).exp()).sum();
    shift + sum.ln()
}

/// Computes the logarithm of the sum of the exponentials of each line, whatever the input's type.
pub(super) fn log_sum_exp(input: Argument, dims: Vec<i64>, keep: bool, out: Argument) -> Outcome<Work> {
    fold_real(input, &dims, keep, out, &[out], log_of_exponentials)
}

/// Computes the norm of each line for the power `p`. For 0 it is the number of elements that are not 0; for plus or
/// minus infinity it is the greatest or the least absolute value.
pub(super) fn norm(
    input: Argument,
    p: Number,
    dims: Vec<i64>,
    keep: bool,
    dtype: DType,
    out: Argument,
) -> Outcome<Work> {
    out.expect_dtype(dtype)?;
    let p = p.real();
    fold_real(input, &dims, keep, out, &[input, out], move |line| {
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

/// Computes the variance of each line, or its root; the divisor is the number of elements less `correction`.
pub(super) fn variance(root: bool) -> impl Fn(Argument, Vec<i64>, i64, bool, Argument) -> Outcome<Work> {
    move |input, dims, correction, keep, out| {
        fold_real(input, &dims, keep, out, &[input, out], move |line| {
            let count = line.len() as f64;
            let mean = line.iter().sum::<f64>() / count;
            let squares: f64 = line.iter().map(|value| (value - mean).powi(2)).sum();
            let variance = squares / (count - correction as f64).max(0.0);
            if root { variance.sqrt() } else { variance }
        })
    }
}

/// Refuses a tensor of integers.
pub(super) fn expect_real(argument: &Argument) -> Outcome {
    match argument.domain()? {
        Domain::Real => Ok(()),
        Domain::Int => Err(argument.refuse(argument.dtype(), "FLOAT, FLOAT16, BF16, DOUBLE")),
    }
}

/// Replaces each line by a line of real numbers that `change` computes.
fn each_line(
    input: Argument,
    dim: i64,
    out: Argument,
    change: impl Fn(&mut [f64]) + Send + Sync + 'static,
) -> Outcome<Work> {
    let axis = input.axis("dim", dim)?;
    out.expect_shape(&input.shape())?;
    input.domain()?;
    expect_real(&out)?;
    let axes = Axes::new(&input, "dim", &[axis as i64])?;
    work(move |views| axes.change_lines([views.of(&input), views.of(&out)], &change))
}

/// Divides the exponentials of each line along an axis by their sum.
pub(super) fn softmax(input: Argument, dim: i64, out: Argument) -> Outcome<Work> {
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

/// Computes the logarithm of [`softmax`].
pub(super) fn log_softmax(input: Argument, dim: i64, out: Argument) -> Outcome<Work> {
    each_line(input, dim, out, |line| {
        // As in `softmax`, infinity less infinity is NaN, which makes the whole line NaN.
        let greatest = line.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        let sum: f64 = line.iter().map(|value| (value - greatest).exp()).sum();
        let log_sum = sum.ln();
        for value in line {
            *value = *value - greatest - log_sum;
        }
    })
}

/// Computes the running sums of each line.
pub(super) fn cumulate(input: Argument, dim: i64, dtype: DType, out: Argument) -> Outcome<Work> {
    out.expect_dtype(dtype)?;
    out.expect_shape(&input.shape())?;
    let axis = input.axis("dim", dim)?;
    let axes = Axes::new(&input, "dim", &[axis as i64])?;
    let domain = line_domain(&input, &out)?;
    fn running_sums<W: WideElement>(line: &mut [W], add: fn(W, W) -> W) {
        let mut sum = W::default();
        for value in line {
            sum = add(sum, *value);
            *value = sum;
        }
    }
    work(move |views| {
        let tensors = [views.of(&input), views.of(&out)];
        match domain {
            Domain::Int => axes.change_lines(tensors, |line| running_sums(line, i64::wrapping_add)),
            Domain::Real => axes.change_lines(tensors, |line| running_sums(line, |a: f64, b| a + b)),
        }
    })
}
