//! The calls that compute a layer of linear attention: neighbouring requests by one call, long ones by several where
//! there is no operator for them.

use std::fmt;
use std::ops::Range;
use std::sync::Arc;

use ascend_attention::chunk_delta_rule::{ChunkDeltaOutput, ChunkDeltaPlan, ChunkGatedDeltaRule};
use ascend_attention::delta_rule::{DeltaSequences, DeltaStates, DeltaTensors};
use ascend_attention::recurrent_delta_rule::{RecurrentDeltaPlan, RecurrentGatedDeltaRule};
use ascend_attention::spec::ops::delta_rule::MOST_TOKENS;
use ascend_attention::{Element, Stream, Tensor};

use crate::error::{Error, Result};
use crate::kv::{StateLease, StatePool, slots_of_tokens, state_in};

/// Neighbouring requests of a step that one call computes.
#[derive(Debug)]
pub(super) struct DeltaRun {
    first: usize,
    /// Whether the requests have a slot for the state behind each of their new tokens.
    kept: bool,
    /// New tokens of each request.
    lengths: Vec<usize>,
    /// The slots of each request: one for each new token where all states are kept, and otherwise one.
    slots: Vec<Vec<usize>>,
}

impl DeltaRun {
    /// The runs of a step's requests.
    pub(super) fn of(states: &[StateLease]) -> Vec<Self> {
        let mut runs: Vec<Self> = Vec::new();
        let mut first = 0usize;
        for state in states.iter().filter(|state| state.new_tokens() > 0) {
            let kept = state.is_kept();
            if runs.last().is_none_or(|run| run.kept != kept) {
                runs.push(Self { first, kept, lengths: Vec::new(), slots: Vec::new() });
            }
            if let Some(run) = runs.last_mut() {
                run.lengths.push(state.new_tokens());
                run.slots.push(state.row());
            }
            first += state.new_tokens();
        }
        runs
    }

    fn rows(&self) -> Range<usize> {
        self.first..self.first + self.lengths.iter().sum::<usize>()
    }

    /// Plans the calls for all layers, with the states and rows of the first one.
    pub(super) fn plan<T: Element>(
        &self,
        pool: &StatePool,
        stream: &Stream,
        states: &DeltaStates,
        tensors: &DeltaTensors<'_, T>,
    ) -> Result<Vec<DeltaCall>> {
        if self.kept {
            let rows = DeltaRows::of(tensors, self.rows())?;
            let plan = recurrent(pool, stream, &self.slots, &rows, states)?;
            return Ok(vec![DeltaCall { rows: self.rows(), plan: CallPlan::Recurrent(Arc::new(plan)) }]);
        }
        match self.chunk(pool, stream, tensors) {
            Err(why @ (Error::Violation(_) | Error::Attention(ascend_attention::Error::MissingOperator { .. }))) => {
                tracing::debug!("prompts are computed by RecurrentGatedDeltaRule, {MOST_TOKENS} tokens a call: {why}");
                self.pieces(pool, stream, states, tensors)
            }
            planned => Ok(vec![planned?]),
        }
    }

    /// The call of ChunkGatedDeltaRule.
    fn chunk<T: Element>(&self, pool: &StatePool, stream: &Stream, tensors: &DeltaTensors<'_, T>) -> Result<DeltaCall> {
        let rows = DeltaRows::of(tensors, self.rows())?;
        let slots: Vec<usize> = self.slots.iter().flatten().copied().collect();
        let sequences = DeltaSequences::of_lengths(stream, &self.lengths)?;
        let beside = || pool.states_beside(stream.device(), slots.len());
        let (initial, last) = (beside()?, beside()?);
        let plan = ChunkGatedDeltaRule::new(pool.shape().scale).plan(&sequences, (rows.tensors(), &initial))?;
        Ok(DeltaCall { rows: self.rows(), plan: CallPlan::Chunk(Box::new(ChunkCall { plan, initial, last, slots })) })
    }

    /// Calls of RecurrentGatedDeltaRule, each of a few tokens of one request, whose states go to one slot.
    fn pieces<T: Element>(
        &self,
        pool: &StatePool,
        stream: &Stream,
        states: &DeltaStates,
        tensors: &DeltaTensors<'_, T>,
    ) -> Result<Vec<DeltaCall>> {
        // From CANN 9.1 on a pool has at least as many states as a call has tokens.
        let most = pool.slots().min(MOST_TOKENS as usize).max(1);
        let mut calls = Vec::new();
        let mut first = self.first;
        for (length, slots) in self.lengths.iter().zip(&self.slots) {
            let end = first + *length;
            let mut plans: [Option<Arc<RecurrentDeltaPlan>>; 2] = [None, None];
            for begin in (first..end).step_by(most) {
                let rows = begin..(begin + most).min(end);
                let plan = &mut plans[usize::from(rows.len() < most)];
                let plan = match plan {
                    Some(plan) => Arc::clone(plan),
                    None => {
                        let slots = slots_of_tokens(slots, rows.len());
                        let given = DeltaRows::of(tensors, rows.clone())?;
                        Arc::clone(plan.insert(Arc::new(recurrent(pool, stream, &[slots], &given, states)?)))
                    }
                };
                calls.push(DeltaCall { rows, plan: CallPlan::Recurrent(plan) });
            }
            first = end;
        }
        Ok(calls)
    }
}

fn recurrent<T: Element>(
    pool: &StatePool,
    stream: &Stream,
    slots: &[Vec<usize>],
    rows: &DeltaRows<T>,
    states: &DeltaStates,
) -> Result<RecurrentDeltaPlan> {
    let sequences = DeltaSequences::of_slots(stream, slots)?;
    Ok(RecurrentGatedDeltaRule::new(pool.shape().scale).plan(&sequences, (rows.tensors(), states))?)
}

/// A call that computes some rows of each layer.
#[derive(Debug)]
pub(super) struct DeltaCall {
    rows: Range<usize>,
    plan: CallPlan,
}

#[derive(Debug)]
enum CallPlan {
    /// RecurrentGatedDeltaRule, which reads and writes the pool. Pieces of one prompt share a plan.
    Recurrent(Arc<RecurrentDeltaPlan>),
    /// ChunkGatedDeltaRule between copies of states.
    Chunk(Box<ChunkCall>),
}

/// A call of ChunkGatedDeltaRule, the states that it begins and ends with, and their slots in the pool.
struct ChunkCall {
    plan: ChunkDeltaPlan,
    initial: DeltaStates,
    last: DeltaStates,
    slots: Vec<usize>,
}

impl fmt::Debug for ChunkCall {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ChunkCall").field("slots", &self.slots).finish_non_exhaustive()
    }
}

impl DeltaCall {
    /// The rows of the step that it computes.
    pub(super) fn rows(&self) -> Range<usize> {
        self.rows.clone()
    }

    /// Queues the call for the states of a layer, with an output of its rows.
    pub(super) fn launch_into<T: Element>(
        &self,
        stream: &Stream,
        states: &DeltaStates,
        rows: &DeltaRows<T>,
        output: &mut Tensor<T>,
    ) -> Result<()> {
        let tensors = rows.tensors();
        match &self.plan {
            CallPlan::Recurrent(plan) => Ok(plan.launch_into(stream, (tensors, states), output)?),
            CallPlan::Chunk(chunk) => {
                let ChunkCall { plan, initial, last, slots } = &**chunk;
                for (place, slot) in slots.iter().enumerate() {
                    state_in(initial.tensor(), place)?.copy_from(stream, &state_in(states.tensor(), *slot)?)?;
                }
                let mut outputs = ChunkDeltaOutput::new(output.clone(), last);
                plan.launch_into(stream, (tensors, initial), &mut outputs)?;
                for (place, slot) in slots.iter().enumerate() {
                    state_in(states.tensor(), *slot)?.copy_from(stream, &state_in(last.tensor(), place)?)?;
                }
                Ok(())
            }
        }
    }
}

/// The rows of a layer's tensors that a call computes.
pub(super) struct DeltaRows<T: Element> {
    query: Tensor<T>,
    key: Tensor<T>,
    value: Tensor<T>,
    beta: Tensor<T>,
    g: Option<Tensor<f32>>,
    gk: Option<Tensor<f32>>,
}

impl<T: Element> DeltaRows<T> {
    pub(super) fn of(tensors: &DeltaTensors<'_, T>, rows: Range<usize>) -> Result<Self> {
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
