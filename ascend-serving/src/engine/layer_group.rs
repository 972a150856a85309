//! The rows of a model's table of layers: layers that are computed alike.

use std::sync::{Arc, Mutex};

use ascend_attention::{Element, Stream, Violation};

use crate::backends::{AttentionShape, Backends};
use crate::batch::LayerMask;
use crate::causality::Causality;
use crate::error::Result;
use crate::kv::{CacheShape, PagedKvCache};
use crate::rules;
use crate::sharing::lock;

/// Layers of a model that see the same keys and share a cache: a row of the table that [`Attention`](crate::Attention)
/// is.
#[derive(Debug)]
pub struct LayerGroup<T: Element> {
    pub(super) layers: Vec<usize>,
    /// `None` where each step says which keys its tokens see.
    pub(super) causality: Option<Causality>,
    pub(super) shape: AttentionShape,
    /// The factor of the scores of each layer, in the order of the cache, which graphs compare with those of their
    /// capture.
    pub(super) scales: Arc<Mutex<Vec<f64>>>,
    pub(super) cache: PagedKvCache<T>,
    pub(super) backends: Backends<T>,
}

/// The group and number of a layer of the model.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct LayerPlace {
    /// Its group; for one of linear attention the number behind that of the last group.
    pub(crate) group: usize,
    /// Its number among the layers of the group, as their cache counts them, or among those of linear attention.
    pub(crate) layer: usize,
}

impl<T: Element> LayerGroup<T> {
    /// A group of these layers of the model, in the order in which the cache has them. At most one layer more than
    /// [`CacheShape::MAX_LAYERS`] is kept: no [`Attention`](crate::Attention) takes more. The backends are
    /// [preferred](Backends::prefer) for layers of the group.
    pub fn new(
        layers: impl IntoIterator<Item = usize>,
        causality: Causality,
        shape: AttentionShape,
        cache: PagedKvCache<T>,
        backends: Backends<T>,
    ) -> Self {
        let layers: Vec<_> = layers.into_iter().take(CacheShape::MAX_LAYERS.saturating_add(1)).collect();
        let scales = Arc::new(Mutex::new(vec![shape.scale; layers.len()]));
        Self { layers, causality: Some(causality), shape, scales, cache, backends }
    }

    /// The layers, as the model numbers them.
    pub fn layers(&self) -> &[usize] {
        &self.layers
    }

    /// Which keys their tokens see; causal where that is left to the steps.
    pub fn causality(&self) -> Causality {
        self.causality.unwrap_or_default()
    }

    /// The heads. Layers may have [scales of their own](crate::Attention::layer_scales).
    pub fn shape(&self) -> AttentionShape {
        self.shape
    }

    /// The heads of a layer, as the cache numbers it, with its scale.
    pub(crate) fn shape_of(&self, layer: usize) -> AttentionShape {
        match lock(&self.scales).get(layer) {
            Some(scale) => self.shape.scale(*scale),
            None => self.shape,
        }
    }

    /// The number of scales that the layers have.
    pub(super) fn scale_count(&self) -> usize {
        let mut scales: Vec<u64> = lock(&self.scales).iter().map(|scale| scale.to_bits()).collect();
        scales.sort_unstable();
        scales.dedup();
        scales.len()
    }

    /// The cache.
    pub fn cache(&self) -> &PagedKvCache<T> {
        &self.cache
    }

    /// The backends, in the order in which they are tried.
    pub fn backends(&self) -> &Backends<T> {
        &self.backends
    }

    /// Refuses a stream of another device, a cache of other layers, which may have been put in the place of the group's
    /// own, and heads and preferences of backends that do not fit the cache.
    pub(crate) fn check(&self, stream: &Stream) -> Result<()> {
        self.cache.admits(stream)?;
        let shape = self.cache.shape();
        if shape.layers != self.layers.len() {
            return Err(Violation::new(
                &rules::GROUP_LAYERS,
                format_args!("a cache of {} layers", shape.layers),
                format_args!("{} layers, as the group has", self.layers.len()),
                "put a cache of as many layers in its place, or make the attention anew",
            )
            .into());
        }
        self.shape.check_cache(&shape)?;
        Ok(self.backends.check_layers(shape.layers)?)
    }

    /// Which keys their tokens see, unless that is left to the steps.
    pub(crate) fn fixed_causality(&self) -> Option<Causality> {
        self.causality
    }

    /// Refuses a mask that shows more of a token's past than the layers see.
    pub(crate) fn check_mask(&self, mask: &LayerMask) -> Result<(), Violation> {
        match self.causality.filter(|own| !mask.is_within(*own)) {
            None => Ok(()),
            Some(own) => Err(Violation::new(
                &rules::STEP_CAUSALITY,
                format_args!("{mask} for layers of {}", LayerMask::from(own)),
                format_args!("{}, or a mask that shows less of a token's past", LayerMask::from(own)),
                "leave the mask to the group (`Attention::mask`, `Attention::capture_layers`), or make a group of the \
                 layers that see more",
            )),
        }
    }
}
