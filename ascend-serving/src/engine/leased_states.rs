//! The states of the requests of a step in progress, which layers of linear attention write.

use ascend_attention::{AnyTensor, Stream, Violation};

use crate::batch::{AttentionMetadata, LayerMask};
use crate::causality::Causality;
use crate::error::{Error, Result};
use crate::kv::{RequestState, StateLease, StatePool};
use crate::rules;

/// How to go on after a step that has written some layers of linear attention and not all layers.
pub(crate) const STATES_AGAIN: &str = "queue every layer; where one of linear attention was queued, cut the requests' \
     sequences to 0 (`truncate`) and compute all tokens again, or go on from forks that were made before the step";

/// The states of a step's requests. Unless all layers are queued, nothing goes on from them once one was written.
#[derive(Debug)]
pub(crate) struct LeasedStates<'a> {
    pool: &'a StatePool,
    states: Vec<StateLease>,
    /// Whether a layer may have written states.
    wrote: bool,
    /// Whether a layer may have written the states of some calls alone.
    half_written: bool,
    /// For each layer of linear attention whether it is convolved; empty where the pool has no convolution.
    convolved: Vec<bool>,
    ended: bool,
}

impl<'a> LeasedStates<'a> {
    /// Refuses a step whose tokens see later ones, and states that nothing goes on from.
    pub(crate) fn check(pool: &StatePool, metadata: &AttentionMetadata) -> Result<(), Violation> {
        check_causal(metadata)?;
        let states = metadata.recurrent_requests().filter_map(|request| request.state);
        let mut states = states.filter_map(|state| state.upgrade());
        states.try_for_each(|state| pool.check_state(Some(&state)))
    }

    /// The states of a step's requests, and the new tokens of each. Refuses a request without a state, or with one that
    /// has not taken the tokens in front of its new ones, or cannot keep its drafts.
    pub(crate) fn of_requests(metadata: &AttentionMetadata) -> Result<Vec<(RequestState, usize)>, Violation> {
        let mut states = Vec::with_capacity(metadata.requests());
        for (at, request) in metadata.recurrent_requests().enumerate() {
            let Some(state) = request.state else {
                return Err(rules::STATE_REQUESTS.broken(
                    format_args!("request {at} without a state"),
                    "requests by `BatchRequest::of`, of sequences of `Attention::sequence`",
                ));
            };
            let Some(state) = state.upgrade() else {
                return Err(rules::SEQUENCE_CHANGED.broken(
                    format_args!("metadata of request {at}, whose sequence is gone or has begun anew since"),
                    "sequences as they were when the metadata was made",
                ));
            };
            state.check_request(at, request.cached, request.new, request.drafts)?;
            states.push((state, request.new));
        }
        Ok(states)
    }

    /// Makes the states of a step's requests ready, and begins to write them.
    pub(crate) fn begin(pool: &'a StatePool, stream: &Stream, metadata: &AttentionMetadata) -> Result<Self> {
        let states = pool.begin(stream, Self::of_requests(metadata)?)?;
        let convolved = vec![false; pool.shape().convolution.map_or(0, |_| pool.shape().layers)];
        Ok(Self { pool, states, wrote: false, half_written: false, convolved, ended: false })
    }

    /// The pool of the states.
    pub(crate) fn pool(&self) -> &'a StatePool {
        self.pool
    }

    /// The states and windows of all layers.
    pub(crate) fn stored(&self) -> impl Iterator<Item = &'a AnyTensor> {
        let pool = self.pool;
        let layers = 0..pool.shape().layers;
        let states = layers.clone().filter_map(|layer| Some(pool.layer(layer).ok()?.tensor()));
        let convolved = layers.filter(|_| pool.shape().convolution.is_some());
        states.chain(convolved.filter_map(|layer| pool.windows(layer).ok()))
    }

    /// The states, one for each request.
    pub(crate) fn states(&self) -> &[StateLease] {
        &self.states
    }

    /// Whether a layer may have written states.
    pub(crate) fn has_written(&self) -> bool {
        self.wrote
    }

    /// Notes that a layer is about to queue the first call that writes states.
    pub(crate) fn begin_write(&mut self) {
        self.wrote = true;
        self.half_written = true;
    }

    /// Notes the outcome of a call that writes states. One that is refused has queued nothing; of any other the device
    /// may run some, where it failed too.
    pub(crate) fn note_call<R>(&mut self, outcome: Result<R>) -> Result<R> {
        if !outcome.as_ref().is_err_and(Error::is_refusal) {
            self.begin_write();
        }
        outcome
    }

    /// Notes that a layer has written the states of all its calls.
    pub(crate) fn end_write(&mut self) {
        self.half_written = false;
    }

    /// Refuses a layer, number `own` of those of linear attention, in front of its convolution, or behind a layer that
    /// has written some states and failed.
    pub(crate) fn check_layer(&self, layer: usize, own: usize) -> Result<(), Violation> {
        self.check_not_half_written(layer)?;
        match self.convolved.get(own) {
            Some(false) => {
                let given = format_args!("layer {layer}, which was not convolved in this step");
                Err(rules::STEP_CONVOLUTION.broken(given, "the layer behind its convolution"))
            }
            _ => Ok(()),
        }
    }

    /// Refuses a convolution where the pool has none, one that was queued before, and one behind a layer that
    /// has written some states and failed.
    pub(crate) fn check_convolution(&self, layer: usize, own: usize) -> Result<()> {
        self.check_not_half_written(layer)?;
        self.pool.windows(own)?;
        match self.convolved.get(own) {
            Some(true) => Err(rules::STEP_CONVOLUTION
                .broken(format_args!("layer {layer} twice"), "each layer once in a step")
                .into()),
            _ => Ok(()),
        }
    }

    /// Notes that a layer is convolved, number `own` of those of linear attention.
    pub(crate) fn end_convolution(&mut self, own: usize) {
        self.end_write();
        if let Some(convolved) = self.convolved.get_mut(own) {
            *convolved = true;
        }
    }

    /// Refuses a layer behind one that has written some states and failed.
    fn check_not_half_written(&self, layer: usize) -> Result<(), Violation> {
        if !self.half_written {
            return Ok(());
        }
        let given = format_args!("layer {layer} of a step, of which a launch failed");
        Err(rules::STATE_TORN.broken(given, "a new step, of sequences that were cut to 0 or forked before this one"))
    }

    /// The end of a step of which every layer is queued.
    pub(crate) fn advance(&mut self) {
        if !std::mem::replace(&mut self.ended, true) {
            self.states.iter_mut().for_each(StateLease::advance);
        }
    }
}

impl Drop for LeasedStates<'_> {
    fn drop(&mut self) {
        if !self.ended && !self.wrote {
            self.states.iter_mut().for_each(StateLease::restore);
        }
    }
}

/// Refuses a step whose tokens see later ones, or only some of those before: a state has taken all of them.
fn check_causal(metadata: &AttentionMetadata) -> Result<(), Violation> {
    let is_causal = |mask: &&LayerMask| {
        matches!(mask, LayerMask::Causality(Causality::Causal | Causality::Window(_) | Causality::Chunk(_)))
    };
    match metadata.groups().map(AttentionMetadata::mask).find(|mask| !is_causal(mask)) {
        None => Ok(()),
        Some(other) => Err(Violation::new(
            &rules::STEP_CAUSALITY,
            format_args!("{other} with layers of linear attention"),
            "a causal step, with a window or without",
            "leave the mask of the metadata causal, and compute documents or items as requests of their own; a layer \
             of attention gets another mask by `LayerInputs::mask`",
        )),
    }
}
