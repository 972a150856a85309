//! Head counts and head dimensions.

use super::Facts;
use crate::allowed::{DivisorsOf, Outcome, Shown};
use crate::ops::fused_infer_attention_score::{Cache, FiaCall, Parameter, Version};
use crate::rule::{require, rules};
use crate::{Axes, Change, DType, Rule, TensorDesc, Violation};

rules! {
    in Scope::A2_A3;
    HEADS_MAX = "num_heads.max", TILING_ERROR, V1, "check D1",
        "numHeads is at most 256 in the prefill path",
        "split the heads over several calls";
    KV_HEADS = "num_key_value_heads.range", TILING_ERROR, V1, "checks D1, F2" in Scope::ALL,
        "numKeyValueHeads is 0 (meaning numHeads) or from 1 to numHeads, at most 256",
        "set numKeyValueHeads to the key's number of heads";
    HEADS_DIVIDE = "num_key_value_heads.divides", TILING_ERROR, V1, "checks D1, F2" in Scope::ALL,
        "numHeads divides by numKeyValueHeads",
        "every key head must serve the same number of query heads";
    GROUP_MAX = "num_key_value_heads.group", TILING_ERROR, V1, "checks D1, F2",
        "at most 64 query heads share one key head",
        "repeat the key heads, or split the query heads over several calls";
    HEADS_QUERY = "num_heads.query", TILING_ERROR, V1, "check D2" in Scope::ALL,
        "numHeads is the query's number of heads",
        "set numHeads to the query's number of heads";
    HEADS_KEY = "num_key_value_heads.key", TILING_ERROR, V1, "check D2" in Scope::ALL,
        "numKeyValueHeads is the number of heads of key and value",
        "correct numKeyValueHeads or the shapes of key and value";
    DIM_MAX = "head_dim.max", TILING_ERROR, V1, "checks B16, F2" in Scope::ALL,
        "the head dimension is at least 1 and at most 512",
        "check that D is the width of one head, in layouts such as BSH that of the axis divided by numHeads; no call "
        "of the operator computes longer heads, and parts of a head are no heads";
    DIM_EQUAL = "head_dim.equal", TILING_ERROR, V1, "check D14",
        "query, key and value have one head dimension",
        "pad the narrower tensors with zeros to one head dimension";
    DIM_ALIGNED = "head_dim.aligned", TILING_ERROR, V1, "checks C4, D12",
        "the head dimension is a multiple of 16 in the prefill path, of 32 with INT8 tensors",
        "pad the head dimension of query, key and value with zeros; the scale stays";
}

/// Number of heads of key and value; 0 stands for the number of query heads.
pub(crate) fn kv_heads(call: &FiaCall<'_>) -> i64 {
    match call.num_key_value_heads {
        0 => call.num_heads,
        heads => heads,
    }
}

/// Checks the number of query heads against the query.
pub(crate) fn query(f: &Facts<'_>) -> Result<(), Violation> {
    let heads = f.call.num_heads;
    HEADS_QUERY
        .takes(Shown(format_args!("numHeads {heads} with {} heads in the query", f.q.heads), heads), f.q.heads)
        .fix(|| Change::set(Parameter::NumHeads, f.q.heads))
}

/// Checks the head counts of the attributes against each other and against the query.
pub(crate) fn counts(f: &Facts<'_>) -> Result<(), Violation> {
    query(f)?;
    let (heads, kv_heads) = (f.call.num_heads, f.kv_heads);
    require!(!f.prefill() || heads <= 256, HEADS_MAX, heads, "1 to 256",);
    KV_HEADS.takes(Shown(f.call.num_key_value_heads, kv_heads), 1..=heads.min(256)).fix(|| own_heads(f, &KV_HEADS))?;
    HEADS_DIVIDE
        .takes(Shown(format_args!("{heads} query heads over {kv_heads}"), kv_heads), DivisorsOf(heads))
        .fix(|| own_heads(f, &HEADS_DIVIDE))?;
    require!(
        f.absorbed() || heads / kv_heads <= 64,
        GROUP_MAX,
        format_args!("{} query heads a key head", heads / kv_heads),
        "at most 64",
    );
    Ok(())
}

/// Checks the heads of dense keys and values.
pub(crate) fn key_value(f: &Facts<'_>) -> Result<(), Violation> {
    for (desc, heads, name) in [(f.key, f.k.heads, "key"), (f.value, f.v.heads, "value")] {
        require!(
            heads == f.kv_heads,
            HEADS_KEY,
            format_args!("{name} {} with numKeyValueHeads {}", desc.shape, f.kv_heads),
            format_args!("{} heads in {} order", f.kv_heads, f.layout),
            match of_key(f) {
                Some(change) => Ok(change),
                None => Err(format!("correct numKeyValueHeads or the shape of {name}")),
            },
        );
    }
    Ok(())
}

/// The number of key heads in the shapes of key and value, if the number of query heads is a multiple of it.
pub(crate) fn of_key(f: &Facts<'_>) -> Option<Change> {
    let axes = f.layout.input();
    let heads_of = |desc: &TensorDesc| match (f.paged(), &desc.shape[..]) {
        (true, _) => Cache::heads(desc),
        (false, shape) if axes != Axes::Bsh => axes.extents(shape, 1).map(|extents| extents.heads),
        (false, _) => None,
    };
    let heads = heads_of(f.key)?;
    let fits = heads > 0
        && heads != f.kv_heads
        && Some(heads) == heads_of(f.value)
        && f.call.num_heads.checked_rem(heads) == Some(0);
    fits.then(|| Change::set(Parameter::NumKeyValueHeads, heads))
}

/// The fix for numKeyValueHeads: the key's own number of heads, otherwise the rule's fix.
pub(crate) fn own_heads(f: &Facts<'_>, rule: &'static Rule) -> Result<Change, &'static str> {
    of_key(f).ok_or(rule.fix)
}

/// Checks the head dimensions of query, key and value against each other.
pub(crate) fn equal_dims(f: &Facts<'_>) -> Result<(), Violation> {
    let (query, key, value) = (f.q.dim, f.k.dim, f.v.dim);
    require!(
        query == key && key == value,
        DIM_EQUAL,
        format_args!("query {query}, key {key}, value {value}"),
        format_args!("{query} three times"),
        packed_rows(f).unwrap_or(DIM_EQUAL.fix),
    );
    Ok(())
}

/// The fix for packed rows [T, N, D] that are passed with the layout BSH; `None` for other calls.
pub(crate) fn packed_rows(f: &Facts<'_>) -> Option<&'static str> {
    let rows = |desc: &TensorDesc, heads: i64| matches!(desc.shape[..], [_, n, _] if n == heads);
    let packed = f.layout.input() == Axes::Bsh
        && !f.paged()
        && f.query.shape.last() == f.key.shape.last()
        && rows(f.query, f.call.num_heads)
        && rows(f.key, f.kv_heads);
    packed.then_some(
        "pass inputLayout TND with the ends of the sequences in actualSeqLengths and actualSeqLengthsKv: packed rows \
         [T, N, D] are no [B, S, H]",
    )
}

/// The largest head dimension.
pub(crate) fn dim_max(f: &Facts<'_>) -> Result<(), Violation> {
    DIM_MAX.takes(f.q.dim, ..=512)
}

/// Size and alignment of the head dimension.
pub(crate) fn dim(f: &Facts<'_>) -> Result<(), Violation> {
    DIM_MAX.takes(f.q.dim, 1..=512)?;
    let int8 = [f.query.dtype, f.key.dtype, f.out.dtype].contains(&DType::Int8);
    let step = if int8 { 32 } else { 16 };
    require!(
        !f.prefill() || f.q.dim % step == 0,
        DIM_ALIGNED,
        format_args!("{} with {}", f.q.dim, f.layout),
        format_args!("multiples of {step} up to 512"),
    );
    Ok(())
}
