//! The rules of IncreFlashAttention that come before those of FusedInferAttentionScore's decode path.

use super::{IncreCall, Version};
use crate::attention_problem::AttentionProblem;
use crate::ops::fused_infer_attention_score::Verdict;
use crate::ops::inference_attention::{PathCall, path_rules};
use crate::rule::{require, rules};
use crate::{DType, Soc, Target, Violation};

path_rules! {
    "incre", "IncreFlashAttention", newest "V4", older "V1 to V3",
    required "query, key, value and attentionOut";
    LAYOUT = "incre.input_layout", TILING_ERROR, V1, "IncreFlashAttention documentation, inputLayout",
        "inputLayout is BSH, BNSD or BSND",
        "spell the layout as CANN does";
    ROWS = "incre.rows", TILING_ERROR, V1, "IncreFlashAttention documentation, query",
        "each sequence has one query row",
        "call PromptFlashAttention or FusedInferAttentionScore for several rows";
    DECODE = "incre.decode_rules", TILING_ERROR, V1, "IncreFlashAttention tiling",
        "the call holds the rules of FusedInferAttentionScore's decode path",
        "see the rule that is named first";
    REGISTERED = "incre.registered", PARAM_INVALID, V1, "IncreFlashAttention operator definition",
        "each tensor has a type and a format that the operator is registered with",
        "convert the tensor to a type and a format that are allowed";
    CARD_SIZE = "incre.card_size", TILING_ERROR, V1, "IncreFlashAttention tiling, 310P" in Scope::ATLAS_INFERENCE,
        "on 310P a call has at most 256 sequences, and room for at most 65536 keys of each: the rows of the tensor, or \
         the tokens of all blocks in a row of the table",
        "divide the sequences among several calls, or leave unused columns of the block table out";
    CARD_HEADS = "incre.card_heads", TILING_ERROR, V1, "IncreFlashAttention tiling, 310P" in Scope::ATLAS_INFERENCE,
        "on 310P the head dimension is a multiple of 16 up to 128, and a key head has at most 32 query heads",
        "call PromptFlashAttention over contiguous keys: it takes one query row too, and no paged cache";
}

impl IncreCall<'_> {
    /// The most sequences of a call on 310P.
    pub const MOST_CARD_SEQUENCES: i64 = 256;

    /// Checks the rules that come before those of the decode path, and returns the verdict of that path.
    pub(super) fn path_verdict(&self, target: Target) -> Result<Option<Verdict>, Violation> {
        let query = Self::required(self.query, "query")?;
        Self::required(self.key.first(), "key")?;
        Self::required(self.value.first(), "value")?;
        Self::required(self.attention_out, "attentionOut")?;
        if target.soc == Soc::AtlasInference {
            let mut tensors = self.each_tensor();
            let bf16 = tensors.find(|(_, desc)| desc.dtype == DType::Bf16);
            require!(
                bf16.is_none(),
                REGISTERED,
                format_args!("{} of BF16 on {}", bf16.map_or("", |(argument, _)| argument.acl_name()), target.soc),
                "FLOAT16 and quantised types",
            );
        }
        let layout = self.input_layout.unwrap_or(Self::DEFAULT_LAYOUT);
        let axis = match layout {
            "BSH" | "BSND" => 1,
            "BNSD" => 2,
            _ => {
                let given = format_args!("{layout:?}");
                return Err(LAYOUT.broken(given, "BSH, BNSD, BSND"));
            }
        };
        let rows = query.shape.get(axis).copied();
        require!(rows.is_none_or(|rows| rows == 1), ROWS, rows.unwrap_or(0), 1,);
        Self::judge_path(&self.as_fused()).map(Some)
    }

    /// Checks the tiling rules of 310P, by the sizes of the tensors.
    pub(super) fn card(&self, problem: &AttentionProblem<'_>) -> Result<(), Violation> {
        const MOST_KEYS: usize = 65_536;
        let most = IncreCall::MOST_CARD_SEQUENCES;
        require!(
            problem.batch <= most as usize && problem.key_rows <= MOST_KEYS,
            CARD_SIZE,
            format_args!("{} sequences of {} keys", problem.batch, problem.key_rows),
            format_args!("up to {most} sequences of up to {MOST_KEYS} keys"),
        );
        let (dim, group) = (problem.head_dim, problem.heads.checked_div(problem.kv_heads).unwrap_or(0));
        require!(
            dim.is_multiple_of(16) && dim <= 128 && group <= 32,
            CARD_HEADS,
            format_args!("{group} query heads of {dim} elements a key head"),
            "up to 32 query heads, of a multiple of 16 elements up to 128",
        );
        Ok(())
    }
}
