//! Queries and new keys of indexers, quantised with a scale of FLOAT16 for each head.

use ascend_attention::{Element, Stream, Tensor, Violation, f16};

use crate::error::Result;
use crate::kv::cache_shape::LayerCache;
use crate::kv::copied_writes::CopiedWrites;
use crate::rules;

use super::latent_quantiser::clear_others;
use super::quantised_type::QuantisedType;
use super::rows_on_host::rows_to_quantise;
use super::token_quantiser::QuantisedTokens;

/// Elements of an indexer's head.
const DIM: usize = 128;

/// Quantises the keys of a step on the host: no operator of the library finds the largest number of a key.
#[derive(Debug)]
pub(in crate::kv) struct IndexQuantiser {
    /// Slots of the rows up to the last one that is written.
    slots: Vec<Option<usize>>,
    /// The quantised keys of an indexer, used by one indexer after the other, and an empty tensor of values.
    quantised: [Tensor<i8>; 2],
    /// Scales of the keys, `[rows, 1, 1]`.
    scales: Tensor<f16>,
    /// The copies of the scales to their slots: an element of two bytes is no row that ScatterPaKvCache takes.
    writes: CopiedWrites,
}

impl IndexQuantiser {
    pub(in crate::kv) fn new(
        slots: Vec<Option<usize>>,
        block_size: usize,
        quantised: [Tensor<i8>; 2],
        stream: &Stream,
    ) -> Result<Self> {
        Ok(Self {
            scales: Tensor::empty(stream.device(), [slots.len(), 1, 1])?,
            writes: CopiedWrites::new(slots.iter().copied(), block_size),
            slots,
            quantised,
        })
    }

    /// Waits for the keys of an indexer, quantises them, and queues the writing of their scales.
    pub(in crate::kv) fn queue<T: Element>(
        &self,
        stream: &Stream,
        key: &Tensor<T>,
        scales: &LayerCache<f16>,
    ) -> Result<[&Tensor<i8>; 2]> {
        let [keys, _] = &self.quantised;
        let tokens = quantise(stream, "index key", key, keys.shape(), &self.slots)?;
        keys.narrow(0, 0..self.slots.len())?.overwrite(stream, &tokens.quantised)?;
        self.scales.overwrite(stream, &tokens.scales)?;
        self.writes.checked("scales", &self.scales, &scales.key)?.queue(stream)?;
        Ok(self.quantised.each_ref())
    }
}

/// Waits for a stream and quantises the queries of an indexer, `[tokens, heads, 128]`, whose first `rows` rows are
/// those of requests: the quantised queries, and a scale for each head, `[tokens, heads]`.
///
/// # Errors
/// [`QUANTISED_FINITE`](crate::rules::QUANTISED_FINITE) for numbers of requests that are not finite, or too large.
pub(crate) fn quantise_index_queries<T: Element>(
    stream: &Stream,
    query: &Tensor<T>,
    rows: usize,
) -> Result<(Tensor<i8>, Tensor<f16>)> {
    let shape = query.shape();
    let tokens = shape.first().copied().unwrap_or(0);
    let slots: Vec<_> = (0..tokens).map(|row| (row < rows).then_some(row)).collect();
    let quantised = quantise(stream, "index query", query, shape, &slots)?;
    let heads = &shape[..shape.len().min(2)];
    Ok((stream.upload(&quantised.quantised, shape)?, stream.upload(&quantised.scales, heads)?))
}

/// Quantises each head of the first rows, one row for each entry of `slots`; rows without a slot are zeros.
fn quantise<T: Element>(
    stream: &Stream,
    argument: &'static str,
    rows: &Tensor<T>,
    planned: &[usize],
    slots: &[Option<usize>],
) -> Result<QuantisedTokens<f16>> {
    let (mut numbers, elements) = rows_to_quantise(stream, argument, rows, planned, slots)?;
    clear_others(&mut numbers, elements, slots);
    let int8 = QuantisedType::Int8;
    let largest = int8.largest_of_token().unwrap_or(1.0);
    let tokens = QuantisedTokens::quantise((int8, largest), &numbers, DIM, half_above);
    match tokens.scales.iter().position(|scale| scale.is_infinite()) {
        None => Ok(tokens),
        Some(head) => Err(too_large(argument, head * DIM / elements.max(1), largest).into()),
    }
}

/// The least number of FLOAT16 that is no less, so that no quantised number is cut.
fn half_above(number: f32) -> f16 {
    let half = f16::from_f32(number);
    match half.to_f32() < number {
        true => f16::from_bits(half.to_bits() + 1),
        false => half,
    }
}

#[cold]
fn too_large(argument: &str, row: usize, largest: f32) -> Violation {
    rules::QUANTISED_FINITE.broken(
        format_args!("row {row} of the {argument}, whose scale FLOAT16 does not hold"),
        format_args!("numbers of up to {}", f16::MAX.to_f32() * largest),
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn scales_that_float16_does_not_hold_are_infinite() {
        assert_eq!(half_above(65504.0).to_f32(), 65504.0);
        assert!(half_above(65505.0).is_infinite() && half_above(1e30).is_infinite());
        assert_eq!(half_above(1e-30), f16::from_bits(1));
    }

    proptest! {
        /// A scale of FLOAT16 is the next one above, and no number is cut.
        #[test]
        fn no_number_is_cut(numbers in prop::collection::vec(-1e4f32..1e4, DIM), exponent in -40i32..8) {
            let numbers: Vec<f32> = numbers.iter().map(|x| x * (exponent as f32).exp2()).collect();
            let tokens = QuantisedTokens::quantise((QuantisedType::Int8, 127.0), &numbers, DIM, half_above);
            let scale = tokens.scales[0].to_f32();
            let most = numbers.iter().fold(0f32, |most, x| most.max(x.abs()));
            prop_assert!(scale >= most / 127.0);
            prop_assert!(f16::from_bits(tokens.scales[0].to_bits() - 1).to_f32() < most / 127.0);
            for (number, stored) in numbers.iter().zip(&tokens.quantised) {
                let back = f64::from(*stored) * f64::from(scale);
                prop_assert!((back - f64::from(*number)).abs() <= f64::from(scale) * 0.5001);
            }
        }
    }
}
