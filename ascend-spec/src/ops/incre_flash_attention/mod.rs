//! IncreFlashAttention: attention of one query row a sequence. It has a few rules of its own, followed by those of
//! FusedInferAttentionScore's decode path.
//!
//! It is the fused attention of the Atlas inference series (310P) for decode, and runs on Atlas A2 and A3.

mod arguments;
pub mod rules;

pub use arguments::{Argument, Arguments, IncreCall, Parameter};

use super::inference_attention::{path_operator, path_version};
use crate::Cann::V8_1;
use crate::operator::versions;

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
