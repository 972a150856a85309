//! Shared prefix.

use super::Facts;
use crate::layout::Extents;
use crate::ops::fused_infer_attention_score::{Parameter, Version};
use crate::rule::{require, rules};
use crate::{DType, TensorDesc, Violation};

rules! {
    in Scope::A2_A3;
    PAIR = "shared_prefix.pair", TILING_ERROR, V2, "check E5.3" in Scope::ALL,
        "keySharedPrefix and valueSharedPrefix are given together",
        "pass the prefix of key and value";
    SHAPE = "shared_prefix.shape", TILING_ERROR, V2, "check E5.3" in Scope::ALL,
        "both prefixes have batch 1, at least one row, and the heads and head dimension of key and value",
        "shape the prefixes as the keys, with batch 1";
    DTYPE = "shared_prefix.dtype", TILING_ERROR, V2, "checks A5, E5.3, J21" in Scope::ALL,
        "the prefixes have the key's dtype in the decode path",
        "convert the prefixes to the key's dtype";
    LENGTH = "shared_prefix.length", TILING_ERROR, V2, "checks E5.4, F4" in Scope::ALL,
        "actualSharedPrefixLen has one entry from 0 to the rows of the prefix",
        "pass the number of valid prefix rows";
    ALONE = "shared_prefix.alone", TILING_ERROR, V2, "check E5.5",
        "a shared prefix goes with no paging, left padding, packed layout, rotary parts, INT8 query, or in the prefill \
         path tensor list",
        "copy the prefix into each sequence's keys";
}

/// The extents of a shared prefix, whose INT32 hold eight INT4 each where those of key and value do.
pub(crate) fn extents(f: &Facts<'_>, prefix: &TensorDesc) -> Option<Extents> {
    let stored = f.layout.input().extents(&prefix.shape, f.kv_heads)?;
    let packed = if prefix.dtype == DType::Int32 { f.nibbles } else { 1 };
    Some(Extents { dim: stored.dim.saturating_mul(packed), ..stored })
}

/// The dtype of the elements of a shared prefix.
fn stored_dtype(f: &Facts<'_>, prefix: &TensorDesc) -> DType {
    if f.nibbles > 1 { super::unpacked(prefix.dtype) } else { prefix.dtype }
}

/// Checks the tensors of the shared prefix, and the length that is used.
pub(crate) fn check(f: &Facts<'_>) -> Result<(), Violation> {
    let call = f.call;
    let (Some(key), Some(value)) = (&call.key_shared_prefix, &call.value_shared_prefix) else {
        return PAIR.pairs(call, Parameter::SHARED_PREFIX);
    };
    ALONE.forbids([
        ("blockTable", f.paged()),
        ("a packed layout", f.packed()),
        ("rotary parts", f.rope()),
        ("an INT8 query", f.query.dtype == DType::Int8),
        ("a tensor list", f.prefill() && f.kv_list),
        ("left padding", f.prefill() && super::padding::given(f)),
    ])?;
    let fits = match (extents(f, key), extents(f, value)) {
        (Some(k), Some(v)) => {
            k.batch == 1
                && k.rows > 0
                && (k.heads, k.dim) == (f.k.heads, f.k.dim)
                && (v.batch, v.rows) == (1, k.rows)
                && (v.heads, v.dim) == (f.v.heads, f.v.dim)
        }
        _ => false,
    };
    require!(
        fits,
        SHAPE,
        format_args!("key prefix {}, value prefix {}", key.shape, value.shape),
        format_args!("batch 1, {} heads of {}, equal rows", f.k.heads, f.k.dim),
    );
    require!(
        f.prefill() || (stored_dtype(f, key) == f.kv_dtype() && key.dtype == value.dtype),
        DTYPE,
        format_args!("{} and {}", key.dtype, value.dtype),
        f.kv_dtype(),
    );
    if let Some(lengths) = call.actual_shared_prefix_len
        && !lengths.is_empty()
    {
        require!(
            matches!(lengths, &[len] if (0..=f.prefix).contains(&len)),
            LENGTH,
            crate::operator::Listed(lengths),
            format_args!("one entry from 0 to {}", f.prefix),
        );
    }
    Ok(())
}

/// The valid prefix length: `actualSharedPrefixLen`, or all rows without it.
pub(crate) fn length(f: &Facts<'_>) -> i64 {
    match f.call.actual_shared_prefix_len {
        Some(&[len]) if f.prefix > 0 => len.clamp(0, f.prefix),
        _ => f.prefix,
    }
}
