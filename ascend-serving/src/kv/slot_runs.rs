//! Rows or slots that follow each other and go where others do: what one copy takes.

use std::ops::Range;

/// Rows or slots behind each other that go to others behind each other.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct SlotRun {
    pub(super) from: usize,
    pub(super) to: usize,
    pub(super) len: usize,
}

impl SlotRun {
    /// What is copied.
    pub(super) fn sources(self) -> Range<usize> {
        self.from..self.from.saturating_add(self.len)
    }

    /// Where to.
    pub(super) fn places(self) -> Range<usize> {
        self.to..self.to.saturating_add(self.len)
    }

    /// Adds a run behind others: to the last one if it continues that and `joins` says so.
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
