//! Backends whose programs graphs record.

use std::sync::Arc;

use ascend_attention::Element;

use crate::batch::{AttentionState, Drafting};
use crate::error::Result;

use super::attention_backend::{AttentionBackend, checked_program};
use super::program::StepProgram;
use super::refused_backend::no_backend;
use super::registry::Backends;
use super::step_context::{LayerTensors, StepContext};
use super::step_plan::StepPlan;

/// The backend whose program a graph records.
pub(crate) struct RecordedBackend<T: Element> {
    pub(crate) backend: Arc<dyn AttentionBackend<T>>,
    /// The program of some step. Those of others differ in lengths, blocks and the contents of masks alone.
    pub(crate) form: StepProgram<T>,
    pub(crate) plan: StepPlan<T>,
}

impl<T: Element> Backends<T> {
    /// Prepares what graphs record of steps: a program with room for tables of `columns` columns, for one scale of the
    /// `scales` that layers have, by the first backend whose programs of all these steps differ in lengths, blocks and
    /// the contents of masks alone.
    ///
    /// # Errors
    /// [`NoBackend`](crate::Error::NoBackend) with the reason of each backend.
    pub(crate) fn record(
        &self,
        steps: &[StepContext<'_>],
        first: &LayerTensors<'_, T>,
        (columns, scales): (usize, usize),
    ) -> Result<RecordedBackend<T>> {
        let Some(step) = steps.first() else {
            return Err(no_backend(&[], None));
        };
        let (recorded, _) = self.plan_first(step, first, |backend| {
            let program = |step| checked_program(&**backend, step, first);
            let form = program(step)?;
            form.check_recordable(backend.name())?;
            for other in steps {
                let program = program(other)?;
                form.check_form(&program, backend.name())?;
                // Calls of other lengths may break rules of the operator.
                StepPlan::of_program(program, other, first, Some(columns))?;
            }
            let program = program(step)?;
            form.check_form(&program, backend.name())?;
            let plan = StepPlan::of_program(program, step, first, Some(columns))?;
            self.admits(plan.memory(), scales)?;
            Ok(RecordedBackend { backend: Arc::clone(backend), form, plan })
        })?;
        Ok(recorded)
    }

    /// The kind of steps of which graphs record the backends, where each request adds up to this number of tokens: that
    /// which [`StatePolicy`](crate::StatePolicy) calls such steps of an engine with these drafts. Where nothing is said
    /// of drafts, several tokens are those of steps that verify drafts, if a list or a layer's preference names these,
    /// since chunks have graphs for nothing else.
    pub(crate) fn recorded_state(&self, tokens_each: usize, drafting: Option<Drafting>) -> AttentionState {
        let (verifying, chunks) = (AttentionState::SpecDecoding, AttentionState::ChunkedPrefill);
        let is_named =
            || self.of_steps.contains_key(&verifying) || self.preferred.keys().any(|(_, state)| *state == verifying);
        match (drafting, tokens_each) {
            (Some(Drafting::Mtp), _) => verifying,
            (_, 1) => AttentionState::DecodeOnly,
            (None, _) if is_named() => verifying,
            _ => chunks,
        }
    }
}
