//! Backends by name, tried in order.

use std::collections::HashMap;
use std::sync::Arc;
use std::{fmt, iter};

use ascend_attention::case::tentatively;
use ascend_attention::spec::Rule;
use ascend_attention::{Device, Element, Error as CallError, Violation};

use crate::batch::AttentionState;
use crate::error::{Error, Result};
use crate::kv::CacheShape;
use crate::rules;

use super::attention_backend::AttentionBackend;
use super::backend::Backend;
use super::deterministic::{check_backend, check_deterministic};
use super::prompt_and_incre;
use super::refused_backend::{RefusedBackend, hint, no_backend};
use super::step_context::{LayerTensors, StepContext};
use super::step_memory::{MemoryLimit, StepMemory};
use super::step_plan::StepPlan;

/// Backends in the order in which they are tried, and those that some layers try first.
pub struct Backends<T: Element> {
    backends: Vec<Arc<dyn AttentionBackend<T>>>,
    /// The only backends of some kinds of steps.
    pub(super) of_steps: HashMap<AttentionState, Vec<Arc<dyn AttentionBackend<T>>>>,
    /// The names of backends that are tried first, by layer of the cache and kind of step.
    pub(super) preferred: HashMap<(usize, AttentionState), &'static str>,
    memory_limit: Option<MemoryLimit>,
    /// Whether backends are refused whose rows depend on more than the row.
    deterministic: bool,
}

/// The backends of every kind of step, those that copy nothing first.
const STANDARD: [Backend; 11] = [
    Backend::Fused,
    Backend::PagedDecode,
    Backend::BatchedQueries,
    Backend::NamedMask,
    Backend::ChunkedLocal,
    Backend::QuantisedDecode,
    Backend::QuantisedPrefill,
    Backend::MxFp8,
    Backend::MLA_256_MIB,
    Backend::QUANTISED_MLA_256_MIB,
    Backend::PromptAndIncre,
];

/// The rules that no right program breaks, whatever the step is.
const WRONG_PROGRAM: [&Rule; 3] = [&rules::BACKEND_ROWS, &rules::BACKEND_KEYS, &rules::BACKEND_UNMASKED];

/// The advice of steps whose backends are named for their kind alone.
const BOUND: &str = "a flag, or `Backends::for_steps`, binds steps of this kind to these backends: add another one \
     there, one of your own in the list of `Backends::for_steps`, since no registered one is tried";

/// The backend that serves a step, and why those before it do not.
#[derive(Debug)]
#[non_exhaustive]
pub struct SelectedBackend<T: Element> {
    /// The backend's name.
    pub name: &'static str,
    /// The step that the backend has prepared, for all layers that come to it.
    pub plan: Arc<StepPlan<T>>,
    /// Backends that were tried before this one, and behind them those of your own that are registered and not tried
    /// ([`BACKEND_BOUND`](crate::rules::BACKEND_BOUND)).
    pub refused: Vec<RefusedBackend>,
}

/// The plan of the layers that prefer a backend, or of those that prefer none.
#[derive(Debug)]
pub(crate) struct PreferredPlan<T: Element> {
    pub(crate) preferred: Option<&'static str>,
    pub(crate) selected: SelectedBackend<T>,
}

/// Refuses a preference of a layer that a cache of `layers` layers does not have.
fn check_layer(layer: usize, layers: usize) -> Result<(), Violation> {
    match layer < layers {
        true => Ok(()),
        false => Err(rules::BACKEND_LAYERS
            .broken(format_args!("a preference of layer {layer}"), format_args!("layers below {layers}"))),
    }
}

impl<T: Element> Backends<T> {
    /// An empty list of backends.
    pub fn none() -> Self {
        Self {
            backends: Vec::new(),
            of_steps: HashMap::new(),
            preferred: HashMap::new(),
            memory_limit: None,
            deterministic: false,
        }
    }

    /// The backends for every kind of step that the operators of the device serve, those that copy nothing first:
    /// [`Backend::Fused`](crate::Backend::Fused), [`Backend::PagedDecode`](crate::Backend::PagedDecode),
    /// [`Backend::BatchedQueries`](crate::Backend::BatchedQueries), [`Backend::NamedMask`](crate::Backend::NamedMask),
    /// [`Backend::ChunkedLocal`](crate::Backend::ChunkedLocal),
    /// [`Backend::QuantisedDecode`](crate::Backend::QuantisedDecode),
    /// [`Backend::QuantisedPrefill`](crate::Backend::QuantisedPrefill), [`Backend::MxFp8`](crate::Backend::MxFp8),
    /// [`Backend::Mla`](crate::Backend::Mla), [`Backend::QuantisedMla`](crate::Backend::QuantisedMla) and
    /// [`Backend::PromptAndIncre`](crate::Backend::PromptAndIncre); on the Atlas inference series the last one alone.
    ///
    /// Others are added behind ([`Backends::with`]), or go in front by appending these to them ([`Backends::append`]):
    /// those that divide keys or share prefixes.
    pub fn standard(device: &Device) -> Self {
        if prompt_and_incre::is_all_of(device) {
            return Self::none().with(Backend::PromptAndIncre);
        }
        STANDARD.into_iter().fold(Self::none(), Self::with)
    }

    /// Refuses plans that need more than `bytes` bytes on the device besides the cache ([`StepPlan::memory`]) while
    /// `layers` layers are queued at the same time, such as all of the model: the next backend is tried then. The plans
    /// of one mask are counted together, what they hold once for each scale
    /// ([`Attention::layer_scales`](crate::Attention::layer_scales)) of the cache's layers. Plans of different masks are
    /// not added up, and a capture counts those of each [preference](Self::prefer) alone.
    pub fn memory_limit(mut self, bytes: usize, layers: usize) -> Self {
        self.memory_limit = Some(MemoryLimit { bytes, layers });
        self
    }

    /// Adds a backend after the others, or in the place of one with the same name.
    pub fn with(mut self, backend: impl AttentionBackend<T> + 'static) -> Self {
        let name = backend.name();
        let mut places = self.backends.iter_mut();
        match places.find(|other| other.name() == name) {
            Some(place) => *place = Arc::new(backend),
            None => self.backends.push(Arc::new(backend)),
        }
        self
    }

    /// Adds other backends after these, such as those of [`Backends::standard`] after one's own. A backend whose name
    /// is registered already is left out. Where this list has no [`memory_limit`](Self::memory_limit), no
    /// [preference](Self::prefer) of a layer, or nothing [for a kind of step](Self::for_steps), that of the others
    /// applies. Where one list binds a kind of step to backends without the one that a layer of the other list prefers
    /// in such steps, these steps are refused ([`BACKEND_NAME`](crate::rules::BACKEND_NAME)).
    ///
    /// ```
    /// # fn main() -> ascend_serving::Result<()> {
    /// # #[cfg(feature = "emulation")] {
    /// use ascend_attention::{Runtime, bf16};
    /// use ascend_serving::{Backend, Backends};
    ///
    /// let device = Runtime::emulated()?.device(0)?;
    /// let backends = Backends::<bf16>::none().with(Backend::CascadePrefill).append(Backends::standard(&device));
    /// assert_eq!(backends.names().take(2).collect::<Vec<_>>(), ["cascade_prefill", "fused"]);
    /// # }
    /// # Ok(())
    /// # }
    /// ```
    pub fn append(mut self, others: Self) -> Self {
        for backend in others.backends {
            if self.backends.iter().all(|own| own.name() != backend.name()) {
                self.backends.push(backend);
            }
        }
        for (state, backends) in others.of_steps {
            self.of_steps.entry(state).or_insert(backends);
        }
        for (layer, name) in others.preferred {
            self.preferred.entry(layer).or_insert(name);
        }
        self.memory_limit = self.memory_limit.or(others.memory_limit);
        self
    }

    /// Serves some kinds of steps by other backends alone, as flags of engines ask
    /// ([`BackendFlags`](crate::BackendFlags)): where these refuse a step of such a kind, no backend serves it. They
    /// replace earlier ones of the kind and what layers [prefer](Self::prefer) there. Of the others only the list
    /// counts, and neither what they prefer nor their limit of memory. Backends of your own that are registered
    /// otherwise ([`with`](Self::with), [`append`](Self::append)) are not tried in such steps, which
    /// [`SelectedBackend::refused`] says.
    ///
    /// ```
    /// use ascend_attention::bf16;
    /// use ascend_serving::{AttentionState, Backend, Backends};
    ///
    /// let decode = Backends::<bf16>::none().with(Backend::PagedDecode);
    /// let backends = Backends::none().with(Backend::Fused).for_steps(&[AttentionState::DecodeOnly], decode);
    /// assert_eq!(backends.names().collect::<Vec<_>>(), ["fused", "paged_decode"]);
    /// ```
    pub fn for_steps(mut self, states: &[AttentionState], others: Self) -> Self {
        self.preferred.retain(|(_, state), _| !states.contains(state));
        self.of_steps.extend(states.iter().map(|state| (*state, others.backends.clone())));
        self
    }

    /// Tries a registered backend before the others for some layers, as the model numbers them, in some kinds of
    /// steps: where it refuses a step, the others are tried in their order. A later preference replaces an earlier one.
    ///
    /// A step plans once with each backend that its layers come to, when the first layer with a mask and scale is
    /// planned, so that a refusal comes before anything of these layers is written; layers that [share
    /// keys](crate::LayerInputs::shared_keys), when the first of them is queued, where the plan of those with keys does
    /// not serve them. Graphs record what layers prefer in steps that decode or, where requests add several tokens, in
    /// those that [verify drafts](AttentionState::SpecDecoding), if anything is said of them, and otherwise in those of
    /// [chunks](AttentionState::ChunkedPrefill); where the limits say how drafts are made
    /// ([`GraphLimits::drafting`](crate::GraphLimits::drafting)), in the steps that these make.
    ///
    /// ```
    /// use ascend_attention::bf16;
    /// use ascend_serving::{AttentionState, Backend, Backends};
    ///
    /// # fn main() -> Result<(), ascend_serving::Violation> {
    /// let backends = Backends::<bf16>::none().with(Backend::Fused).with(Backend::PagedDecode);
    /// let backends = backends.prefer([1, 3], &[AttentionState::DecodeOnly], "paged_decode")?;
    /// # let _ = backends;
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// [`BACKEND_NAME`](crate::rules::BACKEND_NAME) for a name that is not registered for these steps;
    /// [`BACKEND_LAYERS`](crate::rules::BACKEND_LAYERS) for a layer that no model has. One that the model does not have
    /// is refused when a step begins, one of another group by [`Attention::of_groups`](crate::Attention::of_groups).
    pub fn prefer(
        mut self,
        layers: impl IntoIterator<Item = usize>,
        states: &[AttentionState],
        name: &str,
    ) -> Result<Self, Violation> {
        let mut of_states = Vec::with_capacity(states.len());
        for state in states {
            of_states.push((*state, self.name_for(*state, name)?));
        }
        // One more than any cache has, so that an endless list ends.
        for (nth, layer) in layers.into_iter().take(CacheShape::MAX_LAYERS.saturating_add(1)).enumerate() {
            check_layer(layer.max(nth), CacheShape::MAX_LAYERS)?;
            self.preferred.extend(of_states.iter().map(|(state, name)| ((layer, *state), *name)));
        }
        Ok(self)
    }

    /// Refuses backends from now on whose rows depend on more than the row, or no longer.
    pub(crate) fn set_deterministic(&mut self, deterministic: bool) {
        self.deterministic = deterministic;
    }

    /// Counts the layers that prefer a backend as the cache of these layers of the model does. Others are refused.
    pub(crate) fn count_within(&mut self, layers: &[usize]) -> Result<(), Violation> {
        let place = |layer: usize| layers.iter().position(|own| *own == layer);
        let unknown = self.preferred.keys().map(|(layer, _)| *layer).filter(|layer| place(*layer).is_none());
        if let Some(layer) = unknown.min() {
            return Err(rules::BACKEND_LAYERS
                .broken(format_args!("a preference of layer {layer}"), format_args!("layers {layers:?}")));
        }
        let counted = self.preferred.drain();
        let counted = counted.filter_map(|((layer, state), name)| Some(((place(layer)?, state), name)));
        self.preferred = counted.collect();
        Ok(())
    }

    /// Refuses preferences of layers that a cache of `layers` layers does not have.
    pub(crate) fn check_layers(&self, layers: usize) -> Result<(), Violation> {
        let named = self.preferred.keys().map(|(layer, _)| *layer).max();
        named.map_or(Ok(()), |layer| check_layer(layer, layers))
    }

    /// The name of the backend that a layer tries first, if another one than the first of all.
    pub(crate) fn preferred(&self, layer: usize, state: AttentionState) -> Option<&'static str> {
        match self.preferred.is_empty() {
            true => None,
            false => self.preferred.get(&(layer, state)).copied(),
        }
    }

    /// The backend of this name.
    pub fn get(&self, name: &str) -> Option<&dyn AttentionBackend<T>> {
        self.all().find(|backend| backend.name() == name)
    }

    /// The names, in the order in which the backends are tried, and behind them those of backends for some kinds of
    /// [steps](Self::for_steps) alone.
    pub fn names(&self) -> impl Iterator<Item = &'static str> + '_ {
        let mut names: Vec<_> = Vec::new();
        for name in self.all().map(AttentionBackend::name) {
            if !names.contains(&name) {
                names.push(name);
            }
        }
        names.into_iter()
    }

    /// The backends of every kind of step.
    fn all(&self) -> impl Iterator<Item = &dyn AttentionBackend<T>> {
        let of_steps = AttentionState::ALL.iter().filter_map(|state| self.of_steps.get(state));
        self.backends.iter().chain(of_steps.flatten()).map(|backend| &**backend)
    }

    /// Prepares a step with the first backend that can serve it.
    ///
    /// # Errors
    /// [`NoBackend`](crate::Error::NoBackend) with the reason of each backend.
    pub fn plan(&self, step: &StepContext<'_>, first: &LayerTensors<'_, T>) -> Result<SelectedBackend<T>> {
        self.plan_for_scales(step, first, 1)
    }

    /// Prepares a step as [`plan`](Self::plan) does, for one scale of the `scales` that layers have.
    pub(crate) fn plan_for_scales(
        &self,
        step: &StepContext<'_>,
        first: &LayerTensors<'_, T>,
        scales: usize,
    ) -> Result<SelectedBackend<T>> {
        self.plan_beside(step, first, &[], (StepMemory::default(), scales))
    }

    /// Prepares a step with the first backend that can serve it within the limit of memory, beside plans for other
    /// layers that need `held`, each of which is made for `scales` scales. A backend that has a plan among these serves
    /// by it.
    fn plan_beside(
        &self,
        step: &StepContext<'_>,
        first: &LayerTensors<'_, T>,
        others: &[PreferredPlan<T>],
        (held, scales): (StepMemory, usize),
    ) -> Result<SelectedBackend<T>> {
        let (selected, refused) = self.plan_first(step, first, |backend| {
            let name = backend.name();
            if let Some(other) = others.iter().find(|other| other.selected.name == name) {
                return Ok((name, Arc::clone(&other.selected.plan)));
            }
            let plan = StepPlan::new(&**backend, step, first)?;
            self.admits(held.beside(plan.memory()), scales)?;
            Ok((name, Arc::new(plan)))
        })?;
        let (name, plan) = selected;
        Ok(SelectedBackend { name, plan, refused })
    }

    /// Prepares a step for all layers with one mask and scale, of a cache of `layers` layers with `scales` scales in
    /// all: a plan for each backend that some of them come to, that of `first` in front.
    ///
    /// # Errors
    /// As for [`plan`](Self::plan).
    pub(crate) fn plan_layers(
        &self,
        step: &StepContext<'_>,
        first: &LayerTensors<'_, T>,
        (layers, scales): (usize, usize),
    ) -> Result<Vec<PreferredPlan<T>>> {
        let mut plans: Vec<PreferredPlan<T>> = Vec::new();
        let mut held = StepMemory::default();
        for layer in iter::once(first.layer).chain(0..layers) {
            let preferred = self.preferred(layer, step.metadata.state());
            if plans.iter().any(|plan| plan.preferred == preferred) {
                continue;
            }
            let selected = self.plan_beside(step, &LayerTensors { layer, ..*first }, &plans, (held, scales))?;
            if plans.iter().all(|plan| plan.selected.name != selected.name) {
                held = held.beside(selected.plan.memory());
            }
            plans.push(PreferredPlan { preferred, selected });
        }
        Ok(plans)
    }

    /// Refuses plans of this memory that are made for `scales` scales, if they are beyond the limit.
    pub(super) fn admits(&self, memory: StepMemory, scales: usize) -> Result<(), Violation> {
        let memory = StepMemory { held: memory.held.saturating_mul(scales), ..memory };
        self.memory_limit.map_or(Ok(()), |limit| limit.admits(memory))
    }

    /// The backends of an engine's own that are registered and not tried in a kind of step, since a list binds it to
    /// others.
    fn untried(&self, state: AttentionState) -> impl Iterator<Item = RefusedBackend> {
        let tried = self.of_state(state);
        let is_tried = |name: &str| tried.iter().any(|backend| backend.name() == name);
        let names = self.backends.iter().map(|backend| backend.name());
        names.filter(move |name| !Backend::has_name(name) && !is_tried(name)).map(move |name| {
            let named: Vec<_> = tried.iter().map(|backend| backend.name()).collect();
            let allowed = format!("the backends that are named for it: {}", named.join(", "));
            let why = rules::BACKEND_BOUND.broken(format_args!("a step of the kind {state:?}"), allowed);
            RefusedBackend { name, why: why.into(), taken_by: None }
        })
    }

    /// The backends of a kind of step.
    fn of_state(&self, state: AttentionState) -> &[Arc<dyn AttentionBackend<T>>] {
        self.of_steps.get(&state).unwrap_or(&self.backends)
    }

    /// The name of a backend that is tried in a kind of step.
    fn name_for(&self, state: AttentionState, name: &str) -> Result<&'static str, Violation> {
        let names = self.of_state(state).iter().map(|backend| backend.name());
        names.clone().find(|known| *known == name).ok_or_else(|| {
            let names: Vec<_> = names.collect();
            rules::BACKEND_NAME.broken(format_args!("{name:?}"), format_args!("one of {names:?}"))
        })
    }

    /// The backends in the order in which a layer tries them.
    pub(super) fn in_order(
        &self,
        layer: usize,
        state: AttentionState,
    ) -> impl Iterator<Item = &Arc<dyn AttentionBackend<T>>> {
        let preferred = self.preferred(layer, state);
        let is_preferred = move |backend: &&Arc<dyn AttentionBackend<T>>| Some(backend.name()) == preferred;
        let backends = self.of_state(state);
        let others = backends.iter().filter(move |backend| !is_preferred(backend));
        backends.iter().filter(is_preferred).chain(others)
    }

    /// What `prepare` makes of the first backend that it takes, and why it took none before. No other backend is tried
    /// behind one whose program is wrong, which would hide the mistake, or behind a device that fails.
    pub(super) fn plan_first<R>(
        &self,
        step: &StepContext<'_>,
        first: &LayerTensors<'_, T>,
        prepare: impl Fn(&Arc<dyn AttentionBackend<T>>) -> Result<R>,
    ) -> Result<(R, Vec<RefusedBackend>)> {
        check_deterministic(self.deterministic, step.stream.device())?;
        let state = step.metadata.state();
        if let Some(name) = self.preferred(first.layer, state) {
            // Of two lists that were appended to each other one may prefer what the other does not try.
            self.name_for(state, name).map_err(|why| {
                let fix = "add it to the list of `Backends::for_steps` for such steps, or leave the preference out";
                Violation::new(why.rule, why.given, why.allowed, fix)
            })?;
        }
        tentatively(|| {
            let mut refused = Vec::new();
            let is_bound = self.of_steps.contains_key(&state);
            for backend in self.in_order(first.layer, state) {
                let admitted = match self.deterministic {
                    true => check_backend(&**backend, step, first).map_err(Error::from),
                    false => Ok(()),
                };
                match admitted.and_then(|()| prepare(backend)) {
                    Ok(prepared) => {
                        refused.extend(self.untried(state));
                        return Ok((prepared, refused));
                    }
                    // A device that fails says nothing about the backend.
                    Err(why @ Error::Attention(CallError::Acl { .. } | CallError::Timeout { .. })) => return Err(why),
                    Err(why) => {
                        let device = step.stream.device();
                        let is_wrong = WRONG_PROGRAM.iter().any(|rule| why.breaks(rule));
                        refused.push(RefusedBackend::new(backend.name(), why, device));
                        if is_wrong {
                            return Err(no_backend(&refused, None));
                        }
                    }
                }
            }
            refused.extend(self.untried(state));
            Err(no_backend(
                &refused,
                if is_bound { Some(BOUND) } else { hint(step, first, |name| self.get(name).is_some()) },
            ))
        })
    }
}

impl<T: Element> fmt::Debug for Backends<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list().entries(self.names()).finish()
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test fails by panicking")]
mod tests {
    use super::*;
    use ascend_attention::bf16;

    #[test]
    fn layers_try_what_they_prefer_in_front_of_the_others() {
        use AttentionState::{ChunkedPrefill, DecodeOnly};
        let both = || Backends::<bf16>::none().with(Backend::Fused).with(Backend::PagedDecode);
        let backends = both().prefer([0, 2], &[DecodeOnly], "paged_decode").unwrap();
        // A later preference replaces an earlier one, and appended ones replace none.
        let backends = backends.prefer([2], &[DecodeOnly], "fused").unwrap();
        let backends = backends.append(both().prefer([1, 2], &[DecodeOnly], "paged_decode").unwrap());
        let order = |layer, state| backends.in_order(layer, state).map(|backend| backend.name()).collect::<Vec<_>>();
        for layer in 0..4 {
            let first = if layer < 2 { ["paged_decode", "fused"] } else { ["fused", "paged_decode"] };
            assert_eq!(order(layer, DecodeOnly), first, "layer {layer}");
            assert_eq!(order(layer, ChunkedPrefill), ["fused", "paged_decode"]);
        }
        backends.check_layers(3).unwrap();
        assert_eq!(backends.check_layers(2).unwrap_err().rule, &rules::BACKEND_LAYERS);
        let sparse = both().prefer([0], &[DecodeOnly], "sparse").unwrap_err();
        assert_eq!((sparse.rule, &*sparse.given), (&rules::BACKEND_NAME, "\"sparse\""));
        let far = both().prefer([CacheShape::MAX_LAYERS], &[DecodeOnly], "fused").unwrap_err();
        assert_eq!(far.rule, &rules::BACKEND_LAYERS);
    }
}
