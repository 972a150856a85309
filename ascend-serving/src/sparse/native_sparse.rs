//! Native sparse attention over a paged cache: compressed tokens, selected blocks and a window.

use ascend_attention::spec::ops::native_sparse::Compression;
use ascend_attention::spec::ops::nsa_compress_attention_infer::NsaCompressAttentionCall;
use ascend_attention::spec::ops::nsa_compress_attention_infer::rules::check_length;
use ascend_attention::spec::ops::nsa_compress_with_cache::NsaCompressCacheCall;
use ascend_attention::spec::ops::nsa_selected_attention_infer::NsaSelectedCall;
use ascend_attention::spec::{Dims, TensorDesc};
use ascend_attention::{DType, Element, Stream, Tensor, Violation};

use crate::backends::AttentionShape;
use crate::error::{Error, Result};
use crate::kv::{CacheShape, CompressedRows, MAX_INT32, PagedKvCache, Sequence, kernel_blocks_of};

use super::two_caches;

/// Native sparse attention (NSA, Yuan and others 2025): each token attends to compressed tokens, to the best blocks of
/// tokens, and to a window.
///
/// A cache of keys and values is given; beside it is one of compressed tokens, in the same blocks of the same pool. A
/// [`Sequence`] grows, forks, shares prefixes and is cut in both at once. Each step writes the new tokens, compresses
/// the blocks of tokens that they complete, and attends, by calls of NsaCompressWithCache, NsaCompressAttentionInfer,
/// NsaSelectedAttentionInfer and FusedInferAttentionScore ([`NativeStep::forward`](crate::NativeStep::forward)). Their
/// outputs are [`NativeBranches`](crate::NativeBranches), to which the model applies its gates.
///
/// What a token gets does not depend on the others of its step: prompts, chunks, decodes and drafts are the same rows.
/// A token that sees fewer tokens than those of the selected blocks attends to all of them, and one that sees no
/// compressed token gets zeros there.
///
/// This is no [`AttentionBackend`](crate::AttentionBackend), which computes one output over one cache. The operators
/// run on Atlas A2 and A3 with CANN 8.5 or newer, with heads of 192 elements and values of 128, and 1, 2, 4, 8 or 16
/// query heads for each key head. A sequence has up to 8192 compressed tokens, and up to 4096 blocks that are selected
/// from.
///
/// ```
/// # fn main() -> ascend_serving::Result<()> {
/// # #[cfg(feature = "emulation")] {
/// use ascend_attention::{Runtime, bf16};
/// use ascend_serving::kv::{CacheShape, PadPolicy, PagedKvCache, Sequence};
/// use ascend_serving::{
///     AttentionMetadata, AttentionShape, BatchRequest, BatchSettings, Causality, NativeSparse, NativeTensors,
/// };
///
/// let stream = Runtime::emulated()?.device(0)?.stream()?;
/// // A layer of 4 query heads and one key head; blocks of 256 tokens.
/// let shape = CacheShape::new(1, 1, 192).value_dim(128);
/// let cache = PagedKvCache::<bf16>::new(stream.device(), 4, 256, shape, PadPolicy::SkipNegative)?;
/// // A compressed token of every 32 tokens, one from each 16th on.
/// let native = NativeSparse::new(AttentionShape::new(4, 1, 192), cache, 32, 16)?;
/// // The best 4 blocks of 64 tokens, and the last 128 tokens.
/// let mut native = native.select_block(64).select_count(4).window(128);
///
/// let mut sequence = Sequence::new(native.cache().pool());
/// native.grow(&stream, &mut sequence, 300)?;
/// let settings = BatchSettings::of(native.cache(), Causality::Causal);
/// let metadata = AttentionMetadata::new(&[BatchRequest::of(&sequence, 300)], settings)?;
/// let ones = |shape: [usize; 3]| stream.upload(&vec![bf16::ONE; shape.iter().product()], shape);
/// let weights = stream.upload(&[bf16::from_f32(1.0 / 32.0); 32], [32, 1])?;
///
/// let mut step = native.begin(&stream, &metadata)?;
/// let branches = step.forward(0, NativeTensors {
///     query: &ones([300, 4, 192])?,
///     key: &ones([300, 1, 192])?,
///     value: &ones([300, 1, 128])?,
///     key_weight: &weights,
///     value_weight: &weights,
/// })?;
/// step.end()?;
/// for branch in [branches.compressed, branches.selected, branches.window] {
///     assert_eq!(branch.shape(), [300, 4, 128]);
///     assert_eq!(branch.download(&stream)?.last(), Some(&bf16::ONE));
/// }
/// # }
/// # Ok(())
/// # }
/// ```
#[derive(Debug)]
pub struct NativeSparse<T: Element> {
    pub(super) shape: AttentionShape,
    pub(super) cache: PagedKvCache<T>,
    /// Compressed keys and values, in the blocks of the same pool.
    pub(super) compressed: PagedKvCache<T>,
    pub(super) compression: Compression,
    pub(super) rows: CompressedRows,
    /// Blocks of the operators in one of the cache.
    kernel_blocks: usize,
    pub(super) select_block: usize,
    pub(super) select_count: usize,
    pub(super) window: usize,
}

/// What a layer's caches are to the operators: keys and values.
pub(super) struct CacheViews<T: Element> {
    /// Tokens, `[blocks, 128, N * D]`.
    pub(super) tokens: [Tensor<T>; 2],
    /// Tokens with an axis of heads, `[blocks, 128, N, D]`.
    pub(super) heads: [Tensor<T>; 2],
    /// Rows of compressed tokens, `[rows, N, D]`.
    pub(super) compressed: [Tensor<T>; 2],
    /// Pages of compressed tokens, `[pages, 16, N * D]`.
    pub(super) pages: [Tensor<T>; 2],
}

/// Tokens of a block as operators read the cache.
pub(super) const KERNEL_BLOCK: usize = 128;

impl<T: Element> NativeSparse<T> {
    /// Native sparse attention of these heads over a cache, with a compressed token of every `block` tokens, one from
    /// each `stride`th on. Allocates the cache of compressed tokens: as many layers, with one row for each `stride`
    /// tokens, and 16 more in each block.
    ///
    /// As in the paper, 16 blocks of 64 tokens are selected, and the window has 512 tokens.
    ///
    /// # Errors
    /// [`ARGUMENT_VALUE`](crate::rules::ARGUMENT_VALUE) for a cache of another shape than
    /// `CacheShape::new(layers, kv_heads, 192).value_dim(128)`, and for heads that are not those of the cache;
    /// [`CACHE_QUANTISED`](crate::rules::CACHE_QUANTISED) for a quantised cache;
    /// [`NATIVE_BLOCK`](crate::rules::NATIVE_BLOCK) for blocks that are not a multiple of 16 times the stride; by the
    /// rules of NsaCompressWithCache for compressions and products that it does not take;
    /// [`OPTION_SOFT_CAP`](crate::rules::OPTION_SOFT_CAP) for heads with a cap; as for
    /// [`PagedKvCache::new`].
    pub fn new(shape: AttentionShape, cache: PagedKvCache<T>, block: usize, stride: usize) -> Result<Self> {
        let CacheShape { layers, kv_heads, .. } = cache.shape();
        two_caches::check_cache(
            "cache",
            &cache,
            CacheShape::new(layers, kv_heads, 192).value_dim(128),
            "make the cache of the shape `CacheShape::new(layers, kv_heads, 192).value_dim(128)`",
        )?;
        shape.check_cache(&cache.shape())?;
        shape.check_no_soft_cap("native sparse attention", "attend densely by `Attention`")?;
        let compression = Compression { block, stride };
        check_compression(&cache, compression)?;
        let rows = CompressedRows::new(compression, cache.pool().block_size())?;
        Ok(Self {
            kernel_blocks: kernel_blocks_of(cache.pool().block_size(), KERNEL_BLOCK)?,
            compressed: PagedKvCache::beside(&cache, rows.rows())?,
            shape,
            cache,
            compression,
            rows,
            select_block: 64,
            select_count: 16,
            window: 512,
        })
    }

    /// Sets the number of tokens of a block that is selected (`selectBlockSize`). Steps refuse what the operators do
    /// not take, when they begin.
    pub fn select_block(mut self, tokens: usize) -> Self {
        self.select_block = tokens;
        self
    }

    /// Sets how many blocks each token selects (`selectBlockCount`). The first block and the last two of those that are
    /// compressed are always among them. A token's own block counts only once a compressed token reaches into it: with
    /// compressed tokens of 32 tokens, one for every 16, the first 257 tokens have 15, which reach up to token 256, so
    /// that the 257th chooses among 4 blocks of 64 and sees its own in the window alone.
    pub fn select_count(mut self, blocks: usize) -> Self {
        self.select_count = blocks;
        self
    }

    /// Sets the number of last tokens that the window shows, 1 or more: the token's own is among them.
    pub fn window(mut self, tokens: usize) -> Self {
        self.window = tokens;
        self
    }

    /// The heads.
    pub fn shape(&self) -> AttentionShape {
        self.shape
    }

    /// The cache of keys and values. Growth, and tokens that are written, concern both caches: see
    /// [`grow`](Self::grow).
    pub fn cache(&self) -> &PagedKvCache<T> {
        &self.cache
    }

    /// The number of a sequence's first tokens that steps have computed, compressed tokens among them. See
    /// [`PagedKvCache::computed_tokens`].
    ///
    /// # Errors
    /// As for [`PagedKvCache::computed_tokens`].
    pub fn computed_tokens(&self, sequence: &Sequence) -> Result<usize, Violation> {
        let [tokens, compressed] = [&self.cache, &self.compressed].map(|cache| cache.computed_tokens(sequence));
        Ok(tokens?.min(compressed?))
    }

    /// Bytes of device memory of both caches, that of compressed tokens included.
    pub fn bytes(&self) -> usize {
        self.cache.bytes() + self.compressed.bytes()
    }

    /// Makes room for `tokens` more tokens of a sequence in both caches, and queues the copies of blocks that it
    /// shared. Before it reports that there are no blocks, it waits for blocks that steps in flight may still read.
    ///
    /// # Errors
    /// By `nsa_compress_attention.compressed` for a sequence of more tokens than the operators take; as for
    /// [`PagedKvCache::grow`] and [`PagedKvCache::queue_pending_copies`]. The sequence then has as many tokens as
    /// before.
    pub fn grow(&mut self, stream: &Stream, sequence: &mut Sequence, tokens: usize) -> Result<()> {
        // More tokens than can be counted are more than the operators take.
        let compressed = self.compression.count(sequence.len().saturating_add(tokens));
        check_length(self.compression, self.select_block, number(compressed)).map_err(|mut why| {
            why.given.push_str(&format!(", of a sequence of {} and {tokens} more tokens", sequence.len()));
            why.fix = "grow the sequence by fewer tokens, and end it there".into();
            why
        })?;
        two_caches::grow([&mut self.cache, &mut self.compressed], stream, sequence, tokens)
    }

    /// The number of tokens that a token sees if it selects some blocks of them; one that sees fewer selects all.
    pub(super) fn selectable_tokens(&self) -> usize {
        self.select_block * self.select_count
    }

    /// The caches of a layer.
    pub(super) fn views(&self, layer: usize) -> Result<CacheViews<T>> {
        let (tokens, compressed) = (self.cache.layer(layer)?, self.compressed.layer(layer)?);
        let CacheShape { kv_heads, key_dim, value_dim, .. } = self.cache.shape();
        let blocks = self.cache.pool().blocks();
        let pages = blocks * self.rows.pages();
        let pair = |[key, value]: [&Tensor<T>; 2], outer: &[usize], heads: &[usize]| -> Result<[Tensor<T>; 2]> {
            let axes = |inner: &[usize]| [outer, inner].concat();
            match *heads {
                [heads] => Ok([key.reshape(axes(&[heads, key_dim]))?, value.reshape(axes(&[heads, value_dim]))?]),
                _ => Ok([key.reshape(axes(&[kv_heads * key_dim]))?, value.reshape(axes(&[kv_heads * value_dim]))?]),
            }
        };
        let kernel = [blocks * self.kernel_blocks, KERNEL_BLOCK];
        let tokens = [&tokens.key, &tokens.value];
        let compressed = [&compressed.key, &compressed.value];
        Ok(CacheViews {
            tokens: pair(tokens, &kernel, &[])?,
            heads: pair(tokens, &kernel, &[kv_heads])?,
            compressed: pair(compressed, &[blocks * self.rows.rows()], &[kv_heads])?,
            pages: pair(compressed, &[pages, CompressedRows::PAGE], &[])?,
        })
    }

    /// Refuses heads, sizes and products that the operators of attention do not take, by what they say of a sequence
    /// that is just long enough to select blocks.
    pub(super) fn check_operators(&self) -> Result<()> {
        let Self { select_block, select_count, compression, shape, .. } = *self;
        let tokens = select_block.checked_mul(select_count).filter(|tokens| (1..=MAX_INT32).contains(tokens));
        let Some(tokens) = tokens else {
            return Err(Error::invalid(
                "select",
                format_args!("{select_count} blocks of {select_block} tokens"),
                format_args!("1 to {MAX_INT32} tokens together"),
            )
            .fix("select the blocks that the model was trained with, such as 16 of 64 tokens"));
        };
        let [l, d, select, count] = [compression.block, compression.stride, select_block, select_count].map(number);
        let [heads, kv_heads, length] = [shape.heads, shape.kv_heads, tokens].map(number);
        let compressed = number(compression.count(tokens));
        let target = self.cache.device().target()?;
        let table = |page: usize| int32(&[1, number(tokens.div_ceil(page))]);
        let cache = |page: usize, dim: i64| plain::<T>(&[1, number(page), kv_heads * dim]);
        let (page, kernel) = (CompressedRows::PAGE, KERNEL_BLOCK);
        let call = NsaCompressAttentionCall {
            query: plain::<T>(&[1, heads, 192]),
            key: cache(page, 192),
            value: cache(page, 128),
            block_table: table(page),
            actual_q_seq_len: Some(&[1]),
            actual_cmp_kv_seq_len: Some(&[compressed]),
            actual_sel_kv_seq_len: Some(&[length]),
            num_heads: heads,
            num_key_value_heads: kv_heads,
            select_block_size: select,
            select_block_count: count,
            compress_block_size: l,
            compress_block_stride: d,
            scale: shape.scale,
            page_block_size: number(page),
            output: plain::<T>(&[1, heads, 128]),
            top_k_output: int32(&[1, kv_heads, count]),
            ..NsaCompressAttentionCall::default()
        };
        call.check(target)?;
        call.lint(target, &[])?;
        let call = NsaSelectedCall {
            query: call.query,
            key: cache(kernel, 192),
            value: cache(kernel, 128),
            topk_indices: call.top_k_output,
            block_table: table(kernel),
            actual_q_seq_len: Some(&[1]),
            actual_kv_seq_len: Some(&[length]),
            layout: Some("TND"),
            num_heads: heads,
            num_key_value_heads: kv_heads,
            select_block_size: select,
            select_block_count: count,
            page_block_size: number(kernel),
            scale: shape.scale,
            output: call.output,
            ..NsaSelectedCall::default()
        };
        call.check(target)?;
        Ok(call.lint(target, &[])?)
    }
}

/// Refuses a compression that NsaCompressWithCache does not take, by what it says of a sequence of one block.
fn check_compression<T: Element>(cache: &PagedKvCache<T>, compression: Compression) -> Result<()> {
    if !(1..=MAX_INT32).contains(&compression.block) {
        return Err(Error::invalid("block", compression.block, "a number of tokens that NsaCompressWithCache takes")
            .fix("compress blocks of the size that the model was trained with, such as 32 tokens, one every 16"));
    }
    let kv_heads = number(cache.shape().kv_heads);
    let [block, stride, page] = [compression.block, compression.stride, KERNEL_BLOCK].map(number);
    let call = NsaCompressCacheCall {
        input: plain::<T>(&[1, page, kv_heads, 192]),
        weight: plain::<T>(&[block, kv_heads]),
        slot_mapping: int32(&[1]),
        act_seq_len: Some(&[1]),
        block_table: int32(&[1, 1]),
        compress_block_size: block,
        compress_stride: stride,
        page_block_size: page,
        output_cache: plain::<T>(&[1, kv_heads, 192]),
        ..NsaCompressCacheCall::default()
    };
    call.check(cache.device().target()?)?;
    Ok(())
}

/// A contiguous tensor of the cache's type.
fn plain<T: Element>(axes: &[i64]) -> Option<TensorDesc> {
    Some(TensorDesc::packed(T::DTYPE, Dims::new(axes)?))
}

/// A contiguous tensor of INT32.
fn int32(axes: &[i64]) -> Option<TensorDesc> {
    Some(TensorDesc::packed(DType::Int32, Dims::new(axes)?))
}

/// A size as operators have it; one that their integers do not hold, the largest, is refused by them.
fn number(size: usize) -> i64 {
    i64::try_from(size).unwrap_or(i64::MAX)
}
