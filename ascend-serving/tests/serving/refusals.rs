//! What a call was refused for.

use ascend_attention::Error as CallError;
use ascend_serving::{Error, Rule};

/// The rule of the serving layer that refused a call.
pub fn rule<R>(outcome: Result<R, Error>) -> Rule {
    match outcome.map(drop) {
        Err(Error::Refused(refused)) => refused.rule,
        other => panic!("{other:?}"),
    }
}

/// The argument that a call was refused for.
pub fn blamed<R>(outcome: Result<R, Error>) -> &'static str {
    match outcome.map(drop) {
        Err(Error::Attention(CallError::InvalidArgument { argument, .. })) => argument,
        other => panic!("{other:?}"),
    }
}

/// The rule of an operator that a call breaks.
pub fn broken<R>(outcome: Result<R, Error>) -> &'static str {
    match outcome.map(drop) {
        Err(Error::Attention(CallError::Violation(violation))) => violation.rule.id,
        other => panic!("{other:?}"),
    }
}
