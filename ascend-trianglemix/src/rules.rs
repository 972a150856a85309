//! What TriangleMix refuses, by rule. The rules of the crates below are here as well.

use ascend_attention::spec::Rule;

pub use ascend_serving::rules::*;

ascend_attention::spec::library_rules! {
    BACKEND_TRIANGLE = "backend.triangle_mix",
        "TriangleMix leaves enough out of a causal prompt of known length, in some layer",
        "add a dense backend behind this one, and tell requests the length of their prompts";
}

/// Every rule that this crate refuses by: those of the crates below, of the operators among them, then its own.
pub fn every_rule() -> impl Iterator<Item = &'static Rule> {
    ascend_serving::rules::every_rule().chain(RULES.iter().copied())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ids_are_unique() {
        let mut ids: Vec<_> = every_rule().map(|rule| rule.id).collect();
        ids.sort_unstable();
        let rules = ids.len();
        ids.dedup();
        assert_eq!(ids.len(), rules);
    }
}
