//! Runs of contiguous rows or slots that one copy moves to contiguous ones.

use std::ops::Range;

/// Contiguous rows or slots that are copied to contiguous ones.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct SlotRun {
    pub(super) from: usize,
    pub(super) to: usize,
    pub(super) len: usize,
}

impl SlotRun {
    /// The range that is copied from.
    pub(super) fn sources(self) -> Range<usize> {
        self.from..self.from.saturating_add(self.len)
    }

    /// The range that is copied to.
    pub(super) fn places(self) -> Range<usize> {
        self.to..self.to.saturating_add(self.len)
    }

    /// Appends a run: it extends the last one if it continues that and `joins` returns true.
    pub(super) fn push(runs: &mut Vec<Self>, next: Self, joins: impl FnOnce(&Self) -> bool) {
        match runs.last_mut() {
            Some(last)
                if last.from.checked_add(last.len) == Some(next.from)
                    && last.to.checked_add(last.len) == Some(next.to)
                    && joins(last) =>
            {
                last.len = last.len.saturating_add(next.len);
            }
            _ => runs.push(next),
        }
    }
}
