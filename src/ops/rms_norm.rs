//! RmsNorm: rows divided by their root mean square, which models do before attention, to queries and keys in some.
//!
//! [`RmsNorm`] describes a call, which is planned once and launched with other tensors of the same shapes as a
//! [`RmsNormPlan`].

use ascend_spec::ops::rms_norm::{Parameter, RmsNormCall, Version};
use ascend_spec::{DType, TensorDesc, rms_norm_arguments};

use crate::error::Result;
use crate::memory::Element;
use crate::operator::{AllowedLints, EntryPoints, NamedTensors, entry_points, lints_of, phase_one};
use crate::ops::operation::{self, PlainCall, PlainOperation, Sealed, outputs};
use crate::tensor::{AnyTensor, Tensor};

entry_points! {
    rms_norm_arguments, RmsNormCall, AnyArguments::RmsNorm;
    Version::V1 => 1: aclnnRmsNormGetWorkspaceSize, aclnnRmsNorm;
}

/// What to do where the installed CANN has no such operator.
const INSTEAD: &str = "normalise in host memory";

/// A call of RmsNorm, `y = x / sqrt(mean(x²) + epsilon) * gamma` for each row: the last axes of `x`, as many as
/// `gamma` has.
///
/// Describe it, plan it for tensors of certain shapes and strides, and launch the [`RmsNormPlan`] with them or others
/// laid out alike. Rows are of `f16`, `f32`, or on other products than 310P `bf16`; weights of the same type, or on
/// those products of `f32`.
///
/// Source: aclnnRmsNorm, on Atlas A2, A3 and 310P, from CANN 9.0 on also on Ascend 950.
///
/// ```
/// use ascend_attention::Runtime;
/// use ascend_attention::norm::RmsNorm;
///
/// # fn main() -> ascend_attention::Result<()> {
/// # #[cfg(feature = "emulation")] {
/// let stream = Runtime::emulated()?.device(0)?.stream()?;
/// let x = stream.upload(&[3.0f32, 4.0, 0.0, 2.0], [2, 2])?;
/// let gamma = stream.upload(&[1.0f32, 10.0], [2])?;
/// let plan = RmsNorm::new(0.0).plan((&x, &gamma))?;
/// let rows = plan.launch(&stream, (&x, &gamma))?;
/// let root = 12.5f32.sqrt();
/// assert_eq!(rows.y.download(&stream)?[..2], [3.0 / root, 40.0 / root]);
/// assert_eq!(rows.rstd.download(&stream)?[0], 1.0 / root);
/// # }
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug)]
#[must_use = "a description does nothing until planned"]
pub struct RmsNorm {
    epsilon: f64,
    allowed: AllowedLints,
}

impl RmsNorm {
    /// A call that adds `epsilon` to the mean of a row's squares; models name it, usually 1e-5 or 1e-6.
    pub fn new(epsilon: f64) -> Self {
        Self { epsilon, allowed: AllowedLints::default() }
    }

    /// Lets a call through that breaks this lint: `rms_norm.finite_epsilon` or `rms_norm.row_bytes`.
    pub fn allow_lint(mut self, id: &str) -> Self {
        self.allowed.lint(id);
        self
    }

    /// Checks a call with rows `x` and weights `gamma`, of the shape of a row, and prepares it for tensors of these
    /// shapes and strides. Nothing is launched, and the tensors are not kept.
    ///
    /// # Errors
    /// Before any function of the operator is called: [`Error::Violation`](crate::Error::Violation),
    /// [`Error::UnknownProduct`](crate::Error::UnknownProduct),
    /// [`Error::MissingOperator`](crate::Error::MissingOperator), [`ARGUMENT_DEVICE`](crate::rules::ARGUMENT_DEVICE)
    /// for tensors of different devices. After that [`Error::Aclnn`](crate::Error::Aclnn), should the operator refuse
    /// the call nevertheless.
    #[doc(alias = "aclnnRmsNorm")]
    #[doc(alias = "aclnnRmsNormGetWorkspaceSize")]
    pub fn plan<'a, T: Element>(&self, inputs: impl Into<RmsNormInputs<'a, T>>) -> Result<RmsNormPlan> {
        let inputs = inputs.into();
        let RmsNormInputs { x, gamma } = inputs;
        let context = x.memory().context();
        RmsNormCall::check_device(Version::V1, context, INSTEAD, inputs.each())?;
        let shape = x.desc().shape;
        let y = TensorDesc::packed(x.dtype(), shape);
        let rstd = RmsNormCall::rstd_shape(&shape, &gamma.desc().shape);
        let rstd = TensorDesc::packed(DType::Float, rstd);
        let tensors: NamedTensors<'_, _> = inputs.each().into_iter().collect();
        let mut call = RmsNormCall { epsilon: self.epsilon, y: Some(y), rstd: Some(rstd), ..RmsNormCall::default() };
        call.describe(&tensors);
        RmsNormPlan::of_call((&call, Version::V1), x, &tensors, || {
            let soc = context.soc()?;
            let problem = call.check(soc)?;
            call.lint(soc, &self.allowed.ids(lints_of::<Version>)?)?;
            Ok((PlainOperation::new((), []), problem.is_idle()))
        })
    }
}

/// What a launch reads. From the pair of rows and weights.
#[derive(Clone, Copy, Debug)]
pub struct RmsNormInputs<'a, T: Element> {
    x: &'a Tensor<T>,
    gamma: &'a AnyTensor,
}

impl<'a, T: Element, W: Element> From<(&'a Tensor<T>, &'a Tensor<W>)> for RmsNormInputs<'a, T> {
    /// Rows and weights.
    fn from((x, gamma): (&'a Tensor<T>, &'a Tensor<W>)) -> Self {
        Self { x, gamma }
    }
}

impl<'a, T: Element> RmsNormInputs<'a, T> {
    /// The tensor of each argument.
    fn each(&self) -> [(Parameter, &'a AnyTensor); 2] {
        [(Parameter::X, self.x), (Parameter::Gamma, self.gamma)]
    }
}

/// What a launch writes.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct NormalisedRows<T: Element> {
    /// The rows, normalised, with the shape of `x`.
    pub y: Tensor<T>,
    /// One over the root mean square of each row: the shape of `x` with 1 for each axis of a row. Gradients need it.
    pub rstd: Tensor<f32>,
}

outputs! { NormalisedRows { y, rstd } }

/// A call of RmsNorm that was checked and prepared. From [`RmsNorm::plan`].
///
/// A launch reads rows and weights, and writes contiguous [`NormalisedRows`].
pub type RmsNormPlan = operation::Plan<PlainOperation<RmsNorm>>;

impl Sealed for RmsNorm {}

impl PlainCall for RmsNorm {
    type Inputs<'a, T: Element> = RmsNormInputs<'a, T>;
    type Output<T: Element> = NormalisedRows<T>;
    type Parameter = Parameter;
    type Kept = ();
    const OUTPUTS: &'static [Parameter] = &[Parameter::Y, Parameter::Rstd];

    fn tensors<'t, 'i: 't, T: Element>(
        (): &'t (),
        inputs: &'t RmsNormInputs<'i, T>,
    ) -> impl Iterator<Item = (Parameter, &'t AnyTensor)> {
        inputs.each().into_iter()
    }
}
