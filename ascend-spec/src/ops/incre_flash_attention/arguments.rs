//! The arguments of IncreFlashAttention, in its own order.

/// Passes the tokens `$with` and then the table of arguments to the macro `$then`; [`operator`](crate::operator)
/// describes the table's form.
///
/// Source: aclnnIncreFlashAttention V1 to V4, parameter tables.
#[doc(hidden)]
#[macro_export]
macro_rules! incre_flash_attention_arguments {
    ($then:ident $with:tt) => {
        $then! { $with
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
    };
}

incre_flash_attention_arguments! { declare_arguments { "IncreFlashAttention", #[derive(Copy)] IncreCall<'a> } }
