//! A step of layers of linear attention in progress.

use std::fmt;
use std::ops::Range;

use ascend_attention::chunk_delta_rule::{ChunkDeltaPlan, ChunkGatedDeltaRule};
use ascend_attention::delta_rule::{DeltaSequences, DeltaStates, DeltaTensors};
use ascend_attention::recurrent_delta_rule::{RecurrentDeltaPlan, RecurrentGatedDeltaRule};
use ascend_attention::{AnyTensor, Element, Stream, Tensor, Violation};

use crate::backends::size;
use crate::batch::{AttentionMetadata, LayerMask};
use crate::causality::Causality;
use crate::engine::QueuedLayers;
use crate::error::Result;
use crate::kv::BlockPool;
use crate::rules;

use super::request_state::RequestState;
use super::state_pool::{StatePool, state_in};

/// How to go on after a step that ended without some layers.
const BEGIN_AGAIN: &str = "queue every layer; where one was queued, drop the states, cut the requests' sequences to 0 \
    (`truncate`) and compute all tokens again from states that are admitted anew, or go on from forks that were made \
    before the step, with sequences cut to the tokens that these have";

impl<S: Element> StatePool<S> {
    /// Begins a step of these requests, a state for each of the metadata's in their order. Each state has the tokens
    /// that are cached in front of the request's new ones.
    ///
    /// # Errors
    /// [`STATE_REQUESTS`](crate::rules::STATE_REQUESTS) for another number of states than of requests,
    /// [`STATE_TOKENS`](crate::rules::STATE_TOKENS) for a state of another number of tokens, such as one whose rejected
    /// drafts were not taken back, [`STATE_SEQUENCE`](crate::rules::STATE_SEQUENCE) for the state of another request,
    /// [`STATE_DRAFTS`](crate::rules::STATE_DRAFTS) for drafts behind which no state could be kept,
    /// [`STEP_CAUSALITY`](crate::rules::STEP_CAUSALITY) for a step that is not causal,
    /// [`STATE_POOL`](crate::rules::STATE_POOL) for a state of another pool,
    /// [`STATE_TORN`](crate::rules::STATE_TORN) for one that a step has written in some layers alone,
    /// [`BATCH_EMPTY`](crate::rules::BATCH_EMPTY); [`PLAN_TENSORS`](crate::rules::PLAN_TENSORS) for another stream than
    /// the pool's; as for [`Stream::upload`].
    pub fn begin<'a>(
        &'a mut self,
        stream: &'a Stream,
        metadata: &AttentionMetadata,
        states: impl IntoIterator<Item = &'a mut RequestState>,
    ) -> Result<StateStep<'a, S>> {
        self.check_stream(stream)?;
        metadata.check_requests()?;
        check_causal(metadata)?;
        let requests = metadata.requests();
        let mut states: Vec<&mut RequestState> = states.into_iter().take(requests.saturating_add(1)).collect();
        if states.len() != requests {
            let given = match states.len() > requests {
                true => format!("more than {requests} states"),
                false => format!("{} states", states.len()),
            };
            return Err(rules::STATE_REQUESTS.broken(given, format_args!("{requests}, one for each request")).into());
        }
        let mut runs = Vec::new();
        let pool = metadata.pool_of_sequences().map(BlockPool::id);
        let (mut new, mut sequences) = (Vec::new(), Vec::new());
        for (at, (request, state)) in metadata.recurrent_requests().zip(&states).enumerate() {
            self.check_state(state)?;
            state.check_request(at, pool, &request)?;
            Run::add(&mut runs, state, request.new);
            new.push(request.new);
            sequences.push(pool.zip(request.sequence));
        }
        states.iter_mut().zip(sequences).for_each(|(state, sequence)| state.begin(sequence));
        Ok(StateStep {
            new,
            states,
            runs,
            plans: None,
            tokens: metadata.tokens(),
            layers: QueuedLayers::new(self.shape().layers, Vec::new(), BEGIN_AGAIN),
            half_written: false,
            pool: self,
            stream,
        })
    }
}

/// Refuses a step whose tokens see later ones, or only some of those before: a state has taken all of them.
fn check_causal(metadata: &AttentionMetadata) -> Result<(), Violation> {
    match metadata.mask() {
        LayerMask::Causality(Causality::Causal | Causality::Window(_) | Causality::Chunk(_)) => Ok(()),
        other => Err(Violation::new(
            &rules::STEP_CAUSALITY,
            format_args!("{other} with linear attention"),
            "a causal step, with a window or without",
            "make the settings with `Causality::Causal`, and compute documents or items as requests of their own",
        )),
    }
}

/// Neighbouring requests of a step that one call computes.
struct Run {
    rows: Range<usize>,
    /// Whether the requests have a slot for the state behind each of their new tokens.
    kept: bool,
    /// New tokens of each request.
    lengths: Vec<usize>,
    /// The slots of each request: one for each new token where all states are kept, and otherwise one.
    slots: Vec<Vec<usize>>,
}

impl Run {
    /// Adds a request of `new` tokens behind those of the runs.
    fn add(runs: &mut Vec<Self>, state: &RequestState, new: usize) {
        if new == 0 {
            return;
        }
        let start = runs.last().map_or(0, |run| run.rows.end);
        let (kept, end) = (state.keeps(new), start.saturating_add(new));
        let slots = state.row(if kept { new } else { 1 });
        match runs.last_mut() {
            Some(run) if run.kept == kept => {
                run.rows.end = end;
                run.lengths.push(new);
                run.slots.push(slots);
            }
            _ => runs.push(Self { rows: start..end, kept, lengths: vec![new], slots: vec![slots] }),
        }
    }

    /// Plans the call for all layers, with the states and rows of the first one.
    fn plan<S: Element, T: Element>(
        &self,
        (pool, stream): (&StatePool<S>, &Stream),
        states: &DeltaStates<S>,
        rows: &Rows<T>,
    ) -> Result<RunPlan<S>> {
        let (shape, tensors) = (pool.shape(), rows.tensors());
        if self.kept {
            let sequences = DeltaSequences::of_slots(stream, &self.slots)?;
            let plan = RecurrentGatedDeltaRule::new(shape.scale).plan(&sequences, (tensors, states))?;
            return Ok(RunPlan::Recurrent(Box::new(plan)));
        }
        let slots: Vec<usize> = self.slots.iter().flatten().copied().collect();
        let sequences = DeltaSequences::of_lengths(stream, &self.lengths)?;
        let initial =
            DeltaStates::zeroed(stream.device(), slots.len(), shape.value_heads, shape.value_dim, shape.key_dim)?;
        let plan = ChunkGatedDeltaRule::new(shape.scale).plan(&sequences, (tensors, &initial))?;
        Ok(RunPlan::Chunk(Box::new(ChunkRun { plan, initial, slots })))
    }
}

/// The call of a run, for all layers.
enum RunPlan<S: Element> {
    /// RecurrentGatedDeltaRule, which reads and writes the pool.
    Recurrent(Box<RecurrentDeltaPlan>),
    /// ChunkGatedDeltaRule between copies of states.
    Chunk(Box<ChunkRun<S>>),
}

/// A call of ChunkGatedDeltaRule, the states that it begins with, and the slots of the pool that these come from.
struct ChunkRun<S: Element> {
    plan: ChunkDeltaPlan,
    initial: DeltaStates<S>,
    slots: Vec<usize>,
}

impl<S: Element> RunPlan<S> {
    /// Queues the call for the states of a layer, and notes when it has written any.
    fn launch<T: Element>(
        &self,
        stream: &Stream,
        states: &DeltaStates<S>,
        rows: &Rows<T>,
        written: &mut bool,
    ) -> Result<Tensor<T>> {
        let tensors = rows.tensors();
        match self {
            Self::Recurrent(plan) => {
                let out = plan.launch(stream, (tensors, states))?;
                *written = true;
                Ok(out)
            }
            Self::Chunk(chunk) => {
                let ChunkRun { plan, initial, slots } = &**chunk;
                for (place, slot) in slots.iter().enumerate() {
                    state_in(initial.tensor(), place)?.copy_from(stream, &state_in(states.tensor(), *slot)?)?;
                }
                let computed = plan.launch(stream, (tensors, initial))?;
                *written = true;
                for (place, slot) in slots.iter().enumerate() {
                    state_in(states.tensor(), *slot)?.copy_from(stream, &state_in(&computed.final_state, place)?)?;
                }
                Ok(computed.out)
            }
        }
    }
}

/// The rows of a layer's tensors that a run computes.
struct Rows<T: Element> {
    query: Tensor<T>,
    key: Tensor<T>,
    value: Tensor<T>,
    beta: Tensor<T>,
    g: Option<Tensor<f32>>,
    gk: Option<Tensor<f32>>,
}

impl<T: Element> Rows<T> {
    fn of(tensors: &DeltaTensors<'_, T>, rows: &Range<usize>) -> Result<Self> {
        let cut = |tensor: &Tensor<T>| tensor.narrow(0, rows.clone());
        let decays = |tensor: Option<&Tensor<f32>>| tensor.map(|tensor| tensor.narrow(0, rows.clone())).transpose();
        Ok(Self {
            query: cut(tensors.query)?,
            key: cut(tensors.key)?,
            value: cut(tensors.value)?,
            beta: cut(tensors.beta)?,
            g: decays(tensors.g)?,
            gk: decays(tensors.gk)?,
        })
    }

    fn tensors(&self) -> DeltaTensors<'_, T> {
        let mut tensors = DeltaTensors::new((&self.query, &self.key, &self.value), &self.beta);
        (tensors.g, tensors.gk) = (self.g.as_ref(), self.gk.as_ref());
        tensors
    }
}

/// A step of layers of linear attention in progress. From [`StatePool::begin`]; end it when the last layer is queued,
/// by [`StateStep::end`] or by dropping it. States are written in place: where some layers were queued and others were
/// not, the states of the step's requests are refused from then on.
pub struct StateStep<'a, S: Element> {
    pool: &'a StatePool<S>,
    stream: &'a Stream,
    states: Vec<&'a mut RequestState>,
    /// New tokens of each request.
    new: Vec<usize>,
    /// Rows of the step, padding included.
    tokens: usize,
    runs: Vec<Run>,
    /// What the first layer has prepared for all.
    plans: Option<Vec<RunPlan<S>>>,
    layers: QueuedLayers,
    /// Whether a layer may have written the states of some runs alone.
    half_written: bool,
}

impl<S: Element> StateStep<'_, S> {
    /// Queues a layer: lets the states take the new tokens, and returns what these read, `[tokens, Nv, Dv]`. Returns at
    /// once. The tensors are packed, with the padding of the metadata, whose rows of the output are zeros. The first
    /// layer plans for all. Layers are counted from 0 among those of linear attention.
    ///
    /// # Errors
    /// [`STEP_TOKENS`](crate::rules::STEP_TOKENS) for tensors of other rows,
    /// [`STEP_LAYER_REPEATED`](crate::rules::STEP_LAYER_REPEATED) for a layer that was queued before,
    /// [`ARGUMENT_VALUE`](crate::rules::ARGUMENT_VALUE) for one that the pool does not have; as for
    /// [`RecurrentGatedDeltaRule::plan`] and [`ChunkGatedDeltaRule::plan`]. Nothing is queued then.
    /// [`STATE_TORN`](crate::rules::STATE_TORN) once a launch has failed between others of its layer.
    pub fn forward<T: Element>(&mut self, layer: usize, tensors: DeltaTensors<'_, T>) -> Result<Tensor<T>> {
        let outcome = self.queue_layer(layer, &tensors);
        self.layers.note_outcome(layer, outcome)
    }

    fn queue_layer<T: Element>(&mut self, layer: usize, tensors: &DeltaTensors<'_, T>) -> Result<Tensor<T>> {
        if self.half_written {
            let given = format_args!("layer {layer} of a step, of which a launch has failed between others");
            return Err(rules::STATE_TORN.broken(given, "a step that is begun again").into());
        }
        self.layers.check_not_repeated(layer)?;
        let states = self.pool.layer(layer)?;
        self.check_rows(layer, tensors)?;
        let rows: Vec<Rows<T>> = self.runs.iter().map(|run| Rows::of(tensors, &run.rows)).collect::<Result<_>>()?;
        let plans = match &self.plans {
            Some(plans) => plans,
            None => {
                let runs = self.runs.iter().zip(&rows);
                let plans = runs.map(|(run, rows)| run.plan((self.pool, self.stream), states, rows));
                self.plans.insert(plans.collect::<Result<_>>()?)
            }
        };
        self.layers.begin_write();
        let mut outputs = Vec::new();
        for ((run, plan), rows) in self.runs.iter().zip(plans).zip(&rows) {
            // A first launch that is refused has written nothing: the layer can be queued again.
            let output = plan.launch(self.stream, states, rows, &mut self.half_written)?;
            outputs.push((&run.rows, output));
        }
        let output = self.joined(tensors, outputs)?;
        self.half_written = false;
        Ok(output)
    }

    /// The outputs of the runs as one tensor.
    fn joined<T: Element>(
        &self,
        tensors: &DeltaTensors<'_, T>,
        mut outputs: Vec<(&Range<usize>, Tensor<T>)>,
    ) -> Result<Tensor<T>> {
        if outputs.first().is_some_and(|(rows, _)| rows.len() == self.tokens)
            && let Some((_, whole)) = outputs.pop()
        {
            return Ok(whole);
        }
        let [heads, value_dim] = [1, 2].map(|axis| size(tensors.value, axis));
        let shape = [self.tokens, heads, value_dim];
        let computed = outputs.last().map_or(0, |(rows, _)| rows.end);
        let output = match computed == self.tokens {
            true => Tensor::empty(self.stream.device(), shape)?,
            false => {
                let zeros = self.stream.device().alloc_zeroed::<T>(shape.iter().product())?;
                Tensor::from_buffer(&zeros, shape)?
            }
        };
        for (rows, part) in outputs {
            output.narrow(0, rows.clone())?.copy_from(self.stream, &part)?;
        }
        Ok(output)
    }

    /// Refuses tensors that do not have a row for each token of the step.
    fn check_rows<T: Element>(&self, layer: usize, tensors: &DeltaTensors<'_, T>) -> Result<()> {
        let DeltaTensors { query, key, value, beta, g, gk, .. } = *tensors;
        let given: [(_, Option<&AnyTensor>); 6] = [
            ("query", Some(query)),
            ("key", Some(key)),
            ("value", Some(value)),
            ("beta", Some(beta)),
            ("g", g.map(|tensor| &**tensor)),
            ("gk", gk.map(|tensor| &**tensor)),
        ];
        for (name, tensor) in given {
            let Some(tensor) = tensor else { continue };
            if tensor.shape().first() != Some(&self.tokens) {
                return Err(rules::STEP_TOKENS
                    .broken(
                        format_args!("{name} {} in layer {layer}", tensor.desc()),
                        format_args!("{} rows", self.tokens),
                    )
                    .into());
            }
        }
        Ok(())
    }

    /// Ends the step, and checks that all its layers were queued. Dropping it ends it without this check; the next step
    /// of its requests is refused then.
    ///
    /// # Errors
    /// [`STEP_LAYERS_MISSING`](crate::rules::STEP_LAYERS_MISSING).
    pub fn end(mut self) -> Result<()> {
        Ok(self.layers.end()?)
    }
}

impl<S: Element> Drop for StateStep<'_, S> {
    fn drop(&mut self) {
        for (state, new) in self.states.iter_mut().zip(&self.new) {
            if self.layers.is_complete() {
                state.advance(*new);
            } else if !self.layers.has_written() {
                state.restore();
            }
        }
    }
}

impl<S: Element> fmt::Debug for StateStep<'_, S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("StateStep")
            .field("requests", &self.new.len())
            .field("tokens", &self.tokens)
            .finish_non_exhaustive()
    }
}
