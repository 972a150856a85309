//! A pool of the recurrent states of requests, with a tensor of them for each layer.

use std::sync::Arc;

use ascend_attention::delta_rule::DeltaStates;
use ascend_attention::{AnyTensor, Element, Stream};

use crate::error::{Error, Result};
use crate::kv::{CacheShape, MAX_INT32, no_layer};
use crate::sharing::PlannedStream;

use super::request_state::{FreeSlots, RequestState};

/// What the layers of linear attention of a model have in common.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct StateShape {
    /// Layers of linear attention, counted from 0 among themselves.
    pub layers: usize,
    /// Heads of the values (`Nv`), each with a state.
    pub value_heads: usize,
    /// Elements of a value in a head (`Dv`).
    pub value_dim: usize,
    /// Elements of a key in a head (`Dk`).
    pub key_dim: usize,
    /// The factor of the queries, usually `1 / sqrt(Dk)`.
    pub scale: f64,
}

/// The recurrent states of requests in the layers of linear attention of a model (Qwen3-Next, Qwen3.5): what a paged
/// cache is to layers of full attention.
///
/// A request has a state of fixed size, in the same slots of every layer: [`admit`](Self::admit) hands it out empty,
/// [`fork`](Self::fork) copies that of another request or of a prefix. In a step ([`begin`](Self::begin)) each layer
/// computes the tokens of the step's metadata, prompts and decodes alike ([`StateStep::forward`]). The layers of full
/// attention of the model compute the same metadata over their cache beside it.
///
/// States are written in place, so that everything about a pool goes to one stream. The window of a causal convolution,
/// which such layers have in front, is not in the pool: CANN has no such operator on Atlas A2 and A3.
///
/// The operators are those of [`delta_rule`](ascend_attention::delta_rule): RecurrentGatedDeltaRule, since CANN 8.5,
/// for requests that have a slot for each of their new tokens, and ChunkGatedDeltaRule, since CANN 9.1, for longer
/// ones. Before, and for layers with decays of columns (`gk`, Kimi delta attention), admit requests with
/// [`MOST_DRAFTS`](RequestState::MOST_DRAFTS) and compute prompts in chunks of 8 tokens. States are of `bf16`; from
/// CANN 9.2 on RecurrentGatedDeltaRule takes those of `f32` too, and ChunkGatedDeltaRule on Ascend 950.
///
/// ```
/// # fn main() -> ascend_serving::Result<()> {
/// # #[cfg(feature = "emulation")] {
/// use ascend_attention::delta_rule::DeltaTensors;
/// use ascend_attention::spec::{Cann, Soc};
/// use ascend_attention::{Machine, Runtime, bf16};
/// use ascend_serving::kv::{BlockPool, PadPolicy, Sequence};
/// use ascend_serving::{AttentionMetadata, BatchRequest, BatchSettings, Causality, StatePool, StateShape};
///
/// let stream = Runtime::emulated_as(&Machine::new(Soc::AtlasA2, Cann::V9_1))?.device(0)?.stream()?;
/// let shape = StateShape { layers: 2, value_heads: 4, value_dim: 16, key_dim: 16, scale: 0.25 };
/// let mut states = StatePool::<bf16>::new(&stream, 8, shape)?;
/// // The tokens of the request, as the layers of full attention have them too.
/// let pool = BlockPool::new(8, 128, PadPolicy::SkipNegative)?;
/// let mut sequence = Sequence::new(&pool);
/// // Steps have up to 2 drafts.
/// let mut state = states.admit(&stream, 2)?;
/// for (new, accepted) in [(20, 20), (3, 1), (3, 3)] {
///     sequence.grow(new)?;
///     let settings = BatchSettings::of(&pool, Causality::Causal);
///     let metadata = AttentionMetadata::new(&[BatchRequest::of(&sequence, new)], settings)?;
///     // What the model projects; queries and keys are normalised.
///     let rows = |dim: usize| stream.upload(&vec![bf16::from_f32(0.25); new * 4 * dim], [new, 4, dim]);
///     let (query, key, value) = (rows(16)?, rows(16)?, rows(16)?);
///     let beta = stream.upload(&vec![bf16::from_f32(0.5); new * 4], [new, 4])?;
///     let decay = stream.upload(&vec![-0.1; new * 4], [new, 4])?;
///
///     let mut step = states.begin(&stream, &metadata, [&mut state])?;
///     for layer in 0..shape.layers {
///         let output = step.forward(layer, DeltaTensors::new((&query, &key, &value), &beta).g(&decay))?;
///         assert_eq!(output.shape(), [new, 4, 16]);
///     }
///     step.end()?;
///     // Drafts that were rejected are taken back, from the sequence and from the state.
///     let tokens = sequence.len() - new + accepted;
///     sequence.truncate(tokens)?;
///     state.truncate(tokens)?;
/// }
/// assert_eq!(state.tokens(), 24);
/// # }
/// # Ok(())
/// # }
/// ```
///
/// [`StateStep::forward`]: crate::StateStep::forward
#[derive(Debug)]
pub struct StatePool<S: Element> {
    shape: StateShape,
    layers: Vec<DeltaStates<S>>,
    slots: usize,
    free: Arc<FreeSlots>,
    stream: PlannedStream,
}

impl<S: Element> StatePool<S> {
    /// A pool of `slots` states in each layer: one for each request, and one more for each draft of it.
    ///
    /// # Errors
    /// [`ARGUMENT_VALUE`](crate::rules::ARGUMENT_VALUE) for a pool without slots, layers or elements, and for more than
    /// INT32 counts or a model has, and for a scale that is 0 or not finite; as for
    /// [`Device::alloc_zeroed`](ascend_attention::Device::alloc_zeroed).
    pub fn new(stream: &Stream, slots: usize, shape: StateShape) -> Result<Self> {
        let StateShape { layers, value_heads: heads, value_dim, key_dim, .. } = shape;
        let most = CacheShape::MAX_LAYERS;
        let counts = [("slots", slots, MAX_INT32), ("layers", layers, most)];
        let dims = [("value_heads", heads), ("value_dim", value_dim), ("key_dim", key_dim)];
        for (name, count, most) in counts.into_iter().chain(dims.map(|(name, count)| (name, count, MAX_INT32))) {
            if !(1..=most).contains(&count) {
                let refused = Error::invalid(name, count, format_args!("1 to {most}"));
                return Err(refused.fix("give the sizes of the model, and a slot for each request and draft"));
            }
        }
        let scale = shape.scale as f32;
        if !scale.is_finite() || scale == 0.0 {
            return Err(Error::invalid("scale", shape.scale, "a finite number that single precision tells from 0")
                .fix("give the factor of the queries, usually one over the root of `key_dim`"));
        }
        let states = || DeltaStates::zeroed(stream.device(), slots, heads, value_dim, key_dim);
        Ok(Self {
            shape,
            layers: (0..layers).map(|_| states()).collect::<Result<_, _>>()?,
            slots,
            free: Arc::new(FreeSlots::new(slots)),
            stream: PlannedStream::of(stream),
        })
    }

    /// What the layers have in common.
    pub fn shape(&self) -> StateShape {
        self.shape
    }

    /// Slots of each layer.
    pub fn slots(&self) -> usize {
        self.slots
    }

    /// Slots that no request holds.
    pub fn free_slots(&self) -> usize {
        self.free.count()
    }

    /// The states of a layer, `[slots, Nv, Dv, Dk]`, to be read on the pool's stream. Who writes to them writes to the
    /// states of requests.
    ///
    /// # Errors
    /// [`ARGUMENT_VALUE`](crate::rules::ARGUMENT_VALUE) for a layer that there is not.
    pub fn layer(&self, layer: usize) -> Result<&DeltaStates<S>> {
        self.layers.get(layer).ok_or_else(|| no_layer(layer, self.layers.len()))
    }

    /// The state of a request without tokens, with slots for this many drafts of a step: zeros in every layer, which
    /// are queued.
    ///
    /// # Errors
    /// [`STATE_EXHAUSTED`](crate::rules::STATE_EXHAUSTED), [`STATE_DRAFTS`](crate::rules::STATE_DRAFTS);
    /// [`PLAN_TENSORS`](crate::rules::PLAN_TENSORS) for another stream than the pool's; as for [`DeltaStates::clear`].
    pub fn admit(&mut self, stream: &Stream, drafts: usize) -> Result<RequestState> {
        self.check_stream(stream)?;
        let state = RequestState::new(&self.free, drafts, 0)?;
        for layer in &self.layers {
            layer.clear(stream, &[state.slot()])?;
        }
        Ok(state)
    }

    /// A request that goes on from a copy of the present state of another, with slots for this many drafts of a step:
    /// a fork of a request, a state that is kept behind a prefix, or a request that such a prefix begins. The copies
    /// are queued.
    ///
    /// # Errors
    /// As for [`admit`](Self::admit); [`STATE_POOL`](crate::rules::STATE_POOL) for a state of another pool,
    /// [`STATE_TORN`](crate::rules::STATE_TORN) for one that a step has written in some layers alone.
    pub fn fork(&mut self, stream: &Stream, state: &RequestState, drafts: usize) -> Result<RequestState> {
        self.check_stream(stream)?;
        self.check_state(state)?;
        let copy = RequestState::new(&self.free, drafts, state.tokens())?;
        for layer in &self.layers {
            let states = layer.tensor();
            state_in(states, copy.slot())?.copy_from(stream, &state_in(states, state.slot())?)?;
        }
        Ok(copy)
    }

    pub(super) fn check_stream(&self, stream: &Stream) -> Result<()> {
        let checked = self.stream.check(stream, "the stream of the pool, which orders the use of its states");
        checked.map_err(|refused| refused.fix("pass the stream that the pool was made with"))
    }

    /// Refuses a state of another pool, and one that a step has written in some layers alone.
    pub(super) fn check_state(&self, state: &RequestState) -> Result<()> {
        if !state.is_of(&self.free) {
            return Err(crate::rules::STATE_POOL.broken("a state of another pool", "a state of this pool").into());
        }
        Ok(state.check_whole()?)
    }
}

/// The state in a slot.
pub(super) fn state_in(states: &AnyTensor, slot: usize) -> Result<AnyTensor> {
    Ok(states.narrow(0, slot..slot.saturating_add(1))?)
}
