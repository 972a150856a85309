//! Scales of quantised keys and values, one for each head and element.

use ascend_attention::{AnyTensor, Element, Number, Stream, Tensor, Violation};

use crate::error::Result;
use crate::kv::cache_shape::CacheShape;
use crate::rules::{self, room};

use super::quantised_type::{QuantisedType, QueryType};

/// The scales of one layer's keys and values: a factor for each head and element, the same for all tokens.
///
/// A scale is first rounded to the query's type, which it has on the device. A number `x` is multiplied by the
/// inverse of the rounded scale, as FLOAT, and stored: in INT8 rounded to the nearest integer, halves to the even
/// one, and cut to -128 to 127; as a float rounded to the nearest, and not cut ([`QuantisedType`]). The number that
/// is read is the stored one times the rounded scale.
///
/// ```
/// use ascend_serving::kv::{ChannelScales, QuantisedType};
/// use ascend_attention::f16;
///
/// # fn main() -> Result<(), ascend_serving::Violation> {
/// // Two tokens of one head of two elements, as a calibration has seen them: the largest becomes 127.
/// let tokens = [1.27, -3.0, -0.5, 2.54].map(f16::from_f32);
/// let scales = ChannelScales::covering(QuantisedType::Int8, &tokens, &tokens, 2, 2)?;
/// assert!((scales.key()[0] - 0.01).abs() < 1e-4 && (scales.key()[1] - 3.0 / 127.0).abs() < 1e-4);
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug, PartialEq)]
pub struct ChannelScales {
    key: Vec<f32>,
    value: Vec<f32>,
}

impl ChannelScales {
    /// Most channels: heads times the elements of one.
    pub const MAX_CHANNELS: usize = 1 << 24;

    /// Scales of keys and of values, head by head: `N * D` each. A number `x` is stored as `x / scale`: for INT8 a
    /// scale is the largest number of its channel divided by 127.
    ///
    /// # Errors
    /// [`QUANTISED_SCALE`](crate::rules::QUANTISED_SCALE) for a scale that is not finite and above 0.
    pub fn new(key: Vec<f32>, value: Vec<f32>) -> Result<Self, Violation> {
        for (name, scales) in [("key", &key), ("value", &value)] {
            let mut channels = scales.iter().enumerate();
            let wrong = |scale: f32| !(scale.is_finite() && scale > 0.0);
            if let Some((channel, scale)) = channels.find(|(_, scale)| wrong(**scale)) {
                return Err(Violation::new(
                    &rules::QUANTISED_SCALE,
                    format_args!("{scale} for channel {channel} of the {name}"),
                    "finite numbers above 0",
                    "take 1 for channels that are always 0",
                ));
            }
        }
        Ok(Self { key, value })
    }

    /// One scale for all keys of a cache's layer, and one for all values: a number `x` is stored as `x / scale`.
    ///
    /// # Errors
    /// As for [`ChannelScales::new`]; [`QUANTISED_SCALE`](crate::rules::QUANTISED_SCALE) for a shape whose channels
    /// cannot be counted.
    pub fn uniform(shape: &CacheShape, key: f32, value: f32) -> Result<Self, Violation> {
        let all = |name, scale: f32, dim: usize| {
            let mut scales = zeros(shape.kv_heads.checked_mul(dim), name)?;
            scales.fill(scale);
            Ok::<_, Violation>(scales)
        };
        Self::new(all("key", key, shape.key_dim)?, all("value", value, shape.value_dim)?)
    }

    /// Scales from tokens of a calibration, `[tokens, channels]`. The largest number of a channel becomes 127 as INT8,
    /// 112 as FLOAT8_E4M3FN and 15 as HIFLOAT8: numbers 4 and 2000 times as large as the calibration's are still floats
    /// of the type, at no cost. Channels that are all 0 get 1.
    ///
    /// # Errors
    /// [`QUANTISED_FINITE`](crate::rules::QUANTISED_FINITE) for a number that is not finite;
    /// [`QUANTISED_SCALE`](crate::rules::QUANTISED_SCALE) for 0 channels or numbers that do not fill the last token,
    /// and for channels whose numbers are too small for a scale.
    pub fn covering<T: Number>(
        stored: QuantisedType,
        keys: &[T],
        values: &[T],
        key_channels: usize,
        value_channels: usize,
    ) -> Result<Self, Violation> {
        let becomes = stored.calibrated();
        Self::new(largest("key", keys, key_channels, becomes)?, largest("value", values, value_channels, becomes)?)
    }

    /// Scales of the keys.
    pub fn key(&self) -> &[f32] {
        &self.key
    }

    /// Scales of the values.
    pub fn value(&self) -> &[f32] {
        &self.value
    }
}

/// A 0 for each channel.
fn zeros(channels: Option<usize>, name: &str) -> Result<Vec<f32>, Violation> {
    let most = ChannelScales::MAX_CHANNELS;
    let fix = "give the heads of the model times the elements of one";
    match channels.filter(|channels| *channels <= most) {
        Some(channels) => {
            let mut zeros = Vec::new();
            room(&mut zeros, channels, &rules::QUANTISED_SCALE, fix)?;
            zeros.resize(channels, 0.0);
            Ok(zeros)
        }
        None => Err(Violation::new(
            &rules::QUANTISED_SCALE,
            format_args!("more than {most} channels of the {name}"),
            format_args!("at most {most}"),
            fix,
        )),
    }
}

/// The scales by which the largest number of each channel becomes a given one.
fn largest<T: Number>(name: &str, tokens: &[T], channels: usize, becomes: f32) -> Result<Vec<f32>, Violation> {
    if tokens.len().checked_rem(channels) != Some(0) {
        return Err(Violation::new(
            &rules::QUANTISED_SCALE,
            format_args!("{} numbers of {channels} channels of the {name}", tokens.len()),
            "a number for each channel of each token",
            "bring whole tokens, `[tokens, N * D]`",
        ));
    }
    let mut most = zeros(Some(channels), name)?;
    for (place, number) in tokens.iter().enumerate() {
        let number = number.to_f64();
        if !number.is_finite() {
            return Err(Violation::new(
                &rules::QUANTISED_FINITE,
                format_args!("{number} at place {place} of the {name}"),
                "finite numbers",
                "find the layer that overflows by `Tensor::range_report`, and leave its tokens out of the calibration",
            ));
        }
        // Numbers of 16 or 32 bits lose nothing by this.
        let most = &mut most[place % channels];
        *most = most.max(number.abs() as f32);
    }
    let scale = |most: f32| if most > 0.0 { most / becomes } else { 1.0 };
    Ok(most.into_iter().map(scale).collect())
}

/// The scales of keys or of values on the device.
#[derive(Clone, Debug)]
pub(in crate::kv) struct DeviceScales {
    /// Factors for numbers that are read, of the query's type, in the shape that the operator requires with the
    /// cache.
    pub(in crate::kv) scales: AnyTensor,
    /// Factors for numbers that are stored, `[N, D]`.
    pub(in crate::kv) inverses: Tensor<f32>,
}

impl DeviceScales {
    /// Uploads the scales of these heads and elements of each, as numbers of the type `T`.
    pub(in crate::kv) fn upload<T: Element>(
        stream: &Stream,
        scales: &[f32],
        heads_and_dim: [usize; 2],
        device_shape: &[usize],
    ) -> Result<Self> {
        let query = QueryType::of::<T>()?;
        let rounded: Vec<f32> = scales.iter().map(|x| query.rounded(*x)).collect();
        let inverses: Vec<f32> = rounded.iter().map(|scale| scale.recip()).collect();
        let channels = scales.iter().zip(&rounded).zip(&inverses).enumerate();
        for (channel, ((given, rounded), inverse)) in channels {
            if !(rounded.is_finite() && inverse.is_normal()) {
                return Err(Violation::new(
                    &rules::QUANTISED_SCALE,
                    format_args!("{given} for channel {channel}, as {} {rounded}", T::DTYPE),
                    "scales that are numbers of the query's type and can be divided by",
                    "scale the weights that make keys and values, or serve the layer in 16 bits",
                )
                .into());
            }
        }
        Ok(Self {
            scales: query.upload(stream, &rounded, device_shape)?,
            inverses: stream.upload(&inverses, heads_and_dim)?,
        })
    }
}
