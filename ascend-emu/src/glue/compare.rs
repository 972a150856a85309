//! Operators whose result is true or false.

use super::argument::{Argument, check_shapes, common_domain};
use super::call::{Work, work};
use super::number::{Domain, Number, WideElement, common_float, rounded};
use super::view::{Views, map};
use crate::status::Outcome;
use ascend_spec::DType;

/// Tests inputs and numbers in their common domain; an output element is 1 where the test holds and 0 elsewhere.
fn truth<const N: usize>(
    inputs: [Argument; N],
    numbers: &[Number],
    out: Argument,
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

impl Relation {
    /// Rounds real numbers to a type, then compares them.
    fn of_type(self, dtype: DType) -> impl Fn(f64, f64) -> bool {
        move |a, b| (self.real)(rounded(a, dtype), rounded(b, dtype))
    }
}

/// Compares two tensors, whose elements are first converted to their common type.
pub(super) fn tensors(op: Relation) -> impl Fn(Argument, Argument, Argument) -> Outcome<Work> {
    move |a, b, out| {
        let common = common_float([a.dtype(), b.dtype()]).unwrap_or(DType::Double);
        let real = op.of_type(common);
        truth([a, b], &[], out, move |[a, b]| (op.int)(a, b), move |[a, b]| real(a, b))
    }
}

/// Compares a tensor with a scalar, which is first converted to the tensor's type; an integer tensor and a real
/// scalar are compared as FLOAT.
pub(super) fn with_scalar(op: Relation) -> impl Fn(Argument, Number, Argument) -> Outcome<Work> {
    move |input, number, out| {
        let real = op.of_type(common_float([input.dtype()]).unwrap_or(DType::Float));
        truth(
            [input],
            &[number],
            out,
            move |[value]| (op.int)(value, number.int()),
            move |[value]| real(value, number.real()),
        )
    }
}

/// Tests whether each element has a property.
pub(super) fn test(int: bool, real: fn(f64) -> bool) -> impl Fn(Argument, Argument) -> Outcome<Work> {
    move |input, out| truth([input], &[], out, move |_| int, move |[value]| real(value))
}

/// Applies a function of two truth values; every number but 0 counts as true.
pub(super) fn logical(op: fn(bool, bool) -> bool) -> impl Fn(Argument, Argument, Argument) -> Outcome<Work> {
    move |a, b, out| truth([a, b], &[], out, move |[a, b]| op(a != 0, b != 0), move |[a, b]| op(a != 0.0, b != 0.0))
}

/// Returns 1 for elements that are 0, and 0 for others.
pub(super) fn logical_not(input: Argument, out: Argument) -> Outcome<Work> {
    truth([input], &[], out, |[v]| v == 0, |[v]| v == 0.0)
}

/// Tests whether two numbers differ by at most `atol` plus `rtol` times the second.
pub(super) fn is_close(
    a: Argument,
    b: Argument,
    rtol: f64,
    atol: f64,
    equal_nan: bool,
    out: Argument,
) -> Outcome<Work> {
    let close = move |[a, b]: [f64; 2]| {
        let near = a == b || (b.is_finite() && (a - b).abs() <= atol + rtol * b.abs());
        near || (equal_nan && a.is_nan() && b.is_nan())
    };
    truth([a, b], &[], out, move |values| close(values.map(i64::to_f64)), close)
}

/// Tests whether two tensors have the same shape and equal elements; the output is one truth value.
pub(super) fn equal(a: Argument, b: Argument, out: Argument) -> Outcome<Work> {
    if out.elements() != 1 {
        return Err(out.refuse(out.desc.shape, "one element"));
    }
    out.domain()?;
    let domain = common_domain(&[a, b], &[])?;
    let same_shape = a.shape() == b.shape();
    fn same<W: WideElement>(views: &Views, a: &Argument, b: &Argument) -> Result<bool, String> {
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
