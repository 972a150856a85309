//! Calls that the operator takes and then ignores, misreads or overruns an argument of.
//!
//! What depends on the contents of tensors (block ids, padding, a position bias) is not in the description of a call:
//! the rules of [`contents`](super::contents) are about it.

pub mod antiquant;
pub mod keys;
pub mod lengths;
pub mod masks;
pub mod outputs;
pub mod pages;
pub mod quant;
pub mod releases;
pub mod tensors;

use crate::attention_problem::Work;
use crate::contract::first_lint;
use crate::ops::fused_infer_attention_score::CheckedCall;
use crate::rule::lint;
use crate::{Rule, Violation};

/// Receives the lints that are found.
type Report<'r> = &'r mut dyn FnMut(Violation);

/// The operator that calls a path.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Caller {
    /// FusedInferAttentionScore.
    Fused,
    /// PromptFlashAttention or IncreFlashAttention.
    Older,
}

/// Every lint, in the order of the files.
pub fn all() -> impl Iterator<Item = &'static Rule> {
    [
        tensors::RULES,
        outputs::RULES,
        keys::RULES,
        lengths::RULES,
        pages::RULES,
        masks::RULES,
        quant::RULES,
        antiquant::RULES,
        releases::RULES,
    ]
    .into_iter()
    .flatten()
    .copied()
}

impl CheckedCall<'_> {
    /// Checks for lints: the first that the call breaks, leaving out those in `allowed` (by id). A crash of the host
    /// process is never left out.
    ///
    /// # Errors
    /// The broken lint, with the same fields as a broken rule.
    pub fn lint(&self, allowed: &[&str]) -> Result<(), Violation> {
        first_lint(allowed, |report| self.each_lint(report))
    }

    /// Calls `report` with every lint that the call breaks.
    pub fn each_lint(&self, report: &mut dyn FnMut(Violation)) {
        self.each_lint_of(Caller::Fused, report);
        releases::deprecated(self, report);
    }

    /// As [`CheckedCall::each_lint`], but only for what the two paths themselves take and ignore, whichever
    /// operator calls them: the older operators copy strided tensors, and have other defaults for the tokens that no
    /// mask uses.
    pub(crate) fn each_lint_of_path(&self, report: &mut dyn FnMut(Violation)) {
        self.each_lint_of(Caller::Older, report);
    }

    fn each_lint_of(&self, caller: Caller, report: &mut dyn FnMut(Violation)) {
        let target = self.target;
        let report: Report<'_> = &mut |violation: Violation| {
            if violation.rule.scope.holds(target) {
                report(self.call.try_fix(violation, self.version, target));
            }
        };
        let unusual = tensors::UnusualTensors::of(self.call);
        if caller == Caller::Fused {
            tensors::strided(self, unusual, report);
        }
        outputs::check(self, report);
        match self.problem.work {
            Work::Nothing => return,
            Work::Fill => return keys::filled(self, report),
            Work::Attend => {}
        }
        if outputs::bypass(self, report) {
            // The operator checks nothing else, and reads whatever there is.
            return;
        }
        tensors::check(self, unusual, report);
        outputs::precision(self, report);
        keys::check(self, report);
        lengths::check(self, report);
        pages::check(self, report);
        masks::check(self, caller, report);
        lengths::padding(self, report);
        lengths::prefix(self, report);
        masks::bias(self, report);
        quant::check(self, report);
        antiquant::check(self, report);
        keys::rope(self, report);
        releases::check(self, report);
    }

    /// The most keys that a sequence has, without a shared prefix.
    fn longest_key(&self) -> i64 {
        match self.call.actual_seq_lengths_kv {
            Some(lengths) if !lengths.is_empty() && (!self.problem.packed || self.problem.pages.is_some()) => {
                lengths.iter().take(self.problem.batch).copied().max().unwrap_or(0)
            }
            _ => i64::try_from(self.problem.key_rows).unwrap_or(i64::MAX),
        }
    }
}
