//! Lints: arguments that an operator takes and then ignores, misreads or overruns. They are reported to programs that
//! did not check their calls against the contract. Calls that end the host process are reported here as well.
//!
//! The safe layer checks each call for lints itself, so that calls through [`functions`](crate::functions) report
//! none unless `ASCEND_EMU_LINTS` asks for them. Programs in C and Python check nothing: the shared library turns
//! [reports](report_lints) on.

use crate::config::{Lints, check, config};
use crate::finding_kind::FindingKind;
use crate::lock::Lock;
use crate::sanitizer::{self, Suspicion};
use crate::status::{ACLNN_INNER, Failure, Outcome, failure, warn};
use ascend_spec::operator::{ArgumentList, DeclaredParameter as _};
use ascend_spec::{Level, TensorDesc, Violation, each_lint};
use std::collections::BTreeMap;
use std::hash::{DefaultHasher, Hash as _, Hasher as _};
use std::sync::atomic::{AtomicBool, Ordering};

/// Largest number of sites that are reported for one lint of an operator. A loop may call with other shapes each
/// time.
const MOST_SITES: usize = 8;

/// The sites that were reported, by operator and lint; a site is a hash of the tensors' descriptions. A deprecated
/// version has one site.
static REPORTED: Lock<BTreeMap<(&str, &str), Vec<u64>>> = Lock::new(BTreeMap::new());

/// Whether lints are reported if `ASCEND_EMU_LINTS` is not set.
static REPORTS: AtomicBool = AtomicBool::new(false);

/// Reports lints on stderr from now on, unless `ASCEND_EMU_LINTS` is set: for programs that do not check their calls
/// against the contract.
pub fn report_lints() {
    REPORTS.store(true, Ordering::Relaxed);
}

/// How lints are treated: as `ASCEND_EMU_LINTS` sets it, otherwise as [`report_lints`] has chosen.
fn mode() -> Lints {
    config().lints.unwrap_or_else(|| match REPORTS.load(Ordering::Relaxed) {
        true => Lints::Warn,
        false => Lints::Off,
    })
}

/// Reports a lint that a call breaks, once for each description of its tensors, and that its version is deprecated once
/// for all calls: that is no fault of any of them.
///
/// # Errors
/// The lint, where lints are errors, unless it is a deprecation. A lint by which the device may access memory outside
/// of the tensors is also an error where checks are strict.
fn report_lint<A: ArgumentList<Tensor = TensorDesc>>(symbol: &'static str, arguments: &A, lint: &Violation) -> Outcome {
    let mode = mode();
    if mode == Lints::Off {
        return Ok(());
    }
    let rule = lint.rule;
    let tensors = match rule.is_deprecation() {
        true => String::new(),
        false => format!("; the call's tensors: {}", tensors(arguments)),
    };
    let reach = match rule.overruns {
        true => format!("; the device may leave the tensors: {}", rule.reach),
        false => String::new(),
    };
    let text = format!("{symbol}: {lint}{reach}{tensors}");
    let is_error = mode == Lints::Error && !rule.is_deprecation();
    if is_error || (rule.overruns && check().is_strict()) {
        return Err(failure!(ACLNN_INNER, "{text}"));
    }
    let mut hasher = DefaultHasher::new();
    tensors.hash(&mut hasher);
    let site = hasher.finish();
    let mut reported = REPORTED.lock();
    let sites = reported.entry((symbol, rule.id)).or_default();
    if sites.len() < MOST_SITES && !sites.contains(&site) {
        sites.push(site);
        let rest = match sites.len() {
            MOST_SITES => "; this lint is not reported again for other tensors",
            _ => "",
        };
        warn(format_args!("lint: {text}{rest}"));
    }
    Ok(())
}

/// Reports every lint that `each` finds in a checked call. A call that crashes the operator's host code on some hosts
/// is reported in every mode of lints.
pub(crate) fn report<A: ArgumentList<Tensor = TensorDesc>>(
    symbol: &'static str,
    arguments: &A,
    each: impl FnOnce(&mut dyn FnMut(Violation)),
) -> Outcome {
    let mut outcome = Ok(());
    each(&mut |lint| {
        if outcome.is_ok() {
            outcome = match lint.rule.level {
                Level::HostCrash => report_crash(symbol, &lint, ACLNN_INNER),
                _ => report_lint(symbol, arguments, &lint),
            };
        }
    });
    outcome
}

/// Reports every lint of a call whose contract returns the first one that is not in a list of allowed ones.
pub(crate) fn report_first<A: ArgumentList<Tensor = TensorDesc>>(
    symbol: &'static str,
    arguments: &A,
    first: impl FnMut(&[&str]) -> Result<(), Violation>,
) -> Outcome {
    if mode() == Lints::Off {
        return Ok(());
    }
    report(symbol, arguments, |lint| each_lint(first, lint))
}

fn tensors<A: ArgumentList<Tensor = TensorDesc>>(arguments: &A) -> String {
    let each = arguments.each_tensor();
    let each = each.map(|(argument, desc)| format!("{} {desc}", argument.parameter.info().acl_name));
    each.collect::<Vec<_>>().join(", ")
}

/// The failure of a call that the contract refuses; a crash is reported as well.
pub(crate) fn refused(symbol: &'static str, refusal: Violation) -> Failure {
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
    sanitizer::report(check(), code, suspicion)
}
