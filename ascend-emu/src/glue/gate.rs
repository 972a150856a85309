//! Gated linear units: one half of an axis, through an activation, times the other half.

use super::argument::{Argument, Shape};
use super::call::{Work, work};
use super::elementwise::{gelu_of, silu};
use super::reduce::expect_real;
use super::view::{View, map};
use crate::status::Outcome;

/// An axis that is cut into two halves.
struct Halves {
    axis: usize,
    half: usize,
    /// Shape of each half.
    shape: Shape,
}

impl Halves {
    fn new(input: &Argument, dim: i64) -> Outcome<Self> {
        let axis = input.axis("dim", dim)?;
        let mut shape = input.shape();
        let even = (shape.get_mut(axis)).filter(|size| size.is_multiple_of(2));
        let Some(size) = even else {
            return Err(input.refuse(input.desc.shape, format_args!("an even size of axis {axis}")));
        };
        let half = *size / 2;
        *size = half;
        Ok(Halves { axis, half, shape })
    }

    /// Refuses an output that is not like a half of the input.
    fn expect_output(&self, input: &Argument, out: &Argument) -> Outcome {
        out.expect_shape(&self.shape)?;
        out.expect_dtype(input.dtype())
    }

    /// The first and the second half.
    fn of(&self, view: &View) -> [View; 2] {
        [0, self.half].map(|start| view.narrow(self.axis, start, self.half))
    }
}

/// Multiplies the sigmoid linear unit of the first half of an axis by the second half.
pub(super) fn swiglu(input: Argument, dim: i64, out: Argument) -> Outcome<Work> {
    let halves = Halves::new(&input, dim)?;
    expect_real(&input)?;
    halves.expect_output(&input, &out)?;
    work(move |views| {
        let [first, second] = halves.of(views.of(&input));
        map([&first, &second], views.of(&out), &|[a, b]: [f64; 2]| silu(a) * b);
        Ok(())
    })
}

/// Multiplies the Gaussian error linear unit of one half of an axis, the first if `left`, by the other half. The
/// second output has the activated half.
pub(super) fn geglu(
    input: Argument,
    dim: i64,
    approximate: i64,
    left: bool,
    out: Argument,
    activated: Argument,
) -> Outcome<Work> {
    let halves = Halves::new(&input, dim)?;
    expect_real(&input)?;
    let gelu = gelu_of(input.operator, approximate)?;
    for out in [out, activated] {
        halves.expect_output(&input, &out)?;
    }
    work(move |views| {
        let [first, second] = halves.of(views.of(&input));
        let (gated, factor) = match left {
            true => (&first, &second),
            false => (&second, &first),
        };
        let product = |[gated, factor]: [f64; 2]| gelu(gated) * factor;
        map([gated, factor], views.of(&out), &product);
        map([gated], views.of(&activated), &|[value]: [f64; 1]| gelu(value));
        Ok(())
    })
}
