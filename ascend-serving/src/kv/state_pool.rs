//! A pool of the recurrent states of requests, with a tensor of them for each layer.

use ascend_attention::causal_conv::{CausalConv1d, ConvSequence, ConvSequences};
use ascend_attention::delta_rule::{DeltaSequences, DeltaStates, DeltaTensors};
use ascend_attention::recurrent_delta_rule::RecurrentGatedDeltaRule;
use ascend_attention::{AnyTensor, Device, Element, Stream, Tensor, Violation, bf16};

use crate::error::{Error, Result};
use crate::rules;
use crate::sharing::PlannedStream;

use super::cache_shape::{CacheShape, no_layer};
use super::request_state::{MOST_DRAFTS, RequestState, StateLease, StateSlot};
use super::sequence::Sequence;
use super::slot::MAX_INT32;

/// What the layers of linear attention of a model have in common.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct StateShape {
    /// Layers of linear attention.
    pub layers: usize,
    /// Heads of the queries and keys (`Nk`), a divisor of those of the values.
    pub key_heads: usize,
    /// Heads of the values (`Nv`), each with a state.
    pub value_heads: usize,
    /// Elements of a value in a head (`Dv`).
    pub value_dim: usize,
    /// Elements of a key in a head (`Dk`).
    pub key_dim: usize,
    /// The factor of the queries, usually `1 / sqrt(Dk)`.
    pub scale: f64,
    /// Whether each layer has the decay of each head ([`DeltaTensors::g`]).
    pub g: bool,
    /// Whether each layer has the decay of each column of a state ([`DeltaTensors::gk`]). Since CANN 9.0.
    pub gk: bool,
    /// Drafts of a request in a step, 0 to 7: it has `1 + drafts` slots, so that the state behind each token of such a
    /// step is kept, and rejected drafts are taken back.
    pub drafts: usize,
    /// The causal convolution in front of each layer; `None` where the caller computes it, or the model has none.
    pub convolution: Option<Convolution>,
}

impl StateShape {
    /// Refuses tensors of a layer with other heads of queries, or other decays.
    pub(crate) fn check_tensors<T: Element>(
        &self,
        layer: usize,
        tensors: &DeltaTensors<'_, T>,
    ) -> Result<(), Violation> {
        let query = tensors.query;
        if query.shape().get(1) != Some(&self.key_heads) {
            return Err(Violation::new(
                &rules::STEP_HEADS,
                format_args!("query {} in layer {layer}, of linear attention", query.desc()),
                format_args!("{} heads", self.key_heads),
                "bring the heads of the `StateShape`",
            ));
        }
        let given = [tensors.g.is_some(), tensors.gk.is_some()];
        if given == [self.g, self.gk] {
            return Ok(());
        }
        let text = |[g, gk]: [bool; 2]| {
            let some = |given: bool| if given { "some" } else { "none" };
            format!("{} of heads, {} of columns", some(g), some(gk))
        };
        Err(Violation::new(
            &rules::STEP_LAYERS,
            format_args!("decays in layer {layer}, of linear attention: {}", text(given)),
            format_args!("those of the `StateShape`: {}", text([self.g, self.gk])),
            "bring `g`, and `gk`, in every layer of linear attention where the `StateShape` says so, and in none \
             otherwise; zeros are no decay",
        ))
    }
}

/// The causal convolution in front of layers of linear attention: each channel of what the model projects becomes a
/// weighted sum over the last tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Convolution {
    /// Tokens that a sum sees, 2 to 4, its own among them: the pool keeps one row less for each request.
    pub width: usize,
    /// Elements of a row, queries, keys and values of all heads: `2 Nk Dk + Nv Dv`, a multiple of 16.
    pub channels: usize,
    /// Whether SiLU follows the sum.
    pub silu: bool,
}

impl Convolution {
    /// Rows in front of a token that its sum sees: those of a window.
    pub(crate) fn front(self) -> usize {
        self.width.saturating_sub(1)
    }
}

/// The recurrent states of requests in the layers of linear attention of a model (Qwen3-Next, Qwen3.5, Kimi): what a
/// [`PagedKvCache`](super::PagedKvCache) is to layers of full attention. It is a part of an
/// [`Attention`](crate::Attention::of_hybrid), whose sequences have their states in it.
///
/// A request has a state of fixed size, in the same slots of every layer, which is written in place: everything about a
/// pool goes to one stream. Its slots are taken when its sequence grows first
/// ([`Attention::grow`](crate::Attention::grow)), and go back when the sequence is dropped or cut to 0. A fork shares
/// the slot of the present state until one of the two grows, which then copies it, so that a sequence that is kept and
/// never grown is a snapshot in a single slot. The last rows in front of a causal convolution, which such layers have,
/// are in the same slots ([`StateShape::convolution`]), and [`Step::convolve`](crate::Step::convolve) computes it, by
/// [`CausalConv1d`]: an operator of vLLM-Ascend's package, which no release of CANN has.
///
/// The operators are those of [`delta_rule`](ascend_attention::delta_rule): RecurrentGatedDeltaRule, since CANN 8.5 and
/// on Ascend 950 since 9.1, for requests that have a slot for each of their new tokens, and ChunkGatedDeltaRule, since
/// CANN 9.1 and on Ascend 950 since 9.2, for longer ones. What ChunkGatedDeltaRule does not take,
/// RecurrentGatedDeltaRule computes in calls of 8 tokens of a request: prompts on earlier releases, with decays of
/// columns (`gk`, Kimi delta attention), and over states of `f32` on Atlas A2 and A3. States are of `bf16`, from CANN
/// 9.2 on also of `f32`.
#[derive(Debug)]
pub struct StatePool {
    shape: StateShape,
    layers: Vec<DeltaStates>,
    /// The rows in front of the next token of each slot, `[slots, width - 1, channels]`, of each layer; none without
    /// a convolution.
    windows: Vec<AnyTensor>,
    slots: usize,
    /// A state without tokens, of which those of sequences are forks.
    none: RequestState,
    device: Device,
    stream: PlannedStream,
    zeroed: Zeroed,
}

/// Makes states of a pool's type: of these slots, heads and dimensions.
type Zeroed = fn(&Device, usize, usize, usize, usize) -> ascend_attention::Result<DeltaStates>;

impl StatePool {
    /// A pool of `slots` states of the type `S` in each layer: `1 + drafts` for each request, and one for each state
    /// that is kept beside. Where steps are replayed from graphs, from CANN 9.1 on, at least as many as the largest
    /// captured size has rows ([`GraphLimits::tokens_each`](crate::GraphLimits::tokens_each)).
    ///
    /// # Errors
    /// [`ARGUMENT_VALUE`](crate::rules::ARGUMENT_VALUE) for a pool without slots, layers or elements, and for more than
    /// INT32 counts or a model has, and for a scale that is 0 or not finite;
    /// [`STATE_DRAFTS`](crate::rules::STATE_DRAFTS) for more drafts than an operator takes; as for
    /// [`RecurrentGatedDeltaRule::plan`], where it does not take such states on this device or in this release; with a
    /// convolution as for [`CausalConv1d::plan`], also where no package has the operator; as for
    /// [`Device::alloc_zeroed`].
    pub fn new<S: Element>(stream: &Stream, slots: usize, shape: StateShape) -> Result<Self> {
        let StateShape { layers, key_heads, value_heads: heads, value_dim, key_dim, drafts, .. } = shape;
        let counts = [("slots", slots, MAX_INT32), ("layers", layers, CacheShape::MAX_LAYERS)];
        let dims = [("key_heads", key_heads), ("value_heads", heads), ("value_dim", value_dim), ("key_dim", key_dim)];
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
        if drafts > MOST_DRAFTS {
            return Err(rules::STATE_DRAFTS
                .broken(format_args!("{drafts} drafts"), format_args!("0 to {MOST_DRAFTS}"))
                .into());
        }
        if slots <= drafts {
            return Err(Error::invalid("slots", slots, format_args!("at least {}, those of one request", drafts + 1))
                .fix("make the pool with 1 + drafts slots for each request"));
        }
        let zeroed: Zeroed = DeltaStates::zeroed::<S>;
        check_taken(stream, &shape, zeroed)?;
        if let Some(convolution) = &shape.convolution {
            check_convolution(stream, convolution)?;
        }
        let windows = match shape.convolution {
            Some(convolution) => (0..layers).map(|_| windows_of(stream, slots, convolution)).collect::<Result<_>>()?,
            None => Vec::new(),
        };
        let states = || zeroed(stream.device(), slots, heads, value_dim, key_dim);
        Ok(Self {
            shape,
            layers: (0..layers).map(|_| states()).collect::<Result<_, _>>()?,
            windows,
            slots,
            none: RequestState::of_pool(slots, drafts),
            device: stream.device().clone(),
            stream: PlannedStream::of(stream),
            zeroed,
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

    pub(crate) fn device(&self) -> &Device {
        &self.device
    }

    /// Slots that no sequence holds.
    pub fn free_slots(&self) -> usize {
        self.none.free_slots()
    }

    /// Looks for a fault in the slots of these sequences, as an [`Audit`](super::Audit) does in blocks: a slot is free
    /// or held, and no two states write one. Returns how many slots others hold: 0 where these are all sequences of the
    /// pool, with those that a [`PrefixCache`](crate::PrefixCache) keeps, and no step is in progress, so that held and
    /// free slots are those of the pool.
    ///
    /// # Errors
    /// [`STATE_REQUESTS`](crate::rules::STATE_REQUESTS) for a sequence without a state,
    /// [`STATE_POOL`](crate::rules::STATE_POOL) for one of another pool, [`STATE_SLOTS`](crate::rules::STATE_SLOTS) for
    /// the first fault.
    pub fn audit<'a>(&self, sequences: impl IntoIterator<Item = &'a Sequence>) -> Result<usize, Violation> {
        let sequences: Vec<_> = sequences.into_iter().map(Sequence::state).collect();
        sequences.iter().try_for_each(|state| self.none.check_same_pool(*state))?;
        self.none.audit(sequences.into_iter().flatten(), self.slots)
    }

    /// The states of a layer, counted from 0 among those of linear attention, `[slots, Nv, Dv, Dk]`, to be read on the
    /// pool's stream. Who writes to them writes to the states of requests.
    ///
    /// # Errors
    /// [`ARGUMENT_VALUE`](crate::rules::ARGUMENT_VALUE) for a layer that there is not.
    pub fn layer(&self, layer: usize) -> Result<&DeltaStates> {
        self.layers.get(layer).ok_or_else(|| no_layer(layer, self.layers.len()))
    }

    /// The last rows in front of a layer's convolution, `[slots, width - 1, channels]` of `bf16`, to be read on the
    /// pool's stream; the layer is counted from 0 among those of linear attention. Who writes to them writes to the
    /// states of requests.
    ///
    /// # Errors
    /// [`STEP_CONVOLUTION`](crate::rules::STEP_CONVOLUTION) for a pool without a convolution,
    /// [`ARGUMENT_VALUE`](crate::rules::ARGUMENT_VALUE) for a layer that there is not.
    pub fn windows(&self, layer: usize) -> Result<&AnyTensor> {
        if self.shape.convolution.is_none() {
            let given = "a pool of states without a convolution";
            return Err(rules::STEP_CONVOLUTION.broken(given, "one whose `StateShape` has one").into());
        }
        self.windows.get(layer).ok_or_else(|| no_layer(layer, self.windows.len()))
    }

    /// The call that convolves.
    pub(crate) fn convolution_call(&self) -> CausalConv1d {
        call(self.shape.convolution.is_some_and(|convolution| convolution.silu))
    }

    /// States of zeros beside the pool, of its type and sizes.
    pub(crate) fn states_beside(&self, device: &Device, slots: usize) -> Result<DeltaStates> {
        let StateShape { value_heads, value_dim, key_dim, .. } = self.shape;
        Ok((self.zeroed)(device, slots, value_heads, value_dim, key_dim)?)
    }

    /// A state without tokens, which has no slot yet.
    pub(crate) fn state(&self) -> RequestState {
        self.none.fork(0)
    }

    /// Refuses a sequence whose state is not of this pool, or was written in some layers alone.
    pub(crate) fn check_state(&self, state: Option<&RequestState>) -> Result<(), Violation> {
        self.none.check_same_pool(state)?;
        state.map_or(Ok(()), RequestState::check_whole)
    }

    pub(crate) fn check_stream(&self, stream: &Stream) -> Result<()> {
        let allowed = "the stream of the pool, which orders the use of its states";
        self.stream.check(stream, allowed).map_err(|_| rules::STATE_STREAM.broken("another stream", allowed).into())
    }

    /// Makes the slots of a next step the state's own: takes those that it lacks, and queues the copies of a present
    /// state that others hold too, or the zeros with which a state begins.
    pub(crate) fn make_ready(&self, stream: &Stream, state: &RequestState) -> Result<()> {
        state.make_ready(|from, to| self.fill(stream, from, to))
    }

    /// Begins a step of these states, each with its number of new tokens, as [`make_ready`](Self::make_ready) makes
    /// them. After an error no step of any has begun.
    pub(crate) fn begin(&self, stream: &Stream, states: Vec<(RequestState, usize)>) -> Result<Vec<StateLease>> {
        let mut leases = Vec::with_capacity(states.len());
        for (state, new) in states {
            match state.begin(new, |from, to| self.fill(stream, from, to)) {
                Ok(lease) => leases.push(lease),
                Err(why) => {
                    leases.iter_mut().for_each(StateLease::restore);
                    return Err(why);
                }
            }
        }
        Ok(leases)
    }

    /// Queues the copy of a state to another slot in every layer, or zeros.
    fn fill(&self, stream: &Stream, from: Option<&StateSlot>, to: &StateSlot) -> Result<()> {
        self.layers.iter().map(DeltaStates::tensor).chain(&self.windows).try_for_each(|layer| {
            let to = state_in(layer, to.number())?;
            match from {
                Some(from) => Ok(to.copy_from(stream, &state_in(layer, from.number())?)?),
                None => Ok(to.clear(stream)?),
            }
        })
    }
}

/// The state in a slot.
pub(crate) fn state_in(states: &AnyTensor, slot: usize) -> Result<AnyTensor> {
    Ok(states.narrow(0, slot..slot.saturating_add(1))?)
}

/// Refuses states that the operator does not take on this device: plans a token of a request over one of them.
fn check_taken(stream: &Stream, shape: &StateShape, zeroed: Zeroed) -> Result<()> {
    let &StateShape { key_heads, value_heads: heads, value_dim, key_dim, scale, .. } = shape;
    let device = stream.device();
    let empty = |shape: &[usize]| Tensor::<bf16>::empty(device, shape);
    let (key, value) = (empty(&[1, key_heads, key_dim])?, empty(&[1, heads, value_dim])?);
    let (beta, states) = (empty(&[1, heads])?, zeroed(device, 1, heads, value_dim, key_dim)?);
    let decays = |given: bool, shape: &[usize]| given.then(|| Tensor::<f32>::empty(device, shape)).transpose();
    let (g, gk) = (decays(shape.g, &[1, heads])?, decays(shape.gk, &[1, heads, key_dim])?);
    let mut tensors = DeltaTensors::new((&key, &key, &value), &beta);
    (tensors.g, tensors.gk) = (g.as_ref(), gk.as_ref());
    RecurrentGatedDeltaRule::new(scale).plan(&DeltaSequences::of_slots(stream, &[[0]])?, (tensors, &states))?;
    Ok(())
}

/// Refuses a convolution that the operator does not compute on this device: plans a token of a request with it.
fn check_convolution(stream: &Stream, convolution: &Convolution) -> Result<()> {
    let &Convolution { width, channels, silu } = convolution;
    for (name, count) in [("channels", channels), ("width", width)] {
        if !(1..=MAX_INT32).contains(&count) {
            let refused = Error::invalid(name, count, format_args!("1 to {MAX_INT32}"));
            return Err(refused.fix("give the sizes of the model's convolution"));
        }
    }
    let empty = |rows: usize| Tensor::<bf16>::empty(stream.device(), [rows, channels]);
    let (x, weight) = (empty(1)?, empty(width)?);
    let lines = Tensor::empty(stream.device(), [1, convolution.front(), channels])?;
    let sequences = ConvSequences::new(stream, &[ConvSequence { rows: 1, line: Some(0), continues: true }])?;
    call(silu).plan(&sequences, (&x, &weight, &lines))?;
    Ok(())
}

fn call(silu: bool) -> CausalConv1d {
    let call = CausalConv1d::new();
    if silu { call.silu() } else { call }
}

/// The rows in front of the next token of each slot: zeros.
fn windows_of(stream: &Stream, slots: usize, convolution: Convolution) -> Result<AnyTensor> {
    let shape = [slots, convolution.front(), convolution.channels];
    let elements = shape.iter().try_fold(1usize, |product, axis| product.checked_mul(*axis));
    let elements = elements.ok_or_else(|| {
        Error::invalid("slots", slots, "windows whose elements can be counted").fix("give fewer slots")
    })?;
    let windows = Tensor::from_buffer(&stream.device().alloc_zeroed::<bf16>(elements)?, shape)?;
    Ok((*windows).clone())
}
