//! Operators that select or replace whole parts of a tensor along one axis.

use super::argument::{Argument, Shape, refuse};
use super::call::{Work, work};
use super::select::place_on;
use super::view::View;
use crate::status::Outcome;

/// The axes of positions that have one axis at most. A tensor without axes is one part, and has one position.
fn listed(whole: &Argument, index: &Argument) -> Outcome<Shape> {
    index.expect_index()?;
    if index.rank() > 1 {
        return Err(index.refuse(index.desc.shape, "at most 1 dimension"));
    }
    match (whole.rank(), index.elements()) {
        (0, 1) => Ok(Shape::new()),
        (0, _) => Err(index.refuse(index.desc.shape, "one element")),
        (_, count) => Ok(Shape::from_slice(&[count])),
    }
}

/// The shape of a tensor in which other axes have taken the place of one.
fn with_axes(whole: &Argument, axis: usize, axes: &[usize]) -> Shape {
    let mut shape = whole.shape();
    if axis < shape.len() {
        shape.remove(axis);
    }
    shape.insert_many(axis, axes.iter().copied());
    shape
}

/// A view whose parts along its axis are those of the tensor; a tensor without axes gets one.
fn with_axis(view: &View) -> View {
    match view.rank() {
        0 => view.insert_axis(0),
        _ => view.clone(),
    }
}

/// Selects the part of an axis at each position; the axes of the positions replace that axis.
fn take(input: Argument, axis: usize, index: Argument, axes: Shape, out: Argument) -> Outcome<Work> {
    out.expect_shape(&with_axes(&input, axis, &axes))?;
    out.expect_convertible(&input)?;
    work(move |views| {
        let from = with_axis(views.of(&input));
        let mut positions = views.of(&index).read::<i64>()?.into_iter();
        View::places(&axes, &mut |place| {
            let position = positions.next().unwrap_or(0);
            let source = place_on(&index, axis, position, from.shape()[axis])?;
            let to = views.of(&out).part(axis, place);
            to.copy_from(&from.at(axis, source));
            Ok(())
        })
    })
}

/// Selects the parts of a tensor at positions of one axis.
pub(super) fn index_select(input: Argument, dim: i64, index: Argument, out: Argument) -> Outcome<Work> {
    let axis = input.axis("dim", dim)?;
    let axes = listed(&input, &index)?;
    take(input, axis, index, axes, out)
}

/// Selects the parts of a tensor at positions of one axis, which may have any number of axes.
pub(super) fn gather(input: Argument, dim: i64, index: Argument, out: Argument) -> Outcome<Work> {
    let axis = input.axis("dim", dim)?;
    index.expect_index()?;
    out.expect_dtype(input.dtype())?;
    take(input, axis, index, index.shape(), out)
}

/// Replaces the parts of a tensor at positions of one axis. If several have one position the last one stays.
pub(super) fn index_copy(target: Argument, dim: i64, index: Argument, source: Argument) -> Outcome<Work> {
    let axis = target.axis("dim", dim)?;
    let axes = listed(&target, &index)?;
    source.expect_shape(&with_axes(&target, axis, &axes))?;
    source.expect_dtype(target.dtype())?;
    work(move |views| {
        let to = with_axis(views.of(&target));
        let mut positions = views.of(&index).read::<i64>()?.into_iter();
        View::places(&axes, &mut |place| {
            let position = positions.next().unwrap_or(0);
            let part = to.at(axis, place_on(&index, axis, position, to.shape()[axis])?);
            part.copy_from(&views.of(&source).part(axis, place));
            views.wrote_part(&target, &part);
            Ok(())
        })
    })
}

/// Copies the places of an axis from `start` to `end`, `end` excluded, `step` apart. Bounds count from the end of the
/// axis if negative, and are moved to the axis if beyond it.
pub(super) fn slice(input: Argument, dim: i64, start: i64, end: i64, step: i64, out: Argument) -> Outcome<Work> {
    let axis = input.axis("dim", dim)?;
    let mut shape = input.shape();
    let Some(size) = shape.get_mut(axis) else {
        return Err(input.refuse(input.desc.shape, "at least 1 dimension"));
    };
    let Some(step) = usize::try_from(step).ok().filter(|&step| step > 0) else {
        return Err(refuse(input.operator, "step", step, "1 or more"));
    };
    let length = *size as i64;
    let place = |bound: i64| match bound {
        ..0 => bound.saturating_add(length).max(0) as usize,
        _ => bound.min(length) as usize,
    };
    let start = place(start);
    let count = place(end).saturating_sub(start).div_ceil(step);
    *size = count;
    out.expect_shape(&shape)?;
    out.expect_dtype(input.dtype())?;
    work(move |views| {
        let part = views.of(&input).every(axis, start, count, step);
        views.of(&out).copy_from(&part);
        Ok(())
    })
}
