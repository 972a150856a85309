//! A tile of scores and gradients, and the softmax of its rows.

use std::ops::Range;

/// Rows and keys of a tile, the part of the attention weights that is in memory at once.
pub(super) const ROWS: usize = 32;
pub(super) const KEYS: usize = 64;

/// Online softmax of a row: running maximum and sums.
#[derive(Clone, Copy)]
pub(super) struct Softmax {
    largest: f64,
    sum: f64,
    /// Sum of the gradients, each multiplied by its weight.
    weighed: f64,
}

impl Softmax {
    pub(super) const EMPTY: Self = Self { largest: f64::NEG_INFINITY, sum: 0.0, weighed: 0.0 };

    pub(super) fn add(&mut self, scores: &[f64], gradients: &[f64]) {
        let largest = scores.iter().copied().fold(self.largest, f64::max);
        if largest == f64::NEG_INFINITY {
            return;
        }
        let before = (self.largest - largest).exp();
        self.sum *= before;
        self.weighed *= before;
        for (score, gradient) in scores.iter().zip(gradients) {
            let weight = (score - largest).exp();
            self.sum += weight;
            self.weighed += weight * gradient;
        }
        self.largest = largest;
    }

    pub(super) fn weight(&self, score: f64) -> f64 {
        (score - self.largest).exp() / self.sum
    }

    pub(super) fn mean(&self) -> f64 {
        self.weighed / self.sum
    }
}

/// What a tile holds.
#[derive(Clone, Copy)]
pub(super) enum Values {
    Scores,
    Gradients,
}

/// Scores and gradients of some rows and keys; keys after a row's own have the score -inf and the gradient 0.
pub(super) struct Tile {
    scores: Box<[[f64; KEYS]; ROWS]>,
    gradients: Box<[[f64; KEYS]; ROWS]>,
}

impl Tile {
    pub(super) fn new() -> Self {
        Self { scores: Box::new([[f64::NEG_INFINITY; KEYS]; ROWS]), gradients: Box::new([[0.0; KEYS]; ROWS]) }
    }

    pub(super) fn fill(
        &mut self,
        what: Values,
        rows: &Range<usize>,
        keys: &Range<usize>,
        value: impl Fn(usize, usize) -> f64,
    ) {
        let (cells, hidden) = match what {
            Values::Scores => (&mut self.scores, f64::NEG_INFINITY),
            Values::Gradients => (&mut self.gradients, 0.0),
        };
        for (row, cells) in rows.clone().zip(cells.iter_mut()) {
            for (at, cell) in cells.iter_mut().enumerate() {
                let key = keys.start.saturating_add(at);
                let seen = key < keys.end && key <= row;
                *cell = if seen { value(row, key) } else { hidden };
            }
        }
    }

    pub(super) fn rows(&self) -> impl Iterator<Item = (&[f64], &[f64])> {
        let scores = self.scores.iter().map(|row| &row[..]);
        scores.zip(self.gradients.iter().map(|row| &row[..]))
    }

    pub(super) fn rows_mut(&mut self) -> impl Iterator<Item = (&mut [f64], &[f64])> {
        let scores = self.scores.iter_mut().map(|row| &mut row[..]);
        scores.zip(self.gradients.iter().map(|row| &row[..]))
    }
}
