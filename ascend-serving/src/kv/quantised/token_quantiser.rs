//! New rows quantised with a scale for each token.

use ascend_attention::{Element, Stream, Tensor};

use crate::error::Result;
use crate::kv::cache_shape::LayerCache;
use crate::kv::copied_writes::CopiedWrites;

use super::quantised_type::QuantisedType;
use super::rows_on_host::rows_to_quantise;

/// Scales in the blocks of their tokens.
#[derive(Clone, Debug)]
pub(crate) struct TokenScales {
    /// What the largest number of each token becomes.
    pub(in crate::kv) largest: f32,
    /// Scales as tokens of one element, `[blocks, block_size, 1]`.
    pub(crate) rows: LayerCache<f32>,
    /// Scales of keys as the operator reads them, `[blocks, block_size]`.
    pub(in crate::kv) key: Tensor<f32>,
    pub(in crate::kv) value: Tensor<f32>,
}

/// Quantises the rows of a step on the host: no operator of the library finds the largest number of a row.
#[derive(Debug)]
pub(in crate::kv) struct TokenQuantiser {
    pub(in crate::kv) stored: QuantisedType,
    /// Slots of the rows up to the last one that is written.
    pub(in crate::kv) slots: Vec<Option<usize>>,
    /// Keys and values of all rows, used by one layer after the other.
    pub(in crate::kv) quantised: [Tensor<i8>; 2],
    /// Their scales, `[rows, 1, 1]`.
    pub(in crate::kv) scales: [Tensor<f32>; 2],
    /// The copies of the scales to their slots.
    pub(in crate::kv) writes: CopiedWrites,
}

impl TokenQuantiser {
    /// Waits for the rows of a layer, quantises them, and queues the writing of their scales.
    pub(in crate::kv) fn queue<T: Element>(
        &self,
        stream: &Stream,
        rows: [&Tensor<T>; 2],
        scales: &TokenScales,
    ) -> Result<[&Tensor<i8>; 2]> {
        let [key, value] = rows;
        let [keys, values] = &self.quantised;
        let keys = self.quantise(stream, "key", key, keys, scales.largest)?;
        let values = self.quantise(stream, "value", value, values, scales.largest)?;
        let caches = [&scales.rows.key, &scales.rows.value];
        let all = self.quantised.iter().zip(&self.scales).zip(caches);
        for (((quantised, scales), cache), tokens) in all.zip([&keys, &values]) {
            let first = quantised.narrow(0, 0..self.slots.len())?;
            first.overwrite(stream, &tokens.quantised)?;
            scales.overwrite(stream, &tokens.scales)?;
            self.writes.checked("scales", scales, cache)?.queue(stream)?;
        }
        Ok(self.quantised.each_ref())
    }

    fn quantise<T: Element>(
        &self,
        stream: &Stream,
        argument: &'static str,
        rows: &Tensor<T>,
        like: &Tensor<i8>,
        largest: f32,
    ) -> Result<QuantisedTokens<f32>> {
        let planned = like.shape();
        let (numbers, elements) = rows_to_quantise(stream, argument, rows, planned, &self.slots)?;
        let stored = (self.stored, largest);
        Ok(QuantisedTokens::quantise(stored, &numbers, elements, |scale| scale))
    }
}

/// Tokens, quantised.
#[derive(Debug, PartialEq)]
pub(super) struct QuantisedTokens<S> {
    /// Integers, or the bits of floats.
    pub(super) quantised: Vec<i8>,
    /// One scale for each token.
    pub(super) scales: Vec<S>,
}

impl<S: Copy + Into<f32>> QuantisedTokens<S> {
    /// Quantises each token by the scale that makes its largest number `largest`, as `scale` rounds it; by 1 where all
    /// are 0.
    pub(super) fn quantise(
        (stored, largest): (QuantisedType, f32),
        numbers: &[f32],
        elements: usize,
        scale: impl Fn(f32) -> S,
    ) -> Self {
        let mut quantised = Vec::with_capacity(numbers.len());
        let mut scales = Vec::new();
        for row in numbers.chunks(elements.max(1)) {
            let most = row.iter().fold(0f32, |most, number| most.max(number.abs()));
            let scale = scale(if most > 0.0 { most / largest } else { 1.0 });
            let bits = |number: &f32| stored.bits(number / scale.into());
            quantised.extend(row.iter().map(bits));
            scales.push(scale);
        }
        Self { quantised, scales }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use ascend_attention::spec::minifloat::Float8E4M3Fn;
    use proptest::prelude::*;

    const INT8: (QuantisedType, f32) = (QuantisedType::Int8, 127.0);
    const E4M3FN: (QuantisedType, f32) = (QuantisedType::Float8E4M3Fn, 448.0);

    fn quantise(stored: (QuantisedType, f32), numbers: &[f32], elements: usize) -> QuantisedTokens<f32> {
        QuantisedTokens::quantise(stored, numbers, elements, |scale| scale)
    }

    #[test]
    fn no_tokens_are_nothing() {
        let none = quantise(INT8, &[], 0);
        assert!(none.quantised.is_empty() && none.scales.is_empty());
    }

    #[test]
    fn halves_go_to_the_even_integer() {
        let numbers = [127.0, 0.5, 1.5, -2.5, 0.0, 0.0, 0.0, 0.0];
        let tokens = quantise(INT8, &numbers, 4);
        assert_eq!(tokens.quantised, [127, 0, 2, -2, 0, 0, 0, 0]);
        assert_eq!(tokens.scales, [1.0, 1.0]);
    }

    #[test]
    fn floats_go_to_the_even_one_and_the_largest_to_448() {
        // Between 16 and 32 the steps are 2, below 2^-6 they are 2^-9.
        let numbers = [-448.0, 17.0, 19.0, -21.0, 1.5 / 512.0, 2.5 / 512.0, 0.5, 0.0];
        let tokens = quantise(E4M3FN, &numbers, 8);
        assert_eq!(tokens.scales, [1.0]);
        let back: Vec<f32> =
            (tokens.quantised.iter()).map(|bits| Float8E4M3Fn::from_bits(*bits as u8).to_f32()).collect();
        let want = [-448.0, 16.0, 20.0, -20.0, 2.0 / 512.0, 2.0 / 512.0, 0.5, 0.0];
        assert_eq!(back, want);
    }

    proptest! {
        /// Every float is within a 16th of the number, or half the smallest step, and the largest of a token is 448.
        #[test]
        fn a_token_fills_its_floats(numbers in prop::collection::vec(-1e4f32..1e4, 4..40), exponent in -100i32..20) {
            let numbers: Vec<f32> = numbers.iter().map(|x| x * (exponent as f32).exp2()).collect();
            let tokens = quantise(E4M3FN, &numbers, 4);
            for ((row, stored), scale) in numbers.chunks(4).zip(tokens.quantised.chunks(4)).zip(&tokens.scales) {
                let float = |bits: &i8| f64::from(Float8E4M3Fn::from_bits(*bits as u8).to_f32());
                for (number, bits) in row.iter().zip(stored) {
                    let (number, scale) = (f64::from(*number), f64::from(*scale));
                    let most = (number.abs() / 15.9).max(scale / 1023.0);
                    prop_assert!((float(bits) * scale - number).abs() <= most);
                }
                let most = stored.iter().map(|bits| float(bits).abs()).fold(0.0, f64::max);
                prop_assert!(row.iter().all(|x| *x == 0.0) || most == 448.0);
            }
        }

        /// Every number is within half a step, and the largest of a token is 127 or -127.
        #[test]
        fn a_token_fills_its_scale(numbers in prop::collection::vec(-1e4f32..1e4, 4..40), exponent in -100i32..20) {
            let numbers: Vec<f32> = numbers.iter().map(|x| x * (exponent as f32).exp2()).collect();
            let tokens = quantise(INT8, &numbers, 4);
            for ((row, quantised), scale) in numbers.chunks(4).zip(tokens.quantised.chunks(4)).zip(&tokens.scales) {
                for (number, integer) in row.iter().zip(quantised) {
                    let back = f64::from(*integer) * f64::from(*scale);
                    prop_assert!((back - f64::from(*number)).abs() <= f64::from(*scale) * 0.5001);
                }
                let most = quantised.iter().map(|x| x.unsigned_abs()).max();
                prop_assert!(row.iter().all(|x| *x == 0.0) || most == Some(127));
            }
        }
    }
}
