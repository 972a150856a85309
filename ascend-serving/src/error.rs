//! Everything that can go wrong in this crate, as one type.

use std::fmt;

use ascend_attention::Violation;
use ascend_attention::spec::Rule;

/// The result of everything in this crate that can fail.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// An error of this crate. Plain data.
///
/// `{:?}` prints the text of `{}`, so that a program whose `main` returns a [`Result`] prints what a person can read;
/// `{:#?}` prints variant and fields.
#[derive(Clone, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A rule is broken: one of this crate or the crate below ([`rules`](crate::rules)), such as requests, blocks,
    /// slots or lengths that do not fit each other, or one of an operator. Nothing was queued.
    #[error(transparent)]
    Violation(#[from] Violation),
    /// No registered backend can serve a step.
    #[error("no backend can serve the step: {reasons}")]
    NoBackend {
        /// Each backend with its reason.
        reasons: String,
        /// The rules by which backends refused the step.
        rules: Vec<&'static Rule>,
    },
    /// A call of attention, or what it needs, failed otherwise than by a rule.
    #[error(transparent)]
    Attention(ascend_attention::Error),
}

impl fmt::Debug for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if !f.alternate() {
            return fmt::Display::fmt(self, f);
        }
        match self {
            Self::Violation(violation) => f.debug_tuple("Violation").field(violation).finish(),
            Self::NoBackend { reasons, rules } => {
                f.debug_struct("NoBackend").field("reasons", reasons).field("rules", rules).finish()
            }
            Self::Attention(error) => f.debug_tuple("Attention").field(error).finish(),
        }
    }
}

impl From<ascend_attention::Error> for Error {
    fn from(error: ascend_attention::Error) -> Self {
        match error {
            ascend_attention::Error::Violation(violation) => Self::Violation(violation),
            error => Self::Attention(error),
        }
    }
}

impl Error {
    /// Whether the call was refused by this rule; for a step that no backend serves, whether one of the backends
    /// refused it by this rule. A scheduler preempts a request when the rule is
    /// [`BATCH_BLOCKS`](crate::rules::BATCH_BLOCKS) or [`POOL_EXHAUSTED`](crate::rules::POOL_EXHAUSTED), and ends the
    /// steps in flight when it is [`POOL_WAITING`](crate::rules::POOL_WAITING).
    pub fn breaks(&self, rule: &Rule) -> bool {
        match self {
            Self::Violation(violation) => violation.rule == rule,
            Self::NoBackend { rules, .. } => rules.contains(&rule),
            Self::Attention(_) => false,
        }
    }

    /// Whether a call was refused before anything of it was queued; of one that failed otherwise the device may run
    /// some.
    pub(crate) fn is_refusal(&self) -> bool {
        use ascend_attention::Error::Capturing;
        matches!(self, Self::Violation(_) | Self::NoBackend { .. } | Self::Attention(Capturing { .. }))
    }

    /// The refusal of a wrong argument.
    #[cold]
    pub(crate) fn invalid(argument: &'static str, given: impl fmt::Display, allowed: impl fmt::Display) -> Self {
        ascend_attention::Error::invalid(argument, given, allowed).into()
    }

    /// The refusal of memory that a call would write and that others use.
    #[cold]
    pub(crate) fn shared(argument: &'static str, given: impl fmt::Display, allowed: impl fmt::Display) -> Self {
        ascend_attention::Error::shared(argument, given, allowed).into()
    }

    /// The refusal of a launch with something else than was planned.
    #[cold]
    pub(crate) fn not_as_planned(argument: &'static str, given: impl fmt::Display, planned: impl fmt::Display) -> Self {
        ascend_attention::Error::not_as_planned(argument, given, planned).into()
    }

    /// This error, with another advice where it is a broken rule.
    #[must_use]
    pub(crate) fn fix(mut self, fix: impl fmt::Display) -> Self {
        if let Self::Violation(violation) = &mut self {
            violation.fix = fix.to_string();
        }
        self
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test fails by panicking")]
mod tests {
    use ascend_attention::attention::Cumulative;

    use super::*;
    use crate::rules;

    #[test]
    fn refusals_of_lengths_are_refusals_here_too() {
        let refused = Cumulative::new(vec![3, 2]).unwrap_err();
        let text = refused.to_string();
        let error = Error::from(ascend_attention::Error::from(refused));
        assert!(error.breaks(&rules::LENGTHS_ENDS));
        assert!(matches!(&error, Error::Violation(violation) if violation.rule.id == "lengths.ends"));
        assert_eq!(error.to_string(), text);
        assert!(!error.breaks(&rules::POOL_EXHAUSTED));
    }

    #[test]
    fn errors_can_be_sent_and_stay_small() {
        fn sent<T: Send + Sync + std::error::Error + 'static>() {}
        sent::<Error>();
        assert!(size_of::<Error>() <= 136);
    }
}
