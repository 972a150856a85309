//! The INT8 keys and values of one layer.

use ascend_attention::attention::{Affine, Antiquantisation, Quantisation};
use ascend_attention::spec::fia::AntiquantMode;
use ascend_attention::{AnyTensor, Stream, Tensor};

use crate::error::Result;

use super::cache_shape::LayerCache;
use super::quantised_scales::DeviceScales;

/// The cache of one layer in INT8, and what its integers stand for: `stored * scale`.
#[derive(Clone, Debug)]
pub struct QuantisedLayer {
    /// Keys and values, in the cache's format.
    pub cache: LayerCache<i8>,
    pub(super) scales: LayerScales,
}

/// Which elements of a layer share a scale.
#[derive(Clone, Debug)]
pub(super) enum LayerScales {
    /// Those of a head and place in it.
    ByChannel {
        key: DeviceScales,
        value: DeviceScales,
    },
    /// Those of a token.
    ByToken(TokenScales),
}

/// Scales in the blocks of their tokens.
#[derive(Clone, Debug)]
pub(crate) struct TokenScales {
    /// As tokens of one element, `[blocks, block_size, 1]`.
    pub(crate) rows: LayerCache<f32>,
    /// As the operator reads them, `[blocks, block_size]`.
    pub(super) key: Tensor<f32>,
    pub(super) value: Tensor<f32>,
}

impl QuantisedLayer {
    /// What a call that reads the keys and values in their blocks brings besides.
    pub fn quantisation(&self) -> Quantisation<'_> {
        match &self.scales {
            LayerScales::ByChannel { key, value } => {
                split(AntiquantMode::PerChannel, &key.factors, &value.factors)
            }
            LayerScales::ByToken(TokenScales { key, value, .. }) => {
                split(AntiquantMode::PerTokenPaged, key, value)
            }
        }
    }

    /// The scales of keys and of values, where they are the same for all tokens.
    pub(crate) fn of_channels(&self) -> Option<[&AnyTensor; 2]> {
        match &self.scales {
            LayerScales::ByChannel { key, value } => Some([&key.factors, &value.factors]),
            LayerScales::ByToken(_) => None,
        }
    }

    /// The scales where each token has its own.
    pub(crate) fn of_tokens(&self) -> Option<&TokenScales> {
        match &self.scales {
            LayerScales::ByChannel { .. } => None,
            LayerScales::ByToken(scales) => Some(scales),
        }
    }

    /// Bytes of device memory in blocks.
    pub(super) fn bytes(&self) -> usize {
        let scales = self.of_tokens().map_or(0, |scales| scales.rows.bytes());
        self.cache.bytes().saturating_add(scales)
    }

    /// Queues the copying of a block to another.
    pub(super) fn copy_block(&self, stream: &Stream, from: usize, to: usize) -> Result<()> {
        self.cache.copy_block(stream, from, to)?;
        match self.of_tokens() {
            Some(scales) => scales.rows.copy_block(stream, from, to),
            None => Ok(()),
        }
    }
}

/// What a call brings that reads keys and values with scales apart.
pub(crate) fn split<'a>(
    mode: AntiquantMode,
    key: &'a AnyTensor,
    value: &'a AnyTensor,
) -> Quantisation<'a> {
    Quantisation::KeyValue {
        antiquantisation: Antiquantisation::Split {
            mode,
            key: Affine::scale(key),
            value: Affine::scale(value),
        },
        output: None,
    }
}
