//! A paged cache of INT8 keys and values.

use ascend_attention::spec::fia::Cache;
use ascend_attention::{DType, Device, Element, Stream, Tensor};

use crate::error::{Error, Result};
use crate::refusal::{Refused, Rule, refused};

use super::cache::PagedKvCache;
use super::cache_shape::{CacheShape, LayerCache, no_layer};
use super::pad::PadPolicy;
use super::quantised_layer::{LayerScales, QuantisedLayer, TokenScales};
use super::quantised_scales::{ChannelScales, DeviceScales, wrong_type};

impl<T: Element> PagedKvCache<T> {
    /// A cache as of [`PagedKvCache::new`] whose keys and values are INT8, with the scales of each layer. `T` stays the
    /// type of queries, of new keys and values, and of what is computed: FLOAT16 or BF16. It takes half the memory.
    ///
    /// What is written is quantised on the way, on the device and without waiting: see [`ChannelScales`]. Steps over it are
    /// served by [`QuantisedDecode`](crate::QuantisedDecode) and [`QuantisedPrefill`](crate::QuantisedPrefill). Numbers
    /// that are not finite have no integer: the device stores some integer for them, and says nothing
    /// ([`Tensor::range_report`] finds them).
    ///
    /// Heads are a multiple of 32 elements long. An NZ cache needs heads of 128 elements, blocks of 128 or 512
    /// tokens, and BF16 queries.
    ///
    /// ```
    /// # fn main() -> ascend_serving::Result<()> {
    /// # #[cfg(feature = "emulation")] {
    /// use ascend_attention::{Runtime, bf16};
    /// use ascend_serving::kv::{CacheShape, ChannelScales, PadPolicy, PagedKvCache, Sequence};
    /// use ascend_serving::{
    ///     Attention, AttentionMetadata, AttentionShape, Backends, BatchRequest, BatchSettings, Causality, QuantisedDecode,
    ///     QuantisedPrefill,
    /// };
    ///
    /// let stream = Runtime::emulated()?.device(0)?.stream()?;
    /// let shape = CacheShape::new(1, 1, 64);
    /// let scales = [ChannelScales::uniform(&shape, 0.5, 0.25)?];
    /// let cache = PagedKvCache::<bf16>::quantised(&stream, 4, 128, shape, PadPolicy::SkipNegative, &scales)?;
    /// let backends = Backends::none().with(QuantisedDecode).with(QuantisedPrefill);
    /// let mut attention = Attention::new(AttentionShape::new(1, 1, 64), cache, backends);
    /// let mut sequence = Sequence::new(attention.cache().pool());
    /// attention.grow(&stream, &mut sequence, 1)?;
    ///
    /// let settings = BatchSettings::of(attention.cache(), Causality::Causal);
    /// let metadata = AttentionMetadata::new(&[BatchRequest::of(&sequence, 1)], settings)?;
    /// let row = stream.upload(&[bf16::from_f32(0.8); 64], [1, 1, 64])?;
    /// let output = attention.begin(&stream, &metadata)?.forward(0, &row, &row, &row)?;
    /// // The first token of a sequence sees its own value, which is still of 16 bits. Those behind it see 3 * 0.25.
    /// assert_eq!(output.attention.download(&stream)?, [bf16::from_f32(0.8); 64]);
    /// let stored = &attention.cache().quantised_layer(0)?.cache.value;
    /// assert_eq!(stored.download(&stream)?[..64], [3; 64]);
    /// # }
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// As for [`PagedKvCache::new`]; [`Rule::QuantisedScale`] for scales of another number of layers, heads or elements, or
    /// which are not numbers of the type `T`; [`InvalidArgument`](ascend_attention::Error::InvalidArgument) for another type.
    pub fn quantised(
        stream: &Stream,
        blocks: usize,
        block_size: usize,
        shape: CacheShape,
        pad: PadPolicy,
        scales: &[ChannelScales],
    ) -> Result<Self> {
        let device = stream.device();
        let heads = shape.kv_heads;
        if scales.len() != shape.layers {
            return Err(wrong_scales(
                format_args!("scales of {} layers", scales.len()),
                format_args!("{} layers", shape.layers),
            )
            .into());
        }
        for (layer, of) in scales.iter().enumerate() {
            for (name, scales, dim) in [
                ("keys", of.key(), shape.key_dim),
                ("values", of.value(), shape.value_dim),
            ] {
                if heads.checked_mul(dim) != Some(scales.len()) {
                    return Err(wrong_scales(
                        format_args!("{} scales for the {name} of layer {layer}", scales.len()),
                        format_args!("one for each of {heads} heads of {dim} elements"),
                    )
                    .into());
                }
            }
        }
        let upload = |scales: &[f32]| {
            let one_axis = [scales.len()];
            let two_axes = [1, scales.len()];
            // The kernel of NZ caches wants the axes of the queries' layout.
            let factors: &[usize] = match shape.format {
                Cache::Nz => &one_axis,
                Cache::BnBsH | Cache::BnNBsD => &two_axes,
            };
            DeviceScales::upload::<T>(stream, scales, heads, factors)
        };
        let scales = scales.iter().map(|of| {
            Ok(LayerScales::ByChannel {
                key: upload(of.key())?,
                value: upload(of.value())?,
            })
        });
        let scales = scales.collect::<Result<_>>()?;
        Self::of_integers(device, blocks, block_size, shape, pad, scales)
    }

    /// An INT8 cache with a scale for each token, in blocks of its own: the largest number of the token's key in all heads
    /// becomes 127, that of its value too. No calibration is needed, and numbers that are not finite are refused
    /// ([`Rule::QuantisedFinite`]) before anything of their layer is written.
    ///
    /// The host quantises: [`Step::forward`](crate::Step::forward) and [`PagedKvCache::write`] wait for the stream in each
    /// layer. Where that is too slow, take [`PagedKvCache::quantised`], which waits for nothing. The operator reads no
    /// scales of tokens with an NZ cache.
    ///
    /// # Errors
    /// As for [`PagedKvCache::new`]; [`InvalidArgument`](ascend_attention::Error::InvalidArgument) for NZ, and for another type
    /// than FLOAT16 and BF16.
    pub fn quantised_by_token(
        device: &Device,
        blocks: usize,
        block_size: usize,
        shape: CacheShape,
        pad: PadPolicy,
    ) -> Result<Self> {
        if shape.format == Cache::Nz {
            return Err(Error::invalid(
                "shape.format",
                "NZ, with a scale for each token",
                "BnBsH or BnNBsD; NZ has scales of channels: `PagedKvCache::quantised`",
            ));
        }
        if !matches!(T::DTYPE, DType::Float16 | DType::Bf16) {
            return Err(wrong_type(T::DTYPE));
        }
        // A cache of one head of one element has a number for each token.
        let one = CacheShape::new(shape.layers, 1, 1);
        let scales = PagedKvCache::<f32>::new(device, blocks, block_size, one, pad)?;
        let scales = scales.layers.into_iter().map(|rows| {
            Ok(LayerScales::ByToken(TokenScales {
                key: rows.key.reshape([blocks, block_size])?,
                value: rows.value.reshape([blocks, block_size])?,
                rows,
            }))
        });
        let scales = scales.collect::<Result<_>>()?;
        Self::of_integers(device, blocks, block_size, shape, pad, scales)
    }

    fn of_integers(
        device: &Device,
        blocks: usize,
        block_size: usize,
        shape: CacheShape,
        pad: PadPolicy,
        scales: Vec<LayerScales>,
    ) -> Result<Self> {
        let PagedKvCache { pool, layers, .. } =
            PagedKvCache::<i8>::new(device, blocks, block_size, shape, pad)?;
        let layer = |(cache, scales)| QuantisedLayer { cache, scales };
        let empty = |dim: usize| -> Result<Tensor<T>> {
            let hidden = shape.kv_heads.saturating_mul(dim);
            Ok(Tensor::empty(device, [0, block_size, hidden])?)
        };
        let none = LayerCache {
            key: empty(shape.key_dim)?,
            value: empty(shape.value_dim)?,
        };
        Ok(Self {
            device: device.clone(),
            pool,
            shape,
            layers: vec![none; shape.layers],
            quantised: Some(layers.into_iter().zip(scales).map(layer).collect()),
        })
    }

    /// Whether keys and values are INT8.
    pub fn is_quantised(&self) -> bool {
        self.quantised.is_some()
    }

    /// The cache of a layer in INT8.
    ///
    /// # Errors
    /// [`InvalidArgument`](ascend_attention::Error::InvalidArgument) for a layer that there is not, and for a cache of the
    /// query's type.
    pub fn quantised_layer(&self, layer: usize) -> Result<&QuantisedLayer> {
        match &self.quantised {
            Some(all) => all.get(layer).ok_or_else(|| no_layer(layer, all.len())),
            None => Err(Error::invalid(
                "cache",
                format_args!("a cache of {}", T::DTYPE),
                "INT8: a cache by `PagedKvCache::quantised`",
            )),
        }
    }

    /// The tensors of a layer: without blocks where there are others, in INT8.
    pub(crate) fn tensors(&self, layer: usize) -> Result<(LayerCache<T>, Option<QuantisedLayer>)> {
        let of = self.layers.get(layer);
        let of = of.ok_or_else(|| no_layer(layer, self.layers.len()))?;
        let quantised = self.quantised.as_ref().and_then(|all| all.get(layer));
        Ok((of.clone(), quantised.cloned()))
    }
}

#[cold]
fn wrong_scales(given: impl std::fmt::Display, allowed: impl std::fmt::Display) -> Refused {
    refused(
        Rule::QuantisedScale,
        given,
        allowed,
        "calibrate with the model that is served, and bring `ChannelScales` for each of its layers",
    )
}
