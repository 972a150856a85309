//! New values among earlier ones that share their scales.

use std::collections::BTreeMap;
use std::ops::Range;

use super::mxfp8::{GROUP, PAIR, SharedScale};

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
            let (block, place) = (slot / block_size, slot % block_size);
            let rows = all.entry((block, place / PAIR)).or_default();
            rows.push((row, place % PAIR));
        }
        let pairs = all.into_iter().map(|((block, pair), mut rows)| {
            rows.sort_unstable_by_key(|(_, place)| *place);
            // Each pair has a row.
            let (first, last) = (rows[0].1, rows[rows.len() - 1].1);
            Self { block, pair, places: first - first % GROUP..last + 1, rows }
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
        for group in 0..2 {
            let places = group * GROUP..(group + 1) * GROUP;
            let rows = self.rows.iter().filter(|(_, place)| places.contains(place));
            let rows: Vec<_> = rows.map(|(row, place)| (new_row(*row), place - places.start)).collect();
            if rows.is_empty() {
                continue;
            }
            let from = places.start - self.places.start;
            let shared_scales = shared_scales.iter_mut().skip(group).step_by(2);
            for (element, shared_scale) in shared_scales.enumerate() {
                let column = stored.iter_mut().skip(element).step_by(dim);
                let mut column: Vec<_> = column.skip(from).take(GROUP).collect();
                let old = SharedScale(*shared_scale);
                let mut numbers: Vec<f64> = column.iter().map(|bits| old.load(**bits)).collect();
                for (row, place) in &rows {
                    numbers[*place] = f64::from(row[element]);
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
        let slots = [Some(70), Some(71), None, Some(127), Some(128), Some(640), Some(512)];
        let pairs = ValuePair::all(&slots, 512);
        let want =
            |block, pair, rows: &[(usize, usize)], places| ValuePair { block, pair, rows: rows.to_vec(), places };
        let wanted = [
            want(0, 1, &[(0, 6), (1, 7), (3, 63)], 0..64),
            want(0, 2, &[(4, 0)], 0..1),
            want(1, 0, &[(6, 0)], 0..1),
            want(1, 2, &[(5, 0)], 0..1),
        ];
        assert_eq!(pairs, wanted);
        assert_eq!(pairs.iter().map(ValuePair::is_shared).collect::<Vec<_>>(), [true, false, false, false]);
        let second = ValuePair::all(&[Some(33), Some(34)], 512);
        assert_eq!(second[0].places, 32..35);
        assert!(second[0].is_shared());
        assert!(ValuePair::all(&[None, None], 512).is_empty());
    }
}
