//! New values among earlier ones that share their scales.

use std::collections::BTreeMap;
use std::ops::Range;

use super::mxfp8::{GROUP, SharedScale};

/// Number of tokens in two groups, whose shared scales are adjacent.
pub(super) const PAIR: usize = 2 * GROUP;

/// New values in 64 neighbouring places of a block, whose shared scales are stored in pairs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct ValuePair {
    pub(super) block: usize,
    /// The index of the pair in the block.
    pub(super) pair: usize,
    /// The step's rows, and their places in the pair, in order.
    pub(super) rows: Vec<(usize, usize)>,
    /// Places from the first group with a new row up to the last new row.
    pub(super) places: Range<usize>,
}

impl ValuePair {
    /// The pairs of rows with these slots.
    pub(super) fn all(slots: &[Option<usize>], block_size: usize) -> Vec<Self> {
        let mut all = BTreeMap::<_, Vec<_>>::new();
        for (row, slot) in slots.iter().enumerate() {
            let Some(slot) = slot else { continue };
            let block = slot.checked_div(block_size).unwrap_or(0);
            let place = slot.checked_rem(block_size).unwrap_or(0);
            let of = all.entry((block, place / PAIR)).or_default();
            of.push((row, place % PAIR));
        }
        let pairs = all.into_iter().map(|((block, pair), mut rows)| {
            rows.sort_unstable_by_key(|(_, place)| *place);
            let ends = [rows.first(), rows.last()];
            let [first, last] = ends.map(|of| of.map_or(0, |(_, place)| *place));
            Self {
                block,
                pair,
                places: first.saturating_sub(first % GROUP)..last.saturating_add(1),
                rows,
            }
        });
        pairs.collect()
    }

    /// Whether places before new rows have cached values, which share scales with the new ones.
    pub(super) fn is_shared(&self) -> bool {
        self.places.len() > self.rows.len()
    }

    /// Inserts new values of one head among the stored ones, `[places, D]`, quantises their groups anew, and updates
    /// the shared scales `[D, 2]`.
    pub(super) fn requantise<'a>(
        &self,
        dim: usize,
        new_row: impl Fn(usize) -> &'a [f32],
        stored: &mut [u8],
        shared_scales: &mut [u8],
    ) {
        for group in 0..2usize {
            let places = group.saturating_mul(GROUP)..group.saturating_add(1).saturating_mul(GROUP);
            let rows = self.rows.iter().filter(|(_, at)| places.contains(at));
            let rows: Vec<_> = rows
                .map(|(row, at)| (new_row(*row), at.saturating_sub(places.start)))
                .collect();
            if rows.is_empty() {
                continue;
            }
            let from = places.start.saturating_sub(self.places.start);
            let shared_scales = shared_scales.iter_mut().skip(group).step_by(2);
            for (element, shared_scale) in shared_scales.enumerate() {
                let column = stored.iter_mut().skip(element).step_by(dim.max(1));
                let mut column: Vec<_> = column.skip(from).take(GROUP).collect();
                let old = SharedScale(*shared_scale);
                let mut numbers: Vec<f64> = column.iter().map(|bits| old.load(**bits)).collect();
                for (row, at) in &rows {
                    if let (Some(number), Some(new)) = (numbers.get_mut(*at), row.get(element)) {
                        *number = f64::from(*new);
                    }
                }
                let new = SharedScale::covering(numbers.iter().copied());
                for (bits, number) in column.iter_mut().zip(numbers) {
                    **bits = new.store(number);
                }
                *shared_scale = new.0;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pairs_are_read_from_the_first_group_with_a_new_row() {
        let slots = [
            Some(70),
            Some(71),
            None,
            Some(127),
            Some(128),
            Some(640),
            Some(512),
        ];
        let pairs = ValuePair::all(&slots, 512);
        let of = |block, pair, rows: &[(usize, usize)], places| ValuePair {
            block,
            pair,
            rows: rows.to_vec(),
            places,
        };
        let want = [
            of(0, 1, &[(0, 6), (1, 7), (3, 63)], 0..64),
            of(0, 2, &[(4, 0)], 0..1),
            of(1, 0, &[(6, 0)], 0..1),
            of(1, 2, &[(5, 0)], 0..1),
        ];
        assert_eq!(pairs, want);
        assert_eq!(
            pairs.iter().map(ValuePair::is_shared).collect::<Vec<_>>(),
            [true, false, false, false]
        );
        let second = ValuePair::all(&[Some(33), Some(34)], 512);
        assert_eq!(second[0].places, 32..35);
        assert!(second[0].is_shared());
        assert!(ValuePair::all(&[None, None], 512).is_empty());
    }
}
