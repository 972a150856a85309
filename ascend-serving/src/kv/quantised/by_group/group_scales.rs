//! The shared scales of a layer of MXFP8.

use ascend_attention::attention::Quantisation;
use ascend_attention::spec::minifloat::Float8E8M0;
use ascend_attention::{Device, Element, Tensor};

use crate::error::Result;
use crate::kv::cache_shape::{CacheShape, LayerCache};

use super::mxfp8::GROUP;
use super::value_pair::PAIR;

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
    pub(in crate::kv) fn new(
        device: &Device,
        blocks: usize,
        block_size: usize,
        shape: &CacheShape,
    ) -> Result<Self> {
        let heads = shape.kv_heads;
        let pairs = block_size.div_ceil(PAIR);
        let of_key = shape.key_dim.div_ceil(2 * GROUP);
        let of_value = shape.value_dim.saturating_mul(2);
        let zeros = |of_head: usize, last: usize| -> Result<Tensor<i8>> {
            let dims = [blocks, heads, of_head, last];
            let all = dims
                .iter()
                .try_fold(1usize, |all, dim| all.checked_mul(*dim));
            let buffer = device.alloc_zeroed::<i8>(all.unwrap_or(usize::MAX))?;
            Ok(Tensor::from_buffer(&buffer, dims)?)
        };
        let key = zeros(block_size, of_key.saturating_mul(2))?;
        let value = zeros(pairs, of_value)?;
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
        Quantisation::MxFp8 {
            query_scale: query,
            key_scale: &self.key,
            value_scale: &self.value,
            quant_scale1: None,
        }
    }
}
