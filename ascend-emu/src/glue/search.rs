//! Operators that look for elements in lines: the greatest, the order, the first few.

use super::call::{Work, work};
use super::number::{Domain, Wide};
use super::operand::{Operand, refuse};
use super::reduce::Axes;
use super::view::View;
use crate::status::Outcome;
use std::cmp::Ordering;

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
