//! Absorbed queries of one byte an element.

use ascend_attention::{AnyTensor, Device, Element, Stream, Tensor, Violation};

use crate::error::{Error, Result};
use crate::kv::{LatentScale, QuantisedLayer, QuantisedType, quantise_latent_queries};
use crate::rules;

/// Absorbed queries of multi-head latent attention in one byte an element, with a scale for each row and head, for
/// layers over [`PagedKvCache::quantised_latents`](crate::kv::PagedKvCache::quantised_latents):
/// [`LatentForm::Quantised`](crate::LatentForm::Quantised).
///
/// The model makes them: aclnnDynamicQuant on the absorbed queries gives numbers of INT8 and scales of such rows, and
/// fused kernels in front of attention both with the projections. The operator multiplies the sum of the products of
/// both parts by the scales, so that the rotary parts of the queries are brought divided by their row's scale and by
/// the layer's [`LatentScale::to_f32`]: `queryRope / (scale * scale of the latents)`. Rotary keys are brought as they
/// are. Where no kernel divides, [`quantise_on_host`](Self::quantise_on_host) does all of it.
///
/// ```
/// # fn main() -> ascend_serving::Result<()> {
/// # #[cfg(feature = "emulation")] {
/// use ascend_attention::{Runtime, bf16};
/// use ascend_serving::QuantisedQueries;
/// use ascend_serving::kv::{LatentScale, QuantisedType};
///
/// let stream = Runtime::emulated()?.device(0)?.stream()?;
/// let [half, quarter] = [0.5, 0.25].map(bf16::from_f32);
/// let query = stream.upload(&[half; 2 * 512], [1, 2, 512])?; // tokens, heads
/// let query_rope = stream.upload(&[quarter; 2 * 64], [1, 2, 64])?;
/// let scale = LatentScale::new(0.125)?;
/// let both = (&query, &query_rope);
/// let (queries, divided) = QuantisedQueries::quantise_on_host(&stream, QuantisedType::Int8, both, scale)?;
/// assert_eq!(queries.scale().download(&stream)?, [0.5 / 127.0; 2]);
/// let want = 0.25 / (0.5 / 127.0 * 0.125);
/// assert_eq!(divided.download(&stream)?[0], bf16::from_f32(want));
/// # }
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug)]
pub struct QuantisedQueries {
    query: AnyTensor,
    scale: Tensor<f32>,
    /// The scale of the latents by which their rotary parts are divided, where the host has divided them.
    divided_by: Option<LatentScale>,
}

impl QuantisedQueries {
    /// Queries `[tokens, N, 512]` of the type that the cache stores, and their scales `[tokens, N]`, both with the
    /// padding of the metadata: a number stands for itself times its scale.
    ///
    /// The scales are on the device, and nothing waits to look at them. A rotary part that is divided by a scale of 0,
    /// which aclnnDynamicQuant gives a head whose numbers are all 0, is no number, and the attention of a head with
    /// one, or with a scale that is not finite, is NaN: bring 1 as the scale of heads whose numbers are all 0. A
    /// [`RangeCheck`](crate::RangeCheck) finds rotary parts that are not finite.
    ///
    /// # Errors
    /// [`ARGUMENT_VALUE`](crate::rules::ARGUMENT_VALUE) for elements of 16 bits or more, other scales than one for each
    /// row and head, and tensors with gaps.
    pub fn new<Q: Element>(query: &Tensor<Q>, scale: &Tensor<f32>) -> Result<Self> {
        let types = [QuantisedType::Int8, QuantisedType::Float8E4M3Fn, QuantisedType::HiFloat8];
        if !types.map(QuantisedType::dtype).contains(&Q::DTYPE) {
            return Err(Error::invalid("query", query.desc(), "INT8, FLOAT8_E4M3FN or HIFLOAT8")
                .fix("quantise the absorbed queries to the type of the cache, or cache latents of 16 bits"));
        }
        let is_alike = matches!(query.shape(), [tokens, heads, _] if scale.shape() == [*tokens, *heads]);
        if !(is_alike && query.is_contiguous() && scale.is_contiguous()) {
            return Err(Error::invalid(
                "scale",
                format_args!("{} for queries {}", scale.desc(), query.desc()),
                "contiguous queries [tokens, N, 512], and [tokens, N], a scale for each row and head",
            )
            .fix("quantise each head of each row by a scale of its own"));
        }
        Ok(Self { query: query.into(), scale: scale.clone(), divided_by: None })
    }

    /// Waits for the stream and quantises absorbed queries `[tokens, N, 512]` on the host, for models without such
    /// kernels, over a layer of this scale. Returns their rotary parts `[tokens, N, 64]` divided by the scales, as the
    /// layer takes them.
    ///
    /// The largest number of a row and head becomes 127 as INT8, 448 as FLOAT8_E4M3FN and 15 as HIFLOAT8; where all
    /// are 0, the scale is 1. The attention of a head whose numbers are not all finite is NaN.
    ///
    /// # Errors
    /// [`QUANTISED_SCALE`](crate::rules::QUANTISED_SCALE) for a rotary part that is too large for its type once it is
    /// divided by a small scale;
    /// [`ARGUMENT_VALUE`](crate::rules::ARGUMENT_VALUE) for rotary parts of other rows or heads, and other types than
    /// FLOAT16 and BF16; as for [`Tensor::download`].
    pub fn quantise_on_host<T: Element>(
        stream: &Stream,
        stored: QuantisedType,
        queries: (&Tensor<T>, &Tensor<T>),
        latents: LatentScale,
    ) -> Result<(Self, Tensor<T>)> {
        let (query, scale, query_rope) = quantise_latent_queries(stream, stored, queries, latents)?;
        Ok((Self { query: query.bits_as(stored.dtype())?, scale, divided_by: Some(latents) }, query_rope))
    }

    /// Zeros in place of queries, with scales of 0.
    pub(crate) fn zeros(device: &Device, stored: QuantisedType, [tokens, heads, dim]: [usize; 3]) -> Result<Self> {
        let of_heads = tokens * heads;
        let query = device.alloc_zeroed::<i8>(of_heads * dim)?;
        let scale = device.alloc_zeroed::<f32>(of_heads)?;
        Ok(Self {
            query: Tensor::from_buffer(&query, [tokens, heads, dim])?.bits_as(stored.dtype())?,
            scale: Tensor::from_buffer(&scale, [tokens, heads])?,
            divided_by: None,
        })
    }

    /// Refuses queries that the host has quantised for latents of another scale than those of the layer.
    pub(crate) fn check_latents(&self, layer: usize, cache: Option<&QuantisedLayer>) -> Result<(), Violation> {
        // Queries of another type than the cache's are refused by the operator.
        let cache = cache.filter(|cache| cache.stored().dtype() == self.query.desc().dtype);
        match (self.divided_by, cache.and_then(QuantisedLayer::latent_scale)) {
            (Some(queries), Some(latents)) if queries != latents => Err(Violation::new(
                &rules::QUANTISED_SCALE,
                format_args!(
                    "queries for latents of the scale {} in layer {layer}, whose latents have {}",
                    queries.to_f32(),
                    latents.to_f32()
                ),
                "queries for the layer's latents",
                "quantise the queries of each layer by the scale of its latents",
            )),
            _ => Ok(()),
        }
    }

    /// The numbers, `[tokens, N, 512]`.
    pub fn query(&self) -> &AnyTensor {
        &self.query
    }

    /// The scales, `[tokens, N]`.
    pub fn scale(&self) -> &Tensor<f32> {
        &self.scale
    }
}
