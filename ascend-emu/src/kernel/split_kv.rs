//! Split-KV: combines the partial results of a query block whose keys are split among tasks, as in flash decoding.
//!
//! Two partial results with running maxima `m1` and `m2` combine into one with the maximum `m = max(m1, m2)`; sums
//! and outputs are rescaled by `2^(m1 - m)` and `2^(m2 - m)` and added. They are combined in the order of their keys,
//! whichever arrives first, so that the result does not depend on the threads' timing.

use super::online_softmax::{OnlineSoftmax, rescale_factor};
use super::simd::Vector;
use std::sync::{Mutex, PoisonError};

/// The partial result of some keys: an [`OnlineSoftmax`] with memory of its own.
#[derive(Debug)]
pub(super) struct PartialResult {
    max: Vec<f32>,
    sum: Vec<f32>,
    out: Vec<Vector>,
}

impl PartialResult {
    fn of(softmax: &OnlineSoftmax<'_>) -> Self {
        PartialResult { max: softmax.max.to_vec(), sum: softmax.sum.to_vec(), out: softmax.out.to_vec() }
    }

    /// The online softmax of the keys.
    pub(super) fn softmax(&mut self) -> OnlineSoftmax<'_> {
        OnlineSoftmax { max: &mut self.max, sum: &mut self.sum, out: &mut self.out }
    }

    /// Combines the result with that of other keys: rescales both to the larger maximum and adds them.
    fn combine(&mut self, other: &OnlineSoftmax<'_>) {
        let columns = self.out.len() / self.max.len().max(1);
        for query in 0..self.max.len().min(other.max.len()) {
            let (ours, theirs) = (self.max[query], other.max[query]);
            let max = if theirs > ours { theirs } else { ours };
            let (our, their) = (rescale_factor(max, ours), rescale_factor(max, theirs));
            self.max[query] = max;
            self.sum[query] = self.sum[query] * our + other.sum[query] * their;
            let out = &mut self.out[query * columns..][..columns];
            for (out, other) in out.iter_mut().zip(&other.out[query * columns..]) {
                for (out, other) in out.iter_mut().zip(other) {
                    *out = *out * our + other * their;
                }
            }
        }
    }
}

/// Combines the partial results of a query block. Threads start its tasks in the order of their keys, so that few
/// results wait.
#[derive(Debug)]
pub(super) struct SplitKv(Mutex<CombinedResults>);

#[derive(Debug)]
struct CombinedResults {
    combined: Option<PartialResult>,
    /// Number of the partial result to combine next.
    next: usize,
    /// Partial results that arrived before their turn.
    waiting: Vec<Option<PartialResult>>,
    /// The largest number of partial results that were kept at once.
    most: usize,
    /// Bytes of a partial result.
    bytes: usize,
}

impl SplitKv {
    /// Expects `count` partial results.
    pub(super) fn new(count: usize) -> Self {
        SplitKv(Mutex::new(CombinedResults {
            combined: None,
            next: 0,
            waiting: std::iter::repeat_with(|| None).take(count).collect(),
            most: 0,
            bytes: 0,
        }))
    }

    /// Adds partial result `number`. The call that adds the last missing one returns the combined result.
    pub(super) fn add(&self, number: usize, softmax: &OnlineSoftmax<'_>) -> Option<PartialResult> {
        let mut combining = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let CombinedResults { combined, next, waiting, most, bytes } = &mut *combining;
        *bytes = size_of_val(&*softmax.max) + size_of_val(&*softmax.sum) + size_of_val(&*softmax.out);
        if number != *next {
            *waiting.get_mut(number)? = Some(PartialResult::of(softmax));
        } else {
            match combined {
                Some(combined) => combined.combine(softmax),
                None => *combined = Some(PartialResult::of(softmax)),
            }
            *next += 1;
        }
        let kept = waiting.iter().flatten().count() + usize::from(combined.is_some());
        *most = kept.max(*most);
        if let Some(combined) = combined {
            while let Some(mut partial) = waiting.get_mut(*next).and_then(Option::take) {
                combined.combine(&partial.softmax());
                *next += 1;
            }
        }
        if *next == waiting.len() {
            return combined.take();
        }
        None
    }

    /// The largest number of bytes of partial results that were kept at once.
    pub(super) fn bytes(&self) -> usize {
        let combining = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        combining.most * combining.bytes
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kernel::simd::WIDTH;

    /// The partial result of one query and one key with this score and value.
    fn partial(score: f32, value: f32) -> PartialResult {
        PartialResult { max: vec![score], sum: vec![1.0], out: vec![[value; WIDTH]] }
    }

    #[test]
    fn the_result_does_not_depend_on_the_order_of_arrival() {
        let partials = [(0.5, 1.0), (3.25, -2.0), (-1.0, 7.0), (3.0, 0.3)];
        let orders = [[0, 1, 2, 3], [3, 2, 1, 0], [1, 3, 0, 2], [2, 0, 3, 1]];
        let wholes = orders.map(|order| {
            let all = SplitKv::new(partials.len());
            let mut whole = None;
            for (came, number) in order.into_iter().enumerate() {
                assert!(whole.is_none(), "whole after {came}");
                let (score, value) = partials[number];
                whole = all.add(number, &partial(score, value).softmax());
            }
            assert!(all.bytes() >= size_of::<Vector>());
            whole.map(|whole| (whole.max, whole.sum, whole.out))
        });
        assert!(wholes[0].is_some());
        assert!(wholes.iter().all(|whole| *whole == wholes[0]));
        let weights = partials.map(|(score, _)| (score - 3.25f32).exp2());
        let out: f32 = partials.iter().zip(weights).map(|((_, v), w)| v * w).sum();
        let Some((max, sum, whole)) = &wholes[0] else {
            return;
        };
        assert_eq!(max[0], 3.25);
        assert!((sum[0] - weights.iter().sum::<f32>()).abs() < 1e-6);
        assert!((whole[0][0] - out).abs() < 1e-5);
    }

    #[test]
    fn partial_results_that_arrive_in_order_are_not_kept() {
        let all = SplitKv::new(9);
        let size = 2 * size_of::<f32>() + size_of::<Vector>();
        for number in 0..9 {
            let whole = all.add(number, &partial(number as f32, 1.0).softmax());
            assert_eq!(whole.is_some(), number == 8);
            assert_eq!(all.bytes(), size);
        }
    }

    #[test]
    fn two_results_without_keys_combine_to_one_without_keys() {
        let all = SplitKv::new(2);
        let nothing = || PartialResult { max: vec![f32::NEG_INFINITY], sum: vec![0.0], out: vec![[0.0; WIDTH]] };
        assert!(all.add(0, &nothing().softmax()).is_none());
        let whole = all.add(1, &nothing().softmax());
        assert!(whole.is_some_and(|whole| whole.sum == [0.0] && whole.out == [[0.0; WIDTH]]));
    }
}
