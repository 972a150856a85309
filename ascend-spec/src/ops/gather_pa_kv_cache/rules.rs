//! The rules of GatherPaKvCache.

use super::{GatherCall, GatherProblem, Parameter};
use crate::allowed::{MultiplesOf, Noted, Outcome, Shown};
use crate::contract::first_lint;
use crate::dtype::Names;
use crate::ops::gather_pa_kv_cache::Version;
use crate::ops::scatter_pa_kv_cache::{NORM, PA_NZ, Pieces};
use crate::rule::{require, rules};
use crate::{DType, Format, Soc, Target, TensorDesc, Violation};

rules! {
    in Scope::UNIFIED;
    REQUIRED = "gather.required", PARAM_NULLPTR, V1, "GatherPaKvCache documentation, return values",
        "every tensor but seqOffset is given",
        "pass keyCache, valueCache, blockTables, seqLens, keyRef and valueRef";
    PRODUCT = "gather.product", FIND_KERNEL_ERROR, V1, "GatherPaKvCache documentation, products",
        "the product has the operator in the release",
        "run on Atlas A2, Atlas A3 or Ascend 950 with CANN 8.5 or newer";
    DTYPE = "gather.dtype", PARAM_INVALID, V1, "GatherPaKvCache documentation, keyCache and valueCache",
        "caches are FLOAT16, BF16 or INT8, on Ascend 950 also FLOAT, INT32 or FLOAT8",
        "convert the cache to one of the allowed dtypes";
    SAME_DTYPE = "gather.same_dtype", PARAM_INVALID, V1, "GatherPaKvCache documentation, keyRef and valueRef",
        "keyRef and valueRef have the dtypes of their caches",
        "gather into a tensor of the cache's dtype";
    INDEX_DTYPE = "gather.index_dtype", PARAM_INVALID, V1, "GatherPaKvCache documentation, blockTables and seqLens",
        "blockTables, seqLens and seqOffset are INT32, on Ascend 950 perhaps all INT64",
        "convert all numbers to INT32";
    RANK = "gather.rank", PARAM_INVALID, V1, "GatherPaKvCache documentation, return values",
        "caches have 4 axes, blockTables 2, seqLens and seqOffset 1, keyRef and valueRef 3, or 2 for PA_NZ",
        "describe the tensor with as many axes";
    FORMAT = "gather.format", PARAM_INVALID, V1, "GatherPaKvCache documentation, formats",
        "tensors are in a plain format such as ND or NCL, caches in the mode PA_NZ perhaps in FRACTAL_NZ",
        "describe the tensor as ND";
    CONTIGUOUS = "gather.contiguous", PARAM_INVALID, V1, "GatherPaKvCache documentation, constraints",
        "every tensor is contiguous, with dimensions of at least 0 whose bytes can be addressed",
        "copy the tensor to a contiguous one";
    CACHE_MODE = "gather.cache_mode", TILING_ERROR, V1, "GatherPaKvCache tiling, cacheMode",
        "cacheMode is null, empty, Norm or PA_NZ",
        "spell the mode as CANN does";
    SEQ_LENS = "gather.seq_lens", TILING_ERROR, V1, "GatherPaKvCache tiling, seqLens",
        "seqLens has an entry for each row of blockTables, and one more where it says where sequences begin",
        "give a length for each sequence; with isSeqLensCumsum a 0 before the first end";
    SEQ_OFFSET = "gather.seq_offset", TILING_ERROR, V1, "GatherPaKvCache tiling, seqOffset",
        "seqOffset has an entry for each row of blockTables",
        "give an offset for each sequence, or none";
    CACHE = "gather.cache_shape", TILING_ERROR, V1, "GatherPaKvCache documentation, keyCache and valueCache",
        "both caches have as many blocks of as many rows, of the heads and head dimensions of keyRef and valueRef",
        "describe caches and outputs in the shapes of the mode";
    TOKENS = "gather.tokens", TILING_ERROR, V1, "GatherPaKvCache documentation, keyRef and valueRef",
        "keyRef and valueRef have as many rows",
        "give both a row for each token of all sequences";
    UNIT_OF_COPIES = "gather.unit",
        Lint("copies are in units of 32 bytes: rows that are not whole units are cut"),
        V1, "GatherPaKvCache kernel, copies",
        "the bytes of a token's keys, and of its values, are a multiple of 32 on Atlas A2 and A3",
        "use head counts and dimensions with whole units, or gather another way";
    TOKEN_BYTES = "gather.token_bytes",
        Lint("the row does not fit in the core's memory"), V1, "GatherPaKvCache kernel, buffers",
        "a token's keys, and its values, are at most 148 KiB",
        "gather the heads in several calls";
    BLOCK = "gather.block", Overrun("rows of other memory are copied"), V1, "GatherPaKvCache kernel, blockTables",
        "blockTables names blocks of the caches, and as many as each sequence needs",
        "take the table and the lengths of one cache";
}

/// Bytes of the unit in which rows are copied, and of the smallest unit of the NZ order.
const UNIT: usize = 32;

/// Most bytes of a token's row.
const MOST_BYTES: usize = 148 << 10;

impl GatherCall<'_> {
    /// Checks the call against the contract of the operator on a target, and resolves it. The contents of tables and
    /// lengths are not checked.
    ///
    /// Allocates nothing unless it refuses.
    ///
    /// # Errors
    /// [`Violation`] by the first broken rule.
    pub fn check(&self, target: Target) -> Result<GatherProblem, Violation> {
        let given = |tensor: &Option<TensorDesc>, name| REQUIRED.requires(*tensor, name);
        let (key_cache, value_cache) = (given(&self.key_cache, "keyCache")?, given(&self.value_cache, "valueCache")?);
        let (table, lengths) = (given(&self.block_tables, "blockTables")?, given(&self.seq_lens, "seqLens")?);
        let (key, value) = (given(&self.key, "keyRef")?, given(&self.value, "valueRef")?);
        PRODUCT.runs(Version::V1.info(), target)?;
        self.dtypes(target.soc)?;
        self.ranks()?;
        let mode = self.cache_mode.filter(|mode| !mode.is_empty());
        let mode = mode.unwrap_or(NORM);
        require!(matches!(mode, NORM | PA_NZ), CACHE_MODE, format_args!("{mode:?}"), "null, Norm or PA_NZ",);
        let nz = mode == PA_NZ;
        self.plain(nz)?;
        let sequences = axis(&table, 0);
        let entries = sequences.saturating_add(i64::from(self.is_seq_lens_cumsum));
        require!(
            axis(&lengths, 0) == entries,
            SEQ_LENS,
            format_args!("{} for a table {}", lengths.shape, table.shape),
            format_args!("[{entries}]"),
        );
        if let Some(offset) = &self.seq_offset {
            require!(
                axis(offset, 0) == sequences,
                SEQ_OFFSET,
                format_args!("{} for a table {}", offset.shape, table.shape),
                format_args!("[{sequences}]"),
            );
        }
        require!(
            axis(&key, 0) == axis(&value, 0),
            TOKENS,
            format_args!("{} beside {}", key.shape, value.shape),
            "the same number of rows",
        );
        let of_key = pieces(&key, &key_cache, nz)?;
        let of_value = pieces(&value, &value_cache, nz)?;
        let (blocks, block_size) = paged(&key_cache, nz);
        require!(
            paged(&value_cache, nz) == (blocks, block_size),
            CACHE,
            format_args!("{} beside {}", value_cache.shape, key_cache.shape),
            "caches of as many blocks of as many rows",
        );
        let size = |dim: i64| usize::try_from(dim).unwrap_or(0);
        Ok(GatherProblem {
            sequences: size(sequences),
            tokens: size(axis(&key, 0)),
            blocks: size(blocks),
            block_size: size(block_size),
            columns: size(axis(&table, 1)),
            cumulative: self.is_seq_lens_cumsum,
            offsets_in_columns: nz && target.soc != Soc::Ascend950,
            key: of_key,
            value: of_value,
        })
    }

    /// Checks for lints: the first that the call breaks, leaving out those in `allowed` (by id). A call that breaks a
    /// rule has none: [`check`](Self::check) refuses it.
    ///
    /// # Errors
    /// The broken lint, with the same fields as a broken rule.
    pub fn lint(&self, target: Target, allowed: &[&str]) -> Result<(), Violation> {
        let Ok(problem) = self.check(target) else {
            return Ok(());
        };
        first_lint(allowed, |report| {
            for (pieces, name) in [(problem.key, "keyRef"), (problem.value, "valueRef")] {
                let note = format_args!("bytes a token of {name}");
                let bytes = || Noted(pieces.row_bytes(), note);
                if target.soc != Soc::Ascend950 {
                    UNIT_OF_COPIES.takes(bytes(), MultiplesOf(UNIT)).report(report);
                }
                TOKEN_BYTES.takes(bytes(), ..=MOST_BYTES).report(report);
            }
        })
    }

    fn dtypes(&self, soc: Soc) -> Result<(), Violation> {
        use DType::{Bf16, Float, Float8E4M3Fn, Float8E5M2, Float16, Int8, Int32, Int64};
        let (allowed, indices): (&[DType], &[DType]) = match soc {
            Soc::Ascend950 => (&[Float16, Bf16, Int8, Float, Int32, Float8E5M2, Float8E4M3Fn], &[Int32, Int64]),
            _ => (&[Float16, Bf16, Int8], &[Int32]),
        };
        let pairs = [(self.key_cache, self.key, "keyRef"), (self.value_cache, self.value, "valueRef")];
        for (cache, rows, name) in pairs {
            let (Some(cache), Some(rows)) = (cache, rows) else {
                continue;
            };
            DTYPE.takes(cache.dtype, allowed)?;
            SAME_DTYPE.takes(
                Shown(format_args!("{name} {} for a cache of {}", rows.dtype, cache.dtype), rows.dtype),
                cache.dtype,
            )?;
        }
        let numbers = [self.block_tables, self.seq_lens, self.seq_offset];
        let mut first = None;
        for desc in numbers.into_iter().flatten() {
            let first = *first.get_or_insert(desc.dtype);
            require!(
                indices.contains(&desc.dtype) && desc.dtype == first,
                INDEX_DTYPE,
                format_args!("{} beside {first}", desc.dtype),
                Names(indices),
            );
        }
        Ok(())
    }

    fn ranks(&self) -> Result<(), Violation> {
        use Parameter::{BlockTables, Key, KeyCache, Value, ValueCache};
        for (argument, desc) in self.each_tensor() {
            let allowed: &[usize] = match argument.parameter {
                KeyCache | ValueCache => &[4],
                BlockTables => &[2],
                Key | Value => &[2, 3],
                _ => &[1],
            };
            require!(
                allowed.contains(&desc.shape.rank()),
                RANK,
                format_args!("{} {}", argument.acl_name(), desc.shape),
                format_args!("{allowed:?} axes"),
            );
        }
        Ok(())
    }

    fn plain(&self, nz: bool) -> Result<(), Violation> {
        for (argument, desc) in self.each_tensor() {
            require!(
                desc.format.is_plain() || nz && cache(argument.parameter) && desc.format == Format::FractalNz,
                FORMAT,
                format_args!("{} in format {}", argument.acl_name(), desc.format),
                Format::PLAIN,
            );
            let addressable = desc.is_countable() && desc.byte_range().is_some();
            require!(
                addressable && desc.is_contiguous(),
                CONTIGUOUS,
                format_args!("{} {} strides {}", argument.acl_name(), desc.shape, desc.strides),
                "row-major strides",
            );
        }
        Ok(())
    }
}

fn cache(parameter: Parameter) -> bool {
    matches!(parameter, Parameter::KeyCache | Parameter::ValueCache)
}

fn axis(desc: &TensorDesc, axis: usize) -> i64 {
    desc.shape.get(axis).copied().unwrap_or(0)
}

/// Number of blocks in a cache, and of rows in a block.
fn paged(cache: &TensorDesc, nz: bool) -> (i64, i64) {
    (axis(cache, 0), axis(cache, if nz { 2 } else { 1 }))
}

/// The pieces of a token's row in its cache.
fn pieces(rows: &TensorDesc, cache: &TensorDesc, nz: bool) -> Result<Pieces, Violation> {
    let bytes = cache.dtype.size().unwrap_or(1);
    let size = |dim: i64| usize::try_from(dim).unwrap_or(0);
    let found = match (nz, &rows.shape[..], &cache.shape[..]) {
        (false, &[_, heads, dim], &[blocks, block_size, n, d])
            if (n, d) == (heads, dim) && blocks > 0 && block_size > 0 =>
        {
            size(heads)
                .checked_mul(size(dim))
                .and_then(|row| row.checked_mul(bytes))
                .map(|bytes| Pieces { count: 1, bytes })
        }
        (true, &[_, hidden], &[blocks, parts, block_size, lanes])
            if blocks > 0
                && block_size > 0
                && size(lanes).checked_mul(bytes) == Some(UNIT)
                && parts.checked_mul(lanes) == Some(hidden) =>
        {
            Some(Pieces { count: size(parts), bytes: UNIT })
        }
        _ => None,
    };
    let shapes = match nz {
        true => "[tokens, N * D] and a cache [blocks, N * D / c, block size, c], where c elements are 32 bytes",
        false => "[tokens, N, D] and a cache [blocks, block size, N, D]",
    };
    found
        .filter(|pieces| pieces.row_bytes() > 0)
        .ok_or_else(|| CACHE.broken(format_args!("{} for a cache {}", rows.shape, cache.shape), shapes))
}
