//! Quantised keys and values under a half-precision query on Ascend 950.

use super::{OUT_DTYPE, UNUSED};
use crate::allowed::Noted;
use crate::ops::fused_infer_attention_score::rules::Facts;
use crate::ops::fused_infer_attention_score::{FiaCall, Version};
use crate::rule::{require, rules};
use crate::{DType, Dims, TensorDesc, Violation};

rules! {
    in Scope::ASCEND_950;
    SCALES = "antiquant.split_scales", TILING_ERROR, V5, "Ascend 950, antiquantisation",
        "quantised keys have keyAntiquantScale and valueAntiquantScale",
        "pass the scale of the keys and that of the values: the merged antiquantScale is gone";
    OFFSETS = "antiquant.split_offsets", TILING_ERROR, V5, "Ascend 950, antiquantisation",
        "offsets come for key and value or for neither, each of its scale's shape and dtype, and with INT8 and INT4 \
         keys alone",
        "pass both offsets, shaped as their scales, or none";
    MODES = "antiquant.modes_of_dtype", TILING_ERROR, V5, "Ascend 950, antiquantisation, modes",
        "the modes of key and value are one, or 0 and 1, and one that the dtype of the keys has",
        "use mode 0 or 1 for INT8, INT4 and FLOAT8_E4M3FN, 0 for HIFLOAT8, 6 for FLOAT4_E2M1";
    SCALE_DTYPE = "antiquant.dtype_of_mode", TILING_ERROR, V5, "Ascend 950, antiquantisation, modes",
        "scales have the dtype of their mode: FLOAT for tokens, FLOAT8_E8M0 for groups, else the query's",
        "convert the scales";
    SCALE_SHAPE = "antiquant.shape_of_mode", TILING_ERROR, V5, "Ascend 950, antiquantisation, modes",
        "scales have the shape of their mode",
        "shape the scales by heads and head dimension (0), batch and keys (1, 3), heads (2), blocks (4, 5) or groups \
         (6)";
    ROWS = "antiquant.rows", TILING_ERROR, V5, "Ascend 950, K1 and K2",
        "several query rows over INT4 keys are not taken; over INT8 keys they are at most 16, BF16, with modes 0 or 1 \
         of dense keys and no left padding",
        "split the rows, or use FLOAT8_E4M3FN keys";
    ALONE = "antiquant.alone", TILING_ERROR, V5, "Ascend 950, K5 and antiquantisation",
        "quantised keys go with no rotary parts, no head dimensions that differ, no sink, and with a shared prefix \
         only for integer keys whose modes have one",
        "drop the argument, or dequantise the keys";
}

pub(super) fn check(f: &Facts<'_>) -> Result<(), Violation> {
    let call = f.call;
    ALONE.forbids([
        ("rotary parts", f.rope()),
        ("head dimensions that differ", f.q.dim != f.v.dim),
        ("learnableSink", call.learnable_sink.is_some()),
    ])?;
    require!(
        call.antiquant_scale.is_none() && call.antiquant_offset.is_none() && call.antiquant_mode == 0,
        UNUSED,
        "antiquantScale, antiquantOffset or antiquantMode",
        "keyAntiquantScale and valueAntiquantScale",
    );
    let (Some(key), Some(value)) = (&call.key_antiquant_scale, &call.value_antiquant_scale) else {
        return Err(SCALES.broken("not both", "both scales"));
    };
    let modes = (call.key_antiquant_mode, call.value_antiquant_mode);
    require!(
        takes(f, modes),
        MODES,
        format_args!("{} and {} with {} keys", modes.0, modes.1, f.kv_dtype()),
        "0, 1 or 6, by the dtype of the keys",
    );
    scale(f, key, modes.0)?;
    scale(f, value, modes.1)?;
    require!(
        modes.0 != modes.1 || key.shape == value.shape,
        SCALE_SHAPE,
        format_args!("key {}, value {}", key.shape, value.shape),
        "one shape",
    );
    offsets(f, [key, value])?;
    rows(f, modes)?;
    prefix(f, modes)?;
    output(f, modes)
}

/// Whether keys of this dtype take these modes.
fn takes(f: &Facts<'_>, modes: (i64, i64)) -> bool {
    let tensor = |scale: &Option<TensorDesc>| scale.as_ref().is_some_and(|scale| *scale.shape == [1]);
    // A single factor for all of the keys is for INT8 alone.
    let whole = tensor(&f.call.key_antiquant_scale) && modes.0 == 0 && !channel(f, &[1]);
    match (f.kv_dtype(), modes) {
        (DType::Int8, (0, 1)) => f.query.dtype == DType::Float16 && f.out.dtype == DType::Float16,
        (DType::Int4, (0, 1)) => !whole,
        (DType::Int8, (key, value)) => key == value && (0..=5).contains(&key),
        (DType::Int4, (key, value)) => key == value && matches!(key, 0 | 1 | 3) && !whole,
        (DType::Float8E4M3Fn, (key, value)) => key == value && matches!(key, 0 | 1 | 4) && !whole,
        (DType::HiFloat8, modes) => modes == (0, 0) && !whole,
        (DType::Float4E2M1, modes) => modes == (6, 6),
        _ => false,
    }
}

/// Whether a shape has one factor for each head and dimension.
fn channel(f: &Facts<'_>, shape: &[i64]) -> bool {
    let (n, d) = (f.kv_heads, f.k.dim);
    let h = n.saturating_mul(d);
    match *shape {
        [all] => all == h,
        [1, all] if all == h => true,
        [heads, dim] => (heads, dim) == (n, d),
        [1, heads, dim] | [heads, 1, dim] if (heads, dim) == (n, d) => true,
        [1, heads, 1, dim] | [1, 1, heads, dim] => (heads, dim) == (n, d),
        _ => false,
    }
}

fn scale(f: &Facts<'_>, scale: &TensorDesc, mode: i64) -> Result<(), Violation> {
    let dtype = match mode {
        1 | 3 | 4 | 5 => DType::Float,
        6 => DType::Float8E8M0,
        _ => f.query.dtype,
    };
    SCALE_DTYPE.takes(Noted(scale.dtype, format_args!("for mode {mode}")), dtype)?;
    let (n, d, b) = (f.kv_heads, f.k.dim, f.batch);
    let keys = match f.packed() && !f.paged() {
        true => f.longest_key(),
        false => f.key_rows,
    };
    let (bn, bs) = (f.blocks(), f.call.block_size);
    let shape = &scale.shape;
    let fits = match mode {
        0 => channel(f, shape) || (**shape == [1] && f.kv_dtype() == DType::Int8),
        1 => matches!(shape[..], [rows, s] | [1, rows, s] if rows == b && s >= keys),
        2 => **shape == [n],
        3 => matches!(shape[..], [rows, heads, s] if (rows, heads) == (b, n) && s >= keys),
        4 => f.paged() && *shape == Dims::of([bn, bs]),
        5 => f.paged() && *shape == Dims::of([bn, n, bs]),
        _ => {
            matches!(shape[..], [1, rows, heads, s, groups]
                if (rows, heads, groups) == (b, n, d / 32) && s >= keys)
        }
    };
    require!(
        fits,
        SCALE_SHAPE,
        format_args!("{shape} for mode {mode}"),
        format_args!(
            "0 [{n}, {d}] and its other forms, for INT8 also [1]; 1 [{b}, {keys}]; 2 [{n}]; 3 [{b}, {n}, {keys}]; 4 \
             [{bn}, {bs}]; 5 [{bn}, {n}, {bs}]; 6 [1, {b}, {n}, {keys}, {}]",
            d / 32
        ),
    );
    Ok(())
}

fn offsets(f: &Facts<'_>, scales: [&TensorDesc; 2]) -> Result<(), Violation> {
    let call = f.call;
    let offsets = [&call.key_antiquant_offset, &call.value_antiquant_offset];
    let integer = matches!(f.kv_dtype(), DType::Int8 | DType::Int4);
    let given = offsets.iter().filter(|offset| offset.is_some()).count();
    let alike = offsets.into_iter().zip(scales).all(|(offset, scale)| {
        offset.as_ref().is_none_or(|offset| offset.shape == scale.shape && offset.dtype == scale.dtype)
    });
    require!(
        given == 0 || (given == 2 && integer && alike),
        OFFSETS,
        format_args!("{given} offsets with {} keys", f.kv_dtype()),
        "none, or two like their scales",
    );
    Ok(())
}

fn rows(f: &Facts<'_>, modes: (i64, i64)) -> Result<(), Violation> {
    let rows = f.most_rows();
    if rows <= 1 {
        return Ok(());
    }
    let unmet = match f.kv_dtype() {
        DType::Int4 => Some(("more than one", "1 row")),
        DType::Int8 => {
            let bf16 = |desc: &TensorDesc| desc.dtype == DType::Bf16;
            let conditions = [
                (
                    matches!(modes, (0, 0) | (1, 1)),
                    "other modes than 0 or 1 of both",
                    "modes 0 or 1 of key and value alike",
                ),
                (bf16(f.query), "a query of another dtype", "a BF16 query"),
                (bf16(f.out), "an output of another dtype", "a BF16 output"),
                (rows <= FiaCall::MOST_DECODE_ROWS, "too many of them", "at most 16 rows"),
                (!f.paged(), "a block table", "dense keys"),
                (!f.kv_list, "a tensor list", "one key and one value"),
                (!crate::ops::fused_infer_attention_score::rules::padding::given(f), "left padding", "no left padding"),
            ];
            let unmet = conditions.into_iter().find(|(holds, ..)| !holds);
            unmet.map(|(_, given, allowed)| (given, allowed))
        }
        _ => None,
    };
    let Some((given, allowed)) = unmet else {
        return Ok(());
    };
    let keys = f.kv_dtype();
    Err(ROWS.broken(format_args!("{rows} rows over {keys} keys with {given}"), allowed))
}

fn prefix(f: &Facts<'_>, modes: (i64, i64)) -> Result<(), Violation> {
    if f.call.key_shared_prefix.is_none() {
        return Ok(());
    }
    let whole = (f.call.key_antiquant_scale.as_ref()).is_some_and(|scale| *scale.shape == [1]);
    let fits = match (f.kv_dtype(), f.most_rows()) {
        (DType::Int8, 1) => true,
        (DType::Int8, _) => matches!(modes, (0, 0) | (1, 1)),
        (DType::Int4, 1) => !(modes.0 == 0 && whole),
        _ => false,
    };
    require!(fits, ALONE, format_args!("a shared prefix with {} keys of modes {modes:?}", f.kv_dtype()), "none",);
    Ok(())
}

fn output(f: &Facts<'_>, modes: (i64, i64)) -> Result<(), Violation> {
    let kv = f.kv_dtype();
    let quantised = f.out.dtype == kv
        && matches!(kv, DType::Int8 | DType::HiFloat8 | DType::Float8E4M3Fn)
        && !(kv == DType::Float8E4M3Fn && matches!(modes, (1, 1) | (4, 4)));
    require!(
        f.out.dtype == f.query.dtype || quantised,
        OUT_DTYPE,
        format_args!("{} with {kv} keys of modes {modes:?}", f.out.dtype),
        f.query.dtype,
    );
    Ok(())
}
