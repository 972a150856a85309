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
    AttentionArguments, AttentionProblem, ByteRange, KeyValue, MaskTensor, MaskUse, Pages, Rows,
    SequenceLengths, SmallTensor, TensorRole, Work,
};
use crate::operator::{OperatorVersion, versions};
use crate::rule::{require, rules};
use crate::{DType, Format, Soc, SparseMode, Target, TensorDesc, View, Violation};

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
    1 { triangle: flag = false, Triangle, "isTriuMask", "Whether the mask hides later keys: then a square of 128 rows \
        may stand for all of it." }
    1 { compressed: flag = false, Compressed, "maskType", "Whether the mask is such a square." }
    1 { times_lowest: flag = false, TimesLowest, "kernelType", "Whether mask numbers are multiplied by -3e38." }
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

/// The rules of ATB's attention.
pub mod rules {
    use super::*;

    rules! {
        in Scope::ALL;
        GIVEN = "atb.given", ATB_INVALID_TENSOR_NUM, Paged, "atb_ops_info.ini",
            "every tensor of the operator is given",
            "give the tensors in the order of the operator's documents";
        PRODUCT = "atb.product", ATB_INVALID_PARAM, Paged, "DeviceParamCheck, PrefixEncoderParamCheck",
            "keys are in a cache and have several query rows (PREFIX_ENCODER) on Atlas A2 and A3 alone",
            "give PagedAttention one row a sequence, or SelfAttention keys that are in no cache (PA_ENCODER)";
        DTYPE = "atb.dtype", ATB_INVALID_TENSOR_DTYPE, Paged, "atb_ops_info.ini",
            "query, key, value, mask and attnOut are of one type, FLOAT16 or BF16, and blockTables is INT32",
            "convert the tensor";
        FORMAT = "atb.format", ATB_INVALID_TENSOR_FORMAT, Paged, "atb_ops_info.ini",
            "tensors are in the format ND, and caches on 310P in FRACTAL_NZ",
            "convert the tensor to the format";
        HEADS = "atb.heads", ATB_INVALID_PARAM, Paged, "CommonParamCheck",
            "headNum is more than 0 and a multiple of kvHeadNum",
            "give the numbers of heads of the model";
        QUERY = "atb.query", ATB_INVALID_TENSOR_DIM, Paged, "SetupDimCheck, InferShapePADimCheck",
            "query has headNum heads and attnOut its tokens, heads and the head dimension of value",
            "describe the tensor as [tokens, N, D], for SelfAttention perhaps as [tokens, N * D]";
        KEYS = "atb.keys", ATB_INVALID_TENSOR_DIM, Paged, "KVCacheDimCheck, InferShapePADimCheck",
            "key and value have kvHeadNum heads, key the head dimension of query, and both have the same tokens or \
             blocks",
            "describe keys and values in the order that the operator has on the product";
        HEAD_SIZE = "atb.head_size", ATB_INVALID_TENSOR_DIM, Paged, "KVCacheDimCheck910B, KVCacheDimCheck310P",
            "head dimensions are at most 576, and above 256 for caches with blocks of at most 128 tokens; on 310P at \
             most 256, a multiple of 16, and block size times head dimension at most 16384",
            "make the blocks smaller, or divide the heads";
        LENGTHS = "atb.lengths", ATB_INVALID_PARAM, Paged, "BuildFromTensor, kernel tiling",
            "there is one length for each sequence, none is negative, and their rows are in the tensors",
            "give lengths that the tensors hold";
        TABLE = "atb.table", ATB_INVALID_TENSOR_DIM, Paged, "PagedAttention documentation, blockTables",
            "blockTables is [sequences, blocks], and a row names the blocks of all keys of its sequence",
            "give each sequence a row with all its blocks";
        MASK = "atb.mask", ATB_INVALID_TENSOR_DIM, Paged, "kernel tiling, CheckNdMask",
            "a mask is [S, S] or [sequences, S, S] and covers the longest sequence, and one that stands for the whole \
             triangle is [128, 128]",
            "make the mask anew for the longest sequence";
    }
}

use rules::{DTYPE, FORMAT, GIVEN, HEAD_SIZE, HEADS, KEYS, LENGTHS, MASK, PRODUCT, QUERY, TABLE};

/// What a number in a mask does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Hiding {
    /// Shows the key.
    Shows,
    /// Hides the key.
    Hides,
    /// Changes its weight otherwise, which the emulation does not compute.
    Weighs,
}

impl Hiding {
    /// What a number does. The kernels for FLOAT16 add it to the scores; those for BF16, and of high precision,
    /// multiply it by -3e38 first (`times_lowest`).
    pub fn of(number: f32, times_lowest: bool) -> Self {
        let hides = match times_lowest {
            true => number >= 1.0,
            false => number <= -10_000.0,
        };
        match (number == 0.0, hides) {
            (true, _) => Hiding::Shows,
            (_, true) => Hiding::Hides,
            _ => Hiding::Weighs,
        }
    }
}

/// Side of a mask that stands for the whole triangle.
const TRIANGLE: i64 = 128;
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
    ) -> Result<AttentionProblem<'static>, Violation> {
        let query = GIVEN.requires(self.query.as_ref(), "query")?;
        let out = GIVEN.requires(self.out.as_ref(), "attnOut")?;
        let key = GIVEN.requires(self.key.as_ref(), "key")?;
        let value = GIVEN.requires(self.value.as_ref(), "value")?;
        let nz = target.soc == Soc::AtlasInference && version != Version::Packed;
        require!(
            version != Version::Prefix || matches!(target.soc, Soc::AtlasA2 | Soc::AtlasA3),
            PRODUCT,
            target.soc,
            "Atlas A2 and A3",
        );
        self.described(query.dtype, nz)?;
        let (heads, kv_heads) = (self.heads, self.key_heads());
        require!(
            heads > 0 && kv_heads > 0 && heads % kv_heads == 0,
            HEADS,
            format_args!("{heads} and {kv_heads}"),
            "a multiple of kvHeadNum",
        );
        let (tokens, dim) = packed_rows(query, heads, version).ok_or_else(|| {
            let allowed = format_args!("[tokens, {heads}, D]");
            QUERY.broken(format_args!("query {}", query.shape), allowed)
        })?;
        let keys = self.keys(key, version, nz)?;
        let values = self.keys(value, version, nz)?;
        require!(
            keys.dim == dim && (keys.count, keys.block) == (values.count, values.block),
            KEYS,
            format_args!("key {} and value {}", key.shape, value.shape),
            format_args!("head dimension {dim}, and the same tokens or blocks"),
        );
        check_sizes(&keys, &values, nz)?;
        let width = values.dim;
        require!(
            packed_rows(out, heads, version) == Some((tokens, width)),
            QUERY,
            format_args!("attnOut {}", out.shape),
            format_args!("{tokens} tokens of {heads} heads of {width}"),
        );
        let context_lens = GIVEN.requires(self.context_lens, "contextLens")?;
        let batch = context_lens.len();
        let packed = version != Version::Paged;
        let query_lens = match packed {
            true => self.seq_len.unwrap_or(context_lens),
            false => &[],
        };
        let total = |lens: &[i64]| lens.iter().copied().fold(0, i64::saturating_add);
        let room = if packed {
            total(query_lens)
        } else {
            batch as i64
        };
        let key_room = if keys.block == 0 {
            total(context_lens)
        } else {
            0
        };
        let lengths = query_lens.iter().chain(context_lens);
        require!(
            (!packed || query_lens.len() == batch)
                && lengths.copied().all(|len| len >= 0)
                && room <= tokens
                && key_room <= keys.count,
            LENGTHS,
            format_args!("seqLen {query_lens:?}, contextLens {context_lens:?}"),
            format_args!("lengths of at least 0, with at most {tokens} query rows in all"),
        );
        let pages = match keys.block {
            0 => None,
            block => Some(self.pages(keys.count, block, context_lens)?),
        };
        let size = |size: i64| usize::try_from(size).unwrap_or(0);
        let longest = query_lens.iter().chain(context_lens).copied().max();
        let mask = self.mask_use(longest.unwrap_or(0), batch)?;
        Ok(AttentionProblem {
            work: match batch {
                0 => Work::Nothing,
                _ => Work::Attend,
            },
            batch,
            heads: size(heads),
            kv_heads: size(kv_heads),
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
                true => ends(query_lens),
                false => SequenceLengths::All,
            },
            key_lengths: match &pages {
                Some(_) => SequenceLengths::Each(context_lens.to_vec().into()),
                None => ends(context_lens),
            },
            mode: match (mask, version) {
                (MaskUse::Compressed, Version::Prefix) => SparseMode::RightDownCausal,
                (MaskUse::Compressed, _) => SparseMode::LeftUpCausal,
                (MaskUse::None, _) => SparseMode::DefaultMask,
                _ => SparseMode::AllMask,
            },
            mask,
            mask_described: self.mask.as_ref().and_then(ByteRange::described),
            query: rows(query.dtype, packed, heads, dim),
            out: rows(query.dtype, packed, heads, width),
            pages,
            first: KeyValue {
                list_index: 0,
                batch: 0,
                key: keys.rows,
                value: values.rows,
                key_rope: None,
            },
            first_key_rows: size(keys.count),
            ..AttentionProblem::blank(query.dtype)
        })
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
        let of_cache = |count, block, dim| Keys {
            count,
            block,
            dim,
            rows: cached(desc.dtype, n, block, dim, nz),
        };
        let divided = |whole: i64| (whole % n == 0).then_some(whole / n);
        let found = match desc.shape[..] {
            _ if version == Version::Packed => {
                packed_rows(desc, n, version).map(|(count, dim)| Keys {
                    count,
                    block: 0,
                    dim,
                    rows: rows(desc.dtype, true, n, dim),
                })
            }
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
                (_, true) => KEYS.broken(
                    given,
                    format_args!("[blocks, {n} * D / 16, block size, 16]"),
                ),
                (_, false) => KEYS.broken(given, format_args!("[blocks, block size, {n}, D]")),
            }
        })
    }

    /// The cache's blocks, whose table must have those of all keys.
    fn pages(&self, blocks: i64, block: i64, context_lens: &[i64]) -> Result<Pages, Violation> {
        let table = GIVEN.requires(self.block_table.as_ref(), "blockTables")?;
        let size = |size: i64| usize::try_from(size).unwrap_or(0);
        let longest = context_lens.iter().copied().max().unwrap_or(0);
        let holds = |rows: i64, columns: i64| {
            size(rows) >= context_lens.len() && columns.saturating_mul(block) >= longest
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
                format_args!(
                    "{} rows for {longest} keys in blocks of {block}",
                    context_lens.len()
                ),
            )),
        }
    }

    /// What the mask is for. A full one is read as one byte for each element, by way of a copy.
    fn mask_use(&self, longest: i64, batch: usize) -> Result<MaskUse, Violation> {
        let Some(mask) = &self.mask else {
            return Ok(MaskUse::None);
        };
        let covers = |rows: i64, keys: i64| rows >= longest && keys >= longest;
        let full = |batch, row| {
            MaskUse::Full(MaskTensor {
                offset: 0,
                batch,
                row,
                key: 1,
            })
        };
        match mask.shape[..] {
            [TRIANGLE, TRIANGLE] if self.triangle || self.compressed => Ok(MaskUse::Compressed),
            [rows, keys] if !self.compressed && covers(rows, keys) => Ok(full(0, keys)),
            [sequences, rows, keys]
                if !self.compressed
                    && usize::try_from(sequences) == Ok(batch)
                    && covers(rows, keys) =>
            {
                Ok(full(rows.saturating_mul(keys), keys))
            }
            _ => {
                let side = if self.compressed { TRIANGLE } else { longest };
                Err(MASK.broken(mask.shape, format_args!("[{side}, {side}]")))
            }
        }
    }
}

/// Checks head dimensions, and sizes of blocks.
fn check_sizes(keys: &Keys, values: &Keys, nz: bool) -> Result<(), Violation> {
    let (dim, block) = (keys.dim.max(values.dim), keys.block);
    let holds = match nz {
        true => dim <= 256 && keys.dim % LANES == 0 && dim.saturating_mul(block) <= 16_384,
        false => dim <= 576 && (dim <= 256 || block <= 128),
    };
    require!(
        holds,
        HEAD_SIZE,
        format_args!("{dim} in blocks of {block}"),
        "what the kernel has room for",
    );
    Ok(())
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
    Rows {
        view: View {
            offset: 0,
            batch: if packed { 0 } else { row },
            head: dim,
            row,
            dim: 1,
        },
        lanes: 0,
        dtype,
    }
}

/// Rows of a cache.
fn cached(dtype: DType, heads: i64, block: i64, dim: i64, nz: bool) -> Rows {
    let batch = block.saturating_mul(heads).saturating_mul(dim);
    let (head, row, step) = match nz {
        true => (
            block.saturating_mul(dim),
            LANES,
            block.saturating_mul(LANES),
        ),
        false => (dim, heads.saturating_mul(dim), 1),
    };
    Rows {
        view: View {
            offset: 0,
            batch,
            head,
            row,
            dim: step,
        },
        lanes: if nz { LANES as usize } else { 0 },
        dtype,
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
        _: &mut dyn FnMut(Violation),
    ) -> Result<Option<AttentionProblem<'static>>, Violation> {
        self.call().problem(version, target).map(Some)
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
