//! Operators whose result is true or false.

use super::call::{Work, work};
use super::elementwise::check_shapes;
use super::number::{Domain, Number, Wide};
use super::operand::{Operand, common_domain};
use super::view::{Views, map};
use crate::status::Outcome;

/// Compares in what inputs and numbers have in common; the output says 1 where that holds.
fn truth<const N: usize>(
    inputs: [Operand; N],
    numbers: &[Number],
    out: Operand,
    int: impl Fn([i64; N]) -> bool + Send + Sync + 'static,
    real: impl Fn([f64; N]) -> bool + Send + Sync + 'static,
) -> Outcome<Work> {
    check_shapes(&inputs, &out)?;
    out.domain()?;
    let domain = common_domain(&inputs, numbers)?;
    work(move |views: &Views| {
        let views_of = inputs.each_ref().map(|input| views.of(input));
        match domain {
            Domain::Int => map(views_of, views.of(&out), &|v| i64::from(int(v))),
            Domain::Real => map(views_of, views.of(&out), &|v| i64::from(real(v))),
        }
        Ok(())
    })
}

/// A comparison.
#[derive(Clone, Copy)]
pub(super) struct Relation {
    int: fn(i64, i64) -> bool,
    real: fn(f64, f64) -> bool,
}

/// Declares a comparison by its sign.
macro_rules! relation {
    ($($name:ident: $sign:tt;)*) => {$(
        pub(super) const $name: Relation = Relation {
            int: |a, b| a $sign b,
            real: |a, b| a $sign b,
        };
    )*};
}

relation! {
    EQ: ==;
    NE: !=;
    LT: <;
    LE: <=;
    GT: >;
    GE: >=;
}

/// Compares two tensors.
pub(super) fn tensors(op: Relation) -> impl Fn(Operand, Operand, Operand) -> Outcome<Work> {
    move |a, b, out| {
        truth(
            [a, b],
            &[],
            out,
            move |[a, b]| (op.int)(a, b),
            move |[a, b]| (op.real)(a, b),
        )
    }
}

/// Compares a tensor with a scalar, which first becomes a number of the tensor's type.
pub(super) fn with_scalar(op: Relation) -> impl Fn(Operand, Number, Operand) -> Outcome<Work> {
    move |input, number, out| {
        let number = number.rounded(input.dtype());
        let (int, real) = (number.int(), number.real());
        truth(
            [input],
            &[number],
            out,
            move |[value]| (op.int)(value, int),
            move |[value]| (op.real)(value, real),
        )
    }
}

/// Whether a property holds.
pub(super) fn test(int: bool, real: fn(f64) -> bool) -> impl Fn(Operand, Operand) -> Outcome<Work> {
    move |input, out| truth([input], &[], out, move |_| int, move |[value]| real(value))
}

/// A function of two truth values; other numbers are true unless they are 0.
pub(super) fn logical(
    op: fn(bool, bool) -> bool,
) -> impl Fn(Operand, Operand, Operand) -> Outcome<Work> {
    move |a, b, out| {
        truth(
            [a, b],
            &[],
            out,
            move |[a, b]| op(a != 0, b != 0),
            move |[a, b]| op(a != 0.0, b != 0.0),
        )
    }
}

/// What is not true.
pub(super) fn logical_not(input: Operand, out: Operand) -> Outcome<Work> {
    truth([input], &[], out, |[v]| v == 0, |[v]| v == 0.0)
}

/// Whether two numbers differ by at most `atol` and `rtol` times the second.
pub(super) fn is_close(
    a: Operand,
    b: Operand,
    rtol: f64,
    atol: f64,
    equal_nan: bool,
    out: Operand,
) -> Outcome<Work> {
    let close = move |[a, b]: [f64; 2]| {
        let near = a == b || (b.is_finite() && (a - b).abs() <= atol + rtol * b.abs());
        near || (equal_nan && a.is_nan() && b.is_nan())
    };
    truth(
        [a, b],
        &[],
        out,
        move |values| close(values.map(i64::to_f64)),
        close,
    )
}

/// Whether two tensors have the same shape and equal elements: one truth value.
pub(super) fn equal(a: Operand, b: Operand, out: Operand) -> Outcome<Work> {
    if out.elements() != 1 {
        return Err(out.refuse(out.desc.shape, "one element"));
    }
    out.domain()?;
    let domain = common_domain(&[a, b], &[])?;
    let same_shape = a.shape() == b.shape();
    fn same<W: Wide>(views: &Views, a: &Operand, b: &Operand) -> Result<bool, String> {
        Ok(views.of(a).read::<W>()? == views.of(b).read::<W>()?)
    }
    work(move |views: &Views| {
        let same = same_shape
            && match domain {
                Domain::Int => same::<i64>(views, &a, &b)?,
                Domain::Real => same::<f64>(views, &a, &b)?,
            };
        views.of(&out).fill(Number::Int(i64::from(same)));
        Ok(())
    })
}
