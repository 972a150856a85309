//! Quantised keys and values under a half-precision query.

use super::Facts;
use crate::ops::fused_infer_attention_score::{Cache, FiaCall, Parameter, Version};
use crate::rule::{require, rules};
use crate::{Cann, Change, DType, Dims, Layout, SparseMode, TensorDesc, Violation};

rules! {
    in Scope::A2_A3;
    UNUSED = "antiquant.unused", TILING_ERROR, V1, "checks F14c, J23",
        "antiquantisation tensors go with INT8 or INT4 keys",
        "drop the scales and offsets";
    SCALE = "antiquant.scale_required", TILING_ERROR, V1, "checks D4, F16",
        "INT8 and INT4 keys have antiquantScale, or keyAntiquantScale and valueAntiquantScale",
        "pass the scales of the quantised keys and values";
    PAIR = "antiquant.pair", TILING_ERROR, V2, "checks E6.1, F14c",
        "keyAntiquantScale and valueAntiquantScale are given together, their offsets too, and offsets only with scales",
        "pass the missing scale or offset";
    MODES = "antiquant.modes", TILING_ERROR, V1, "checks E6.1, F16",
        "the antiquantisation mode is one that the path takes, and the same for key and value except 0 and 1",
        "use one scheme for key and value: per-channel or per-tensor (0), or per-token (1) scales";
    SHAPE = "antiquant.scale_shape", TILING_ERROR, V1, "checks E6.2 to E6.4, F16",
        "the scale has the shape of its mode",
        "shape the scale by its mode";
    DTYPE = "antiquant.scale_dtype", TILING_ERROR, V1, "checks E6.2, F14c, F16",
        "the scale has the dtype of its mode",
        "convert the scale";
    OFFSET = "antiquant.offset_like_scale", TILING_ERROR, V1, "checks E6.3, F16",
        "an offset has the shape and dtype of its scale",
        "shape the offset as the scale";
    QUERY = "antiquant.query_dtype", TILING_ERROR, V1, "checks E6.2, J25, J26",
        "a merged antiquantScale in the prefill path goes with a FLOAT16 query",
        "use a FLOAT16 query and antiquantScale, or at most 16 query rows with split scales";
    PREFILL = "antiquant.prefill", TILING_ERROR, V1, "checks E6.2, E6.5, J24, J25",
        "quantised keys in the prefill path go with what that path offers for their number of query rows",
        "dequantise the cache, or call as that path offers";
    ALIGNED = "antiquant.head_dim", TILING_ERROR, V1, "check C4; X tiling, IncreFlashAttention",
        "the head dimension is a multiple of 64 with INT4 keys, and in the prefill path of 32 with INT8 keys",
        "pad the head dimension with zeros";
    PACKED = "antiquant.packed", TILING_ERROR, V1, "check J2",
        "packed queries over INT8 caches have innerPrecise 2",
        "use a layout with a batch axis";
    NZ_MODE = "antiquant.nz_sparse_mode", TILING_ERROR, V1, "check F20",
        "an NZ cache of INT8 keys takes mode 0 without a mask for single rows, mode 3 with the compressed mask for \
         several and for packed rows",
        "use mode 3 for several rows, mode 0 without a mask for one";
    NZ = "antiquant.nz_cache", TILING_ERROR, V1, "check F20",
        "without rotary parts an NZ cache is INT8 in runs of 32 under BF16 queries of head dimension 128 in BSH, BSND \
         or BNSD, with split scales alone, has innerPrecise 1, and writes no softmaxLse and no INT8 output",
        "use a BnBsH cache, or what an NZ cache goes with";
    PACKED_NZ = "antiquant.packed_nz", TILING_ERROR, V2, "INT8 NZ decode, packed rows" in Scope::A2_A3.since(V9_0),
        "packed rows over an NZ cache of INT8 keys are 1 to 16 a sequence, with per-channel scales",
        "use a layout with a batch axis, or per-channel scales";
    NULL_LENGTHS = "antiquant.packed_nz_null",
        TilingCrash("every host reads through the null pointer"),
        V2, "status codes, null lengths" in Scope::A2_A3.since(V9_0),
        "packed rows over an NZ cache of INT8 keys come with both length arrays and a block table",
        "pass all three: the operator reads each without looking";
    NZ_HEADS = "antiquant.nz_heads", TILING_ERROR, V1, "check F20" in Scope::A2_A3.until(V8_1),
        "before 8.5 an NZ cache of INT8 keys serves 10 heads over 1, 64 over 8, 80 over 8 or 128 over 16",
        "use a BnBsH cache";
    MIXED = "antiquant.mixed_modes",
        TILING_ERROR, V2, "check F16; FusedInferAttentionScore documentation, keyAntiquantMode",
        "per-channel keys beside values with a scale for each token are INT8 under a FLOAT16 query",
        "use one mode for key and value";
}

/// Prefill path: the arguments that a call may have when key and value are not quantised.
pub(crate) fn none_prefill(f: &Facts<'_>) -> Result<(), Violation> {
    let call = f.call;
    require!(
        f.packed() || (call.key_antiquant_scale.is_none() && call.value_antiquant_scale.is_none()),
        UNUSED,
        format_args!("keyAntiquantScale with {} keys", f.key.dtype),
        "none",
    );
    Ok(())
}

/// Head dimensions of the decode path, which takes INT8 keys of any.
pub(crate) fn decode_dim(f: &Facts<'_>) -> Result<(), Violation> {
    require!(
        f.kv_dtype() != DType::Int4 || f.q.dim % 64 == 0,
        ALIGNED,
        f.q.dim,
        "multiples of 64",
    );
    Ok(())
}

/// Prefill path with quantised keys.
pub(crate) fn prefill(f: &Facts<'_>) -> Result<(), Violation> {
    let call = f.call;
    let step = if f.kv_dtype() == DType::Int4 { 64 } else { 32 };
    require!(
        f.q.dim % step == 0,
        ALIGNED,
        f.q.dim,
        format_args!("multiples of {step}"),
    );
    let split = call.key_antiquant_scale.is_some() || call.value_antiquant_scale.is_some();
    require!(
        split || call.antiquant_scale.is_some(),
        SCALE,
        "none",
        "scales",
    );
    let few = f.q.rows <= FiaCall::MOST_DECODE_ROWS;
    if split && few {
        pairs(f)?;
        return split_few(f);
    }
    if f.paged() {
        return paged_prefill(f);
    }
    require!(
        f.query.dtype == DType::Float16 && call.antiquant_scale.is_some(),
        QUERY,
        format_args!("{} query", f.query.dtype),
        "a FLOAT16 query with the merged antiquantScale",
    );
    merged_shape(f)
}

/// Split scales, 2 to 16 query rows.
fn split_few(f: &Facts<'_>) -> Result<(), Violation> {
    let call = f.call;
    require!(
        f.kv_dtype() == DType::Int8 && !f.kv_list && !super::padding::given(f),
        PREFILL,
        format_args!("{} keys, {} tensors", f.key.dtype, call.key.len()),
        "INT8 keys in one tensor, without left padding",
        "use INT8 keys in one tensor",
    );
    require!(
        call.key_antiquant_mode == call.value_antiquant_mode
            && matches!(call.key_antiquant_mode, 0 | 1),
        MODES,
        format_args!(
            "{} and {}",
            call.key_antiquant_mode, call.value_antiquant_mode
        ),
        "0 twice or 1 twice",
        "use per-channel (0) or per-token (1) scales",
    );
    let token = call.key_antiquant_mode == 1;
    let (n, d) = (f.kv_heads, f.k.dim);
    let dtype = if token { DType::Float } else { DType::Bf16 };
    for (scale, offset) in split_tensors(f) {
        let shape = &scale.shape;
        let fits = if token {
            **shape == [f.batch, f.key_rows]
        } else {
            **shape == [n, d] || **shape == [n, 1, d] || **shape == [n * d]
        };
        require!(
            fits,
            SHAPE,
            shape,
            if token {
                format!("[{}, {}]", f.batch, f.key_rows)
            } else {
                format!("[{n}, {d}], [{n}, 1, {d}] or [{}]", n * d)
            },
        );
        DTYPE.takes(scale.dtype, dtype)?;
        offset_like(offset, scale)?;
    }
    Ok(())
}

/// Paged prefill: per-channel scales of a FLOAT16 query under mode 3.
fn paged_prefill(f: &Facts<'_>) -> Result<(), Violation> {
    let call = f.call;
    let mode = SparseMode::from_acl(call.mode());
    require!(
        f.query.dtype == DType::Float16
            && f.kv_dtype() == DType::Int8
            && matches!(f.layout, Layout::Bsh | Layout::Bsnd)
            && call.inner_precise == 1
            && mode == Some(SparseMode::RightDownCausal)
            && call.mask().is_some()
            && call.pse_shift.is_none()
            && call.key_antiquant_scale.is_some()
            && call.value_antiquant_scale.is_some()
            && (call.key_antiquant_mode, call.value_antiquant_mode) == (0, 0),
        PREFILL,
        format_args!(
            "{} {} query, innerPrecise {}, sparseMode {}",
            f.query.dtype,
            f.layout,
            call.inner_precise,
            call.mode()
        ),
        "FLOAT16 in BSH or BSND, INT8 keys, split scales of mode 0, innerPrecise 1, sparseMode 3 with a mask, no \
         position bias",
    );
    let (n, d) = (f.kv_heads, f.k.dim);
    for (scale, offset) in split_tensors(f) {
        require!(
            *scale.shape == [1, n * d] || *scale.shape == [1, n, d],
            SHAPE,
            scale.shape,
            format_args!("[1, {}] or [1, {n}, {d}]", n * d),
        );
        if let Some(offset) = offset {
            OFFSET.takes(offset.shape, scale.shape)?;
        }
    }
    Ok(())
}

/// Merged scale of the prefill path: per channel by layout, or one for key and one for value.
fn merged_shape(f: &Facts<'_>) -> Result<(), Violation> {
    let Some(scale) = &f.call.antiquant_scale else {
        return Ok(());
    };
    let (n, d) = (f.kv_heads, f.k.dim);
    let channel = match f.layout.input() {
        crate::Axes::Bsh => Dims::of([2, n.saturating_mul(d)]),
        crate::Axes::Bsnd => Dims::of([2, n, d]),
        _ => Dims::of([2, n, 1, d]),
    };
    require!(
        scale.shape == channel || *scale.shape == [2],
        SHAPE,
        scale.shape,
        format_args!("{channel} or [2]"),
        "shape the scale by the layout",
    );
    if let Some(offset) = &f.call.antiquant_offset {
        OFFSET.takes(offset.shape, scale.shape)?;
    }
    Ok(())
}

/// The split scales with their offsets, key first.
fn split_tensors<'a>(
    f: &Facts<'a>,
) -> impl Iterator<Item = (&'a TensorDesc, Option<&'a TensorDesc>)> {
    let call = f.call;
    [
        (&call.key_antiquant_scale, &call.key_antiquant_offset),
        (&call.value_antiquant_scale, &call.value_antiquant_offset),
    ]
    .into_iter()
    .filter_map(|(scale, offset)| Some((scale.as_ref()?, offset.as_ref())))
}

fn pairs(f: &Facts<'_>) -> Result<(), Violation> {
    PAIR.pairs(f.call, Parameter::SPLIT_SCALES)?;
    PAIR.pairs(f.call, Parameter::SPLIT_OFFSETS)?;
    match f.call.key_antiquant_scale {
        Some(_) => Ok(()),
        None => PAIR.leaves_out(f.call, &Parameter::SPLIT_OFFSETS),
    }
}

/// Decode path.
pub(crate) fn decode(f: &Facts<'_>) -> Result<(), Violation> {
    let call = f.call;
    if !f.antiquant() {
        let tensors = [
            &call.antiquant_scale,
            &call.antiquant_offset,
            &call.key_antiquant_scale,
            &call.key_antiquant_offset,
            &call.value_antiquant_scale,
            &call.value_antiquant_offset,
            &call.key_rope_antiquant_scale,
        ];
        require!(
            tensors.into_iter().all(Option::is_none),
            UNUSED,
            format_args!("an antiquantisation tensor with {} keys", f.key.dtype),
            "none",
        );
        return nz(f);
    }
    let packed_nz = f.packed() && f.cache == Some(Cache::Nz) && f.target.cann >= Cann::V9_0;
    if packed_nz {
        packed_lengths(f)?;
    }
    require!(
        !f.packed() || packed_nz,
        PACKED,
        format_args!("innerPrecise {}", call.inner_precise),
        "2 with query lengths",
    );
    pairs(f)?;
    if call.key_antiquant_scale.is_some() {
        return decode_split(f);
    }
    let Some(scale) = &call.antiquant_scale else {
        return Err(SCALE.broken("none", "scales"));
    };
    require!(
        (0..=2).contains(&call.antiquant_mode),
        MODES,
        call.antiquant_mode,
        "0 or 1",
    );
    let dtype = if call.antiquant_mode == 1 {
        DType::Float
    } else {
        f.query.dtype
    };
    DTYPE.takes(scale.dtype, dtype)?;
    let fits = match call.antiquant_mode {
        1 => matches!(scale.shape[..], [2, b, s] if b == f.batch && s >= f.key_rows),
        _ => channel(f, &scale.shape, 2) || *scale.shape == [2],
    };
    require!(
        fits,
        SHAPE,
        scale.shape,
        "[2] and [2, heads, 1, dim], [2, heads, dim], [2, heads * dim] for mode 0; [2, B, S] for mode 1",
    );
    offset_like(call.antiquant_offset.as_ref(), scale)?;
    nz(f)
}

fn offset_like(offset: Option<&TensorDesc>, scale: &TensorDesc) -> Result<(), Violation> {
    if let Some(offset) = offset {
        require!(
            offset.shape == scale.shape && offset.dtype == scale.dtype,
            OFFSET,
            offset,
            scale,
        );
    }
    Ok(())
}

/// Per-channel shapes with `p` leading: 2 for the merged tensor, 1 for a split one. The head dimension is the query's:
/// a paged key may have any.
fn channel(f: &Facts<'_>, shape: &[i64], p: i64) -> bool {
    let (n, d) = (f.kv_heads, f.q.dim);
    shape == [p, n, 1, d]
        || shape == [p, 1, n, d]
        || shape == [p, n, d]
        || shape == [p, n.saturating_mul(d)]
}

fn decode_split(f: &Facts<'_>) -> Result<(), Violation> {
    let call = f.call;
    let modes = (call.key_antiquant_mode, call.value_antiquant_mode);
    let known = (modes.0 == modes.1 && (0..=5).contains(&modes.0)) || modes == (0, 1);
    require!(
        known && (!matches!(modes.0, 4 | 5) || f.paged()),
        MODES,
        format_args!("{} and {}", modes.0, modes.1),
        "the same from 0 to 5 (4 and 5 with paging), or 0 and 1",
        "use one scheme for key and value",
    );
    require!(
        modes.0 == modes.1 || (f.kv_dtype() == DType::Int8 && f.query.dtype == DType::Float16),
        MIXED,
        format_args!("{} keys, {} query", f.key.dtype, f.query.dtype),
        "INT8 and FLOAT16",
    );
    let (bn, bs) = (f.blocks(), f.call.block_size);
    let n = f.kv_heads;
    let nz_cache = f.cache == Some(Cache::Nz);
    for (index, (scale, offset)) in split_tensors(f).enumerate() {
        let mode = if index == 0 { modes.0 } else { modes.1 };
        let shape = &scale.shape;
        let fits = match mode {
            0 if nz_cache && !f.rope() => *shape == nz_channel(f),
            0 => channel(f, shape, 1) || **shape == [1],
            // Beside per-channel keys the value's scale is not checked.
            1 if modes == (0, 1) => true,
            1 => {
                matches!(shape[..], [b, s] | [1, b, s] if b == f.batch && s >= f.key_rows)
            }
            2 => **shape == [n],
            3 => {
                matches!(shape[..], [b, heads, s] if b == f.batch && heads == n && s >= f.key_rows)
            }
            4 => **shape == [bn, bs],
            _ => **shape == [bn, n, bs],
        };
        require!(
            fits,
            SHAPE,
            format_args!("{shape} for mode {mode}"),
            "mode 0 [1] or [1, heads, 1, dim], [1, heads, dim], [1, heads * dim], over NZ [heads * dim] with BSH, \
             [heads, dim] with BSND, [heads, 1, dim] with BNSD; 1 [B, S]; 2 [heads]; 3 [B, heads, S]; 4 [blocks, block \
             size]; 5 [blocks, heads, block size]",
        );
        let dtype = if matches!(mode, 0 | 2) {
            f.query.dtype
        } else {
            DType::Float
        };
        require!(
            (index == 1 && modes != (0, 1) && !nz_cache) || scale.dtype == dtype,
            DTYPE,
            scale.dtype,
            dtype,
        );
        offset_like(offset, scale)?;
    }
    if let (Some(key), Some(value)) = (&call.key_antiquant_scale, &call.value_antiquant_scale) {
        require!(
            modes.0 != modes.1
                || !(nz_cache || matches!(modes.0, 4 | 5))
                || key.shape == value.shape,
            SHAPE,
            format_args!("key {}, value {}", key.shape, value.shape),
            key.shape,
            "give key and value scales of one shape",
        );
    }
    nz(f)
}

/// Per-channel shape over an NZ cache: the layout's order of heads and head dimension.
fn nz_channel(f: &Facts<'_>) -> Dims {
    let (n, d) = (f.kv_heads, f.q.dim);
    match f.layout.input() {
        crate::Axes::Bsh => Dims::of([n.saturating_mul(d)]),
        crate::Axes::Bsnd | crate::Axes::Tnd => Dims::of([n, d]),
        _ => Dims::of([n, 1, d]),
    }
}

/// Packed rows over an NZ cache: at most 16 a sequence, and only per-channel scales.
fn packed_lengths(f: &Facts<'_>) -> Result<(), Violation> {
    super::packed::lengths(f, 65_536, i64::MAX)?;
    let modes = (f.call.key_antiquant_mode, f.call.value_antiquant_mode);
    let rows = f.sequences().map(|b| f.q_len(b));
    let (least, most) = rows.fold((i64::MAX, 0), |(least, most), len| {
        (least.min(len), most.max(len))
    });
    require!(
        modes == (0, 0) && least >= 1 && most <= FiaCall::MOST_DECODE_ROWS,
        PACKED_NZ,
        format_args!("modes {modes:?}, {least} to {most} rows"),
        "modes 0 and 0, 1 to 16 rows",
    );
    let table = f
        .call
        .block_table
        .as_ref()
        .and_then(|table| table.shape.first());
    require!(
        table == Some(&f.batch),
        super::paged::TABLE,
        format_args!("{table:?} rows"),
        f.batch,
    );
    Ok(())
}

/// An NZ cache without rotary parts: one kernel takes it.
fn nz(f: &Facts<'_>) -> Result<(), Violation> {
    if f.cache != Some(Cache::Nz) || f.rope() {
        return Ok(());
    }
    let call = f.call;
    let heads = (call.num_heads, f.kv_heads);
    let but_precise = f.kv_dtype() == DType::Int8
        && f.key.shape.last() == Some(&32)
        && f.query.dtype == DType::Bf16
        && f.q.dim == 128
        && (matches!(f.layout, Layout::Bsh | Layout::Bsnd | Layout::Bnsd)
            || (f.layout == Layout::Tnd && f.target.cann >= Cann::V9_0))
        && matches!(call.block_size, 128 | 512)
        && !call.softmax_lse_flag
        && f.out.dtype == DType::Bf16
        && call.pse_shift.is_none();
    require!(
        but_precise && call.inner_precise == 1,
        NZ,
        format_args!(
            "{} query in {}, dim {}, heads {} over {}, block size {}, {} keys {}, innerPrecise {}, softmaxLseFlag {}, \
             {} output{}",
            f.query.dtype,
            f.layout,
            f.q.dim,
            heads.0,
            heads.1,
            call.block_size,
            f.key.dtype,
            f.key.shape,
            call.inner_precise,
            call.softmax_lse_flag,
            f.out.dtype,
            call.pse_shift.map_or("", |_| ", pseShift"),
        ),
        "BF16, 128, block size 128 or 512, INT8 keys in runs of 32, innerPrecise 1, softmaxLseFlag false, BF16 output, \
         no pseShift",
        match but_precise {
            true => Ok(Change::set(Parameter::InnerPrecise, 1)),
            false => Err(NZ.fix),
        },
    );
    require!(
        for f.target => matches!(heads, (10, 1) | (64, 8) | (80, 8) | (128, 16)),
        NZ_HEADS,
        format_args!("{} over {}", heads.0, heads.1),
        "(10, 1), (64, 8), (80, 8), (128, 16)",
    );
    let modes = (call.key_antiquant_mode, call.value_antiquant_mode);
    require!(
        call.key_antiquant_scale.is_some()
            && matches!(modes, (0, 0) | (1, 1))
            && call.key_antiquant_offset.is_none()
            && call.value_antiquant_offset.is_none(),
        NZ,
        format_args!("modes {} and {}", modes.0, modes.1),
        "keyAntiquantScale and valueAntiquantScale of mode 0 or 1, no offsets",
    );
    let size = SparseMode::COMPRESSED_MASK_SIZE;
    let square = call.mask().is_some_and(|mask| *mask.shape == [size, size]);
    let fits = match (f.q.rows, call.mask()) {
        // Packed calls take either form with single rows.
        _ if f.packed() => match call.mask() {
            None => call.mode() == 0 && super::packed::longest_query(f) <= 1,
            Some(_) => call.mode() == 3 && square,
        },
        (1, None) => call.mode() == 0,
        (1, Some(_)) | (_, None) => false,
        (_, Some(_)) => call.mode() == 3 && square,
    };
    require!(
        fits,
        NZ_MODE,
        format_args!("sparseMode {}, {} rows", call.mode(), f.q.rows),
        "mode 0 without a mask for single rows, mode 3 with the [2048, 2048] mask for several",
    );
    Ok(())
}
