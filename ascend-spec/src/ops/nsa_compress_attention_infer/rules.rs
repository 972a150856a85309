//! The rules of NsaCompressAttentionInfer.

use super::{NsaCompressAttentionCall, NsaCompressAttentionProblem, Parameter, Version};
use crate::DType::{Bf16, Float16, Int32};
use crate::allowed::{Checked, DivisorsOf, Multiples, MultiplesOf, Named, Noted, Outcome};
use crate::contract::first_lint;
use crate::ops::native_sparse::{Compression, NsaAttention, NsaTensors, nsa_attention_rules};
use crate::rule::{lint, rules};
use crate::{Target, Violation};

nsa_attention_rules! {
    "nsa_compress_attention", "NsaCompressAttentionInfer",
    required PARAM_NULLPTR
        "query, key, value, blockTable, actualCmpKvSeqLen, layout, output and topKOutput"
        "queries, the caches, their table, lengths and both outputs",
    layouts "TND or BSND", ranks INNER_NULLPTR "[blocks, page, N2 * D]", batch PARAM_INVALID "1 to 10000",
    heads "and 1, 2, 4, 8, 16, 32, 64 or 128 query heads share a key head",
    elements "1 to 192 elements, and values no more than these and 128" "use other attention for larger heads",
    pages "a multiple of 16 up to 128", blocks "topKOutput";
    BLOCK = "nsa_compress_attention.block", INNER_NULLPTR, V1, "NsaCompressAttentionInfer tiling, compressBlockSize",
        "compressBlockSize is a multiple of 16 up to 128",
        "compress blocks of such a size";
    STRIDE = "nsa_compress_attention.stride", INNER_NULLPTR, V1,
        "NsaCompressAttentionInfer tiling, compressBlockStride",
        "compressBlockStride is 16 to 64",
        "let compressed blocks begin at such a distance";
    SELECT = "nsa_compress_attention.select_block_size", INNER_NULLPTR, V1,
        "NsaCompressAttentionInfer tiling, selectBlockSize",
        "selectBlockSize is a multiple of 16 up to 128 and of compressBlockStride, and at least compressBlockSize",
        "select blocks of such a size";
    COMPRESSED = "nsa_compress_attention.compressed", INNER_NULLPTR, V1,
        "NsaCompressAttentionInfer tiling, actualCmpKvSeqLen",
        "a sequence has at most 8192 compressed tokens, and at most 4096 blocks of selectBlockSize",
        "attend to all tokens of longer sequences, by FusedInferAttentionScore";
    SHORT = "nsa_compress_attention.short", INNER_NULLPTR, V1, "NsaCompressAttentionInfer tiling, selectBlockCount",
        "a sequence has at least selectBlockCount blocks of selectBlockSize",
        "select fewer blocks, or attend to all tokens of short sequences, by FusedInferAttentionScore";
    RESERVED = "nsa_compress_attention.reserved", Lint("the tensor is not looked at"), V1,
        "NsaCompressAttentionInfer documentation, topKMask",
        "topKMask is null",
        "leave the mask out";
    WHOLE_STRIDES = "nsa_compress_attention.whole_strides", Lint("only scores of blocks change"), V1,
        "NsaCompressAttentionInfer kernel, scores of blocks",
        "compressBlockSize is a multiple of compressBlockStride, as scores count whole strides",
        "let compressed blocks begin at a distance that divides their size";
    FORCED = "nsa_compress_attention.forced", Lint("only the choice changes"), V1,
        "NsaCompressAttentionInfer kernel, selected blocks",
        "at least 3 blocks are selected: the first and the last two always are, and of fewer CANN does not say which",
        "select at least 3 blocks";
    ORIGINAL = "nsa_compress_attention.original", Lint("rows see other compressed tokens than meant"), V1,
        "NsaCompressAttentionInfer documentation, actualSelKvSeqLen",
        "actualSelKvSeqLen has the original tokens of which the compressed ones are made, and is given where a "
        "sequence has several query rows",
        "give the number of original tokens of each sequence";
}

/// Most compressed tokens of a sequence.
const MOST_COMPRESSED: i64 = 8192;
/// Most blocks of which some are selected.
const MOST_BLOCKS: i64 = 4096;

/// Checks the length of a sequence, in compressed tokens, and returns how many blocks of `select` tokens there are to
/// select from.
///
/// # Errors
/// [`Violation`] by [`COMPRESSED`] for more compressed tokens, or more blocks, than the operator takes.
pub fn check_length(compression: Compression, select: usize, compressed: i64) -> Result<i64, Violation> {
    COMPRESSED.takes(Noted(compressed, "compressed tokens"), 0..=MOST_COMPRESSED)?;
    let blocks = compression.blocks(select, usize::try_from(compressed).unwrap_or(0)) as i64;
    COMPRESSED.takes(Noted(blocks, "blocks to select from"), 0..=MOST_BLOCKS)?;
    Ok(blocks)
}

impl NsaCompressAttentionCall<'_> {
    /// Checks the call against the contract of the operator on `target`, and resolves it. The contents of the table
    /// are not checked.
    ///
    /// Allocates nothing unless it refuses.
    ///
    /// # Errors
    /// [`Violation`] by the first broken rule.
    pub fn check(&self, target: Target) -> Result<NsaCompressAttentionProblem, Violation> {
        PRODUCT.runs(Version::V1.info(), target)?;
        let tensors = self.required()?;
        self.entry(&tensors)?;
        let compression = Compression { block: 1, stride: 1 };
        // A call whose outputs are all empty ends before the tiling looks at it.
        if tensors.out.is_empty() && tensors.selected.1.is_empty() {
            return Ok(NsaCompressAttentionProblem { attention: NsaAttention::IDLE, compression, select: 1 });
        }
        let pages = Multiples(16, ..=128);
        let attention = ATTENTION.resolve(&tensors, &["TND", "BSND"], &[3], pages, 1..=10000)?;
        HEADS.takes(Noted(attention.group() as i64, "query heads for each key head"), DivisorsOf(128))?;
        let dim = attention.query(&tensors.query).shape.last().map_or(0, |&dim| dim);
        ATTENTION.head_dims(&tensors, &attention, 1..=192, 1..=dim.min(128))?;
        let problem = NsaCompressAttentionProblem {
            attention: NsaAttention { scale: self.scale, ..attention },
            compression: self.blocks()?,
            // Positive, as the rules of blocks have it.
            select: self.select_block_size as usize,
        };
        self.compressed(&problem)?;
        Ok(problem)
    }

    /// The first lint that the call, which holds every rule, breaks, leaving out those in `allowed` (by id).
    ///
    /// # Errors
    /// The broken lint, with the same fields as a broken rule.
    pub fn lint(&self, target: Target, allowed: &[&str]) -> Result<(), Violation> {
        let (Ok(problem), Ok(tensors)) = (self.check(target), self.required()) else {
            return Ok(());
        };
        if problem.is_idle() {
            return Ok(());
        }
        first_lint(allowed, |report| {
            ATTENTION.lint(&tensors, &problem.attention, self.scale, report);
            MASK_UNREAD.leaves_out(self, &[Parameter::AttentionMask, Parameter::SparseMode]).report(report);
            RESERVED.leaves_out(self, &[Parameter::TopKMask]).report(report);
            WHOLE_STRIDES.takes(self.compress_block_size, MultiplesOf(self.compress_block_stride)).report(report);
            FORCED.takes(self.select_block_count, 3..).report(report);
            self.original(&problem, report);
        })
    }

    /// The tensors that every call has.
    fn required(&self) -> Result<NsaTensors<'_>, Violation> {
        Ok(NsaTensors {
            layout: self.layout,
            query: REQUIRED.requires(self.query, "query")?,
            key: REQUIRED.requires(self.key, "key")?,
            value: REQUIRED.requires(self.value, "value")?,
            block_table: REQUIRED.requires(self.block_table, "blockTable")?,
            key_lengths: REQUIRED.requires(self.actual_cmp_kv_seq_len, "actualCmpKvSeqLen")?,
            out: REQUIRED.requires(self.output, "output")?,
            selected: ("topKOutput", REQUIRED.requires(self.top_k_output, "topKOutput")?),
            query_lengths: self.query_lengths(),
            heads: [self.num_heads, self.num_key_value_heads],
            page: self.page_block_size,
            select_count: self.select_block_count,
        })
    }

    /// What the entry point looks at.
    fn entry(&self, tensors: &NsaTensors<'_>) -> Checked {
        DTYPE.takes(Named("query", tensors.query.dtype), [Float16, Bf16])?;
        DTYPE.dtypes(self, |parameter| {
            Some(match parameter {
                Parameter::AttentionMask | Parameter::TopKMask => return None,
                Parameter::BlockTable | Parameter::TopKOutput => Int32,
                _ => tensors.query.dtype,
            })
        })?;
        FORMAT.formats(self)
    }

    /// Checks the sizes of blocks that are compressed and selected.
    fn blocks(&self) -> Result<Compression, Violation> {
        let [block, stride] = [self.compress_block_size, self.compress_block_stride];
        BLOCK.takes(block, Multiples(16, ..=128))?;
        STRIDE.takes(stride, 16..=64)?;
        SELECT.takes(self.select_block_size, Multiples(16, ..=128))?;
        SELECT.takes(self.select_block_size, block..)?;
        SELECT.takes(self.select_block_size, MultiplesOf(stride))?;
        // Both are positive.
        Ok(Compression { block: block as usize, stride: stride as usize })
    }

    /// Checks the compressed tokens of each sequence, and the blocks of which some are selected.
    fn compressed(&self, problem: &NsaCompressAttentionProblem) -> Checked {
        for &compressed in self.actual_cmp_kv_seq_len.unwrap_or_default() {
            let blocks = check_length(problem.compression, problem.select, compressed)?;
            SHORT.takes(Noted(blocks, "blocks to select from"), self.select_block_count..)?;
        }
        Ok(())
    }

    /// Reports numbers of original tokens that are missing, or of which other numbers of compressed tokens are made.
    fn original(&self, problem: &NsaCompressAttentionProblem, report: &mut dyn FnMut(Violation)) {
        let Some(original) = self.actual_sel_kv_seq_len.filter(|lengths| !lengths.is_empty()) else {
            let several = match self.query_lengths() {
                Some(lengths) => lengths.iter().any(|&length| length > 1),
                None => problem.attention.sequences.query.total() > problem.attention.sequences.batch,
            };
            lint!(report, !several, ORIGINAL, "none, with several query rows", "the original tokens of each sequence");
            return;
        };
        let compressed = self.actual_cmp_kv_seq_len.unwrap_or_default();
        let made = |tokens: i64| problem.compression.count(usize::try_from(tokens).unwrap_or(0)) as i64;
        let (numbers, expected) = (original.len(), compressed.len());
        let given = format_args!("{numbers} numbers");
        lint!(report, numbers == expected, ORIGINAL, given, expected);
        let mut pairs = original.iter().zip(compressed);
        if let Some((tokens, compressed)) = pairs.find(|(tokens, compressed)| made(**tokens) != **compressed) {
            let given = format_args!("{tokens} original tokens with {compressed} compressed ones");
            report(ORIGINAL.broken(given, format_args!("{} compressed ones", made(*tokens))));
        }
    }
}
