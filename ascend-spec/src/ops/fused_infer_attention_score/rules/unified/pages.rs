//! Page attention in the unified checker.

use super::Form;
use crate::ops::fused_infer_attention_score::rules::ascend950::QuantisationKind;
use crate::ops::fused_infer_attention_score::rules::{Facts, paged};
use crate::ops::fused_infer_attention_score::{Cache, Parameter, Version};
use crate::rule::{require, rules};
use crate::{Axes, DType, Layout, TensorDesc, Violation};

rules! {
    in Scope::UNIFIED;
    BLOCK_SIZE = "block_size.unified", TILING_ERROR, V1, "check I1; Ascend 950, A6",
        "blockSize is that of the cache: a multiple of 16 up to 1024; for head dimensions other than 64, 128 and those \
         of latent attention up to 512 for single rows, and for several rows a multiple of 128 up to 1024",
        "choose a cache block of 128 tokens, which every path takes but MXFP8, whose blocks have 512 or 1024";
    BLOCK_SIZE_QUANTISED = "block_size.quantised", TILING_ERROR, V5, "Ascend 950, A6" in Scope::ASCEND_950,
        "over quantised keys blockSize is a multiple of 32, for 4-bit keys of 64, up to 512",
        "choose a cache block of 128 tokens";
    TABLE_RANK = "block_table.rank", TILING_ERROR, V1, "check G0.3",
        "blockTable has two axes, none of them 0",
        "pass one row of block ids for each sequence";
    TABLE_ROWS = "block_table.packed_rows",
        TILING_ERROR, V1, "page attention, block table" in Scope::UNIFIED.since(V8_5),
        "blockTable has a row for each sequence of packed rows (TND, TND_NTD)",
        "pass one row of block ids for each sequence";
    TABLE = "block_table.rows",
        TILING_ERROR, V1, "page attention, block table; Ascend 950, A1" in Scope::UNIFIED.since(V9_1),
        "blockTable is INT32 [B, M] with M blocks enough for the longest sequence",
        "pass one row of block ids for each sequence, as many as its length needs";
    SHAPE = "cache.unified_shape", TILING_ERROR, V1, "checks G3.6, G4.4, I1; Ascend 950, A2, A3",
        "both caches have the blocks, blockSize tokens and numKeyValueHeads heads of one format, and NZ caches run in \
         32 bytes",
        "shape both caches by blockSize, numKeyValueHeads and the head dimensions of query and value";
    NZ = "cache.nz_head_dim", TILING_ERROR, V1, "page attention, NZ caches" in Scope::A2_A3.since(V8_5),
        "an NZ cache without rotary parts has a head dimension of 64 or 128",
        "use a BnBsH or BnNBsD cache";
    HIDDEN = "cache.hidden_size_unified",
        TILING_ERROR, V1, "page attention, BnBsH caches; Ascend 950, A2" in Scope::UNIFIED.since(V9_1),
        "the last axis of a BnBsH cache is at most 65535",
        "use a BnNBsD cache";
    ALONE = "block_table.unified_alone", TILING_ERROR, V1, "checks I2, I3, I13; Ascend 950, A7",
        "page attention goes with no tensor list, left padding or shared prefix; until 9.0 single rows ignore the left \
         padding",
        "drop the argument, or the block table";
}

pub(crate) fn check(f: &Facts<'_>) -> Result<(), Violation> {
    let (Some(cache), Some(table)) = (f.cache, &f.call.block_table) else {
        return Ok(());
    };
    let call = f.call;
    require!(table.shape.rank() == 2 && !table.is_empty(), TABLE_RANK, table.shape, "[B, M]",);
    let padded = match f.single && !f.is_950() {
        // A single row has no padding of its query, and until 9.0 none of its cached keys.
        true => call.kv_padding_size.is_some() && f.since(crate::Cann::V9_1),
        false => call.query_padding_size.is_some() || call.kv_padding_size.is_some(),
    };
    ALONE.forbids([("a tensor list", call.key.len() > 1), ("left padding", padded)])?;
    ALONE.leaves_out(call, &Parameter::SHARED_PREFIX)?;
    let Some(lengths) = call.actual_seq_lengths_kv.filter(|all| !all.is_empty()) else {
        return Err(paged::LENGTHS.broken("none", "one length a sequence"));
    };
    block_size(f)?;
    require!(
        f.layout.input() != Axes::Tnd || table.shape.first() == Some(&f.batch),
        TABLE_ROWS,
        table.shape,
        format_args!("[{}, M]", f.batch),
    );
    let bs = call.block_size;
    let longest = lengths.iter().take(f.batch()).copied().max().unwrap_or(0);
    let longest = paged::blocks(longest, bs);
    require!(
        for f.target => table.dtype == DType::Int32
            && matches!(table.shape[..], [rows, m] if rows == f.batch && m >= longest),
        TABLE,
        table,
        format_args!("INT32 [{}, {longest} or more]", f.batch),
    );
    shapes(f, cache)
}

fn block_size(f: &Facts<'_>) -> Result<(), Violation> {
    let bs = f.call.block_size;
    if f.kind() == QuantisationKind::Antiquant {
        let step = if f.kv_dtype().bits() == 4 { 64 } else { 32 };
        require!(
            bs > 0 && bs % step == 0 && bs <= 512,
            BLOCK_SIZE_QUANTISED,
            bs,
            format_args!("multiples of {step} up to 512"),
        );
        return Ok(());
    }
    let usual = f.form() != Form::Plain || matches!((f.q.dim, f.v.dim), (64, 64) | (128, 128));
    let (step, most) = match (usual, f.most_rows()) {
        (true, _) => (16, 1024),
        (false, 1) => (16, 512),
        (false, _) => (128, 1024),
    };
    require!(bs > 0 && bs % step == 0 && bs <= most, BLOCK_SIZE, bs, format_args!("multiples of {step} up to {most}"),);
    Ok(())
}

fn shapes(f: &Facts<'_>, cache: Cache) -> Result<(), Violation> {
    let (k, v, bs) = (f.k, f.v, f.call.block_size);
    // Quantised keys under a half-precision query are in groups of 16 whatever their dtype.
    let bits = |desc: &TensorDesc| match f.kind() {
        QuantisationKind::Antiquant => 16,
        _ => i64::from(desc.dtype.bits().max(1)),
    };
    let run = |desc: &TensorDesc| cache != Cache::Nz || desc.shape.last() == Some(&(256 / bits(desc)));
    let same = f.key.shape.rank() == f.value.shape.rank() && (k.batch, k.rows, k.heads) == (v.batch, v.rows, v.heads);
    if same {
        paged::cache_rows(f, &SHAPE)?;
    }
    require!(
        same && run(f.key) && run(f.value) && k.rows == bs && k.heads == f.kv_heads,
        SHAPE,
        format_args!("key {}, value {}", f.key.shape, f.value.shape),
        format_args!("{cache} with block size {bs}, {} heads of {} and {}", f.kv_heads, f.q.dim, f.v.dim),
    );
    require!(
        f.kind() != QuantisationKind::Antiquant
            || cache != Cache::BnNBsD
            || matches!(f.layout, Layout::Bnsd | Layout::BnsdBsnd | Layout::Tnd),
        paged::CACHE_LAYOUT,
        format_args!("{cache} with {}", f.layout),
        "BnBsH, NZ; BnNBsD with BNSD, BNSD_BSND and TND",
    );
    require!(
        for f.target => cache != Cache::Nz || f.form() != Form::Plain || matches!(f.q.dim, 64 | 128),
        NZ,
        f.q.dim,
        "64, 128",
    );
    if cache == Cache::BnBsH {
        let hidden = f.kv_heads.saturating_mul(f.k.dim);
        HIDDEN.takes_on(f.target, hidden, ..=65_535)?;
    }
    Ok(())
}
