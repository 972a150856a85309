//! Numbers of heads, head dimensions, and sinks: one extra logit a head.

use super::entry::Required;
use crate::allowed::{MultiplesOf, Named, Noted};
use crate::ops::flash_attention_score::{FlashAttentionCall, FlashAttentionProblem, InputLayout, Version};
use crate::rule::{require, rules};
use crate::{DType, Dims, Violation};

rules! {
    in Scope::ALL;
    HEAD_NUM = "flash.head_num", PARAM_INVALID, V1, "FlashAttentionScore documentation, headNum",
        "headNum is at least 1",
        "pass the number of query heads";
    KEY_NARROW = "flash.key_narrow", NullptrCrash("by a division by zero"), V1, "FlashAttentionScore, heads of the key",
        "in BSH and SBH the key is as wide as one head of the query, whose width is H / headNum",
        "pass headNum as the number of query heads, and at least one head of the key";
    KEY_DIM = "flash.key_dim", PARAM_INVALID, V1, "FlashAttentionScore documentation, key",
        "query and key have the same head dimension",
        "pad the shorter head dimension with zeros";
    VALUE_DIM = "flash.value_dim", PARAM_INVALID, V1, "FlashAttentionScore documentation, value",
        "the head dimension of value is at most that of query",
        "pad the heads of query and key with zeros";
    DIM_MAX = "flash.head_dim_max", PARAM_INVALID, V1, "FlashAttentionScore documentation, head dimension",
        "the head dimension is at most 768",
        "check that D is the width of one head: no call of the operator computes longer heads, and parts of a head are "
        "no heads";
    HIDDEN = "flash.hidden_size", PARAM_NULLPTR, V1, "FlashAttentionScore tiling, shapes",
        "the hidden size of query is a multiple of headNum",
        "pass headNum as the number of query heads";
    QUERY_HEADS = "flash.query_heads", PARAM_NULLPTR, V1, "FlashAttentionScore tiling, shapes",
        "headNum is the number of query heads",
        "pass headNum as the number of query heads";
    GROUPS = "flash.head_groups", PARAM_NULLPTR, V1, "FlashAttentionScore tiling, shapes",
        "the heads of query are a multiple of those of key",
        "repeat heads of key and value, or pass headNum as the number of query heads";
    DIM_88 = "flash.head_dim_88", PARAM_NULLPTR, V1, "FlashAttentionScore tiling, padding of head dimension 88",
        "with as many heads of key as of query in BSH, SBH or BSND, heads of 88 have values of 72 or 88 once there are \
         more than 1024 keys (512 or more in FLOAT16 and BF16)",
        "pad the value to 88, or call with the layout BNSD";
    SINK_DTYPE = "flash.sink_dtype", PARAM_INVALID, V3, "FlashAttentionScoreV3 documentation, sinkOptional",
        "sink is FLOAT",
        "convert the sinks to FLOAT";
    SINK_DTYPE_SLOPES = "flash.sink_dtype_slopes", PARAM_NULLPTR, V3, "FlashAttentionScore tiling, sink",
        "beside slopes, too, sink is FLOAT",
        "convert the sinks to FLOAT";
    SINK_SHAPE = "flash.sink_shape", PARAM_NULLPTR, V3, "FlashAttentionScore tiling, sink",
        "sink is [N]",
        "pass one logit for each query head";
}

/// The largest head dimension.
const MOST_DIM: i64 = 768;

/// Head dimensions of query and value, and the number of key heads; 0 where the key has no heads.
#[derive(Clone, Copy, Debug)]
pub(crate) struct HeadDims {
    pub(crate) query: i64,
    pub(crate) value: i64,
    pub(crate) kv_heads: i64,
}

impl HeadDims {
    /// The sizes of these tensors, and the head dimension of the key. A size that cannot be divided counts as 0, or
    /// in key and value as the query's.
    pub(crate) fn of(
        layout: InputLayout,
        num_heads: i64,
        [query, key, value]: [&crate::TensorDesc; 3],
    ) -> (HeadDims, i64) {
        let last = layout.last_axis();
        let size = |desc: &crate::TensorDesc| desc.shape.get(last).copied().unwrap_or(0);
        if let Some(axis) = layout.head_axis() {
            let dims = HeadDims {
                query: size(query),
                value: size(value),
                kv_heads: key.shape.get(axis).copied().unwrap_or(0),
            };
            return (dims, size(key));
        }
        let dim = size(query).checked_div(num_heads).unwrap_or(0);
        let kv_heads = size(key).checked_div(dim).unwrap_or(0);
        let each = |hidden: i64| hidden.checked_div(kv_heads).unwrap_or(dim);
        let dims = HeadDims { query: dim, value: each(size(value)), kv_heads };
        (dims, each(size(key)))
    }
}

/// Checks `headNum`, before anything is divided by it.
pub(crate) fn head_num(num_heads: i64) -> Result<(), Violation> {
    HEAD_NUM.takes(num_heads, 1..)
}

/// Checks the head dimensions of query, key and value. Key and value may have any rank here.
pub(crate) fn dims(layout: InputLayout, num_heads: i64, required: &Required<'_>) -> Result<HeadDims, Violation> {
    let (dims, key) = HeadDims::of(layout, num_heads, [required.query, required.key, required.value]);
    require!(
        layout.head_axis().is_some()
            || dims.query == 0
            || dims.kv_heads > 0
            || required.key.is_empty()
            || required.value.is_empty(),
        KEY_NARROW,
        format_args!("key {} for heads of {}", required.key.shape, dims.query),
        format_args!("{} and more", dims.query),
    );
    KEY_DIM.takes(Named(format_args!("{} and", dims.query), key), dims.query)?;
    VALUE_DIM.takes(dims.value, ..=dims.query)?;
    DIM_MAX.takes(dims.query, ..=MOST_DIM)?;
    Ok(dims)
}

/// Checks the heads of tensors that have elements.
pub(crate) fn counts(p: &FlashAttentionProblem<'_>, required: &Required<'_>) -> Result<(), Violation> {
    let num_heads = p.call.num_heads;
    let size = |axis: usize| required.query.shape.get(axis).copied().unwrap_or(0);
    match p.layout.head_axis() {
        None => {
            let hidden = size(p.layout.last_axis());
            HIDDEN.takes(Noted(hidden, format_args!("for headNum {num_heads}")), MultiplesOf(num_heads))?;
        }
        // If packed sequences are run as a batch, the query is split into `headNum` heads.
        Some(axis) => require!(
            p.as_batch || size(axis) == num_heads,
            QUERY_HEADS,
            format_args!("headNum {num_heads} for query {}", required.query.shape),
            size(axis),
        ),
    }
    require!(
        p.kv_heads > 0 && num_heads % p.kv_heads == 0,
        GROUPS,
        format_args!("{num_heads} and {}", p.kv_heads),
        "a number of key heads that divides that of query heads",
    );
    let padded = matches!(p.layout, InputLayout::Bsh | InputLayout::Sbh | InputLayout::Bsnd);
    let most_keys = match required.query.dtype {
        DType::Float => 1024,
        _ => 511,
    };
    let only_value_is_padded = padded
        && p.kv_heads == num_heads
        && p.head_dim == 88
        && p.value_dim < 88
        && p.value_dim != 72
        && p.kv_rows > most_keys;
    require!(
        !only_value_is_padded,
        DIM_88,
        format_args!("value heads of {} and {} keys", p.value_dim, p.kv_rows),
        format_args!("72 or 88, or at most {most_keys} keys"),
    );
    Ok(())
}

/// Refuses packed sequences run as a batch whose query has another number of heads than `headNum`: the operator
/// splits the query into `headNum` heads whatever its shape.
pub(crate) fn computed(p: &FlashAttentionProblem<'_>, required: &Required<'_>) -> Result<(), Violation> {
    let heads = p.layout.head_axis().and_then(|axis| required.query.shape.get(axis));
    match heads.is_none_or(|&heads| heads == p.heads) {
        true => Ok(()),
        false => Err(Violation::unsupported(
            "a headNum that is not the number of heads of the query, which the operator does not compare where \
                      packed sequences of one length and of head dimension 128 fill their tensors",
        )),
    }
}

/// Refuses calls without keys whose query has another number of heads than `headNum`: the operator does not check it
/// then, and fills outputs by its own count.
pub(crate) fn computed_without_keys(p: &FlashAttentionProblem<'_>, required: &Required<'_>) -> Result<(), Violation> {
    let size = |axis: usize| required.query.shape.get(axis).copied().unwrap_or(0);
    let fits = match p.layout.head_axis() {
        Some(axis) => size(axis) == p.heads,
        None => size(p.layout.last_axis()).checked_rem(p.heads) == Some(0),
    };
    match fits {
        true => Ok(()),
        false => Err(Violation::unsupported(
            "a headNum that is not the number of heads of the query, which the operator does not compare without keys",
        )),
    }
}

/// Checks the type of the sinks, in calls where the operator checks it before anything is inferred.
pub(crate) fn sink_dtype(call: &FlashAttentionCall<'_>) -> Result<(), Violation> {
    if let Some(sink) = call.sinks() {
        SINK_DTYPE.takes(sink.dtype, DType::Float)?;
    }
    Ok(())
}

pub(crate) fn sinks(p: &FlashAttentionProblem<'_>) -> Result<(), Violation> {
    let Some(sink) = p.call.sinks() else {
        return Ok(());
    };
    SINK_DTYPE_SLOPES.takes(sink.dtype, DType::Float)?;
    SINK_SHAPE.takes(sink.shape, Dims::of([p.heads]))
}
