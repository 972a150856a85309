//! The INT8 keys and values of one layer.

use ascend_attention::attention::{Affine, Antiquantisation, Quantisation};
use ascend_attention::spec::fia::AntiquantMode;

use super::cache_shape::LayerCache;
use super::quantised_scales::DeviceScales;

/// The cache of one layer in INT8, and what its integers stand for: `stored * scale`.
#[derive(Clone, Debug)]
pub struct QuantisedLayer {
    /// Keys and values, in the cache's format.
    pub cache: LayerCache<i8>,
    pub(super) key: DeviceScales,
    pub(super) value: DeviceScales,
}

impl QuantisedLayer {
    /// What a call that reads the keys and values brings besides.
    pub fn quantisation(&self) -> Quantisation<'_> {
        by_channel(&self.key, &self.value)
    }

    /// What a call brings that reads the keys in the place of both.
    pub(crate) fn of_keys(&self) -> Quantisation<'_> {
        by_channel(&self.key, &self.key)
    }

    /// What a call brings that reads the values in the place of both.
    pub(crate) fn of_values(&self) -> Quantisation<'_> {
        by_channel(&self.value, &self.value)
    }
}

fn by_channel<'a>(key: &'a DeviceScales, value: &'a DeviceScales) -> Quantisation<'a> {
    Quantisation::KeyValue {
        antiquantisation: Antiquantisation::Split {
            mode: AntiquantMode::PerChannel,
            key: Affine::scale(&key.factors),
            value: Affine::scale(&value.factors),
        },
        output: None,
    }
}
