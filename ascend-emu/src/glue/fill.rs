//! Operators that copy, and operators that generate numbers.

use super::argument::{Argument, refuse};
use super::call::{Work, work};
use super::number::{Domain, Number, rounded};
use crate::status::Outcome;
use ascend_spec::DType;

/// Copies a tensor, which may be broadcast, and converts its elements.
pub(super) fn copy(to: Argument, from: Argument) -> Outcome<Work> {
    let shape = to.shape();
    from.expect_broadcast(&shape)?;
    to.expect_convertible(&from)?;
    work(move |views| {
        let from = views.of(&from).broadcast(&shape);
        views.of(&to).copy_from(&from);
        Ok(())
    })
}

/// Copies and converts; the type is also an argument.
pub(super) fn cast(from: Argument, dtype: DType, out: Argument) -> Outcome<Work> {
    out.expect_dtype(dtype)?;
    out.expect_shape(&from.shape())?;
    copy(out, from)
}

/// Sets every element to a number.
pub(super) fn fill(target: Argument, value: Number) -> Outcome<Work> {
    target.domain()?;
    work(move |views| {
        views.of(&target).fill(value);
        Ok(())
    })
}

/// Sets every byte to 0, which is 0 in each type.
pub(super) fn zero(target: Argument) -> Outcome<Work> {
    if Domain::of(target.dtype()).is_some() {
        return fill(target, Number::Int(0));
    }
    work(move |views| {
        views.of(&target).clear();
        Ok(())
    })
}

/// Sets every element to the only element of another tensor.
pub(super) fn fill_tensor(target: Argument, value: Argument) -> Outcome<Work> {
    if value.elements() != 1 {
        return Err(value.refuse(value.desc.shape, "one element"));
    }
    let shape = target.shape();
    target.expect_convertible(&value)?;
    work(move |views| {
        let value = views.of(&value).element(&vec![0; value.rank()]);
        views.of(&target).copy_from(&value.broadcast(&shape));
        Ok(())
    })
}

/// Writes numbers that are `step` apart in row-major order; the output has as many elements as there are numbers. For
/// integers, `start` and `step` lose their fractions first.
pub(super) fn arange(start: Number, _end: Number, step: Number, out: Argument) -> Outcome<Work> {
    let domain = out.domain()?;
    work(move |views| {
        let out = views.of(&out);
        match domain {
            Domain::Real => out.write_each(&|i| start.real() + step.real() * i as f64),
            Domain::Int => {
                out.write_each(&|i| start.int().wrapping_add(step.int().wrapping_mul(i as i64)));
            }
        }
        Ok(())
    })
}

/// Writes ones on the diagonal and zeros elsewhere.
pub(super) fn eye(n: i64, m: i64, out: Argument) -> Outcome<Work> {
    let size = |value: i64| usize::try_from(value).unwrap_or(usize::MAX);
    out.expect_shape(&[size(n), size(m)])?;
    out.domain()?;
    work(move |views| {
        let view = views.of(&out);
        view.fill(Number::Int(0));
        for i in 0..size(n).min(size(m)) {
            view.element(&[i, i]).fill(Number::Int(1));
        }
        Ok(())
    })
}

/// Copies the part of each matrix on and above (`upper`) or below a diagonal; writes zeros elsewhere.
pub(super) fn triangle(upper: bool) -> impl Fn(Argument, i64, Argument) -> Outcome<Work> {
    move |from, diagonal, out| {
        if out.rank() < 2 {
            return Err(out.refuse(out.desc.shape, "at least 2 dimensions"));
        }
        out.expect_shape(&from.shape())?;
        out.expect_convertible(&from)?;
        out.domain()?;
        let (rows, columns) = (out.rank() - 2, out.rank() - 1);
        work(move |views| {
            let (from, out) = (views.of(&from), views.of(&out));
            let width = out.shape()[columns];
            for row in 0..out.shape()[rows] {
                // The first column of the upper triangle, or the first column after the lower triangle.
                let edge =
                    (row as i64).saturating_add(diagonal).saturating_add(i64::from(!upper)).clamp(0, width as i64)
                        as usize;
                let (kept, cleared) =
                    if upper { ((edge, width - edge), (0, edge)) } else { ((0, edge), (edge, width - edge)) };
                let part =
                    |view: &super::view::View, (start, count)| view.narrow(rows, row, 1).narrow(columns, start, count);
                part(out, kept).copy_from(&part(from, kept));
                part(out, cleared).fill(Number::Int(0));
            }
            Ok(())
        })
    }
}

/// A random word, which depends only on the stream and the place.
fn random_word(stream: u64, place: u64) -> u64 {
    // Steele, Lea, Flood: Fast splittable pseudorandom number generators (2014).
    let mix = |word: u64| {
        let word = (word ^ (word >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let word = (word ^ (word >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        word ^ (word >> 31)
    };
    const GAMMA: u64 = 0x9e37_79b9_7f4a_7c15;
    mix(mix(stream).wrapping_add(place.wrapping_mul(GAMMA)))
}

/// The stream of random words for a seed and an offset.
fn stream(seed: u64, offset: u64) -> u64 {
    random_word(seed, offset.wrapping_add(1))
}

/// A random number from 0 to 1, 1 excluded.
fn random_unit(stream: u64, place: u64) -> f64 {
    (random_word(stream, place) >> 11) as f64 / (1u64 << 53) as f64
}

/// Writes random numbers, each of which depends only on its place.
fn random(target: Argument, number: impl Fn(u64) -> f64 + Send + Sync + 'static) -> Outcome<Work> {
    target.domain()?;
    work(move |views| {
        views.of(&target).write_each(&number);
        Ok(())
    })
}

/// Writes random numbers of a normal distribution. They differ from hardware's for the same seed.
pub(super) fn normal(target: Argument, mean: f32, std: f32, seed: i64, offset: i64) -> Outcome<Work> {
    let stream = stream(seed as u64, offset as u64);
    random(target, move |place| {
        // Box and Muller; the first number is not 0.
        let radius = (-2.0 * (1.0 - random_unit(stream, 2 * place)).ln()).sqrt();
        let angle = std::f64::consts::TAU * random_unit(stream, 2 * place + 1);
        f64::from(mean) + f64::from(std) * radius * angle.cos()
    })
}

/// Writes random numbers of a uniform distribution. They differ from hardware's for the same seed.
pub(super) fn uniform(target: Argument, from: f64, to: f64, seed: u64, offset: u64) -> Outcome<Work> {
    let stream = stream(seed, offset);
    let dtype = target.dtype();
    random(target, move |place| {
        let number = from + (to - from) * random_unit(stream, place);
        // Rounding must not reach the upper end.
        if rounded(number, dtype) < to { number } else { from }
    })
}

/// Writes random integers from `from` to `to`, `to` excluded. They differ from hardware's for the same seed.
pub(super) fn random_integer(target: Argument, from: i64, to: i64, seed: i64, offset: i64) -> Outcome<Work> {
    let count = to.wrapping_sub(from) as u64;
    if to <= from {
        return Err(refuse(target.operator, "to", to, format_args!("more than from, which is {from}")));
    }
    target.domain()?;
    let stream = stream(seed as u64, offset as u64);
    work(move |views| {
        let number = |place| from.wrapping_add((random_word(stream, place) % count) as i64);
        views.of(&target).write_each(&number);
        Ok(())
    })
}

/// Writes the mask of a dropout of a tensor of some shape: a bit for each element, 1 if it is kept, the least
/// significant bit first, padded to a multiple of 128. A bit is 0 with a probability, which is rounded to a
/// floating-point type. The bits differ from hardware's for the same seed.
pub(super) fn dropout_mask(
    shape: Vec<i64>,
    probability: f64,
    seed: i64,
    offset: i64,
    dtype: DType,
    mask: Argument,
) -> Outcome<Work> {
    let operator = mask.operator;
    let elements = (shape.iter()).try_fold(1_usize, |product, &size| product.checked_mul(usize::try_from(size).ok()?));
    let elements = elements.ok_or_else(|| {
        let shape = format_args!("{shape:?}");
        refuse(operator, "shape", shape, "sizes of a tensor that can exist")
    })?;
    if !(0.0..=1.0).contains(&probability) {
        return Err(refuse(operator, "prob", probability, "0 to 1"));
    }
    if !matches!(dtype, DType::Float | DType::Float16 | DType::Bf16) {
        return Err(refuse(operator, "probDataType", dtype, "FLOAT, FLOAT16, BF16"));
    }
    mask.expect_dtype(DType::UInt8)?;
    let bytes = elements.div_ceil(128) * 16;
    if mask.elements() != bytes {
        return Err(mask.refuse(
            mask.desc.shape,
            format_args!("{bytes} elements, a byte for 8 of the {elements}, up to a multiple of 128"),
        ));
    }
    let stream = stream(seed as u64, offset as u64);
    let dropped = rounded(probability, dtype);
    work(move |views| {
        let kept = |place| i64::from(random_unit(stream, place) >= dropped);
        let byte = |index: u64| (0..8).fold(0, |byte, bit| byte | kept(8 * index + bit) << bit);
        views.of(&mask).write_each(&byte);
        Ok(())
    })
}

/// Repeats a tensor along each axis; if there are more counts than axes, the tensor gets leading axes.
pub(super) fn repeat(from: Argument, repeats: Vec<i64>, out: Argument) -> Outcome<Work> {
    let own = from.shape();
    let Some(more) = repeats.len().checked_sub(own.len()) else {
        return Err(refuse(
            out.operator,
            "repeats",
            format_args!("{repeats:?}"),
            format_args!("a count for each of {} dimensions", own.len()),
        ));
    };
    let size = |axis: usize| axis.checked_sub(more).map_or(1, |axis| own[axis]);
    let mut shape = Vec::new();
    for (axis, &count) in repeats.iter().enumerate() {
        let count = usize::try_from(count).ok();
        let Some(count) = count.and_then(|count| count.checked_mul(size(axis))) else {
            return Err(refuse(out.operator, "repeats", format_args!("{repeats:?}"), "counts from 0 on"));
        };
        shape.push(count);
    }
    out.expect_shape(&shape)?;
    out.expect_convertible(&from)?;
    let sizes: Vec<usize> = (0..repeats.len()).map(size).collect();
    let counts: Vec<usize> = repeats.iter().map(|&count| count as usize).collect();
    work(move |views| {
        let from = views.of(&from).broadcast(&sizes);
        super::view::View::places(&counts, &mut |place| {
            let mut part = views.of(&out).clone();
            for (axis, &index) in place.iter().enumerate() {
                part = part.narrow(axis, index * sizes[axis], sizes[axis]);
            }
            part.copy_from(&from);
            Ok(())
        })
    })
}

/// Copies a tensor with its axes in another order.
pub(super) fn permute(from: Argument, dims: Vec<i64>, out: Argument) -> Outcome<Work> {
    let axes: Vec<usize> = (dims.iter()).map(|&dim| from.axis("dims", dim)).collect::<Outcome<_>>()?;
    let own = from.shape();
    if axes.len() != own.len() || (0..own.len()).any(|axis| !axes.contains(&axis)) {
        return Err(refuse(
            from.operator,
            "dims",
            format_args!("{dims:?}"),
            format_args!("each of {} axes once", own.len()),
        ));
    }
    let shape: Vec<usize> = axes.iter().map(|&axis| own[axis]).collect();
    out.expect_shape(&shape)?;
    out.expect_dtype(from.dtype())?;
    work(move |views| {
        views.of(&out).copy_from(&views.of(&from).permute(&axes));
        Ok(())
    })
}

/// Reverses some axes.
pub(super) fn flip(from: Argument, dims: Vec<i64>, out: Argument) -> Outcome<Work> {
    let axes: Vec<usize> = (dims.iter()).map(|&dim| from.axis("dims", dim)).collect::<Outcome<_>>()?;
    out.expect_shape(&from.shape())?;
    out.expect_convertible(&from)?;
    work(move |views| {
        let mut from = views.of(&from).clone();
        for &axis in &axes {
            // A tensor without axes counts as one with a single axis.
            if axis < from.rank() {
                from = from.flip(axis);
            }
        }
        views.of(&out).copy_from(&from);
        Ok(())
    })
}

/// Adds a margin filled with one number; `pad` has the margins before and after each axis, the last axis first. A
/// negative margin cuts off elements.
pub(super) fn pad(from: Argument, pad: Vec<i64>, value: Number, out: Argument) -> Outcome<Work> {
    let own = from.shape();
    let bad = || {
        refuse(
            from.operator,
            "pad",
            format_args!("{pad:?}"),
            format_args!("two margins for each of at most {} axes", own.len()),
        )
    };
    if !pad.len().is_multiple_of(2) || pad.len() / 2 > own.len() {
        return Err(bad());
    }
    let mut shape = own.clone();
    // For each axis: where the kept part begins in the input and in the output, and its length.
    let mut parts: Vec<(usize, usize, usize)> = own.iter().map(|&size| (0, 0, size)).collect();
    for (margins, axis) in pad.chunks_exact(2).zip((0..own.len()).rev()) {
        let size = own[axis] as i64;
        let whole = (size.checked_add(margins[0]))
            .and_then(|size| size.checked_add(margins[1]))
            .and_then(|size| usize::try_from(size).ok())
            .ok_or_else(bad)?;
        let first = margins[0].saturating_neg().clamp(0, size);
        let last = size.saturating_add(margins[1].min(0)).clamp(first, size);
        shape[axis] = whole;
        let to = margins[0].max(0) as usize;
        let count = ((last - first) as usize).min(whole.saturating_sub(to));
        parts[axis] = (first as usize, to.min(whole), count);
    }
    out.expect_shape(&shape)?;
    out.expect_dtype(from.dtype())?;
    out.domain()?;
    work(move |views| {
        let (mut from, mut to) = (views.of(&from).clone(), views.of(&out).clone());
        to.fill(value);
        for (axis, &(first, start, count)) in parts.iter().enumerate() {
            from = from.narrow(axis, first, count);
            to = to.narrow(axis, start, count);
        }
        to.copy_from(&from);
        Ok(())
    })
}
