//! The visible keys of one row as a short list of runs.

use std::ops::Range;

/// Runs of keys that a row of a [`MaskGeometry`](super::MaskGeometry) sees: ascending, not empty, and with a hidden key
/// between any two of them.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Runs {
    runs: [Range<u64>; Runs::MAX],
    first: usize,
    end: usize,
}

impl Runs {
    /// Most runs of a row.
    pub const MAX: usize = 3;

    /// Adds a run that does not begin before the last one, and joins the two if no key lies between them.
    fn push(&mut self, run: Range<u64>) {
        if run.is_empty() {
            return;
        }
        if let Some(last) = self.runs[..self.end].last_mut()
            && run.start <= last.end
        {
            last.end = last.end.max(run.end);
        } else if let Some(place) = self.runs.get_mut(self.end) {
            *place = run;
            self.end += 1;
        }
    }

    /// This list from runs in any order, some of which may be empty.
    pub(super) fn of(mut runs: [Range<u64>; Runs::MAX]) -> Self {
        runs.sort_unstable_by_key(|run| run.start);
        let mut sorted = Runs::default();
        for run in runs {
            sorted.push(run);
        }
        sorted
    }
}

impl Iterator for Runs {
    type Item = Range<u64>;

    fn next(&mut self) -> Option<Range<u64>> {
        let run = self.runs[..self.end].get(self.first)?.clone();
        self.first += 1;
        Some(run)
    }

    fn size_hint(&self) -> (usize, Option<usize>) {
        let left = self.end - self.first;
        (left, Some(left))
    }
}

impl ExactSizeIterator for Runs {}
