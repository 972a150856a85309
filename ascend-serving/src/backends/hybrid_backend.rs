//! A backend that chooses another one by layer and by kind of step.

use std::collections::BTreeMap;
use std::fmt;

use ascend_attention::{Element, Violation};

use crate::batch::AttentionState;
use crate::error::{Error, Result};
use crate::kv::CacheShape;
use crate::rules;

use super::backend::{AttentionBackend, checked_program};
use super::program::{LayerPrograms, StepProgram};
use super::refused_backend::refused_part;
use super::registry::Backends;
use super::step_context::{LayerTensors, StepContext};

/// The kinds of steps for which a [`HybridBackend`] chooses backends.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Phase {
    /// Prompts, with or without cached tokens.
    Prefill,
    /// One token a request.
    Decode,
    /// Prompts, or chunks of them, beside decoding.
    Mixed,
    /// Steps that verify drafts of [`Drafting::Mtp`](crate::Drafting::Mtp).
    Speculative,
}

impl Phase {
    /// Every phase.
    pub const ALL: [Self; 4] = [Self::Prefill, Self::Decode, Self::Mixed, Self::Speculative];

    /// The phase's element of an array in the order of [`Phase::ALL`].
    fn of<V>(self, [prefill, decode, mixed, speculative]: [V; 4]) -> V {
        match self {
            Self::Prefill => prefill,
            Self::Decode => decode,
            Self::Mixed => mixed,
            Self::Speculative => speculative,
        }
    }
}

impl From<AttentionState> for Phase {
    fn from(state: AttentionState) -> Self {
        match state {
            AttentionState::PrefillNoCache | AttentionState::PrefillCacheHit => Self::Prefill,
            AttentionState::DecodeOnly => Self::Decode,
            AttentionState::ChunkedPrefill => Self::Mixed,
            AttentionState::SpecDecoding => Self::Speculative,
        }
    }
}

/// Layers that are computed alike, and the backend of each phase.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LayerSet {
    layers: Vec<usize>,
    /// Names of backends, in the order of [`Phase::ALL`].
    backends: [String; 4],
}

impl LayerSet {
    /// A set of these layers, with one backend for every phase. At most one layer more than
    /// [`CacheShape::MAX_LAYERS`] is kept: no [`HybridBackend`] takes more.
    pub fn new(layers: impl IntoIterator<Item = usize>, backend: impl Into<String>) -> Self {
        let backend = backend.into();
        Self {
            layers: layers.into_iter().take(CacheShape::MAX_LAYERS.saturating_add(1)).collect(),
            backends: Phase::ALL.map(|_| backend.clone()),
        }
    }

    /// Sets another backend for one phase.
    pub fn during(mut self, phase: Phase, backend: impl Into<String>) -> Self {
        let place = phase.of(self.backends.each_mut());
        *place = backend.into();
        self
    }

    /// The layers.
    pub fn layers(&self) -> &[usize] {
        &self.layers
    }

    /// Name of the backend of a phase.
    pub fn backend(&self, phase: Phase) -> &str {
        phase.of(self.backends.each_ref().map(String::as_str))
    }
}

/// Chooses a backend by layer and by the kind of the step.
///
/// When the first layer of a step is planned, the step is planned once with each backend that its phase needs, so
/// that a refusal comes before anything is written. All layers have tensors of the same shapes. The registry's
/// [`memory_limit`](Backends::memory_limit) is for the plans of a step together.
///
/// ```
/// use ascend_serving::{Backends, FusedAttention, HybridBackend, LayerSet, PagedDecode, Phase};
/// use ascend_attention::bf16;
///
/// # fn main() -> Result<(), ascend_serving::Violation> {
/// let registry = Backends::<bf16>::none().with(FusedAttention).with(PagedDecode);
/// let even = LayerSet::new([0, 2], "fused");
/// let odd = LayerSet::new([1, 3], "fused").during(Phase::Decode, "paged_decode");
/// let hybrid = HybridBackend::new(4, registry, [even, odd])?;
/// assert_eq!(hybrid.backend(3, Phase::Decode), Some("paged_decode"));
/// let backends = Backends::none().with(hybrid);
/// # let _ = backends;
/// # Ok(())
/// # }
/// ```
#[derive(Debug)]
pub struct HybridBackend<T: Element> {
    backends: Backends<T>,
    sets: Vec<LayerSet>,
    /// The set of each layer.
    of_layer: Vec<usize>,
}

impl<T: Element> HybridBackend<T> {
    /// Chooses the backends of a model of `layers` layers from a registry.
    ///
    /// # Errors
    /// [`HYBRID_LAYERS`](crate::rules::HYBRID_LAYERS) for a layer that is in no set, in several or not in the model,
    /// and for a set without layers, and for more than [`CacheShape::MAX_LAYERS`] in all;
    /// [`BACKEND_NAME`](crate::rules::BACKEND_NAME) for a name that is not registered.
    pub fn new(
        layers: usize,
        registry: Backends<T>,
        sets: impl IntoIterator<Item = LayerSet>,
    ) -> Result<Self, Violation> {
        if layers > CacheShape::MAX_LAYERS {
            return Err(unknown_layers(format_args!("a model of {layers} layers"), CacheShape::MAX_LAYERS));
        }
        // One more than there can be, so that an endless list ends: the last one names a layer again.
        let sets = sets.into_iter().take(layers.saturating_add(1));
        let sets: Vec<LayerSet> = sets.collect();
        let mut of_layer = BTreeMap::new();
        for (at, set) in sets.iter().enumerate() {
            if set.layers.is_empty() {
                return Err(unknown_layers(format_args!("set {at} without layers"), layers));
            }
            for &layer in &set.layers {
                if layer >= layers {
                    let given = format_args!("layer {layer} in set {at}");
                    return Err(unknown_layers(given, layers));
                }
                if let Some(other) = of_layer.insert(layer, at) {
                    let given = format_args!("layer {layer} in the sets {other} and {at}");
                    return Err(unknown_layers(given, layers));
                }
            }
            for phase in Phase::ALL {
                let name = set.backend(phase);
                if registry.get(name).is_none() {
                    let names: Vec<_> = registry.names().collect();
                    return Err(rules::BACKEND_NAME.broken(
                        format_args!("{name:?} for the phase {phase:?} of set {at}"),
                        format_args!("one of {names:?}"),
                    ));
                }
            }
        }
        if of_layer.len() < layers {
            let mut known = of_layer.keys().enumerate();
            let missing = known.find(|(at, layer)| at != *layer);
            let missing = missing.map_or(of_layer.len(), |(at, _)| at);
            let given = format_args!("layer {missing} in no set");
            return Err(unknown_layers(given, layers));
        }
        Ok(Self {
            // In the order of the layers; none is missing.
            of_layer: of_layer.into_values().collect(),
            backends: registry,
            sets,
        })
    }

    /// Name of the backend that computes a layer in a phase.
    pub fn backend(&self, layer: usize, phase: Phase) -> Option<&str> {
        let set = self.sets.get(*self.of_layer.get(layer)?)?;
        Some(set.backend(phase))
    }
}

#[cold]
fn unknown_layers(given: impl fmt::Display, layers: usize) -> Violation {
    rules::HYBRID_LAYERS.broken(given, format_args!("each layer below {layers} once, every set with one or more"))
}

impl<T: Element> AttentionBackend<T> for HybridBackend<T> {
    fn name(&self) -> &'static str {
        "hybrid"
    }

    fn reads_quantised(&self) -> bool {
        // Each of its backends is asked whether it does.
        true
    }

    fn reads_latents(&self) -> bool {
        // Each of its backends is asked whether it does.
        true
    }

    fn program(&self, step: &StepContext<'_>, first: &LayerTensors<'_, T>) -> Result<StepProgram<T>> {
        let phase = Phase::from(step.metadata.state());
        let mut names: Vec<&str> = Vec::new();
        let mut programs = Vec::new();
        let mut of_set = Vec::with_capacity(self.sets.len());
        for set in &self.sets {
            let name = set.backend(phase);
            if let Some(known) = names.iter().position(|known| *known == name) {
                of_set.push(known);
                continue;
            }
            of_set.push(names.len());
            names.push(name);
            let first = LayerTensors { layer: set.layers.first().copied().unwrap_or(first.layer), ..*first };
            // Checked when the sets were made.
            let Some(backend) = self.backends.get(name) else {
                return Err(Error::NoBackend { reasons: format!("{name}: not registered"), rules: Vec::new() });
            };
            let part = format!("{name}, for the phase {phase:?} of the layers {:?}", set.layers);
            let program = checked_program(backend, step, &first);
            let program = program.map_err(|why| refused_part(&part, why, step.stream.device()))?;
            programs.push((part, program));
        }
        let of_layer = self.of_layer.iter();
        let of_layer = of_layer.filter_map(|set| of_set.get(*set).copied());
        Ok(StepProgram::by_layer(LayerPrograms {
            programs,
            of_layer: of_layer.collect(),
            limit: self.backends.limit(),
        }))
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test fails by panicking")]
mod tests {
    use super::super::{FusedAttention, PagedDecode};
    use super::*;
    use ascend_attention::bf16;

    fn registry() -> Backends<bf16> {
        Backends::none().with(FusedAttention).with(PagedDecode)
    }

    #[test]
    fn each_layer_is_in_one_set() {
        let rule = |sets: Vec<LayerSet>| HybridBackend::new(3, registry(), sets).unwrap_err().rule;
        let set = |layers: &[usize]| LayerSet::new(layers.iter().copied(), "fused");
        assert_eq!(rule(vec![]), &rules::HYBRID_LAYERS);
        assert_eq!(rule(vec![set(&[0, 1])]), &rules::HYBRID_LAYERS);
        assert_eq!(rule(vec![set(&[0, 1, 2, 3])]), &rules::HYBRID_LAYERS);
        assert_eq!(rule(vec![set(&[0, 1]), set(&[1, 2])]), &rules::HYBRID_LAYERS);
        assert_eq!(rule(vec![set(&[0, 1, 2]), set(&[])]), &rules::HYBRID_LAYERS);
        assert_eq!(rule(vec![set(&[0, 0, 1, 2])]), &rules::HYBRID_LAYERS);
        let gap = HybridBackend::new(3, registry(), [set(&[0, 2])]).unwrap_err();
        assert_eq!(gap.given, "layer 1 in no set");
        let many = HybridBackend::new(usize::MAX, registry(), [set(&[0])]).unwrap_err();
        assert_eq!(many.rule, &rules::HYBRID_LAYERS);
        let sparse = LayerSet::new(0..3, "fused").during(Phase::Mixed, "sparse");
        assert_eq!(rule(vec![sparse]), &rules::BACKEND_NAME);
    }

    #[test]
    fn each_phase_has_its_backend() {
        let sets = [LayerSet::new([1], "fused"), LayerSet::new([0, 2], "fused").during(Phase::Decode, "paged_decode")];
        let hybrid = HybridBackend::new(3, registry(), sets).unwrap();
        let backend = |layer, phase| hybrid.backend(layer, phase).unwrap();
        for phase in Phase::ALL {
            let decodes = phase == Phase::Decode;
            let other = if decodes { "paged_decode" } else { "fused" };
            assert_eq!([0, 1, 2].map(|l| backend(l, phase)), [other, "fused", other]);
        }
        assert_eq!(hybrid.backend(3, Phase::Decode), None);
    }
}
