//! A paged cache of latents of one byte an element, whose rotary keys keep 16 bits.

use ascend_attention::attention::{BlockTable, CallLengths, Cumulative, Inputs, PerRequest, Quantisation};
use ascend_attention::spec::ops::fused_infer_attention_score::AntiquantMode;
use ascend_attention::{AnyTensor, Device, Element, FusedInferAttention, Layout, Stream, Tensor, bf16};

use crate::error::{Error, Result};

use super::cache::{CacheLayer, PagedKvCache};
use super::cache_shape::{CacheShape, LayerCache};
use super::pad::PadPolicy;
use super::pool::BlockPool;
use super::quantised::{DeviceLatentScale, LatentScale, LayerScales, QuantisedLayer, QuantisedType, bytes_of};
use super::quantised_cache::{check_dequantised, wrong_scales};

impl<T: Element> PagedKvCache<T> {
    /// A cache of latents of one byte an element with a scale for each layer, of [`CacheShape::latent`], for
    /// [`Backend::QuantisedMla`](crate::Backend::QuantisedMla): 640 bytes a token and layer in place of 1152. Rotary
    /// keys stay BF16, and so is `T`, the type of new latents, rotary keys and results.
    ///
    /// Writes quantise on the device and without waiting. Numbers that are too large are cut as INT8, and not as floats
    /// ([`QuantisedType`]). Those that are not finite have no integer: the device stores some integer for them, and
    /// reports nothing ([`Tensor::range_report`] finds them).
    ///
    /// Which products and releases take which types and formats, in blocks of 128 tokens, is a table of the book's page
    /// on latent attention; others are refused. Layers that attend to chosen keys have a cache of
    /// [`quantised_sparse_latents`](Self::quantised_sparse_latents).
    ///
    /// Absorbed queries are quantised, too, by the model: [`QuantisedQueries`](crate::QuantisedQueries).
    ///
    /// # Errors
    /// As for [`PagedKvCache::new`]; [`ARGUMENT_VALUE`](crate::rules::ARGUMENT_VALUE) for another type than BF16 and
    /// another shape; [`QUANTISED_SCALE`](crate::rules::QUANTISED_SCALE) for scales of another number of layers;
    /// [`Violation`](ascend_attention::Error::Violation) by the rules of FusedInferAttentionScore for a product,
    /// release, format or block size without such caches, such as `mla.full_quant`.
    pub fn quantised_latents(
        stream: &Stream,
        blocks: usize,
        block_size: usize,
        shape: CacheShape,
        pad: PadPolicy,
        stored: QuantisedType,
        scales: &[LatentScale],
    ) -> Result<Self> {
        shape.check_layers()?;
        if T::DTYPE != bf16::DTYPE {
            return Err(Error::invalid("T", T::DTYPE, "BF16: the type of rotary keys beside latents of 8 bits")
                .fix("compute such layers in BF16"));
        }
        if !shape.is_latent() {
            return Err(Error::invalid("shape", format_args!("{shape:?}"), "that of latents")
                .fix("make the shape by `CacheShape::latent`, and other caches by `PagedKvCache::quantised`"));
        }
        if scales.len() != shape.layers {
            return Err(wrong_scales(
                format_args!("scales of the latents of {} layers", scales.len()),
                format_args!("{} layers", shape.layers),
            )
            .into());
        }
        let pool = BlockPool::new(blocks, block_size, pad)?;
        shape.check_quantised(blocks, block_size)?;
        let device = stream.device();
        check_absorbed::<T>(device, &shape, block_size, stored).map_err(|why| why.fix(READ_BY_A_CALL))?;
        check_dequantised::<T>(
            device,
            &CacheShape { value_dim: shape.key_dim, ..shape },
            stored,
            AntiquantMode::PerChannel,
        )?;
        let none = LayerCache {
            key: Tensor::empty(device, [0, block_size, shape.key_dim])?,
            value: Tensor::empty(device, [0, block_size, shape.value_dim])?,
        };
        let layers = rows_of::<T>(&shape).zeroed_layers::<T>(device, blocks, block_size)?;
        let layers = layers.into_iter().zip(scales).map(|(rows, scale)| {
            let scales = LayerScales::Latent(DeviceLatentScale::upload::<T>(stream, &shape, *scale)?);
            let cache = LayerCache { key: bytes_of(&rows.key)?, value: bytes_of(&rows.value)? };
            let layer = QuantisedLayer::with_values(cache, stored, scales, rows.value.into())?;
            Ok(CacheLayer::Quantised { layer: Box::new(layer), none: none.clone() })
        });
        let layers = layers.collect::<Result<_>>()?;
        Ok(Self::of_layers(device, pool, shape, layers))
    }
}

/// The shape of the memory in elements of the type of rotary keys, each of which holds as many elements of a latent as
/// it has bytes.
fn rows_of<T: Element>(shape: &CacheShape) -> CacheShape {
    CacheShape { key_dim: shape.key_dim / size_of::<T>().max(1), ..*shape }
}

/// Checks by the operator's rules that there is a call that reads latents of this type in such blocks.
fn check_absorbed<T: Element>(
    device: &Device,
    shape: &CacheShape,
    block_size: usize,
    stored: QuantisedType,
) -> Result<()> {
    let one_block = CacheShape { layers: 1, ..rows_of::<T>(shape) }.zeroed_layers::<T>(device, 1, block_size)?;
    let Some(rows) = one_block.first() else {
        return Ok(());
    };
    let latents = bytes_of(&rows.key)?.bits_as(stored.dtype())?;
    let query = Tensor::<i8>::empty(device, [1, 1, shape.key_dim])?.bits_as(stored.dtype())?;
    let query_rope: AnyTensor = Tensor::<T>::empty(device, [1, 1, shape.value_dim])?.into();
    let (of_query, of_latents) = (Tensor::empty(device, [1, 1])?, Tensor::empty(device, [1])?);
    let table = BlockTable::zeroed(device, 1, 1, block_size)?;
    let inputs = Inputs::<T>::of_any(&query, &latents, &latents);
    let inputs = inputs.rope_of_any(&query_rope, &rows.value).paged(&table).quantisation(Quantisation::Latent {
        dequant_scale_query: &of_query,
        key_scale: &of_latents,
        value_scale: &of_latents,
    });
    let lengths = CallLengths::PackedPaged { q: &Cumulative::new(vec![1])?, kv: &PerRequest::new(vec![1])? };
    let call = FusedInferAttention::new(Layout::TndNtd).heads(1).kv_heads(1).scale(1.0);
    lengths.apply(call).plan(inputs)?;
    Ok(())
}

/// What mends a cache that no call reads.
const READ_BY_A_CALL: &str = "store INT8 in the format `Cache::Nz` and blocks of 128 tokens, from CANN 8.5 on; on \
     Ascend 950 perhaps floats of 8 bits; otherwise cache latents of 16 bits by `PagedKvCache::new`";
