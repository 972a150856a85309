//! The keys that the tokens of a step read.

use std::sync::Arc;

use ascend_attention::{Stream, Tensor};

use crate::batch::AttentionMetadata;
use crate::error::Result;
use crate::rules::{self, room};

/// The keys that the tokens of a step read, as one of its indexers chose them. From
/// [`SparseStep::choose`](crate::SparseStep::choose). Layers of that step may share it; cloning shares the memory.
#[derive(Clone, Debug)]
pub struct KeyChoice {
    step: Arc<()>,
    indexer: usize,
    indices: Tensor<i32>,
    keys_per_index: usize,
}

impl KeyChoice {
    /// A choice of single keys, `[tokens, 1, count]`, by an indexer of a step.
    pub(super) fn new(step: &Arc<()>, indexer: usize, indices: Tensor<i32>) -> Self {
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
        let elements = metadata.tokens() * columns;
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

    /// This choice for the layers of another indexer.
    pub(super) fn by(&self, indexer: usize) -> Self {
        Self { indexer, ..self.clone() }
    }

    /// Whether an indexer of this step has chosen the keys.
    pub(super) fn is_of(&self, step: &Arc<()>) -> bool {
        Arc::ptr_eq(&self.step, step)
    }

    /// The indexer, as the cache of index keys numbers its layers.
    pub fn indexer(&self) -> usize {
        self.indexer
    }

    /// For each token the numbers of the chosen keys, counted in runs of
    /// [`keys_per_index`](Self::keys_per_index) keys from the first token of its sequence, and -1 after the last:
    /// `[tokens, 1, count]`. That of a step which is replayed is overwritten by the next indexer, of this step and of
    /// later ones of its size.
    pub fn indices(&self) -> &Tensor<i32> {
        &self.indices
    }

    /// How many keys an index names: 1 for what an indexer chose. Where every key is chosen without an indexer, as many
    /// as the operator takes.
    pub fn keys_per_index(&self) -> usize {
        self.keys_per_index
    }
}
