//! The rules of FusedInferAttentionScore, grouped as the operator's own checks are.
//!
//! Each file declares its rules as data and, below them, the code that applies them.

pub mod entry;
pub mod heads;
pub mod lengths;
pub mod lints;
pub mod mask;
pub mod output;
pub mod tensors;

use crate::Layout;
use crate::Rule;
use crate::fia::Route;
use crate::layout::Extents;

/// Every rule, in the order of the files.
pub fn all() -> impl Iterator<Item = &'static Rule> {
    [
        entry::RULES,
        heads::RULES,
        tensors::RULES,
        lengths::RULES,
        mask::RULES,
        output::RULES,
        lints::RULES,
    ]
    .into_iter()
    .flatten()
    .copied()
}

/// What the rules have learnt about a call so far.
#[derive(Clone, Copy, Debug)]
pub(super) struct Facts {
    pub(super) layout: Layout,
    pub(super) route: Route,
    /// Extents of the query.
    pub(super) query: Extents,
    /// Extents of the first key.
    pub(super) key: Extents,
    /// Whether every batch entry has its own key and value.
    pub(super) kv_list: bool,
    /// Rows of the longest key.
    pub(super) key_rows: i64,
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Level;

    #[test]
    fn ids_are_unique_and_rules_complete() {
        let mut ids: Vec<_> = all().map(|rule| rule.id).collect();
        let count = ids.len();
        ids.sort_unstable();
        ids.dedup();
        assert_eq!(ids.len(), count);
        for rule in all() {
            assert!(rule.id.contains('.'), "{}", rule.id);
            assert!(
                !rule.source.is_empty() && !rule.holds.ends_with('.'),
                "{}",
                rule.id
            );
            assert_eq!(rule.status == 0, rule.level == Level::Lint, "{}", rule.id);
        }
    }
}
