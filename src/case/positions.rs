//! Comparison of chosen positions, whose order within a row is free: elements are paired by position first.

use std::collections::BTreeMap;

use super::CaseTensor;

/// An expected position that says "not specified": integers have no NaN.
const UNSPECIFIED: i64 = i32::MIN as i64;

/// For each element of an output of chosen positions, the computed one that it is compared with.
///
/// Where a row expects `m` positions, its first `m` computed elements may be these in any order; -1 follows. An element
/// whose position was not computed is paired with one that was not expected.
pub(super) struct Pairs {
    shape: Vec<usize>,
    pairs: Vec<usize>,
}

impl Pairs {
    /// Pairs the elements of two tensors of INT32; `None` for other types, and for different shapes.
    pub(super) fn new(got: &CaseTensor, want: &CaseTensor) -> Option<Self> {
        let columns = want.shape().last().copied().filter(|&columns| columns > 0)?;
        if got.shape() != want.shape() {
            return None;
        }
        let shape = want.shape().to_vec();
        let (got, want) = (got.to_i64()?, want.to_i64()?);
        let mut pairs = Vec::with_capacity(want.len());
        let rows = got.chunks(columns).zip(want.chunks(columns));
        for (first, (got, want)) in (0..).step_by(columns).zip(rows) {
            let expected = want.iter().filter(|&&position| position >= 0).count();
            let mut computed: BTreeMap<i64, Vec<usize>> = BTreeMap::new();
            for (place, &position) in got.iter().enumerate().take(expected) {
                computed.entry(position).or_default().push(place);
            }
            let mut found = |position| computed.get_mut(position).and_then(Vec::pop);
            let found: Vec<_> = want[..expected].iter().map(&mut found).collect();
            let mut others = computed.into_values().flatten();
            let found = found.into_iter().filter_map(|place| place.or_else(|| others.next()));
            pairs.extend(found.chain(expected..columns).map(|place| first + place));
        }
        Some(Self { shape, pairs })
    }

    /// The elements of a computed output of the same shape, in the order of the expected ones.
    pub(super) fn arrange<T: Copy>(&self, shape: &[usize], elements: Vec<T>) -> Vec<T> {
        match shape == self.shape {
            true => self.pairs.iter().map(|&place| elements[place]).collect(),
            false => elements,
        }
    }
}

/// Computed and expected positions as numbers, which are equal where the positions are.
pub(super) fn numbers(got: &[i64], want: &[i64]) -> (Vec<f32>, Vec<f32>) {
    let number = |(&got, &want): (&i64, &i64)| {
        let rounded = [got as f32, want as f32];
        match (want, got == want) {
            (UNSPECIFIED, _) => (rounded[0], f32::NAN),
            (_, false) if rounded[0] == rounded[1] => (f32::INFINITY, rounded[1]),
            _ => (rounded[0], rounded[1]),
        }
    };
    got.iter().zip(want).map(number).unzip()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::DType;

    fn positions(rows: &[[i32; 4]]) -> CaseTensor {
        let bytes = rows.iter().flatten().flat_map(|position| position.to_le_bytes());
        CaseTensor::new(DType::Int32, &[rows.len(), 4], bytes.collect()).unwrap()
    }

    #[test]
    fn rows_are_compared_as_sets_and_wrong_ones_differ() {
        let want = positions(&[[5, 2, 9, -1], [1, 2, 3, 4], [-1, -1, -1, -1]]);
        let differences = |got: &CaseTensor| -> Vec<usize> {
            let pairs = Pairs::new(got, &want).unwrap();
            let got = pairs.arrange(got.shape(), got.to_i64().unwrap());
            let (got, want) = numbers(&got, &want.to_i64().unwrap());
            let rows = got.chunks(4).zip(want.chunks(4));
            rows.map(|(got, want)| got.iter().zip(want).filter(|(a, b)| a != b).count()).collect()
        };
        let ordered = positions(&[[9, 5, 2, -1], [4, 3, 2, 1], [-1, -1, -1, -1]]);
        assert_eq!(differences(&ordered), [0, 0, 0]);
        // A position twice, one that was not chosen and one after the last.
        let wrong = positions(&[[9, 9, 2, -1], [4, 3, 2, 7], [-1, -1, -1, 0]]);
        assert_eq!(differences(&wrong), [1, 1, 1]);
        // A gap before the last position counts for it and for what is behind.
        let gap = positions(&[[9, 5, -1, 2], [1, 2, 3, 4], [-1, -1, -1, -1]]);
        assert_eq!(differences(&gap), [2, 0, 0]);
        assert!(Pairs::new(&positions(&[[0; 4]]), &want).is_none());
    }

    #[test]
    fn large_positions_are_told_apart_and_some_are_not_specified() {
        let (got, want) = numbers(&[16_777_217, 16_777_217, 7], &[16_777_216, 16_777_217, UNSPECIFIED]);
        assert!(got[0] != want[0] && got[1] == want[1] && want[2].is_nan());
    }
}
