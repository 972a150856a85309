//! The words of rules, and how much each tells them apart.

use std::collections::{BTreeMap, BTreeSet};

use ascend_attention::spec::Rule;

use super::operator_names::Operator;
use super::words::{pairs, words};

/// A rule with the words of its name, of its condition and of its fix.
pub(super) struct RuleWords {
    pub(super) rule: &'static Rule,
    places: [BTreeSet<String>; 3],
}

/// How much a word counts in a rule's name, its condition and its fix.
const WEIGHTS: [f64; 3] = [1.0, 1.0, 0.5];
/// What a rule's name and condition lack at least: short ones are in many texts.
const LACKS: f64 = 1.5;

impl RuleWords {
    /// What the names of an operator's rules begin with says nothing of the call, where it is a part of the operator's
    /// name.
    pub(super) fn new(rule: &'static Rule) -> Self {
        let (subject, condition) = rule.id.split_once('.').unwrap_or(("", rule.id));
        let operator = Operator::of_rule(rule).map_or("", Operator::name);
        let is_operator = format!("_{operator}_").contains(&format!("_{subject}_"));
        let name = match is_operator || subject == "call" {
            true => condition,
            false => rule.id,
        };
        let places = [name, rule.holds, rule.fix].map(|text| {
            let words = words(text);
            pairs(&words).chain(words.clone()).collect()
        });
        Self { rule, places }
    }

    /// How much a word of a text counts by where the rule has it; 0 if it does not.
    pub(super) fn weight(&self, word: &str) -> f64 {
        let places = self.places.iter().zip(WEIGHTS);
        let weights = places.filter(|(words, _)| words.contains(word)).map(|(_, weight)| weight);
        weights.fold(0.0, f64::max)
    }

    /// The share of the words of the rule's name that a text has.
    pub(super) fn share_of_name(&self, text: &BTreeMap<String, f64>, worths: &Worths) -> f64 {
        share(&self.places[0], text, worths)
    }

    /// The share of the words of the rule's condition that a text has.
    pub(super) fn share_of_condition(&self, text: &BTreeMap<String, f64>, worths: &Worths) -> f64 {
        share(&self.places[1], text, worths)
    }
}

fn share(words: &BTreeSet<String>, text: &BTreeMap<String, f64>, worths: &Worths) -> f64 {
    let single = || words.iter().filter(|word| !word.contains(' '));
    let whole: f64 = single().map(|word| worths.of(word)).sum();
    let in_text = single().map(|word| text.get(word).unwrap_or(&0.0) * worths.of(word));
    in_text.sum::<f64>() / (whole + LACKS)
}

/// How much words tell rules apart: the more, the fewer have them (inverse document frequency).
pub(super) struct Worths {
    rules_having: BTreeMap<String, f64>,
    rules: f64,
}

/// How much a word counts that no rule has.
const UNKNOWN: f64 = 0.5;

impl Worths {
    pub(super) fn new(rules: &[RuleWords]) -> Self {
        let mut rules_having: BTreeMap<String, f64> = BTreeMap::new();
        for RuleWords { places, .. } in rules {
            let unique: BTreeSet<&String> = places.iter().flatten().collect();
            for word in unique {
                *rules_having.entry(word.clone()).or_default() += 1.0;
            }
        }
        Self { rules_having, rules: rules.len() as f64 }
    }

    pub(super) fn of(&self, word: &str) -> f64 {
        match self.rules_having.get(word) {
            Some(having) => (1.0 + self.rules / having).ln(),
            None => UNKNOWN * self.rules.ln(),
        }
    }

    /// Whether any rule has a word.
    pub(super) fn knows(&self, word: &str) -> bool {
        self.rules_having.contains_key(word)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use ascend_trianglemix::rules::every_rule;

    #[test]
    fn what_names_the_operator_is_no_word_of_a_rule() {
        for (id, word) in [
            ("flash.atten_mask_shape", "flash"),
            ("indexer.query", "indexer"),
            ("ring.both_empty", "ring"),
            ("call.product", "call"),
        ] {
            let rule = every_rule().find(|rule| rule.id == id).unwrap();
            assert!(!RuleWords::new(rule).places[0].contains(word), "{id}");
        }
        let rule = every_rule().find(|rule| rule.id == "packed.q_total").unwrap();
        assert!(RuleWords::new(rule).places[0].contains("packed"));
    }
}
