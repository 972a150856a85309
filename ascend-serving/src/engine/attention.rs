//! Attention with a cache: what a model's layers call.

use std::sync::Arc;

use ascend_attention::{DType, Element, Stream, Violation};

use crate::backends::{AttentionShape, Backends};
use crate::batch::{AttentionMetadata, BatchRequest, BatchSettings, LayerMask, StatePolicy};
use crate::causality::Causality;
use crate::error::Result;
use crate::kv::{BlockPool, CacheShape, PagedKvCache, Sequence, StatePool, no_layer};
use crate::rules;

use super::layer_group::{LayerGroup, LayerPlace};
use super::range_check::SharedChecker;

/// The attention of a model: a table of its layers, which says for each the heads, the paged cache, the keys that its
/// tokens see, and the backends that compute it.
///
/// Each step begins with its [`AttentionMetadata`], and each layer of the step calls
/// [`Step::forward`](crate::Step::forward). Most models have layers of one kind ([`Attention::new`]). One with several,
/// such as full ones and ones with a sliding window (Gemma, gpt-oss), has a [`LayerGroup`] of each kind, with a cache
/// of its own ([`Attention::of_groups`]): one step, one sequence of a request and one metadata serve all of them. Some
/// layers may be of linear attention, with a state of each request in the place of keys ([`Attention::of_hybrid`]).
#[derive(Debug)]
pub struct Attention<T: Element> {
    /// At least one.
    pub(super) groups: Vec<LayerGroup<T>>,
    /// The place of each layer of the model.
    pub(super) places: Vec<LayerPlace>,
    /// The states of the layers of linear attention, if there are any.
    pub(super) states: Option<Arc<StatePool>>,
    /// Shared with the graphs of its layers.
    pub(super) range_checker: SharedChecker<T>,
    pub(super) deterministic: bool,
}

impl<T: Element> Attention<T> {
    /// Attention of these heads over a cache with all layers of the model, computed by these backends. Which keys its
    /// tokens see is left to the settings of each step; [`metadata`](Self::metadata) makes causal ones.
    pub fn new(shape: AttentionShape, cache: PagedKvCache<T>, backends: Backends<T>) -> Self {
        let layers = 0..cache.shape().layers;
        let places = layers.clone().map(|layer| LayerPlace { group: 0, layer }).collect();
        let group = LayerGroup::new(layers, Causality::Causal, shape, cache, backends);
        let group = LayerGroup { causality: None, ..group };
        Self { groups: vec![group], places, states: None, range_checker: Arc::default(), deterministic: false }
    }

    /// The attention of a model of `layers` layers of several kinds.
    ///
    /// A sequence has blocks in the pool of each group ([`Attention::sequence`]). Growing it gives back the tokens that
    /// the windows no longer show, so that the cache of a windowed group holds no more of a request than the window,
    /// one step's tokens and a block. The layers of one group may have sinks while those of another have none.
    ///
    /// ```
    /// use std::num::NonZeroUsize;
    ///
    /// use ascend_serving::kv::{CacheShape, PadPolicy, PagedKvCache};
    /// use ascend_serving::{
    ///     Attention, AttentionShape, Backends, BatchRequest, Causality, LayerGroup, StatePolicy,
    /// };
    /// use ascend_attention::{Runtime, Tensor, bf16};
    ///
    /// # fn main() -> ascend_serving::Result<()> {
    /// # #[cfg(feature = "emulation")] {
    /// let device = Runtime::emulated()?.device(0)?;
    /// let stream = device.stream()?;
    /// let window = NonZeroUsize::new(128).map_or(Causality::Causal, Causality::Window);
    /// let group = |layers: [usize; 2], causality, blocks| -> ascend_serving::Result<_> {
    ///     let shape = CacheShape::new(layers.len(), 1, 64);
    ///     let cache = PagedKvCache::<bf16>::new(&device, blocks, 128, shape, PadPolicy::SkipNegative)?;
    ///     Ok(LayerGroup::new(layers, causality, AttentionShape::new(1, 1, 64), cache, Backends::standard(&device)))
    /// };
    /// // Layers 1 and 3 see everything; 0 and 2 see 128 keys, and their cache is small.
    /// let groups = [group([1, 3], Causality::Causal, 16)?, group([0, 2], window, 8)?];
    /// let mut attention = Attention::of_groups(4, groups)?;
    ///
    /// let mut sequence = attention.sequence();
    /// for tokens in [700, 1] {
    ///     attention.grow(&stream, &mut sequence, tokens)?;
    ///     let request = BatchRequest::of(&sequence, tokens);
    ///     let metadata = attention.metadata(&[request], StatePolicy::default())?;
    ///     let rows = stream.upload(&vec![bf16::ONE; tokens * 64], [tokens, 1, 64])?;
    ///     let mut step = attention.begin(&stream, &metadata)?;
    ///     for layer in 0..4 {
    ///         step.forward(layer, (&rows, &rows, &rows))?;
    ///     }
    /// }
    /// let held = |group: usize| attention.groups()[group].cache().pool().held_blocks();
    /// assert_eq!((held(0), held(1)), (6, 2));
    /// # }
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// [`GROUP_LAYERS`](crate::rules::GROUP_LAYERS) for a layer that is in no group, in several or not in the model,
    /// for a group whose cache has another number of layers, for two groups of one pool, and for more than
    /// [`CacheShape::MAX_LAYERS`] layers or groups; [`BACKEND_LAYERS`](crate::rules::BACKEND_LAYERS) for backends that
    /// are [preferred](Backends::prefer) for a layer of another group.
    pub fn of_groups(layers: usize, groups: impl IntoIterator<Item = LayerGroup<T>>) -> Result<Self, Violation> {
        Self::of_kinds(layers, groups, Vec::new(), None)
    }

    /// The attention of a model of `layers` layers, of which those in `linear` are of linear attention (Qwen3-Next,
    /// Qwen3.5, Kimi) and the others in groups, as for [`of_groups`](Self::of_groups). The pool has the states of the
    /// linear layers, in the order in which they are named.
    ///
    /// A sequence has the state of its tokens beside its blocks ([`Attention::sequence`]): both grow, are forked,
    /// shared, cut and dropped at once. [`Step::forward`](crate::Step::forward) gets the
    /// [`DeltaTensors`](ascend_attention::delta_rule::DeltaTensors) of a linear layer. Everything goes to the stream
    /// of the pool. A state has taken its tokens, and cannot take them again: where a step ends after it has queued
    /// some linear layer, and not all layers, its requests begin anew, or go on from forks. `T` is BF16, the only type
    /// that the operators take.
    ///
    /// ```
    /// use ascend_attention::delta_rule::DeltaTensors;
    /// use ascend_attention::spec::{Cann, Soc};
    /// use ascend_attention::{Machine, Runtime, bf16};
    /// use ascend_serving::kv::{CacheShape, PadPolicy, PagedKvCache, StatePool, StateShape};
    /// use ascend_serving::{
    ///     Attention, AttentionShape, Backends, BatchRequest, Causality, LayerGroup, StatePolicy,
    /// };
    ///
    /// # fn main() -> ascend_serving::Result<()> {
    /// # #[cfg(feature = "emulation")] {
    /// let stream = Runtime::emulated_as(&Machine::new(Soc::AtlasA2, Cann::V9_1))?.device(0)?.stream()?;
    /// let device = stream.device();
    /// // Layer 2 sees all keys; 0 and 1 have states, in steps with up to 2 drafts of a request.
    /// let cache = PagedKvCache::<bf16>::new(device, 8, 128, CacheShape::new(1, 1, 64), PadPolicy::SkipNegative)?;
    /// let full = AttentionShape::new(1, 1, 64);
    /// let full = LayerGroup::new([2], Causality::Causal, full, cache, Backends::standard(device));
    /// let shape = StateShape {
    ///     layers: 2,
    ///     key_heads: 4,
    ///     value_heads: 4,
    ///     value_dim: 16,
    ///     key_dim: 16,
    ///     scale: 0.25,
    ///     g: true,
    ///     gk: false,
    ///     drafts: 2,
    ///     convolution: None,
    /// };
    /// let states = StatePool::new::<bf16>(&stream, 6, shape)?;
    /// let mut attention = Attention::of_hybrid(3, [full], [0, 1], states)?;
    ///
    /// let mut sequence = attention.sequence();
    /// for (new, accepted) in [(20, 20), (3, 1), (3, 3)] {
    ///     attention.grow(&stream, &mut sequence, new)?;
    ///     let metadata = attention.metadata(&[BatchRequest::of(&sequence, new)], StatePolicy::default())?;
    ///     // What the model projects; queries and keys of linear layers are normalised.
    ///     let rows = |heads: usize, dim: usize| {
    ///         stream.upload(&vec![bf16::from_f32(0.25); new * heads * dim], [new, heads, dim])
    ///     };
    ///     let (query, wide) = (rows(4, 16)?, rows(1, 64)?);
    ///     let beta = stream.upload(&vec![bf16::from_f32(0.5); new * 4], [new, 4])?;
    ///     let decay = stream.upload(&vec![-0.1; new * 4], [new, 4])?;
    ///
    ///     let mut step = attention.begin(&stream, &metadata)?;
    ///     for layer in 0..2 {
    ///         let output = step.forward(layer, DeltaTensors::new((&query, &query, &query), &beta).g(&decay))?;
    ///         assert_eq!(output.shape(), [new, 4, 16]);
    ///     }
    ///     step.forward(2, (&wide, &wide, &wide))?;
    ///     step.end()?;
    ///     // Drafts that were rejected are taken back.
    ///     sequence.truncate(sequence.len() - new + accepted)?;
    /// }
    /// assert_eq!(sequence.len(), 24);
    /// # }
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// As for [`of_groups`](Self::of_groups), where the linear layers are a group too: a model has at least one layer
    /// of attention, over whose cache its sequences are counted, and one of linear attention.
    pub fn of_hybrid(
        layers: usize,
        groups: impl IntoIterator<Item = LayerGroup<T>>,
        linear: impl IntoIterator<Item = usize>,
        states: StatePool,
    ) -> Result<Self, Violation> {
        let linear = linear.into_iter().take(CacheShape::MAX_LAYERS.saturating_add(1)).collect();
        Self::of_kinds(layers, groups, linear, Some(states))
    }

    /// The attention of a model with these groups of layers and these linear layers.
    fn of_kinds(
        layers: usize,
        groups: impl IntoIterator<Item = LayerGroup<T>>,
        linear: Vec<usize>,
        states: Option<StatePool>,
    ) -> Result<Self, Violation> {
        // One more than any model has, so that an endless list ends.
        let most = CacheShape::MAX_LAYERS;
        let groups = groups.into_iter().take(most.saturating_add(1));
        let mut groups: Vec<LayerGroup<T>> = groups.collect();
        let wrong = |given: String| {
            Violation::new(
                &rules::GROUP_LAYERS,
                given,
                format_args!("each layer below {layers} in one group, whose cache has as many layers"),
                "divide the layers of the model among the groups",
            )
        };
        if states.is_some() && T::DTYPE != DType::Bf16 {
            let given = format_args!("layers of linear attention of {}", T::DTYPE);
            return Err(rules::STATE_TYPE.broken(given, DType::Bf16));
        }
        if groups.is_empty() && states.is_some() {
            return Err(Violation::new(
                &rules::GROUP_LAYERS,
                format_args!("{} layers of linear attention, and no group of layers of attention", linear.len()),
                "one group of layers of attention or more, whose cache counts the tokens of a sequence",
                "give the layers of attention that the model has as a `LayerGroup`; where it has none, call the \
                 operators of linear attention (`recurrent_delta_rule`, `chunk_delta_rule`) directly",
            ));
        }
        let named = groups.iter().fold(linear.len(), |sum, group| sum.saturating_add(group.layers.len()));
        if named != layers || groups.is_empty() || layers.max(groups.len()) > most {
            return Err(wrong(format!("{} groups of {named} layers", groups.len())));
        }
        let mut pools: Vec<_> = groups.iter().map(|group| group.cache.pool().id()).collect();
        pools.sort_unstable();
        if let Some(twice) = pools.windows(2).find(|pair| pair[0] == pair[1]) {
            return Err(Violation::new(
                &rules::GROUP_LAYERS,
                format_args!("two groups of {}", twice[0]),
                "a pool for each group",
                "make the caches of the groups without `with_pool`",
            ));
        }
        let mut places = vec![None; layers];
        let cached = groups.iter().map(|group| (group.cache.shape().layers, &group.layers));
        let of_states = states.iter().map(|states| (states.shape().layers, &linear));
        for (at, (cached, own)) in cached.chain(of_states).enumerate() {
            let name = match at == groups.len() {
                true => "the layers of linear attention".into(),
                false => format!("group {at}"),
            };
            if cached != own.len() {
                return Err(wrong(format!("{} layers in {name}, {cached} in its cache or pool", own.len())));
            }
            for (local, &layer) in own.iter().enumerate() {
                match places.get_mut(layer) {
                    Some(place @ None) => *place = Some(LayerPlace { group: at, layer: local }),
                    _ => return Err(wrong(format!("layer {layer} in {name}"))),
                }
            }
        }
        for group in &mut groups {
            group.backends.count_within(&group.layers)?;
        }
        if let Some(states) = &states
            && let Some(other) = groups.iter().find(|group| group.cache.device() != states.device())
        {
            let (cache, pool) = (other.cache.device().id(), states.device().id());
            return Err(wrong(format!("a cache on device {cache}, and a pool of states on device {pool}")));
        }
        let places = places.into_iter().flatten().collect();
        let states = states.map(Arc::new);
        Ok(Self { groups, places, states, range_checker: Arc::default(), deterministic: false })
    }

    /// The states of the layers of linear attention, if the model has any.
    pub fn states(&self) -> Option<&StatePool> {
        self.states.as_deref()
    }

    /// The number of a layer of the model among those of linear attention, if it is one.
    pub(super) fn linear_layer(&self, layer: usize) -> Option<usize> {
        self.places.get(layer).filter(|place| place.group == self.groups.len()).map(|place| place.layer)
    }

    /// Makes the bits of a request's rows independent of what else is in its steps, or no longer: of other requests,
    /// of the cut of its prompt into chunks, of the cache's blocks, and of graphs.
    ///
    /// One switch for three things. The device is asked for deterministic operators
    /// ([`Device::set_deterministic`](ascend_attention::Device::set_deterministic), which counts for all that is
    /// planned on it): the emulation then computes every row by one kernel over the same tiles of keys, counted from
    /// the first. Only backends serve that compute each row by one call, over keys that begin at the same token in
    /// every step ([`AttentionBackend::is_batch_invariant`](crate::AttentionBackend::is_batch_invariant)); the others
    /// are refused by name: those that merge parts, such as [`SplitDecode`](crate::SplitDecode) and
    /// [`Backend::CascadePrefill`](crate::Backend::CascadePrefill), those of caches of 8 bits, where a step's own
    /// keys are more exact than the cached ones or probabilities are rounded by ranges of keys, and
    /// [`Backend::Mla`](crate::Backend::Mla) unless its queries are absorbed. And steps and graphs are refused where
    /// the device was asked otherwise in between.
    ///
    /// On the emulation the promise holds for every step that is served, on any number of threads of the same
    /// instruction set. CANN promises that equal calls give equal bits, and no more: on an NPU a decode step and a
    /// chunk may still differ, which `ascend-attn determinism --deterministic` measures. Graphs that were captured
    /// before the switch keep computing as they were captured. Without the switch nothing changes.
    ///
    /// ```
    /// use ascend_attention::{Runtime, bf16};
    /// use ascend_serving::kv::{CacheShape, PadPolicy, PagedKvCache};
    /// use ascend_serving::{Attention, AttentionShape, Backends};
    ///
    /// # fn main() -> ascend_serving::Result<()> {
    /// # #[cfg(feature = "emulation")] {
    /// let device = Runtime::emulated()?.device(0)?;
    /// let cache = PagedKvCache::<bf16>::new(&device, 8, 128, CacheShape::new(2, 2, 64), PadPolicy::SkipNegative)?;
    /// let attention = Attention::new(AttentionShape::new(4, 2, 64), cache, Backends::standard(&device));
    /// let attention = attention.deterministic(true)?;
    /// assert!(attention.is_deterministic() && device.is_batch_invariant()?);
    /// # }
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// [`BACKEND_DETERMINISTIC`](crate::rules::BACKEND_DETERMINISTIC) for a model with layers of linear attention: the
    /// sums of a chunk depend on where it begins; and for one with a windowed group, whose sequences give tokens back,
    /// so that the keys of a call begin elsewhere from step to step.
    /// [`Acl`](ascend_attention::Error::Acl) if the device does not take the option.
    #[doc(alias = "ACL_OPT_DETERMINISTIC")]
    pub fn deterministic(mut self, deterministic: bool) -> Result<Self> {
        if deterministic && self.states.is_some() {
            return Err(Violation::new(
                &rules::BACKEND_DETERMINISTIC,
                "layers of linear attention, whose sums depend on where a chunk begins",
                "layers of attention alone",
                "leave `Attention::deterministic` out",
            )
            .into());
        }
        let is_window = |group: &&LayerGroup<T>| matches!(group.causality, Some(Causality::Window(_)));
        if deterministic && let Some(group) = self.groups.iter().find(is_window) {
            return Err(Violation::new(
                &rules::BACKEND_DETERMINISTIC,
                format_args!("a group with {}, whose sequences give tokens back", LayerMask::from(group.causality())),
                "groups whose keys begin at the same token in every step",
                "make the group causal and give its layers the window by `LayerInputs::mask`, or leave \
                 `Attention::deterministic` out",
            )
            .into());
        }
        if deterministic || self.deterministic {
            self.cache().device().set_deterministic(deterministic)?;
        }
        for group in &mut self.groups {
            group.backends.set_deterministic(deterministic);
        }
        self.deterministic = deterministic;
        Ok(self)
    }

    /// Whether the bits of rows are kept independent of their steps ([`Attention::deterministic`]).
    pub fn is_deterministic(&self) -> bool {
        self.deterministic
    }

    /// The groups of layers, at least one.
    pub fn groups(&self) -> &[LayerGroup<T>] {
        &self.groups
    }

    /// The place of each layer of the model.
    pub(crate) fn places(&self) -> &[LayerPlace] {
        &self.places
    }

    /// The group of a layer of the model, and its number there. A layer of linear attention is refused.
    pub(super) fn group_of(&self, layer: usize) -> Result<(&LayerGroup<T>, usize)> {
        if self.linear_layer(layer).is_some() {
            return Err(rules::STEP_KIND
                .broken(format_args!("layer {layer}, which is one of linear attention"), "a layer with keys and values")
                .into());
        }
        let place = self.places.get(layer);
        let known = place.and_then(|place| Some((self.groups.get(place.group)?, place.layer)));
        known.ok_or_else(|| no_layer(layer, self.places.len()))
    }

    /// The mask of a layer of the model by the causality of its group; causal where that is left to the steps, and of a
    /// layer of linear attention.
    pub fn mask(&self, layer: usize) -> LayerMask {
        self.group_of(layer).map_or(Causality::Causal, |(group, _)| group.causality()).into()
    }

    /// A sequence without tokens, in the cache of each group, with a state where there are layers of linear attention.
    pub fn sequence(&self) -> Sequence {
        let part = |group: &LayerGroup<T>| Sequence::new(group.cache.pool()).seen_by(group.causality);
        let sequence = part(&self.groups[0]).beside(self.groups.iter().skip(1).map(part));
        sequence.with_state(self.states().map(StatePool::state))
    }

    /// Whether one step can add these numbers of tokens to these sequences: [`BlockPool::admits`] in each group, after
    /// [`Attention::grow`] has given tokens back. A sequence that has grown already adds none.
    ///
    /// # Errors
    /// [`BATCH_BLOCKS`](crate::rules::BATCH_BLOCKS), [`LENGTHS_OVERFLOW`](crate::rules::LENGTHS_OVERFLOW);
    /// [`GROUP_LAYERS`](crate::rules::GROUP_LAYERS) for a sequence of other groups,
    /// [`BLOCK_POOL`](crate::rules::BLOCK_POOL) for one of other pools.
    pub fn admits<'s>(&self, requests: impl IntoIterator<Item = (&'s Sequence, usize)>) -> Result<(), Violation> {
        // One more than the pools admit, so that an endless list ends.
        let most = BlockPool::MAX_REQUESTS.saturating_add(1);
        let requests: Vec<_> = requests.into_iter().take(most).collect();
        requests.iter().try_for_each(|(sequence, _)| self.check_sequence(sequence))?;
        for (at, group) in self.groups.iter().enumerate() {
            let parts = requests.iter().filter_map(|(sequence, tokens)| Some((sequence.group(at)?, *tokens)));
            group.cache.pool().admits(parts.map(|(part, tokens)| part.keys_after(tokens)))?;
        }
        Ok(())
    }

    /// The metadata of a step of these requests, in the cache of each group. The layers of [`Attention::new`] are
    /// causal here.
    ///
    /// # Errors
    /// As for [`AttentionMetadata::new`].
    pub fn metadata(&self, requests: &[BatchRequest<'_>], policy: StatePolicy) -> Result<AttentionMetadata, Violation> {
        let settings = |group: &LayerGroup<T>| BatchSettings::of(&group.cache, group.causality()).policy(policy);
        let others = self.groups.iter().skip(1).map(settings);
        AttentionMetadata::of_groups(requests, settings(&self.groups[0]), others)
    }

    /// The heads; of several groups those of the first.
    pub fn shape(&self) -> AttentionShape {
        self.groups[0].shape
    }

    /// The cache; of several groups that of the first.
    pub fn cache(&self) -> &PagedKvCache<T> {
        &self.groups[0].cache
    }

    /// The backends, in the order in which they are tried; of several groups those of the first.
    pub fn backends(&self) -> &Backends<T> {
        &self.groups[0].backends
    }

    /// The cache, to copy blocks and to grow sequences in ([`Attention::grow`] does so too); of several groups that of
    /// the first.
    pub fn cache_mut(&mut self) -> &mut PagedKvCache<T> {
        &mut self.groups[0].cache
    }

    /// Makes room for `tokens` more tokens of a sequence in each group, and queues the copies of blocks that it shared,
    /// and of the state in layers of linear attention, of which it takes the slots:
    /// steps on other streams that write such a block, or read the copy, have to wait for this one. Sequences of
    /// [`Attention::sequence`] and [`PrefixCache::share`](crate::PrefixCache::share) give back the tokens before the
    /// window of the first one that is not computed. After an error no group has grown, but these tokens may be given
    /// back: make the metadata anew, also of steps without this growth. Before it reports that there are no blocks, it
    /// waits for blocks that steps in flight may still read.
    ///
    /// # Errors
    /// As for [`PagedKvCache::grow`]; [`GROUP_LAYERS`](crate::rules::GROUP_LAYERS) for a sequence of other groups. With
    /// layers of linear attention [`STATE_EXHAUSTED`](crate::rules::STATE_EXHAUSTED),
    /// [`STATE_REQUESTS`](crate::rules::STATE_REQUESTS) for a sequence without a state,
    /// [`STATE_POOL`](crate::rules::STATE_POOL) for one of another pool,
    /// [`STATE_TORN`](crate::rules::STATE_TORN) for one that a step has written in some layers alone,
    /// [`SEQUENCE_IN_PROGRESS`](crate::rules::SEQUENCE_IN_PROGRESS) for one that a step in progress writes, and
    /// [`STATE_STREAM`](crate::rules::STATE_STREAM) for another stream than the pool's.
    pub fn grow(&mut self, stream: &Stream, sequence: &mut Sequence, tokens: usize) -> Result<()> {
        self.check_sequence(sequence)?;
        self.groups.iter().try_for_each(|group| group.cache.admits(stream))?;
        self.states.as_ref().map_or(Ok(()), |states| states.check_stream(stream))?;
        sequence.give_back();
        let mut rooms = Vec::with_capacity(self.groups.len());
        for (at, group) in self.groups.iter().enumerate() {
            if let Some(part) = sequence.group_mut(at) {
                rooms.push(group.cache.reserve(part, tokens)?);
            }
        }
        if let Some((states, state)) = self.states.as_ref().zip(sequence.state()).filter(|_| tokens > 0) {
            states.make_ready(stream, state)?;
        }
        for (group, room) in self.groups.iter_mut().zip(&rooms) {
            group.cache.copy_blocks(stream, &room.copies)?;
        }
        for (at, room) in rooms.into_iter().enumerate() {
            if let Some(part) = sequence.group_mut(at) {
                // The slots are not used: the metadata has them, and the copies are queued.
                let _ = part.settle(room)?;
            }
        }
        Ok(())
    }
}
