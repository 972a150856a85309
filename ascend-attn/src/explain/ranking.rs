//! The rules that fit a text best: those that speak of the same parameters, numbers and terms.

use std::collections::{BTreeMap, BTreeSet};

use ascend_attention::spec::declared::DeclaredOperator;
use ascend_attention::spec::{Cann, Level, OperatorVersion, Rule, Scope, Soc, Span};
use ascend_trianglemix::rules::every_rule;

use super::operator_names::of_function;
use super::reading::{Checker, Reading};
use super::words::{pairs, words};

/// A rule that fits a text.
#[derive(Debug)]
pub(super) struct Ranked {
    pub(super) rule: &'static Rule,
    /// The words of the text that it speaks of, those of most weight first.
    pub(super) named: Vec<String>,
}

/// How much a word counts in a rule's name, its condition and its fix.
const WEIGHTS: [f64; 3] = [1.0, 1.0, 0.5];
/// How much a rule counts that no operator checks.
const UNCHECKED: f64 = 0.5;
/// How much a rule counts whose status is another one than the text's, and one of another checker.
const OTHER_STATUS: f64 = 0.7;
const OTHER_CHECKER: f64 = 0.6;
/// How much a rule counts that the product or the release of the text does not have, or that speaks of other layouts.
const OTHER_TARGET: f64 = 0.3;
const OTHER_LAYOUT: f64 = 0.5;
/// How much a rule of Ascend 950 alone, or of a release that is not out, counts where the text names neither.
const RARE_TARGET: f64 = 0.8;
/// How much a word of a message counts that no rule has, and what a rule's name and condition lack at least: short ones
/// are in many texts.
const UNKNOWN: f64 = 0.5;
const LACKS: f64 = 1.5;
/// How much a rule counts of an operator that few programs call, where the text names none.
const RARE_OPERATOR: f64 = 0.8;
/// The least share of a message that the first rule has to account for, and each after it in comparison with the first.
const LEAST: f64 = 0.16;
const NEXT: f64 = 0.4;
/// The least number of words that a text and a rule share, and those of a text that names neither operator nor status.
const SHARED: usize = 2;
const SHARED_ALONE: usize = 4;

/// The rules that fit, best first: those that the text names, then those that account for most of its words and whose
/// own words the text has. A word counts the more the fewer rules have it (inverse document frequency).
pub(super) fn ranked(reading: &Reading) -> Vec<Ranked> {
    let is_excluded =
        reading.stranger.is_some() || reading.causes.iter().any(|cause| cause.is_final);
    if is_excluded && reading.rules.is_empty() {
        return Vec::new();
    }
    let rules: Vec<(&Rule, [BTreeSet<String>; 3])> = every_rule()
        .filter(|rule| is_of(rule, reading))
        .map(|rule| (rule, places(rule)))
        .collect();
    let mut having: BTreeMap<&str, f64> = BTreeMap::new();
    for (_, places) in &rules {
        let unique: BTreeSet<&String> = places.iter().flatten().collect();
        for word in unique {
            *having.entry(word).or_default() += 1.0;
        }
    }
    let all = rules.len() as f64;
    let worth = |word: &str| match having.get(word) {
        Some(rules) => (1.0 + all / rules).ln(),
        None => UNKNOWN * all.ln(),
    };
    // A word that no rule has is a word of the message only where it is one of CANN's: prose has many of its own.
    let counts = |word: &str| having.contains_key(word) || reading.is_marked && !word.contains(' ');
    let text: f64 = reading
        .words
        .iter()
        .filter(|(word, _)| counts(word))
        .map(|(word, weight)| weight * worth(word))
        .sum();
    let mut fitting: Vec<(f64, Ranked)> = Vec::new();
    for (rule, places) in &rules {
        let place = |word: &String| {
            let at = places.iter().zip(WEIGHTS);
            at.filter(|(words, _)| words.contains(word))
                .map(|(_, weight)| weight)
                .fold(0.0, f64::max)
        };
        let mut named: Vec<(f64, &String)> = reading
            .words
            .iter()
            .map(|(word, weight)| (weight * worth(word) * place(word), word))
            .collect();
        named.retain(|(worth, _)| *worth > 0.0);
        named.sort_by(|one, other| other.0.total_cmp(&one.0));
        let share = |words: &BTreeSet<String>| {
            let single = || words.iter().filter(|word| !word.contains(' '));
            let whole: f64 = single().map(|word| worth(word)).sum();
            let in_text =
                single().map(|word| reading.words.get(word).unwrap_or(&0.0) * worth(word));
            in_text.sum::<f64>() / (whole + LACKS)
        };
        let says = reading.rules.contains(&rule.id);
        let is_cause = is_condition(rule, reading);
        let sum: f64 = named.iter().map(|(worth, _)| worth).sum();
        let fits = match says {
            true => f64::INFINITY,
            false if is_cause => 1.0 + share(&places[1]),
            false => {
                let of_text = sum / text.max(1.0);
                of_text
                    * (0.3 + 0.4 * share(&places[0]) + 0.3 * share(&places[1]))
                    * likelihood(rule, reading)
            }
        };
        let least = if reading.is_of_cann {
            SHARED
        } else {
            SHARED_ALONE
        };
        let shared = named.iter().filter(|(_, word)| !word.contains(' '));
        if says || is_cause || shared.count() >= least {
            let named = named.into_iter().map(|(_, word)| word.clone()).collect();
            fitting.push((fits, Ranked { rule, named }));
        }
    }
    fitting.sort_by(|one, other| other.0.total_cmp(&one.0));
    let first = fitting.first().map_or(0.0, |(fits, _)| *fits);
    let least = if first >= LEAST {
        NEXT * first.min(1.0)
    } else {
        f64::INFINITY
    };
    fitting.retain(|(fits, _)| *fits >= least);
    fitting.into_iter().map(|(_, ranked)| ranked).collect()
}

/// Whether a rule is about what a cause says that a call breaks.
fn is_condition(rule: &Rule, reading: &Reading) -> bool {
    let condition = rule.id.split_once('.').map(|(_, condition)| condition);
    let mut conditions = reading.causes.iter().flat_map(|cause| cause.conditions);
    reading.operator.is_some_and(|operator| {
        let checker = rule.since.and_then(|since| of_function(since.symbol()));
        checker == Some(operator) && conditions.any(|known| condition == Some(known))
    })
}

/// Whether a rule may be of the operator that the text names. Conditions of a library count where it names none.
fn is_of(rule: &Rule, reading: &Reading) -> bool {
    let Some(operator) = reading.operator else {
        return true;
    };
    // What FusedInferAttentionScore took over from the two checks them as they do.
    let inference = DeclaredOperator::FusedInferAttentionScore;
    let inherits = matches!(
        operator,
        DeclaredOperator::PromptFlashAttention | DeclaredOperator::IncreFlashAttention
    );
    let checks = |since: OperatorVersion| {
        let checker = of_function(since.symbol());
        checker == Some(operator) || inherits && checker == Some(inference)
    };
    reading.rules.contains(&rule.id) || rule.since.is_some_and(checks)
}

/// How likely it is that a rule stands behind a failure with what the text says of the call.
fn likelihood(rule: &Rule, reading: &Reading) -> f64 {
    let status = match rule.level {
        Level::Lint | Level::Library | Level::Unsupported => UNCHECKED,
        Level::Rule | Level::HostCrash
            if reading.statuses.is_empty() || reading.statuses.contains(&rule.status) =>
        {
            1.0
        }
        Level::Rule | Level::HostCrash => OTHER_STATUS,
    };
    let checker = match (reading.checker, checker_of(rule)) {
        (Some(text), Some(rule)) if text != rule => OTHER_CHECKER,
        _ => 1.0,
    };
    let usual = [
        DeclaredOperator::FusedInferAttentionScore,
        DeclaredOperator::FlashAttentionScore,
    ];
    let operator = rule.since.and_then(|since| of_function(since.symbol()));
    let operator = match operator {
        Some(operator) if reading.operator.is_none() && !usual.contains(&operator) => RARE_OPERATOR,
        _ => 1.0,
    };
    status * checker * operator * target(rule, reading) * layout(rule, reading)
}

/// The checker whose entry of the check list a rule follows: C to E the prefill path, F the decode path, G and I the
/// unified checker.
fn checker_of(rule: &Rule) -> Option<Checker> {
    let entry = rule.source.strip_prefix("check")?;
    match entry.trim_start_matches(['s', ' ']).chars().next()? {
        'C' | 'D' | 'E' => Some(Checker::Prefill),
        'F' => Some(Checker::Decode),
        'G' | 'I' => Some(Checker::Unified),
        _ => None,
    }
}

/// How likely a rule is on the product and in the release that the text names.
fn target(rule: &Rule, reading: &Reading) -> f64 {
    let (a2_a3, ascend950) = (rule.scope.a2_a3, rule.scope.ascend950);
    let is_free = rule.since.is_none() || rule.scope == Scope::ATLAS_INFERENCE;
    let holds = |span: Option<Span>| match (span, reading.cann) {
        (Some(span), Some(cann)) => span.holds(cann),
        (span, _) => span.is_some(),
    };
    match reading.soc {
        _ if is_free => 1.0,
        Some(Soc::Ascend950) if !holds(ascend950) => OTHER_TARGET,
        Some(Soc::AtlasA2 | Soc::AtlasA3) if !holds(a2_a3) => OTHER_TARGET,
        None if !holds(a2_a3) && !holds(ascend950) => OTHER_TARGET,
        None if a2_a3.is_none() => RARE_TARGET,
        None if a2_a3.is_some_and(|span| span.since > Cann::NEWEST) => RARE_TARGET,
        _ => 1.0,
    }
}

/// How likely a rule is for the layouts that the text names: packed ones, or those with a batch axis.
fn layout(rule: &Rule, reading: &Reading) -> f64 {
    let text = |word: &str| reading.words.contains_key(word);
    let batched = ["bsh", "bsnd", "bnsd"];
    let (text_packed, text_batched) = (text("packed"), batched.iter().any(|layout| text(layout)));
    let words: Vec<String> = [rule.id, rule.holds].into_iter().flat_map(words).collect();
    let has = |word: &str| words.iter().any(|known| known == word);
    let (packed, batched) = (has("packed"), batched.iter().any(|layout| has(layout)));
    match (text_packed, text_batched) {
        (true, false) if batched && !packed => OTHER_LAYOUT,
        (false, true) if packed && !batched => OTHER_LAYOUT,
        _ => 1.0,
    }
}

/// The words of a rule's name, of its condition and of its fix. What the names of an operator's rules begin with says
/// nothing of the call.
fn places(rule: &Rule) -> [BTreeSet<String>; 3] {
    let (subject, condition) = rule.id.split_once('.').unwrap_or(("", rule.id));
    let operators = [
        "flash", "prompt", "incre", "ring", "gather", "scatter", "update", "call",
    ];
    let name = match operators.contains(&subject) {
        true => condition,
        false => rule.id,
    };
    [name, rule.holds, rule.fix].map(|text| {
        let words = words(text);
        pairs(&words).chain(words.clone()).collect()
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn first_three(text: &str) -> Vec<&'static str> {
        let ranked = ranked(&Reading::new(text)).into_iter().take(3);
        ranked.map(|ranked| ranked.rule.id).collect()
    }

    /// Messages as the operators' checks word them: by parameters in several spellings, and numbers.
    #[test]
    fn the_rule_behind_a_message_is_among_the_first_three() {
        let inference =
            "call aclnnFusedInferAttentionScoreV3 failed, error code is 561002\nEZ9999: ";
        for (id, message) in [
            (
                "packed.q_total",
                "in TND the queryT(8) differs from the last of actualSequenceLengthQ(5)",
            ),
            (
                "packed.head_dim",
                "in TND the queryD(128) and keyD(128) have to be 192, or valueD 128",
            ),
            (
                "atten_mask.compressed_shape",
                "attenMask [1024, 1024] with sparseMode 3, 2048x2048 wanted",
            ),
            (
                "num_key_value_heads.divides",
                "numHeads 10 cannot be divided by numKeyValueHeads 4",
            ),
            ("mla.heads", "20 query heads of MLA are no power of two"),
            ("head_dim.max", "headDim 520 above 512"),
            ("rope.pair", "queryRope without keyRope"),
            ("query.batch_max", "batch size 70000 above 65536"),
            (
                "actual_seq_lengths_kv.range",
                "actualSeqLengthsKv 300 of batch 2 above the S 256 of key",
            ),
            ("block_size.decode", "blockSize 100 is no multiple of 16"),
        ] {
            let ranked = first_three(&format!("{inference}{message}"));
            assert!(ranked.contains(&id), "{message}: {ranked:?}");
        }
        let scatter = first_three("call aclnnScatterPaKvCache failed: slotMapping has dtype float");
        assert_eq!(scatter[0], "slot_mapping.dtype");
    }

    /// Messages with what logs put around them, of several checkers and operators.
    #[test]
    fn marks_names_and_layouts_lead_to_the_rule() {
        for (id, text) in [
            (
                "packed.kv_ends",
                "(E89999):  TND, PA not enabled: keyT(40), valueT(40) are not the last entry of actualSeqLengthsKV(33)\
                 [FUNC:CheckRows][FILE:prompt_flash_attention_tiling.cpp][LINE:1]",
            ),
            (
                "block_size.unified",
                "EZ9999: for NO_QUANT a block_size is a multiple of 16, not got 9[FUNC:CheckBlock]\
                 [FILE:fused_infer_attention_score_tiling_check_paged.cpp][LINE:1]",
            ),
            (
                "flash.atten_mask_shape",
                "aclnnFlashAttentionScore, 561103\n(EZ9999): shape of the atten_mask is [3, 1, 1, 70], Sq=[70]",
            ),
            (
                "flash.atten_mask_rank",
                "call aclnnFlashAttentionScore failed: EZ9999: atten mask has 5 axes, wants 2 or 4",
            ),
            (
                "num_key_value_heads.group",
                "aclnnPromptFlashAttentionV3: numHeads over numKeyValueHeads is 80, and at most 64 share a key head",
            ),
            (
                "mla.heads",
                "EZ9999: MLA with 20 query heads, wants 32, 64 or 128[FUNC:CheckMla]\
                 [FILE:incre_flash_attention_tiling.cc]",
            ),
            (
                "tensor.contiguous",
                "npu_fused_infer_attention_score_v2 on CANN 9.1.0: key and value with strides, not contiguous",
            ),
        ] {
            let ranked = first_three(text);
            assert!(ranked.contains(&id), "{text}: {ranked:?}");
        }
    }

    #[test]
    fn a_missing_kernel_leads_to_dtypes_and_products() {
        let registered =
            "aclnnFusedInferAttentionScoreV3 161001\n(EZ1009): SoC version of this chip failed";
        assert_eq!(first_three(registered)[0], "call.product");
        let kernel =
            "aclnnPromptFlashAttentionV3\nEZ1001: Cannot find binary of op PromptFlashAttention";
        assert!(first_three(kernel).contains(&"prompt.dtype"));
    }

    #[test]
    fn what_no_rule_is_about_ranks_nothing() {
        for text in [
            "NPU out of memory. Tried to allocate 3.00 GiB\n  npu_fused_infer_attention_score(query, key",
            "aclnnFusedInferAttentionScoreV5 not in libopapi.so",
            "call aclnnMatmul failed, error code is 561002\nEZ9999: the shape of key, value and atten mask differ",
            "SelfAttentionOperation setup failed! head dim, block table, query and key",
            "[Errno None] npu_fused_infer_attention_score: block size and head dimension of the query",
            "KeyError: 'block_tables'",
            "call aclnnFusedInferAttentionScoreV3 failed, error code is 561002",
        ] {
            let ranked = first_three(text);
            assert!(ranked.is_empty(), "{text}: {ranked:?}");
        }
    }

    #[test]
    fn a_rule_that_is_named_comes_first_and_a_status_alone_ranks_nothing() {
        let own =
            "packed.q_total: the last entry is not that; given 5, allowed: 8; fix: trim the query";
        assert_eq!(first_three(own)[0], "packed.q_total");
        assert_eq!(first_three("561002"), [""; 0]);
        assert_eq!(first_three(""), [""; 0]);
    }
}
