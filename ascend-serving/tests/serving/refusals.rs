//! What a call was refused for.

use ascend_attention::spec::Rule;
use ascend_serving::Error;

/// The rule of the serving layer that refused a call.
pub fn rule<R>(outcome: Result<R, Error>) -> &'static Rule {
    match outcome.map(drop) {
        Err(Error::Violation(refused)) => refused.rule,
        other => panic!("{other:?}"),
    }
}

/// The argument that a call was refused for.
pub fn blamed<R>(outcome: Result<R, Error>) -> String {
    match outcome.map(drop) {
        Err(Error::Violation(violation)) if violation.rule.id.starts_with("argument.") => {
            violation.given.split(':').next().unwrap().to_owned()
        }
        other => panic!("{other:?}"),
    }
}

/// The rule of an operator that a call breaks.
pub fn broken<R>(outcome: Result<R, Error>) -> &'static str {
    match outcome.map(drop) {
        Err(Error::Violation(violation)) => violation.rule.id,
        other => panic!("{other:?}"),
    }
}
