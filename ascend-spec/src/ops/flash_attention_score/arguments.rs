//! The arguments of FlashAttentionScore, in its own order.
//!
//! Its fourth version also has every argument of FlashAttentionVarLenScore, which has them in an order of its own.

use crate::attention_problem::TensorRole;

/// Passes the tokens `$with`, in braces, and then the table of arguments to the macro `$then`;
/// [`operator`](crate::operator) describes the table's form.
///
/// Written out, and not made by `declare_operator!`: the table of FlashAttentionVarLenScore is made of it, and a macro
/// that a macro has made cannot be called by its path in the same crate.
///
/// Source: aclnnFlashAttentionScore V1 to V4, parameter tables.
#[doc(hidden)]
#[macro_export]
macro_rules! flash_attention_score_arguments {
    ($($then:ident)::+ { $($with:tt)* }) => {
        $($then)::+! { { $($with)* }
            1 { query: tensor, Query, "query", "Queries, in the order of `input_layout`." }
            1 { key: tensor, Key, "key", "Keys." }
            1 { value: tensor, Value, "value", "Values." }
            1 { real_shift: tensor, RealShift, "realShift", "Position bias, or its slopes." }
            1 { drop_mask: tensor, DropMask, "dropMask", "One bit for each score: 1 keeps it." }
            1 { padding_mask: tensor, PaddingMask, "paddingMask", "Reserved." }
            1 { atten_mask: tensor, AttenMask, "attenMask", "Mask; 1 hides." }
            4 { query_rope: tensor, QueryRope, "queryRope", "Rotary part of the query (also VarLen V3, V5)." }
            4 { key_rope: tensor, KeyRope, "keyRope", "Rotary part of the key (also VarLen V3, V5)." }
            4 { d_scale_q: tensor, DScaleQ, "dScaleQ", "Dequantisation scale of the query." }
            4 { d_scale_k: tensor, DScaleK, "dScaleK", "Dequantisation scale of the key." }
            4 { d_scale_v: tensor, DScaleV, "dScaleV", "Dequantisation scale of the value." }
            3 { sink: tensor, Sink, "sink", "One extra logit a head (also VarLen V5)." }
            1 { prefix: ints, Prefix, "prefix", "Keys that every row of a sequence sees in modes 5 and 6." }
            4 { actual_seq_lengths: ints, ActualSeqLengths, "actualSeqQLen",
                "Ends of the sequences in a packed query (also every VarLen)." }
            4 { actual_seq_lengths_kv: ints, ActualSeqLengthsKv, "actualSeqKvLen",
                "Ends of the sequences in packed keys and values (also every VarLen)." }
            2 { q_start_idx: ints, QStartIdx, "qStartIdx", "First position of the queries (also VarLen V2, V3, V5)." }
            2 { kv_start_idx: ints, KvStartIdx, "kvStartIdx", "First position of the keys (also VarLen V2, V3, V5)." }
            1 { scale: float = 1.0, Scale, "scaleValue", "Factor of the scores." }
            1 { keep_prob: float = 1.0, KeepProb, "keepProb", "Share of the scores that dropout keeps." }
            1 { pre_tokens: int = 2_147_483_647, PreTokens, "preTokens", "Keys visible before the diagonal." }
            1 { next_tokens: int = 2_147_483_647, NextTokens, "nextTokens", "Keys visible after the diagonal." }
            1 { num_heads: int = 1, NumHeads, "headNum", "Number of query heads." }
            1 { input_layout: optional_text, InputLayout, "inputLayout", "Axis orders, as CANN spells them." }
            1 { inner_precise: int = 0, InnerPrecise, "innerPrecise",
                "Correction of rows without visible keys, in its lowest byte." }
            1 { sparse_mode: int = 0, SparseMode, "sparseMode", "Meaning of mask and tokens." }
            4 { out_dtype: int = 0, OutDtype, "outDtype", "Type of a quantised call's output." }
            2 { pse_type: int = 1, PseType, "pseType", "Kind of position bias (also VarLen V2, V3, V5)." }
            4 { softmax_out_layout: optional_text, SoftmaxOutLayout, "softmaxOutLayout",
                "Order of packed softmax outputs (also VarLen V4, V5)." }
            4 { seed: int = 0, Seed, "seed", "Seed of the operator's own dropout." }
            4 { offset: int = 0, Offset, "offset", "Offset of the operator's own dropout." }
            1 { softmax_max: output, SoftmaxMax, "softmaxMax", "Maximum of each row's scores." }
            1 { softmax_sum: output, SoftmaxSum, "softmaxSum", "Sum of each row's exponentials." }
            1 { softmax_out: output, SoftmaxOut, "softmaxOut", "Reserved." }
            1 { attention_out: output, AttentionOut, "attentionOut", "Output." }
        }
    };
}

flash_attention_score_arguments! {
    declare_arguments { "FlashAttentionScore and FlashAttentionVarLenScore", #[derive(Copy)] FlashAttentionCall<'a> }
}

impl Parameter {
    /// The parameter whose tensor plays a role; `None` for roles that the operator does not know.
    pub const fn of_role(role: TensorRole) -> Option<Self> {
        Some(match role {
            TensorRole::Query => Parameter::Query,
            TensorRole::Key(0) => Parameter::Key,
            TensorRole::Value(0) => Parameter::Value,
            TensorRole::QueryRope => Parameter::QueryRope,
            TensorRole::KeyRope => Parameter::KeyRope,
            TensorRole::Mask => Parameter::AttenMask,
            TensorRole::Bias => Parameter::RealShift,
            TensorRole::DropMask => Parameter::DropMask,
            TensorRole::Sink => Parameter::Sink,
            TensorRole::Output => Parameter::AttentionOut,
            TensorRole::SoftmaxMax => Parameter::SoftmaxMax,
            TensorRole::SoftmaxSum => Parameter::SoftmaxSum,
            _ => return None,
        })
    }
}
