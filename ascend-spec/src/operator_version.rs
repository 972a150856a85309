//! Operators, and from which release on CANN has them.

use crate::fia::Version;
use crate::ops::{
    flash_attention_score, gather_pa_kv_cache, incre_flash_attention, prompt_flash_attention,
    ring_attention_update,
};
use crate::{Rule, Soc, Target, fia, scatter, update};
use std::fmt;

/// An operator; of FusedInferAttentionScore, one of its versions.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum OperatorVersion {
    /// Attention.
    FusedInferAttentionScore(Version),
    /// Attention of training; one of its entry points.
    FlashAttentionScore(flash_attention_score::Version),
    /// Attention of one query row a sequence, for Atlas inference cards too; one of its versions.
    IncreFlashAttention(incre_flash_attention::Version),
    /// Attention of several query rows, for Atlas inference cards too; one of its versions.
    PromptFlashAttention(prompt_flash_attention::Version),
    /// Merging outputs of training attention; one of its versions.
    RingAttentionUpdate(ring_attention_update::Version),
    /// Writing new keys and values into a paged cache.
    ScatterPaKvCache,
    /// Gathering keys and values out of a paged cache.
    GatherPaKvCache,
    /// Merging attention over parts of the keys.
    AttentionUpdate,
}

impl OperatorVersion {
    /// Name of the phase-two function; phase one appends `GetWorkspaceSize`.
    pub const fn symbol(self) -> &'static str {
        match self {
            OperatorVersion::FusedInferAttentionScore(version) => version.symbol(),
            OperatorVersion::FlashAttentionScore(version) => version.symbol(),
            OperatorVersion::IncreFlashAttention(version) => version.symbol(),
            OperatorVersion::PromptFlashAttention(version) => version.symbol(),
            OperatorVersion::RingAttentionUpdate(version) => version.symbol(),
            OperatorVersion::ScatterPaKvCache => "aclnnScatterPaKvCache",
            OperatorVersion::GatherPaKvCache => "aclnnGatherPaKvCache",
            OperatorVersion::AttentionUpdate => "aclnnAttentionUpdate",
        }
    }

    /// The CANN releases known to export it, as they stand behind "CANN": the first one, or `after` one that does not.
    pub const fn since_cann(self) -> &'static str {
        match self {
            OperatorVersion::FusedInferAttentionScore(version) => version.since_cann(),
            OperatorVersion::FlashAttentionScore(version) => version.since_cann(),
            OperatorVersion::IncreFlashAttention(version) => version.since_cann(),
            OperatorVersion::PromptFlashAttention(version) => version.since_cann(),
            OperatorVersion::RingAttentionUpdate(version) => version.since_cann(),
            OperatorVersion::GatherPaKvCache => "8.5",
            OperatorVersion::ScatterPaKvCache | OperatorVersion::AttentionUpdate => "after 8.1",
        }
    }

    /// Whether a product has it in a release.
    pub fn runs_on(self, target: Target) -> bool {
        match self {
            OperatorVersion::FusedInferAttentionScore(version) => version.runs_on(target),
            OperatorVersion::FlashAttentionScore(version) => version.runs_on(target),
            OperatorVersion::IncreFlashAttention(version) => version.runs_on(target),
            OperatorVersion::PromptFlashAttention(version) => version.runs_on(target),
            OperatorVersion::RingAttentionUpdate(version) => version.runs_on(target),
            OperatorVersion::ScatterPaKvCache
            | OperatorVersion::GatherPaKvCache
            | OperatorVersion::AttentionUpdate => {
                matches!(target.soc, Soc::AtlasA2 | Soc::AtlasA3 | Soc::Ascend950)
            }
        }
    }
}

impl fmt::Display for OperatorVersion {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            OperatorVersion::FusedInferAttentionScore(version) => version.fmt(f),
            OperatorVersion::FlashAttentionScore(version) => version.fmt(f),
            OperatorVersion::IncreFlashAttention(version) => version.fmt(f),
            OperatorVersion::PromptFlashAttention(version) => version.fmt(f),
            OperatorVersion::RingAttentionUpdate(version) => version.fmt(f),
            OperatorVersion::ScatterPaKvCache
            | OperatorVersion::GatherPaKvCache
            | OperatorVersion::AttentionUpdate => f.write_str(self.symbol()),
        }
    }
}

/// Every rule and lint of every operator.
pub fn every_rule() -> impl Iterator<Item = &'static Rule> {
    let others = [
        scatter::rules::RULES,
        update::rules::RULES,
        prompt_flash_attention::rules::RULES,
        incre_flash_attention::rules::RULES,
        ring_attention_update::rules::RULES,
        gather_pa_kv_cache::rules::RULES,
    ];
    fia::rules::all()
        .chain(flash_attention_score::rules::all())
        .chain(others.into_iter().flatten().copied())
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
                OperatorVersion::FusedInferAttentionScore(_) => {
                    fia::rules::all().any(|r| r == rule)
                }
                OperatorVersion::FlashAttentionScore(_) => {
                    flash_attention_score::rules::all().any(|r| r == rule)
                }
                OperatorVersion::IncreFlashAttention(_) => {
                    incre_flash_attention::rules::RULES.contains(&rule)
                }
                OperatorVersion::PromptFlashAttention(_) => {
                    prompt_flash_attention::rules::RULES.contains(&rule)
                }
                OperatorVersion::RingAttentionUpdate(_) => {
                    ring_attention_update::rules::RULES.contains(&rule)
                }
                OperatorVersion::ScatterPaKvCache => scatter::rules::RULES.contains(&rule),
                OperatorVersion::GatherPaKvCache => {
                    gather_pa_kv_cache::rules::RULES.contains(&rule)
                }
                OperatorVersion::AttentionUpdate => update::rules::RULES.contains(&rule),
            };
            assert!(kind, "{}", rule.id);
        }
    }
}
