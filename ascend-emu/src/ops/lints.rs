//! The lints that a call of an operator breaks.

use super::attention::report_crash;
use crate::config::Lints;
use crate::lints;
use crate::status::{ACLNN_INNER, Outcome};
use ascend_spec::operator::{ArgumentList, DeclaredParameter as _};
use ascend_spec::{Level, TensorDesc, Violation, each_lint};

/// Tells every lint that `each` reports of a checked call. A call of which the operator's host code dies on some hosts, and
/// which others take, is reported whatever becomes of lints.
pub(super) fn tell<A: ArgumentList<Tensor = TensorDesc>>(
    symbol: &'static str,
    arguments: &A,
    each: impl FnOnce(&mut dyn FnMut(Violation)),
) -> Outcome {
    let mut outcome = Ok(());
    each(&mut |lint| {
        if outcome.is_ok() {
            outcome = match lint.rule.level {
                Level::HostCrash => report_crash(symbol, &lint, ACLNN_INNER),
                Level::Lint | Level::Rule => lints::tell(symbol, || tensors(arguments), &lint),
            };
        }
    });
    outcome
}

/// The same of a contract that finds the first lint that is not allowed.
pub(super) fn tell_of<A: ArgumentList<Tensor = TensorDesc>>(
    symbol: &'static str,
    arguments: &A,
    first: impl FnMut(&[&str]) -> Result<(), Violation>,
) -> Outcome {
    if lints::mode() == Lints::Off {
        return Ok(());
    }
    tell(symbol, arguments, |report| each_lint(first, report))
}

fn tensors<A: ArgumentList<Tensor = TensorDesc>>(arguments: &A) -> String {
    let each = arguments.each_tensor();
    let each =
        each.map(|(argument, desc)| format!("{} {desc}", argument.parameter.info().acl_name));
    each.collect::<Vec<_>>().join(", ")
}
