//! The arguments of FusedInferAttentionScore, in the order of its newest version.

use crate::attention_problem::TensorRole;

declare_operator! {
    /// Source: aclnnFusedInferAttentionScore V1 to V5, parameter tables; defaults of the operator definition.
    fused_infer_attention_score_arguments, "FusedInferAttentionScore", FiaCall<'a>;
    1 { query: tensor, Query, "query",
        "Queries, in the order of `input_layout`: FLOAT16, BF16 or INT8, on Ascend 950 also FLOAT8_E4M3FN \
         and HIFLOAT8." }
    1 { key: list, Key, "key",
        "Keys: one tensor, or one for each batch entry; empty stands for a null or empty list. Their \
         order is that of `input_layout`, that of a paged cache one of `Cache`. They have the query's \
         dtype, or INT8, INT4 or INT32 (eight INT4 each), on Ascend 950 also FLOAT8_E4M3FN, HIFLOAT8 or \
         FLOAT4_E2M1." }
    1 { value: list, Value, "value", "Values, as `key`." }
    1 { pse_shift: tensor, PseShift, "pseShift",
        "Additive position bias, `[1 or B, N, rows, keys]` of the query's dtype, FLOAT16 for an INT8 \
         query; with `pse_type` 2 and 3 slopes, FLOAT `[N]`." }
    1 { atten_mask: tensor, AttenMask, "attenMask",
        "Mask of BOOL, INT8 or UINT8, in which 1 hides: `[2048, 2048]` in the sparse modes 2 to 4, \
         otherwise a full one, such as `[B, 1, rows, keys]`." }
    1 { actual_seq_lengths: ints, ActualSeqLengths, "actualSeqLengths",
        "Query lengths, one for all sequences or one for each; of packed queries the end of each \
         sequence." }
    1 { actual_seq_lengths_kv: ints, ActualSeqLengthsKv, "actualSeqLengthsKv",
        "Key and value lengths, one for all sequences or one for each; of packed keys the end of each \
         sequence, of a paged cache always lengths." }
    1 { deq_scale1: tensor, DeqScale1, "deqScale1", "Dequantisation after Q K^T, FLOAT or UINT64 `[1]`." }
    1 { quant_scale1: tensor, QuantScale1, "quantScale1", "Quantisation of the probabilities, FLOAT `[1]`." }
    1 { deq_scale2: tensor, DeqScale2, "deqScale2", "Dequantisation after P V, FLOAT or UINT64 `[1]`." }
    1 { quant_scale2: tensor, QuantScale2, "quantScale2",
        "Quantisation scale of the output: one element, or one for each head and dimension; FLOAT, or the \
         query's BF16 or FLOAT16 where the path takes it." }
    1 { quant_offset2: tensor, QuantOffset2, "quantOffset2",
        "Quantisation offset of the output, of the scale's shape and dtype." }
    1 { antiquant_scale: tensor, AntiquantScale, "antiquantScale",
        "Antiquantisation scale of key and value together, the key's first: per channel `[2]` or `[2, N, \
         1, D]` of the query's dtype, per token FLOAT `[2, B, keys]`." }
    1 { antiquant_offset: tensor, AntiquantOffset, "antiquantOffset",
        "Antiquantisation offset of key and value together, of the scale's shape and dtype." }
    1 { block_table: tensor, BlockTable, "blockTable",
        "Block table, INT32 `[B, M]`: the blocks of each sequence; given means a paged cache." }
    1 { query_padding_size: tensor, QueryPaddingSize, "queryPaddingSize",
        "Left padding of the query, INT64 `[1]`." }
    1 { kv_padding_size: tensor, KvPaddingSize, "kvPaddingSize", "Left padding of key and value, INT64 `[1]`." }
    2 { key_antiquant_scale: tensor, KeyAntiquantScale, "keyAntiquantScale",
        "Antiquantisation scale of the key, in the shape and dtype of its mode: per channel `[1]` or \
         `[N, D]` of the query's dtype, per token FLOAT `[B, keys]`." }
    2 { key_antiquant_offset: tensor, KeyAntiquantOffset, "keyAntiquantOffset",
        "Antiquantisation offset of the key, of the scale's shape and dtype." }
    2 { value_antiquant_scale: tensor, ValueAntiquantScale, "valueAntiquantScale",
        "Antiquantisation scale of the value, as `key_antiquant_scale`." }
    2 { value_antiquant_offset: tensor, ValueAntiquantOffset, "valueAntiquantOffset",
        "Antiquantisation offset of the value, of the scale's shape and dtype." }
    2 { key_shared_prefix: tensor, KeySharedPrefix, "keySharedPrefix",
        "Shared prefix of the key: shape and dtype of the key, with a batch of 1." }
    2 { value_shared_prefix: tensor, ValueSharedPrefix, "valueSharedPrefix",
        "Shared prefix of the value: shape and dtype of the value, with a batch of 1." }
    2 { actual_shared_prefix_len: ints, ActualSharedPrefixLen, "actualSharedPrefixLen",
        "Valid length of the shared prefix, one entry." }
    3 { query_rope: tensor, QueryRope, "queryRope",
        "Rotary part of the query: the query's shape with a head dimension of 64; FLOAT16 or BF16." }
    3 { key_rope: tensor, KeyRope, "keyRope",
        "Rotary part of the key: the key's shape with a head dimension of 64; FLOAT16 or BF16." }
    3 { key_rope_antiquant_scale: tensor, KeyRopeAntiquantScale, "keyRopeAntiquantScale", "Reserved." }
    4 { dequant_scale_query: tensor, DequantScaleQuery, "dequantScaleQuery",
        "Dequantisation scale of the query: FLOAT, one for each row and head; of MXFP8 FLOAT8_E8M0, one \
         for each group of 32." }
    4 { learnable_sink: tensor, LearnableSink, "learnableSink",
        "One extra logit a head, `[N]`: BF16, from CANN 9.0 on also FLOAT16." }
    5 { q_start_idx: ints, QStartIdx, "qStartIdx", "First position of the queries, one entry." }
    5 { kv_start_idx: ints, KvStartIdx, "kvStartIdx", "First position of the keys, one entry." }
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
    1 { attention_out: output, AttentionOut, "attentionOut",
        "Output, in the order that `input_layout` says: the query's dtype, or a quantised one." }
    1 { softmax_lse: output, SoftmaxLse, "softmaxLse",
        "Log-sum-exp of each row, FLOAT: `[B, N, rows, 1]`, of packed rows `[T, N, 1]`." }
}

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
