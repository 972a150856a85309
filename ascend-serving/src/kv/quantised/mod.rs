//! Keys and values of one byte: the layers that store them, which numbers share a scale, and how rows are quantised.

mod channel_quantiser;
mod channel_scales;
mod group_quantiser;
mod index_quantiser;
mod latent_quantiser;
mod latent_queries;
mod latent_scale;
mod mxfp8;
mod quantised_type;
mod rows_on_host;
mod token_quantiser;
mod value_pair;
mod write;

use std::fmt;

use ascend_attention::attention::{Affine, Antiquantisation, Quantisation};
use ascend_attention::spec::minifloat::Float8E8M0;
use ascend_attention::spec::ops::fused_infer_attention_score::AntiquantMode;
use ascend_attention::spec::ops::kv_quant_sparse_flash_attention::QuantisedRow;
use ascend_attention::{AnyTensor, Device, Element, Queue, Stream, Tensor, Violation, bf16, f16};

use crate::error::Result;
use crate::kv::cache_shape::{CacheShape, LayerCache};
use crate::rules;

use channel_quantiser::ChannelQuantiser;
pub(crate) use channel_quantiser::one_key_each;
pub use channel_scales::ChannelScales;
pub(in crate::kv) use channel_scales::DeviceScales;
pub(crate) use index_quantiser::quantise_index_queries;
pub(crate) use latent_queries::quantise_latent_queries;
pub(in crate::kv) use latent_scale::DeviceLatentScale;
pub use latent_scale::LatentScale;
pub(crate) use latent_scale::bytes_of;
pub(crate) use mxfp8::{GROUP, GroupScales, quantise_mxfp8};
pub use quantised_type::QuantisedType;
pub(in crate::kv) use quantised_type::QueryType;
pub(crate) use rows_on_host::host_numbers;
pub(in crate::kv) use token_quantiser::TokenScales;
pub(in crate::kv) use write::QuantisedWrite;

/// The quantised cache of one layer, whose numbers stand for `stored * scale`.
#[derive(Clone, Debug)]
pub struct QuantisedLayer {
    /// The bytes of keys and values, in the cache's format: integers, or the bits of floats. Of
    /// [latents](crate::kv::PagedKvCache::quantised_latents) those of the rotary keys are values; of
    /// [latents for sparse attention](crate::kv::PagedKvCache::quantised_sparse_latents) it has the rows of 656 bytes,
    /// without values.
    pub cache: LayerCache<i8>,
    stored: QuantisedType,
    /// The keys in the same memory, as a tensor of the stored type.
    key: AnyTensor,
    /// The values in the same memory, as the operator reads them.
    value: AnyTensor,
    pub(in crate::kv) scales: LayerScales,
}

/// Which elements of a layer share a scale.
#[derive(Clone, Debug)]
pub(in crate::kv) enum LayerScales {
    /// One scale for each element of a head, the same for all tokens.
    Channel { key: DeviceScales, value: DeviceScales },
    /// One scale for each token.
    Token(TokenScales),
    /// One scale, a power of two, for each group of 32.
    Group(GroupScales),
    /// One scale for the latents of all tokens. Rotary keys, in place of values, are not quantised.
    Latent(DeviceLatentScale),
    /// Scales in the rows of latents, which hold the rotary keys too.
    Row,
    /// One scale for each key of an indexer: tokens of one element, `[blocks, block_size, 1]`, without values.
    IndexKey(LayerCache<f16>),
}

impl LayerScales {
    /// The shape of the stored bytes of a cache of this shape.
    pub(in crate::kv) fn stored_shape(&self, shape: &CacheShape) -> CacheShape {
        match self {
            Self::Row => CacheShape { key_dim: QuantisedRow::BYTES, value_dim: 0, ..*shape },
            // The operator takes BF16 alone.
            Self::Latent(_) => CacheShape { value_dim: shape.value_dim * size_of::<bf16>(), ..*shape },
            Self::Channel { .. } | Self::Token(_) | Self::Group(_) | Self::IndexKey(_) => *shape,
        }
    }
}

impl fmt::Display for LayerScales {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Channel { .. } => "scales of channels",
            Self::Token(_) => "a scale for each token",
            Self::Group(_) => "a scale for each 32 neighbours",
            Self::Latent(_) => "a scale for the latents of a layer",
            Self::Row => "scales in the rows of latents",
            Self::IndexKey(_) => "a scale for each key of an indexer",
        })
    }
}

impl QuantisedLayer {
    pub(in crate::kv) fn new(cache: LayerCache<i8>, stored: QuantisedType, scales: LayerScales) -> Result<Self> {
        let value = cache.value.bits_as(stored.dtype())?;
        Self::with_values(cache, stored, scales, value)
    }

    /// A layer whose values the operator reads as this tensor, in the same memory.
    pub(in crate::kv) fn with_values(
        cache: LayerCache<i8>,
        stored: QuantisedType,
        scales: LayerScales,
        value: AnyTensor,
    ) -> Result<Self> {
        Ok(Self { key: cache.key.bits_as(stored.dtype())?, value, cache, stored, scales })
    }

    /// The stored type.
    pub fn stored(&self) -> QuantisedType {
        self.stored
    }

    /// Keys, as a tensor of the stored type.
    pub fn key(&self) -> &AnyTensor {
        &self.key
    }

    /// Values, as a tensor of the stored type; of [latents](crate::kv::PagedKvCache::quantised_latents) the rotary
    /// keys, of BF16.
    pub fn value(&self) -> &AnyTensor {
        &self.value
    }

    /// The quantisation arguments of a call with queries of 16 bits that reads the keys and values in their blocks;
    /// `None` for groups and latents, where queries are quantised, too, and for what operators of sparse attention
    /// read.
    pub fn quantisation(&self) -> Option<Quantisation<'_>> {
        match &self.scales {
            LayerScales::Channel { key, value } => Some(split(AntiquantMode::PerChannel, &key.scales, &value.scales)),
            LayerScales::Token(TokenScales { key, value, .. }) => Some(split(AntiquantMode::PerTokenPaged, key, value)),
            LayerScales::Group(_) | LayerScales::Latent(_) | LayerScales::Row | LayerScales::IndexKey(_) => None,
        }
    }

    /// The scale of the layer's latents, in a cache of
    /// [`PagedKvCache::quantised_latents`](crate::kv::PagedKvCache::quantised_latents); `None` in others.
    pub fn latent_scale(&self) -> Option<LatentScale> {
        Some(self.of_latents()?.scale)
    }

    /// The scale of latents, `[1]`, as a call of quantised queries takes it; `None` for other scales.
    pub(crate) fn latent_scale_tensor(&self) -> Option<&Tensor<f32>> {
        Some(&self.of_latents()?.of_tensor)
    }

    /// The scale of latents, for each element of one, as a call takes it that dequantises; `None` for other scales.
    pub(crate) fn latent_channels(&self) -> Option<&AnyTensor> {
        Some(&self.of_latents()?.of_elements.scales)
    }

    fn of_latents(&self) -> Option<&DeviceLatentScale> {
        match &self.scales {
            LayerScales::Latent(scale) => Some(scale),
            _ => None,
        }
    }

    /// Shared scales of keys, `[blocks, N, block_size, D/64, 2]`, and of values, `[blocks, N, block_size/64, D, 2]`,
    /// a power of two for each 32 neighbours: `keyAntiquantScale` and `valueAntiquantScale` of
    /// [`PagedKvCache::mxfp8`](crate::kv::PagedKvCache::mxfp8).
    pub fn group_scales(&self) -> Option<[&Tensor<Float8E8M0>; 2]> {
        let scales = self.of_groups()?;
        Some([&scales.key, &scales.value])
    }

    /// The scales of groups of 32; `None` for other scales.
    pub(crate) fn of_groups(&self) -> Option<&GroupScales> {
        match &self.scales {
            LayerScales::Group(scales) => Some(scales),
            _ => None,
        }
    }

    /// The scales of keys and of values of channels; `None` for other scales.
    pub(crate) fn of_channels(&self) -> Option<[&AnyTensor; 2]> {
        match &self.scales {
            LayerScales::Channel { key, value } => Some([&key.scales, &value.scales]),
            _ => None,
        }
    }

    /// Scales of keys and of values, as the operator reads them, where they are tensors of their own.
    pub(crate) fn scales(&self) -> [Option<&AnyTensor>; 2] {
        match &self.scales {
            LayerScales::Channel { key, value } => [Some(&key.scales), Some(&value.scales)],
            LayerScales::Token(scales) => [Some(&scales.key), Some(&scales.value)],
            LayerScales::Group(scales) => [Some(&scales.key), Some(&scales.value)],
            LayerScales::Latent(scale) => [Some(&scale.of_tensor), Some(&scale.of_elements.scales)],
            LayerScales::Row => [None; 2],
            LayerScales::IndexKey(scales) => [Some(&scales.key), None],
        }
    }

    /// What shares a scale, for messages.
    pub(crate) fn describe_scales(&self) -> impl fmt::Display {
        &self.scales
    }

    /// Whether channels or tokens have the scales, as FusedInferAttentionScore dequantises them.
    pub(crate) fn is_dequantised_by_fused(&self) -> bool {
        matches!(self.scales, LayerScales::Channel { .. } | LayerScales::Token(_))
    }

    /// Whether operators of sparse attention read the layer: rows of latents, or keys of an indexer.
    pub(crate) fn is_sparse(&self) -> bool {
        matches!(self.scales, LayerScales::Row | LayerScales::IndexKey(_))
    }

    /// The scales of an indexer's keys, `[blocks, block_size, 1]`, as QuantLightningIndexer reads them.
    ///
    /// # Errors
    /// [`CACHE_QUANTISED`](crate::rules::CACHE_QUANTISED) for a layer of another cache than
    /// [`PagedKvCache::quantised_index_keys`](crate::kv::PagedKvCache::quantised_index_keys).
    pub fn index_scales(&self) -> Result<&Tensor<f16>> {
        match &self.scales {
            LayerScales::IndexKey(scales) => Ok(&scales.key),
            other => Err(Violation::new(
                &rules::CACHE_QUANTISED,
                format_args!("a cache with {other}"),
                "one with a scale for each key of an indexer",
                "make the cache by `PagedKvCache::quantised_index_keys`",
            )
            .into()),
        }
    }

    /// The scales of tokens; `None` for other scales.
    pub(crate) fn of_tokens(&self) -> Option<&TokenScales> {
        match &self.scales {
            LayerScales::Token(scales) => Some(scales),
            _ => None,
        }
    }

    /// Prepares the quantisation of the first `rows` rows of these tensors on the device: by scales of channels, into
    /// `keys` and `values`, and of latents into `keys`.
    ///
    /// # Errors
    /// [`CACHE_QUANTISED`](crate::rules::CACHE_QUANTISED) for scales by which the host quantises.
    pub(crate) fn device_quantisers<T: Element>(
        &self,
        device: &Device,
        rows: usize,
        [key, value]: [&Tensor<T>; 2],
        [keys, values]: [Tensor<i8>; 2],
    ) -> Result<DeviceQuantisers> {
        let (of_key, of_value) = self.inverses()?;
        let plan = |argument, new: &Tensor<T>, inverses, quantised| {
            ChannelQuantiser::plan(device, (argument, self.stored), rows, new, inverses, quantised)
        };
        Ok(DeviceQuantisers {
            keys: plan("key", key, of_key, keys)?,
            values: of_value.map(|inverses| plan("value", value, inverses, values)).transpose()?,
        })
    }

    /// Queues the quantisation of rows by the scales of this layer, also by quantisers that another layer planned.
    /// Rotary keys are returned as they are.
    pub(crate) fn quantise<T: Element>(
        &self,
        DeviceQuantisers { keys, values }: &DeviceQuantisers,
        queue: &impl Queue,
        [key, value]: [&Tensor<T>; 2],
    ) -> Result<[Tensor<i8>; 2]> {
        let (of_key, of_value) = self.inverses()?;
        let values = match values.as_ref().zip(of_value) {
            Some((values, inverses)) => values.queue(queue, value, inverses)?.clone(),
            None => bytes_of(value)?,
        };
        Ok([keys.queue(queue, key, of_key)?.clone(), values])
    }

    /// The inverse scales of keys and values, rotary keys without any; scales that are not of channels or latents are
    /// refused.
    fn inverses(&self) -> Result<(&Tensor<f32>, Option<&Tensor<f32>>), Violation> {
        match &self.scales {
            LayerScales::Channel { key, value } => Ok((&key.inverses, Some(&value.inverses))),
            LayerScales::Latent(scale) => Ok((&scale.of_elements.inverses, None)),
            other => Err(Violation::new(
                &rules::CACHE_QUANTISED,
                format_args!("a cache with {other}"),
                "one with scales of channels or latents, by which the device quantises",
                "make the cache by `PagedKvCache::quantised` or `PagedKvCache::quantised_latents`, or compute the \
                 step without a graph",
            )),
        }
    }

    /// The shape of the stored bytes of a cache of this shape.
    pub(crate) fn stored_shape(&self, shape: &CacheShape) -> CacheShape {
        self.scales.stored_shape(shape)
    }

    /// Bytes of device memory in blocks.
    pub(in crate::kv) fn bytes(&self) -> usize {
        let scales = match &self.scales {
            LayerScales::Channel { .. } | LayerScales::Latent(_) | LayerScales::Row => 0,
            LayerScales::Token(scales) => scales.rows.bytes(),
            LayerScales::Group(scales) => scales.blocks.bytes(),
            LayerScales::IndexKey(scales) => scales.bytes(),
        };
        self.cache.bytes() + scales
    }

    /// Queues a copy of a block to another one.
    pub(in crate::kv) fn copy_block(&self, stream: &Stream, from: usize, to: usize) -> Result<()> {
        self.cache.copy_block(stream, from, to)?;
        match &self.scales {
            LayerScales::Channel { .. } | LayerScales::Latent(_) | LayerScales::Row => Ok(()),
            LayerScales::Token(scales) => scales.rows.copy_block(stream, from, to),
            LayerScales::Group(scales) => scales.blocks.copy_block(stream, from, to),
            LayerScales::IndexKey(scales) => scales.copy_block(stream, from, to),
        }
    }
}

/// The quantisers of new keys and values that work on the device.
#[derive(Debug)]
pub(crate) struct DeviceQuantisers {
    keys: ChannelQuantiser,
    /// None for rotary keys, which are stored as they are.
    values: Option<ChannelQuantiser>,
}

/// Allocates tensors for the quantised keys and values of a step, for stored bytes of this shape.
pub(crate) fn quantised_rows(device: &Device, stored: &CacheShape, tokens: usize) -> Result<[Tensor<i8>; 2]> {
    let empty = |dim: usize| Tensor::empty(device, [tokens, stored.kv_heads, dim]);
    Ok([empty(stored.key_dim)?, empty(stored.value_dim)?])
}

/// The quantisation arguments of a call whose keys and values have separate scales.
pub(crate) fn split<'a>(mode: AntiquantMode, key: &'a AnyTensor, value: &'a AnyTensor) -> Quantisation<'a> {
    Quantisation::KeyValue {
        antiquantisation: Antiquantisation::Split { mode, key: Affine::scale(key), value: Affine::scale(value) },
        output: None,
    }
}
