//! The attention of ATB (Ascend Transformer Boost), the library `libatb.so`: its operators PagedAttention and
//! SelfAttention.
//!
//! They are no functions of `aclnn`: a program makes an object of an operator and its parameters, and gives it tensors
//! in the order of the operator's documents. Their statuses are those of ATB (`ErrorType` of `atb/types.h`), so that
//! they are in none of the lists of operators. Lengths are on the host. What is here is what the operators compute
//! with the parameters that the emulation takes; the others are refused before there is an object.
//!
//! Sources: the checks of the operators in `src/ops/ops_infer` of `cann/ascend-transformer-boost`
//! (`paged_attention_operation.cpp`, `self_attention_operation.cpp`) and of their kernels in
//! `src/kernels/mixkernels`, and `ops_configs/atb_ops_info.ini` for types and formats.

use crate::attention_problem::{
    AttentionArguments, AttentionProblem, ByteRange, KeyValue, MaskUse, Pages, Rows, SequenceLengths, SmallTensor,
    TensorRole, Work,
};
use crate::operator::{OperatorVersion, versions};
use crate::rule::require;
use crate::{DType, Format, Soc, SparseMode, Target, TensorDesc, View, Violation};
use lengths::{Lengths, PREFIX_STEP};
use parameters::{check_heads, check_prefix_product};
use rules::{DTYPE, FORMAT, GIVEN, HEAD_SIZE, KEYS, QUERY, TABLE};

mod lengths;
mod mask;
mod parameters;
pub mod rules;

pub use mask::{Hiding, Tiles};
pub use parameters::OperationParameters;

declare_arguments! {
    { "ATB's attention", #[derive(Copy)] AtbCall<'a> }
    1 { query: tensor, Query, "query", "Queries, `[tokens, N, D]`; of SelfAttention also `[tokens, N * D]`." }
    1 { key: tensor, Key, "key", "Keys, in the order of the queries, or a cache `[blocks, block size, N, D]`; on 310P \
        `[blocks, N * D / 16, block size, 16]`." }
    1 { value: tensor, Value, "value", "Values, as the keys." }
    1 { block_table: tensor, BlockTable, "blockTables", "The blocks of each sequence, where keys are in a cache." }
    1 { mask: tensor, Mask, "mask", "Numbers that hide keys: see [`Hiding`]." }
    1 { seq_len: ints, SeqLen, "seqLen", "The query rows of each sequence; none where each has one." }
    1 { context_lens: ints, ContextLens, "contextLens", "The keys of each sequence." }
    1 { heads: int = 0, Heads, "headNum", "Number of query heads." }
    1 { kv_heads: int = 0, KvHeads, "kvHeadNum", "Number of key heads; 0 stands for `headNum`." }
    1 { scale: float = 1.0, Scale, "qkScale", "Factor of the scores." }
    1 { triangle: flag = false, Triangle, "isTriuMask", "Whether keys far behind a row are skipped; then a square of \
        128 rows may stand for a mask of longer sequences: see [`Tiles`]." }
    1 { compressed: flag = false, Compressed, "maskType", "Whether the mask is `[128, 128]` in any case." }
    1 { precise: flag = false, Precise, "kernelType", "Whether the kernel of high precision computes." }
    1 { out: output, Out, "attnOut", "Output, with the query's shape." }
}

versions! {
    /// An operator, in one of its forms.
    pub enum Version {
        /// PagedAttention: one query row for each sequence, keys in a cache.
        Paged = OperatorVersion::new(1, "PagedAttentionOperation", "8.1"),
        /// SelfAttention of packed sequences (`PA_ENCODER`).
        Packed = OperatorVersion::new(2, "SelfAttentionOperation", "8.1"),
        /// SelfAttention of packed query rows over keys in a cache (`PREFIX_ENCODER`).
        Prefix = OperatorVersion::new(3, "SelfAttentionOperation", "8.1"),
    }
}

/// Elements of a group in an NZ cache.
const LANES: i64 = 16;

/// The sizes of a call's keys.
struct Keys {
    /// Tokens, or of a cache its blocks.
    count: i64,
    /// Tokens of a block; 0 without a cache.
    block: i64,
    dim: i64,
    rows: Rows,
}

impl AtbCall<'_> {
    fn problem(
        &self,
        version: Version,
        target: Target,
        report: &mut dyn FnMut(Violation),
    ) -> Result<AttentionProblem<'static>, Violation> {
        let query = GIVEN.requires(self.query.as_ref(), "query")?;
        let out = GIVEN.requires(self.out.as_ref(), "attnOut")?;
        let nz = target.soc == Soc::AtlasInference && version != Version::Packed;
        if version == Version::Prefix {
            check_prefix_product(target)?;
        }
        self.described(query.dtype, nz)?;
        check_heads(self.heads, self.kv_heads)?;
        let heads = self.heads;
        let (tokens, dim) = packed_rows(query, heads, version).ok_or_else(|| {
            let allowed = format_args!("[tokens, {heads}, D]");
            QUERY.broken(format_args!("query {}", query.shape), allowed)
        })?;
        let [keys, values] = self.keys_and_values(dim, version, nz)?;
        let width = values.dim;
        require!(
            packed_rows(out, heads, version) == Some((tokens, width)),
            QUERY,
            format_args!("attnOut {}", out.shape),
            format_args!("{tokens} tokens of {heads} heads of {width}"),
        );
        let lengths = self.lengths(tokens, &keys, version)?;
        self.check_pairs(&lengths, version, target)?;
        let pages = match keys.block {
            0 => None,
            block => Some(self.pages(keys.count, block, lengths.keys, version)?),
        };
        let mask = self.mask_use(&lengths, target, report)?;
        self.lint_lengths(&lengths, version, target, report);
        let packed = version != Version::Paged;
        let batch = lengths.keys.len();
        Ok(AttentionProblem {
            work: match batch {
                0 => Work::Nothing,
                _ => Work::Attend,
            },
            batch,
            heads: size(heads),
            kv_heads: size(self.key_heads()),
            query_rows: if packed { size(tokens) } else { 1 },
            key_rows: match &pages {
                Some(pages) => pages.columns.saturating_mul(pages.block_size),
                None => size(keys.count),
            },
            head_dim: size(dim),
            value_dim: size(width),
            packed,
            scale: self.scale,
            query_lengths: match packed {
                true => ends(lengths.rows),
                false => SequenceLengths::All,
            },
            key_lengths: match &pages {
                Some(_) => SequenceLengths::Each(lengths.keys.to_vec().into()),
                None => ends(lengths.keys),
            },
            mode: mode_of(mask, version),
            mask,
            mask_described: self.mask.as_ref().and_then(ByteRange::described),
            query: rows(query.dtype, packed, heads, dim),
            out: rows(query.dtype, packed, heads, width),
            pages,
            first: KeyValue { list_index: 0, batch: 0, key: keys.rows, value: values.rows, key_rope: None },
            first_key_rows: size(keys.count),
            ..AttentionProblem::blank(query.dtype)
        })
    }

    /// The sizes and places of keys and values for queries of a head dimension.
    fn keys_and_values(&self, dim: i64, version: Version, nz: bool) -> Result<[Keys; 2], Violation> {
        let key = GIVEN.requires(self.key.as_ref(), "key")?;
        let value = GIVEN.requires(self.value.as_ref(), "value")?;
        let keys = self.keys(key, version, nz)?;
        let values = self.keys(value, version, nz)?;
        require!(
            keys.dim == dim && (keys.count, keys.block) == (values.count, values.block),
            KEYS,
            format_args!("key {} and value {}", key.shape, value.shape),
            format_args!("head dimension {dim}, and the same tokens or blocks"),
        );
        check_sizes(&keys, &values, version, nz)?;
        Ok([keys, values])
    }

    /// Number of key heads.
    fn key_heads(&self) -> i64 {
        match self.kv_heads {
            0 => self.heads,
            kv_heads => kv_heads,
        }
    }

    /// Checks types and formats.
    fn described(&self, dtype: DType, nz: bool) -> Result<(), Violation> {
        for (argument, desc) in self.each_tensor() {
            let parameter = argument.parameter;
            let name = parameter.acl_name();
            let allowed: &[DType] = match parameter {
                Parameter::BlockTable => &[DType::Int32],
                Parameter::Query => &[DType::Float16, DType::Bf16],
                _ => &[dtype],
            };
            let given = crate::allowed::Named(name, desc.dtype);
            DTYPE.takes(given, allowed)?;
            let cache = nz && matches!(parameter, Parameter::Key | Parameter::Value);
            require!(
                match cache {
                    true => desc.format == Format::FractalNz,
                    false => desc.format.is_plain(),
                },
                FORMAT,
                format_args!("{name} in {}", desc.format),
                if cache { "FRACTAL_NZ" } else { "ND" },
            );
        }
        Ok(())
    }

    /// The sizes and places of keys or of values.
    fn keys(&self, desc: &TensorDesc, version: Version, nz: bool) -> Result<Keys, Violation> {
        let n = self.key_heads();
        let of_cache = |count, block, dim| Keys { count, block, dim, rows: cached(desc.dtype, n, block, dim, nz) };
        let divided = |whole: i64| (whole % n == 0).then_some(whole / n);
        let found = match desc.shape[..] {
            _ if version == Version::Packed => packed_rows(desc, n, version).map(|(count, dim)| Keys {
                count,
                block: 0,
                dim,
                rows: rows(desc.dtype, true, n, dim),
            }),
            [count, parts, block, LANES] if nz => {
                (parts.checked_mul(LANES).and_then(divided)).map(|dim| of_cache(count, block, dim))
            }
            [count, block, heads, dim] if !nz && heads == n => Some(of_cache(count, block, dim)),
            [count, block, whole] if version == Version::Prefix => {
                divided(whole).map(|dim| of_cache(count, block, dim))
            }
            _ => None,
        };
        let usable = |keys: &Keys| keys.dim > 0 && (version == Version::Packed || keys.block > 0);
        found.filter(usable).ok_or_else(|| {
            let given = format_args!("a tensor {}", desc.shape);
            match (version, nz) {
                (Version::Packed, _) => KEYS.broken(given, format_args!("[tokens, {n}, D]")),
                (_, true) => KEYS.broken(given, format_args!("[blocks, {n} * D / 16, block size, 16]")),
                (_, false) => KEYS.broken(given, format_args!("[blocks, block size, {n}, D]")),
            }
        })
    }

    /// The cache's blocks, whose table must have those of all keys.
    fn pages(&self, blocks: i64, block: i64, context_lens: &[i64], version: Version) -> Result<Pages, Violation> {
        let table = GIVEN.requires(self.block_table.as_ref(), "blockTables")?;
        let longest = context_lens.iter().copied().max().unwrap_or(0);
        let holds = |rows: i64, columns: i64| {
            let (rows, batch) = (size(rows), context_lens.len());
            let fits = rows == batch || rows > batch && version != Version::Prefix;
            fits && columns.saturating_mul(block) >= longest
        };
        match table.shape[..] {
            [rows, columns] if holds(rows, columns) => Ok(Pages {
                block_size: size(block),
                blocks: size(blocks),
                table: SmallTensor::new(TensorRole::BlockTable, table, DType::Int32),
                row: columns,
                column: 1,
                columns: size(columns),
            }),
            _ => Err(TABLE.broken(
                table.shape,
                format_args!("{} rows for {longest} keys in blocks of {block}", context_lens.len()),
            )),
        }
    }
}

/// Checks head dimensions, and sizes of blocks.
fn check_sizes(keys: &Keys, values: &Keys, version: Version, nz: bool) -> Result<(), Violation> {
    let (dim, block) = (keys.dim.max(values.dim), keys.block);
    let holds = match (version, nz) {
        (Version::Prefix, _) => keys.dim == values.dim && dim <= 128 && dim % LANES == 0 && block == PREFIX_STEP,
        (_, true) => dim <= 256 && keys.dim % LANES == 0 && dim.saturating_mul(block) <= 16_384,
        (_, false) => dim <= 576 && (dim <= 256 || block <= 128),
    };
    if holds {
        return Ok(());
    }
    let (allowed, fix) = match (version, nz) {
        (Version::Prefix, _) => (
            "keys and values of one dimension, at most 128 and a multiple of 16, in blocks of 128",
            "keep the cache in blocks of 128 tokens; no call of PREFIX_ENCODER computes longer heads",
        ),
        (_, true) => (
            "at most 256, keys a multiple of 16, and at most 16384 elements in a block",
            "make the blocks smaller; no call of the operator computes longer heads",
        ),
        (_, false) => (
            "at most 256, or at most 576 in blocks of at most 128",
            "make the blocks smaller; no call of the operator computes longer heads",
        ),
    };
    Err(Violation::new(&HEAD_SIZE, format_args!("{dim} in blocks of {block}"), allowed, fix))
}

/// Tokens and head dimension of rows that are packed one after another.
fn packed_rows(desc: &TensorDesc, heads: i64, version: Version) -> Option<(i64, i64)> {
    match desc.shape[..] {
        [tokens, n, dim] if n == heads && dim > 0 => Some((tokens, dim)),
        [tokens, whole] if version != Version::Paged && whole > 0 && whole % heads == 0 => {
            Some((tokens, whole / heads))
        }
        _ => None,
    }
}

/// Rows of `heads` heads one after another: those of all sequences, or one for each.
fn rows(dtype: DType, packed: bool, heads: i64, dim: i64) -> Rows {
    let row = heads.saturating_mul(dim);
    Rows { view: View { offset: 0, batch: if packed { 0 } else { row }, head: dim, row, dim: 1 }, lanes: 0, dtype }
}

/// Rows of a cache.
fn cached(dtype: DType, heads: i64, block: i64, dim: i64, nz: bool) -> Rows {
    let batch = block.saturating_mul(heads).saturating_mul(dim);
    let (head, row, step) = match nz {
        true => (block.saturating_mul(dim), LANES, block.saturating_mul(LANES)),
        false => (dim, heads.saturating_mul(dim), 1),
    };
    Rows { view: View { offset: 0, batch, head, row, dim: step }, lanes: if nz { LANES as usize } else { 0 }, dtype }
}

/// A size of a tensor that was checked; 0 for what is none.
fn size(size: i64) -> usize {
    usize::try_from(size).unwrap_or(0)
}

/// The mode by which rows see keys; of a square that of a triangle.
fn mode_of(mask: MaskUse, version: Version) -> SparseMode {
    match (mask, version) {
        (MaskUse::Compressed, Version::Prefix) => SparseMode::RightDownCausal,
        (MaskUse::Compressed, _) => SparseMode::LeftUpCausal,
        (MaskUse::None, _) => SparseMode::DefaultMask,
        _ => SparseMode::AllMask,
    }
}

/// The ends of sequences of these lengths.
fn ends(lens: &[i64]) -> SequenceLengths<'static> {
    let mut end = 0i64;
    let ends = lens.iter().map(|len| {
        end = end.saturating_add(*len);
        end
    });
    SequenceLengths::Ends(ends.collect())
}

impl AttentionArguments for Arguments<TensorDesc> {
    type Version = Version;

    fn resolve(
        &self,
        version: Version,
        target: Target,
        report: &mut dyn FnMut(Violation),
    ) -> Result<Option<AttentionProblem<'static>>, Violation> {
        self.call().problem(version, target, report).map(Some)
    }

    fn of_role(role: TensorRole) -> Option<Argument> {
        let parameter = match role {
            TensorRole::Query => Parameter::Query,
            TensorRole::Key(0) => Parameter::Key,
            TensorRole::Value(0) => Parameter::Value,
            TensorRole::BlockTable => Parameter::BlockTable,
            TensorRole::Mask => Parameter::Mask,
            TensorRole::Output => Parameter::Out,
            _ => return None,
        };
        Some(parameter.into())
    }
}
