//! Blocks whose keys are split among tasks: what the tasks leave, put together as they come.

use super::finish::{State, below};
use super::simd::Vector;
use std::sync::{Mutex, PoisonError};

/// A [`State`] kept.
#[derive(Debug)]
pub(super) struct Part {
    max: Vec<f32>,
    sum: Vec<f32>,
    out: Vec<Vector>,
}

impl Part {
    fn of(state: &State<'_>) -> Self {
        Part {
            max: state.max.to_vec(),
            sum: state.sum.to_vec(),
            out: state.out.to_vec(),
        }
    }

    /// To go on with.
    pub(super) fn state(&mut self) -> State<'_> {
        State {
            max: &mut self.max,
            sum: &mut self.sum,
            out: &mut self.out,
        }
    }

    /// Adds what other keys leave: both to the larger maximum, then summed.
    fn merge(&mut self, other: &State<'_>) {
        let columns = self.out.len() / self.max.len().max(1);
        for query in 0..self.max.len().min(other.max.len()) {
            let (ours, theirs) = (self.max[query], other.max[query]);
            let max = if theirs > ours { theirs } else { ours };
            let (our, their) = (below(max, ours), below(max, theirs));
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

/// The parts of a block. They are merged in the order of their keys, whichever comes first, so that the result does not
/// depend on who was faster; threads take them in this order, so that few have to wait.
#[derive(Debug)]
pub(super) struct Parts(Mutex<Merging>);

#[derive(Debug)]
struct Merging {
    merged: Option<Part>,
    /// Number of the part to merge next.
    next: usize,
    /// Parts that came before their turn.
    waiting: Vec<Option<Part>>,
    /// The most parts that were kept at once.
    most: usize,
    /// Bytes of each.
    bytes: usize,
}

impl Parts {
    /// Of which `count` will come.
    pub(super) fn new(count: usize) -> Self {
        Parts(Mutex::new(Merging {
            merged: None,
            next: 0,
            waiting: std::iter::repeat_with(|| None).take(count).collect(),
            most: 0,
            bytes: 0,
        }))
    }

    /// Adds part `number`. Gives the whole when the last one has come.
    pub(super) fn add(&self, number: usize, state: &State<'_>) -> Option<Part> {
        let mut merging = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let Merging {
            merged,
            next,
            waiting,
            most,
            bytes,
        } = &mut *merging;
        *bytes = size_of_val(&*state.max) + size_of_val(&*state.sum) + size_of_val(&*state.out);
        if number != *next {
            *waiting.get_mut(number)? = Some(Part::of(state));
        } else {
            match merged {
                Some(merged) => merged.merge(state),
                None => *merged = Some(Part::of(state)),
            }
            *next += 1;
        }
        let kept = waiting.iter().flatten().count() + usize::from(merged.is_some());
        *most = kept.max(*most);
        if let Some(merged) = merged {
            while let Some(mut part) = waiting.get_mut(*next).and_then(Option::take) {
                merged.merge(&part.state());
                *next += 1;
            }
        }
        if *next == waiting.len() {
            return merged.take();
        }
        None
    }

    /// The most bytes that it kept at once.
    pub(super) fn bytes(&self) -> usize {
        let merging = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        merging.most * merging.bytes
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kernel::simd::WIDTH;

    /// What one query leaves that has seen one key of this score and value.
    fn part(score: f32, value: f32) -> Part {
        Part {
            max: vec![score],
            sum: vec![1.0],
            out: vec![[value; WIDTH]],
        }
    }

    #[test]
    fn the_whole_is_the_same_whichever_part_comes_first() {
        let parts = [(0.5, 1.0), (3.25, -2.0), (-1.0, 7.0), (3.0, 0.3)];
        let orders = [[0, 1, 2, 3], [3, 2, 1, 0], [1, 3, 0, 2], [2, 0, 3, 1]];
        let wholes = orders.map(|order| {
            let all = Parts::new(parts.len());
            let mut whole = None;
            for (came, number) in order.into_iter().enumerate() {
                assert!(whole.is_none(), "whole after {came}");
                let (score, value) = parts[number];
                whole = all.add(number, &part(score, value).state());
            }
            assert!(all.bytes() >= size_of::<Vector>());
            whole.map(|whole| (whole.max, whole.sum, whole.out))
        });
        assert!(wholes[0].is_some());
        assert!(wholes.iter().all(|whole| *whole == wholes[0]));
        let weights = parts.map(|(score, _)| (score - 3.25f32).exp2());
        let out: f32 = parts.iter().zip(weights).map(|((_, v), w)| v * w).sum();
        let Some((max, sum, of)) = &wholes[0] else {
            return;
        };
        assert_eq!(max[0], 3.25);
        assert!((sum[0] - weights.iter().sum::<f32>()).abs() < 1e-6);
        assert!((of[0][0] - out).abs() < 1e-5);
    }

    #[test]
    fn parts_in_order_are_not_kept() {
        let all = Parts::new(9);
        let size = 2 * size_of::<f32>() + size_of::<Vector>();
        for number in 0..9 {
            let whole = all.add(number, &part(number as f32, 1.0).state());
            assert_eq!(whole.is_some(), number == 8);
            assert_eq!(all.bytes(), size);
        }
    }

    #[test]
    fn nothing_and_nothing_is_nothing() {
        let all = Parts::new(2);
        let nothing = || Part {
            max: vec![f32::NEG_INFINITY],
            sum: vec![0.0],
            out: vec![[0.0; WIDTH]],
        };
        assert!(all.add(0, &nothing().state()).is_none());
        let whole = all.add(1, &nothing().state());
        assert!(whole.is_some_and(|whole| whole.sum == [0.0] && whole.out == [[0.0; WIDTH]]));
    }
}
