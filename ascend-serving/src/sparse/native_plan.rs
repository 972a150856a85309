//! What a layer of native sparse attention reads and writes in a step, and the calls of the step, planned by its first
//! layer for all.

use std::ops::Range;

use ascend_attention::attention::{BlockTable, Inputs};
use ascend_attention::nsa_compress_attention_infer::{
    CompressedAttention, NsaCompressAttentionInfer, NsaCompressAttentionPlan,
};
use ascend_attention::nsa_compress_with_cache::{CompressedSlots, NsaCompressCachePlan, NsaCompressWithCache};
use ascend_attention::nsa_selected_attention_infer::{NsaSelectedAttentionInfer, NsaSelectedPlan};
use ascend_attention::sparse::SparseSequences;
use ascend_attention::spec::Layout;
use ascend_attention::{AnyTensor, Element, Mask, Output, Plan, Stream, Tensor};

use crate::backends::size;
use crate::batch::AttentionMetadata;
use crate::causality::Causality;
use crate::error::Result;
use crate::kv::kernel_blocks;

use super::native_sparse::{CacheViews, KERNEL_BLOCK, NativeSparse};

/// Most query rows of a sequence, and most sequences, of a call of NsaSelectedAttentionInfer.
const MOST_ROWS: usize = 4;
const MOST_SEQUENCES: usize = 3072;

/// What a layer of native sparse attention gets in a step. Queries, keys and values are packed, with the padding of the
/// metadata.
#[derive(Clone, Copy, Debug)]
pub struct NativeTensors<'a, T: Element> {
    /// Queries, `[tokens, N, 192]`.
    pub query: &'a Tensor<T>,
    /// Keys of the new tokens, `[tokens, kv_heads, 192]`.
    pub key: &'a Tensor<T>,
    /// Values of the new tokens, `[tokens, kv_heads, 128]`.
    pub value: &'a Tensor<T>,
    /// The weight of each token of a block and each key head in a compressed key, `[block, kv_heads]`.
    pub key_weight: &'a Tensor<T>,
    /// The weights of compressed values, `[block, kv_heads]`.
    pub value_weight: &'a Tensor<T>,
}

/// The attention of a layer in three branches, each `[tokens, N, 128]`. The model multiplies each by its gate, and adds
/// them.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct NativeBranches<T: Element> {
    /// Attention to compressed tokens; zeros for a token that sees none.
    pub compressed: Tensor<T>,
    /// Attention to the selected blocks.
    pub selected: Tensor<T>,
    /// Attention to the last tokens.
    pub window: Tensor<T>,
}

impl<T: Element> From<(Tensor<T>, Tensor<T>, Tensor<T>)> for NativeBranches<T> {
    /// Tensors to write the attention to compressed tokens, to selected blocks and to the last tokens into.
    fn from((compressed, selected, window): (Tensor<T>, Tensor<T>, Tensor<T>)) -> Self {
        Self { compressed, selected, window }
    }
}

impl<T: Element> NativeBranches<T> {
    /// Each branch by its name.
    pub(super) fn each(&self) -> [(&'static str, &AnyTensor); 3] {
        [("compressed", &self.compressed), ("selected", &self.selected), ("window", &self.window)]
    }
}

/// The calls of a step, in the order in which a layer queues them.
pub(super) struct NativePlan<T: Element> {
    /// Calls that compress, for keys and for values.
    compress: Vec<(CompressedSlots, [NsaCompressCachePlan; 2])>,
    /// Rows of compressed tokens that are copied behind that, from and to.
    copies: Vec<[Range<usize>; 2]>,
    /// Calls for the query rows from the first on.
    rows: Vec<RowCalls>,
    window: FusedCall,
    /// What rows get that no call writes.
    zeros: Tensor<T>,
}

/// The calls for consecutive query rows of a kind.
struct RowCalls {
    rows: Range<usize>,
    attention: RowAttention,
}

/// How rows attend to compressed tokens and to selected blocks.
#[allow(clippy::large_enum_variant, reason = "a step has a few of them, in one list")]
enum RowAttention {
    /// To compressed tokens, if there are any, and to all blocks.
    All(Option<CompressedCall>, FusedCall),
    /// To compressed tokens, and to the blocks that these select.
    Selected(CompressedCall, NsaSelectedPlan),
}

/// A call of NsaCompressAttentionInfer.
struct CompressedCall {
    plan: NsaCompressAttentionPlan,
    /// The blocks that it selects, used by one layer after the other.
    selected: Tensor<i32>,
}

/// A call of FusedInferAttentionScore over the cache.
struct FusedCall {
    table: BlockTable,
    plan: Plan,
}

/// What the calls of rows depend on.
#[derive(Clone, Copy, PartialEq, Eq)]
enum RowKind {
    /// They see no compressed token.
    Uncompressed,
    /// They see fewer tokens than the selected blocks hold.
    Short,
    Selecting,
}

/// Consecutive query rows of a request that see the same compressed tokens: a sequence to the operators.
#[derive(Clone, Copy)]
struct RowPiece {
    request: usize,
    rows: usize,
    /// Tokens that the last row sees.
    tokens: usize,
    compressed: usize,
    kind: RowKind,
}

/// A request of the step: its new tokens, all its tokens, and their blocks.
struct Request<'a> {
    new: usize,
    tokens: usize,
    blocks: &'a [usize],
    /// The blocks of the kernel, and the pages of compressed tokens.
    tables: [Vec<usize>; 2],
}

/// What plans are made of.
#[derive(Clone, Copy)]
struct Planning<'a, T: Element> {
    native: &'a NativeSparse<T>,
    stream: &'a Stream,
    requests: &'a [Request<'a>],
    views: &'a CacheViews<T>,
    tensors: NativeTensors<'a, T>,
}

impl<T: Element> NativePlan<T> {
    pub(super) fn new(
        native: &NativeSparse<T>,
        stream: &Stream,
        metadata: &AttentionMetadata,
        views: &CacheViews<T>,
        tensors: NativeTensors<'_, T>,
    ) -> Result<Self> {
        let requests = requests(native, metadata)?;
        let planning = Planning { native, stream, requests: &requests, views, tensors };
        let copies = requests
            .iter()
            .flat_map(|request| native.rows.copies(request.blocks, request.tokens - request.new..request.tokens));
        let mut rows = Vec::new();
        let pieces = planning.pieces();
        let calls = pieces.chunk_by(|one, next| one.kind == next.kind);
        for pieces in calls.flat_map(|pieces| pieces.chunks(MOST_SEQUENCES)) {
            let first = rows.last().map_or(0, |calls: &RowCalls| calls.rows.end);
            rows.push(planning.rows(first, pieces)?);
        }
        let window = Causality::from_flags(true, Some(native.window))?.mask(&stream.device().masks())?;
        let each = requests.iter().enumerate().map(|(at, request)| (at, request.new, request.tokens));
        let uncompressed = rows.iter().filter(|calls| matches!(calls.attention, RowAttention::All(None, _)));
        let padding = metadata.tokens() - metadata.actual_tokens();
        let most = uncompressed.map(|calls| calls.rows.len()).fold(padding, usize::max);
        let axes = [most, native.shape.heads, native.cache.shape().value_dim];
        Ok(Self {
            compress: planning.compress()?,
            copies: copies.collect(),
            rows,
            window: planning.fused(0, each, window)?,
            zeros: Tensor::from_buffer(&stream.device().alloc_zeroed(axes.iter().product())?, axes)?,
        })
    }

    /// Queues the compression of the blocks of tokens that the step completes, and the copies behind it.
    pub(super) fn compress(&self, stream: &Stream, views: &CacheViews<T>, tensors: NativeTensors<'_, T>) -> Result<()> {
        let weights = [tensors.key_weight, tensors.value_weight];
        for (slots, plans) in &self.compress {
            for (at, plan) in plans.iter().enumerate() {
                plan.launch(stream, (&views.heads[at], weights[at], slots, &views.compressed[at]))?;
            }
        }
        for rows in &views.compressed {
            for [from, to] in &self.copies {
                let source = rows.narrow(0, from.clone())?;
                rows.narrow(0, to.clone())?.copy_from(stream, &source)?;
            }
        }
        Ok(())
    }

    /// Queues attention.
    pub(super) fn attend(
        &self,
        stream: &Stream,
        views: &CacheViews<T>,
        query: &Tensor<T>,
        branches: &NativeBranches<T>,
    ) -> Result<()> {
        let [key, value] = &views.heads;
        let NativeBranches { compressed, selected, window } = branches;
        for RowCalls { rows, attention } in &self.rows {
            let of_rows = |tensor: &Tensor<T>| tensor.narrow(0, rows.clone());
            let (query, compressed) = (of_rows(query)?, of_rows(compressed)?);
            let mut selected = of_rows(selected)?;
            match attention {
                RowAttention::All(call, all) => {
                    match call {
                        Some(call) => drop(call.launch(stream, views, &query, compressed)?),
                        None => self.clear(stream, &compressed)?,
                    }
                    all.launch(stream, views, &query, selected)?;
                }
                RowAttention::Selected(call, plan) => {
                    let blocks = call.launch(stream, views, &query, compressed)?;
                    plan.launch_into(stream, (&query, key, value, &blocks), &mut selected)?;
                }
            }
        }
        let end = self.rows.last().map_or(0, |calls| calls.rows.end);
        let rows = window.narrow(0, 0..end)?;
        self.window.launch(stream, views, &query.narrow(0, 0..end)?, rows)?;
        let padded = end..size(query, 0);
        for branch in [&branches.compressed, &branches.selected, window] {
            self.clear(stream, &branch.narrow(0, padded.clone())?)?;
        }
        Ok(())
    }

    /// Queues zeros for rows that no call writes.
    fn clear(&self, stream: &Stream, rows: &Tensor<T>) -> Result<()> {
        let count = size(rows, 0);
        if count > 0 {
            let zeros = self.zeros.narrow(0, 0..count)?;
            rows.copy_from(stream, &zeros)?;
        }
        Ok(())
    }
}

/// The requests of a step, without dummies.
fn requests<'a, T: Element>(native: &NativeSparse<T>, metadata: &'a AttentionMetadata) -> Result<Vec<Request<'a>>> {
    let block_size = native.cache.pool().block_size();
    let rows = metadata.new_and_cached().zip(metadata.table().rows());
    let rows = rows.take(metadata.requests()).map(|((new, cached), row)| {
        let tokens = cached + new;
        let blocks = &row[..tokens.div_ceil(block_size)];
        let tables = [kernel_blocks(blocks, block_size, KERNEL_BLOCK)?, native.rows.table(blocks)];
        Ok(Request { new, tokens, blocks, tables })
    });
    rows.collect()
}

impl<T: Element> Planning<'_, T> {
    /// The query rows of the step.
    fn pieces(&self) -> Vec<RowPiece> {
        let (compression, selecting) = (self.native.compression, self.native.selectable_tokens());
        let mut pieces: Vec<RowPiece> = Vec::new();
        for (request, Request { new, tokens, .. }) in self.requests.iter().enumerate() {
            for tokens in tokens - new + 1..=*tokens {
                let compressed = compression.count(tokens);
                let kind = match compressed {
                    0 => RowKind::Uncompressed,
                    _ if tokens < selecting => RowKind::Short,
                    _ => RowKind::Selecting,
                };
                let next = RowPiece { request, rows: 1, tokens, compressed, kind };
                match pieces.last_mut() {
                    Some(last) if last.rows < MOST_ROWS && last.precedes(&next) => {
                        (last.rows, last.tokens) = (last.rows + 1, tokens);
                    }
                    _ => pieces.push(next),
                }
            }
        }
        pieces
    }

    /// The calls for consecutive pieces of one kind, whose rows begin with `first`.
    fn rows(&self, first: usize, pieces: &[RowPiece]) -> Result<RowCalls> {
        let Self { native, stream, views, tensors, .. } = *self;
        let kind = pieces.first().map_or(RowKind::Uncompressed, |piece| piece.kind);
        let new: Vec<usize> = pieces.iter().map(|piece| piece.rows).collect();
        let rows = first..first + new.iter().sum::<usize>();
        let query = tensors.query.narrow(0, rows.clone())?;
        let attention = match kind {
            RowKind::Uncompressed => RowAttention::All(None, self.all_blocks(first, pieces)?),
            RowKind::Short => {
                // What is selected is not read.
                let call = self.compressed(&query, pieces, &new, 1)?;
                RowAttention::All(Some(call), self.all_blocks(first, pieces)?)
            }
            RowKind::Selecting => {
                let compressed = self.compressed(&query, pieces, &new, native.select_count)?;
                let tokens: Vec<usize> = pieces.iter().map(|piece| piece.tokens).collect();
                let blocks: Vec<_> = pieces.iter().map(|piece| &self.requests[piece.request].tables[0]).collect();
                let sequences = SparseSequences::packed(stream, &new, &tokens)?.paged(stream, &blocks)?;
                let [key, value] = &views.heads;
                let call = NsaSelectedAttentionInfer::new(native.shape.scale)
                    .select_block_size(native.select_block)
                    .kv_heads(native.shape.kv_heads);
                let plan = call.plan(&sequences, (&query, key, value, &compressed.selected))?;
                RowAttention::Selected(compressed, plan)
            }
        };
        Ok(RowCalls { rows, attention })
    }

    /// Attention of pieces with these numbers of rows to compressed tokens, which selects blocks.
    fn compressed(
        &self,
        query: &Tensor<T>,
        pieces: &[RowPiece],
        new: &[usize],
        select_count: usize,
    ) -> Result<CompressedCall> {
        let Self { native, stream, views, .. } = *self;
        let keys: Vec<usize> = pieces.iter().map(|piece| piece.compressed).collect();
        let tokens: Vec<usize> = pieces.iter().map(|piece| piece.tokens).collect();
        let pages: Vec<_> = pieces.iter().map(|piece| &self.requests[piece.request].tables[1]).collect();
        let sequences = SparseSequences::packed(stream, new, &keys)?.paged(stream, &pages)?;
        let [key, value] = &views.pages;
        let call =
            NsaCompressAttentionInfer::new(native.compression.block, native.compression.stride, native.shape.scale);
        let plan = call
            .select(native.select_block, select_count)
            .kv_heads(native.shape.kv_heads)
            .original_lengths(&tokens)
            // Whether enough blocks are selected is checked when the step begins.
            .allow_lint("nsa_compress_attention.forced")
            .plan(&sequences, (query, key, value))?;
        let selected = Tensor::empty(stream.device(), [size(query, 0), native.shape.kv_heads, select_count])?;
        Ok(CompressedCall { plan, selected })
    }

    /// Attention of pieces, whose rows begin with `first`, to all tokens.
    fn all_blocks(&self, first: usize, pieces: &[RowPiece]) -> Result<FusedCall> {
        let requests = pieces.chunk_by(|one, next| one.request == next.request).filter_map(|pieces| {
            let last = pieces.last()?;
            Some((last.request, pieces.iter().map(|piece| piece.rows).sum(), last.tokens))
        });
        self.fused(first, requests, Causality::Causal.mask(&self.stream.device().masks())?)
    }

    /// A call of FusedInferAttentionScore for rows from `first` on: of each sequence its request, its rows, and the
    /// tokens that the last of them sees.
    fn fused(
        &self,
        first: usize,
        sequences: impl Iterator<Item = (usize, usize, usize)>,
        mask: Mask,
    ) -> Result<FusedCall> {
        let (mut ends, mut lengths, mut blocks) = (Vec::new(), Vec::new(), Vec::new());
        let mut end = 0;
        for (request, rows, tokens) in sequences {
            end += rows;
            ends.push(end);
            lengths.push(tokens);
            blocks.push(&self.requests[request].tables[0]);
        }
        let Self { native, stream, views, tensors, .. } = *self;
        let table = BlockTable::from_rows(stream, &blocks, KERNEL_BLOCK)?;
        let query = tensors.query.narrow(0, first..first + end)?;
        let [key, value] = &views.tokens;
        let call = native.shape.call(Layout::Tnd).actual_seq_lengths(ends).actual_seq_lengths_kv(lengths).mask(mask);
        let plan = call.plan(Inputs::new(&query, key, value).paged(&table))?;
        Ok(FusedCall { table, plan })
    }

    /// The calls that compress the blocks of tokens that the step completes: to the operator each is the last block of
    /// a sequence that ends with it.
    fn compress(&self) -> Result<Vec<(CompressedSlots, [NsaCompressCachePlan; 2])>> {
        let Self { native, stream, views, tensors, .. } = *self;
        let compression = native.compression;
        let mut completed = Vec::new();
        for request in self.requests {
            let before = compression.count(request.tokens - request.new);
            for compressed in before..compression.count(request.tokens) {
                let slot = native.rows.slot(request.blocks, compressed);
                completed.push((compression.reach(compressed + 1), slot, &request.tables[0]));
            }
        }
        let call = NsaCompressWithCache::new(compression.block, compression.stride);
        let calls = completed.chunks(MOST_SEQUENCES).map(|completed| {
            let tokens: Vec<usize> = completed.iter().map(|(tokens, ..)| *tokens).collect();
            let slots: Vec<usize> = completed.iter().map(|(_, slot, _)| *slot).collect();
            let blocks: Vec<_> = completed.iter().map(|(.., blocks)| blocks).collect();
            let new = vec![1; tokens.len()];
            let sequences = SparseSequences::packed(stream, &new, &tokens)?.paged(stream, &blocks)?;
            let slots = CompressedSlots::new(stream, &slots)?;
            let plan =
                |at: usize, weight| call.plan(&sequences, (&views.heads[at], weight, &slots, &views.compressed[at]));
            let plans = [plan(0, tensors.key_weight)?, plan(1, tensors.value_weight)?];
            Ok((slots, plans))
        });
        calls.collect()
    }
}

impl RowPiece {
    /// Whether a row goes on with the same compressed tokens.
    fn precedes(&self, next: &Self) -> bool {
        let same = |piece: &Self| (piece.request, piece.compressed, piece.kind);
        same(self) == same(next)
    }
}

impl CompressedCall {
    /// Queues the call, and returns the blocks that it selects, which its next launch overwrites.
    fn launch<T: Element>(
        &self,
        stream: &Stream,
        views: &CacheViews<T>,
        query: &Tensor<T>,
        output: Tensor<T>,
    ) -> Result<Tensor<i32>> {
        let mut attention = CompressedAttention::from((output, self.selected.clone()));
        let [key, value] = &views.pages;
        self.plan.launch_into(stream, (query, key, value), &mut attention)?;
        Ok(attention.selected)
    }
}

impl FusedCall {
    fn launch<T: Element>(
        &self,
        stream: &Stream,
        views: &CacheViews<T>,
        query: &Tensor<T>,
        output: Tensor<T>,
    ) -> Result<()> {
        let [key, value] = &views.tokens;
        let inputs = Inputs::new(query, key, value).paged(&self.table);
        Ok(self.plan.launch_into(stream, inputs, &mut Output::from(output))?)
    }
}
