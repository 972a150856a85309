//! A step of sparse attention in progress, replayed indexer by indexer and layer by layer.

use std::fmt;

use ascend_attention::{Element, Stream, Tensor, Violation};

use crate::backends::size;
use crate::engine::{IndexerTensors, KeyChoice, LayerQueries, SparseRows, SparseTensors, StepIndexers};
use crate::error::Result;
use crate::kv::{StepLease, no_layer};
use crate::rules;

use super::graph_pool::GraphStep;
use super::graph_tensors::copy_rows;
use super::sparse_buffers::SparseBuffers;

/// A step of sparse attention that is replayed from graphs. From
/// [`SparseGraphs::begin`](crate::SparseGraphs::begin); end it when the last layer is queued, as a
/// [`SparseStep`](crate::SparseStep).
pub struct SparseGraphStep<'a, T: Element, W: Element = T> {
    pub(super) step: GraphStep<'a, SparseBuffers<T, W>>,
    pub(super) indexers: StepIndexers,
    pub(super) layers: usize,
    /// The indexer that was queued last: what the others have chosen is overwritten.
    pub(super) latest: Option<usize>,
    pub(super) stream: &'a Stream,
    /// Rows of the requests.
    pub(super) actual: usize,
    /// Rows including the padding.
    pub(super) rows: usize,
    pub(super) lease: StepLease<'a, Stream>,
}

impl<T: Element, W: Element> SparseGraphStep<'_, T, W> {
    /// Query tokens of the captured size, padding included.
    pub fn tokens(&self) -> usize {
        self.rows
    }

    fn sparse_rows(&self) -> SparseRows<'_> {
        SparseRows { device: self.stream.device(), actual: self.actual, padded: self.rows, padding: false }
    }

    /// Copies the tensors of an indexer into those of its graph and launches it: [`SparseStep::choose`]. They have a
    /// row for each token of the step, with the padding or without it. Returns at once. What is chosen is written to
    /// one tensor for every indexer, so that a layer has to read it before the next one.
    ///
    /// # Errors
    /// [`SPARSE_CHOICE`](crate::rules::SPARSE_CHOICE) while no layer has read what the indexer before has chosen;
    /// [`STEP_TOKENS`](crate::rules::STEP_TOKENS), [`STEP_HEADS`](crate::rules::STEP_HEADS) and
    /// [`STEP_CONTIGUOUS`](crate::rules::STEP_CONTIGUOUS) for tensors of other shapes or strides,
    /// [`STEP_LAYER_REPEATED`](crate::rules::STEP_LAYER_REPEATED) for an indexer that was queued before,
    /// [`ARGUMENT_VALUE`](crate::rules::ARGUMENT_VALUE) for one that the cache does not have,
    /// [`ARGUMENT_DEVICE`](crate::rules::ARGUMENT_DEVICE) for tensors of another device; as for [`GraphStep::launch`].
    ///
    /// [`SparseStep::choose`]: crate::SparseStep::choose
    pub fn choose(&mut self, indexer: usize, inputs: IndexerTensors<'_, T, W>) -> Result<KeyChoice> {
        let outcome = self.queue_indexer(indexer, inputs);
        if outcome.is_err() {
            self.step.layers.silence();
        }
        outcome
    }

    fn queue_indexer(&mut self, indexer: usize, inputs: IndexerTensors<'_, T, W>) -> Result<KeyChoice> {
        self.indexers.check_missing(indexer)?;
        if let Some(unread) = self.indexers.unread() {
            return Err(Violation::new(
                &rules::SPARSE_CHOICE,
                format_args!("indexer {indexer} while no layer has read what indexer {unread} chose"),
                "a layer or more for each choice, before the next indexer overwrites it",
                "queue a layer with that choice first",
            )
            .into());
        }
        let buffers = self.step.buffers();
        let IndexerTensors { query, weights, key } = inputs;
        inputs.check(&self.sparse_rows(), indexer, size(&buffers.index_query, 1))?;
        let copies = [
            ("index query", &**query, &*buffers.index_query),
            ("index weights", weights, &buffers.index_weights),
            ("index key", key, &buffers.index_key),
        ];
        copy_rows(self.stream, copies.into_iter())?;
        if let Err(error) = self.step.launch(self.layers.saturating_add(indexer)) {
            if !error.is_refusal() {
                // The choice of the indexer before may be overwritten.
                self.latest = None;
                self.indexers.note_failed(indexer);
            }
            return Err(error);
        }
        self.indexers.note_queued(indexer);
        self.latest = Some(indexer);
        Ok(KeyChoice::new(self.indexers.step(), indexer, buffers.chosen.indices.clone()))
    }

    /// Copies the tensors of a layer into those of its graph and launches it: [`SparseStep::forward`]. They have a row
    /// for each token of the step, with the padding or without it; the output, `[tokens, N, 512]`, has the padding. All
    /// layers write the same output, so it is lent until the next call of this step. A clone of the tensor is the same
    /// memory.
    ///
    /// # Errors
    /// [`SPARSE_CHOICE`](crate::rules::SPARSE_CHOICE) for a choice of another step, and for one that a later indexer
    /// has overwritten,
    /// [`SPARSE_INDEX_KEYS`](crate::rules::SPARSE_INDEX_KEYS) for the last layer that is missing while an indexer is
    /// missing too; as for [`choose`](Self::choose), with layers in place of indexers. Nothing is written then.
    ///
    /// [`SparseStep::forward`]: crate::SparseStep::forward
    pub fn forward(&mut self, layer: usize, inputs: SparseTensors<'_, T>) -> Result<&Tensor<T>> {
        let outcome = self.queue_layer(layer, inputs);
        match outcome {
            Ok(()) => self.indexers.note_read(inputs.choice),
            Err(_) => self.step.layers.silence(),
        }
        outcome.map(|()| &self.step.buffers().attention.out)
    }

    fn queue_layer(&mut self, layer: usize, inputs: SparseTensors<'_, T>) -> Result<()> {
        if layer >= self.layers {
            return Err(no_layer(layer, self.layers));
        }
        self.step.admits(layer)?;
        let SparseTensors { query, query_rope, latent, key_rope, choice } = inputs;
        self.indexers.check_choice(choice, layer, self.step.layers.is_last(layer))?;
        if self.latest != Some(choice.indexer()) {
            return Err(self.overwritten(layer, choice).into());
        }
        let buffers = self.step.buffers();
        let queries = LayerQueries { heads: size(&buffers.query, 1), joined: false };
        inputs.check(&self.sparse_rows(), layer, queries)?;
        let copies = [
            ("query", &**query, &*buffers.query),
            ("query_rope", query_rope, &buffers.query_rope),
            ("latent", latent, &buffers.latent),
            ("key_rope", key_rope, &buffers.key_rope),
        ];
        copy_rows(self.stream, copies.into_iter())?;
        self.step.launch(layer)
    }

    /// The refusal of a choice whose tensor holds that of another indexer.
    #[cold]
    fn overwritten(&self, layer: usize, choice: &KeyChoice) -> Violation {
        let given = format_args!("the choice of indexer {} in layer {layer}", choice.indexer());
        match self.latest {
            Some(latest) => Violation::new(
                &rules::SPARSE_CHOICE,
                format_args!("{given}, which indexer {latest} has overwritten"),
                "the choice of the indexer that was queued last, where graphs are replayed",
                "queue the layers that read a choice before the next indexer, or compute the step by \
                 `SparseLatent::begin`",
            ),
            None => Violation::new(
                &rules::SPARSE_CHOICE,
                format_args!("{given}, after an indexer that could not be queued"),
                "a choice that no other indexer has overwritten",
                "begin the step again",
            ),
        }
    }

    /// Ends the step, and checks that all its layers were queued: [`SparseStep::end`](crate::SparseStep::end).
    ///
    /// # Errors
    /// As for [`SparseStep::end`](crate::SparseStep::end).
    pub fn end(self) -> Result<()> {
        self.step.end()
    }

    /// The lease that keeps blocks from being handed out while the step may read them.
    pub fn lease(&self) -> &StepLease<'_, Stream> {
        &self.lease
    }
}

impl<T: Element, W: Element> fmt::Debug for SparseGraphStep<'_, T, W> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SparseGraphStep").field("step", &self.step).finish_non_exhaustive()
    }
}
