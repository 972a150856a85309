//! Types of query, key, value and output.

use crate::dtype::Names;
use crate::ops::flash_attention_score::Version;
use crate::ops::flash_attention_score::facts::Required;
use crate::rule::{require, rules};
use crate::{DType, Violation};

rules! {
    in Scope::ALL;
    DTYPE = "flash.dtype", PARAM_INVALID, V1, "FlashAttentionScore documentation, query, key and value",
        "query, key and value are FLOAT16, BF16 or FLOAT, all the same",
        "convert the three to one of the allowed dtypes";
    OUT_DTYPE = "flash.out_dtype", PARAM_INVALID, V2, "FlashAttentionScoreV2 documentation, attentionOutOut",
        "attentionOutOut has the dtype of the query",
        "convert the output afterwards";
}

/// The types that the operator computes with.
const ALLOWED: &[DType] = &[DType::Float16, DType::Bf16, DType::Float];

pub(crate) fn inputs(at: &Required<'_>) -> Result<(), Violation> {
    let dtype = at.query.dtype;
    require!(
        ALLOWED.contains(&dtype) && at.key.dtype == dtype && at.value.dtype == dtype,
        DTYPE,
        format_args!(
            "query {dtype}, key {}, value {}",
            at.key.dtype, at.value.dtype
        ),
        format_args!("all of {}", Names(ALLOWED)),
    );
    Ok(())
}

/// Checks the output's type in the versions that compare it before anything is inferred.
pub(crate) fn output(version: Version, at: &Required<'_>) -> Result<(), Violation> {
    let compares = matches!(version, Version::V2 | Version::V3 | Version::V4);
    require!(
        !compares || at.attention_out.dtype == at.query.dtype,
        OUT_DTYPE,
        at.attention_out.dtype,
        at.query.dtype,
    );
    Ok(())
}
