//! Which of the operator's parameters read the inputs of FusedInferAttentionScore.

use ascend_spec::ops::fused_infer_attention_score as fia;
use ascend_spec::ops::incre_flash_attention::Parameter;

use crate::operator;
use crate::ops::inference_attention::InferenceParameter;

impl operator::Parameter for Parameter {}

impl InferenceParameter for Parameter {
    const OPERATOR: &'static str = "IncreFlashAttention";
    const PLAN: &'static str = "IncrePlan";
    const QUERY: Self = Parameter::Query;
    const ATTEN_MASK: Self = Parameter::AttenMask;
    const ATTENTION_OUT: Self = Parameter::AttentionOut;

    #[inline]
    fn of_fused(parameter: fia::Parameter) -> Option<Self> {
        Some(match parameter {
            fia::Parameter::Query => Parameter::Query,
            fia::Parameter::Key => Parameter::Key,
            fia::Parameter::Value => Parameter::Value,
            fia::Parameter::PseShift => Parameter::PseShift,
            fia::Parameter::DeqScale1 => Parameter::DequantScale1,
            fia::Parameter::QuantScale1 => Parameter::QuantScale1,
            fia::Parameter::DeqScale2 => Parameter::DequantScale2,
            fia::Parameter::QuantScale2 => Parameter::QuantScale2,
            fia::Parameter::QuantOffset2 => Parameter::QuantOffset2,
            fia::Parameter::AntiquantScale => Parameter::AntiquantScale,
            fia::Parameter::AntiquantOffset => Parameter::AntiquantOffset,
            fia::Parameter::BlockTable => Parameter::BlockTable,
            fia::Parameter::KvPaddingSize => Parameter::KvPaddingSize,
            _ => return None,
        })
    }
}
