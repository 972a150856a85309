//! Where the tensors of a cache are: an output of a caller must not overlap them.

use std::ops::Range;
use std::sync::Arc;

use ascend_attention::{AnyTensor, Element};

use crate::error::{Error, Result};

use super::cache_shape::LayerCache;
use super::quantised::QuantisedLayer;

/// The tensors of a layer: keys and values, of a quantised one with its scales.
pub(crate) fn stored<'a, T: Element>(
    cache: &'a LayerCache<T>,
    quantised: Option<&'a QuantisedLayer>,
) -> impl Iterator<Item = &'a AnyTensor> + Clone + use<'a, T> {
    let quantised = quantised.into_iter().flat_map(|quantised| {
        let [key_scale, value_scale] = quantised.scales();
        [Some(quantised.key()), Some(quantised.value()), key_scale, value_scale].into_iter().flatten()
    });
    [&*cache.key, &*cache.value].into_iter().chain(quantised)
}

/// Refuses an output of the caller over the tensors of some cache, which other layers and steps read.
pub(crate) fn check_outside_caches<'a>(
    name: &'static str,
    output: &AnyTensor,
    caches: impl IntoIterator<Item = &'a Arc<[Range<usize>]>>,
) -> Result<()> {
    let mut stored = caches.into_iter().flat_map(|cache| cache.iter());
    match stored.any(|other| output.overlaps_addresses(other)) {
        false => Ok(()),
        true => Err(Error::shared(name, "memory that is shared with the cache", "memory of its own")),
    }
}
