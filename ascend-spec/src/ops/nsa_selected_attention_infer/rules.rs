//! The rules of NsaSelectedAttentionInfer.

use super::{NsaSelectedCall, NsaSelectedProblem, Parameter, Version};
use crate::DType::{Bf16, Float16, Int32};
use crate::allowed::{Checked, Multiples, Named, Noted, Outcome};
use crate::contract::first_lint;
use crate::ops::native_sparse::{NsaAttention, NsaTensors, nsa_attention_rules};
use crate::rule::rules;
use crate::{Target, Violation};

nsa_attention_rules! {
    "nsa_selected_attention", "NsaSelectedAttentionInfer",
    required INNER_NULLPTR
        "query, key, value, topkIndices, blockTable, actualQSeqLen, actualKvSeqLen, layout and output"
        "queries, the caches, their table, lists of blocks, lengths and the output",
    layouts "BSH, BSND or TND", ranks PARAM_INVALID "[blocks, page, N2 * D] or [blocks, page, N2, D]",
    batch INNER_NULLPTR "1 to 3072",
    heads "at most 256, and 1 to 16 query heads share a key head",
    elements "192 elements, and values 128" "fill heads up with zeros to these sizes; larger ones need other attention",
    pages "64 or 128", blocks "topkIndices";
    SELECT = "nsa_selected_attention.select_block_size", INNER_NULLPTR, V1,
        "NsaSelectedAttentionInfer tiling, selectBlockSize",
        "selectBlockSize is a multiple of 16 up to 128",
        "select blocks of such a size";
    SHORT = "nsa_selected_attention.short", INNER_NULLPTR, V1, "NsaSelectedAttentionInfer tiling, selectBlockCount",
        "selectBlockCount blocks have no more tokens than the longest sequence",
        "select fewer blocks, or attend to all tokens of short sequences";
    ROWS_WITHOUT_TOKENS = "nsa_selected_attention.rows_without_tokens",
        Lint("CANN does not say what is written for such rows"), V1, "NsaSelectedAttentionInfer kernel, lengths",
        "a sequence has at least as many tokens as query rows",
        "count a sequence's cached tokens and its new ones among its tokens";
}

impl NsaSelectedCall<'_> {
    /// Checks the call against the contract of the operator on `target`, and resolves it. The contents of table and
    /// lists are not checked.
    ///
    /// Allocates nothing unless it refuses.
    ///
    /// # Errors
    /// [`Violation`] by the first broken rule.
    pub fn check(&self, target: Target) -> Result<NsaSelectedProblem, Violation> {
        PRODUCT.runs(Version::V1.info(), target)?;
        let tensors = self.required()?;
        self.entry(&tensors)?;
        // A call whose output is empty ends before the tiling looks at it.
        if tensors.out.is_empty() {
            return Ok(NsaSelectedProblem { attention: NsaAttention::IDLE, select: 1 });
        }
        let attention = ATTENTION.resolve(&tensors, &["BSH", "BSND", "TND"], &[3, 4], [64, 128], 1..=3072)?;
        HEADS.takes(Noted(attention.group() as i64, "query heads for each key head"), 1..=16)?;
        HEADS.takes(Named("numKeyValueHeads", self.num_key_value_heads), 1..=256)?;
        ATTENTION.head_dims(&tensors, &attention, 192, 128)?;
        SELECT.takes(self.select_block_size, Multiples(16, ..=128))?;
        let longest = tensors.key_lengths.iter().copied().max().unwrap_or(0);
        let selected = self.select_block_count.saturating_mul(self.select_block_size);
        SHORT.takes(Noted(selected, "tokens of blocks"), ..=longest)?;
        Ok(NsaSelectedProblem {
            attention: NsaAttention { scale: self.scale, ..attention },
            // Positive, as the rule has it.
            select: self.select_block_size as usize,
        })
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
            MASK_UNREAD.leaves_out(self, &[Parameter::AttenMask, Parameter::SparseMode]).report(report);
            let rows = tensors.query_lengths.unwrap_or_default();
            let mut pairs = rows.iter().zip(tensors.key_lengths);
            if let Some((rows, tokens)) = pairs.find(|(rows, tokens)| tokens < rows) {
                let given = format_args!("{rows} query rows and {tokens} tokens of a sequence");
                report(ROWS_WITHOUT_TOKENS.broken(given, format_args!("{rows} tokens or more")));
            }
        })
    }

    /// The tensors that every call has.
    fn required(&self) -> Result<NsaTensors<'_>, Violation> {
        Ok(NsaTensors {
            query: REQUIRED.requires(self.query, "query")?,
            key: REQUIRED.requires(self.key, "key")?,
            value: REQUIRED.requires(self.value, "value")?,
            selected: ("topkIndices", REQUIRED.requires(self.topk_indices, "topkIndices")?),
            block_table: REQUIRED.requires(self.block_table, "blockTable")?,
            query_lengths: Some(REQUIRED.requires(self.actual_q_seq_len, "actualQSeqLen")?),
            key_lengths: REQUIRED.requires(self.actual_kv_seq_len, "actualKvSeqLen")?,
            layout: REQUIRED.requires(self.layout, "layout")?,
            out: REQUIRED.requires(self.output, "output")?,
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
                Parameter::AttenMask => return None,
                Parameter::BlockTable | Parameter::TopkIndices => Int32,
                _ => tensors.query.dtype,
            })
        })?;
        FORMAT.formats(self)
    }
}
