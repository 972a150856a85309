//! Multi-head latent attention: rotary parts, the absorbed form over a compressed cache, and its quantised form.

mod sliding;

use super::{Facts, packed};
use crate::allowed::{Noted, Outcome};
use crate::layout::Extents;
use crate::ops::fused_infer_attention_score::{Cache, FiaCall, Parameter, Version};
use crate::rule::{require, rules};
use crate::{Cann, DType, Layout, SparseMode, TensorDesc, Violation};

rules! {
    in Scope::A2_A3;
    PAIR = "rope.pair", TILING_ERROR, V3, "checks E2.7, G2.1" in Scope::ALL,
        "queryRope and keyRope are given together",
        "pass the rotary parts of query and key";
    LAYOUT = "rope.layout", TILING_ERROR, V3, "checks B5, D16, I8",
        "rotary parts go with TND and NTD_TND in the prefill path, and with every layout but BNSD_BSND and NTD_TND in \
         the absorbed form",
        "pack the sequences, and over latents compute at most 16 rows of a sequence in a call";
    PREFILL_DIMS = "rope.prefill_dims", TILING_ERROR, V3, "check E2.7",
        "in the prefill path query, key and value have head dimension 128, the rotary parts 64 and the other axes of \
         query and key",
        "shape the rotary parts as query and key";
    ABSORBED_DIMS = "rope.absorbed_dims", TILING_ERROR, V3, "checks F18, G3.7",
        "in the absorbed form query, key and value have head dimension 512 and the rotary parts 64",
        "absorb the projections: the compressed cache has 512 channels, the rotary part 64";
    SHAPE = "rope.shape", TILING_ERROR, V3, "checks F18, G4.4" in Scope::ALL,
        "queryRope has the query's shape and keyRope the key's, but for the head dimension",
        "shape queryRope as the query with head dimension 64";
    DTYPE = "rope.dtype", TILING_ERROR, V3, "checks G2.2, G3.5" in Scope::ALL,
        "queryRope has the query's dtype, keyRope the key's; BF16 for an INT8 query",
        "convert the rotary parts to the query's dtype";
    KV_HEADS = "mla.kv_heads", TILING_ERROR, V3, "checks F18, G3.7",
        "the absorbed form has one key head",
        "set numKeyValueHeads to 1";
    HEADS = "mla.heads", TILING_ERROR, V3, "checks F18, G3.7" in Scope::ALL,
        "the absorbed form has 1, 2, 4, ... or 128 query heads; on Ascend 950 from 9.2 on any number up to 128 where \
         nothing is quantised",
        "pad the heads with zeros to a power of two, and divide more than 128 over several calls";
    OTHER_HEADS = "mla.other_heads",
        TILING_ERROR, V5, "9.2, absorbed form, heads" in Scope::ASCEND_950.since_on_950(V9_2),
        "a number of query heads that is no power of two goes with no quantised output and no mask of sparse mode 0",
        "pad the heads with zeros to a power of two, or use mode 3";
    ROWS = "mla.rows", TILING_ERROR, V3, "checks F4, F19, G3.7",
        "the absorbed form has at most 16 query rows a sequence, from 9.1 on 32 with an INT8 query",
        "split long queries, or run them as prefill with rotary parts";
    PAGED = "mla.paged", TILING_ERROR, V3, "checks B13, F18, G3.2",
        "the absorbed form is paged, except with sparse mode 4",
        "page the compressed cache";
    BLOCK_SIZE = "mla.block_size", TILING_ERROR, V3, "checks F18, G1.4, G3.2",
        "blockSize is 16 or 128, 128 with an NZ cache, 64 or 128 with sparse mode 4, and not negative without a block \
         table",
        "use blocks of 128 tokens";
    CACHE = "mla.cache", TILING_ERROR, V3, "checks F18, G3.2, G3.6, G4.4, G4.5",
        "the caches of key, value and keyRope have one format and block count, and the format goes with the layout",
        "shape the three caches alike; BnNBsD goes with BNSD and packed queries, NZ with the others";
    MODE = "mla.sparse_mode", TILING_ERROR, V3, "checks F14a, F14b, G3.4",
        "single rows take mode 0 without a mask, several rows mode 3 with the [2048, 2048] mask, or mode 4 where \
         offered",
        "use mode 3 for several rows, mode 0 without a mask for one";
    SLIDING = "mla.sliding", TILING_ERROR, V3, "checks G1.5, G3.4, G4.2, J30",
        "sparse mode 4 has BSND, 128 heads, a BnBsH cache, preTokens from 1 to 2048, nextTokens 0, at most 131088 keys \
         and no more rows than keys",
        "meet all of the conditions, or use mode 3, and no mask for single rows";
    LSE = "mla.softmax_lse", TILING_ERROR, V3, "checks F17, G3.1",
        "the absorbed form writes no log-sum-exp",
        "set softmaxLseFlag to false";
    PRECISE = "mla.inner_precise", TILING_ERROR, V3, "check G3.1",
        "innerPrecise is 0 or 1, or 2 with an INT8 query in TND",
        "choose high precision (0) or high performance (1)";
    ALONE = "mla.alone", TILING_ERROR, V3, "check G2.3",
        "the absorbed form goes with no quantisation, position bias, left padding or shared prefix",
        "drop the argument and set its mode to 0";
    QUANTISED_CACHE = "mla.quantised_cache", TILING_ERROR, V3, "checks F14d, G2.2; decode path, latent attention",
        "rotary parts of a half-precision query go with no quantised cache in the decode path",
        "keep the cache in the query's dtype, or quantise the query to INT8 as well";
    LENGTHS = "mla.lengths", TILING_ERROR, V3, "checks F19, G3.8, G4.1",
        "the absorbed form has no query lengths unless packed or with sparse mode 4, and a key length for each \
         sequence",
        "pass the number of cached tokens of each sequence, and drop actualSeqLengths";
    OUT = "mla.output", TILING_ERROR, V3, "checks F21, G3.1",
        "the output has the query's dtype, BF16 for an INT8 query",
        "make the output of the query's dtype, BF16 for an INT8 query";
    TREE = "mla.tree_mask", TILING_ERROR, V4, "sparse mode 9, full quantisation" in Scope::A2_A3.since(V9_1),
        "the tree mask of an INT8 query with several rows a sequence is [B, S, S]",
        "pass one square of the query's rows for each sequence";
    FULL_QUANT = "mla.full_quant", TILING_ERROR, V4, "checks F12, F14d, J10",
        "an INT8 query has an INT8 NZ cache of blockSize 128, BF16 rotary parts, scales of query, key and value, and \
         queryQuantMode 3, and no left padding",
        "meet all of the conditions";
}

/// Checks that rotary parts come in pairs.
pub(crate) fn paired(f: &Facts<'_>) -> Result<(), Violation> {
    PAIR.pairs(f.call, Parameter::ROTARY)
}

/// Checks the rotary parts of the decode path: half precision, and given where the packed absorbed form needs them.
pub(crate) fn decode_ropes(f: &Facts<'_>) -> Result<(), Violation> {
    paired(f)?;
    let ropes = [&f.call.query_rope, &f.call.key_rope];
    require!(
        ropes.into_iter().flatten().all(|rope| rope.dtype.is_half()),
        DTYPE,
        format_args!("{}", f.call.key_rope.map_or(DType::Undefined, |rope| rope.dtype)),
        "FLOAT16, BF16",
    );
    require!(
        !(f.packed() && f.q.dim == 512) || f.rope(),
        PAIR,
        "neither",
        "both",
        "packed queries of head dimension 512 are the absorbed form: pass queryRope and keyRope, or call with BSH, \
         BSND or BNSD, which take heads of 512 without them",
    );
    Ok(())
}

/// Checks pair and layout of the rotary parts in the prefill path.
pub(crate) fn prefill_layout(f: &Facts<'_>) -> Result<(), Violation> {
    paired(f)?;
    match f.call.query_rope {
        Some(_) => LAYOUT.takes(f.layout, [Layout::Tnd, Layout::NtdTnd]),
        None => Ok(()),
    }
}

/// Checks the rotary parts of the prefill path.
pub(crate) fn prefill(f: &Facts<'_>) -> Result<(), Violation> {
    let (Some(q), Some(k)) = (&f.call.query_rope, &f.call.key_rope) else {
        return Ok(());
    };
    require!(
        (f.q.dim, f.k.dim, f.v.dim) == (128, 128, 128),
        PREFILL_DIMS,
        format_args!("{}, {}, {}", f.q.dim, f.k.dim, f.v.dim),
        "128 three times",
        "split the head dimension as 128 and 64",
    );
    let wanted =
        |desc: &TensorDesc, extents: Extents| f.layout.input().shape(Extents { dim: 64, ..extents }) == desc.shape;
    let key_fits = match f.cache {
        None => wanted(k, f.k),
        // The number of blocks is not compared.
        Some(cache) => cache.extents(k, f.kv_heads).is_some_and(|extents| {
            extents.heads == f.k.heads && extents.dim == 64 && (cache == Cache::Nz || extents.rows == f.k.rows)
        }),
    };
    require!(
        wanted(q, f.q) && key_fits,
        PREFILL_DIMS,
        format_args!("queryRope {}, keyRope {}", q.shape, k.shape),
        "the shapes of query and key with head dimension 64",
    );
    Ok(())
}

/// Whether the decode path passes the call to its newer checker: the call has rotary parts and no quantisation.
pub(crate) fn is_for_newer_checker(f: &Facts<'_>) -> bool {
    f.call.query_rope.is_some() && f.call.key_rope.is_some() && f.query.dtype.is_half() && f.query.dtype == f.key.dtype
}

/// Checks the absorbed form without quantisation.
pub(crate) fn absorbed(f: &Facts<'_>) -> Result<(), Violation> {
    let call = f.call;
    let (Some(q_rope), Some(k_rope)) = (&call.query_rope, &call.key_rope) else {
        return paired(f);
    };
    let sliding = call.mode() == SparseMode::Band.acl();
    LSE.leaves_out(call, &[Parameter::SoftmaxLseFlag])?;
    OUT.takes(f.out.dtype, f.query.dtype)?;
    PRECISE.takes(call.inner_precise, [0, 1])?;
    alone(f)?;
    super::lists::batch_max(f)?;
    super::heads::query(f)?;
    let out = f.layout.out_shape(f.q);
    super::output::OUT_SHAPE.takes(f.out.shape, out)?;
    require!(
        call.key.len() == 1 && call.value.len() == 1,
        super::lists::LIST_LENGTH,
        format_args!("{} keys, {} values", call.key.len(), call.value.len()),
        1,
        "pass one cache",
    );
    dims(f)?;
    require!(
        q_rope.dtype == f.query.dtype && k_rope.dtype == f.key.dtype && f.value.dtype == f.key.dtype,
        DTYPE,
        format_args!("queryRope {}, keyRope {}, value {}", q_rope.dtype, k_rope.dtype, f.value.dtype),
        f.query.dtype,
    );
    let Some(cache) = f.cache else {
        require!(sliding && !f.packed(), PAGED, "no blockTable", "a blockTable",);
        BLOCK_SIZE.takes(call.block_size, 0..).fix(|| "set blockSize to 0")?;
        return sliding::dense(f, k_rope);
    };
    block_size(f, cache, sliding)?;
    caches(f, cache, k_rope)?;
    lengths(f, sliding)?;
    modes(f, sliding)?;
    if sliding { sliding::rules(f) } else { Ok(()) }
}

fn alone(f: &Facts<'_>) -> Result<(), Violation> {
    let single = [
        Parameter::DequantScaleQuery,
        Parameter::KeyRopeAntiquantScale,
        Parameter::PseShift,
        Parameter::ActualSharedPrefixLen,
    ];
    let all: [&[Parameter]; 9] = [
        &Parameter::DEQUANTISATION,
        &Parameter::OUTPUT_QUANTISATION,
        &Parameter::MERGED_ANTIQUANT,
        &Parameter::SPLIT_SCALES,
        &Parameter::SPLIT_OFFSETS,
        &single,
        &Parameter::LEFT_PADDING,
        &Parameter::SHARED_PREFIX,
        &Parameter::QUANTISATION_MODES,
    ];
    all.into_iter().try_for_each(|parameters| ALONE.leaves_out(f.call, parameters))
}

pub(super) fn dims(f: &Facts<'_>) -> Result<(), Violation> {
    let rope =
        |desc: &Option<TensorDesc>| desc.as_ref().and_then(|desc| rope_extents(f, desc)).map(|extents| extents.dim);
    let dims = (f.q.dim, f.k.dim, f.v.dim, rope(&f.call.query_rope));
    require!(
        dims == (512, 512, 512, Some(64)),
        ABSORBED_DIMS,
        format_args!("query {}, key {}, value {}, queryRope {}", dims.0, dims.1, dims.2, dims.3.unwrap_or(0)),
        "512 three times, 64",
    );
    KV_HEADS.takes(f.kv_heads, 1)?;
    heads(f)?;
    let sliding = f.call.mode() == SparseMode::Band.acl();
    let rows = if f.packed() { packed::longest_query(f) } else { f.q.rows };
    if !sliding {
        ROWS.takes(rows, ..=FiaCall::most_decode_rows(f.target, f.query.dtype))?;
    }
    let shaped = f.call.query_rope.as_ref().and_then(|desc| rope_extents(f, desc));
    require!(
        shaped == Some(Extents { dim: 64, ..f.q }),
        SHAPE,
        format_args!("queryRope {}", f.call.query_rope.map_or(crate::Dims::of([]), |desc| desc.shape)),
        f.layout.input().shape(Extents { dim: 64, ..f.q }),
    );
    Ok(())
}

/// Extents of queryRope. The quantised form divides the last axis of BSH and drops the remainder.
fn rope_extents(f: &Facts<'_>, desc: &TensorDesc) -> Option<Extents> {
    let heads = f.call.num_heads;
    match (f.layout.input(), &desc.shape[..]) {
        (crate::Axes::Bsh, &[batch, rows, hidden]) if f.query.dtype == DType::Int8 => {
            Some(Extents { batch, heads, rows, dim: hidden / heads.max(1) })
        }
        (axes, _) => axes.extents(&desc.shape, heads),
    }
}

pub(super) fn block_size(f: &Facts<'_>, cache: Cache, sliding: bool) -> Result<(), Violation> {
    let allowed: &[i64] = match (sliding, cache) {
        (true, Cache::Nz) => &[],
        (true, _) => &[64, 128],
        (false, Cache::Nz) => &[128],
        (false, _) => &[16, 128],
    };
    BLOCK_SIZE.takes(Noted(f.call.block_size, format_args!("with {cache}")), allowed)
}

pub(super) fn caches(f: &Facts<'_>, cache: Cache, k_rope: &TensorDesc) -> Result<(), Violation> {
    let bs = f.call.block_size;
    let rope = cache.extents(k_rope, 1);
    let grid = |extents: Extents| (extents.batch, extents.heads, extents.rows);
    let lanes = |desc: &TensorDesc| 256 / i64::from(desc.dtype.bits().max(1));
    let nz =
        cache != Cache::Nz || [f.key, f.value, k_rope].into_iter().all(|desc| desc.shape.last() == Some(&lanes(desc)));
    let heads_first = match cache {
        Cache::BnBsH => true,
        Cache::BnNBsD => f.packed() || matches!(f.layout, Layout::Bnsd | Layout::BnsdNbsd),
        Cache::Nz => !matches!(f.layout, Layout::Bnsd | Layout::BnsdNbsd),
    };
    let alike =
        grid(f.k) == grid(f.v) && rope.map(grid) == Some(grid(f.k)) && rope.map(|extents| extents.dim) == Some(64);
    require!(
        alike
            && nz
            && heads_first
            && f.k.rows == bs
            && f.k.heads == 1
            && k_rope.shape.rank() == f.key.shape.rank()
            && f.value.shape.rank() == f.key.shape.rank(),
        CACHE,
        format_args!("key {}, value {}, keyRope {} with {}", f.key.shape, f.value.shape, k_rope.shape, f.layout),
        format_args!("{cache} of block size {bs}, one head of 512, 512 and 64"),
    );
    Ok(())
}

fn lengths(f: &Facts<'_>, sliding: bool) -> Result<(), Violation> {
    let call = f.call;
    if f.packed() {
        let most = FiaCall::MOST_PACKED_ROWS / i64::from(f.query.dtype.bits().max(8) / 8);
        packed::lengths(f, FiaCall::MOST_SEQUENCES, most)?;
    } else {
        require!(
            sliding || call.actual_seq_lengths.is_none(),
            LENGTHS,
            "actualSeqLengths",
            "none",
            "drop actualSeqLengths: every sequence has all its query rows",
        );
        rows_given(f)?;
        require!(
            call.actual_seq_lengths_kv.is_some(),
            LENGTHS,
            "no actualSeqLengthsKv",
            "one length a sequence",
            "pass the number of cached tokens of each sequence",
        );
        super::lengths::key(f)?;
    }
    let table = call.block_table.as_ref();
    require!(
        table.is_some_and(|table| !table.is_empty()
            && table.dtype == DType::Int32
            && (!f.packed() || table.shape.first() == Some(&f.batch))
            && table.shape.rank() == 2),
        super::paged::TABLE,
        table.map_or(crate::Dims::of([]), |table| table.shape),
        format_args!("INT32 [{}, M]", f.batch),
    );
    Ok(())
}

pub(super) fn modes(f: &Facts<'_>, sliding: bool) -> Result<(), Violation> {
    let mode = f.call.mode();
    let mask = f.call.mask();
    let size = SparseMode::COMPRESSED_MASK_SIZE;
    let square = mask.is_some_and(|mask| *mask.shape == [size, size]);
    let single = !f.packed() && f.q.rows == 1;
    let fits = match mode {
        0 => (f.packed() || single) && f.call.atten_mask.is_none(),
        3 => !single && square,
        4 => sliding && !f.packed() && square,
        _ => false,
    };
    require!(
        fits,
        MODE,
        format_args!("mode {mode} {} a mask", if mask.is_some() { "with" } else { "without" }),
        "0 without a mask for single rows and packed queries, 3 with the [2048, 2048] mask for several rows",
        match mode == SparseMode::Tree.acl() {
            true => "the tree mask of mode 9 exists from CANN 9.1 on",
            false => MODE.fix,
        },
    );
    Ok(())
}

/// Checks the number of query heads of the absorbed form.
pub(crate) fn heads(f: &Facts<'_>) -> Result<(), Violation> {
    let heads = f.call.num_heads;
    let half = f.query.dtype.is_half() && f.query.dtype == f.kv_dtype();
    let every = f.is_950() && f.since(Cann::V9_2) && half;
    if every && heads.count_ones() != 1 {
        HEADS.takes(heads, 1..=128)?;
        let masked = f.call.mode() == SparseMode::DefaultMask.acl() && f.call.mask().is_some();
        return OTHER_HEADS
            .forbids([("a quantised output", !f.out.dtype.is_half()), ("a mask of sparse mode 0", masked)]);
    }
    HEADS.takes(f.call.num_heads, [1, 2, 4, 8, 16, 32, 64, 128])
}

/// Checks query lengths in the calls where the operator does.
pub(super) fn rows_given(f: &Facts<'_>) -> Result<(), Violation> {
    if let Some(lengths) = f.call.actual_seq_lengths {
        let fits = lengths.iter().all(|len| (0..=f.q.rows).contains(len));
        require!(
            fits && (lengths.len() <= 1 || lengths.len() >= f.batch()),
            LENGTHS,
            format_args!("{lengths:?}"),
            format_args!("0 to {}", f.q.rows),
            "pass each sequence's number of rows",
        );
    }
    Ok(())
}
