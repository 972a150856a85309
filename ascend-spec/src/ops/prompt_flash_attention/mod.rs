//! PromptFlashAttention: attention of several query rows over dense keys. It has rules of its own, followed by those
//! of FusedInferAttentionScore's prefill path.
//!
//! It is the fused attention of the Atlas inference series (310P) for prefill, and runs on Atlas A2 and A3. Calls
//! that its tiling refuses end with 561103; the refusal names the rule of FusedInferAttentionScore.

pub mod rules;

use super::inference_attention::{path_operator, path_version};
use crate::Cann::V8_1;
use crate::operator::versions;
use crate::{DType, TensorDesc};

declare_operator! {
    /// Source: aclnnPromptFlashAttention V1 to V3, parameter tables.
    prompt_flash_attention_arguments, "PromptFlashAttention", #[derive(Copy)] PromptCall<'a>;
    1 { query: tensor, Query, "query", "Queries, in the order of `input_layout`." }
    1 { key: tensor, Key, "key", "Keys." }
    1 { value: tensor, Value, "value", "Values." }
    1 { pse_shift: tensor, PseShift, "pseShift", "Additive position bias." }
    1 { atten_mask: tensor, AttenMask, "attenMask", "Mask; 1 hides." }
    1 { actual_seq_lengths: ints, ActualSeqLengths, "actualSeqLengths", "Query lengths." }
    2 { actual_seq_lengths_kv: ints, ActualSeqLengthsKv, "actualSeqLengthsKv", "Key and value lengths." }
    2 { deq_scale1: tensor, DeqScale1, "deqScale1", "Dequantisation after Q K^T." }
    2 { quant_scale1: tensor, QuantScale1, "quantScale1", "Quantisation of the probabilities." }
    2 { deq_scale2: tensor, DeqScale2, "deqScale2", "Dequantisation after P V." }
    2 { quant_scale2: tensor, QuantScale2, "quantScale2", "Quantisation scale of the output." }
    2 { quant_offset2: tensor, QuantOffset2, "quantOffset2", "Quantisation offset of the output." }
    1 { num_heads: int = 1, NumHeads, "numHeads", "Number of query heads." }
    1 { scale: float = 1.0, Scale, "scaleValue", "Factor of the scores." }
    1 { pre_tokens: int = 2_147_483_647, PreTokens, "preTokens", "Keys visible before the diagonal." }
    1 { next_tokens: int = 0, NextTokens, "nextTokens", "Keys visible after the diagonal." }
    1 { input_layout: optional_text, InputLayout, "inputLayout", "Axis orders, as CANN spells them." }
    1 { num_key_value_heads: int = 0, NumKeyValueHeads, "numKeyValueHeads",
        "Number of key and value heads; 0 means `num_heads`." }
    2 { sparse_mode: int = 0, SparseMode, "sparseMode", "Meaning of mask and tokens." }
    3 { inner_precise: int = 1, InnerPrecise, "innerPrecise",
        "Precision (bit 0) and correction of rows without visible keys (bit 1)." }
    1 { attention_out: output, AttentionOut, "attentionOut", "Output." }
}

versions! {
    /// A version of PromptFlashAttention: each adds arguments to the one before.
    pub enum Version {
        /// The first. It takes a position bias and computes without it.
        V1 = path_version(1, "aclnnPromptFlashAttention").deprecated_since(V8_1),
        /// Adds key lengths, quantisation and sparse modes. It takes a position bias and computes without it.
        V2 = path_version(2, "aclnnPromptFlashAttentionV2").deprecated_since(V8_1),
        /// Adds the precision, and uses the position bias.
        V3 = path_version(3, "aclnnPromptFlashAttentionV3"),
    }
}

path_operator! {
    /// PromptFlashAttention in the list of operators.
    PromptFlashAttention, PromptCall: Prefill, PREFILL, PREFILL, "";
    same {
        Query Key Value PseShift AttenMask ActualSeqLengths ActualSeqLengthsKv DeqScale1 QuantScale1 DeqScale2
        QuantScale2 QuantOffset2 NumHeads Scale PreTokens NextTokens InputLayout NumKeyValueHeads SparseMode
        InnerPrecise AttentionOut
    }
    renamed {}

    /// A mask of FLOAT16, which the operator converts first, is described by the type that it is converted to.
    fn path_mask(mask: TensorDesc) -> TensorDesc {
        let dtype = match mask.dtype {
            DType::Float16 => DType::Bool,
            dtype => dtype,
        };
        TensorDesc { dtype, ..mask }
    }
}
