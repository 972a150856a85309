//! Rotary parts of query and key.

use super::entry::Required;
use super::layouts::lies_like;
use super::{Report, lint};
use crate::ops::flash_attention_score::{FlashAttentionCall, FlashAttentionProblem, InputLayout, Version};
use crate::rule::{require, rules};
use crate::{DType, Violation};

rules! {
    in Scope::ALL;
    PAIRED = "flash.rope_paired",
        PARAM_NULLPTR, VarLenV3, "FlashAttentionVarLenScoreV3 documentation, queryRope and keyRope",
        "queryRope and keyRope are both given, or neither",
        "pass both";
    DIM = "flash.rope_dim", PARAM_NULLPTR, VarLenV3, "FlashAttentionScore tiling, queryRope",
        "the rotary head dimension is at most that of query",
        "exchange the parts, or pad query and key with zeros";
    DTYPE = "flash.rope_dtype", PARAM_NULLPTR, VarLenV3, "FlashAttentionScore tiling, queryRope",
        "with rotary parts query, key, value and the parts are BF16",
        "convert all of them to BF16";
    MODE = "flash.rope_mode", PARAM_NULLPTR, VarLenV3, "FlashAttentionScore tiling, queryRope",
        "rotary parts do not go with mode 6",
        "append the rotary parts to query and key";
    MASK = "flash.rope_mask", PARAM_NULLPTR, VarLenV3, "FlashAttentionScore tiling, queryRope",
        "rotary parts come with a mask",
        "pass a mask, or append the rotary parts to query and key";
    ALONE = "flash.rope_alone", PARAM_NULLPTR, VarLenV3, "FlashAttentionScore tiling, queryRope",
        "rotary parts come without bias, dropMask and a keepProb below 1",
        "append the rotary parts to query and key";
    ALIGNED = "flash.rope_aligned", PARAM_NULLPTR, VarLenV3, "FlashAttentionScore tiling, queryRope",
        "with rotary parts the head dimensions of query and value are multiples of 16",
        "pad the heads with zeros, or append the rotary parts to query and key";
    ROWS = "flash.rope_rows",
        Lint("the rows behind are not looked at"), VarLenV3, "FlashAttentionScore tiling, queryRope",
        "queryRope has as many rows as query, and keyRope as many as key",
        "pass the rotary parts of the rows that query and key have";
}

/// Elements of BF16 to which head dimensions are padded.
const ALIGNMENT: i64 = 16;

pub(crate) fn check(
    layout: InputLayout,
    call: &FlashAttentionCall<'_>,
    required: &Required<'_>,
) -> Result<(), Violation> {
    let (query, key) = match (&call.query_rope, &call.key_rope) {
        (None, None) => return Ok(()),
        (Some(query), Some(key)) => (query, key),
        (Some(_), None) => {
            return Err(PAIRED.broken("queryRope alone", "both or neither"));
        }
        (None, Some(_)) => {
            return Err(PAIRED.broken("keyRope alone", "both or neither"));
        }
    };
    let last = layout.last_axis();
    let dim = |desc: &crate::TensorDesc| desc.shape.get(last).copied().unwrap_or(0);
    let most = dim(required.query);
    DIM.takes(dim(query), ..=most)?;
    let dtypes = [required.query, required.key, required.value, query, key].map(|desc| desc.dtype);
    let other = dtypes.into_iter().find(|&dtype| dtype != DType::Bf16);
    require!(other.is_none(), DTYPE, other.unwrap_or(DType::Bf16), DType::Bf16,);
    require!(call.sparse_mode != 6, MODE, call.sparse_mode, "0 to 4, 7, 8",);
    let masked = call.atten_mask.is_some_and(|mask| mask.shape.rank() > 0);
    require!(masked, MASK, "no mask", "a mask");
    require!(
        call.real_shift.is_none() && call.drop_mask.is_none() && call.keep_prob >= 1.0,
        ALONE,
        match () {
            () if call.real_shift.is_some() => "realShift",
            () if call.drop_mask.is_some() => "dropMask",
            () => "keepProb below 1",
        },
        "none of realShift, dropMask and keepProb below 1",
    );
    let dims = [most, dim(required.value)];
    require!(
        dims.iter().all(|dim| dim % ALIGNMENT == 0),
        ALIGNED,
        format_args!("{} and {}", dims[0], dims[1]),
        format_args!("multiples of {ALIGNMENT}"),
    );
    Ok(())
}

pub(crate) fn lints(p: &FlashAttentionProblem<'_>, report: Report<'_>) {
    let call = &p.call;
    for (part, whole, name) in [(&call.query_rope, &call.query, "queryRope"), (&call.key_rope, &call.key, "keyRope")] {
        let (Some(part), Some(whole)) = (part, whole) else {
            continue;
        };
        lint!(
            report,
            part.shape.first() == whole.shape.first(),
            ROWS,
            format_args!("{name} {} beside {}", part.shape, whole.shape),
            format_args!("{} rows", whole.shape.first().copied().unwrap_or(0)),
        );
    }
}

/// Refuses rotary parts whose rows and heads differ from those of query and key, which the operator does not compare.
pub(crate) fn computed(p: &FlashAttentionProblem<'_>, required: &Required<'_>) -> Result<(), Violation> {
    let (Some(query), Some(key)) = (&p.call.query_rope, &p.call.key_rope) else {
        return Ok(());
    };
    let (rows, keys) = p.sums().unzip();
    let fits = lies_like(p.layout, query, required.query, rows)
        && lies_like(p.layout, key, required.key, keys)
        && query.shape.last() == key.shape.last();
    match fits {
        true => Ok(()),
        false => Err(Violation::unsupported(
            "rotary parts of other rows, heads or head dimensions than those of query and key, which the operator \
                      does not compare",
        )),
    }
}
