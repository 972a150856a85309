//! The indexers of a step of sparse attention, and whose choices its layers have read.

use std::sync::Arc;

use ascend_attention::Violation;

use crate::error::{Error, Result};
use crate::rules;

use super::key_choice::KeyChoice;

/// The indexers of a step, and whose choices layers have read.
#[derive(Debug)]
pub(super) struct StepIndexers {
    /// Identifies the step in its choices.
    step: Arc<()>,
    states: Vec<IndexerState>,
}

/// The state of an indexer in a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum IndexerState {
    Missing,
    /// Its launch failed: its keys may be written.
    Failed,
    /// It is queued, and no layer has read its choice.
    Queued,
    Read,
}

impl StepIndexers {
    /// The indexers of a new step, none of them queued.
    pub(super) fn new(indexers: usize) -> Self {
        Self { step: Arc::new(()), states: vec![IndexerState::Missing; indexers] }
    }

    /// What identifies the step in its choices.
    pub(super) fn step(&self) -> &Arc<()> {
        &self.step
    }

    /// Refuses an indexer that there is not, and one that was queued.
    pub(super) fn check_missing(&self, indexer: usize) -> Result<()> {
        let indexers = self.states.len();
        match self.states.get(indexer) {
            None => Err(Error::invalid("indexer", indexer, format_args!("below {indexers}"))
                .fix("count the layers of the cache of index keys from 0")),
            Some(IndexerState::Missing) => Ok(()),
            Some(IndexerState::Failed) => Err(rules::launch_failed(format_args!("indexer {indexer}")).into()),
            Some(IndexerState::Queued | IndexerState::Read) => Err(Violation::new(
                &rules::STEP_LAYER_REPEATED,
                format_args!("indexer {indexer} a second time"),
                format_args!("each indexer below {indexers} once"),
                "pass the choice of the first time to each layer that shares it; to compute a step again, begin it \
                 again",
            )
            .into()),
        }
    }

    pub(super) fn note_queued(&mut self, indexer: usize) {
        self.note(indexer, IndexerState::Queued);
    }

    pub(super) fn note_failed(&mut self, indexer: usize) {
        self.note(indexer, IndexerState::Failed);
    }

    pub(super) fn note_read(&mut self, choice: &KeyChoice) {
        self.note(choice.indexer(), IndexerState::Read);
    }

    /// The indexer whose choice no layer has read.
    pub(super) fn unread(&self) -> Option<usize> {
        self.states.iter().position(|state| *state == IndexerState::Queued)
    }

    fn note(&mut self, indexer: usize, state: IndexerState) {
        if let Some(own) = self.states.get_mut(indexer) {
            *own = state;
        }
    }

    /// Refuses a choice of another step. For the `last` layer of a step, refuses also an indexer whose keys were not
    /// written, which later steps would read, and a choice that no layer has read: a layer has probably got the choice
    /// of another indexer.
    pub(super) fn check_choice(&self, choice: &KeyChoice, layer: usize, last: bool) -> Result<(), Violation> {
        if !choice.is_of(&self.step) {
            let given = format_args!("a choice of another step in layer {layer}");
            return Err(rules::SPARSE_CHOICE.broken(given, "a choice of this step"));
        }
        if !last {
            return Ok(());
        }
        let indexers = self.states.len();
        if let Some(indexer) =
            self.states.iter().position(|state| matches!(state, IndexerState::Missing | IndexerState::Failed))
        {
            return Err(rules::SPARSE_INDEX_KEYS.broken(
                format_args!("layer {layer}, the last of the step, without the keys of indexer {indexer}"),
                format_args!("the keys of each indexer below {indexers}"),
            ));
        }
        let mut unread = self.states.iter().enumerate();
        match unread.find(|(at, state)| **state == IndexerState::Queued && *at != choice.indexer()) {
            None => Ok(()),
            Some((indexer, _)) => Err(Violation::new(
                &rules::SPARSE_CHOICE,
                format_args!("layer {layer}, the last of the step, and no layer with the choice of indexer {indexer}"),
                "a layer or more for each choice",
                "pass to each layer the choice of its own indexer, and to a layer without one that of an earlier layer",
            )),
        }
    }
}
