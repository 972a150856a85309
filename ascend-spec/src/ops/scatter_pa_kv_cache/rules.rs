//! The rules of ScatterPaKvCache.

use super::problem::{Pieces, ScatterProblem};
use super::{NORM, PA_NZ, Parameter, ScatterCall};
use crate::allowed::{Named, Noted, Outcome, Shown};
use crate::ops::scatter_pa_kv_cache::Version;
use crate::rule::{broken, require, rules};
use crate::{Change, DType, Dims, Format, NewArgument, Soc, Target, TensorDesc, Violation};

rules! {
    in Scope::ALL;
    REQUIRED = "scatter.required", PARAM_NULLPTR, V1, "ScatterPaKvCache documentation, return values",
        "key, keyCacheRef and slotMapping are given, and value and valueCacheRef both or neither",
        "pass key, keyCacheRef and slotMapping, and value and valueCacheRef both or neither";
    PRODUCT = "scatter.product", FIND_KERNEL_ERROR, V1, "ScatterPaKvCache documentation, products",
        "the product has the operator",
        "run on Atlas A2, Atlas A3 or Ascend 950";
    DTYPE = "scatter.dtype", PARAM_INVALID, V1, "ScatterPaKvCache documentation, key and value",
        "keys and values are FLOAT16, BF16 or INT8, on Ascend 950 also FLOAT, INT32 or FLOAT8",
        "convert it to one of the allowed dtypes";
    SAME_DTYPE = "scatter.same_dtype", PARAM_INVALID, V1, "ScatterPaKvCache documentation, keyCacheRef",
        "a cache has the dtype of what is written into it",
        "convert the new rows to the cache's dtype";
    SLOT_DTYPE = "slot_mapping.dtype", PARAM_INVALID, V1, "ScatterPaKvCache documentation, slotMapping",
        "slotMapping is INT32 or INT64",
        "convert the slots to one of the allowed dtypes";
    FORMAT = "scatter.format", PARAM_INVALID, V1, "ScatterPaKvCache documentation, formats",
        "tensors are in a plain format such as ND or NCL, caches in the mode PA_NZ perhaps in FRACTAL_NZ",
        "describe the tensor as ND";
    CACHE_MODE = "cache_mode.known", PARAM_INVALID, V1, "ScatterPaKvCache documentation, cacheModeOptional",
        "cacheModeOptional is null, Norm or PA_NZ",
        "spell the mode as CANN does";
    SCATTER_MODE = "scatter_mode.known", PARAM_INVALID, V1,
        "ScatterPaKvCache documentation, scatterModeOptional",
        "scatterModeOptional is null, None, Alibi, Rope, Omni or Nct",
        "spell the mode as CANN does";
    CONTIGUOUS = "scatter.contiguous", PARAM_INVALID, V1, "ScatterPaKvCache documentation, constraints",
        "every tensor is contiguous, with dimensions of at least 0 whose bytes can be addressed",
        "copy new rows and slots to contiguous tensors; a cache is written in place, so pass the contiguous one that \
         attention reads";
    KEY_SHAPE = "scatter.key_shape", TILING_ERROR, V1, "ScatterPaKvCache documentation, key",
        "key is [tokens, N, D] with N and D of at least 1",
        "give the key three axes: tokens, heads, head dimension";
    VALUE_SHAPE = "scatter.value_shape", TILING_ERROR, V1, "ScatterPaKvCache documentation, value",
        "value is [tokens, N, Dv] with the key's tokens and heads and Dv of at least 1",
        "give the value a row for each of the key's";
    SLOT_SHAPE = "slot_mapping.shape", TILING_ERROR, V1, "ScatterPaKvCache documentation, slotMapping",
        "slotMapping is [tokens]",
        "give one slot for each token";
    KEY_CACHE = "key_cache.shape", TILING_ERROR, V1, "ScatterPaKvCache documentation, keyCacheRef",
        "keyCacheRef holds at least one block of rows like the key's, in the order of cacheModeOptional",
        "describe the cache in the order of cacheMode: Norm (also null) for [blocks, block size, N, D], PA_NZ for the \
         NZ orders";
    VALUE_CACHE = "value_cache.shape", TILING_ERROR, V1, "ScatterPaKvCache documentation, valueCacheRef",
        "valueCacheRef holds as many blocks of as many rows as keyCacheRef, of rows like the value's",
        "give the caches of keys and values the same blocks";
    UNUSED = "compress_lens.unused",
        Lint("the tensors are not looked at"), V1, "ScatterPaKvCache documentation, scatterModeOptional",
        "compressLens, compressSeqOffset and seqLens go with a compressed mode",
        "leave these tensors out";
    SLOT_RANGE = "slot_mapping.range",
        Overrun("a row is written to wherever its slot would be"), V1, "ScatterPaKvCache documentation, slotMapping",
        "every slot is one of the cache's",
        "take the slot from the block table of this cache: block * block size + row";
    SLOT_DUPLICATE = "slot_mapping.unique",
        Lint("one of the rows stays"), V1, "ScatterPaKvCache documentation, slotMapping",
        "no slot is named twice",
        "give each token a slot of its own";
    SLOT_NEGATIVE = "slot_mapping.negative",
        Lint("the operator's kernels pass over such tokens, though its documents do not say so"),
        V1, "ScatterPaKvCache documentation, slotMapping",
        "no slot is negative: the documents do not say that such tokens are skipped",
        "leave padding tokens out of the call, or allow this lint where negative slots are known to be skipped";
}

/// Bytes of the smallest unit of the NZ order.
const UNIT: usize = 32;

impl ScatterCall<'_> {
    /// Checks the call against the contract of the operator on `soc`, and resolves it. The contents of the slot
    /// mapping are not checked.
    ///
    /// Allocates nothing unless it refuses.
    ///
    /// # Errors
    /// [`Violation`] by the first broken rule, or [`UNSUPPORTED`](crate::UNSUPPORTED) for what this crate does not
    /// compute: compressed modes, and keys or values with steps or offsets.
    pub fn check(&self, soc: Soc) -> Result<ScatterProblem, Violation> {
        let (key, key_cache, slots) = self.required()?;
        product(soc)?;
        let nz = self.modes()?;
        let values = self.value.as_ref().zip(self.value_cache.as_ref());
        tensor(key, Parameter::Key, false)?;
        tensor(key_cache, Parameter::KeyCache, nz)?;
        tensor(slots, Parameter::SlotMapping, false)?;
        pair(key, key_cache, "key", soc)?;
        if let Some((value, cache)) = values {
            tensor(value, Parameter::Value, false)?;
            tensor(cache, Parameter::ValueCache, nz)?;
            pair(value, cache, "value", soc)?;
        }
        SLOT_DTYPE.takes(slots.dtype, [DType::Int32, DType::Int64])?;
        let tokens = key_shape(key)?;
        SLOT_SHAPE.takes(Noted(slots.shape, format_args!("for a key {}", key.shape)), Dims::of([tokens]))?;
        if let Some((value, _)) = values {
            value_shape(value, key)?;
        }
        let (blocks, block_size, key_pieces) = cache(key, key_cache, nz, None)?;
        let value = match values {
            None => None,
            Some((value, cache_of)) => Some(cache(value, cache_of, nz, Some((blocks, block_size)))?.2),
        };
        self.supported()?;
        Ok(ScatterProblem { tokens: size(tokens), blocks, block_size, key: key_pieces, value })
    }

    /// Checks for lints: the first that the call breaks, leaving out those in `allowed` (by id). The contents of the
    /// slot mapping are not checked: see [`slot_faults`](super::slot_faults). The product, which
    /// calls of all caches take, makes no difference.
    ///
    /// # Errors
    /// The broken lint, with the same fields as a broken rule.
    pub fn lint(&self, _: Soc, allowed: &[&str]) -> Result<(), Violation> {
        let given = [
            (self.compress_lens, "compressLens"),
            (self.compress_seq_offset, "compressSeqOffset"),
            (self.seq_lens, "seqLens"),
        ];
        match given.into_iter().find(|(desc, _)| desc.is_some()) {
            Some((_, name)) if !allowed.contains(&UNUSED.id) => Err(broken(
                &UNUSED,
                format_args!("{name} without a compressed mode"),
                "null",
                format_args!("leave out {name}"),
            )),
            _ => Ok(()),
        }
    }

    fn required(&self) -> Result<(&TensorDesc, &TensorDesc, &TensorDesc), Violation> {
        let missing = |name: &str, other: &str| {
            let refused = REQUIRED.requires(None::<()>, name);
            refused.fix(|| format!("pass {name}, or leave out {other}"))
        };
        let all = (
            REQUIRED.requires(self.key.as_ref(), "key")?,
            REQUIRED.requires(self.key_cache.as_ref(), "keyCacheRef")?,
            REQUIRED.requires(self.slot_mapping.as_ref(), "slotMapping")?,
        );
        match (&self.value, &self.value_cache) {
            (Some(_), None) => missing("valueCacheRef", "value")?,
            (None, Some(_)) => missing("value", "valueCacheRef")?,
            _ => {}
        }
        Ok(all)
    }

    /// Checks the modes by their names, and returns whether the caches are in the NZ order.
    fn modes(&self) -> Result<bool, Violation> {
        let cache_mode = self.cache_mode.unwrap_or(NORM);
        let given = format_args!("{cache_mode:?}");
        require!(matches!(cache_mode, NORM | PA_NZ), CACHE_MODE, given, "null, Norm or PA_NZ");
        let scatter_mode = self.scatter_mode.unwrap_or("None");
        require!(
            matches!(scatter_mode, "None" | "Alibi" | "Rope" | "Omni" | "Nct"),
            SCATTER_MODE,
            format_args!("{scatter_mode:?}"),
            "null, None, Alibi, Rope, Omni or Nct",
        );
        Ok(cache_mode == PA_NZ)
    }

    fn supported(&self) -> Result<(), Violation> {
        let feature = match self.scatter_mode {
            Some("Alibi") => "scatterModeOptional Alibi (compressed keys and values)",
            Some("Rope") => "scatterModeOptional Rope (compressed keys and values)",
            Some("Omni") => "scatterModeOptional Omni (compressed keys and values)",
            Some("Nct") => "scatterModeOptional Nct",
            _ if self.strides.is_some_and(|strides| strides != [1, 1]) => "stridesOptional other than 1 and 1",
            _ if self.offsets.is_some_and(|offsets| offsets != [0, 0]) => "offsetsOptional other than 0 and 0",
            _ => return Ok(()),
        };
        Err(Violation::unsupported(feature))
    }
}

fn product(soc: Soc) -> Result<(), Violation> {
    require!(Version::V1.runs_on(Target::snapshot(soc)), PRODUCT, soc, "Atlas A2, Atlas A3 and Ascend 950",);
    Ok(())
}

fn tensor(desc: &TensorDesc, parameter: Parameter, nz: bool) -> Result<(), Violation> {
    let name = parameter.acl_name();
    require!(
        desc.format.is_plain() || nz && desc.format == Format::FractalNz,
        FORMAT,
        format_args!("{name} in format {}", desc.format),
        format_args!("{}{}", if nz { "FRACTAL_NZ, " } else { "" }, Format::PLAIN),
        format_args!("describe {name} as ND"),
    );
    let addressable = desc.is_countable() && desc.byte_range().is_some();
    require!(
        addressable && desc.is_contiguous(),
        CONTIGUOUS,
        format_args!("{name} {} strides {}", desc.shape, desc.strides),
        "row-major strides",
        match (addressable, parameter.is_output()) {
            (false, _) => Err(format!("give {name} dimensions whose bytes can be addressed")),
            (true, true) => Err(format!(
                "{name} is written in place, and a copy would be written in its stead: pass the contiguous cache that \
                 attention reads"
            )),
            (true, false) => Ok(Change::to(parameter, NewArgument::Packed)),
        },
    );
    Ok(())
}

/// Checks the dtypes of new rows and their cache.
fn pair(desc: &TensorDesc, cache: &TensorDesc, name: &str, soc: Soc) -> Result<(), Violation> {
    use DType::{Bf16, Float, Float8E4M3Fn, Float8E5M2, Float16, Int8, Int32};
    let allowed: &[DType] = match soc {
        Soc::Ascend950 => &[Float16, Bf16, Int8, Float, Int32, Float8E5M2, Float8E4M3Fn],
        _ => &[Float16, Bf16, Int8],
    };
    DTYPE.takes(Named(name, desc.dtype), allowed).fix(|| format!("convert {name} to one of the allowed dtypes"))?;
    SAME_DTYPE
        .takes(Shown(format_args!("{name} {} for a cache of {}", desc.dtype, cache.dtype), desc.dtype), cache.dtype)
        .fix(|| format!("convert {name} to the cache's dtype"))
}

/// Checks the shape of a key, and returns its number of tokens.
fn key_shape(key: &TensorDesc) -> Result<i64, Violation> {
    match key.shape[..] {
        [tokens, heads, dim] if heads > 0 && dim > 0 => Ok(tokens),
        _ => Err(KEY_SHAPE.broken(key.shape, "[tokens, N, D]")),
    }
}

fn value_shape(value: &TensorDesc, key: &TensorDesc) -> Result<(), Violation> {
    let holds = match (&value.shape[..], &key.shape[..]) {
        (&[tokens, heads, dim], &[rows, n, _]) => tokens == rows && heads == n && dim > 0,
        _ => false,
    };
    require!(
        holds,
        VALUE_SHAPE,
        format_args!("{} for a key {}", value.shape, key.shape),
        "[tokens, N, Dv] with the key's tokens and heads",
    );
    Ok(())
}

/// Number of blocks in a cache, number of rows in a block, and the pieces of a row. The value's cache must have the
/// two numbers of the key's (`like`).
fn cache(
    rows: &TensorDesc,
    cache: &TensorDesc,
    nz: bool,
    like: Option<(usize, usize)>,
) -> Result<(usize, usize, Pieces), Violation> {
    let &[_, heads, dim] = &rows.shape[..] else {
        return Err(KEY_SHAPE.broken(rows.shape, "[tokens, N, D]"));
    };
    let lanes = (UNIT / rows.dtype.size().unwrap_or(1)) as i64;
    let unit = |c: i64| c == lanes;
    let held = |nz: bool| match cache.shape[..] {
        [blocks, block_size, n, d] if !nz && n == heads && d == dim => Some((blocks, block_size)),
        [blocks, parts, block_size, c] if nz && unit(c) && parts.checked_mul(c) == heads.checked_mul(dim) => {
            Some((blocks, block_size))
        }
        [blocks, n, parts, block_size, c] if nz && unit(c) && n == heads && parts.checked_mul(c) == Some(dim) => {
            Some((blocks, block_size))
        }
        _ => None,
    };
    let held = |nz| {
        held(nz)
            .filter(|&(blocks, block_size)| blocks > 0 && block_size > 0)
            .map(|(blocks, block_size)| (size(blocks), size(block_size)))
            .filter(|&found| like.is_none_or(|like| like == found))
    };
    let found = held(nz);
    let rule = if like.is_some() { &VALUE_CACHE } else { &KEY_CACHE };
    let Some((blocks, block_size)) = found else {
        let order = if nz {
            format!("[blocks, N * D / {lanes}, block size, {lanes}] or [blocks, N, D / {lanes}, block size, {lanes}]")
        } else {
            "[blocks, block size, N, D]".to_owned()
        };
        let (n, d) = (heads, dim);
        let also = like.map(|(blocks, size)| format!(", blocks = {blocks}, block size = {size}"));
        return Err(broken(
            rule,
            format_args!("{} for rows {}", cache.shape, rows.shape),
            format_args!("{order} with N = {n}, D = {d}{}", also.unwrap_or_default()),
            match held(!nz) {
                Some(_) if like.is_none() => Ok((
                    Change::set(Parameter::CacheMode, if nz { NORM } else { PA_NZ }),
                    "the cache has the order of that mode",
                )),
                _ => Err(rule.fix),
            },
        ));
    };
    // The bytes of a contiguous cache can be addressed, so those of its rows can.
    let row_bytes = size(heads).saturating_mul(size(dim)).saturating_mul(rows.dtype.size().unwrap_or(1));
    let pieces =
        if nz { Pieces { count: row_bytes / UNIT, bytes: UNIT } } else { Pieces { count: 1, bytes: row_bytes } };
    Ok((blocks, block_size, pieces))
}

/// A dimension already known to be no less than 0.
fn size(dim: i64) -> usize {
    usize::try_from(dim).unwrap_or(usize::MAX)
}
