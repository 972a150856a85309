//! The rules of BatchMatMul.

use super::cube_math_type::{KEEP_DTYPE, USE_FP16, USE_HF32};
use super::{BatchMatMulCall, BatchMatMulProblem, Version};
use crate::DType::{Bf16, Float, Float16};
use crate::allowed::{Named, Noted, Outcome};
use crate::contract::first_lint;
use crate::rule::{lint, require, rules};
use crate::{Cann, DType, Dims, Soc, Target, TensorDesc, Violation};

rules! {
    in Scope::ALL;
    REQUIRED = "batch_mat_mul.required", PARAM_NULLPTR, V1, "BatchMatMul documentation, return values",
        "self, mat2 and out are given",
        "pass both factors and an output";
    PRODUCT = "batch_mat_mul.product", FIND_KERNEL_ERROR, V1, "BatchMatMul documentation, products",
        "the product has the operator",
        "run on Atlas A2, Atlas A3, Ascend 950, 310P or 910A";
    DTYPE = "batch_mat_mul.dtype", PARAM_INVALID, V1, "BatchMatMul documentation, self, mat2 and out",
        "self, mat2 and out are FLOAT16 or FLOAT, or BF16 on other products than 310P and 910A",
        "convert factors and output to one of the allowed dtypes";
    MATH_TYPE = "batch_mat_mul.cube_math_type", PARAM_INVALID, V1, "BatchMatMul documentation, cubeMathType",
        "cubeMathType is 0, 1, 2 or 3",
        "ask for 0 (KEEP_DTYPE), 1 (ALLOW_FP32_DOWN_PRECISION), 2 (USE_FP16) or 3 (USE_HF32)";
    FLOAT_UNITS = "batch_mat_mul.float_units", PARAM_INVALID, V1, "BatchMatMul documentation, cubeMathType",
        "factors of FLOAT come with cubeMathType 1 or 2 on 310P and 910A, which multiply FLOAT16 alone",
        "let FLOAT be multiplied as FLOAT16 by cubeMathType 1";
    RANK = "batch_mat_mul.rank", PARAM_INVALID, V1, "BatchMatMul documentation, return values",
        "self, mat2 and out have 3 axes",
        "describe a single matrix with a first axis of 1";
    REDUCED = "batch_mat_mul.reduced_axis", PARAM_INVALID, V1, "BatchMatMul documentation, return values",
        "the last axis of self is as long as the middle one of mat2",
        "transpose the factor whose axes are the other way round";
    BATCH = "batch_mat_mul.batch", PARAM_INVALID, V1, "BatchMatMul documentation, function",
        "the first axes of self and mat2 are of the same length, or one of them is of length 1",
        "give as many matrices on both sides, or one that serves all";
    OUT_SHAPE = "batch_mat_mul.out_shape", PARAM_INVALID, V1, "BatchMatMul documentation, function",
        "out is [max(A, B), M, N] for self [A, M, K] and mat2 [B, K, N]",
        "describe the output with the shape of the products";
    FORMAT = "batch_mat_mul.format", PARAM_INVALID, V1, "BatchMatMul documentation, return values",
        "tensors are in a plain format such as ND or NCL, with dimensions of at least 0 whose bytes can be addressed",
        "describe the tensor as ND, with a shape that memory can hold";
    MIXED = "batch_mat_mul.mixed_dtypes",
        Lint("one factor is converted, to a type that the releases do not agree on"),
        V1, "BatchMatMul documentation, constraints",
        "self and mat2 are of one dtype, or FLOAT and FLOAT16",
        "convert both factors to one dtype";
    OUT_DTYPE = "batch_mat_mul.out_dtype", Lint("the product is converted"), V1, "BatchMatMul documentation, out",
        "out is of the dtype of both factors, of FLOAT for two dtypes, on Ascend 950 perhaps of FLOAT for any",
        "take an output of the factors' dtype";
    IGNORED = "batch_mat_mul.ignored_cube_math_type",
        Lint("the numbers are multiplied as they are, or as FLOAT16"), V1, "BatchMatMul documentation, cubeMathType",
        "cubeMathType 2 (USE_FP16) comes without BF16, and 3 (USE_HF32) with FLOAT",
        "ask for 0 (KEEP_DTYPE)";
    EMPTY = "batch_mat_mul.empty_batch",
        Overrun("a factor without memory may be read"), V1, "BatchMatMul tiling, shapes",
        "no factor without matrices stands beside one with a matrix: the output has room for one product, which \
         nothing computes",
        "leave the call out where there is nothing to compute";
}

/// The dtypes that a product multiplies.
fn dtypes(soc: Soc) -> &'static [DType] {
    match multiplies_float(soc) {
        true => &[Float16, Float, Bf16],
        false => &[Float16, Float],
    }
}

/// Whether the product's cube units take more than FLOAT16.
fn multiplies_float(soc: Soc) -> bool {
    !matches!(soc, Soc::AtlasInference | Soc::AtlasTraining)
}

impl BatchMatMulCall {
    /// Checks the call against the contract of the operator on `soc`, and resolves it.
    ///
    /// Allocates nothing unless it refuses.
    ///
    /// # Errors
    /// [`Violation`] by the first broken rule.
    pub fn check(&self, soc: Soc) -> Result<BatchMatMulProblem, Violation> {
        let left = REQUIRED.requires(self.self_, "self")?;
        let right = REQUIRED.requires(self.mat2, "mat2")?;
        let out = REQUIRED.requires(self.out, "out")?;
        require!(
            Version::V1.runs_on(Target::with_default(soc, Cann::V9_1)),
            PRODUCT,
            soc,
            "Atlas A2, Atlas A3, Ascend 950, 310P and 910A",
        );
        let allowed = dtypes(soc);
        for (argument, desc) in self.each_tensor() {
            DTYPE.takes(Named(argument.acl_name(), desc.dtype), allowed)?;
        }
        MATH_TYPE.takes(self.cube_math_type, KEEP_DTYPE..=USE_HF32)?;
        let float = left.dtype == Float || right.dtype == Float;
        require!(
            multiplies_float(soc) || !float || !matches!(self.cube_math_type, KEEP_DTYPE | USE_HF32),
            FLOAT_UNITS,
            format_args!("{} and {} with cubeMathType {}", left.dtype, right.dtype, self.cube_math_type),
            "1 (ALLOW_FP32_DOWN_PRECISION) or 2 (USE_FP16)",
        );
        let [a, m, k] = axes(&left, "self")?;
        let [b, height, n] = axes(&right, "mat2")?;
        axes(&out, "out")?;
        require!(
            k == height,
            REDUCED,
            format_args!("{} and {}", left.shape, right.shape),
            format_args!("mat2 [{b}, {k}, {n}]"),
        );
        require!(
            a == b || a == 1 || b == 1,
            BATCH,
            format_args!("{} and {}", left.shape, right.shape),
            format_args!("mat2 [{a}, {k}, {n}] or [1, {k}, {n}]"),
        );
        let product = Dims::of([a.max(b), m, n]);
        OUT_SHAPE.takes(Noted(out.shape, format_args!("for {} and {}", left.shape, right.shape)), product)?;
        FORMAT.formats(self)?;
        let size = |dim: i64| usize::try_from(dim).unwrap_or(0);
        Ok(BatchMatMulProblem {
            batch: match a == 0 || b == 0 {
                true => 0,
                false => size(a.max(b)),
            },
            rows: size(m),
            inner: size(k),
            columns: size(n),
        })
    }

    /// The first lint that the call, which holds every rule, breaks, leaving out those in `allowed` (by id).
    ///
    /// # Errors
    /// The broken lint, with the same fields as a broken rule.
    pub fn lint(&self, soc: Soc, allowed: &[&str]) -> Result<(), Violation> {
        let (Some(left), Some(right), Some(out)) = (self.self_, self.mat2, self.out) else {
            return Ok(());
        };
        let both = [left.dtype, right.dtype];
        let mixed = left.dtype != right.dtype;
        let promoted = if mixed { Float } else { left.dtype };
        let wide = soc == Soc::Ascend950 && out.dtype == Float;
        let ignored = match self.cube_math_type {
            USE_FP16 => both.contains(&Bf16),
            USE_HF32 => !both.contains(&Float),
            _ => false,
        };
        let entries = [left, right].map(|desc| desc.shape.first().copied());
        first_lint(allowed, |report| {
            lint!(
                report,
                !mixed || !both.contains(&Bf16),
                MIXED,
                format_args!("{} and {}", left.dtype, right.dtype),
                "one dtype, or FLOAT and FLOAT16",
            );
            if !wide {
                let note = format_args!("for {} and {}", left.dtype, right.dtype);
                OUT_DTYPE.takes(Noted(out.dtype, note), promoted).report(report);
            }
            lint!(
                report,
                !ignored,
                IGNORED,
                format_args!("{} for {} and {}", self.cube_math_type, left.dtype, right.dtype),
                "0 (KEEP_DTYPE) or 1 (ALLOW_FP32_DOWN_PRECISION)",
            );
            lint!(
                report,
                entries[0] == entries[1] || !entries.contains(&Some(0)),
                EMPTY,
                format_args!("{} and {}", left.shape, right.shape),
                "as many matrices on both sides",
            );
        })
    }
}

/// The three axes of a tensor.
fn axes(desc: &TensorDesc, name: &str) -> Result<[i64; 3], Violation> {
    <[i64; 3]>::try_from(&desc.shape[..]).map_err(|_| RANK.broken(format_args!("{name} {}", desc.shape), "3 axes"))
}
