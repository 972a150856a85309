//! The operators behind the names that texts have for them.

use ascend_attention::spec::Rule;
use ascend_attention::spec::declared::DeclaredOperator;
use ascend_attention::spec::ops::atb_attention;

/// What a call is of, as far as rules are known of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Operator {
    /// A declared operator, without its version.
    Declared(DeclaredOperator),
    /// The attention of ATB, whose operators share their rules.
    Atb,
}

impl Operator {
    /// The operator that a rule is about; `None` for a condition of a library.
    pub(super) fn of_rule(rule: &Rule) -> Option<Self> {
        let symbol = rule.since?.symbol();
        of_function(symbol).or_else(|| of_type(symbol))
    }

    /// The operator's name.
    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Declared(operator) => operator.name(),
            Self::Atb => "attention of ATB",
        }
    }
}

/// Whether a name is a function of CANN's operators.
pub(super) fn is_function(name: &str) -> bool {
    let operator = name.strip_prefix("aclnn");
    operator.is_some_and(|operator| operator.starts_with(|c: char| c.is_uppercase()) && operator != "Status")
}

/// The operator behind a function of CANN (`aclnn..`) or of torch_npu (`npu_..`).
pub(super) fn of_function(name: &str) -> Option<Operator> {
    let cann = name.strip_prefix("aclnn");
    let torch = name.trim_start_matches('_').strip_prefix("npu_");
    let spelling = bare_spelling(cann.or(torch)?);
    // What torch_npu calls by other names than CANN's; those that begin with an underscore are operators of ATB.
    match spelling.as_str() {
        "fusionattention" => Some(Operator::Declared(DeclaredOperator::FlashAttentionScore)),
        "reshapeandcache" => Some(Operator::Declared(DeclaredOperator::ScatterPaKvCache)),
        _ if name.starts_with("_npu_flash_attention") || name.starts_with("_npu_paged_attention") => {
            Some(Operator::Atb)
        }
        _ => declared(&spelling),
    }
}

/// The operator of a type as the graph engine or ATB spells it, of a file of its checks, or of a short name: `FIA`,
/// `fiaV5`, `PromptFA`.
pub(super) fn of_type(name: &str) -> Option<Operator> {
    if let Some(file) = name.split_once("_tiling") {
        return of_tiling(file.0);
    }
    let trimmed = name.trim_end_matches(|c: char| c.is_ascii_digit());
    let kind = trimmed.trim_end_matches(['_', 'V', 'v']);
    if atb_attention::Version::ALL.iter().any(|version| version.symbol() == kind) {
        return Some(Operator::Atb);
    }
    let is_type = kind.starts_with(|c: char| c.is_uppercase()) && !kind.contains('_');
    let by_type = is_type.then(|| declared(&bare_spelling(kind))).flatten();
    by_type.or_else(|| {
        let mut all = DeclaredOperator::ALL.iter().copied();
        let operator = all.find(|operator| short_names(operator.name()).any(|short| short == kind));
        operator.map(Operator::Declared)
    })
}

/// The operator whose checks are in the files of this name, which some operators share with others.
fn of_tiling(name: &str) -> Option<Operator> {
    let operator = DeclaredOperator::from_name(name)?;
    (!is_path(operator)).then_some(Operator::Declared(operator))
}

/// Whether an operator is one of those that FusedInferAttentionScore took over: it checks calls by their files, and
/// they have its rules.
pub(super) fn is_path(operator: DeclaredOperator) -> bool {
    matches!(operator, DeclaredOperator::PromptFlashAttention | DeclaredOperator::IncreFlashAttention)
}

/// The short names of an operator with three words or more: the initials of all, of all but a score at the end, and
/// of all but the first.
fn short_names(name: &str) -> impl Iterator<Item = String> {
    const LEAST: usize = 3;
    let initials = |words: &[&str]| -> String {
        let initials = words.iter().filter_map(|word| word.chars().next());
        initials.map(|c| c.to_ascii_uppercase()).collect()
    };
    let words: Vec<&str> = name.split('_').collect();
    let unscored = words.strip_suffix(&["score"]).unwrap_or(&words);
    let first: String =
        words[0].chars().take(1).map(|c| c.to_ascii_uppercase()).chain(words[0].chars().skip(1)).collect();
    let upper = [initials(&words), initials(unscored)];
    let all = upper.iter().flat_map(|short| [short.clone(), short.to_lowercase()]);
    let mixed = first + &initials(&unscored[1..]);
    all.chain([mixed]).filter(|short| short.len() >= LEAST).collect::<Vec<_>>().into_iter()
}

/// A name in lower case, without what stands for a phase or a version.
fn bare_spelling(name: &str) -> String {
    let ends = ["GetWorkspaceSize", "GetMaxWorkspaceSize", "_symint", "_out", "_get_max_workspace"];
    let name = ends.into_iter().fold(name, |name, end| name.strip_suffix(end).unwrap_or(name));
    let mut name = name.replace('_', "").to_lowercase();
    let versioned = name.trim_end_matches(|c: char| c.is_ascii_digit());
    if let Some(base) = versioned.strip_suffix('v').filter(|_| versioned.len() < name.len()) {
        name.truncate(base.len());
    }
    name
}

/// The declared operator of a spelling. The packed form of FlashAttentionScore has the rules of the other.
fn declared(spelling: &str) -> Option<Operator> {
    let mut all = DeclaredOperator::ALL.iter().copied();
    let operator = all.find(|operator| operator.name().replace('_', "") == spelling)?;
    Some(Operator::Declared(match operator {
        DeclaredOperator::FlashAttentionVarlenScore => DeclaredOperator::FlashAttentionScore,
        operator => operator,
    }))
}

#[cfg(test)]
mod tests {
    use super::*;
    use DeclaredOperator::{
        BatchMatMul, FlashAttentionScore, FusedInferAttentionScore, IncreFlashAttention, PromptFlashAttention,
        ScatterPaKvCache,
    };
    use Operator::{Atb, Declared};

    #[test]
    fn functions_of_cann_and_of_pytorch_name_operators() {
        for (function, operator) in [
            ("aclnnFusedInferAttentionScoreV4", FusedInferAttentionScore),
            ("aclnnFusedInferAttentionScoreV3GetWorkspaceSize", FusedInferAttentionScore),
            ("npu_fused_infer_attention_score_v2", FusedInferAttentionScore),
            ("npu_fused_infer_attention_score_out_symint", FusedInferAttentionScore),
            ("aclnnFusedInferAttentionScoreV4GetMaxWorkspaceSize", FusedInferAttentionScore),
            ("_npu_fused_infer_attention_score_get_max_workspace", FusedInferAttentionScore),
            ("_npu_fusion_attention_v3_get_max_workspace", FlashAttentionScore),
            ("npu_fusion_attention", FlashAttentionScore),
            ("aclnnFlashAttentionVarLenScore", FlashAttentionScore),
            ("_npu_reshape_and_cache", ScatterPaKvCache),
        ] {
            assert_eq!(of_function(function), Some(Declared(operator)), "{function}");
        }
        for function in ["_npu_paged_attention", "_npu_flash_attention_qlens"] {
            assert_eq!(of_function(function), Some(Atb), "{function}");
        }
        for function in ["aclnnMatmul", "FusedInferAttentionScore", "npu_flash_attention"] {
            assert_eq!(of_function(function), None, "{function}");
        }
        assert!(is_function("aclnnMatmul") && !is_function("aclnnStatus") && !is_function("aclnn"));
    }

    /// Each function of an operator leads to the operator with its rules.
    #[test]
    fn every_function_of_a_declared_operator_names_it() {
        for &operator in DeclaredOperator::ALL {
            for version in operator.versions() {
                let named = of_function(version.symbol());
                assert_eq!(named, declared(&bare_spelling(operator.name())), "{}", version.symbol());
                assert!(named.is_some() && is_function(version.symbol()));
            }
        }
        for version in atb_attention::Version::ALL {
            assert_eq!(of_type(version.symbol()), Some(Atb));
        }
    }

    #[test]
    fn types_files_and_short_names_name_operators() {
        for (name, operator) in [
            ("FusedInferAttentionScore_0", FusedInferAttentionScore),
            ("fiaV5", FusedInferAttentionScore),
            ("FIA", FusedInferAttentionScore),
            ("PFA", PromptFlashAttention),
            ("ifa", IncreFlashAttention),
            ("IncreFA", IncreFlashAttention),
            ("BMM", BatchMatMul),
            ("flash_attention_score_tiling_general", FlashAttentionScore),
            ("fused_infer_attention_score_tiling", FusedInferAttentionScore),
        ] {
            assert_eq!(of_type(name), Some(Declared(operator)), "{name}");
        }
        for name in [
            "fused_infer_attention_score",
            "prompt_flash_attention_tiling",
            "Matmul",
            "_V",
            "FA",
            "LinearOperation",
            "",
        ] {
            assert_eq!(of_type(name), None, "{name}");
        }
    }
}
