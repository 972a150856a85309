//! Groups of 32 numbers as FLOAT8_E4M3FN times a shared scale, a power of two of FLOAT8_E8M0: MXFP8 of the OCP
//! Microscaling Formats.

use ascend_attention::attention::Quantisation;
use ascend_attention::spec::minifloat::{Float8E4M3Fn, Float8E8M0};
use ascend_attention::spec::ops::fused_infer_attention_score::FiaCall;
use ascend_attention::{Device, Element, Tensor};

use crate::error::Result;
use crate::kv::cache_shape::{CacheShape, LayerCache};

/// How many numbers share a scale.
pub(crate) const GROUP: usize = FiaCall::MXFP8_GROUP as usize;

/// Number of tokens in two groups, whose shared scales are adjacent.
pub(super) const PAIR: usize = 2 * GROUP;

/// The scale of a group, by its bits: 2^(bits - 127).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct SharedScale(pub(super) u8);

impl SharedScale {
    /// The smallest scale by which the largest number of a group is at most 448, so that none of them is cut; 1 for a
    /// group of zeros. Numbers that are not finite do not count.
    pub(super) fn covering(numbers: impl IntoIterator<Item = f64>) -> Self {
        let most = numbers.into_iter().map(f64::abs);
        let most = most.filter(|number| number.is_finite()).fold(0.0, f64::max);
        if most == 0.0 {
            return Self(127);
        }
        // 448 is 1.75 * 2^8. The exponent of a double has a bias of 1023, that of a power of two one of 127.
        let bits = most.to_bits();
        let above = bits & ((1 << 52) - 1) > 3 << 50;
        let exponent = (bits >> 52) as i64;
        let scale = exponent - (1023 + 8 - 127) + i64::from(above);
        Self(scale.clamp(0, 254) as u8)
    }

    fn factor(self) -> f64 {
        f64::from(Float8E8M0::from_bits(self.0).to_f32())
    }

    /// The bits of the nearest float.
    pub(super) fn store(self, number: f64) -> u8 {
        Float8E4M3Fn::from_f32((number / self.factor()) as f32).to_bits()
    }

    /// The number that a float stands for.
    pub(super) fn load(self, bits: u8) -> f64 {
        f64::from(Float8E4M3Fn::from_bits(bits).to_f32()) * self.factor()
    }
}

/// Rows as floats and shared scales, one for each 32 neighbours. Rows are a multiple of 32 long.
pub(crate) fn quantise_mxfp8(numbers: &[f32]) -> (Vec<u8>, Vec<u8>) {
    let mut floats = Vec::with_capacity(numbers.len());
    let mut scales = Vec::with_capacity(numbers.len().div_ceil(GROUP));
    for group in numbers.chunks(GROUP) {
        let scale = SharedScale::covering(group.iter().copied().map(f64::from));
        floats.extend(group.iter().map(|number| scale.store(f64::from(*number))));
        scales.push(scale.0);
    }
    (floats, scales)
}

/// Shared scales of a layer's groups: for keys along the elements of a head, for values along the tokens of a block.
#[derive(Clone, Debug)]
pub(crate) struct GroupScales {
    /// Bytes in blocks: keys `[blocks, N, block_size, D/32]`, values `[blocks, N, block_size/64, 2 * D]`.
    pub(in crate::kv) blocks: LayerCache<i8>,
    /// Scales of keys, as the operator reads them: `[blocks, N, block_size, D/64, 2]`.
    pub(crate) key: Tensor<Float8E8M0>,
    /// Scales of values, as the operator reads them: `[blocks, N, block_size/64, D, 2]`.
    pub(crate) value: Tensor<Float8E8M0>,
}

impl GroupScales {
    /// The scales of a layer without tokens.
    pub(in crate::kv) fn new(device: &Device, blocks: usize, block_size: usize, shape: &CacheShape) -> Result<Self> {
        let heads = shape.kv_heads;
        let pairs = block_size.div_ceil(PAIR);
        let of_key = shape.key_dim.div_ceil(2 * GROUP);
        let zeros = |dims: [usize; 4]| -> Result<Tensor<i8>> {
            let buffer = device.alloc_zeroed::<i8>(dims.iter().product())?;
            Ok(Tensor::from_buffer(&buffer, dims)?)
        };
        // No more scales than numbers, which fit into memory.
        let key = zeros([blocks, heads, block_size, 2 * of_key])?;
        let value = zeros([blocks, heads, pairs, 2 * shape.value_dim])?;
        let read = |bytes: &Tensor<i8>, dims: [usize; 5]| -> Result<Tensor<Float8E8M0>> {
            let shared_scales = bytes.bits_as(<Float8E8M0 as Element>::DTYPE)?;
            Ok(shared_scales.reshape(dims)?.typed()?)
        };
        Ok(Self {
            key: read(&key, [blocks, heads, block_size, of_key, 2])?,
            value: read(&value, [blocks, heads, pairs, shape.value_dim, 2])?,
            blocks: LayerCache { key, value },
        })
    }

    /// The quantisation arguments of a call whose queries have these scales.
    pub(crate) fn quantisation<'a>(&'a self, query: &'a Tensor<Float8E8M0>) -> Quantisation<'a> {
        Quantisation::MxFp8 { query_scale: query, key_scale: &self.key, value_scale: &self.value, quant_scale1: None }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn the_largest_number_is_not_cut_and_fills_its_floats() {
        for (most, scale) in
            [(448.0, 127), (448.1, 128), (449.0, 128), (224.0, 126), (1.75, 119), (1.0, 119), (0.0, 127)]
        {
            assert_eq!(SharedScale::covering([0.0, -most, f64::NAN]), SharedScale(scale), "{most}");
        }
        assert_eq!(SharedScale::covering([f64::from(f32::MAX)]).0, 247);
        assert_eq!(SharedScale::covering([1e-40]).0, 0);
    }

    proptest! {
        /// A float is within a 16th of its number or half the smallest step, and moving it to a larger scale and back
        /// loses nothing but numbers that become too small.
        #[test]
        fn floats_move_between_scales(
            numbers in prop::collection::vec(-1e3f64..1e3, 1..40),
            exponent in -90i32..90,
            more in 0u8..6,
        ) {
            let numbers: Vec<f64> = numbers.iter().map(|x| x * f64::from(exponent).exp2()).collect();
            let scale = SharedScale::covering(numbers.iter().copied());
            let larger = SharedScale(scale.0 + more);
            let step = larger.factor() / 512.0;
            for number in numbers {
                let stored = scale.load(scale.store(number));
                prop_assert!((stored - number).abs() <= (number.abs() / 16.0).max(scale.factor() / 1024.0));
                let moved = larger.load(larger.store(stored));
                prop_assert!(moved == stored || (moved - stored).abs() <= step / 2.0 && moved.abs() <= 8.0 * step);
            }
        }
    }
}
