//! The rules of AttentionUpdate.

use super::{UpdateCall, UpdateProblem};
use crate::allowed::{Multiples, Noted};
use crate::dtype::Names;
use crate::ops::attention_update::Version;
use crate::rule::{require, rules};
use crate::{Cann, DType, Dims, Scope, Span, Target, TensorDesc, Violation};

rules! {
    in Scope::ALL;
    REQUIRED = "update.required", PARAM_NULLPTR, V1, "AttentionUpdate documentation, return values",
        "lse, localOut and out are given",
        "pass lists of 1 to 16 tensors and an output";
    PRODUCT = "update.product", FIND_KERNEL_ERROR, V1, "AttentionUpdate documentation, products",
        "the product has the operator",
        "run on Atlas A2, Atlas A3 or Ascend 950";
    COUNT = "update.count", PARAM_INVALID, V1, "AttentionUpdate documentation, lse",
        "lse and localOut have as many tensors, 1 to 16",
        "merge more parts in several calls";
    KIND = "update_type.known", PARAM_INVALID, V1, "AttentionUpdate documentation, updateType",
        "updateType is 0 or 1",
        "ask for 0, the attention alone, or 1, the log-sum-exps too";
    LSE_DTYPE = "update.lse_dtype", PARAM_INVALID, V1, "AttentionUpdate documentation, lse",
        "every lse and lseOut is FLOAT",
        "convert the log-sum-exps to FLOAT";
    OUT_DTYPE = "update.local_out_dtype", PARAM_INVALID, V1, "AttentionUpdate documentation, localOut",
        "every localOut and out is FLOAT, FLOAT16 or BF16, all the same",
        "convert all parts and the output to one of the allowed dtypes";
    FORMAT = "update.format", PARAM_INVALID, V1, "AttentionUpdate documentation, formats",
        "every tensor is in a plain format such as ND or NCHW, with dimensions of at least 0 whose bytes can be \
         addressed",
        "describe the tensor as ND, with a shape that memory can hold";
    OUT_SHAPE = "update.local_out_shape", PARAM_INVALID, V1, "AttentionUpdate documentation, localOut",
        "every localOut and out is [rows, D], all the same",
        "flatten batch, heads and sequence into one axis, the same for all";
    DIM = "update.head_dim", PARAM_INVALID, V1, "AttentionUpdate documentation, localOut",
        "D is a multiple of 8 from 8 to 512",
        "merge on the host, or pad the head dimension";
    LSE_SHAPE = "update.lse_shape", PARAM_INVALID, V1, "AttentionUpdate documentation, lse",
        "every lse and lseOut is [rows], with the rows of localOut",
        "flatten the log-sum-exps in the order of the rows";
    LSE_OUT = "update.lse_out", PARAM_INVALID, V1, "AttentionUpdate documentation, lseOut",
        "lseOut is given with updateType 1 and only then",
        "give lseOut exactly when updateType is 1";
    EMPTY_ROW = "update.empty_row", Lint("only numbers change"), V1, "AttentionUpdate documentation, formula",
        "each row has keys in a part: where every log-sum-exp is infinite, the formula has no other result than NaN",
        "leave rows out that no part has keys for, or fill them with zeros afterwards";
    INFINITE = "update.infinite_lse", Lint("only numbers change"), V1, "AttentionUpdate kernel, lse" in BEFORE_REPLACED,
        "no log-sum-exp is +inf, with which attention marks a row without keys: the formula makes NaN of it",
        "replace +inf by -inf; A2 and A3 do from CANN 8.5 on, Ascend 950 from 9.1 on";
}

/// The releases whose kernel uses log-sum-exps as they are. The kernels of other releases replace +inf by -inf before
/// they search for the largest.
const BEFORE_REPLACED: Scope = Scope {
    a2_a3: Some(Span { since: Cann::V8_1, until: Some(Cann::V8_1) }),
    ascend950: Some(Span { since: Cann::V9_0, until: Some(Cann::V9_0) }),
};

impl UpdateCall<'_> {
    /// Largest number of parts that one call merges.
    pub const MAX_PARTS: usize = 16;

    /// Checks the call against the contract of the operator on `target`, and resolves it.
    ///
    /// Allocates nothing unless it refuses.
    ///
    /// # Errors
    /// [`Violation`] by the first broken rule, or [`UNSUPPORTED`](crate::UNSUPPORTED) for strided outputs, which the
    /// documents do not describe. Inputs may be strided: serving systems pass parts of tensors that hold attention
    /// and log-sum-exps side by side.
    pub fn check(&self, target: Target) -> Result<UpdateProblem, Violation> {
        let (lse, local, out) = self.required()?;
        require!(
            Version::V1.runs_on(Target::snapshot(target.soc)),
            PRODUCT,
            target.soc,
            "Atlas A2, Atlas A3 and Ascend 950",
        );
        require!(
            self.lse.len() == self.local_out.len() && self.lse.len() <= Self::MAX_PARTS,
            COUNT,
            format_args!("{} lse and {} localOut", self.lse.len(), self.local_out.len()),
            "the same number of both, 1 to 16",
        );
        KIND.takes(self.update_type, [0, 1])?;
        let writes_lse = self.update_type == 1;
        require!(
            self.lse_out.is_some() == writes_lse,
            LSE_OUT,
            format_args!(
                "{} with updateType {}",
                if self.lse_out.is_some() { "lseOut" } else { "no lseOut" },
                self.update_type
            ),
            "lseOut with updateType 1, null with 0",
        );
        FORMAT.formats(self)?;
        self.dtypes(local)?;
        let (rows, dim) = shape(local)?;
        for desc in self.local_out.iter().chain(&self.out) {
            OUT_SHAPE.takes(Noted(desc.shape, format_args!("beside {}", local.shape)), local.shape)?;
        }
        DIM.takes(dim, Multiples(8, ..=512))?;
        for desc in self.lse.iter().chain(&self.lse_out) {
            LSE_SHAPE.takes(Noted(desc.shape, format_args!("for {} {}", local.shape, lse.dtype)), Dims::of([rows]))?;
        }
        let mut outputs = self.out.iter().chain(&self.lse_out);
        if outputs.any(|desc| !desc.is_contiguous()) {
            return Err(Violation::unsupported("a strided output of aclnnAttentionUpdate"));
        }
        let size = |dim: i64| usize::try_from(dim).unwrap_or(usize::MAX);
        Ok(UpdateProblem {
            parts: self.lse.len(),
            rows: size(rows),
            dim: size(dim),
            dtype: out.dtype,
            writes_lse,
            infinity_is_empty: !INFINITE.scope.holds(target),
        })
    }

    /// The required tensors: first log-sum-exp, first part, output.
    fn required(&self) -> Result<(&TensorDesc, &TensorDesc, &TensorDesc), Violation> {
        Ok((
            REQUIRED.requires(self.lse.first(), "lse")?,
            REQUIRED.requires(self.local_out.first(), "localOut")?,
            REQUIRED.requires(self.out.as_ref(), "out")?,
        ))
    }

    fn dtypes(&self, local: &TensorDesc) -> Result<(), Violation> {
        for desc in self.lse.iter().chain(&self.lse_out) {
            LSE_DTYPE.takes(desc.dtype, DType::Float)?;
        }
        const ALLOWED: &[DType] = &[DType::Float, DType::Float16, DType::Bf16];
        for desc in self.local_out.iter().chain(&self.out) {
            require!(
                ALLOWED.contains(&desc.dtype) && desc.dtype == local.dtype,
                OUT_DTYPE,
                format_args!("{} beside {}", desc.dtype, local.dtype),
                Names(ALLOWED),
            );
        }
        Ok(())
    }
}

fn shape(local: &TensorDesc) -> Result<(i64, i64), Violation> {
    match local.shape[..] {
        [rows, dim] => Ok((rows, dim)),
        _ => Err(OUT_SHAPE.broken(local.shape, "[rows, D]")),
    }
}
