//! Attention of a model with several kinds of layers, each with a cache of its own.

use ascend_attention::{Element, Number, Stream, Tensor, Violation};

use crate::backends::SelectedBackend;
use crate::batch::{BatchSettings, Causality, LayerMask, StatePolicy};
use crate::error::{Error, Result};
use crate::kv::{BlockPool, CacheShape, Sequence, no_layer};
use crate::rules;

use super::attention::Attention;
use super::grouped_batch::{GroupedMetadata, GroupedRequest, GroupedSequence};
use super::layer_inputs::LayerInputs;
use super::queued_layers::{QueuedLayers, STEP_AGAIN};
use super::range_check::{RangeCheck, RangeFinding};
use super::step::Step;

/// Layers of a model that see the same keys and share a cache.
#[derive(Debug)]
pub struct LayerGroup<T: Element> {
    layers: Vec<usize>,
    causality: Causality,
    attention: Attention<T>,
}

impl<T: Element> LayerGroup<T> {
    /// A group of these layers of the model, in the order in which the attention's cache has them. At most one layer
    /// more than [`CacheShape::MAX_LAYERS`] is kept: no [`GroupedAttention`] takes more.
    pub fn new(layers: impl IntoIterator<Item = usize>, causality: Causality, attention: Attention<T>) -> Self {
        Self {
            layers: layers.into_iter().take(CacheShape::MAX_LAYERS.saturating_add(1)).collect(),
            causality,
            attention,
        }
    }

    /// The layers, as the model numbers them.
    pub fn layers(&self) -> &[usize] {
        &self.layers
    }

    /// Which keys their tokens see.
    pub fn causality(&self) -> Causality {
        self.causality
    }

    /// Their attention and cache.
    pub fn attention(&self) -> &Attention<T> {
        &self.attention
    }
}

/// The attention of a model with several kinds of layers, such as full ones and ones with a sliding window (Gemma,
/// gpt-oss): one step for all, each kind with its own cache, heads and backends.
///
/// A request has a [`GroupedSequence`], with blocks in the pool of each group. Growing it gives back the tokens that
/// the windows no longer show, so that the cache of a windowed group holds no more of a request than the window, one
/// step's tokens and a block. The layers of one group may have sinks while those of another have none.
///
/// ```
/// use std::num::NonZeroUsize;
///
/// use ascend_serving::kv::{CacheShape, PadPolicy, PagedKvCache};
/// use ascend_serving::{
///     Attention, AttentionShape, Backends, Causality, GroupedAttention, GroupedRequest, LayerGroup, StatePolicy,
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
///     let attention = Attention::new(AttentionShape::new(1, 1, 64), cache, Backends::standard(&device));
///     Ok(LayerGroup::new(layers, causality, attention))
/// };
/// // Layers 1 and 3 see everything; 0 and 2 see 128 keys, and their cache is small.
/// let groups = [group([1, 3], Causality::Causal, 16)?, group([0, 2], window, 8)?];
/// let mut attention = GroupedAttention::new(4, groups)?;
///
/// let mut sequence = attention.sequence();
/// for tokens in [700, 1] {
///     attention.grow(&stream, &mut sequence, tokens)?;
///     let request = GroupedRequest::of(&sequence, tokens);
///     let metadata = attention.metadata(&[request], StatePolicy::default())?;
///     let rows = stream.upload(&vec![bf16::ONE; tokens * 64], [tokens, 1, 64])?;
///     let mut step = attention.begin(&stream, &metadata)?;
///     for layer in 0..4 {
///         step.forward(layer, (&rows, &rows, &rows))?;
///     }
/// }
/// let held = |group: usize| attention.groups()[group].attention().cache().pool().held_blocks();
/// assert_eq!((held(0), held(1)), (6, 2));
/// # }
/// # Ok(())
/// # }
/// ```
#[derive(Debug)]
pub struct GroupedAttention<T: Element> {
    groups: Vec<LayerGroup<T>>,
    /// For each layer of the model its group, and its number in the group.
    of_layer: Vec<(usize, usize)>,
}

impl<T: Element> GroupedAttention<T> {
    /// The attention of a model of `layers` layers.
    ///
    /// # Errors
    /// [`GROUP_LAYERS`](crate::rules::GROUP_LAYERS) for a layer that is in no group, in several or not in the model,
    /// for a group whose cache has another number of layers, and for more than [`CacheShape::MAX_LAYERS`] layers or
    /// groups.
    pub fn new(layers: usize, groups: impl IntoIterator<Item = LayerGroup<T>>) -> Result<Self, Violation> {
        // One more than any model has, so that an endless list ends.
        let most = CacheShape::MAX_LAYERS;
        let groups = groups.into_iter().take(most.saturating_add(1));
        let groups: Vec<LayerGroup<T>> = groups.collect();
        let wrong = |given: String| {
            Violation::new(
                &rules::GROUP_LAYERS,
                given,
                format_args!("each layer below {layers} in one group, whose cache has as many layers"),
                "divide the layers of the model among the groups",
            )
        };
        let named: usize = groups.iter().map(|group| group.layers.len()).sum();
        if named != layers || groups.is_empty() || layers.max(groups.len()) > most {
            return Err(wrong(format!("{} groups of {named} layers", groups.len())));
        }
        let mut of_layer = vec![None; layers];
        for (at, group) in groups.iter().enumerate() {
            let cached = group.attention.cache().shape().layers;
            if cached != group.layers.len() {
                let own = group.layers.len();
                return Err(wrong(format!("group {at} of {own} layers, {cached} in its cache")));
            }
            for (local, &layer) in group.layers.iter().enumerate() {
                match of_layer.get_mut(layer) {
                    Some(place @ None) => *place = Some((at, local)),
                    _ => return Err(wrong(format!("layer {layer} in group {at}"))),
                }
            }
        }
        Ok(Self { groups, of_layer: of_layer.into_iter().flatten().collect() })
    }

    /// For each layer of the model its group, and its number in the group.
    pub(crate) fn layer_places(&self) -> &[(usize, usize)] {
        &self.of_layer
    }

    /// The groups.
    pub fn groups(&self) -> &[LayerGroup<T>] {
        &self.groups
    }

    /// Sets the range check of the steps that begin from now on, or removes it, in every group:
    /// [`Attention::set_range_check`].
    ///
    /// # Errors
    /// As for [`Attention::set_range_check`].
    pub fn set_range_check(&mut self, check: impl Into<Option<RangeCheck>>) -> Result<()>
    where
        T: Number,
    {
        let check = check.into();
        (self.groups.iter_mut()).try_for_each(|group| group.attention.set_range_check(check))
    }

    /// Takes the findings of the range check, with the layers as the model numbers them:
    /// [`Attention::range_findings`].
    ///
    /// # Errors
    /// As for [`Attention::range_findings`].
    pub fn range_findings(&mut self) -> Result<Vec<RangeFinding>> {
        self.findings(Attention::range_findings)
    }

    /// Waits for all layers that are queued, and takes the findings as [`range_findings`](Self::range_findings) does.
    ///
    /// # Errors
    /// As for [`Attention::await_range_findings`].
    pub fn await_range_findings(&mut self) -> Result<Vec<RangeFinding>> {
        self.findings(Attention::await_range_findings)
    }

    fn findings(&mut self, take: impl Fn(&mut Attention<T>) -> Result<Vec<RangeFinding>>) -> Result<Vec<RangeFinding>> {
        let mut all = Vec::new();
        for group in &mut self.groups {
            for mut finding in take(&mut group.attention)? {
                let layer = group.layers.get(finding.layer);
                finding.layer = layer.copied().unwrap_or(finding.layer);
                all.push(finding);
            }
        }
        all.sort_by_key(|finding| (finding.step, finding.layer));
        Ok(all)
    }

    /// A sequence without tokens, in the cache of each group.
    pub fn sequence(&self) -> GroupedSequence {
        let part = |group: &LayerGroup<T>| {
            let sequence = Sequence::new(group.attention.cache().pool());
            (sequence, group.causality)
        };
        GroupedSequence { parts: self.groups.iter().map(part).collect() }
    }

    /// Makes room for `tokens` more tokens of a sequence in each group, gives back the tokens before the window of the
    /// first one that is not computed, and queues the copies of blocks that it shared. After an error no group has
    /// grown, but the tokens before the windows may be given back: make the metadata anew, also of steps without this
    /// growth. Before it reports that there are no blocks, it waits for blocks that steps in flight may still read.
    ///
    /// # Errors
    /// As for [`PagedKvCache::grow`](crate::kv::PagedKvCache::grow).
    pub fn grow(&mut self, stream: &Stream, sequence: &mut GroupedSequence, tokens: usize) -> Result<()> {
        for group in &self.groups {
            group.attention.cache().admits(stream)?;
        }
        sequence.give_back()?;
        let mut rooms = Vec::with_capacity(self.groups.len());
        for (group, (part, _)) in self.groups.iter().zip(&mut sequence.parts) {
            rooms.push(group.attention.cache().reserve(part, tokens)?);
        }
        for (group, room) in self.groups.iter_mut().zip(&rooms) {
            group.attention.cache_mut().copy_blocks(stream, &room.copies)?;
        }
        for ((part, _), room) in sequence.parts.iter_mut().zip(rooms) {
            // The slots are not used: the metadata has them, and the copies are queued.
            let _ = part.settle(room)?;
        }
        Ok(())
    }

    /// Whether one step can add these numbers of tokens to these sequences:
    /// [`BlockPool::admits`](crate::kv::BlockPool::admits) in each group, after [`GroupedAttention::grow`] has given
    /// tokens back. A sequence that has grown already adds none.
    ///
    /// # Errors
    /// [`BATCH_BLOCKS`](crate::rules::BATCH_BLOCKS), [`LENGTHS_OVERFLOW`](crate::rules::LENGTHS_OVERFLOW).
    pub fn admits<'s>(
        &self,
        requests: impl IntoIterator<Item = (&'s GroupedSequence, usize)>,
    ) -> Result<(), Violation> {
        // One more than the pools admit, so that an endless list ends.
        let most = BlockPool::MAX_REQUESTS.saturating_add(1);
        let requests: Vec<_> = requests.into_iter().take(most).collect();
        for (at, group) in self.groups.iter().enumerate() {
            let lengths = requests.iter().filter_map(|(sequence, tokens)| sequence.keys_of(at, *tokens));
            group.attention.cache().pool().admits(lengths)?;
        }
        Ok(())
    }

    /// The metadata of a step of these requests.
    ///
    /// # Errors
    /// As for [`AttentionMetadata::new`](crate::AttentionMetadata::new).
    pub fn metadata(&self, requests: &[GroupedRequest<'_>], policy: StatePolicy) -> Result<GroupedMetadata, Violation> {
        let settings =
            self.groups.iter().map(|group| BatchSettings::of(group.attention.cache(), group.causality).policy(policy));
        GroupedMetadata::new(requests, settings)
    }

    /// Begins a step on a stream: [`Attention::begin`] in each group.
    ///
    /// # Errors
    /// As for [`Attention::begin`]; [`STEP_CAUSALITY`](crate::rules::STEP_CAUSALITY) and
    /// [`GROUP_LAYERS`](crate::rules::GROUP_LAYERS) for metadata of another attention.
    pub fn begin<'a>(&'a mut self, stream: &'a Stream, metadata: &'a GroupedMetadata) -> Result<GroupedStep<'a, T>> {
        same_groups(metadata.groups.len(), self.groups.len())?;
        let mut steps = Vec::with_capacity(self.groups.len());
        for (group, metadata) in self.groups.iter_mut().zip(&metadata.groups) {
            let [given, own] = [metadata.settings().causality, group.causality].map(LayerMask::from);
            if given != own {
                return Err(Violation::new(
                    &rules::STEP_CAUSALITY,
                    format_args!("a step of {given}"),
                    own,
                    "make the metadata by `GroupedAttention::metadata` of this attention",
                )
                .into());
            }
            match group.attention.begin(stream, metadata) {
                Ok(step) => steps.push(step),
                Err(why) => {
                    // The caller has the error, and need not be told that the steps before have no layers.
                    steps.iter_mut().for_each(|step: &mut Step<'_, T>| step.layers.silence());
                    return Err(why);
                }
            }
        }
        let mut layers = QueuedLayers::new(self.of_layer.len(), Vec::new(), STEP_AGAIN);
        layers.join(steps.iter_mut().map(|step| &mut step.layers));
        Ok(GroupedStep { layers, steps, of_layer: &self.of_layer })
    }
}

/// Refuses a step with another number of groups of layers.
pub(crate) fn same_groups(given: usize, own: usize) -> Result<(), Violation> {
    if given == own {
        return Ok(());
    }
    Err(Violation::new(
        &rules::GROUP_LAYERS,
        format_args!("metadata of {given} groups of layers"),
        format_args!("{own}"),
        "make the metadata of a step with the attention that computes it or was captured",
    ))
}

/// A step of a model with several kinds of layers. From [`GroupedAttention::begin`]; end it when the last layer is
/// queued, as a [`Step`].
#[derive(Debug)]
pub struct GroupedStep<'a, T: Element> {
    steps: Vec<Step<'a, T>>,
    of_layer: &'a [(usize, usize)],
    layers: QueuedLayers,
}

impl<'a, T: Element> GroupedStep<'a, T> {
    /// Queues a layer of the model as a layer of its group.
    fn queue<R>(&mut self, layer: usize, forward: impl FnOnce(&mut Step<'a, T>, usize) -> Result<R>) -> Result<R> {
        let outcome = self.queue_in_group(layer, forward);
        self.layers.note_outcome(layer, outcome)
    }

    fn queue_in_group<R>(
        &mut self,
        layer: usize,
        forward: impl FnOnce(&mut Step<'a, T>, usize) -> Result<R>,
    ) -> Result<R> {
        self.layers.check_not_repeated(layer)?;
        let layers = self.of_layer.len();
        let known = self.of_layer.get(layer);
        let step = known.and_then(|place| Some((self.steps.get_mut(place.0)?, *place)));
        let (step, (group, local)) = step.ok_or_else(|| no_layer(layer, layers))?;
        let mut outcome = forward(step, local);
        self.layers.note_part(layer, &step.layers, (group, local));
        if let Err(Error::Violation(violation)) = &mut outcome
            && local != layer
        {
            // The step of the group knows the layer by its number there.
            let of_model = format!(", in layer {layer} of the model, number {local} of its group");
            violation.given.push_str(&of_model);
        }
        outcome
    }

    /// Queues one layer, numbered as the model does: [`Step::forward`] in its group.
    ///
    /// # Errors
    /// As for [`Step::forward`]; [`ARGUMENT_VALUE`](crate::rules::ARGUMENT_VALUE) for a layer that does
    /// not exist.
    pub fn forward<'i>(&mut self, layer: usize, inputs: impl Into<LayerInputs<'i, T>>) -> Result<Tensor<T>> {
        self.queue(layer, |step, local| step.forward(local, inputs))
    }

    /// As [`forward`](Self::forward), with an output tensor of the caller: [`Step::forward_into`].
    ///
    /// # Errors
    /// As for [`Step::forward_into`] and [`GroupedStep::forward`].
    pub fn forward_into<'i>(
        &mut self,
        layer: usize,
        inputs: impl Into<LayerInputs<'i, T>>,
        output: &mut Tensor<T>,
    ) -> Result<()> {
        self.queue(layer, |step, local| step.forward_into(local, inputs, output))
    }

    /// Ends the step, and checks that all its layers were queued: [`Step::end`].
    ///
    /// # Errors
    /// As for [`Step::end`].
    pub fn end(mut self) -> Result<()> {
        Ok(self.layers.end()?)
    }

    /// The backend and plan that serve a group, once its first layer is planned.
    pub fn selected(&self, group: usize) -> Option<&SelectedBackend<T>> {
        self.steps.get(group).and_then(Step::selected)
    }
}
