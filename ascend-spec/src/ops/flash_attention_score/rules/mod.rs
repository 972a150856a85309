//! The rules of FlashAttentionScore, grouped by argument: those that refuse a call, and the lints of what the operator
//! takes and ignores or misreads.

pub mod drop_mask;
pub mod entry;
pub mod heads;
pub mod layouts;
pub mod lengths;
pub mod mask;
pub mod outputs;
pub mod prefix;
pub mod pse;
pub mod rope;
pub mod tokens;

use super::FlashAttentionProblem;
use crate::attention_problem::Work;
use crate::contract::first_lint;
use crate::rule::lint;
use crate::{Rule, Violation};

/// Receives the lints that are found.
type Report<'r> = &'r mut dyn FnMut(Violation);

/// Every rule and lint, in the order of the files.
pub fn all() -> impl Iterator<Item = &'static Rule> {
    [
        entry::RULES,
        layouts::RULES,
        heads::RULES,
        lengths::RULES,
        mask::RULES,
        tokens::RULES,
        prefix::RULES,
        pse::RULES,
        drop_mask::RULES,
        rope::RULES,
        outputs::RULES,
    ]
    .into_iter()
    .flatten()
    .copied()
}

impl FlashAttentionProblem<'_> {
    /// The first lint that the call breaks, leaving out those in `allowed` (by id).
    ///
    /// # Errors
    /// The broken lint, with the same fields as a broken rule.
    pub fn lint(&self, allowed: &[&str]) -> Result<(), Violation> {
        first_lint(allowed, |report| self.each_lint(report))
    }

    /// Calls `report` with every lint that the call breaks.
    pub fn each_lint(&self, report: &mut dyn FnMut(Violation)) {
        if self.work != Work::Attend {
            return;
        }
        for lints in [
            entry::lints,
            lengths::lints,
            mask::lints,
            tokens::lints,
            prefix::lints,
            pse::lints,
            pse::start_lints,
            drop_mask::lints,
            rope::lints,
            outputs::lints,
        ] {
            lints(self, report);
        }
    }
}
