//! BatchMatMul: products of matrices, one for each entry of the first axis.
//!
//! [`BatchMatMul`] describes a call, which is planned once and launched with other tensors of the same shapes as a
//! [`BatchMatMulPlan`].

use ascend_spec::batch_mat_mul_arguments;
use ascend_spec::ops::batch_mat_mul::{BatchMatMulCall, Parameter, Version, cube_math_type};

use crate::error::{Error, Result};
use crate::memory::Element;
use crate::operator::{AllowedLints, EntryPoints, NamedTensors, entry_points, lints_of, phase_one};
use crate::ops::operation::{self, PlainCall, PlainOperation, Sealed};
use crate::tensor::{AnyTensor, Tensor};

entry_points! {
    batch_mat_mul_arguments, BatchMatMulCall, AnyArguments::BatchMatMul;
    Version::V1 => 1: aclnnBatchMatMulGetWorkspaceSize, aclnnBatchMatMul;
}

/// What to do where the installed CANN has no such operator.
const INSTEAD: &str = "multiply in host memory";

/// The type to which the cube units may convert FLOAT (`cubeMathType`). Other elements are multiplied as they are.
/// The emulation multiplies FLOAT as it is, whatever is set.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum CubeMathType {
    /// FLOAT is not converted. Not on 310P and 910A, whose cube units take FLOAT16 alone.
    #[default]
    KeepDtype,
    /// FLOAT becomes a type of fewer digits: HFLOAT32, on 310P and 910A FLOAT16.
    AllowFp32DownPrecision,
    /// FLOAT becomes FLOAT16.
    UseFp16,
    /// FLOAT becomes HFLOAT32. Not on 310P and 910A.
    UseHf32,
}

impl CubeMathType {
    fn acl(self) -> i8 {
        match self {
            CubeMathType::KeepDtype => cube_math_type::KEEP_DTYPE,
            CubeMathType::AllowFp32DownPrecision => cube_math_type::ALLOW_FP32_DOWN_PRECISION,
            CubeMathType::UseFp16 => cube_math_type::USE_FP16,
            CubeMathType::UseHf32 => cube_math_type::USE_HF32,
        }
    }
}

/// A call of BatchMatMul, which multiplies matrices `[A, M, K]` by matrices `[B, K, N]` of the same number or one for
/// all.
///
/// Describe it, plan it for tensors of certain shapes and strides, and launch the [`BatchMatMulPlan`] with them or
/// others laid out alike. Factors may be views: [`Tensor::permute`] gives a transposed factor, [`Tensor::narrow`] a
/// part of one.
///
/// Source: aclnnBatchMatMul, for `f16` and `f32`, and on other products than 310P and 910A for `bf16`.
///
/// ```
/// use ascend_attention::Runtime;
/// use ascend_attention::matmul::BatchMatMul;
///
/// # fn main() -> ascend_attention::Result<()> {
/// # #[cfg(feature = "emulation")] {
/// let stream = Runtime::emulated()?.device(0)?.stream()?;
/// let a = stream.upload(&[1.0f32, 2.0, 3.0, 4.0], [1, 2, 2])?;
/// let b = stream.upload(&[1.0f32, 0.0, 10.0, 1.0], [1, 2, 2])?;
/// let transposed = b.permute([0, 2, 1])?;
/// let plan = BatchMatMul::new().plan((&a, &transposed))?;
/// let product = plan.launch(&stream, (&a, &transposed))?;
/// assert_eq!(product.download(&stream)?, [1.0, 12.0, 3.0, 34.0]);
/// # }
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug, Default)]
#[must_use = "a description does nothing until planned"]
pub struct BatchMatMul {
    cube_math_type: CubeMathType,
    allowed: AllowedLints,
}

impl BatchMatMul {
    /// A call that multiplies elements as they are.
    pub fn new() -> Self {
        Self::default()
    }

    /// Sets the type to which the cube units may convert FLOAT. Unset: [`CubeMathType::KeepDtype`].
    pub fn cube_math_type(mut self, cube_math_type: CubeMathType) -> Self {
        self.cube_math_type = cube_math_type;
        self
    }

    /// Lets a call through that breaks this lint, such as `batch_mat_mul.ignored_cube_math_type`.
    pub fn allow_lint(mut self, id: &str) -> Self {
        self.allowed.lint(id);
        self
    }

    /// Checks a call with factors `self_` `[A, M, K]` and `mat2` `[B, K, N]`, where `A` and `B` are the same or one
    /// of them is 1, and prepares it for tensors of these shapes and strides. Nothing is launched, and the factors
    /// are not kept.
    ///
    /// # Errors
    /// Before any function of the operator is called: [`Error::Violation`], [`Error::UnknownProduct`],
    /// [`Error::MissingOperator`], [`ARGUMENT_DEVICE`](crate::rules::ARGUMENT_DEVICE) or
    /// [`ARGUMENT_VALUE`](crate::rules::ARGUMENT_VALUE) for tensors of different devices or products that memory
    /// cannot hold. After that [`Error::Aclnn`], should the operator refuse the call nevertheless.
    #[doc(alias = "aclnnBatchMatMulGetWorkspaceSize")]
    pub fn plan<T: Element>(&self, factors: (&Tensor<T>, &Tensor<T>)) -> Result<BatchMatMulPlan> {
        let (self_, mat2) = factors;
        let context = self_.memory().context();
        let tensors: NamedTensors<'_, _> = Self::tensors(&(), &factors).collect();
        BatchMatMulCall::check_device(Version::V1, context, INSTEAD, tensors.iter().copied())?;
        let mut call = BatchMatMulCall { cube_math_type: self.cube_math_type.acl(), ..BatchMatMulCall::default() };
        call.describe(&tensors);
        let Some(out) = call.implied_out() else {
            return Err(Error::invalid(
                "out",
                format_args!("factors {} and {}", self_.desc().shape, mat2.desc().shape),
                "products that memory can hold",
            )
            .fix("multiply in parts"));
        };
        call.out = Some(out);
        BatchMatMulPlan::of_call((&call, Version::V1), self_, &tensors, || {
            let soc = context.soc()?;
            let problem = call.check(soc)?;
            call.lint(soc, &self.allowed.ids(lints_of::<Version>)?)?;
            Ok((PlainOperation::new((), []), problem.is_idle()))
        })
    }
}

/// A call of BatchMatMul that was checked and prepared. From [`BatchMatMul::plan`].
///
/// A launch reads the pair of both factors, and writes the products to a contiguous tensor `[max(A, B), M, N]`.
pub type BatchMatMulPlan = operation::Plan<PlainOperation<BatchMatMul>>;

impl Sealed for BatchMatMul {}

impl PlainCall for BatchMatMul {
    type Inputs<'a, T: Element> = (&'a Tensor<T>, &'a Tensor<T>);
    type Output<T: Element> = Tensor<T>;
    type Parameter = Parameter;
    type Kept = ();
    const OUTPUTS: &'static [Parameter] = &[Parameter::Out];

    fn tensors<'t, 'i: 't, T: Element>(
        (): &'t (),
        (self_, mat2): &'t (&'i Tensor<T>, &'i Tensor<T>),
    ) -> impl Iterator<Item = (Parameter, &'t AnyTensor)> {
        let factors: [(_, &AnyTensor); 2] = [(Parameter::SelfMatrices, self_), (Parameter::Mat2, mat2)];
        factors.into_iter()
    }
}
