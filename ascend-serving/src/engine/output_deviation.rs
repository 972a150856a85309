//! How far computed elements are from those of a reference.

use ascend_attention::Number;

/// How far elements are from those of a reference.
///
/// An element that is not finite on one side, or on both, counts in [`not_finite`](Self::not_finite); unless both are
/// equal bit by bit it is infinitely far away. The means are those of the other elements.
#[derive(Clone, Copy, Debug, PartialEq)]
#[non_exhaustive]
pub struct OutputDeviation {
    /// Elements compared.
    pub elements: usize,
    /// Elements that are equal bit by bit.
    pub equal: usize,
    /// Elements that are not finite on one side or on both, and elements without another one.
    pub not_finite: usize,
    /// The largest difference; infinite where only one side of an element is finite.
    pub largest: f64,
    /// The first of the elements with the largest difference, counted in the order in which they were added.
    pub at: usize,
    /// Sum of the differences.
    sum: f64,
    /// Sum of the squared differences.
    squares: f64,
    /// Sum of the squares of the reference.
    size: f64,
    /// The least and the greatest element of the reference.
    bounds: [f64; 2],
}

impl Default for OutputDeviation {
    fn default() -> Self {
        Self {
            elements: 0,
            equal: 0,
            not_finite: 0,
            largest: 0.0,
            at: 0,
            sum: 0.0,
            squares: 0.0,
            size: 0.0,
            bounds: [f64::INFINITY, f64::NEG_INFINITY],
        }
    }
}

impl OutputDeviation {
    /// Adds elements, and those of the reference in the same order. An element without another one counts as one that
    /// is not finite.
    pub fn add<T: Number>(&mut self, reference: &[T], others: &[T]) {
        for at in 0..reference.len().max(others.len()) {
            let [reference, other] = [reference, others].map(|all| all.get(at).map(|element| element.to_f64()));
            match (reference, other) {
                (Some(reference), Some(other)) => self.add_element(reference, other),
                // NaN is equal to no number of a tensor.
                (one, other) => self.add_element(one.or(other).unwrap_or(0.0).min(f64::MAX), f64::NAN),
            }
        }
    }

    fn add_element(&mut self, reference: f64, other: f64) {
        let is_equal = reference.to_bits() == other.to_bits();
        let is_finite = reference.is_finite() && other.is_finite();
        let difference = match (is_equal, is_finite) {
            (true, _) => 0.0,
            (false, true) => (reference - other).abs(),
            (false, false) => f64::INFINITY,
        };
        if difference > self.largest {
            (self.largest, self.at) = (difference, self.elements);
        }
        self.elements += 1;
        self.equal += usize::from(is_equal);
        if !is_finite {
            self.not_finite += 1;
            return;
        }
        self.sum += difference;
        self.squares += difference * difference;
        self.size += reference * reference;
        self.bounds = [self.bounds[0].min(reference), self.bounds[1].max(reference)];
    }

    /// The mean difference of the elements that are finite on both sides; 0 without any. Look at
    /// [`not_finite`](Self::not_finite) first.
    pub fn mean(&self) -> f64 {
        self.sum / (self.elements - self.not_finite).max(1) as f64
    }

    /// The root of the sum of squared differences, relative to that of the reference; infinite where elements differ
    /// from a reference of zeros.
    pub fn relative(&self) -> f64 {
        match self.squares {
            0.0 => 0.0,
            squares => (squares / self.size).sqrt(),
        }
    }

    /// From the least to the greatest element of the reference; negative without elements.
    pub fn range(&self) -> f64 {
        self.bounds[1] - self.bounds[0]
    }

    /// The largest difference as a share of the [range](Self::range); infinite where elements differ although the range
    /// is 0.
    pub fn largest_share(&self) -> f64 {
        self.share(self.largest)
    }

    /// The [mean](Self::mean) difference as a share of the range, like [`largest_share`](Self::largest_share).
    pub fn mean_share(&self) -> f64 {
        self.share(self.mean())
    }

    fn share(&self, difference: f64) -> f64 {
        match difference {
            0.0 => 0.0,
            f64::INFINITY => difference,
            _ => difference / self.range(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn elements_that_are_not_finite_are_counted_and_infinitely_far() {
        let mut alone = OutputDeviation::default();
        alone.add(&[f32::NAN], &[0.0]);
        alone.add(&[1.0f32, f32::INFINITY], &[1.0]);
        assert_eq!((alone.elements, alone.equal, alone.not_finite, alone.at), (3, 1, 2, 0));
        assert_eq!(alone.largest_share(), f64::INFINITY);
        let mut deviation = OutputDeviation::default();
        deviation.add(&[1.0f32, -3.0], &[1.0, -1.0]);
        assert_eq!((deviation.equal, deviation.largest, deviation.at), (1, 2.0, 1));
        assert_eq!((deviation.mean(), deviation.range(), deviation.largest_share()), (1.0, 4.0, 0.5));
        let finite = deviation;
        deviation.add(&[f32::INFINITY, f32::NAN], &[f32::INFINITY, 0.0]);
        assert_eq!((deviation.elements, deviation.equal, deviation.not_finite), (4, 2, 2));
        assert_eq!((deviation.largest, deviation.at), (f64::INFINITY, 3));
        assert_eq!((deviation.mean(), deviation.relative()), (finite.mean(), finite.relative()));
    }
}
