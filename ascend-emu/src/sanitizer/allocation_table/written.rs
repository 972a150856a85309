//! The written bytes of an allocation.

use std::collections::BTreeMap;
use std::ops::{Bound, Range};

/// Largest number of ranges of one allocation. A further range is joined with its neighbour, and the gap between them
/// counts as written: that may lose findings but adds none.
const MOST: usize = 1 << 16;

/// Written bytes, by their offset in the allocation. Ranges that touch are merged, so that a paged cache has about
/// one range for each sequence, and an access takes the time of a few look-ups.
#[derive(Clone, Debug, Default)]
pub(super) struct WrittenBytes {
    /// End of each range by its start; none touches another.
    ranges: BTreeMap<usize, usize>,
}

impl WrittenBytes {
    /// The range that contains an offset, or ends at it.
    fn before(&self, offset: usize) -> Option<(usize, usize)> {
        let (&start, &end) = self.ranges.range(..=offset).next_back()?;
        (offset <= end).then_some((start, end))
    }

    /// Notes that bytes were written.
    pub(super) fn add(&mut self, bytes: Range<usize>) {
        if bytes.is_empty() {
            return;
        }
        let mut joined = self.before(bytes.start);
        if joined.is_some_and(|(_, end)| bytes.end <= end) {
            return;
        }
        let mut until = bytes.end;
        if joined.is_none() && self.ranges.len() >= MOST {
            let below = self.ranges.range(..bytes.start).next_back();
            joined = below.map(|(&start, &end)| (start, end));
            if joined.is_none() {
                let above = self.ranges.range(bytes.end..).next();
                until = above.map_or(bytes.end, |(&start, _)| start);
            }
        }
        let start = joined.map_or(bytes.start, |(start, _)| start);
        let mut end = joined.map_or(until, |(_, end)| end.max(until));
        let above = |end| (Bound::Excluded(start), Bound::Included(end));
        while let Some((&next, &next_end)) = self.ranges.range(above(end)).next() {
            self.ranges.remove(&next);
            end = end.max(next_end);
        }
        self.ranges.insert(start, end);
    }

    /// Notes that bytes are unwritten again.
    pub(super) fn remove(&mut self, bytes: Range<usize>) {
        while let Some((&start, &end)) = self.ranges.range(..bytes.end).next_back()
            && end > bytes.start
            && !bytes.is_empty()
        {
            self.ranges.remove(&start);
            if end > bytes.end {
                self.ranges.insert(bytes.end, end);
            }
            if start < bytes.start {
                self.ranges.insert(start, bytes.start);
            }
        }
    }

    /// The first unwritten bytes among these.
    pub(super) fn first_gap(&self, bytes: Range<usize>) -> Option<Range<usize>> {
        let start = match self.ranges.range(..=bytes.start).next_back() {
            Some((_, &end)) => bytes.start.max(end),
            None => bytes.start,
        };
        if start >= bytes.end {
            return None;
        }
        let next = self.ranges.range(start..bytes.end).next();
        Some(start..next.map_or(bytes.end, |(&next, _)| next))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn gaps(written: &WrittenBytes, bytes: Range<usize>) -> Vec<Range<usize>> {
        let mut gaps = Vec::new();
        let mut start = bytes.start;
        while let Some(gap) = written.first_gap(start..bytes.end) {
            start = gap.end;
            gaps.push(gap);
        }
        gaps
    }

    #[test]
    fn tokens_one_after_another_are_one_range() {
        let mut written = WrittenBytes::default();
        for token in 0..100 {
            written.add(1000 + token * 32..1000 + (token + 1) * 32);
        }
        assert_eq!(written.ranges.len(), 1);
        assert_eq!(gaps(&written, 0..5000), [0..1000, 4200..5000]);
    }

    #[test]
    fn ranges_are_bounded_and_gaps_are_forgotten_first() {
        let mut written = WrittenBytes::default();
        for at in 0..MOST + 1000 {
            written.add(at * 10..at * 10 + 1);
        }
        assert_eq!(written.ranges.len(), MOST);
        assert!(written.first_gap(MOST * 10 - 9..(MOST + 999) * 10).is_none());
        assert_eq!(written.first_gap(5..15), Some(5..10));
        // From high to low as well.
        let mut written = WrittenBytes::default();
        for at in (0..MOST + 1000).rev() {
            written.add(at * 10..at * 10 + 1);
        }
        assert_eq!(written.ranges.len(), MOST);
        assert!(written.first_gap(0..1000 * 10).is_none());
    }

    proptest! {
        #[test]
        fn ranges_say_what_a_bitmap_says(
            steps in prop::collection::vec((any::<bool>(), 0..64usize, 0..20usize), 1..60),
        ) {
            let mut written = WrittenBytes::default();
            let mut bytes = [false; 96];
            for (add, start, len) in steps {
                let range = start..start + len;
                bytes[range.clone()].fill(add);
                match add {
                    true => written.add(range),
                    false => written.remove(range),
                }
                let ends: Vec<_> = written.ranges.iter().collect();
                prop_assert!(ends.windows(2).all(|pair| pair[0].1 < pair[1].0), "{:?}", ends);
            }
            let all = gaps(&written, 0..96);
            for (at, &is_written) in bytes.iter().enumerate() {
                prop_assert_eq!(is_written, !all.iter().any(|gap| gap.contains(&at)));
            }
        }
    }
}
