//! Findings: misuse that hardware would answer with wrong numbers or not at all.

use crate::config::Check;
use crate::failed_device;
use crate::lock::Lock;
use crate::status::{Failure, Outcome};
use std::collections::HashSet;
use std::fmt;

/// Kinds of misuse.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[non_exhaustive]
pub enum FindingKind {
    /// Memory was freed while queued work uses it, or without a synchronisation after that work.
    FreeInUse,
    /// Work names memory that was freed.
    UseAfterFree,
    /// Work or a copy reaches past the end of an allocation.
    OutOfBounds,
    /// The host reads or writes memory that queued work uses, without a synchronisation in between.
    HostRace,
    /// Two streams use the same bytes, at least one writing, without an event in between.
    StreamRace,
    /// An asynchronous copy with host memory that is not pinned.
    PageableCopy,
    /// A block table names a block that the cache does not have.
    BlockTable,
    /// A slot mapping names a slot that the cache does not have.
    SlotOutOfRange,
    /// A slot mapping names a slot twice.
    DuplicateSlot,
    /// A merge is given a row without keys in either part, of which it or the next merge makes NaN.
    EmptyRow,
    /// A synchronisation with an event that was never recorded.
    UnrecordedEvent,
    /// The host waits for a replayed graph, which waits for an event that nothing queued will record.
    StalledReplay,
    /// A device was reset while memory on it was still allocated.
    Leak,
    /// A call with which the operator ends the host process, by a division by zero or through a wrong pointer.
    HostCrash,
}

impl FindingKind {
    /// Whether results behind the finding mean nothing. A wait that tells of something else than work leaves them right.
    fn spoils_results(self) -> bool {
        !matches!(
            self,
            FindingKind::PageableCopy
                | FindingKind::UnrecordedEvent
                | FindingKind::StalledReplay
                | FindingKind::Leak
        )
    }

    fn name(self) -> &'static str {
        match self {
            FindingKind::FreeInUse => "memory freed while in use",
            FindingKind::UseAfterFree => "use after free",
            FindingKind::OutOfBounds => "out of bounds",
            FindingKind::HostRace => "host access without synchronisation",
            FindingKind::StreamRace => "race between streams",
            FindingKind::PageableCopy => "asynchronous copy with pageable host memory",
            FindingKind::BlockTable => "block out of range",
            FindingKind::SlotOutOfRange => "slot out of range",
            FindingKind::DuplicateSlot => "slot named twice",
            FindingKind::EmptyRow => "row without keys in a merge",
            FindingKind::UnrecordedEvent => "event never recorded",
            FindingKind::StalledReplay => "replay that waits for ever",
            FindingKind::Leak => "memory leaked",
            FindingKind::HostCrash => "end of the host process",
        }
    }
}

impl fmt::Display for FindingKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// One misuse.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Finding {
    /// What kind.
    pub kind: FindingKind,
    /// Which operator or function, which of its arguments, which addresses.
    pub message: String,
}

impl fmt::Display for Finding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.kind, self.message)
    }
}

/// The operator or function of a finding, and its argument.
pub(crate) type Site = (&'static str, &'static str);

/// A finding not reported yet.
#[derive(Debug)]
pub(crate) struct Suspicion {
    pub kind: FindingKind,
    pub site: Site,
    pub message: String,
}

/// The most findings that are kept for [`findings`]; later ones are dropped.
const KEPT: usize = 4096;

#[derive(Default)]
struct Log {
    kept: Vec<Finding>,
    /// The kinds and sites that stderr has named.
    told: HashSet<(FindingKind, Site)>,
}

static LOG: Lock<Option<Log>> = Lock::new(None);

/// The findings of this process so far, the oldest first.
pub fn findings() -> Vec<Finding> {
    LOG.lock()
        .as_ref()
        .map(|log| log.kept.clone())
        .unwrap_or_default()
}

/// Keeps a finding. In compat mode stderr names it once for each kind and site, and the call goes on; in strict mode the
/// call fails with `code`.
pub(crate) fn report(check: Check, code: i32, suspicion: Suspicion) -> Outcome {
    let Suspicion {
        kind,
        site,
        message,
    } = suspicion;
    let finding = Finding { kind, message };
    let text = finding.to_string();
    let first = {
        let mut log = LOG.lock();
        let log = log.get_or_insert_default();
        if log.kept.len() < KEPT {
            log.kept.push(finding);
        }
        log.told.insert((kind, site))
    };
    match check {
        Check::Strict => {
            if kind.spoils_results() {
                failed_device::fail(&text);
            }
            Err(Failure::new(code, text))
        }
        Check::Compat => {
            if first {
                eprintln!("ascend-emu: {text}");
            }
            Ok(())
        }
    }
}

/// Keeps several findings. In strict mode the call fails with the first one.
pub(crate) fn report_all(
    check: Check,
    code: i32,
    suspicions: impl IntoIterator<Item = Suspicion>,
) -> Outcome {
    let mut outcome = Ok(());
    for suspicion in suspicions {
        let reported = report(check, code, suspicion);
        if outcome.is_ok() {
            outcome = reported;
        }
    }
    outcome
}
