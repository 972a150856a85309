//! Page attention: block size, block table, cache shapes.

use super::Facts;
use crate::allowed::{Axis, Multiples, Shapes};
use crate::ops::fused_infer_attention_score::{Cache, FiaCall, Parameter, Route, Version};
use crate::rule::{broken, require, rules};
use crate::{Cann, DType, Layout, Rule, TensorDesc, Violation};

rules! {
    in Scope::A2_A3;
    CACHE_RANK = "cache.rank", TILING_ERROR, V1, "check E3.4" in Scope::ALL,
        "in the prefill path a paged cache has 3 axes (BnBsH), 4 (BnNBsD) or, with packed queries, 5 (NZ)",
        "shape the cache as [blocks, block size, heads * dim] or [blocks, heads, block size, dim]";
    BLOCK_SIZE = "block_size.prefill", TILING_ERROR, V1, "check E3.1",
        "in the prefill path blockSize is a multiple of 128 from 128 to 1024",
        "choose a cache block of a multiple of 128 tokens: 128 to 512 serve prefill and decode";
    BLOCK_SIZE_DECODE = "block_size.decode", TILING_ERROR, V1, "check F6",
        "in the decode path blockSize is a multiple of 16 (32 for INT8 caches) from 16 to 512",
        "choose a cache block of a multiple of 128 tokens up to 512: they serve prefill and decode";
    TABLE = "block_table.shape", TILING_ERROR, V1, "check E3.2",
        "blockTable is INT32 [B, M] with M blocks enough for the longest sequence",
        "pass one row of block ids for each sequence, as many as its length needs";
    TABLE_EMPTY = "block_table.empty", TILING_ERROR, V1, "checks F6, J8",
        "blockTable is not empty",
        "pass one row of block ids for each sequence";
    BLOCKS = "cache.blocks", TILING_ERROR, V1, "check E3.3",
        "the cache has at least as many blocks as the sequences need together",
        "pass the whole cache";
    CACHE_SHAPE = "cache.shape", TILING_ERROR, V1, "checks E3.4, F20",
        "in the prefill path key and value cache have the shape that block size, heads and head dimension imply, in \
         the decode path an NZ cache of the key does",
        "shape both caches by blockSize, numKeyValueHeads and the query's head dimension";
    CACHE_LAYOUT = "cache.layout", TILING_ERROR, V1, "checks E3.5, F6" in Scope::ALL,
        "the cache's format goes with the query's layout",
        "use a BnBsH cache, or BNSD queries";
    HIDDEN = "cache.hidden_size", TILING_ERROR, V1, "check E3.4",
        "the last axis of a BnBsH cache is at most 65535",
        "use a BnNBsD cache with BNSD or TND queries";
    LENGTHS = "actual_seq_lengths_kv.required", TILING_ERROR, V1, "checks E3.6, F6" in Scope::ALL,
        "a paged call has actualSeqLengthsKv",
        "pass the number of cached tokens of each sequence";
    UNCHECKED = "inner_precise.int8_cache", TILING_ERROR, V1, "check J1",
        "innerPrecise 2 over an INT8 cache in the decode path goes with BSH, BSND, BNSD and TND",
        "use innerPrecise 0 or 1";
    ALONE = "block_table.alone", TILING_ERROR, V1, "check E3.6",
        "page attention goes with no tensor list, left padding, shared prefix or INT8 query in the prefill path",
        "drop the argument, or the block table";
}

/// Whether the decode path leaves the call unchecked: `innerPrecise` 2 over an INT8 cache with query lengths.
pub(crate) fn unchecked(call: &FiaCall<'_>, key: &TensorDesc) -> bool {
    call.block_table.is_some()
        && call.inner_precise == 2
        && key.dtype == DType::Int8
        && call.actual_seq_lengths.is_some_and(|lengths| !lengths.is_empty())
}

pub(crate) fn unchecked_layout(f: &Facts<'_>) -> Result<(), Violation> {
    UNCHECKED.takes(f.layout, [Layout::Bsh, Layout::Bsnd, Layout::Bnsd, Layout::Tnd])
}

/// The memory layout of the cache, by the number of the key's axes. The decode path treats other numbers of axes as
/// BnBsH.
pub(crate) fn cache(call: &FiaCall<'_>, key: &TensorDesc, route: Route) -> Result<Option<Cache>, Violation> {
    if call.block_table.is_none() {
        return Ok(None);
    }
    match (Cache::of_rank(key.shape.rank()), route) {
        (None, Route::Prefill) => Err(CACHE_RANK.broken(key.shape, "3, 4 or 5 axes")),
        (cache, _) => Ok(Some(cache.unwrap_or(Cache::BnBsH))),
    }
}

/// Keys that a row of the block table can hold.
pub(crate) fn capacity(call: &FiaCall<'_>) -> i64 {
    let columns = call.block_table.as_ref().and_then(|table| table.shape.get(1).copied());
    columns.unwrap_or(0).saturating_mul(call.block_size)
}

/// Number of blocks that `len` keys take.
pub(super) fn blocks(len: i64, bs: i64) -> i64 {
    let len = len.max(0);
    len / bs + i64::from(len % bs != 0)
}

/// Number of blocks that all sequences take together.
fn all_blocks(lengths: &[i64], batch: i64, bs: i64) -> i64 {
    if let &[one] = lengths {
        return blocks(one, bs).saturating_mul(batch);
    }
    let used = lengths.iter().take(usize::try_from(batch).unwrap_or(usize::MAX));
    used.fold(0, |sum: i64, &len| sum.saturating_add(blocks(len, bs)))
}

/// Whether the cache has a block for every key. The sum of the lengths bounds the number of blocks; the exact number
/// takes a division for each sequence and is computed only where the bound is too large.
fn enough_blocks(f: &Facts<'_>, lengths: &[i64]) -> bool {
    let keys = match lengths {
        &[one] => one.max(0).saturating_mul(f.batch),
        several => several.iter().take(f.batch()).fold(0, |sum: i64, &len| sum.saturating_add(len.max(0))),
    };
    let bs = f.call.block_size;
    (keys / bs).saturating_add(f.batch) <= f.k.batch || all_blocks(lengths, f.batch, bs) <= f.k.batch
}

/// Checks the rules of the prefill path.
pub(crate) fn prefill(f: &Facts<'_>) -> Result<(), Violation> {
    let (Some(cache), Some(table)) = (f.cache, &f.call.block_table) else {
        return Ok(());
    };
    let bs = f.call.block_size;
    BLOCK_SIZE.takes(bs, Multiples(128, ..=1024))?;
    ALONE.forbids([("a tensor list", f.kv_list), ("an INT8 query", f.query.dtype == DType::Int8)])?;
    ALONE.leaves_out(f.call, &Parameter::LEFT_PADDING)?;
    ALONE.leaves_out(f.call, &Parameter::SHARED_PREFIX)?;
    let lengths = f.call.actual_seq_lengths_kv.filter(|lengths| !lengths.is_empty());
    let lengths = lengths.ok_or_else(|| LENGTHS.broken("none", "one length a sequence"))?;
    let longest = lengths.iter().take(f.batch()).copied().max().unwrap_or(0);
    let longest = blocks(longest, bs);
    TABLE.takes(table.dtype, DType::Int32)?;
    let shape = [Axis::Of(f.batch), Axis::From(longest.max(1))];
    TABLE.takes(table.shape, Shapes(&[&shape]))?;
    require!(
        enough_blocks(f, lengths),
        BLOCKS,
        format_args!("{} blocks", f.k.batch),
        format_args!("{} or more", all_blocks(lengths, f.batch, bs)),
    );
    require!(
        cache != Cache::Nz || f.packed(),
        CACHE_RANK,
        f.key.shape,
        "3 or 4 axes",
        "use BnBsH or BnNBsD here: NZ goes with TND, or with the decode path",
    );
    shapes(f, cache)?;
    require!(
        cache == Cache::BnBsH || !matches!(f.layout, Layout::Bsh | Layout::Bsnd),
        CACHE_LAYOUT,
        format_args!("{} with {}", cache, f.layout),
        "BnBsH",
    );
    Ok(())
}

/// Checks that the blocks of the cache have the size that the table has.
pub(super) fn cache_rows(f: &Facts<'_>, rule: &'static Rule) -> Result<(), Violation> {
    let (rows, bs) = (f.k.rows, f.call.block_size);
    if rows == bs {
        return Ok(());
    }
    Err(broken(
        rule,
        format_args!("a block table of {bs} tokens a block over a cache of {rows}, key {}", f.key.shape),
        format_args!("one block size: the table says {bs}, the cache has {rows}"),
        "make the block table with the block size of the cache, and shape the cache as its format says",
    ))
}

fn shapes(f: &Facts<'_>, cache: Cache) -> Result<(), Violation> {
    let (k, v, bs) = (f.k, f.v, f.call.block_size);
    let same = f.key.shape.rank() == f.value.shape.rank() && (k.batch, k.rows, k.heads) == (v.batch, v.rows, v.heads);
    let nz = cache != Cache::Nz
        || (f.key.shape.last() == Some(&16) && f.key.dtype.bits() == 16 && f.value.shape.last() == Some(&16));
    if same {
        cache_rows(f, &CACHE_SHAPE)?;
    }
    require!(
        same && nz && k.rows == bs && k.heads == f.kv_heads && k.dim == f.q.dim,
        CACHE_SHAPE,
        format_args!("key {}, value {}", f.key.shape, f.value.shape),
        format_args!("{cache} with block size {bs}, {} heads of {}", f.kv_heads, f.q.dim),
    );
    if cache == Cache::BnBsH {
        let hidden = f.kv_heads.saturating_mul(f.q.dim);
        HIDDEN.takes(hidden, ..=65_535)?;
    }
    Ok(())
}

/// Checks the rules of the decode path.
pub(crate) fn decode(f: &Facts<'_>) -> Result<(), Violation> {
    let (Some(cache), Some(table)) = (f.cache, &f.call.block_table) else {
        return Ok(());
    };
    let bs = f.call.block_size;
    let step = if f.kv_dtype() == DType::Int8 { 32 } else { 16 };
    BLOCK_SIZE_DECODE.takes(bs, Multiples(step, ..=512))?;
    require!(!table.is_empty() && table.elements().is_some(), TABLE_EMPTY, table.shape, "[B, M]",);
    require!(f.call.actual_seq_lengths_kv.is_some(), LENGTHS, "none", "one length a sequence",);
    let heads_first = matches!(f.layout, Layout::Bnsd | Layout::BnsdNbsd | Layout::Tnd | Layout::TndNtd);
    let fits = match cache {
        Cache::BnBsH => true,
        Cache::BnNBsD => heads_first,
        Cache::Nz => true,
    };
    require!(
        fits && (f.kv_dtype() != DType::Int4 || matches!(f.layout, Layout::Bsh | Layout::Bsnd)),
        CACHE_LAYOUT,
        format_args!("{} {} with {}", f.key.dtype, cache, f.layout),
        "BnBsH; BnNBsD with BNSD and packed layouts; INT4 with BSH and BSND",
        "change the cache's format or the query's layout",
    );
    decode_shapes(f, cache)
}

/// Checks the shapes of the decode path, which compares the axes of an NZ cache and takes the others as they are.
fn decode_shapes(f: &Facts<'_>, cache: Cache) -> Result<(), Violation> {
    let bs = f.call.block_size;
    require!(
        cache != Cache::Nz
            || ((f.k.rows == bs || f.target.cann >= Cann::V8_5) && f.k.heads == f.kv_heads && f.k.dim == f.q.dim),
        CACHE_SHAPE,
        format_args!("key {}", f.key.shape),
        format_args!("{cache} with block size {bs}, {} heads of {}", f.kv_heads, f.q.dim),
    );
    Ok(())
}
