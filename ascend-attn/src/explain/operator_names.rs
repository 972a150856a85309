//! The operators behind the names that texts have for them.

use ascend_attention::spec::declared::DeclaredOperator;

/// Whether a name is a function of CANN's operators.
pub(super) fn is_function(name: &str) -> bool {
    let operator = name.strip_prefix("aclnn");
    operator.is_some_and(|operator| operator.starts_with(|c: char| c.is_uppercase()))
}

/// The operator behind a function of CANN (`aclnn..`) or of torch_npu (`npu_..`).
pub(super) fn of_function(name: &str) -> Option<DeclaredOperator> {
    let cann = name.strip_prefix("aclnn");
    let torch = name.trim_start_matches('_').strip_prefix("npu_");
    of_spelling(cann.or(torch)?)
}

/// The operator of a type as the graph engine spells it, of a file of its checks, or of a short name: `FIA`, `fiaV5`.
pub(super) fn of_type(name: &str) -> Option<DeclaredOperator> {
    let trimmed = name.trim_end_matches(|c: char| c.is_ascii_digit());
    let kind = trimmed.trim_end_matches(['_', 'V', 'v']);
    match kind {
        "FIA" | "fia" => Some(DeclaredOperator::FusedInferAttentionScore),
        "PFA" | "PromptFA" => Some(DeclaredOperator::PromptFlashAttention),
        "IFA" | "IncreFA" => Some(DeclaredOperator::IncreFlashAttention),
        _ if kind.starts_with("flash_attention_score_") => {
            Some(DeclaredOperator::FlashAttentionScore)
        }
        _ if kind.starts_with(|c: char| c.is_uppercase()) && !kind.contains('_') => {
            of_spelling(kind)
        }
        _ => None,
    }
}

fn of_spelling(name: &str) -> Option<DeclaredOperator> {
    let ends = [
        "GetWorkspaceSize",
        "GetMaxWorkspaceSize",
        "_symint",
        "_out",
        "_get_max_workspace",
    ];
    let name = ends
        .into_iter()
        .fold(name, |name, end| name.strip_suffix(end).unwrap_or(name));
    let name = name.replace('_', "").to_lowercase();
    let versioned = name.trim_end_matches(|c: char| c.is_ascii_digit());
    let name = match versioned.strip_suffix('v') {
        Some(base) if versioned.len() < name.len() => base,
        _ => &name,
    };
    match name {
        "fusionattention" | "flashattentionvarlenscore" => {
            Some(DeclaredOperator::FlashAttentionScore)
        }
        "reshapeandcache" => Some(DeclaredOperator::ScatterPaKvCache),
        _ => {
            let mut all = DeclaredOperator::ALL.iter().copied();
            all.find(|operator| operator.name().replace('_', "").to_lowercase() == name)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn functions_of_cann_and_of_pytorch_name_operators() {
        use DeclaredOperator::{FlashAttentionScore, FusedInferAttentionScore, ScatterPaKvCache};
        for (function, operator) in [
            (
                "aclnnFusedInferAttentionScoreV4",
                Some(FusedInferAttentionScore),
            ),
            (
                "aclnnFusedInferAttentionScoreV3GetWorkspaceSize",
                Some(FusedInferAttentionScore),
            ),
            (
                "npu_fused_infer_attention_score_v2",
                Some(FusedInferAttentionScore),
            ),
            (
                "npu_fused_infer_attention_score_out_symint",
                Some(FusedInferAttentionScore),
            ),
            (
                "aclnnFusedInferAttentionScoreV4GetMaxWorkspaceSize",
                Some(FusedInferAttentionScore),
            ),
            (
                "_npu_fused_infer_attention_score_get_max_workspace",
                Some(FusedInferAttentionScore),
            ),
            (
                "_npu_fusion_attention_v3_get_max_workspace",
                Some(FlashAttentionScore),
            ),
            ("npu_fusion_attention", Some(FlashAttentionScore)),
            ("aclnnFlashAttentionVarLenScore", Some(FlashAttentionScore)),
            ("_npu_reshape_and_cache", Some(ScatterPaKvCache)),
            ("aclnnMatmul", None),
            ("FusedInferAttentionScore", None),
        ] {
            assert_eq!(of_function(function), operator, "{function}");
        }
    }

    #[test]
    fn types_and_short_names_name_operators() {
        use DeclaredOperator::{
            FlashAttentionScore, FusedInferAttentionScore, PromptFlashAttention,
        };
        for (name, operator) in [
            ("FusedInferAttentionScore_0", Some(FusedInferAttentionScore)),
            ("fiaV5", Some(FusedInferAttentionScore)),
            ("FIA", Some(FusedInferAttentionScore)),
            ("PFA", Some(PromptFlashAttention)),
            (
                "flash_attention_score_tiling_general",
                Some(FlashAttentionScore),
            ),
            ("ifa", None),
            ("fused_infer_attention_score", None),
            ("Matmul", None),
            ("_V", None),
        ] {
            assert_eq!(of_type(name), operator, "{name}");
        }
    }
}
