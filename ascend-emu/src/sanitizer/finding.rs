//! Findings: misuse to which hardware reacts with wrong numbers or not at all.

use crate::config::Check;
use crate::fault;
use crate::lock::Lock;
use crate::status::{Failure, Outcome, warn};
use std::collections::{BTreeMap, HashMap};
use std::fmt;

/// Kinds of misuse.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[non_exhaustive]
pub enum FindingKind {
    /// Memory was freed while queued work uses it, or without a synchronisation after that work.
    FreeInUse,
    /// Work refers to memory that was freed.
    UseAfterFree,
    /// Work or a copy reaches past the end of an allocation.
    OutOfBounds,
    /// The host reads or writes memory that queued work uses, without a synchronisation in between.
    HostRace,
    /// Two streams use the same bytes, at least one writing, without an event in between.
    StreamRace,
    /// An asynchronous copy with host memory that is not pinned.
    PageableCopy,
    /// An operator reads rows of a paged cache, or a whole tensor, that nothing has written since the memory was
    /// handed out.
    UnwrittenRead,
    /// A copy takes memory to the host of which nothing has written a byte since it was handed out.
    UnwrittenCopy,
    /// A block table names a block that the cache does not have.
    BlockTable,
    /// A row of a block table names a block twice.
    RepeatedBlock,
    /// A position bias holds an infinity.
    InfiniteBias,
    /// A mask hides from each row its own key and all keys before it, and so every key from the last row, like a
    /// causal mask whose sense is inverted.
    HiddenRow,
    /// Softmax statistics are read in another memory order than they were written in.
    SoftmaxOrder,
    /// A slot mapping names a slot that the cache does not have.
    SlotOutOfRange,
    /// A slot mapping names a slot twice.
    DuplicateSlot,
    /// A merge gets a row without keys in either part, which makes the row, or its next merge, NaN.
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
    /// Whether results after the finding are meaningless. A finding about a wait for something other than work leaves
    /// them right.
    fn spoils_results(self) -> bool {
        !matches!(
            self,
            FindingKind::PageableCopy
                | FindingKind::UnwrittenCopy
                | FindingKind::InfiniteBias
                | FindingKind::UnrecordedEvent
                | FindingKind::StalledReplay
                | FindingKind::Leak
        )
    }

    /// Whether it is a warning in either mode, because right programs may do it.
    fn only_warns(self) -> bool {
        matches!(
            self,
            FindingKind::PageableCopy | FindingKind::UnwrittenCopy | FindingKind::InfiniteBias
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
            FindingKind::UnwrittenRead => "read of unwritten memory",
            FindingKind::UnwrittenCopy => "copy of unwritten memory",
            FindingKind::BlockTable => "block out of range",
            FindingKind::RepeatedBlock => "block named twice",
            FindingKind::InfiniteBias => "infinity in a position bias",
            FindingKind::HiddenRow => "row whose every key is hidden",
            FindingKind::SoftmaxOrder => "softmax statistics in another order",
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
        let kinds: Vec<String> = kinds
            .map(|(kind, count)| format!("{kind} ({count})"))
            .collect();
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
    LOG.lock()
        .as_ref()
        .map(|log| log.kept.clone())
        .unwrap_or_default()
}

/// Keeps a finding. In compat mode, and for warnings, stderr names it once for each kind, site and tensor, and the
/// call goes on; in strict mode the call fails with `code`.
pub(crate) fn report(check: Check, code: i32, suspicion: Suspicion) -> Outcome {
    let Suspicion {
        kind,
        site,
        tensor,
        message,
    } = suspicion;
    let check = if kind.only_warns() {
        Check::Compat
    } else {
        check
    };
    let finding = Finding { kind, message };
    let text = finding.to_string();
    let (first, last) = {
        let mut log = LOG.lock();
        log.get_or_insert_default().add(finding, site, tensor)
    };
    match check {
        Check::Strict => {
            if kind.spoils_results() {
                fault::fail_device(&text);
            }
            Err(Failure::new(code, text))
        }
        Check::Compat => {
            if first {
                let further = match last {
                    true => format!(
                        "; of further tensors at {}, {} it is counted, not named",
                        site.0, site.1
                    ),
                    false => String::new(),
                };
                warn(format_args!("{text}{further}"));
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_warm_up_hides_nothing_and_the_rest_is_counted() {
        let mut log = Log::default();
        let mut add = |kind, what: &'static str, tensor| {
            let message = format!("{what} at {tensor}");
            log.add(
                Finding { kind, message },
                ("aclnnScatterPaKvCache", what),
                tensor,
            )
        };
        assert_eq!(
            add(FindingKind::DuplicateSlot, "slotMapping", 1),
            (true, false)
        );
        assert_eq!(
            add(FindingKind::DuplicateSlot, "slotMapping", 1),
            (false, false)
        );
        assert_eq!(
            add(FindingKind::DuplicateSlot, "slotMapping", 2),
            (true, false)
        );
        assert_eq!(
            add(FindingKind::StreamRace, "slotMapping", 1),
            (true, false)
        );
        assert_eq!(
            add(FindingKind::DuplicateSlot, "keyCache", 1),
            (true, false)
        );
        for tensor in 3..NAMED {
            assert_eq!(
                add(FindingKind::DuplicateSlot, "slotMapping", tensor),
                (true, false)
            );
        }
        assert_eq!(
            add(FindingKind::DuplicateSlot, "slotMapping", NAMED),
            (true, true)
        );
        assert_eq!(
            add(FindingKind::DuplicateSlot, "slotMapping", NAMED + 1),
            (false, false)
        );
        let total = log.total().unwrap();
        let kinds = "race between streams (1), slot named twice (19)";
        assert_eq!(total, format!("20 findings in this process: {kinds}"));
        assert_eq!(Log::default().total(), None);
    }
}
