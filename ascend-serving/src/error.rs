//! Everything that can go wrong in this crate, as one type.

use std::fmt;

use crate::refusal::{Refused, Rule};

/// The result of everything in this crate that can fail.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// An error of this crate. Plain data.
///
/// `{:?}` prints the text of `{}`, so that a program whose `main` returns a [`Result`] prints what a person can read;
/// `{:#?}` prints variant and fields.
#[derive(Clone, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// Requests, blocks, slots or lengths do not fit each other. Nothing was changed.
    #[error(transparent)]
    Refused(#[from] Refused),
    /// No registered backend can serve a step.
    #[error("no backend can serve the step: {reasons}")]
    NoBackend {
        /// Each backend with its reason.
        reasons: String,
        /// The rules of the serving layer by which backends refused the step.
        rules: Vec<Rule>,
    },
    /// A call of attention, or what it needs, failed or was refused. A refusal by a
    /// [`CallRule`](ascend_attention::CallRule) becomes an [`Error::Refused`].
    #[error(transparent)]
    Attention(ascend_attention::Error),
}

impl fmt::Debug for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if !f.alternate() {
            return fmt::Display::fmt(self, f);
        }
        match self {
            Self::Refused(refused) => f.debug_tuple("Refused").field(refused).finish(),
            Self::NoBackend { reasons, rules } => f
                .debug_struct("NoBackend")
                .field("reasons", reasons)
                .field("rules", rules)
                .finish(),
            Self::Attention(error) => f.debug_tuple("Attention").field(error).finish(),
        }
    }
}

impl From<ascend_attention::Error> for Error {
    fn from(error: ascend_attention::Error) -> Self {
        match error {
            ascend_attention::Error::Refused(refused) => Self::Refused(refused.into()),
            error => Self::Attention(error),
        }
    }
}

impl From<ascend_attention::Refused> for Error {
    fn from(refused: ascend_attention::Refused) -> Self {
        Self::Refused(refused.into())
    }
}

impl Error {
    /// Whether the call was refused by this rule; for a step that no backend serves, whether one of the backends
    /// refused it by this rule. A scheduler preempts a request when the rule is [`Rule::BatchBlocks`] or
    /// [`Rule::PoolExhausted`], and ends the steps in flight when it is [`Rule::PoolWaiting`].
    pub fn breaks(&self, rule: impl Into<Rule>) -> bool {
        let rule = rule.into();
        match self {
            Self::Refused(refused) => refused.rule == rule,
            Self::NoBackend { rules, .. } => rules.contains(&rule),
            Self::Attention(_) => false,
        }
    }

    /// The refusal of a wrong argument.
    pub(crate) fn invalid(
        argument: &'static str,
        given: impl ToString,
        allowed: impl ToString,
    ) -> Self {
        ascend_attention::Error::invalid(argument, given, allowed).into()
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test fails by panicking")]
mod tests {
    use ascend_attention::CallRule;
    use ascend_attention::attention::Cumulative;

    use super::*;

    #[test]
    fn refusals_of_lengths_are_refusals_here_too() {
        let refused = Cumulative::new(vec![3, 2]).unwrap_err();
        let told = refused.to_string();
        let error = Error::from(ascend_attention::Error::from(refused));
        assert!(error.breaks(CallRule::LengthsEnds));
        assert!(matches!(&error, Error::Refused(refused) if refused.rule == CallRule::LengthsEnds));
        assert_eq!(error.to_string(), told);
        assert!(!error.breaks(Rule::PoolExhausted));
    }

    #[test]
    fn errors_can_be_sent_and_stay_small() {
        fn sent<T: Send + Sync + std::error::Error + 'static>() {}
        sent::<Error>();
        assert!(size_of::<Error>() <= 136);
    }
}
