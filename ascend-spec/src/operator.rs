//! Operators, and from which release on CANN has them.

use crate::fia::Version;
use crate::{Rule, Soc, fia, scatter, update};
use std::fmt;

/// An operator; of FusedInferAttentionScore, one of its versions.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Operator {
    /// Attention.
    FusedInferAttentionScore(Version),
    /// Writing new keys and values into a paged cache.
    ScatterPaKvCache,
    /// Merging attention over parts of the keys.
    AttentionUpdate,
}

impl Operator {
    /// Name of the phase-two function; phase one appends `GetWorkspaceSize`.
    pub const fn symbol(self) -> &'static str {
        match self {
            Operator::FusedInferAttentionScore(version) => version.symbol(),
            Operator::ScatterPaKvCache => "aclnnScatterPaKvCache",
            Operator::AttentionUpdate => "aclnnAttentionUpdate",
        }
    }

    /// The first CANN release known to export it.
    pub const fn since_cann(self) -> &'static str {
        match self {
            Operator::FusedInferAttentionScore(version) => version.since_cann(),
            Operator::ScatterPaKvCache | Operator::AttentionUpdate => "a release after 8.1",
        }
    }

    /// Whether a product has it.
    pub const fn runs_on(self, soc: Soc) -> bool {
        match self {
            Operator::FusedInferAttentionScore(version) => version.runs_on(soc),
            Operator::ScatterPaKvCache | Operator::AttentionUpdate => {
                matches!(soc, Soc::AtlasA2 | Soc::AtlasA3 | Soc::Ascend950)
            }
        }
    }
}

impl fmt::Display for Operator {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Operator::FusedInferAttentionScore(version) => version.fmt(f),
            Operator::ScatterPaKvCache | Operator::AttentionUpdate => f.write_str(self.symbol()),
        }
    }
}

/// Every rule and lint of every operator.
pub fn every_rule() -> impl Iterator<Item = &'static Rule> {
    let others = [scatter::rules::RULES, update::rules::RULES];
    fia::rules::all().chain(others.into_iter().flatten().copied())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ids_are_unique_over_all_operators() {
        let mut ids: Vec<_> = every_rule().map(|rule| rule.id).collect();
        let count = ids.len();
        ids.sort_unstable();
        ids.dedup();
        assert_eq!(ids.len(), count);
    }

    #[test]
    fn a_rule_names_its_operator() {
        for rule in every_rule() {
            let kind = match rule.since {
                Operator::FusedInferAttentionScore(_) => fia::rules::all().any(|r| r == rule),
                Operator::ScatterPaKvCache => scatter::rules::RULES.contains(&rule),
                Operator::AttentionUpdate => update::rules::RULES.contains(&rule),
            };
            assert!(kind, "{}", rule.id);
        }
    }
}
