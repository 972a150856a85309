//! Quantised keys and values under a half-precision query.

use super::Facts;
use crate::allowed::Axis::{From, Of};
use crate::allowed::{Axis, MultiplesOf, Named, Noted, Outcome, Shapes};
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
    match f.packed() {
        true => Ok(()),
        false => UNUSED.leaves_out(f.call, &Parameter::SPLIT_SCALES),
    }
}

/// Head dimensions of the decode path, which takes INT8 keys of any.
pub(crate) fn decode_dim(f: &Facts<'_>) -> Result<(), Violation> {
    match f.kv_dtype() {
        DType::Int4 => ALIGNED.takes(f.q.dim, MultiplesOf(64)),
        _ => Ok(()),
    }
}

/// Prefill path with quantised keys.
pub(crate) fn prefill(f: &Facts<'_>) -> Result<(), Violation> {
    let call = f.call;
    let step = if f.kv_dtype() == DType::Int4 { 64 } else { 32 };
    ALIGNED.takes(f.q.dim, MultiplesOf(step))?;
    let split = call.key_antiquant_scale.is_some() || call.value_antiquant_scale.is_some();
    require!(split || call.antiquant_scale.is_some(), SCALE, "none", "scales",);
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
        call.key_antiquant_mode == call.value_antiquant_mode && matches!(call.key_antiquant_mode, 0 | 1),
        MODES,
        format_args!("{} and {}", call.key_antiquant_mode, call.value_antiquant_mode),
        "0 twice or 1 twice",
        "use per-channel (0) or per-token (1) scales",
    );
    let token = call.key_antiquant_mode == 1;
    let (n, d) = (f.kv_heads, f.k.dim);
    let dtype = if token { DType::Float } else { DType::Bf16 };
    for (scale, offset) in split_tensors(f) {
        let (rows, flat) = ([Of(f.batch), Of(f.key_rows)], [Of(n.saturating_mul(d))]);
        let allowed: &[&[Axis]] = match token {
            true => &[&rows],
            false => &[&[Of(n), Of(d)], &[Of(n), Of(1), Of(d)], &flat],
        };
        SHAPE.takes(scale.shape, Shapes(allowed))?;
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
        SHAPE.takes(scale.shape, [Dims::of([1, n.saturating_mul(d)]), Dims::of([1, n, d])])?;
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
    SHAPE.takes(scale.shape, [channel, Dims::of([2])]).fix(|| "shape the scale by the layout")?;
    if let Some(offset) = &f.call.antiquant_offset {
        OFFSET.takes(offset.shape, scale.shape)?;
    }
    Ok(())
}

/// The split scales with their offsets, key first.
fn split_tensors<'a>(f: &Facts<'a>) -> impl Iterator<Item = (&'a TensorDesc, Option<&'a TensorDesc>)> {
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
        UNUSED.leaves_out(call, &Parameter::MERGED_ANTIQUANT)?;
        UNUSED.leaves_out(call, &Parameter::SPLIT_SCALES)?;
        UNUSED.leaves_out(call, &Parameter::SPLIT_OFFSETS)?;
        UNUSED.leaves_out(call, &[Parameter::KeyRopeAntiquantScale])?;
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
    // The operator takes 2 for 0.
    MODES.takes(call.antiquant_mode, 0..=2)?;
    let dtype = match call.antiquant_mode {
        1 => DType::Float,
        _ => f.query.dtype,
    };
    DTYPE.takes(scale.dtype, dtype)?;
    let (n, d, two) = (Of(f.kv_heads), Of(f.q.dim), Of(2));
    let hidden = Of(f.kv_heads.saturating_mul(f.q.dim));
    let allowed: &[&[Axis]] = match call.antiquant_mode {
        1 => &[&[two, Of(f.batch), From(f.key_rows)]],
        _ => &[&[two], &[two, n, Of(1), d], &[two, Of(1), n, d], &[two, n, d], &[two, hidden]],
    };
    SHAPE.takes(scale.shape, Shapes(allowed))?;
    offset_like(call.antiquant_offset.as_ref(), scale)?;
    nz(f)
}

fn offset_like(offset: Option<&TensorDesc>, scale: &TensorDesc) -> Result<(), Violation> {
    match offset {
        Some(offset) => {
            OFFSET.takes(offset.dtype, scale.dtype)?;
            OFFSET.takes(offset.shape, scale.shape)
        }
        None => Ok(()),
    }
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
    let (bn, bs) = (Of(f.blocks()), Of(f.call.block_size));
    let nz_cache = f.cache == Some(Cache::Nz);
    for (index, (scale, offset)) in split_tensors(f).enumerate() {
        let mode = if index == 0 { modes.0 } else { modes.1 };
        // The head dimension is the query's: a paged key may have any.
        let (n, d, one) = (Of(f.kv_heads), Of(f.q.dim), Of(1));
        let hidden = Of(f.kv_heads.saturating_mul(f.q.dim));
        let (b, s) = (Of(f.batch), From(f.key_rows));
        let allowed: &[&[Axis]] = match mode {
            0 if nz_cache && !f.rope() => match f.layout.input() {
                crate::Axes::Bsh => &[&[hidden]],
                crate::Axes::Bsnd | crate::Axes::Tnd => &[&[n, d]],
                _ => &[&[n, one, d]],
            },
            0 => &[&[one], &[one, n, one, d], &[one, one, n, d], &[one, n, d], &[one, hidden]],
            1 => &[&[b, s], &[one, b, s]],
            2 => &[&[n]],
            3 => &[&[b, n, s]],
            4 => &[&[bn, bs]],
            _ => &[&[bn, n, bs]],
        };
        // Beside per-channel keys the value's scale is not checked.
        if mode != 1 || modes != (0, 1) {
            let note = format_args!("for mode {mode}");
            SHAPE.takes(Noted(scale.shape, note), Shapes(allowed))?;
        }
        let dtype = match mode {
            0 | 2 => f.query.dtype,
            _ => DType::Float,
        };
        if index == 0 || modes == (0, 1) || nz_cache {
            DTYPE.takes(scale.dtype, dtype)?;
        }
        offset_like(offset, scale)?;
    }
    if let (Some(key), Some(value)) = (&call.key_antiquant_scale, &call.value_antiquant_scale)
        && modes.0 == modes.1
        && (nz_cache || matches!(modes.0, 4 | 5))
    {
        SHAPE.takes(Named("value", value.shape), key.shape).fix(|| "give key and value scales of one shape")?;
    }
    nz(f)
}

/// Packed rows over an NZ cache: at most 16 a sequence, and only per-channel scales.
fn packed_lengths(f: &Facts<'_>) -> Result<(), Violation> {
    super::packed::lengths(f, FiaCall::MOST_SEQUENCES, i64::MAX)?;
    let modes = (f.call.key_antiquant_mode, f.call.value_antiquant_mode);
    let rows = f.sequences().map(|b| f.q_len(b));
    let (least, most) = rows.fold((i64::MAX, 0), |(least, most), len| (least.min(len), most.max(len)));
    require!(
        modes == (0, 0) && least >= 1 && most <= FiaCall::MOST_DECODE_ROWS,
        PACKED_NZ,
        format_args!("modes {modes:?}, {least} to {most} rows"),
        "modes 0 and 0, 1 to 16 rows",
    );
    let table = f.call.block_table.as_ref().and_then(|table| table.shape.first());
    require!(table == Some(&f.batch), super::paged::TABLE, format_args!("{table:?} rows"), f.batch,);
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
