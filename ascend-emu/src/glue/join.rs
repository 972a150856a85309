//! Operators that join several tensors, or repeat parts of one.

use super::argument::{Argument, Shape, refuse};
use super::call::{Work, work};
use super::view::Views;
use crate::host_memory::{try_repeat, try_with_capacity};
use crate::status::Outcome;

/// Joins tensors along an axis.
pub(super) fn concatenate(tensors: Vec<Argument>, dim: i64, out: Argument) -> Outcome<Work> {
    if out.rank() == 0 {
        return Err(out.refuse(out.desc.shape, "at least one axis to join along"));
    }
    let axis = out.axis("dim", dim)?;
    let mut shape = out.shape();
    let mut joined = Vec::new();
    let mut size = 0;
    for tensor in tensors {
        // PyTorch ignores a tensor of one axis and no elements.
        if tensor.elements() == 0 && tensor.rank() == 1 {
            continue;
        }
        let mut want = shape.clone();
        let own = tensor.shape();
        if let (Some(want), Some(&own)) = (want.get_mut(axis), own.get(axis)) {
            *want = own;
        }
        tensor.expect_shape(&want)?;
        out.expect_convertible(&tensor)?;
        let count = own.get(axis).copied().unwrap_or(1);
        joined.push((tensor, size, count));
        size += count;
    }
    if let Some(whole) = shape.get_mut(axis) {
        *whole = size;
    }
    out.expect_shape(&shape)?;
    work(move |views| {
        for (tensor, start, count) in &joined {
            let part = views.of(&out).narrow(axis, *start, *count);
            part.copy_from(views.of(tensor));
        }
        Ok(())
    })
}

/// Stacks tensors of one shape along a new axis.
pub(super) fn stack(tensors: Vec<Argument>, dim: i64, out: Argument) -> Outcome<Work> {
    let axis = out.axis("dim", dim)?;
    let Some(first) = tensors.first() else {
        return Err(refuse(out.operator, "tensors", "none", "at least one"));
    };
    let own = first.shape();
    for tensor in &tensors {
        tensor.expect_shape(&own)?;
        out.expect_convertible(tensor)?;
    }
    let mut shape = own;
    shape.insert(axis.min(shape.len()), tensors.len());
    out.expect_shape(&shape)?;
    work(move |views| {
        for (place, tensor) in tensors.iter().enumerate() {
            views.of(&out).at(axis, place).copy_from(views.of(tensor));
        }
        Ok(())
    })
}

/// Repeats each part of an axis several times in a row; without an axis, each element of the flattened tensor.
fn repeat_each(
    input: Argument,
    axis: Option<usize>,
    counts: impl Fn(&Views, usize) -> Result<Vec<usize>, String> + Send + Sync + 'static,
    out: Argument,
) -> Outcome<Work> {
    out.expect_convertible(&input)?;
    if axis.is_some() && input.rank() == 0 {
        return Err(input.refuse(input.desc.shape, "at least 1 dimension"));
    }
    let mut shape = match axis {
        Some(_) => input.shape(),
        None => Shape::from_elem(input.elements(), 1),
    };
    let along = axis.unwrap_or(0);
    if let (Some(size), Some(&joined)) = (shape.get_mut(along), out.shape().get(along)) {
        // The counts are known only on the device.
        *size = joined;
    }
    out.expect_shape(&shape)?;
    work(move |views| {
        let (from, to) = (views.of(&input), views.of(&out));
        let size = match axis {
            Some(axis) => from.shape()[axis],
            None => from.elements(),
        };
        let counts = counts(views, size)?;
        expect_total(&counts, to.shape().get(along).copied().unwrap_or(1))?;
        let mut place = 0;
        for (index, count) in counts.into_iter().enumerate() {
            let part = match axis {
                Some(axis) => from.at(axis, index),
                None => from.nth(index),
            };
            for _ in 0..count {
                to.at(along, place).copy_from(&part);
                place += 1;
            }
        }
        Ok(())
    })
}

/// Reads counts from a tensor: one for each element, or one for all.
fn counts_of(
    repeats: Argument,
) -> Outcome<impl Fn(&Views, usize) -> Result<Vec<usize>, String> + Send + Sync + 'static> {
    repeats.expect_index()?;
    Ok(move |views: &Views, size: usize| {
        let counts = views.of(&repeats).read::<i64>()?;
        let mut each = try_with_capacity(counts.len())?;
        for count in counts {
            let own = usize::try_from(count);
            each.push(own.map_err(|_| format!("repeats: {count} is negative"))?);
        }
        match each.as_slice() {
            [one] => Ok(try_repeat(*one, size)?),
            _ if each.len() == size => Ok(each),
            _ => Err(format!("repeats: {} counts for {size} elements", each.len())),
        }
    })
}

/// Checks that counts add up to the elements of an output.
fn expect_total(counts: &[usize], elements: usize) -> Result<(), String> {
    let sum = counts.iter().fold(0, |sum: usize, &count| sum.saturating_add(count));
    match sum == elements {
        true => Ok(()),
        false => Err(format!("repeats: {sum} in sum, but the output has {elements}")),
    }
}

/// Checks a count of repetitions.
fn count_of(operator: &str, repeats: i64) -> Outcome<usize> {
    usize::try_from(repeats).map_err(|_| refuse(operator, "repeats", repeats, "0 or more"))
}

/// Repeats each element by its count in a tensor.
pub(super) fn repeat_interleave(input: Argument, repeats: Argument, _output_size: i64, out: Argument) -> Outcome<Work> {
    repeat_each(input, None, counts_of(repeats)?, out)
}

/// Repeats each part of an axis by its count in a tensor.
pub(super) fn repeat_interleave_along(
    input: Argument,
    repeats: Argument,
    dim: i64,
    _output_size: i64,
    out: Argument,
) -> Outcome<Work> {
    let axis = input.axis("dim", dim)?;
    repeat_each(input, Some(axis), counts_of(repeats)?, out)
}

/// Repeats each element by the same count.
pub(super) fn repeat_interleave_count(
    input: Argument,
    repeats: i64,
    _output_size: i64,
    out: Argument,
) -> Outcome<Work> {
    let count = count_of(input.operator, repeats)?;
    repeat_each(input, None, move |_, size| Ok(try_repeat(count, size)?), out)
}

/// Repeats each part of an axis by the same count.
pub(super) fn repeat_interleave_count_along(
    input: Argument,
    repeats: i64,
    dim: i64,
    _output_size: i64,
    out: Argument,
) -> Outcome<Work> {
    let count = count_of(input.operator, repeats)?;
    let axis = input.axis("dim", dim)?;
    repeat_each(input, Some(axis), move |_, size| Ok(try_repeat(count, size)?), out)
}

/// Writes each index of `repeats`, repeated by the element at that index.
pub(super) fn repeat_places(repeats: Argument, _output_size: i64, out: Argument) -> Outcome<Work> {
    repeats.expect_rank(1)?;
    out.expect_rank(1)?;
    out.expect_index()?;
    let counts = counts_of(repeats)?;
    let (size, most) = (repeats.elements(), out.elements());
    work(move |views| {
        let counts = counts(views, size)?;
        expect_total(&counts, most)?;
        let mut places = try_with_capacity::<i64>(most)?;
        for (place, count) in (0..).zip(counts) {
            places.extend(std::iter::repeat_n(place, count));
        }
        views.of(&out).write(&places);
        Ok(())
    })
}
