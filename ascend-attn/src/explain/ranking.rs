//! The rules that fit a text best: those that speak of the same parameters, numbers and terms.

use std::collections::{BTreeMap, BTreeSet};

use ascend_attention::spec::declared::DeclaredOperator;
use ascend_attention::spec::{Level, OperatorVersion, Rule};
use ascend_trianglemix::rules::every_rule;

use super::reading::{Reading, of_function, words};

/// A rule that fits a text.
#[derive(Debug)]
pub(super) struct Ranked {
    pub(super) rule: &'static Rule,
    /// The words of the text that it speaks of, those of most weight first.
    pub(super) named: Vec<String>,
}

/// How much a word counts in a rule's name, its condition and its fix.
const WEIGHTS: [f64; 3] = [2.0, 1.5, 0.5];
/// How much a rule counts whose status is another one than the text's, and one that no operator checks.
const OTHER_STATUS: f64 = 0.3;
const UNCHECKED: f64 = 0.5;

/// The rules that fit, best first: those that the text names, then those that share words with it. A word counts the
/// more the fewer rules have it (inverse document frequency), and in short rules more than in long ones.
pub(super) fn ranked(reading: &Reading) -> Vec<Ranked> {
    let rules: Vec<(&Rule, BTreeMap<String, f64>)> = every_rule()
        .filter(|rule| is_of(rule, reading))
        .map(|rule| (rule, weights(rule)))
        .collect();
    let mut having: BTreeMap<&str, f64> = BTreeMap::new();
    for word in rules.iter().flat_map(|(_, weights)| weights.keys()) {
        *having.entry(word).or_default() += 1.0;
    }
    let all = rules.len() as f64;
    let mut fitting: Vec<(f64, Ranked)> = Vec::new();
    for (rule, weights) in &rules {
        let worth = |word: &str| {
            let weight = weights.get(word).copied().unwrap_or(0.0);
            let rules = having.get(word).copied().unwrap_or(all);
            weight * (all / rules).ln()
        };
        let mut named: Vec<(f64, &String)> = reading
            .words
            .iter()
            .map(|word| (worth(word), word))
            .collect();
        named.retain(|(worth, _)| *worth > 0.0);
        named.sort_by(|one, other| other.0.total_cmp(&one.0));
        let says = reading.rules.contains(&rule.id);
        let sum: f64 = named.iter().map(|(worth, _)| worth).sum();
        let own: f64 = weights.keys().map(|word| worth(word)).sum();
        let fits = match says {
            true => f64::INFINITY,
            false => sum / (8.0 + own).sqrt() * likelihood(rule, reading),
        };
        if says || named.len() >= 2 {
            let named = named.into_iter().map(|(_, word)| word.clone()).collect();
            fitting.push((fits, Ranked { rule, named }));
        }
    }
    fitting.sort_by(|one, other| other.0.total_cmp(&one.0));
    fitting.into_iter().map(|(_, ranked)| ranked).collect()
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

/// How likely it is that a rule stands behind a failure with the text's status.
fn likelihood(rule: &Rule, reading: &Reading) -> f64 {
    match rule.level {
        Level::Lint | Level::Library | Level::Unsupported => UNCHECKED,
        Level::Rule | Level::HostCrash
            if reading.statuses.is_empty() || reading.statuses.contains(&rule.status) =>
        {
            1.0
        }
        Level::Rule | Level::HostCrash => OTHER_STATUS,
    }
}

/// The words of a rule with the weight of the most telling place where each stands.
fn weights(rule: &Rule) -> BTreeMap<String, f64> {
    let mut weights: BTreeMap<String, f64> = BTreeMap::new();
    for (text, weight) in [rule.id, rule.holds, rule.fix].into_iter().zip(WEIGHTS) {
        let unique: BTreeSet<String> = words(text).into_iter().collect();
        for word in unique {
            let known = weights.entry(word).or_default();
            *known = known.max(weight);
        }
    }
    weights
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

    #[test]
    fn a_rule_that_is_named_comes_first_and_a_status_alone_ranks_nothing() {
        let own =
            "packed.q_total: the last entry is not that; given 5, allowed: 8; fix: trim the query";
        assert_eq!(first_three(own)[0], "packed.q_total");
        assert_eq!(first_three("561002"), [""; 0]);
        assert_eq!(first_three(""), [""; 0]);
    }
}
