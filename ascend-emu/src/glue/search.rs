//! Operators that search lines: for the greatest element, the order, the first few elements.

use super::argument::{Argument, refuse};
use super::call::{Work, work};
use super::number::{Domain, WideElement};
use super::reduce::{Axes, greatest, least};
use super::view::View;
use crate::host_memory::{HostMemoryExhausted, try_collect, try_with_capacity};
use crate::status::Outcome;
use ascend_spec::DType;

/// What to find in a line.
#[derive(Clone, Copy)]
enum SoughtElement {
    /// The greatest or the least element.
    Extreme { largest: bool },
    /// The first `count` elements in order, or all of them; equal ones keep their order, NaN counts as the greatest
    /// number.
    First { descending: bool, count: Option<usize> },
}

impl SoughtElement {
    /// The places of the elements found.
    fn places<W: WideElement>(self, line: &[W]) -> Result<Vec<usize>, HostMemoryExhausted> {
        Ok(match self {
            SoughtElement::Extreme { largest: true } => vec![greatest(line)],
            SoughtElement::Extreme { largest: false } => vec![least(line)],
            SoughtElement::First { descending, count } => {
                let mut places = try_collect(0..line.len())?;
                places.sort_unstable_by(|&one, &other| {
                    let (a, b) = if descending { (other, one) } else { (one, other) };
                    let unordered = || line[a].is_nan().cmp(&line[b].is_nan());
                    let order = line[a].partial_cmp(&line[b]).unwrap_or_else(unordered);
                    order.then(one.cmp(&other))
                });
                places.truncate(count.unwrap_or(line.len()));
                places
            }
        })
    }

    /// The number of elements found in a line of `line` elements.
    fn count(self, line: usize) -> usize {
        match self {
            SoughtElement::Extreme { .. } => 1,
            SoughtElement::First { count, .. } => count.unwrap_or(line),
        }
    }
}

/// Finds the same number of elements in each line along an axis: their values and their places.
fn find(
    input: Argument,
    axes: Axes,
    values: Option<Argument>,
    places: Argument,
    sought: SoughtElement,
) -> Outcome<Work> {
    if let Some(values) = &values {
        values.expect_dtype(input.dtype())?;
    }
    places.expect_index()?;
    let domain = input.domain()?;
    // An output without the axis has the order of the lines already.
    let rank = input.rank();
    let arrange = move |axes: &Axes, view: &View| match view.rank() == rank {
        true => axes.arrange(view),
        false => view.clone(),
    };
    fn each<W: WideElement>(axes: &Axes, input: &View, sought: SoughtElement) -> Result<(Vec<W>, Vec<i64>), String> {
        let lines = axes.count(input);
        let line = input.elements().checked_div(lines).unwrap_or(0);
        let count = lines.saturating_mul(sought.count(line));
        let (mut values, mut places) = (try_with_capacity(count)?, try_with_capacity(count)?);
        axes.lines::<W>(input, &mut |line| {
            let found = sought.places(line)?;
            values.extend(found.iter().map(|&place| line[place]));
            places.extend(found.iter().map(|&place| place as i64));
            Ok(())
        })?;
        Ok((values, places))
    }
    work(move |views| {
        let from = views.of(&input);
        let to = values.map(|values| arrange(&axes, views.of(&values)));
        let found = match domain {
            Domain::Int => {
                let (found, places) = each::<i64>(&axes, from, sought)?;
                to.inspect(|to| to.write(&found));
                places
            }
            Domain::Real => {
                let (found, places) = each::<f64>(&axes, from, sought)?;
                to.inspect(|to| to.write(&found));
                places
            }
        };
        arrange(&axes, views.of(&places)).write(&found);
        Ok(())
    })
}

/// Finds the greatest or the least element of each line along an axis.
fn extreme(
    largest: bool,
    input: Argument,
    (dim, keep): (i64, bool),
    values: Option<Argument>,
    places: Argument,
) -> Outcome<Work> {
    let axes = Axes::new(&input, "dim", &[dim])?;
    for out in values.iter().chain([&places]) {
        axes.expect_output(&input, keep, out)?;
    }
    if axes.line(&input) == 0 && places.elements() > 0 {
        return Err(input.refuse(input.desc.shape, format_args!("at least one element along axis {dim}")));
    }
    find(input, axes, values, places, SoughtElement::Extreme { largest })
}

/// Finds the greatest or the least element of each line along an axis, and its place.
pub(super) fn extreme_along(largest: bool) -> impl Fn(Argument, i64, bool, Argument, Argument) -> Outcome<Work> {
    move |input, dim, keep, values, places| extreme(largest, input, (dim, keep), Some(values), places)
}

/// Finds the place of the greatest or the least element of each line along an axis.
pub(super) fn extreme_place(largest: bool) -> impl Fn(Argument, i64, bool, Argument) -> Outcome<Work> {
    move |input, dim, keep, places| extreme(largest, input, (dim, keep), None, places)
}

/// Sorts lines. Equal elements always keep their order.
pub(super) fn sort(
    input: Argument,
    _stable: bool,
    dim: i64,
    descending: bool,
    values: Argument,
    places: Argument,
) -> Outcome<Work> {
    for out in [values, places] {
        out.expect_shape(&input.shape())?;
    }
    let axes = Axes::new(&input, "dim", &[dim])?;
    let count = None;
    let sought = SoughtElement::First { descending, count };
    find(input, axes, Some(values), places, sought)
}

/// Finds the places of the elements of each line in order. Equal elements always keep theirs.
pub(super) fn order(input: Argument, dim: i64, descending: bool, places: Argument) -> Outcome<Work> {
    places.expect_shape(&input.shape())?;
    places.expect_dtype(DType::Int64)?;
    let axes = Axes::new(&input, "dim", &[dim])?;
    let count = None;
    let sought = SoughtElement::First { descending, count };
    find(input, axes, None, places, sought)
}

/// Finds the `k` greatest or least elements of each line, always in order.
pub(super) fn top(
    input: Argument,
    k: i64,
    dim: i64,
    largest: bool,
    _sorted: bool,
    values: Argument,
    places: Argument,
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
    let sought = SoughtElement::First { descending: largest, count: Some(count) };
    find(input, axes, Some(values), places, sought)
}
