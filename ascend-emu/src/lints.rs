//! Lints: what an operator takes and then ignores, misreads or overruns, told to programs that did not ask the contract.
//!
//! The safe layer asks before each call, so that calls by way of [`functions`](crate::functions) are told nothing unless
//! `ASCEND_EMU_LINTS` says so. Programs in C and Python ask nobody: the shared library [tells](tell_lints) them.

use crate::config::{Check, Lints, check, config};
use crate::lock::Lock;
use crate::status::{ACLNN_INNER, Outcome, failure};
use ascend_spec::Violation;
use std::collections::BTreeMap;
use std::hash::{DefaultHasher, Hash as _, Hasher as _};
use std::sync::atomic::{AtomicBool, Ordering};

/// Call sites that are told of one lint of an operator. Loops call with other shapes each time.
const MOST_SITES: usize = 8;

/// What lints have been told: of an operator and a lint, hashes of the tensors' descriptions.
static TOLD: Lock<BTreeMap<(&str, &str), Vec<u64>>> = Lock::new(BTreeMap::new());

static UNASKED: AtomicBool = AtomicBool::new(false);

/// Tells lints on stderr from now on, unless `ASCEND_EMU_LINTS` says otherwise: the program's calls come from somebody who
/// does not ask the contract before.
pub fn tell_lints() {
    UNASKED.store(true, Ordering::Relaxed);
}

/// What becomes of lints.
pub(crate) fn mode() -> Lints {
    config()
        .lints
        .unwrap_or_else(|| match UNASKED.load(Ordering::Relaxed) {
            true => Lints::Warn,
            false => Lints::Off,
        })
}

/// Tells a lint that a call breaks, once for each description of tensors, of which `tensors` is the text.
///
/// # Errors
/// The lint, where lints are errors; one by which the device may leave the tensors also where checks are strict.
pub(crate) fn tell(
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
    let mut told = TOLD.lock();
    let sites = told.entry((symbol, rule.id)).or_default();
    if sites.len() < MOST_SITES && !sites.contains(&site) {
        sites.push(site);
        let rest = match sites.len() {
            MOST_SITES => "; this lint is told no more for other tensors",
            _ => "",
        };
        eprintln!("ascend-emu: lint: {text}{rest}");
    }
    Ok(())
}
