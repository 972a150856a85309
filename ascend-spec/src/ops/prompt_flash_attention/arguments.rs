//! The arguments of PromptFlashAttention, in its own order.

/// Passes the tokens `$with` and then the table of arguments to the macro `$then`; [`operator`](crate::operator)
/// describes the table's form.
///
/// Source: aclnnPromptFlashAttention V1 to V3, parameter tables.
#[doc(hidden)]
#[macro_export]
macro_rules! prompt_flash_attention_arguments {
    ($then:ident $with:tt) => {
        $then! { $with
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
    };
}

prompt_flash_attention_arguments! { declare_arguments { "PromptFlashAttention", #[derive(Copy)] PromptCall<'a> } }
