//! Findings: misuse to which hardware reacts with wrong numbers or not at all.

use crate::config::Check;
use crate::fault;
use crate::finding_kind::FindingKind;
use crate::lock::Lock;
use crate::status::{Failure, Outcome, warn};
use std::collections::{BTreeMap, HashMap};
use std::fmt;

/// One misuse.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Finding {
    /// The kind of misuse.
    pub kind: FindingKind,
    /// A text that names the operator or function, its arguments and addresses.
    pub message: String,
}

impl fmt::Display for Finding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.kind, self.message)
    }
}

/// The operator or function of a finding, and its argument.
pub(crate) type Site = (&'static str, &'static str);

/// A finding that was not reported yet.
#[derive(Debug)]
pub(crate) struct Suspicion {
    pub kind: FindingKind,
    pub site: Site,
    /// The address that distinguishes findings of one kind and place: that of the tensor concerned; 0 if there is
    /// none.
    pub tensor: usize,
    pub message: String,
}

/// Largest number of findings that are kept for [`findings`]; later ones are dropped.
const KEPT: usize = 4096;

/// Largest number of tensors that stderr names for one kind and place; findings about others are counted.
const NAMED: usize = 16;

#[derive(Default)]
struct Log {
    kept: Vec<Finding>,
    /// The tensors that stderr has named, by kind and place.
    named: HashMap<(FindingKind, Site), Vec<usize>>,
    /// The number of findings of each kind, whether stderr has named them or not.
    counts: BTreeMap<FindingKind, u64>,
}

impl Log {
    /// Keeps a finding. Returns whether stderr is to name it, and whether it is the last one named of its kind and
    /// place.
    fn add(&mut self, finding: Finding, site: Site, tensor: usize) -> (bool, bool) {
        let kind = finding.kind;
        if self.counts.is_empty() {
            // SAFETY: a function of this library without arguments. If the system refuses it, no total is reported.
            let _ = unsafe { libc::atexit(report_total) };
        }
        *self.counts.entry(kind).or_default() += 1;
        if self.kept.len() < KEPT {
            self.kept.push(finding);
        }
        let named = self.named.entry((kind, site)).or_default();
        let new = named.len() < NAMED && !named.contains(&tensor);
        if new {
            named.push(tensor);
        }
        (new, new && named.len() == NAMED)
    }

    /// The number of findings of each kind; `None` without any.
    fn total(&self) -> Option<String> {
        let kinds = self.counts.iter();
        let kinds: Vec<String> = kinds.map(|(kind, count)| format!("{kind} ({count})")).collect();
        let all: u64 = self.counts.values().sum();
        let findings = if all == 1 { "finding" } else { "findings" };
        (all > 0).then(|| format!("{all} {findings} in this process: {}", kinds.join(", ")))
    }
}

/// Writes the number of findings to stderr at the end of the process.
extern "C" fn report_total() {
    let total = LOG.lock().as_ref().and_then(Log::total);
    if let Some(total) = total.filter(|_| !crate::status::forked()) {
        warn(total);
    }
}

static LOG: Lock<Option<Log>> = Lock::new(None);

/// The findings of this process so far, the oldest first.
pub fn findings() -> Vec<Finding> {
    LOG.lock().as_ref().map(|log| log.kept.clone()).unwrap_or_default()
}

/// Keeps a finding. In compat mode, and for warnings, stderr names it once for each kind, site and tensor, and the
/// call goes on; in strict mode the call fails with `code`. A kind that the mode leaves out is counted, and no more.
pub(crate) fn report(check: Check, code: i32, suspicion: Suspicion) -> Outcome {
    let Suspicion { kind, site, tensor, message } = suspicion;
    let left_out = check.leaves_out(kind);
    let fails = check.is_strict() && !kind.only_warns();
    let finding = Finding { kind, message };
    let text = finding.to_string();
    let (first, last) = {
        let mut log = LOG.lock();
        log.get_or_insert_default().add(finding, site, tensor)
    };
    if left_out {
        return Ok(());
    }
    if fails {
        if kind.spoils_results() {
            fault::fail_device(&text);
        }
        return Err(Failure::new(code, text));
    }
    if first {
        let further = match last {
            true => format!("; of further tensors at {}, {} it is counted, not named", site.0, site.1),
            false => String::new(),
        };
        warn(format_args!("{text}{further}"));
    }
    Ok(())
}

/// Keeps several findings. In strict mode the call fails with the first one.
pub(crate) fn report_all(check: Check, code: i32, suspicions: impl IntoIterator<Item = Suspicion>) -> Outcome {
    let mut outcome = Ok(());
    for suspicion in suspicions {
        let reported = report(check, code, suspicion);
        if outcome.is_ok() {
            outcome = reported;
        }
    }
    outcome
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_warm_up_hides_nothing_and_the_rest_is_counted() {
        let mut log = Log::default();
        let mut add = |kind, what: &'static str, tensor| {
            let message = format!("{what} at {tensor}");
            log.add(Finding { kind, message }, ("aclnnScatterPaKvCache", what), tensor)
        };
        assert_eq!(add(FindingKind::DuplicateSlot, "slotMapping", 1), (true, false));
        assert_eq!(add(FindingKind::DuplicateSlot, "slotMapping", 1), (false, false));
        assert_eq!(add(FindingKind::DuplicateSlot, "slotMapping", 2), (true, false));
        assert_eq!(add(FindingKind::StreamRace, "slotMapping", 1), (true, false));
        assert_eq!(add(FindingKind::DuplicateSlot, "keyCache", 1), (true, false));
        for tensor in 3..NAMED {
            assert_eq!(add(FindingKind::DuplicateSlot, "slotMapping", tensor), (true, false));
        }
        assert_eq!(add(FindingKind::DuplicateSlot, "slotMapping", NAMED), (true, true));
        assert_eq!(add(FindingKind::DuplicateSlot, "slotMapping", NAMED + 1), (false, false));
        let total = log.total().unwrap();
        let kinds = "race between streams (1), slot named twice (19)";
        assert_eq!(total, format!("20 findings in this process: {kinds}"));
        assert_eq!(Log::default().total(), None);
    }
}
