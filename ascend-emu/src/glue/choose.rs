//! Operators that choose one of several numbers for each element: by a condition, a mask, bounds.

use super::argument::Argument;
use super::call::{Work, work};
use super::elementwise::{MAX, MIN, binary, numeric};
use super::number::{Domain, Number};
use super::view::{Views, map};
use crate::status::Outcome;
use ascend_spec::DType;

/// Takes each element from one of two inputs, as a condition selects.
pub(super) fn by_condition(condition: Argument, yes: Argument, no: Argument, out: Argument) -> Outcome<Work> {
    numeric(
        [condition, yes, no],
        &[],
        out,
        |[condition, yes, no]| if condition != 0 { yes } else { no },
        |[condition, yes, no]| if condition != 0.0 { yes } else { no },
    )
}

/// Puts a number, which may be read when the launch runs, where a mask is set.
fn fill_where(
    target: Argument,
    mask: Argument,
    number: impl Fn(&Views) -> Result<Number, String> + Send + Sync + 'static,
) -> Outcome<Work> {
    mask.expect_broadcast(&target.shape())?;
    mask.expect_dtype(DType::Bool)?;
    let domain = target.domain()?;
    work(move |views: &Views| {
        // A BOOL tensor takes every number but 0 as true; an integer tensor takes a real number without its fraction.
        let number = match target.dtype() {
            DType::Bool => Number::Int(i64::from(number(views)?.real() != 0.0)),
            _ => number(views)?,
        };
        let (int, real) = (number.int(), number.real());
        let (own, mask) = (views.of(&target), views.of(&mask));
        match domain {
            Domain::Int => map([own, mask], own, &|[own, mask]| {
                if mask != 0 { int } else { own }
            }),
            Domain::Real => map([own, mask], own, &|[own, mask]| {
                if mask != 0.0 { real } else { own }
            }),
        }
        Ok(())
    })
}

/// Puts a number where a mask is set.
pub(super) fn masked_fill(target: Argument, mask: Argument, value: Number) -> Outcome<Work> {
    fill_where(target, mask, move |_| Ok(value))
}

/// Puts the only element of a tensor where a mask is set.
pub(super) fn masked_fill_tensor(target: Argument, mask: Argument, value: Argument) -> Outcome<Work> {
    if value.elements() != 1 {
        return Err(value.refuse(value.desc.shape, "one element"));
    }
    let domain = value.domain()?;
    fill_where(target, mask, move |views| {
        let value = views.of(&value);
        Ok(match domain {
            Domain::Int => Number::Int(value.read::<i64>()?.into_iter().sum()),
            Domain::Real => Number::Real(value.read::<f64>()?.into_iter().sum()),
        })
    })
}

/// Clamps numbers between two bounds. NaN stays NaN.
pub(super) fn clamp(input: Argument, least: Option<Number>, most: Option<Number>, out: Argument) -> Outcome<Work> {
    let bound = |number: Option<Number>| number.map(|number| number.beside(input.dtype()));
    let (least, most) = (bound(least), bound(most));
    let numbers: Vec<Number> = least.into_iter().chain(most).collect();
    numeric(
        [input],
        &numbers,
        out,
        move |[value]| {
            let value = least.map_or(value, |least| value.max(least.int()));
            most.map_or(value, |most| value.min(most.int()))
        },
        move |[value]| {
            let value = match least {
                Some(least) if value < least.real() => least.real(),
                _ => value,
            };
            match most {
                Some(most) if value > most.real() => most.real(),
                _ => value,
            }
        },
    )
}

/// Replaces the numbers that are not above a threshold by another number. NaN stays NaN.
pub(super) fn threshold(input: Argument, threshold: Number, value: Number, out: Argument) -> Outcome<Work> {
    // Integers are compared with and replaced by integers.
    let [threshold, value] = match input.domain()? {
        Domain::Int => [threshold, value].map(|number| Number::Int(number.int())),
        Domain::Real => [threshold, value].map(|number| number.beside(input.dtype())),
    };
    numeric(
        [input],
        &[],
        out,
        move |[own]| {
            if own > threshold.int() { own } else { value.int() }
        },
        move |[own]| {
            if own <= threshold.real() { value.real() } else { own }
        },
    )
}

/// Clamps numbers between the elements of two tensors.
pub(super) fn clamp_between(
    input: Argument,
    least: Option<Argument>,
    most: Option<Argument>,
    out: Argument,
) -> Outcome<Work> {
    match (least, most) {
        (Some(least), None) => binary(MAX)(input, least, out),
        (None, Some(most)) => binary(MIN)(input, most, out),
        (None, None) => binary(MAX)(input, input, out),
        (Some(least), Some(most)) => numeric(
            [input, least, most],
            &[],
            out,
            |[value, least, most]| (MIN.int)((MAX.int)(value, least), most),
            |[value, least, most]| (MIN.real)((MAX.real)(value, least), most),
        ),
    }
}

/// Replaces NaN and the infinities by numbers.
pub(super) fn nan_to_num(input: Argument, nan: f32, above: f32, below: f32, out: Argument) -> Outcome<Work> {
    let [nan, above, below] = [nan, above, below].map(f64::from);
    numeric(
        [input],
        &[],
        out,
        |[value]| value,
        move |[value]| match value {
            value if value.is_nan() => nan,
            f64::INFINITY => above,
            f64::NEG_INFINITY => below,
            value => value,
        },
    )
}
