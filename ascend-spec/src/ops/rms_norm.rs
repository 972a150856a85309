//! RmsNorm: rows divided by their root mean square, and multiplied by a weight for each element of a row.
//!
//! `y = x / sqrt(mean(x²) + epsilon) * gamma`, where a row is the last axes of `x`, as many as `gamma` has.

use crate::Cann::{V8_1, V9_0};
use crate::DType::{Bf16, Float, Float16};
use crate::allowed::Named;
use crate::contract::{CallContract, checked_for, described_by, first_lint};
use crate::operator::{OperatorVersion, versions};
use crate::rule::{lint, require, rules};
use crate::{DType, Dims, Soc, Target, TensorDesc, Violation};
use std::ops::Range;

declare_operator! {
    /// Source: aclnnRmsNorm, parameter table.
    rms_norm_arguments, "RmsNorm", #[derive(Copy)] RmsNormCall;
    1 { x: tensor, X, "x", "Rows: the last axes, as many as `gamma` has." }
    1 { gamma: tensor, Gamma, "gamma", "A weight for each element of a row." }
    1 { epsilon: float = 1e-6, Epsilon, "epsilon", "What is added to the mean of a row's squares." }
    1 { y: output, Y, "yOut", "The rows, normalised, with the shape and dtype of `x`." }
    1 { rstd: output, Rstd, "rstdOut",
        "One over the root mean square of each row, of FLOAT: the shape of `x` with 1 for each axis of a row." }
}

versions! {
    /// The version of RmsNorm.
    pub enum Version {
        /// The only one.
        V1 = OperatorVersion::new(1, "aclnnRmsNorm", "8.1").on_a2_a3(V8_1).on_ascend950(V9_0)
            .on_inference_cards(V8_1),
    }
}

/// The rules of RmsNorm.
pub mod rules {
    use super::*;

    rules! {
        in Scope::ALL;
        REQUIRED = "rms_norm.required", PARAM_NULLPTR, V1, "RmsNorm documentation, return values",
            "x, gamma, yOut and rstdOut are given",
            "pass rows, weights and both outputs";
        PRODUCT = "rms_norm.product", FIND_KERNEL_ERROR, V1, "RmsNorm documentation, products",
            "the product has the operator",
            "run on Atlas A2, Atlas A3, Ascend 950 or 310P";
        DTYPE = "rms_norm.dtype", PARAM_INVALID, V1, "RmsNorm documentation, constraints, dtypes",
            "x is of FLOAT16, FLOAT, or on other products than 310P BF16, gamma of the dtype of x or, except on 310P, "
            "of FLOAT, yOut of the dtype of x, and rstdOut of FLOAT",
            "convert the named tensor to one of the allowed dtypes";
        format of "rms_norm", PARAM_INVALID, "RmsNorm documentation, parameters";
        RANK = "rms_norm.rank", TILING_ERROR, V1, "RmsNorm tiling, shapes",
            "x and gamma have at least one axis",
            "describe a single number as a row of one element";
        GAMMA_SHAPE = "rms_norm.gamma_shape", TILING_ERROR, V1, "RmsNorm tiling, shapes",
            "gamma has the last dimensions of x, none of them 0",
            "give weights of the shape of a row";
        Y_SHAPE = "rms_norm.y_shape", TILING_ERROR, V1, "RmsNorm tiling, shapes",
            "yOut has the shape of x",
            "describe the output with the shape of x";
        RSTD_SHAPE = "rms_norm.rstd_shape", TILING_ERROR, V1, "RmsNorm tiling, shapes",
            "each dimension of rstdOut is 1 or that of x",
            "give rstdOut the shape of x, with 1 for each axis of a row";
        EPSILON = "rms_norm.epsilon", TILING_ERROR, V1, "RmsNorm tiling, attributes",
            "epsilon is at least 0",
            "give a small positive number, usually 1e-6";
        RSTD_ROWS = "rms_norm.rstd_rows", Overrun("a number is written for each row, whatever room there is"), V1,
            "RmsNorm documentation, rstdOut",
            "rstdOut has an element for each row, and 1 for each axis of a row or no such axes",
            "give rstdOut the shape of x, with 1 for each axis of a row";
        FINITE = "rms_norm.finite_epsilon", Lint("rows become NaN or 0"), V1, "RmsNorm documentation, epsilon",
            "epsilon is finite",
            "give a small positive number, usually 1e-6";
        ROW_BYTES = "rms_norm.row_bytes", Lint("rows are copied in units of 32 bytes"), V1,
            "RmsNorm documentation, constraints" in Scope::ATLAS_INFERENCE,
            "on 310P a row of gamma has at least 32 bytes",
            "normalise such short rows on the host, or on Atlas A2, Atlas A3 or Ascend 950";
    }
}

use rules::*;

described_by! { RmsNorm, RULES }

impl CallContract for RmsNorm {
    checked_for! { target.soc }

    fn imply_outputs(arguments: &mut Self::Arguments, _: &dyn Fn(&str) -> Option<Dims>) {
        let (Some(x), Some(gamma)) = (arguments.x, arguments.gamma) else {
            return;
        };
        let rstd = RmsNormCall::rstd_shape(&x.shape, &gamma.shape);
        arguments.y = (arguments.y).or(Some(TensorDesc::packed(x.dtype, x.shape)));
        arguments.rstd = (arguments.rstd).or(Some(TensorDesc::packed(Float, rstd)));
    }
}

/// A call of RmsNorm that holds every rule, resolved.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct RmsNormProblem {
    /// Rows that are normalised.
    pub rows: usize,
    /// Elements of a row.
    pub columns: usize,
    /// What is added to the mean of a row's squares.
    pub epsilon: f64,
    /// Whether rstdOut has fewer elements than there are rows, so that a launch writes past its end.
    pub overruns: bool,
}

impl RmsNormProblem {
    /// Whether there is no row.
    pub fn is_idle(&self) -> bool {
        self.rows == 0
    }

    /// Calls `visit` with every tensor that the call touches and the bytes it touches, from the tensor's base
    /// address. Visits nothing if there is no row.
    pub fn touches(&self, call: &RmsNormCall, visit: &mut dyn FnMut(Parameter, Range<u64>)) {
        for (argument, desc) in call.each_tensor().filter(|_| !self.is_idle()) {
            let Some(mut range) = desc.byte_range() else {
                continue;
            };
            if self.overruns && argument.parameter == Parameter::Rstd {
                let written = u64::from(Float.bits() / 8).saturating_mul(self.rows as u64);
                range.end = range.start.saturating_add(written);
            }
            visit(argument.parameter, range);
        }
    }
}

/// Dtypes of x and gamma that the kernels of a product are made for.
fn dtypes(soc: Soc) -> &'static [(DType, DType)] {
    match soc {
        Soc::AtlasInference => &[(Float16, Float16), (Float, Float)],
        _ => &[(Float16, Float16), (Bf16, Bf16), (Float, Float), (Float16, Float), (Bf16, Float)],
    }
}

impl RmsNormCall {
    /// The shape of rstdOut for rows `x` and weights `gamma`: that of `x` with 1 for each axis of a row.
    pub fn rstd_shape(x: &Dims, gamma: &Dims) -> Dims {
        let axes = x.len().saturating_sub(gamma.len())..x.len();
        axes.fold(*x, |shape, axis| shape.with(axis, 1))
    }

    /// Checks the call against the contract of the operator on `soc`, and resolves it.
    ///
    /// Allocates nothing unless it refuses.
    ///
    /// # Errors
    /// [`Violation`] by the first broken rule.
    pub fn check(&self, soc: Soc) -> Result<RmsNormProblem, Violation> {
        let x = REQUIRED.requires(self.x, "x")?;
        let gamma = REQUIRED.requires(self.gamma, "gamma")?;
        let y = REQUIRED.requires(self.y, "yOut")?;
        let rstd = REQUIRED.requires(self.rstd, "rstdOut")?;
        require!(
            Version::V1.runs_on(Target::with_default(soc, crate::Cann::V9_1)),
            PRODUCT,
            soc,
            "Atlas A2, Atlas A3, Ascend 950 and 310P",
        );
        require!(
            dtypes(soc).contains(&(x.dtype, gamma.dtype)),
            DTYPE,
            format_args!("x {} with gamma {}", x.dtype, gamma.dtype),
            Pairs(dtypes(soc)),
        );
        DTYPE.takes(Named("yOut", y.dtype), x.dtype)?;
        DTYPE.takes(Named("rstdOut", rstd.dtype), Float)?;
        FORMAT.formats(self)?;
        require!(
            !x.shape.is_empty() && !gamma.shape.is_empty(),
            RANK,
            format_args!("x {} and gamma {}", x.shape, gamma.shape),
            "1 to 8 axes",
        );
        require!(
            x.shape.ends_with(&gamma.shape) && !gamma.shape.contains(&0),
            GAMMA_SHAPE,
            format_args!("gamma {} for x {}", gamma.shape, x.shape),
            "the last dimensions of x, at least 1 each",
        );
        require!(y.shape == x.shape, Y_SHAPE, y.shape, x.shape);
        let fits = |(&rstd, &x): (&i64, &i64)| rstd == 1 || rstd == x;
        let within = rstd.shape.len() <= x.shape.len();
        require!(
            within && rstd.shape.iter().zip(x.shape.iter()).all(fits),
            RSTD_SHAPE,
            format_args!("rstdOut {} for x {}", rstd.shape, x.shape),
            Self::rstd_shape(&x.shape, &gamma.shape),
        );
        require!(self.epsilon.is_nan() || self.epsilon >= 0.0, EPSILON, self.epsilon, "0 or more",);
        let count = |dims: &[i64]| dims.iter().map(|&dim| dim as usize).product();
        let (row, room) = (gamma.shape.len(), count(&rstd.shape));
        let rows = count(&x.shape[..x.shape.len() - row]);
        Ok(RmsNormProblem { rows, columns: count(&gamma.shape), epsilon: self.epsilon, overruns: room < rows })
    }

    /// The first lint that the call, which holds every rule, breaks, leaving out those in `allowed` (by id).
    ///
    /// # Errors
    /// The broken lint, with the same fields as a broken rule.
    pub fn lint(&self, soc: Soc, allowed: &[&str]) -> Result<(), Violation> {
        let (Some(x), Some(gamma), Some(rstd)) = (self.x, self.gamma, self.rstd) else {
            return Ok(());
        };
        let row_bytes = gamma.elements().unwrap_or(0).saturating_mul(u64::from(gamma.dtype.bits() / 8));
        let wanted = Self::rstd_shape(&x.shape, &gamma.shape);
        let rows = &x.shape[..x.shape.len() - gamma.shape.len()];
        first_lint(allowed, |report| {
            lint!(report, rstd.shape == wanted || *rstd.shape == *rows, RSTD_ROWS, rstd.shape, wanted,);
            lint!(report, (self.epsilon as f32).is_finite(), FINITE, self.epsilon, "0 or more, finite",);
            lint!(
                report,
                soc != Soc::AtlasInference || row_bytes >= 32,
                ROW_BYTES,
                format_args!("{row_bytes} bytes"),
                "32 bytes or more",
            );
        })
    }
}

/// Dtypes of x and gamma in a text.
struct Pairs(&'static [(DType, DType)]);

impl std::fmt::Display for Pairs {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        for (at, (x, gamma)) in self.0.iter().enumerate() {
            let before = if at == 0 { "" } else { ", " };
            write!(f, "{before}x {x} with gamma {gamma}")?;
        }
        Ok(())
    }
}
