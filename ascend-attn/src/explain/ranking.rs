//! The rules that fit a text best: those that speak of the same parameters, numbers and terms.

use ascend_attention::spec::{INNER_NULLPTR, Rule};
use ascend_trianglemix::rules::every_rule;

use super::likelihood::{is_of, likelihood};
use super::operator_names::Operator;
use super::reading::Reading;
use super::rule_words::{RuleWords, Worths};
use super::status::Status;
use super::words::is_circumstance;

/// A rule that fits a text.
#[derive(Debug)]
pub(super) struct Ranked {
    pub(super) rule: &'static Rule,
    /// The words of the text that it speaks of, those of most weight first.
    pub(super) named: Vec<String>,
}

/// The least share of a message that the first rule has to account for, and each after it in comparison with the first.
const LEAST: f64 = 0.16;
const NEXT: f64 = 0.4;
/// The least number of words that a text and a rule share, and those of a text that names neither operator nor status.
/// Layouts and products are none of them.
const SHARED: usize = 2;
const SHARED_ALONE: usize = 4;

/// The rules that fit, best first: those that the text names, then those that account for most of its words and whose
/// own words the text has.
pub(super) fn ranked(reading: &Reading) -> Vec<Ranked> {
    if reading.is_final() && reading.rules.is_empty() {
        return Vec::new();
    }
    let rules: Vec<RuleWords> = every_rule().filter(|rule| is_of(rule, reading)).map(RuleWords::new).collect();
    let worths = Worths::new(&rules);
    // A word that no rule has is a word of the message only where it is one of CANN's: prose has many of its own.
    let counts = |word: &str| worths.knows(word) || reading.is_marked && !word.contains(' ');
    let counted = reading.words.iter().filter(|(word, _)| counts(word));
    let whole: f64 = counted.map(|(word, weight)| weight * worths.of(word)).sum();
    let all = rules.iter().filter_map(|rule| fit(rule, reading, &worths, whole));
    let mut fitting: Vec<(f64, Ranked)> = all.collect();
    fitting.sort_by(|one, other| other.0.total_cmp(&one.0));
    let first = fitting.first().map_or(0.0, |(fits, _)| *fits);
    let least = if first >= LEAST { NEXT * first.min(1.0) } else { f64::INFINITY };
    fitting.retain(|(fits, _)| *fits >= least);
    match fitting.is_empty() {
        true => by_status(&rules, reading),
        false => fitting.into_iter().map(|(_, ranked)| ranked).collect(),
    }
}

/// The rules of the operator whose status the text has, where they are so few that the status alone tells them.
fn by_status(rules: &[RuleWords], reading: &Reading) -> Vec<Ranked> {
    const MOST: usize = 3;
    let is_of_operator = |rule: &Rule| reading.operator.is_some() && rule.since.is_some();
    // From 9.2 on most refusals have the status of an inner null.
    let tells = |status: Status, rule: &Rule| status.0 != INNER_NULLPTR && status.0 == rule.status;
    let has_status = |rule: &Rule| reading.refusals().any(|status| tells(status, rule));
    let rules = rules.iter().map(|words| words.rule).filter(|rule| is_of_operator(rule) && has_status(rule));
    let few: Vec<Ranked> = rules
        .take(MOST + 1)
        .map(|rule| Ranked { rule, named: vec![format!("by its status {} alone", rule.status)] })
        .collect();
    match few.len() > MOST {
        true => Vec::new(),
        false => few,
    }
}

/// How well a rule fits a text whose words count `whole`; `None` if they share too little.
fn fit(rule: &RuleWords, reading: &Reading, worths: &Worths, whole: f64) -> Option<(f64, Ranked)> {
    let worth_here = |(word, weight): (&String, &f64)| (weight * worths.of(word) * rule.weight(word), word.clone());
    let mut named: Vec<(f64, String)> = reading.words.iter().map(worth_here).collect();
    named.retain(|(worth, _)| *worth > 0.0);
    named.sort_by(|one, other| other.0.total_cmp(&one.0));
    let of_condition = rule.share_of_condition(&reading.words, worths);
    let is_named = reading.rules.contains(&rule.rule.id);
    let is_cause = is_condition(rule.rule, reading);
    let fits = match is_named {
        true => f64::INFINITY,
        false if is_cause => 1.0 + of_condition,
        false => {
            let of_text = named.iter().map(|(worth, _)| worth).sum::<f64>() / whole.max(1.0);
            let of_name = rule.share_of_name(&reading.words, worths);
            of_text * (0.3 + 0.4 * of_name + 0.3 * of_condition) * likelihood(rule.rule, reading)
        }
    };
    let least = if reading.is_of_cann { SHARED } else { SHARED_ALONE };
    let tells = |word: &str| !word.contains(' ') && !is_circumstance(word);
    let shared = named.iter().filter(|(_, word)| tells(word)).count();
    let named = named.into_iter().map(|(_, word)| word).collect();
    (is_named || is_cause || shared >= least).then_some((fits, Ranked { rule: rule.rule, named }))
}

/// Whether a rule is about what a cause says that a call breaks.
fn is_condition(rule: &Rule, reading: &Reading) -> bool {
    let condition = rule.id.split_once('.').map(|(_, condition)| condition);
    let mut conditions = reading.causes.iter().flat_map(|cause| cause.conditions);
    reading.operator.is_some_and(|operator| {
        Operator::of_rule(rule) == Some(operator) && conditions.any(|known| condition == Some(known))
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
        let inference = "call aclnnFusedInferAttentionScoreV3 failed, error code is 561002\nEZ9999: ";
        for (id, message) in [
            ("packed.q_total", "in TND the queryT(8) differs from the last of actualSequenceLengthQ(5)"),
            ("packed.head_dim", "in TND the queryD(128) and keyD(128) have to be 192, or valueD 128"),
            ("atten_mask.compressed_shape", "attenMask [1024, 1024] with sparseMode 3, 2048x2048 wanted"),
            ("num_key_value_heads.divides", "numHeads 10 cannot be divided by numKeyValueHeads 4"),
            ("mla.heads", "20 query heads of MLA are no power of two"),
            ("head_dim.max", "headDim 520 above 512"),
            ("rope.pair", "queryRope without keyRope"),
            ("query.batch_max", "batch size 70000 above 65536"),
            ("actual_seq_lengths_kv.range", "actualSeqLengthsKv 300 of batch 2 above the S 256 of key"),
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
        let registered = "aclnnFusedInferAttentionScoreV3 161001\n(EZ1009): SoC version of this chip failed";
        assert_eq!(first_three(registered)[0], "call.product");
        let kernel = "aclnnPromptFlashAttentionV3\nEZ1001: Cannot find binary of op PromptFlashAttention";
        assert!(first_three(kernel).contains(&"prompt.dtype"));
    }

    #[test]
    fn what_no_rule_is_about_ranks_nothing() {
        for text in [
            "NPU out of memory. Tried to allocate 3.00 GiB\n  npu_fused_infer_attention_score(query, key",
            "aclnnFusedInferAttentionScoreV5 not in libopapi.so",
            "call aclnnMatmul failed, error code is 561002\nEZ9999: the shape of key, value and atten mask differ",
            "RuntimeError: SelfAttentionOperation setup failed!",
            "[Errno None] npu_fused_infer_attention_score: block size and head dimension of the query",
            "KeyError: 'block_tables'",
            "call aclnnFusedInferAttentionScoreV3 failed, error code is 561002",
        ] {
            let ranked = first_three(text);
            assert!(ranked.is_empty(), "{text}: {ranked:?}");
        }
    }

    #[test]
    fn a_status_that_few_rules_of_an_operator_have_tells_them() {
        for code in ["-1", "4294967295"] {
            let text = format!("call aclnnLightningIndexer failed, error code is {code}");
            assert_eq!(first_three(&text), ["indexer.query", "indexer.values"]);
        }
        let entry = "call aclnnFusedInferAttentionScoreV3 failed, error code is 361001";
        assert_eq!(first_three(entry), ["call.entry_point"]);
        let inner = "call aclnnFusedInferAttentionScoreV3 failed, error code is 561103";
        assert_eq!(first_three(inner), [""; 0]);
        assert_eq!(first_three("error code is -1"), [""; 0]);
    }

    #[test]
    fn a_rule_that_is_named_comes_first_and_a_status_alone_ranks_nothing() {
        let own = "packed.q_total: the last entry is not that; given 5, allowed: 8; fix: trim the query";
        assert_eq!(first_three(own)[0], "packed.q_total");
        assert_eq!(first_three("561002"), [""; 0]);
        assert_eq!(first_three(""), [""; 0]);
    }
}
