//! The scale of a layer's latents, of one byte each, on the host and on the device.

use ascend_attention::{Element, Number, Stream, Tensor, Violation, bf16};

use crate::error::Result;
use crate::kv::cache_shape::CacheShape;
use crate::rules;

use super::channel_scales::{ChannelScales, DeviceScales};
use super::quantised_type::QuantisedType;

/// The scale of one layer's latents in a cache of
/// [`PagedKvCache::quantised_latents`](crate::kv::PagedKvCache::quantised_latents): a latent's element `x` is
/// stored as `x / scale`, and read as the stored number times the scale.
///
/// It is a number of BF16, the type of the latents: others are rounded to one when it is made.
///
/// ```
/// use ascend_attention::bf16;
/// use ascend_serving::kv::{LatentScale, QuantisedType};
///
/// # fn main() -> Result<(), ascend_serving::Violation> {
/// // Latents of a calibration: the largest element becomes 127.
/// let latents = [0.5, -2.54, 1.0, 0.0].map(bf16::from_f32);
/// let scale = LatentScale::covering(QuantisedType::Int8, &latents)?;
/// assert!((scale.to_f32() - 0.02).abs() < 1e-4);
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LatentScale(f32);

impl LatentScale {
    /// A scale, rounded to BF16.
    ///
    /// # Errors
    /// [`QUANTISED_SCALE`](crate::rules::QUANTISED_SCALE) for a scale that is not above 0, or that, rounded, is no
    /// finite number that can be divided by.
    pub fn new(scale: f32) -> Result<Self, Violation> {
        let rounded = bf16::from_f32(scale).to_f32();
        if scale > 0.0 && rounded.is_finite() && rounded.recip().is_normal() {
            return Ok(Self(rounded));
        }
        Err(Violation::new(
            &rules::QUANTISED_SCALE,
            format_args!("{scale} for the latents of a layer, as BF16 {rounded}"),
            "a finite number above 0 that can be divided by",
            "take the largest element of the layer's latents divided by the largest stored number",
        ))
    }

    /// The scale by which the largest element of a calibration's latents becomes 127 as INT8, 112 as FLOAT8_E4M3FN
    /// and 15 as HIFLOAT8, as [`ChannelScales::covering`] says; 1 where all are 0.
    ///
    /// # Errors
    /// [`QUANTISED_FINITE`](crate::rules::QUANTISED_FINITE) for an element that is not finite;
    /// [`QUANTISED_SCALE`](crate::rules::QUANTISED_SCALE) for elements that are too small for a scale.
    pub fn covering<T: Number>(stored: QuantisedType, latents: &[T]) -> Result<Self, Violation> {
        let of_all = ChannelScales::covering(stored, latents, latents, 1, 1)?;
        Self::new(of_all.key().first().copied().unwrap_or(1.0))
    }

    /// The scale as a number.
    pub fn to_f32(self) -> f32 {
        self.0
    }
}

/// The scale of a layer's latents on the device.
#[derive(Clone, Debug)]
pub(in crate::kv) struct DeviceLatentScale {
    pub(in crate::kv) scale: LatentScale,
    /// For the calls that quantise and dequantise row by row, for each element of a latent.
    pub(in crate::kv) of_elements: DeviceScales,
    /// For the absorbed call, `[1]`.
    pub(in crate::kv) of_tensor: Tensor<f32>,
}

impl DeviceLatentScale {
    pub(in crate::kv) fn upload<T: Element>(stream: &Stream, shape: &CacheShape, scale: LatentScale) -> Result<Self> {
        let (heads, dim) = (shape.kv_heads, shape.key_dim);
        let each = vec![scale.to_f32(); heads.saturating_mul(dim)];
        Ok(Self {
            scale,
            of_elements: DeviceScales::upload::<T>(stream, &each, [heads, dim], &[1, each.len()])?,
            of_tensor: stream.upload(&[scale.to_f32()], [1])?,
        })
    }
}

/// A tensor as its bytes.
pub(crate) fn bytes_of<T: Element>(tensor: &Tensor<T>) -> Result<Tensor<i8>> {
    Ok(tensor.bits_as(<i8 as Element>::DTYPE)?.typed()?)
}
