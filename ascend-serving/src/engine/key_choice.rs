//! The keys that the tokens of a step read, and the indexers that choose them.

use std::sync::Arc;

use ascend_attention::{Stream, Tensor, Violation};

use crate::batch::AttentionMetadata;
use crate::error::{Error, Result};
use crate::rules::{self, room};

/// The keys that the tokens of a step read, as one of its indexers chose them. From
/// [`SparseStep::choose`](crate::SparseStep::choose) or
/// [`SparseGraphStep::choose`](crate::SparseGraphStep::choose). Layers of that step may share it; cloning shares the
/// memory.
#[derive(Clone, Debug)]
pub struct KeyChoice {
    step: Arc<()>,
    indexer: usize,
    indices: Tensor<i32>,
    keys_per_index: usize,
}

impl KeyChoice {
    /// A choice of single keys, `[tokens, 1, count]`, by an indexer of a step.
    pub(crate) fn new(step: &Arc<()>, indexer: usize, indices: Tensor<i32>) -> Self {
        Self { step: Arc::clone(step), indexer, indices, keys_per_index: 1 }
    }

    /// The choice of every key that a token sees, in runs of `keys_per_index` keys.
    pub(super) fn all(
        step: &Arc<()>,
        stream: &Stream,
        metadata: &AttentionMetadata,
        keys_per_index: usize,
    ) -> Result<Self> {
        let runs = |keys: usize| keys.div_ceil(keys_per_index);
        let columns = runs(metadata.longest());
        let mut list = Vec::new();
        let elements = metadata.tokens().saturating_mul(columns);
        let (rule, fix) = (&rules::LENGTHS_OVERFLOW, "compute fewer tokens in a step");
        room(&mut list, elements, rule, fix)?;
        for (new, cached) in metadata.new_and_cached() {
            for seen in cached + 1..=cached + new {
                let own = runs(seen);
                list.extend(0..own as i32);
                list.extend((own..columns).map(|_| -1));
            }
        }
        Ok(Self {
            step: Arc::clone(step),
            indexer: 0,
            indices: stream.upload(&list, [metadata.tokens(), 1, columns])?,
            keys_per_index,
        })
    }

    /// The same choice, by another indexer.
    pub(super) fn by(&self, indexer: usize) -> Self {
        Self { indexer, ..self.clone() }
    }

    /// The indexer, as the cache of index keys numbers its layers.
    pub fn indexer(&self) -> usize {
        self.indexer
    }

    /// For each token the numbers of the chosen keys, counted in runs of
    /// [`keys_per_index`](Self::keys_per_index) keys from the first token of its sequence, and -1 after the last:
    /// `[tokens, 1, count]`.
    pub fn indices(&self) -> &Tensor<i32> {
        &self.indices
    }

    /// How many keys an index names: 1 for what an indexer chose. Where every key is chosen without an indexer, as many
    /// as the operator takes.
    pub fn keys_per_index(&self) -> usize {
        self.keys_per_index
    }
}

/// The indexers of a step, and whose choices layers have read.
#[derive(Debug)]
pub(crate) struct StepIndexers {
    /// Identifies the step in its choices.
    step: Arc<()>,
    states: Vec<Indexer>,
}

/// What has become of an indexer in a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Indexer {
    Missing,
    /// It is queued, and no layer has read its choice.
    Queued,
    Read,
}

impl StepIndexers {
    /// So many indexers of a new step, none of them queued.
    pub(crate) fn new(indexers: usize) -> Self {
        Self { step: Arc::new(()), states: vec![Indexer::Missing; indexers] }
    }

    /// What identifies the step in its choices.
    pub(crate) fn step(&self) -> &Arc<()> {
        &self.step
    }

    /// Refuses an indexer that there is not, and one that was queued.
    pub(crate) fn check_missing(&self, indexer: usize) -> Result<()> {
        let indexers = self.states.len();
        match self.states.get(indexer) {
            None => Err(Error::invalid("indexer", indexer, format_args!("below {indexers}"))
                .fix("count the layers of the cache of index keys from 0")),
            Some(Indexer::Missing) => Ok(()),
            Some(Indexer::Queued | Indexer::Read) => Err(Violation::new(
                &rules::STEP_LAYER_REPEATED,
                format_args!("indexer {indexer} a second time"),
                format_args!("each indexer below {indexers} once"),
                "pass the choice of the first time to each layer that shares it; to compute a step again, begin it \
                 again",
            )
            .into()),
        }
    }

    pub(crate) fn note_queued(&mut self, indexer: usize) {
        self.note(indexer, Indexer::Queued);
    }

    pub(crate) fn note_read(&mut self, choice: &KeyChoice) {
        self.note(choice.indexer, Indexer::Read);
    }

    fn note(&mut self, indexer: usize, state: Indexer) {
        if let Some(own) = self.states.get_mut(indexer) {
            *own = state;
        }
    }

    /// Refuses a choice of another step and, for the `last` layer that is missing, a step whose tokens would count as
    /// computed without keys that indexers of later steps read, or of which no layer reads what an indexer has chosen:
    /// then one has got the choice of another.
    pub(crate) fn check_choice(&self, choice: &KeyChoice, layer: usize, last: bool) -> Result<(), Violation> {
        if !Arc::ptr_eq(&choice.step, &self.step) {
            let given = format_args!("a choice of another step in layer {layer}");
            return Err(rules::SPARSE_CHOICE.broken(given, "a choice of this step"));
        }
        if !last {
            return Ok(());
        }
        let indexers = self.states.len();
        if let Some(indexer) = self.states.iter().position(|state| *state == Indexer::Missing) {
            return Err(rules::SPARSE_INDEX_KEYS.broken(
                format_args!("layer {layer}, the last of the step, without the keys of indexer {indexer}"),
                format_args!("the keys of each indexer below {indexers}"),
            ));
        }
        let mut unread = self.states.iter().enumerate();
        match unread.find(|(at, state)| **state == Indexer::Queued && *at != choice.indexer) {
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
