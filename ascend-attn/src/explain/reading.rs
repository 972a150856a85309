//! What the text of a failed call names: operator, status, rules, product, release, and the words of the messages.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};
use std::fmt;

use ascend_attention::spec::{Cann, Soc};
use ascend_trianglemix::rules::every_rule;

use super::borders::{after_words, has_word, is_of_word};
use super::cause::{Cause, causes};
use super::message::{Messages, messages};
use super::operator_names::{Operator, is_function, of_function, of_type};
use super::status::{Status, statuses};
use super::target::{cann, soc};
use super::words::{is_circumstance, is_number, pairs, words};

/// Which of the operator's checkers wrote a message, by the source file that it names.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Checker {
    Prefill,
    Decode,
    Unified,
}

/// What a text says of a failed call.
#[derive(Debug, Default)]
pub(super) struct Reading {
    /// The operator, without its version.
    pub(super) operator: Option<Operator>,
    /// A function of CANN that no rule is about, where none is named that rules are about, or where it is what failed.
    pub(super) stranger: Option<String>,
    pub(super) statuses: Vec<Status>,
    /// Rules that the text names.
    pub(super) rules: Vec<&'static str>,
    pub(super) soc: Option<Soc>,
    pub(super) cann: Option<Cann>,
    pub(super) checker: Option<Checker>,
    /// Failures outside of the contracts that the text speaks of.
    pub(super) causes: Vec<&'static Cause>,
    /// Whether the text has a message of CANN, or names an operator, a status or a rule: otherwise another program may
    /// have failed.
    pub(super) is_of_cann: bool,
    /// Whether the words are those of CANN's own messages.
    pub(super) is_marked: bool,
    /// The words of the messages, as [`words`] has them, and how much each counts.
    pub(super) words: BTreeMap<String, f64>,
}

/// How much a number counts, of a word, and one of a single digit.
const NUMBER: f64 = 0.5;
const DIGIT: f64 = 0.3;
/// How much a word counts that says in which calls and where, and how much two words that stand side by side.
const CIRCUMSTANCE: f64 = 0.5;
const PAIR: f64 = 0.5;
/// How much a word counts that stands in the name of a function of a checker alone.
const IN_FUNCTION: f64 = 0.5;

impl Reading {
    pub(super) fn new(text: &str) -> Self {
        let names = || text.split(|c| !is_of_word(c)).filter(|name| !name.is_empty());
        // A log repeats the same names many times: each is looked at once.
        let mut known: BTreeMap<&str, Named> = BTreeMap::new();
        for (first, name) in names().enumerate() {
            let named = known.entry(name).or_insert(Named { times: 0, first });
            named.times += 1;
        }
        let ids = text.split(|c| !is_of_word(c) && c != '.');
        let ids: BTreeSet<&str> = ids.map(|name| name.trim_matches('.')).collect();
        let rules = every_rule().map(|rule| rule.id);
        let failed = failed_operator(text);
        let operator = match failed {
            Some(name) => of_function(name).or_else(|| of_type(name)),
            None => operator(&known),
        };
        let functions = known.iter().filter(|(name, _)| is_function(name));
        let stranger = functions.min_by_key(|(_, named)| named.first);
        let stranger = failed.or(stranger.map(|(name, _)| *name));
        let statuses = statuses(text);
        let found = messages(text);
        let rules: Vec<&str> = rules.filter(|id| ids.contains(id)).collect();
        let is_named = operator.is_some() || !statuses.is_empty() || !rules.is_empty();
        Self {
            operator,
            stranger: stranger.filter(|_| operator.is_none()).map(str::to_owned),
            rules,
            soc: soc(known.keys().copied(), names()),
            cann: cann(text),
            checker: checker(text),
            causes: causes(text, &statuses),
            is_of_cann: found.are_marked || is_named,
            is_marked: found.are_marked,
            words: weighted_words(&found, &statuses),
            statuses,
        }
    }

    /// The statuses of refused calls.
    pub(super) fn refusals(&self) -> impl Iterator<Item = Status> {
        self.statuses.iter().copied().filter(|status| status.is_refusal())
    }

    /// Whether the text has no message, status or rule: then it may be about a call that did not fail.
    pub(super) fn is_prose(&self) -> bool {
        !self.is_marked && self.statuses.is_empty() && self.rules.is_empty()
    }

    /// Whether no rule can stand behind the failure.
    pub(super) fn is_final(&self) -> bool {
        let is_final = self.causes.iter().any(|cause| cause.is_final);
        self.stranger.is_some() || is_final && self.refusals().next().is_none()
    }

    /// Whether what failed is known, and is none that a rule is about.
    pub(super) fn is_outside(&self) -> bool {
        self.stranger.is_some() || !self.causes.is_empty()
    }
}

impl fmt::Display for Reading {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match (self.operator, &self.stranger) {
            (Some(operator), _) => f.write_str(operator.name())?,
            (None, Some(function)) => f.write_str(function)?,
            (None, None) => f.write_str("no operator")?,
        }
        for status in &self.statuses {
            write!(f, ", {status}")?;
        }
        if let Some(soc) = self.soc {
            write!(f, ", {}", soc.name())?;
        }
        if let Some(cann) = self.cann {
            write!(f, ", CANN {cann}")?;
        }
        Ok(())
    }
}

/// How often a text has a name, and where first, in names.
#[derive(Clone, Copy, Debug)]
struct Named {
    times: usize,
    first: usize,
}

/// The function or the type that a text says to have failed, among whatever else it names.
fn failed_operator(text: &str) -> Option<&str> {
    let says =
        [("call ", " failed"), ("function error: ", ","), ("launch failed for ", ","), ("operator name is ", "")];
    says.into_iter().find_map(|(before, after)| {
        after_words(text, before).find_map(|rest| {
            let name = rest.split(|c| !is_of_word(c)).next()?;
            let is_operator = is_function(name) || of_type(name).is_some();
            (is_operator && rest[name.len()..].starts_with(after)).then_some(name)
        })
    })
}

/// The operator that is named most often: by CANN's function or by PyTorch's, otherwise by its type or its short name.
fn operator(names: &BTreeMap<&str, Named>) -> Option<Operator> {
    let most = |of_name: fn(&str) -> Option<Operator>| {
        let mut counts: Vec<(Operator, Named)> = Vec::new();
        for (name, named) in names {
            let Some(operator) = of_name(name) else {
                continue;
            };
            match counts.iter_mut().find(|(known, _)| *known == operator) {
                Some((_, count)) => {
                    count.times += named.times;
                    count.first = count.first.min(named.first);
                }
                None => counts.push((operator, *named)),
            }
        }
        let most = counts.into_iter().max_by_key(|(_, count)| (count.times, Reverse(count.first)));
        most.map(|(operator, _)| operator)
    };
    most(of_function).or_else(|| most(of_type))
}

/// The words of messages and how much each counts, without the statuses, which are no words of a call.
fn weighted_words(found: &Messages, statuses: &[Status]) -> BTreeMap<String, f64> {
    let mut weights = BTreeMap::new();
    let functions = found.function.iter().map(|function| (function, IN_FUNCTION));
    let lines = found.lines.iter().map(|line| (line, 1.0));
    for (line, weight) in functions.chain(lines) {
        let words = words(line);
        for pair in pairs(&words) {
            weights.insert(pair, weight * PAIR);
        }
        for word in words {
            let weight = match word.len() {
                1 if is_number(&word) => DIGIT,
                _ if is_number(&word) => NUMBER,
                _ if is_circumstance(&word) => CIRCUMSTANCE,
                _ => weight,
            };
            weights.insert(word, weight);
        }
    }
    let statuses: Vec<String> = statuses.iter().map(|status| status.0.to_string()).collect();
    weights.retain(|word, _| !statuses.contains(word));
    weights
}

/// Which checker's source file the text names.
fn checker(text: &str) -> Option<Checker> {
    let files = [
        ("fused_infer_attention_score_tiling_check*", Checker::Unified),
        ("prompt_flash_attention_tiling*", Checker::Prefill),
        ("incre_flash_attention_tiling*", Checker::Decode),
    ];
    let named = files.into_iter().find(|(file, _)| has_word(text, file));
    named.map(|(_, checker)| checker)
}

#[cfg(test)]
mod tests {
    use super::*;
    use ascend_attention::spec::declared::DeclaredOperator;

    #[test]
    fn a_text_of_another_program_is_not_of_cann() {
        for text in ["RuntimeError: shapes differ", "KeyError: 'block_tables'"] {
            assert!(!Reading::new(text).is_of_cann, "{text}");
        }
        assert!(Reading::new("561002: the block table").is_of_cann);
    }

    #[test]
    fn every_rule_is_read_by_its_name() {
        let ids: Vec<_> = every_rule().map(|rule| rule.id).collect();
        assert_eq!(Reading::new(&ids.join(", ")).rules, ids);
    }

    #[test]
    fn operator_and_checker_are_read() {
        let text = "on a chip: FIA\n\
                    (EZ9999): scale[FUNC:CheckScale][FILE:incre_flash_attention_tiling.cpp]";
        let reading = Reading::new(text);
        assert_eq!(reading.checker, Some(Checker::Decode));
        let inference = DeclaredOperator::FusedInferAttentionScore;
        assert_eq!(reading.operator, Some(Operator::Declared(inference)));
    }

    #[test]
    fn an_operator_without_rules_is_a_stranger() {
        let reading = Reading::new("call aclnnMatmul failed, error code is 161002");
        assert_eq!(reading.stranger.as_deref(), Some("aclnnMatmul"));
        let failed = "npu_fused_infer_attention_score(\nRuntimeError: call aclnnMatmul failed, error code is 1";
        assert_eq!(Reading::new(failed).stranger.as_deref(), Some("aclnnMatmul"));
        let both = "call aclnnMatmul or aclnnFusedInferAttentionScoreV4 failed";
        assert_eq!(Reading::new(both).stranger, None);
    }

    #[test]
    fn frames_of_a_traceback_say_nothing_where_there_are_messages() {
        let text = "  File \"mask.py\", line 2, in head_dim\nEZ9999: the scale\n561002 aclnnIncreFlashAttentionV4";
        let reading = Reading::new(text);
        assert_eq!(reading.statuses, [Status(561_002)]);
        assert_eq!(reading.operator, Some(Operator::Declared(DeclaredOperator::IncreFlashAttention)));
        assert!(!reading.words.contains_key("mask") && reading.words.contains_key("scale"));
    }
}
