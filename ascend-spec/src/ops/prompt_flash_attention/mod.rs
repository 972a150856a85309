//! PromptFlashAttention: attention of several query rows over dense keys. It has rules of its own, followed by those
//! of FusedInferAttentionScore's prefill path.
//!
//! It is the fused attention of the Atlas inference series (310P) for prefill, and runs on Atlas A2 and A3. Calls
//! that its tiling refuses end with 561103; the refusal names the rule of FusedInferAttentionScore.

mod arguments;
pub mod rules;

pub use arguments::{Argument, Arguments, Parameter, PromptCall};

use super::inference_attention::{path_operator, path_version};
use crate::Cann::V8_1;
use crate::operator::versions;
use crate::{DType, TensorDesc};

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
