//! The lints that a caller lets a call break.

use ascend_spec::operator::DeclaredVersion;
use ascend_spec::{Level, Rule, every_rule};
use smallvec::SmallVec;

use crate::error::{Error, Result};

/// Lints by id: those that stay within the call's tensors, and those that a caller has allowed as unsafe.
#[derive(Clone, Debug, Default)]
pub(crate) struct AllowedLints {
    safe: Vec<String>,
    overruns: Vec<String>,
}

impl AllowedLints {
    /// Allows a lint that stays within the call's tensors; [`AllowedLints::ids`] refuses one that does not.
    pub(crate) fn lint(&mut self, id: impl Into<String>) {
        self.safe.push(id.into());
    }

    /// Allows any lint.
    ///
    /// # Safety
    /// All that the operator reads and writes in launches of the call is in memory that the call's tensors are views
    /// of, and nothing else uses the part that it writes.
    pub(crate) unsafe fn overrun(&mut self, id: impl Into<String>) {
        self.overruns.push(id.into());
    }

    /// Returns all allowed lints; `lints` are those that a call of the operator may break.
    ///
    /// # Errors
    /// [`ARGUMENT_VALUE`](crate::rules::ARGUMENT_VALUE) for any other lint, and for one that overruns memory and was
    /// allowed as one that does not.
    pub(crate) fn ids<I: Iterator<Item = &'static Rule>>(&self, lints: impl Fn() -> I) -> Result<SmallVec<[&str; 4]>> {
        for id in &self.overruns {
            known("allow_overrun", &lints, id)?;
        }
        for id in &self.safe {
            let rule = known("allow_lint", &lints, id)?;
            if rule.overruns {
                return Err(Error::invalid(
                    "allow_lint",
                    format_args!("{id}, which may leave the call's tensors: {}", rule.reach),
                    "lints that stay within them; allowing another one is unsafe: `allow_overrun`",
                )
                .fix("mend the call by the advice of the lint, or by `allow_overrun` where the operator has that"));
            }
        }
        let both = self.safe.iter().chain(&self.overruns);
        Ok(both.map(String::as_str).collect())
    }
}

/// The lints of the operator with these versions.
pub(crate) fn lints_of<V: DeclaredVersion>() -> impl Iterator<Item = &'static Rule> {
    let is_of_operator = |rule: &Rule| V::ALL.iter().any(|version| Some(version.info()) == rule.since);
    every_rule().filter(move |rule| rule.level == Level::Lint && is_of_operator(rule))
}

/// The lint that has this id.
fn known<I: Iterator<Item = &'static Rule>>(
    argument: &'static str,
    lints: impl Fn() -> I,
    id: &str,
) -> Result<&'static Rule> {
    lints().find(|lint| lint.id == id).ok_or_else(|| {
        let ids: Vec<_> = lints().map(|lint| lint.id).collect();
        Error::invalid(argument, format_args!("{id:?}"), format_args!("lints of the operator: {}", ids.join(", ")))
            .fix("take the id from the refusal that names the lint")
    })
}
