//! Layers with scales of their own.

use ascend_attention::Element;

use crate::error::{Error, Result};
use crate::sharing::lock;

use super::attention::Attention;

impl<T: Element> Attention<T> {
    /// Gives each layer of attention that has keys a scale of its scores, by its number in the model, in the place of
    /// that of its group's [`AttentionShape`](crate::AttentionShape): for models that divide by the number of the layer
    /// (`scale_attn_by_inverse_layer_idx`) or learn a scale. Where some layers
    /// [share keys](crate::LayerInputs::shared_keys), those with keys alone have numbers, and a layer that shares them
    /// has the scale of the layer that has them.
    ///
    /// A step plans once for each scale, when the first layer with it is queued, and what a plan holds
    /// ([`StepPlan::memory`](crate::StepPlan::memory)) is held for each; the
    /// [limit of memory](crate::Backends::memory_limit) counts all of them. Graphs have the scales of their
    /// capture, and replay no step once other ones are set. What is made with heads of its own, such as a
    /// [`TreeVerification`](crate::TreeVerification), has one scale.
    ///
    /// ```
    /// # fn main() -> ascend_serving::Result<()> {
    /// # #[cfg(feature = "emulation")] {
    /// use ascend_attention::{Runtime, bf16};
    /// use ascend_serving::kv::{CacheShape, PadPolicy, PagedKvCache};
    /// use ascend_serving::{Attention, AttentionShape, Backends};
    ///
    /// let device = Runtime::emulated()?.device(0)?;
    /// let cache = PagedKvCache::<bf16>::new(&device, 8, 128, CacheShape::new(4, 2, 64), PadPolicy::SkipNegative)?;
    /// let attention = Attention::new(AttentionShape::new(4, 2, 64), cache, Backends::standard(&device));
    /// let attention = attention.layer_scales(|layer| 0.1 / (layer + 1) as f64)?;
    /// assert!(attention.layer_scales(|_| 0.0).is_err());
    /// # }
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// [`ARGUMENT_VALUE`](crate::rules::ARGUMENT_VALUE) as for
    /// [`AttentionShape::check`](crate::AttentionShape::check), with the layer.
    pub fn layer_scales(self, scale: impl Fn(usize) -> f64) -> Result<Self> {
        let scales = self.groups.iter().map(|group| {
            let scales = group.layers.iter().map(|layer| {
                let scale = scale(*layer);
                let mut checked = group.shape.scale(scale).check();
                if let Err(Error::Violation(why)) = &mut checked {
                    why.given.push_str(&format!(" in layer {layer}"));
                }
                checked.map(|()| scale)
            });
            scales.collect::<Result<Vec<_>>>()
        });
        let scales = scales.collect::<Result<Vec<_>>>()?;
        for (group, scales) in self.groups.iter().zip(scales) {
            *lock(&group.scales) = scales;
        }
        Ok(self)
    }
}
