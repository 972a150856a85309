//! Small operators of models, used beside attention: norms, quantised rows, updated parts.

use super::argument::{Argument, refuse};
use super::call::{Work, work};
use super::number::rounded;
use super::reduce::expect_real;
use super::select::place_on;
use super::view::View;
use crate::host_memory::{try_repeat, try_with_capacity};
use crate::kernel::rms_norm::rstd;
use crate::status::Outcome;
use ascend_spec::DType;

/// Normalises each line of the last axes, which `normalized_shape` names: subtracts its mean and divides by its
/// standard deviation, then multiplies by a weight and adds a bias, if there are any. The optional outputs are the
/// mean and the reciprocal deviation of each line.
#[allow(clippy::too_many_arguments, reason = "the operator's parameters")]
pub(super) fn layer_norm(
    input: Argument,
    normalized_shape: Vec<i64>,
    weight: Option<Argument>,
    bias: Option<Argument>,
    epsilon: f64,
    out: Argument,
    means: Option<Argument>,
    scales: Option<Argument>,
) -> Outcome<Work> {
    let shape = input.shape();
    let wanted = normalized_shape.iter().map(|&size| usize::try_from(size).ok());
    let first = (shape.len().checked_sub(normalized_shape.len()))
        .filter(|&first| first < shape.len())
        .filter(|&first| shape[first..].iter().map(|&size| Some(size)).eq(wanted));
    let Some(first) = first else {
        return Err(refuse(
            input.operator,
            "normalizedShape",
            format_args!("{normalized_shape:?}"),
            format_args!("the last dimensions of {}", input.desc.shape),
        ));
    };
    out.expect_shape(&shape)?;
    for factors in [weight, bias].iter().flatten() {
        factors.expect_shape(&shape[first..])?;
    }
    let (lines, width) = (shape[..first].iter().product::<usize>(), shape[first..].iter().product::<usize>());
    for found in [means, scales].iter().flatten() {
        if found.elements() != lines {
            return Err(found.refuse(found.desc.shape, format_args!("{lines} elements")));
        }
    }
    let tensors = [Some(input), weight, bias, Some(out), means, scales];
    for argument in tensors.iter().flatten() {
        expect_real(argument)?;
    }
    work(move |views| {
        let numbers = |argument: Option<Argument>, otherwise: f64| match argument {
            Some(argument) => views.of(&argument).read::<f64>(),
            None => Ok(try_repeat(otherwise, width)?),
        };
        let (weight, bias) = (numbers(weight, 1.0)?, numbers(bias, 0.0)?);
        let mut values = views.of(&input).read::<f64>()?;
        let (mut found_means, mut found_scales) = (try_with_capacity(lines)?, try_with_capacity(lines)?);
        for line in values.chunks_mut(width.max(1)) {
            let mean = line.iter().sum::<f64>() / width as f64;
            let squares: f64 = line.iter().map(|value| (value - mean).powi(2)).sum();
            let scale = 1.0 / (squares / width as f64 + epsilon).sqrt();
            for (value, (weight, bias)) in line.iter_mut().zip(weight.iter().zip(&bias)) {
                *value = (*value - mean) * scale * weight + bias;
            }
            found_means.push(mean);
            found_scales.push(scale);
        }
        views.of(&out).write(&values);
        for (argument, found) in [(means, found_means), (scales, found_scales)] {
            if let Some(argument) = argument {
                views.of(&argument).write(&found);
            }
        }
        Ok(())
    })
}

/// Adds two tensors, and divides each line of the last axes of the sum, those of `gamma`, by its root mean square, then
/// multiplies it by `gamma`. The other outputs are the reciprocal root mean square of each line, and the sum, which is
/// rounded to its element type before it is normalised.
#[allow(clippy::too_many_arguments, reason = "the operator's parameters")]
pub(super) fn add_rms_norm(
    a: Argument,
    b: Argument,
    gamma: Argument,
    epsilon: f64,
    out: Argument,
    scales: Argument,
    sum: Argument,
) -> Outcome<Work> {
    let (shape, last) = (a.shape(), gamma.shape());
    let first = (shape.len().checked_sub(last.len()))
        .filter(|&first| first < shape.len() && shape[first..] == last[..])
        .filter(|_| gamma.elements() > 0);
    let Some(first) = first else {
        return Err(
            gamma.refuse(gamma.desc.shape, format_args!("the last dimensions of {}, with elements", a.desc.shape))
        );
    };
    expect_real(&a)?;
    expect_real(&gamma)?;
    for tensor in [b, out, sum] {
        tensor.expect_shape(&shape)?;
        tensor.expect_dtype(a.dtype())?;
    }
    let mut lines = shape.clone();
    lines[first..].fill(1);
    scales.expect_shape(&lines)?;
    scales.expect_dtype(DType::Float)?;
    let (count, width) = (lines.iter().product(), last.iter().product::<usize>());
    work(move |views| {
        let mut values = views.of(&a).read::<f64>()?;
        for (value, other) in values.iter_mut().zip(views.of(&b).read::<f64>()?) {
            *value = rounded(*value + other, a.dtype());
        }
        views.of(&sum).write(&values);
        let gamma = views.of(&gamma).read::<f64>()?;
        let mut found = try_with_capacity(count)?;
        for line in values.chunks_mut(width.max(1)) {
            found.push(normalise_by_root_mean_square(line, &gamma, epsilon));
        }
        views.of(&out).write(&values);
        views.of(&scales).write(&found);
        Ok(())
    })
}

/// Divides a line by its root mean square and multiplies it by `gamma`; returns the reciprocal root mean square.
pub(super) fn normalise_by_root_mean_square(line: &mut [f64], gamma: &[f64], epsilon: f64) -> f64 {
    let scale = rstd(line.iter().copied(), epsilon);
    for (value, gamma) in line.iter_mut().zip(gamma) {
        *value *= scale * gamma;
    }
    scale
}

/// Quantises each line of the last axis to INT8, and writes its scale.
pub(super) fn quantise_lines(
    input: Argument,
    smooth: Option<Argument>,
    out: Argument,
    scales: Argument,
) -> Outcome<Work> {
    let shape = input.shape();
    let Some((&width, lines)) = shape.split_last() else {
        return Err(input.refuse(input.desc.shape, "at least 1 dimension"));
    };
    out.expect_shape(&shape)?;
    out.expect_dtype(DType::Int8)?;
    scales.expect_shape(lines)?;
    scales.expect_dtype(DType::Float)?;
    input.domain()?;
    if let Some(smooth) = &smooth {
        smooth.expect_shape(&[width])?;
        smooth.domain()?;
    }
    work(move |views| {
        let mut numbers = views.of(&input).read::<f64>()?;
        let smooth = match &smooth {
            Some(smooth) => Some(views.of(smooth).read::<f64>()?),
            None => None,
        };
        let mut found = try_with_capacity(numbers.len() / width.max(1))?;
        for line in numbers.chunks_mut(width.max(1)) {
            for (value, factor) in line.iter_mut().zip(smooth.iter().flatten()) {
                *value *= factor;
            }
            let greatest = line.iter().fold(0.0, |most: f64, value| most.max(value.abs()));
            let scale = greatest / 127.0;
            for value in line {
                // A line of zeros stays zero.
                *value = if scale > 0.0 { (*value / scale).round_ties_even() } else { 0.0 };
            }
            found.push(scale);
        }
        views.of(&out).write(&numbers);
        views.of(&scales).write(&found);
        Ok(())
    })
}

/// Replaces parts at places of the first axes; the last axis of the indices has one place in each line.
pub(super) fn update_parts(target: Argument, indices: Argument, updates: Argument) -> Outcome<Work> {
    indices.expect_index()?;
    let (own, places) = (target.shape(), indices.shape());
    let named = places.split_last().filter(|&(&count, _)| count <= own.len());
    let Some((&count, places)) = named else {
        return Err(indices.refuse(indices.desc.shape, format_args!("a last dimension of at most {}", own.len())));
    };
    let mut shape = places.to_vec();
    shape.extend_from_slice(&own[count..]);
    updates.expect_shape(&shape)?;
    updates.expect_dtype(target.dtype())?;
    let places = places.to_vec();
    work(move |views| {
        let positions = views.of(&indices).read::<i64>()?;
        let mut positions = positions.into_iter();
        View::places(&places, &mut |place| {
            let mut part = views.of(&target).clone();
            for (axis, &size) in own[..count].iter().enumerate() {
                let position = positions.next().unwrap_or(0);
                part = part.at(0, place_on(&indices, axis, position, size)?);
            }
            part.copy_from(&views.of(&updates).part(0, place));
            views.wrote_part(&target, &part);
            Ok(())
        })
    })
}
