//! Operators that compute each output element from the elements at the same place of broadcast inputs.

use super::argument::{Argument, check_shapes, common_domain};
use super::call::{Work, work};
use super::compare::logical_not;
use super::number::{Domain, Number};
use super::view::{Views, map};
use crate::status::Outcome;
use ascend_spec::DType;

/// Largest number of inputs of an elementwise operator.
const INPUTS: usize = 3;

/// Computes in the common domain of inputs, numbers and output.
pub(super) fn numeric<const N: usize>(
    inputs: [Argument; N],
    numbers: &[Number],
    out: Argument,
    int: impl Fn([i64; N]) -> i64 + Send + Sync + 'static,
    real: impl Fn([f64; N]) -> f64 + Send + Sync + 'static,
) -> Outcome<Work> {
    const { assert!(N <= INPUTS) };
    check_shapes(&inputs, &out)?;
    let domain = common_domain(&inputs, numbers)?.with(out.domain()?);
    work(move |views: &Views| {
        let views_of = inputs.each_ref().map(|input| views.of(input));
        match domain {
            Domain::Int => map(views_of, views.of(&out), &int),
            Domain::Real => map(views_of, views.of(&out), &real),
        }
        Ok(())
    })
}

/// Applies a function of real numbers to each element.
pub(super) fn real(function: fn(f64) -> f64) -> impl Fn(Argument, Argument) -> Outcome<Work> {
    move |input, out| numeric([input], &[Number::Real(0.0)], out, |[value]| value, move |[value]| function(value))
}

/// Applies a function to each element; integers and real numbers have a function each.
pub(super) fn unary(int: fn(i64) -> i64, real: fn(f64) -> f64) -> impl Fn(Argument, Argument) -> Outcome<Work> {
    move |input, out| numeric([input], &[], out, move |[v]| int(v), move |[v]| real(v))
}

/// A function of two numbers, for integers and for real numbers.
#[derive(Clone, Copy)]
pub(super) struct BinaryFunction {
    pub int: fn(i64, i64) -> i64,
    pub real: fn(f64, f64) -> f64,
}

pub(super) const ADD: BinaryFunction = BinaryFunction { int: i64::wrapping_add, real: |a, b| a + b };
pub(super) const SUB: BinaryFunction = BinaryFunction { int: i64::wrapping_sub, real: |a, b| a - b };
pub(super) const MUL: BinaryFunction = BinaryFunction { int: i64::wrapping_mul, real: |a, b| a * b };
pub(super) const MAX: BinaryFunction = BinaryFunction {
    int: i64::max,
    // If one of them is NaN, so is the result.
    real: |a, b| if a.is_nan() || a > b { a } else { b },
};
pub(super) const MIN: BinaryFunction =
    BinaryFunction { int: i64::min, real: |a, b| if a.is_nan() || a < b { a } else { b } };
pub(super) const FLOOR_DIVIDE: BinaryFunction = BinaryFunction { int: floor_divide, real: floor_divide_real };
pub(super) const TRUNC_DIVIDE: BinaryFunction =
    BinaryFunction { int: |a, b| a.checked_div(b).unwrap_or(0), real: |a, b| (a / b).trunc() };
/// The remainder with the sign of the divisor.
pub(super) const REMAINDER: BinaryFunction = BinaryFunction {
    int: |a, b| {
        let rest = a.checked_rem(b).unwrap_or(0);
        if rest != 0 && (rest < 0) != (b < 0) { rest + b } else { rest }
    },
    real: |a, b| {
        let rest = a % b;
        if rest != 0.0 && (rest < 0.0) != (b < 0.0) { rest + b } else { rest }
    },
};
pub(super) const POW: BinaryFunction = BinaryFunction { int: power, real: f64::powf };

/// A power by squaring, because exponents have more bits than `wrapping_pow` accepts.
fn power(base: i64, exponent: i64) -> i64 {
    if exponent < 0 {
        // The only integers with an inverse are 1 and -1.
        return match base {
            1 => 1,
            -1 => 1 - 2 * (exponent & 1),
            _ => 0,
        };
    }
    let (mut result, mut square, mut left) = (1_i64, base, exponent);
    while left > 0 {
        if left & 1 == 1 {
            result = result.wrapping_mul(square);
        }
        square = square.wrapping_mul(square);
        left >>= 1;
    }
    result
}

/// The quotient rounded down; 0 if the divisor is 0, a case that hardware leaves undefined.
fn floor_divide(a: i64, b: i64) -> i64 {
    let quotient = a.checked_div(b).unwrap_or(0);
    let rest = a.checked_rem(b).unwrap_or(0);
    if rest != 0 && (rest < 0) != (b < 0) { quotient - 1 } else { quotient }
}

/// The exact quotient rounded down, as in Python: the rounded quotient may have reached the next whole number.
fn floor_divide_real(a: f64, b: f64) -> f64 {
    if b == 0.0 {
        return a / b;
    }
    let rest = a % b;
    let mut quotient = (a - rest) / b;
    if rest != 0.0 && (rest < 0.0) != (b < 0.0) {
        quotient -= 1.0;
    }
    if quotient == 0.0 { 0_f64.copysign(a / b) } else { quotient.round() }
}

/// Applies a function to the elements of two tensors.
pub(super) fn binary(op: BinaryFunction) -> impl Fn(Argument, Argument, Argument) -> Outcome<Work> {
    move |a, b, out| numeric([a, b], &[], out, move |[a, b]| (op.int)(a, b), move |[a, b]| (op.real)(a, b))
}

/// Applies a function to each element of a tensor and a scalar.
pub(super) fn with_scalar(op: BinaryFunction) -> impl Fn(Argument, Number, Argument) -> Outcome<Work> {
    move |input, number, out| {
        let number = number.beside(input.dtype());
        let (int, real) = (number.int(), number.real());
        numeric([input], &[number], out, move |[value]| (op.int)(value, int), move |[value]| (op.real)(value, real))
    }
}

/// Applies a function to a scalar and each element of a tensor.
pub(super) fn of_scalar(op: BinaryFunction) -> impl Fn(Number, Argument, Argument) -> Outcome<Work> {
    move |number, input, out| {
        let number = number.beside(input.dtype());
        let (int, real) = (number.int(), number.real());
        numeric([input], &[number], out, move |[value]| (op.int)(int, value), move |[value]| (op.real)(real, value))
    }
}

/// Applies `op` to one tensor and `alpha` times another.
pub(super) fn scaled(op: BinaryFunction) -> impl Fn(Argument, Argument, Number, Argument) -> Outcome<Work> {
    move |a, b, alpha, out| {
        let alpha = alpha.beside(out.dtype());
        let (int, real) = (alpha.int(), alpha.real());
        numeric(
            [a, b],
            &[alpha],
            out,
            move |[a, b]| (op.int)(a, int.wrapping_mul(b)),
            move |[a, b]| (op.real)(a, real * b),
        )
    }
}

/// Applies `op` to a tensor and `alpha` times a scalar.
pub(super) fn scaled_scalar(op: BinaryFunction) -> impl Fn(Argument, Number, Number, Argument) -> Outcome<Work> {
    move |input, other, alpha, out| {
        let product = match (other, alpha) {
            (Number::Int(a), Number::Int(b)) => Number::Int(a.wrapping_mul(b)),
            (a, b) => Number::Real(a.real() * b.real()),
        };
        with_scalar(op)(input, product, out)
    }
}

/// Subtracts `alpha` times a tensor from a scalar.
pub(super) fn subtract_from(input: Argument, other: Number, alpha: Number, out: Argument) -> Outcome<Work> {
    let (other, alpha) = (other.beside(input.dtype()), alpha.beside(input.dtype()));
    numeric(
        [input],
        &[other, alpha],
        out,
        move |[value]| other.int().wrapping_sub(alpha.int().wrapping_mul(value)),
        move |[value]| other.real() - alpha.real() * value,
    )
}

/// -1, 0 or 1; NaN stays.
pub(super) fn sign(value: f64) -> f64 {
    if value == 0.0 { 0.0 } else { value.signum() }
}

/// The number if it is above 0, otherwise 0; NaN stays NaN.
pub(super) fn relu(value: f64) -> f64 {
    if value < 0.0 { 0.0 } else { value }
}

/// The sigmoid linear unit: a number times its logistic function.
pub(super) fn silu(value: f64) -> f64 {
    value / (1.0 + (-value).exp())
}

unsafe extern "C" {
    /// The error function of C's mathematical library.
    // SAFETY: the signature is that of C, and any number is allowed.
    safe fn erf(value: f64) -> f64;
}

/// The Gaussian error linear unit: a number times the probability that a standard normal variable is less than it.
fn gelu_erf(value: f64) -> f64 {
    0.5 * value * (1.0 + erf(value * std::f64::consts::FRAC_1_SQRT_2))
}

/// The Gaussian error linear unit, approximated with a hyperbolic tangent.
pub(super) fn gelu_tanh(value: f64) -> f64 {
    let root = (2.0 / std::f64::consts::PI).sqrt();
    0.5 * value * (1.0 + (root * (value + 0.044715 * value.powi(3))).tanh())
}

/// The Gaussian error linear unit with the approximation that a number names.
pub(super) fn gelu_of(operator: &str, approximate: i64) -> Outcome<fn(f64) -> f64> {
    match approximate {
        0 => Ok(gelu_erf),
        1 => Ok(gelu_tanh),
        _ => Err(super::argument::refuse(operator, "approximate", approximate, "0 (none), 1 (tanh)")),
    }
}

/// Applies the Gaussian error linear unit with the approximation that a number names.
pub(super) fn gelu(input: Argument, approximate: i64, out: Argument) -> Outcome<Work> {
    real(gelu_of(input.operator, approximate)?)(input, out)
}

/// The quotient for a rounding mode.
fn quotient(out: &Argument, mode: i32) -> Outcome<BinaryFunction> {
    Ok(match mode {
        0 => BinaryFunction { real: |a, b| a / b, ..TRUNC_DIVIDE },
        1 => TRUNC_DIVIDE,
        2 => FLOOR_DIVIDE,
        _ => {
            return Err(super::argument::refuse(out.operator, "mode", mode, "0 (exact), 1 (towards zero), 2 (down)"));
        }
    })
}

/// Divides with a rounding mode. Integers are divided without rounding if the output has a floating-point type.
pub(super) fn divide(mode: i32) -> impl Fn(Argument, Argument, Argument) -> Outcome<Work> {
    move |a, b, out| binary(quotient(&out, mode)?)(a, b, out)
}

/// Divides by a scalar with a rounding mode.
pub(super) fn divide_by_scalar(mode: i32) -> impl Fn(Argument, Number, Argument) -> Outcome<Work> {
    move |input, other, out| with_scalar(quotient(&out, mode)?)(input, other, out)
}

/// Refuses tensors whose types have no bitwise operations.
fn expect_bits(arguments: &[Argument]) -> Outcome {
    for argument in arguments {
        if argument.domain()? == Domain::Real {
            return Err(argument.refuse(argument.dtype(), "BOOL, INT8, UINT8, INT16, INT32, INT64"));
        }
    }
    Ok(())
}

/// Applies a function to the bits of two integers.
pub(super) fn bitwise(op: fn(i64, i64) -> i64) -> impl Fn(Argument, Argument, Argument) -> Outcome<Work> {
    move |a, b, out| {
        expect_bits(&[a, b, out])?;
        binary(BinaryFunction { int: op, real: |a, _| a })(a, b, out)
    }
}

/// Applies a function to the bits of an integer and of a scalar.
pub(super) fn bitwise_scalar(op: fn(i64, i64) -> i64) -> impl Fn(Argument, Number, Argument) -> Outcome<Work> {
    move |input, other, out| {
        expect_bits(&[input, out])?;
        with_scalar(BinaryFunction { int: op, real: |a, _| a })(input, Number::Int(other.int()), out)
    }
}

/// Inverts the bits of an integer, or a truth value.
pub(super) fn bitwise_not(input: Argument, out: Argument) -> Outcome<Work> {
    if input.dtype() == DType::Bool {
        return logical_not(input, out);
    }
    expect_bits(&[input, out])?;
    unary(|v| !v, |v| v)(input, out)
}
