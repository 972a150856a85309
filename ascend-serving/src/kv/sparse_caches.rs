//! Paged caches of one byte an element for sparse attention: of latents, and of the keys of indexers.

use ascend_attention::{Device, Element, f16};

use crate::error::Result;

use super::cache::{CacheLayer, PagedKvCache};
use super::cache_shape::CacheShape;
use super::pad::PadPolicy;
use super::pool::BlockPool;
use super::quantised::{LayerScales, QuantisedType, QueryType};

impl<T: Element> PagedKvCache<T> {
    /// An INT8 cache of latents for [`SparseLatent`](crate::SparseLatent), of [`CacheShape::latent`]: a token is a row
    /// of 656 bytes, which KvQuantSparseFlashAttention reads. It has the 512 elements of the latent, with a scale of
    /// FLOAT for each 128, and the rotary key as it is. `T`, FLOAT16 or BF16, is the type of new latents and rotary
    /// keys, which are written as to a cache of that type.
    ///
    /// Layers that see every key have a cache of [`quantised_latents`](Self::quantised_latents).
    ///
    /// No calibration is needed, and numbers that are not finite are refused
    /// ([`QUANTISED_FINITE`](crate::rules::QUANTISED_FINITE)) before anything of their layer is written. The host
    /// quantises: steps and [`PagedKvCache::write`] wait for the stream in each layer.
    ///
    /// # Errors
    /// As for [`PagedKvCache::new`]; [`ARGUMENT_VALUE`](crate::rules::ARGUMENT_VALUE) for another type.
    pub fn quantised_sparse_latents(
        device: &Device,
        blocks: usize,
        block_size: usize,
        layers: usize,
        pad: PadPolicy,
    ) -> Result<Self> {
        let shape = CacheShape::latent(layers);
        Self::quantised_sparse(device, [blocks, block_size], shape, pad, || Ok(vec![LayerScales::Row; layers]))
    }

    /// An INT8 cache of the keys of indexers for [`SparseLatent`](crate::SparseLatent), of
    /// [`CacheShape::index_keys`], with a scale of FLOAT16 for each key, which QuantLightningIndexer reads. New keys
    /// are of `T`, FLOAT16 or BF16.
    ///
    /// The host quantises, as of [`quantised_sparse_latents`](Self::quantised_sparse_latents).
    ///
    /// # Errors
    /// As for [`quantised_sparse_latents`](Self::quantised_sparse_latents).
    pub fn quantised_index_keys(
        device: &Device,
        blocks: usize,
        block_size: usize,
        layers: usize,
        pad: PadPolicy,
    ) -> Result<Self> {
        // One head of one element is a number for each token.
        let one = CacheShape::new(layers, 1, 1).value_dim(0);
        let scales = || {
            let scales = one.zeroed_layers::<f16>(device, blocks, block_size)?;
            Ok(scales.into_iter().map(LayerScales::IndexKey).collect())
        };
        Self::quantised_sparse(device, [blocks, block_size], CacheShape::index_keys(layers), pad, scales)
    }

    /// A cache of this shape, with the scales of each layer.
    fn quantised_sparse(
        device: &Device,
        [blocks, block_size]: [usize; 2],
        shape: CacheShape,
        pad: PadPolicy,
        scales: impl FnOnce() -> Result<Vec<LayerScales>>,
    ) -> Result<Self> {
        shape.check_layers()?;
        QueryType::of::<T>()?;
        let pool = BlockPool::new(blocks, block_size, pad)?;
        Self::with_scales(device, pool, shape, QuantisedType::Int8, scales()?)
    }

    /// Whether it has quantised layers that operators of sparse attention read.
    pub(crate) fn is_quantised_sparse(&self) -> bool {
        matches!(&self.layers[..], [CacheLayer::Quantised { layer, .. }, ..] if layer.is_sparse())
    }
}
