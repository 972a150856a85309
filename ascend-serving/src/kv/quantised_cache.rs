//! A paged cache of quantised keys and values.

use ascend_attention::attention::{BlockTable, CallLengths, Cumulative, Inputs, PerRequest};
use ascend_attention::spec::minifloat::{Float8E4M3Fn, Float8E8M0};
use ascend_attention::spec::ops::fused_infer_attention_score::{AntiquantMode, Cache};
use ascend_attention::{AnyTensor, Device, Element, FusedInferAttention, Layout, Stream, Tensor, Violation};

use crate::error::{Error, Result};
use crate::rules;

use super::cache::{CacheLayer, PagedKvCache};
use super::cache_shape::{CacheShape, LayerCache};
use super::pad::PadPolicy;
use super::pool::{BlockPool, CacheEntry, StepTokens};
use super::quantised::{
    ChannelScales, DeviceScales, GroupScales, LayerScales, QuantisedLayer, QuantisedType, QueryType, TokenScales,
    one_key_each, split,
};
use super::stored::stored;

impl<T: Element> PagedKvCache<T> {
    /// A cache as of [`PagedKvCache::new`] whose keys and values are INT8 or floats of 8 bits, with the scales of each
    /// layer ([`ChannelScales::covering`]). `T` is still the type of queries, of new keys and values, and of results:
    /// FLOAT16 or BF16. It takes half the memory.
    ///
    /// Writes quantise on the device and without waiting: see [`ChannelScales`].
    /// [`Backend::QuantisedDecode`](crate::Backend::QuantisedDecode) and
    /// [`Backend::QuantisedPrefill`](crate::Backend::QuantisedPrefill) serve steps over it. Numbers that are not finite
    /// have no integer: the device stores some integer for them, and reports nothing ([`Tensor::range_report`] finds
    /// them). Nor does the device cut a number that is too large for a float: it is stored as NaN or an infinity, which
    /// then is in the attention of every later token of the sequence. Scales of a calibration leave room for larger
    /// numbers.
    ///
    /// On Atlas A2 and A3 steps of single tokens over BnBsH and BnNBsD take heads of up to 512 elements, in blocks of
    /// a multiple of 32 tokens; other steps take what packed calls of 16 bits do
    /// ([`Backend::Fused`](crate::Backend::Fused)). An NZ cache needs heads of 128 elements, blocks of 128 or 512
    /// tokens, and BF16 queries.
    ///
    /// ```
    /// # fn main() -> ascend_serving::Result<()> {
    /// # #[cfg(feature = "emulation")] {
    /// use ascend_attention::{Runtime, bf16};
    /// use ascend_serving::kv::{CacheShape, ChannelScales, PadPolicy, PagedKvCache, QuantisedType, Sequence};
    /// use ascend_serving::{
    ///     Attention, AttentionMetadata, AttentionShape, Backend, Backends, BatchRequest,
    ///     BatchSettings, Causality,
    /// };
    ///
    /// let stream = Runtime::emulated()?.device(0)?.stream()?;
    /// let shape = CacheShape::new(1, 1, 64);
    /// let scales = [ChannelScales::uniform(&shape, 0.5, 0.25)?];
    /// let (pad, stored) = (PadPolicy::SkipNegative, QuantisedType::Int8);
    /// let cache = PagedKvCache::<bf16>::quantised(&stream, 4, 128, shape, pad, stored, &scales)?;
    /// let backends = Backends::none().with(Backend::QuantisedDecode).with(Backend::QuantisedPrefill);
    /// let mut attention = Attention::new(AttentionShape::new(1, 1, 64), cache, backends);
    /// let mut sequence = Sequence::new(attention.cache().pool());
    /// attention.grow(&stream, &mut sequence, 1)?;
    ///
    /// let settings = BatchSettings::of(attention.cache(), Causality::Causal);
    /// let metadata = AttentionMetadata::new(&[BatchRequest::of(&sequence, 1)], settings)?;
    /// let row = stream.upload(&[bf16::from_f32(0.8); 64], [1, 1, 64])?;
    /// let output = attention.begin(&stream, &metadata)?.forward(0, (&row, &row, &row))?.clone();
    /// // The first token of a sequence sees its own value, which is still of 16 bits. Those behind it see 3 * 0.25.
    /// assert_eq!(output.download(&stream)?, [bf16::from_f32(0.8); 64]);
    /// let stored = &attention.cache().quantised_layer(0)?.cache.value;
    /// assert_eq!(stored.download(&stream)?[..64], [3; 64]);
    /// # }
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// As for [`PagedKvCache::new`]; [`QUANTISED_SCALE`](crate::rules::QUANTISED_SCALE) for scales of another number
    /// of layers, heads or elements, or scales that are not numbers of the type `T`;
    /// [`ARGUMENT_VALUE`](crate::rules::ARGUMENT_VALUE) for another type `T`;
    /// [`Violation`](ascend_attention::Error::Violation) by the rules of FusedInferAttentionScore for floats on a
    /// product or release that reads none, such as `dtype.registered`.
    pub fn quantised(
        stream: &Stream,
        blocks: usize,
        block_size: usize,
        shape: CacheShape,
        pad: PadPolicy,
        stored: QuantisedType,
        scales: &[ChannelScales],
    ) -> Result<Self> {
        shape.check_layers()?;
        QueryType::of::<T>()?;
        let device = stream.device();
        let heads = shape.kv_heads;
        if scales.len() != shape.layers {
            return Err(wrong_scales(
                format_args!("scales of {} layers", scales.len()),
                format_args!("{} layers", shape.layers),
            )
            .into());
        }
        for (layer, scales) in scales.iter().enumerate() {
            for (name, scales, dim) in
                [("keys", scales.key(), shape.key_dim), ("values", scales.value(), shape.value_dim)]
            {
                if heads.checked_mul(dim) != Some(scales.len()) {
                    return Err(wrong_scales(
                        format_args!("{} scales for the {name} of layer {layer}", scales.len()),
                        format_args!("one for each of {heads} heads of {dim} elements"),
                    )
                    .into());
                }
            }
        }
        let pool = BlockPool::new(blocks, block_size, pad)?;
        shape.check_quantised(blocks, block_size)?;
        check_dequantised::<T>(device, &shape, stored, AntiquantMode::PerChannel)?;
        let upload = |scales: &[f32], dim: usize| {
            let one_axis = [scales.len()];
            let two_axes = [1, scales.len()];
            // The kernel of NZ caches requires the axes of the queries' layout.
            let factors: &[usize] = match shape.format {
                Cache::Nz => &one_axis,
                Cache::BnBsH | Cache::BnNBsD => &two_axes,
            };
            DeviceScales::upload::<T>(stream, scales, [heads, dim], factors)
        };
        let scales = scales.iter().map(|scales| {
            Ok(LayerScales::Channel {
                key: upload(scales.key(), shape.key_dim)?,
                value: upload(scales.value(), shape.value_dim)?,
            })
        });
        let scales = scales.collect::<Result<_>>()?;
        Self::with_scales(device, pool, shape, stored, scales)
    }

    /// A cache with a scale for each token, in blocks of its own: the largest number of the token's key in all heads
    /// becomes 127 as INT8 and 448 as FLOAT8_E4M3FN (on Ascend 950), and that of its value too. No calibration is
    /// needed, and numbers that are not finite are refused ([`QUANTISED_FINITE`](crate::rules::QUANTISED_FINITE))
    /// before anything of their layer is written.
    ///
    /// The host quantises: [`Step::forward`](crate::Step::forward) and [`PagedKvCache::write`] wait for the stream in
    /// each layer. Where that is too slow, take [`PagedKvCache::quantised`], which waits for nothing. The operator
    /// reads no scales of tokens with an NZ cache.
    ///
    /// # Errors
    /// As for [`PagedKvCache::new`]; [`ARGUMENT_VALUE`](crate::rules::ARGUMENT_VALUE) for NZ, for another type `T` than
    /// FLOAT16 and BF16, and for HIFLOAT8, which the operator reads with scales of channels alone;
    /// [`Violation`](ascend_attention::Error::Violation) as for [`PagedKvCache::quantised`].
    pub fn quantised_by_token(
        device: &Device,
        blocks: usize,
        block_size: usize,
        shape: CacheShape,
        pad: PadPolicy,
        stored: QuantisedType,
    ) -> Result<Self> {
        shape.check_layers()?;
        let Some(largest) = stored.largest_of_token() else {
            let dtype = stored.dtype();
            let stored = format_args!("{dtype}, with a scale for each token");
            let allowed = "INT8 or FLOAT8_E4M3FN; HIFLOAT8 has scales of channels: `PagedKvCache::quantised`";
            let fix = "store INT8 or FLOAT8_E4M3FN, or make the cache by `PagedKvCache::quantised`";
            return Err(Error::invalid("stored", stored, allowed).fix(fix));
        };
        if shape.format == Cache::Nz {
            return Err(Error::invalid(
                "shape.format",
                "NZ, with a scale for each token",
                "BnBsH or BnNBsD; NZ has scales of channels: `PagedKvCache::quantised`",
            )
            .fix("choose BnBsH or BnNBsD, or make the cache by `PagedKvCache::quantised`"));
        }
        QueryType::of::<T>()?;
        let pool = BlockPool::new(blocks, block_size, pad)?;
        shape.check_quantised(blocks, block_size)?;
        check_dequantised::<T>(device, &shape, stored, AntiquantMode::PerToken)?;
        // One head of one element is a number for each token.
        let one = CacheShape::new(shape.layers, 1, 1);
        let scales = one.zeroed_layers::<f32>(device, blocks, block_size)?;
        let scales = scales.into_iter().map(|rows| {
            Ok(LayerScales::Token(TokenScales {
                largest,
                key: rows.key.reshape([blocks, block_size])?,
                value: rows.value.reshape([blocks, block_size])?,
                rows,
            }))
        });
        Self::with_scales(device, pool, shape, stored, scales.collect::<Result<_>>()?)
    }

    /// A cache of MXFP8, for Ascend 950 with CANN 9.1: FLOAT8_E4M3FN in groups of 32 that share a scale, a power of
    /// two of FLOAT8_E8M0. A group of keys is neighbours in a head, a group of values the same element of
    /// neighbouring tokens. [`Backend::MxFp8`](crate::Backend::MxFp8) serves steps over it and makes queries MXFP8,
    /// too. No calibration is needed, no number is too large, and numbers that are not finite are refused
    /// ([`QUANTISED_FINITE`](crate::rules::QUANTISED_FINITE)) before anything of their layer is written.
    ///
    /// The host quantises: [`Step::forward`](crate::Step::forward) and [`PagedKvCache::write`] wait for the stream in
    /// each layer. Tokens are appended: a value written before others of its group of 32 tokens changes what those
    /// stand for, and [`PagedKvCache::move_tokens`] is refused.
    ///
    /// Blocks are BnNBsD, of 512 or 1024 tokens; heads have 64 or 128 elements.
    ///
    /// # Errors
    /// As for [`PagedKvCache::new`]; [`ARGUMENT_VALUE`](crate::rules::ARGUMENT_VALUE) for another format
    /// or type; [`Violation`](ascend_attention::Error::Violation) by the rules of FusedInferAttentionScore for a
    /// product, release, block size or head dimension without MXFP8, such as `mxfp8.cache`.
    pub fn mxfp8(device: &Device, blocks: usize, block_size: usize, shape: CacheShape, pad: PadPolicy) -> Result<Self> {
        shape.check_layers()?;
        if shape.format != Cache::BnNBsD {
            return Err(Error::invalid(
                "shape.format",
                format_args!("{:?}, of MXFP8", shape.format),
                "BnNBsD: `CacheShape::format(Cache::BnNBsD)`",
            )
            .fix("choose the format by `CacheShape::format(Cache::BnNBsD)`"));
        }
        QueryType::of::<T>()?;
        let pool = BlockPool::new(blocks, block_size, pad)?;
        shape.check_quantised(blocks, block_size)?;
        check_groups::<T>(device, &shape, block_size)?;
        let scales = (0..shape.layers).map(|_| {
            let scales = GroupScales::new(device, blocks, block_size, &shape)?;
            Ok(LayerScales::Group(scales))
        });
        let (stored, scales) = (QuantisedType::Float8E4M3Fn, scales.collect::<Result<_>>()?);
        Self::with_scales(device, pool, shape, stored, scales)
    }

    /// A cache of zeros with the scales of its layers.
    pub(super) fn with_scales(
        device: &Device,
        pool: BlockPool,
        shape: CacheShape,
        stored: QuantisedType,
        scales: Vec<LayerScales>,
    ) -> Result<Self> {
        let block_size = pool.block_size();
        let stored_shape = scales.first().map_or(shape, |scales| scales.stored_shape(&shape));
        let bytes = stored_shape.zeroed_layers(device, pool.blocks(), block_size)?;
        let empty = |dim| Tensor::empty(device, [0, block_size, shape.kv_heads * dim]);
        let none = LayerCache { key: empty(shape.key_dim)?, value: empty(shape.value_dim)? };
        let layers = bytes.into_iter().zip(scales).map(|(cache, scales)| {
            Ok(CacheLayer::Quantised {
                layer: Box::new(QuantisedLayer::new(cache, stored, scales)?),
                none: none.clone(),
            })
        });
        let layers = layers.collect::<Result<_>>()?;
        Ok(Self::of_layers(device, pool, shape, layers))
    }

    /// A cache of these layers, in blocks of a pool.
    pub(super) fn of_layers(device: &Device, pool: BlockPool, shape: CacheShape, layers: Vec<CacheLayer<T>>) -> Self {
        let of_layer = |layer: &CacheLayer<T>| match layer {
            CacheLayer::Plain(cache) => stored(cache, None).map(AnyTensor::addresses).collect::<Vec<_>>(),
            CacheLayer::Quantised { layer, none } => stored(none, Some(layer)).map(AnyTensor::addresses).collect(),
        };
        let stored = layers.iter().flat_map(of_layer).collect();
        Self { device: device.clone(), layers, entry: CacheEntry::new(&pool), pool, shape, stored }
    }

    /// Whether tokens share scales, as in a cache of MXFP8.
    pub(super) fn has_groups(&self) -> bool {
        self.layers.iter().any(|layer| match layer {
            CacheLayer::Plain(_) => false,
            CacheLayer::Quantised { layer, .. } => layer.group_scales().is_some(),
        })
    }

    /// Refuses a step that computes tokens once more in front of computed ones with which they share scales.
    pub(crate) fn check_recomputed(
        &self,
        requests: impl Iterator<Item = (usize, StepTokens)>,
    ) -> Result<(), Violation> {
        if !self.has_groups() {
            return Ok(());
        }
        for (request, tokens) in requests {
            let computed = self.entry().computed_tokens(tokens.stamp);
            if tokens.cached < tokens.len && tokens.len < computed {
                return Err(Violation::new(
                    &rules::CACHE_QUANTISED,
                    format_args!(
                        "tokens {} to {} of request {request}, computed once more before others in a cache of MXFP8",
                        tokens.cached,
                        tokens.len - 1
                    ),
                    format_args!("the last tokens of the first {computed}, which are computed"),
                    "compute the tokens behind them in the same step: values share powers of two with 31 others",
                ));
            }
        }
        Ok(())
    }

    /// Whether keys and values are quantised.
    pub fn is_quantised(&self) -> bool {
        matches!(self.layers[..], [CacheLayer::Quantised { .. }, ..])
    }

    /// The quantised cache of a layer.
    ///
    /// # Errors
    /// [`ARGUMENT_VALUE`](crate::rules::ARGUMENT_VALUE) for a layer that does not exist, and for a cache
    /// of the query's type.
    pub fn quantised_layer(&self, layer: usize) -> Result<&QuantisedLayer> {
        match self.cache_layer(layer)? {
            CacheLayer::Quantised { layer, .. } => Ok(layer),
            CacheLayer::Plain(_) => Err(Error::invalid(
                "cache",
                format_args!("a cache of {}", T::DTYPE),
                "a quantised cache: `PagedKvCache::quantised`",
            )
            .fix("make the cache by `PagedKvCache::quantised`")),
        }
    }

    /// The tensors of a layer; for a quantised layer a cache without blocks, and the quantised one.
    pub(crate) fn tensors(&self, layer: usize) -> Result<(LayerCache<T>, Option<QuantisedLayer>)> {
        Ok(match self.cache_layer(layer)? {
            CacheLayer::Plain(cache) => (cache.clone(), None),
            CacheLayer::Quantised { layer, none } => (none.clone(), Some((**layer).clone())),
        })
    }
}

/// Checks by the operator's rules that it dequantises such keys and values, as
/// [`Backend::QuantisedPrefill`](crate::Backend::QuantisedPrefill) does: one token at a time, copied out of the blocks.
/// Calls that read the blocks are checked when a step is planned, since a cache may have steps of one kind alone.
pub(super) fn check_dequantised<T: Element>(
    device: &Device,
    shape: &CacheShape,
    stored: QuantisedType,
    mode: AntiquantMode,
) -> Result<()> {
    for dim in [shape.key_dim, shape.value_dim] {
        let channels = shape.kv_heads * dim;
        let row = Tensor::<T>::empty(device, [1, 1, channels])?;
        let quantised = Tensor::<i8>::empty(device, row.shape())?.bits_as(stored.dtype())?;
        let scales: AnyTensor = match mode {
            AntiquantMode::PerToken => Tensor::<f32>::empty(device, [1, 1])?.into(),
            _ => Tensor::<T>::empty(device, [1, channels])?.into(),
        };
        let inputs = Inputs::new(&row, &quantised, &quantised);
        let quantisation = split(mode, &scales, &scales);
        let planned = one_key_each(shape.kv_heads).plan(inputs.quantisation(quantisation));
        planned.map_err(|error| match error {
            ascend_attention::Error::Violation(refused)
                if stored != QuantisedType::Int8 && ["dtype.registered", "call.product"].contains(&refused.rule.id) =>
            {
                let fix = "make a cache of INT8, or run on Ascend 950, whose operator reads caches of floats of 8 bits";
                let Violation { rule, given, allowed, .. } = refused;
                Violation::new(rule, given, allowed, fix).into()
            }
            other => other,
        })?;
    }
    Ok(())
}

/// Checks by the operator's rules that there is a call that reads MXFP8 in such blocks.
fn check_groups<T: Element>(device: &Device, shape: &CacheShape, block_size: usize) -> Result<()> {
    let (heads, dim) = (shape.kv_heads, shape.key_dim);
    let floats = |dims: &[usize]| Tensor::<Float8E4M3Fn>::empty(device, dims);
    let query = floats(&[1, heads, dim])?;
    let [key, value] = [dim, shape.value_dim].map(|dim| floats(&[1, heads, block_size, dim]));
    let scales = GroupScales::new(device, 1, block_size, shape)?;
    let query_scale = Tensor::<Float8E8M0>::empty(device, [heads, 1, 1, dim.div_ceil(64), 2])?;
    let table = BlockTable::zeroed(device, 1, 1, block_size)?;
    let (key, value) = (key?, value?);
    let inputs = Inputs::new(&query, &key, &value).paged(&table).quantisation(scales.quantisation(&query_scale));
    let lengths = CallLengths::PackedPaged { q: &Cumulative::new(vec![1])?, kv: &PerRequest::new(vec![1])? };
    let call = FusedInferAttention::new(Layout::Tnd).heads(heads).kv_heads(heads).scale(1.0);
    lengths.apply(call).out_dtype(T::DTYPE).plan(inputs)?;
    Ok(())
}

#[cold]
pub(super) fn wrong_scales(given: impl std::fmt::Display, allowed: impl std::fmt::Display) -> Violation {
    Violation::new(
        &rules::QUANTISED_SCALE,
        given,
        allowed,
        "calibrate with the model that is served, and bring the scales of each of its layers",
    )
}
