//! The arguments of FusedInferAttentionScore, in the order of its newest version.

use crate::attention_problem::TensorRole;

/// Passes the tokens `$with` and then the table of arguments to the macro `$then`; [`operator`](crate::operator)
/// describes the table's form.
///
/// Source: aclnnFusedInferAttentionScore V1 to V5, parameter tables; defaults of the operator definition.
#[doc(hidden)]
#[macro_export]
macro_rules! fused_infer_attention_score_arguments {
    ($then:ident $with:tt) => {
        $then! { $with
            1 { query: tensor, Query, "query", "Queries, in the order of `input_layout`." }
            1 { key: list, Key, "key",
                "Keys: one tensor, or one for each batch entry. Empty stands for a null or empty list." }
            1 { value: list, Value, "value", "Values, as `key`." }
            1 { pse_shift: tensor, PseShift, "pseShift", "Additive position bias." }
            1 { atten_mask: tensor, AttenMask, "attenMask", "Mask; 1 hides." }
            1 { actual_seq_lengths: ints, ActualSeqLengths, "actualSeqLengths", "Query lengths." }
            1 { actual_seq_lengths_kv: ints, ActualSeqLengthsKv, "actualSeqLengthsKv", "Key and value lengths." }
            1 { deq_scale1: tensor, DeqScale1, "deqScale1", "Dequantisation after Q K^T." }
            1 { quant_scale1: tensor, QuantScale1, "quantScale1", "Quantisation of the probabilities." }
            1 { deq_scale2: tensor, DeqScale2, "deqScale2", "Dequantisation after P V." }
            1 { quant_scale2: tensor, QuantScale2, "quantScale2", "Quantisation scale of the output." }
            1 { quant_offset2: tensor, QuantOffset2, "quantOffset2", "Quantisation offset of the output." }
            1 { antiquant_scale: tensor, AntiquantScale, "antiquantScale",
                "Antiquantisation scale of key and value together." }
            1 { antiquant_offset: tensor, AntiquantOffset, "antiquantOffset",
                "Antiquantisation offset of key and value together." }
            1 { block_table: tensor, BlockTable, "blockTable", "Block table; given means a paged cache." }
            1 { query_padding_size: tensor, QueryPaddingSize, "queryPaddingSize", "Left padding of the query." }
            1 { kv_padding_size: tensor, KvPaddingSize, "kvPaddingSize", "Left padding of key and value." }
            2 { key_antiquant_scale: tensor, KeyAntiquantScale, "keyAntiquantScale",
                "Antiquantisation scale of the key." }
            2 { key_antiquant_offset: tensor, KeyAntiquantOffset, "keyAntiquantOffset",
                "Antiquantisation offset of the key." }
            2 { value_antiquant_scale: tensor, ValueAntiquantScale, "valueAntiquantScale",
                "Antiquantisation scale of the value." }
            2 { value_antiquant_offset: tensor, ValueAntiquantOffset, "valueAntiquantOffset",
                "Antiquantisation offset of the value." }
            2 { key_shared_prefix: tensor, KeySharedPrefix, "keySharedPrefix", "Shared prefix of the key." }
            2 { value_shared_prefix: tensor, ValueSharedPrefix, "valueSharedPrefix", "Shared prefix of the value." }
            2 { actual_shared_prefix_len: ints, ActualSharedPrefixLen, "actualSharedPrefixLen",
                "Valid length of the shared prefix." }
            3 { query_rope: tensor, QueryRope, "queryRope", "Rotary part of the query." }
            3 { key_rope: tensor, KeyRope, "keyRope", "Rotary part of the key." }
            3 { key_rope_antiquant_scale: tensor, KeyRopeAntiquantScale, "keyRopeAntiquantScale", "Reserved." }
            4 { dequant_scale_query: tensor, DequantScaleQuery, "dequantScaleQuery",
                "Dequantisation scale of the query." }
            4 { learnable_sink: tensor, LearnableSink, "learnableSink", "One extra logit a head." }
            5 { q_start_idx: ints, QStartIdx, "qStartIdx", "First position of the queries." }
            5 { kv_start_idx: ints, KvStartIdx, "kvStartIdx", "First position of the keys." }
            1 { num_heads: int = 1, NumHeads, "numHeads", "Number of query heads." }
            1 { scale: float = 1.0, Scale, "scaleValue", "Factor of the scores." }
            1 { pre_tokens: int = i32::MAX as i64, PreTokens, "preTokens", "Keys visible before the diagonal." }
            1 { next_tokens: int = i32::MAX as i64, NextTokens, "nextTokens", "Keys visible after the diagonal." }
            1 { input_layout: text = "BSH", InputLayout, "inputLayout", "Axis orders, as CANN spells them." }
            1 { num_key_value_heads: int = 0, NumKeyValueHeads, "numKeyValueHeads",
                "Number of key and value heads; 0 means `num_heads`." }
            1 { sparse_mode: int = 0, SparseMode, "sparseMode", "Meaning of mask and tokens." }
            1 { inner_precise: int = 1, InnerPrecise, "innerPrecise",
                "Precision (bit 0) and correction of rows without visible keys (bit 1)." }
            1 { block_size: int = 0, BlockSize, "blockSize", "Tokens in a block of a paged cache." }
            1 { antiquant_mode: int = 0, AntiquantMode, "antiquantMode",
                "Kind of antiquantisation of key and value together." }
            1 { softmax_lse_flag: flag = false, SoftmaxLseFlag, "softmaxLseFlag",
                "Whether the log-sum-exp is written." }
            2 { key_antiquant_mode: int = 0, KeyAntiquantMode, "keyAntiquantMode",
                "Kind of antiquantisation of the key." }
            2 { value_antiquant_mode: int = 0, ValueAntiquantMode, "valueAntiquantMode",
                "Kind of antiquantisation of the value." }
            4 { query_quant_mode: int = 0, QueryQuantMode, "queryQuantMode", "Kind of quantisation of the query." }
            5 { pse_type: int = 0, PseType, "pseType", "Kind of position bias." }
            1 { attention_out: output, AttentionOut, "attentionOut", "Output." }
            1 { softmax_lse: output, SoftmaxLse, "softmaxLse", "Log-sum-exp of each row." }
        }
    };
}

fused_infer_attention_score_arguments! { declare_arguments { "FusedInferAttentionScore", FiaCall<'a> } }

impl Argument {
    /// The tensor of a call that plays a role; `None` for roles that the operator has no argument for.
    pub const fn of_role(role: TensorRole) -> Option<Self> {
        let parameter = match role {
            TensorRole::Query => Parameter::Query,
            TensorRole::Key(index) => return Some(Argument::element(Parameter::Key, index)),
            TensorRole::Value(index) => return Some(Argument::element(Parameter::Value, index)),
            TensorRole::QueryRope => Parameter::QueryRope,
            TensorRole::KeyRope => Parameter::KeyRope,
            TensorRole::KeyPrefix => Parameter::KeySharedPrefix,
            TensorRole::ValuePrefix => Parameter::ValueSharedPrefix,
            TensorRole::Mask => Parameter::AttenMask,
            TensorRole::Bias => Parameter::PseShift,
            TensorRole::Sink => Parameter::LearnableSink,
            TensorRole::BlockTable => Parameter::BlockTable,
            TensorRole::QueryPadding => Parameter::QueryPaddingSize,
            TensorRole::KeyPadding => Parameter::KvPaddingSize,
            TensorRole::QueryScale => Parameter::DequantScaleQuery,
            TensorRole::KeyScale => Parameter::KeyAntiquantScale,
            TensorRole::KeyOffset => Parameter::KeyAntiquantOffset,
            TensorRole::ValueScale => Parameter::ValueAntiquantScale,
            TensorRole::ValueOffset => Parameter::ValueAntiquantOffset,
            TensorRole::KeyValueScale => Parameter::AntiquantScale,
            TensorRole::KeyValueOffset => Parameter::AntiquantOffset,
            TensorRole::ScoreScale => Parameter::DeqScale1,
            TensorRole::WeightScale => Parameter::QuantScale1,
            TensorRole::ProductScale => Parameter::DeqScale2,
            TensorRole::OutputScale => Parameter::QuantScale2,
            TensorRole::OutputOffset => Parameter::QuantOffset2,
            TensorRole::Output => Parameter::AttentionOut,
            TensorRole::LogSumExp => Parameter::SoftmaxLse,
            TensorRole::DropMask | TensorRole::SoftmaxMax | TensorRole::SoftmaxSum => return None,
        };
        Some(Argument::element(parameter, 0))
    }
}

#[cfg(test)]
mod roles_tests {
    use super::*;
    use TensorRole as Role;

    #[test]
    fn no_argument_plays_two_roles() {
        let roles = [
            Role::Query,
            Role::Key(0),
            Role::Key(1),
            Role::Value(0),
            Role::Value(1),
            Role::QueryRope,
            Role::KeyRope,
            Role::KeyPrefix,
            Role::ValuePrefix,
            Role::Mask,
            Role::Bias,
            Role::Sink,
            Role::BlockTable,
            Role::QueryPadding,
            Role::KeyPadding,
            Role::QueryScale,
            Role::KeyScale,
            Role::KeyOffset,
            Role::ValueScale,
            Role::ValueOffset,
            Role::KeyValueScale,
            Role::KeyValueOffset,
            Role::ScoreScale,
            Role::WeightScale,
            Role::ProductScale,
            Role::OutputScale,
            Role::OutputOffset,
            Role::Output,
            Role::LogSumExp,
        ];
        let mut arguments = roles.map(|role| Argument::of_role(role).unwrap());
        arguments.sort_unstable();
        assert!(arguments.is_sorted_by(|a, b| a < b), "{arguments:?}");
    }
}
