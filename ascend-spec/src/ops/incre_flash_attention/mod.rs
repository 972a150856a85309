//! IncreFlashAttention: attention of one query row a sequence. It has a few rules of its own, followed by those of
//! FusedInferAttentionScore's decode path.
//!
//! It is the fused attention of the Atlas inference series (310P) for decode, and runs on Atlas A2 and A3.

pub mod rules;

use super::inference_attention::{path_operator, path_version};
use crate::Cann::V8_1;
use crate::operator::versions;

declare_operator! {
    /// Source: aclnnIncreFlashAttention V1 to V4, parameter tables.
    incre_flash_attention_arguments, "IncreFlashAttention", #[derive(Copy)] IncreCall<'a>;
    1 { query: tensor, Query, "query", "Queries, one row a sequence, in the order of `input_layout`." }
    1 { key: list, Key, "key", "Keys: one tensor, or one for each batch entry." }
    1 { value: list, Value, "value", "Values, as `key`." }
    1 { pse_shift: tensor, PseShift, "pseShift", "Additive position bias." }
    1 { atten_mask: tensor, AttenMask, "attenMask", "Mask; 1 hides." }
    1 { actual_seq_lengths: ints, ActualSeqLengths, "actualSeqLengths",
        "Lengths of keys and values, whatever the name says." }
    2 { dequant_scale1: tensor, DequantScale1, "dequantScale1", "Dequantisation after Q K^T." }
    2 { quant_scale1: tensor, QuantScale1, "quantScale1", "Quantisation of the probabilities." }
    2 { dequant_scale2: tensor, DequantScale2, "dequantScale2", "Dequantisation after P V." }
    2 { quant_scale2: tensor, QuantScale2, "quantScale2", "Quantisation scale of the output." }
    2 { quant_offset2: tensor, QuantOffset2, "quantOffset2", "Quantisation offset of the output." }
    3 { antiquant_scale: tensor, AntiquantScale, "antiquantScale",
        "Antiquantisation scale of key and value together." }
    3 { antiquant_offset: tensor, AntiquantOffset, "antiquantOffset",
        "Antiquantisation offset of key and value together." }
    3 { block_table: tensor, BlockTable, "blocktable", "Block table; given means a paged cache." }
    4 { kv_padding_size: tensor, KvPaddingSize, "kvPaddingSize", "Left padding of key and value." }
    1 { num_heads: int = 1, NumHeads, "numHeads", "Number of query heads." }
    1 { scale: float = 1.0, Scale, "scaleValue", "Factor of the scores." }
    1 { input_layout: optional_text, InputLayout, "inputLayout",
        "Axis orders, as CANN spells them; null means BSH." }
    1 { num_key_value_heads: int = 0, NumKeyValueHeads, "numKeyValueHeads",
        "Number of key and value heads; 0 means `num_heads`." }
    3 { block_size: int = 0, BlockSize, "blockSize", "Tokens in a block of a paged cache." }
    3 { inner_precise: int = 1, InnerPrecise, "innerPrecise", "Precision." }
    1 { attention_out: output, AttentionOut, "attentionOut", "Output." }
}

versions! {
    /// A version of IncreFlashAttention: each adds arguments to the one before.
    pub enum Version {
        /// The first. It takes a position bias and computes without it.
        V1 = path_version(1, "aclnnIncreFlashAttention").deprecated_since(V8_1),
        /// Adds quantisation. It takes a position bias and computes without it.
        V2 = path_version(2, "aclnnIncreFlashAttentionV2").deprecated_since(V8_1),
        /// Adds quantised keys and values, paged caches and the precision, and uses the position bias.
        V3 = path_version(3, "aclnnIncreFlashAttentionV3").deprecated_since(V8_1),
        /// Adds left padding of keys and values.
        V4 = path_version(4, "aclnnIncreFlashAttentionV4"),
    }
}

path_operator! {
    /// IncreFlashAttention in the list of operators.
    IncreFlashAttention, IncreCall: Decode, DECODE, REGISTERED, "BSH";
    same {
        Query Key Value PseShift AttenMask QuantScale1 QuantScale2 QuantOffset2 AntiquantScale AntiquantOffset
        BlockTable KvPaddingSize NumHeads Scale InputLayout NumKeyValueHeads BlockSize InnerPrecise AttentionOut
    }
    renamed {
        ActualSeqLengthsKv = ActualSeqLengths,
        DeqScale1 = DequantScale1,
        DeqScale2 = DequantScale2,
    }
}
