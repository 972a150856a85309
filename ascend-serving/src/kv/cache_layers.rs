//! The layers of a cache, of the query's type or quantised.

use ascend_attention::{Device, Element, Tensor};

use crate::error::Result;

use super::cache_shape::{CacheShape, LayerCache, no_layer};
use super::quantised::layer::QuantisedLayer;

/// The layers of a cache.
#[derive(Debug)]
pub(super) enum CacheLayers<T: Element> {
    /// Layers of the query's type.
    Plain(Vec<LayerCache<T>>),
    /// Quantised layers, of one byte for each number.
    Quantised {
        layers: Vec<QuantisedLayer>,
        /// A layer cache without blocks, which stands in for the cache of the query's type.
        none: Box<LayerCache<T>>,
    },
}

impl<T: Element> CacheLayers<T> {
    /// Quantised layers of a cache of this shape.
    pub(super) fn quantised(
        device: &Device,
        block_size: usize,
        shape: &CacheShape,
        layers: Vec<QuantisedLayer>,
    ) -> Result<Self> {
        let empty = |dim: usize| -> Result<Tensor<T>> {
            let hidden = shape.kv_heads.saturating_mul(dim);
            Ok(Tensor::empty(device, [0, block_size, hidden])?)
        };
        let none = Box::new(LayerCache {
            key: empty(shape.key_dim)?,
            value: empty(shape.value_dim)?,
        });
        Ok(Self::Quantised { layers, none })
    }

    /// Number of layers.
    pub(super) fn len(&self) -> usize {
        match self {
            Self::Plain(layers) => layers.len(),
            Self::Quantised { layers, .. } => layers.len(),
        }
    }

    /// A layer, plain or quantised.
    pub(super) fn get(&self, layer: usize) -> Result<OfLayer<'_, T>> {
        let of = match self {
            Self::Plain(layers) => layers.get(layer).map(OfLayer::Plain),
            Self::Quantised { layers, .. } => layers.get(layer).map(OfLayer::Quantised),
        };
        of.ok_or_else(|| no_layer(layer, self.len()))
    }

    /// All layers, plain or quantised.
    pub(super) fn iter(&self) -> impl Iterator<Item = OfLayer<'_, T>> {
        let (plain, quantised) = match self {
            Self::Plain(layers) => (&layers[..], &[][..]),
            Self::Quantised { layers, .. } => (&[][..], &layers[..]),
        };
        let plain = plain.iter().map(OfLayer::Plain);
        plain.chain(quantised.iter().map(OfLayer::Quantised))
    }

    /// The tensors of a layer; for a quantised layer a cache without blocks, and the quantised one.
    pub(super) fn tensors(&self, layer: usize) -> Result<(LayerCache<T>, Option<QuantisedLayer>)> {
        let of = match self {
            Self::Plain(layers) => layers.get(layer).map(|of| (of.clone(), None)),
            Self::Quantised { layers, none } => {
                let of = layers.get(layer);
                of.map(|of| (LayerCache::clone(none), Some(of.clone())))
            }
        };
        of.ok_or_else(|| no_layer(layer, self.len()))
    }
}

/// A layer of a cache.
#[derive(Clone, Copy, Debug)]
pub(super) enum OfLayer<'a, T: Element> {
    Plain(&'a LayerCache<T>),
    Quantised(&'a QuantisedLayer),
}

impl<T: Element> OfLayer<'_, T> {
    /// Bytes of device memory in blocks.
    pub(super) fn bytes(self) -> usize {
        match self {
            Self::Plain(of) => of.bytes(),
            Self::Quantised(of) => of.bytes(),
        }
    }
}
