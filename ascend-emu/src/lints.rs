//! Lints: arguments that an operator takes and then ignores, misreads or overruns. They are reported to programs that
//! did not check their calls against the contract.
//!
//! The safe layer checks each call for lints itself, so that calls through [`functions`](crate::functions) report
//! none unless `ASCEND_EMU_LINTS` asks for them. Programs in C and Python check nothing: the shared library turns
//! [reports](report_lints) on.

use crate::config::{Check, Lints, check, config};
use crate::lock::Lock;
use crate::status::{ACLNN_INNER, Outcome, failure, warn};
use ascend_spec::Violation;
use std::collections::BTreeMap;
use std::hash::{DefaultHasher, Hash as _, Hasher as _};
use std::sync::atomic::{AtomicBool, Ordering};

/// Largest number of sites that are reported for one lint of an operator. A loop may call with other shapes each
/// time.
const MOST_SITES: usize = 8;

/// The sites that were reported, by operator and lint; a site is a hash of the tensors' descriptions.
static REPORTED: Lock<BTreeMap<(&str, &str), Vec<u64>>> = Lock::new(BTreeMap::new());

/// Whether lints are reported if `ASCEND_EMU_LINTS` is not set.
static REPORTS: AtomicBool = AtomicBool::new(false);

/// Reports lints on stderr from now on, unless `ASCEND_EMU_LINTS` is set: for programs that do not check their calls
/// against the contract.
pub fn report_lints() {
    REPORTS.store(true, Ordering::Relaxed);
}

/// How lints are treated: as `ASCEND_EMU_LINTS` sets it, otherwise as [`report_lints`] has chosen.
pub(crate) fn mode() -> Lints {
    config()
        .lints
        .unwrap_or_else(|| match REPORTS.load(Ordering::Relaxed) {
            true => Lints::Warn,
            false => Lints::Off,
        })
}

/// Reports a lint that a call breaks, once for each description of its tensors, which `tensors` writes.
///
/// # Errors
/// The lint, where lints are errors. A lint by which the device may access memory outside of the tensors is also an
/// error where checks are strict.
pub(crate) fn report(
    symbol: &'static str,
    tensors: impl FnOnce() -> String,
    lint: &Violation,
) -> Outcome {
    let mode = mode();
    if mode == Lints::Off {
        return Ok(());
    }
    let (rule, tensors) = (lint.rule, tensors());
    let reach = match rule.overruns {
        true => format!("; the device may leave the tensors: {}", rule.reach),
        false => String::new(),
    };
    let text = format!("{symbol}: {lint}{reach}; the call's tensors: {tensors}");
    if mode == Lints::Error || (rule.overruns && check() == Check::Strict) {
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
