//! The absorbed form of multi-head latent attention with an INT8 query, and with a half-precision query over a
//! quantised cache; its rules stand with the others in `mla`.

use super::mla::{CACHE, FULL_QUANT, LSE, MODE, OUT, PRECISE, QUANTISED_CACHE, TREE, dims, paired};
use super::unified::masks::{TREE_MODE, drafts, longer};
use super::{Facts, Given, packed};
use crate::attention_problem::MaskUse;
use crate::layout::Extents;
use crate::ops::fused_infer_attention_score::{Cache, FiaCall};
use crate::rule::require;
use crate::{Cann, DType, Dims, Layout, SparseMode, TensorDesc, Violation};

/// Checks the absorbed form with an INT8 query.
pub(crate) fn full_quant(f: &Facts<'_>) -> Result<(), Violation> {
    let call = f.call;
    let (Some(q_rope), Some(k_rope)) = (&call.query_rope, &call.key_rope) else {
        return paired(f);
    };
    let packed = f.packed();
    super::heads::query(f)?;
    dims(f)?;
    OUT.takes(f.out.dtype, DType::Bf16)?;
    // The checks of the quantised query accept it from 9.0 on.
    require!(!call.softmax_lse_flag || f.target.cann >= Cann::V9_0, LSE, "softmaxLseFlag true", "false");
    let precise =
        call.inner_precise == 0 || call.inner_precise == 1 || (call.inner_precise == 2 && f.layout == Layout::Tnd);
    require!(precise, PRECISE, call.inner_precise, "0 or 1, and 2 with TND",);
    let none = [
        &call.deq_scale1,
        &call.quant_scale1,
        &call.deq_scale2,
        &call.quant_scale2,
        &call.quant_offset2,
        &call.antiquant_scale,
        &call.antiquant_offset,
        &call.key_antiquant_offset,
        &call.value_antiquant_offset,
        &call.pse_shift,
        &call.key_shared_prefix,
        &call.value_shared_prefix,
        // This is refused before the block table would make the operator ignore it.
        &call.kv_padding_size,
    ];
    let query_scale = f.layout.input().shape(Extents { dim: 1, ..f.q });
    let dequant = call.dequant_scale_query.as_ref();
    let grid = match f.layout.input() {
        crate::Axes::Bsh | crate::Axes::Bsnd => crate::Dims::of([f.q.batch, f.q.rows, f.q.heads]),
        crate::Axes::Bnsd => crate::Dims::of([f.q.batch, f.q.heads, f.q.rows]),
        _ => crate::Dims::of([f.q.rows, f.q.heads]),
    };
    let one = |scale: &Option<TensorDesc>| {
        scale.as_ref().is_some_and(|scale| scale.dtype == DType::Float && *scale.shape == [1])
    };
    require!(
        none.into_iter().all(Option::is_none)
            && f.cache == Some(Cache::Nz)
            && call.block_size == 128
            && f.key.shape.last() == Some(&32)
            && k_rope.shape.last() == Some(&16)
            && q_rope.dtype == DType::Bf16
            && k_rope.dtype == DType::Bf16
            && f.key.dtype == DType::Int8
            && f.value.dtype == DType::Int8
            && !matches!(f.layout, Layout::Bnsd | Layout::BnsdNbsd)
            && call.query_quant_mode == 3
            && (call.key_antiquant_mode, call.value_antiquant_mode) == (0, 0)
            && dequant.is_some_and(|scale| scale.dtype == DType::Float && scale.shape == grid)
            && one(&call.key_antiquant_scale)
            && one(&call.value_antiquant_scale),
        FULL_QUANT,
        format_args!("{} query {}, key {}, keyRope {}", f.layout, f.query.shape, f.key.shape, k_rope.shape),
        format_args!(
            "INT8 NZ caches of block size 128, BF16 ropes, dequantScaleQuery FLOAT {grid} (not {query_scale}), key and \
             value scales FLOAT [1], queryQuantMode 3"
        ),
    );
    let alike = |desc: &TensorDesc, dim| {
        Cache::Nz.extents(desc, 1).is_some_and(|extents| {
            (extents.batch, extents.heads, extents.rows, extents.dim) == (f.k.batch, 1, 128, dim)
        })
    };
    // From 8.5 on blocks, heads and rows of the value are not compared.
    let value_fits = match f.target.cann >= Cann::V8_5 {
        true => f.v.dim == 512,
        false => alike(f.value, 512),
    };
    require!(
        alike(f.key, 512) && value_fits && alike(k_rope, 64),
        CACHE,
        format_args!("key {}, value {}, keyRope {}", f.key.shape, f.value.shape, k_rope.shape),
        "NZ caches of one block count",
    );
    let table = call.block_table.as_ref();
    require!(
        table.is_some_and(|table| !table.is_empty() && (!packed || table.shape.first() == Some(&f.batch)))
            && call.actual_seq_lengths_kv.is_some(),
        super::paged::TABLE_EMPTY,
        "an empty table or no lengths",
        "a block table and key lengths",
        "pass both",
    );
    if packed {
        packed::lengths(f, FiaCall::MOST_SEQUENCES, FiaCall::MOST_PACKED_ROWS)?;
    } else {
        super::lengths::key(f)?;
    }
    match tree(f) {
        true => tree_mask(f),
        false => quantised_modes(f),
    }
}

/// Whether the mask of a call with an INT8 query is a tree mask.
pub(crate) fn tree(f: &Facts<'_>) -> bool {
    f.target.cann >= Cann::V9_1 && f.call.mode() == TREE_MODE
}

/// How the tree mask is used: if the mask of packed rows has another size than their squares, or a sequence with keys
/// has more rows than those, the rows see without it.
pub(crate) fn tree_use(f: &Facts<'_>) -> MaskUse {
    let Some(mask) = f.call.mask() else {
        return MaskUse::None;
    };
    let square = |b| f.q_len(b).saturating_mul(f.q_len(b));
    let squares = super::lengths::total(f.call, f.batch(), square);
    match f.packed() && (*mask.shape != [squares] || longer(f).is_some()) {
        true => MaskUse::None,
        false => MaskUse::Tree(drafts(f, mask)),
    }
}

/// Checks the tree mask, unless the rows are packed.
fn tree_mask(f: &Facts<'_>) -> Result<(), Violation> {
    if f.packed() {
        return Ok(());
    }
    let rows = f.q.rows;
    let want = Dims::of([f.batch, rows, rows]);
    require!(
        rows > 1 && f.call.mask().is_some_and(|mask| mask.shape == want),
        TREE,
        format_args!("{rows} rows, attenMask {}", Given(f.call.mask(), "attenMask")),
        format_args!("several rows with {want}"),
    );
    Ok(())
}

/// Checks sparse mode and mask of the absorbed form over a quantised cache.
pub(super) fn quantised_modes(f: &Facts<'_>) -> Result<(), Violation> {
    let mode = f.call.mode();
    let size = SparseMode::COMPRESSED_MASK_SIZE;
    let square = f.call.mask().is_some_and(|mask| *mask.shape == [size, size]);
    let fits = match (f.packed(), f.q.rows) {
        (true, _) => (mode == 0 && f.call.mask().is_none()) || (mode == 3 && square),
        (false, 1) => mode == 0 && f.call.mask().is_none(),
        (false, _) => mode == 3 && square,
    };
    require!(
        fits,
        MODE,
        format_args!("mode {mode}"),
        "0 without a mask for single rows and packed queries, 3 with the [2048, 2048] mask for several rows",
    );
    Ok(())
}

/// Refuses rotary parts of a half-precision query over a quantised cache. Every release refuses these calls here; the
/// operator's later checks for them are unreachable.
pub(crate) fn antiquant(f: &Facts<'_>) -> Result<(), Violation> {
    paired(f)?;
    require!(
        !f.antiquant(),
        QUANTISED_CACHE,
        format_args!("{} keys under a {} query", f.kv_dtype(), f.query.dtype),
        f.query.dtype,
    );
    Ok(())
}
