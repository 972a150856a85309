//! The lints that a call of an operator breaks, and the calls that end the host process.

use crate::config::{Lints, check};
use crate::lints;
use crate::sanitizer::{FindingKind, Suspicion, report as report_suspicion};
use crate::status::{ACLNN_INNER, Failure, Outcome};
use ascend_spec::operator::{ArgumentList, DeclaredParameter as _};
use ascend_spec::{Level, TensorDesc, Violation, each_lint};

/// Reports every lint that `each` finds in a checked call. A call that crashes the operator's host code on some hosts
/// is reported in every mode of lints.
pub(super) fn report<A: ArgumentList<Tensor = TensorDesc>>(
    symbol: &'static str,
    arguments: &A,
    each: impl FnOnce(&mut dyn FnMut(Violation)),
) -> Outcome {
    let mut outcome = Ok(());
    each(&mut |lint| {
        if outcome.is_ok() {
            outcome = match lint.rule.level {
                Level::HostCrash => report_crash(symbol, &lint, ACLNN_INNER),
                _ => lints::report(symbol, || tensors(arguments), &lint),
            };
        }
    });
    outcome
}

/// As [`report`], but for a contract that returns the first lint that is not in the list of allowed ones.
pub(super) fn report_first<A: ArgumentList<Tensor = TensorDesc>>(
    symbol: &'static str,
    arguments: &A,
    first: impl FnMut(&[&str]) -> Result<(), Violation>,
) -> Outcome {
    if lints::mode() == Lints::Off {
        return Ok(());
    }
    report(symbol, arguments, |lint| each_lint(first, lint))
}

fn tensors<A: ArgumentList<Tensor = TensorDesc>>(arguments: &A) -> String {
    let each = arguments.each_tensor();
    let each =
        each.map(|(argument, desc)| format!("{} {desc}", argument.parameter.info().acl_name));
    each.collect::<Vec<_>>().join(", ")
}

/// The failure of a call that the contract refuses; a crash is reported as well.
pub(super) fn refused(symbol: &'static str, refusal: Violation) -> Failure {
    if refusal.rule.level != Level::HostCrash {
        return refusal.into();
    }
    let reported = report_crash(symbol, &refusal, refusal.status());
    reported.err().unwrap_or_else(|| refusal.into())
}

/// Reports the end of a host process; in strict mode the call fails with `code`.
fn report_crash(symbol: &'static str, violation: &Violation, code: i32) -> Outcome {
    let suspicion = Suspicion {
        kind: FindingKind::HostCrash,
        site: (symbol, violation.rule.id),
        tensor: 0,
        message: format!("{symbol}: {violation}"),
    };
    report_suspicion(check(), code, suspicion)
}
