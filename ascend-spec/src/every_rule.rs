//! The rules of all operators together.

use crate::ops::{
    flash_attention_score, gather_pa_kv_cache, incre_flash_attention, prompt_flash_attention,
    ring_attention_update,
};
use crate::{Rule, fia, scatter, update};

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
    use crate::OperatorVersion;

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
