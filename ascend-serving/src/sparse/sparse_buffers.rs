//! What the graphs of a size of sparse steps read and write, and the calls that they record.

use ascend_attention::graph::Capturing;
use ascend_attention::indexer::{ChosenKeys, IndexerPlan, LightningIndexer};
use ascend_attention::scatter::{ScatterPlan, SlotMapping};
use ascend_attention::sparse::SparseSequences;
use ascend_attention::sparse_flash::{SparseAttention, SparseFlashAttention, SparseFlashPlan};
use ascend_attention::{AnyTensor, Element, Stream, Tensor};

use crate::batch::AttentionMetadata;
use crate::error::Result;
use crate::graphs::{CapturedGroup, zeros};
use crate::kv::{WriteViews, scattered_slots, slot_mapping};

use super::sparse_calls::{latents_and_ropes, paged};
use super::sparse_inputs::{IndexerKind, lengths_and_blocks};
use super::sparse_latent::SparseLatent;

/// The buffers of the graphs of a size, and the calls that they record.
pub(super) struct SparseBuffers<T: Element> {
    pub(super) sequences: SparseSequences,
    slots: SlotMapping,
    /// Writes of latents and rotary keys, the same call in every layer.
    latent_write: ScatterPlan,
    /// Writes of index keys, the same call for every indexer.
    index_write: ScatterPlan,
    chooses: IndexerPlan,
    attends: SparseFlashPlan,
    /// What all indexers are.
    pub(super) indexer: IndexerKind,
    pub(super) index_query: Tensor<T>,
    pub(super) index_weights: AnyTensor,
    pub(super) index_key: Tensor<T>,
    /// What stands for the values of the cache of index keys, which has none.
    no_values: Tensor<T>,
    pub(super) chosen: ChosenKeys<T>,
    pub(super) query: Tensor<T>,
    pub(super) query_rope: Tensor<T>,
    pub(super) latent: Tensor<T>,
    pub(super) key_rope: Tensor<T>,
    pub(super) attention: SparseAttention<T>,
}

impl<T: Element> SparseBuffers<T> {
    /// The buffers of a size whose indexers have weights of the type `W`.
    pub(super) fn new<W: Element>(
        sparse: &SparseLatent<T>,
        stream: &Stream,
        index_heads: usize,
        (rows, requests): (usize, usize),
        columns: usize,
    ) -> Result<Self> {
        let device = stream.device();
        let (latents, index_keys) = (sparse.latents(), sparse.index_keys());
        let (pool, heads) = (latents.pool(), sparse.shape().heads);
        let each = vec![rows.checked_div(requests).unwrap_or(0); requests];
        let blocks = vec![vec![0; columns]; requests];
        let sequences = SparseSequences::packed(stream, &each, &each)?.paged(stream, &blocks)?;
        let padding = std::iter::repeat_n(pool.pad_policy().slot()?, rows);
        let slots = slot_mapping(stream, (pool, &latents.shape()), padding)?;
        let [index_query, index_key] = [zeros(device, [rows, index_heads, 128])?, zeros(device, [rows, 1, 128])?];
        let index_weights = zeros::<W>(device, [rows, index_heads, 1])?.reshape([rows, index_heads])?;
        let [query, query_rope] = [zeros(device, [rows, heads, 512])?, zeros(device, [rows, heads, 64])?];
        let [latent, key_rope] = [zeros(device, [rows, 1, 512])?, zeros(device, [rows, 1, 64])?];
        let no_values = Tensor::empty(device, [rows, 1, 0])?;

        let cache = index_keys.layer(0)?;
        let index_write = WriteViews::of(&index_keys.shape(), cache, rows, [&index_key, &no_values])?;
        let keys = paged(&cache.key, index_keys)?;
        let indexer = LightningIndexer::new(sparse.sparse_count);
        let chooses = indexer.plan(&sequences, (&index_query, &keys, &index_weights))?;
        let chosen: ChosenKeys<T> = chooses.output()?;

        let cache = latents.layer(0)?;
        let write = WriteViews::of(&latents.shape(), cache, rows, [&latent, &key_rope])?;
        let (keys, key_ropes) = latents_and_ropes(latents, 0)?;
        let inputs = ((&query, &query_rope), (&keys, &key_ropes), &chosen.indices);
        let attends = SparseFlashAttention::new(sparse.shape().scale).plan(&sequences, inputs)?;
        Ok(Self {
            latent_write: write.scatter(&latents.shape(), &slots)?,
            index_write: index_write.scatter(&index_keys.shape(), &slots)?,
            attention: attends.output()?,
            sequences,
            slots,
            chooses,
            attends,
            indexer: IndexerKind { heads: index_heads, weights: W::DTYPE },
            index_query,
            index_weights: index_weights.into(),
            index_key,
            no_values,
            chosen,
            query,
            query_rope,
            latent,
            key_rope,
        })
    }

    /// Records an indexer: it writes its keys of the new tokens, then chooses.
    pub(super) fn record_indexer<W: Element>(
        &self,
        sparse: &SparseLatent<T>,
        capture: &Capturing<'_>,
        indexer: usize,
    ) -> Result<()> {
        let (index_keys, new) = (sparse.index_keys(), [&self.index_key, &self.no_values]);
        let cache = index_keys.layer(indexer)?;
        let views = WriteViews::of(&index_keys.shape(), cache, self.slots.len(), new)?;
        views.launch(capture, &self.index_write, &self.slots)?;
        let weights = self.index_weights.clone().typed::<W>()?;
        let inputs = (&self.index_query, &paged(&cache.key, index_keys)?, &weights);
        Ok(self.chooses.launch_into(capture, inputs, &mut self.chosen.clone())?)
    }

    /// Records a layer: it writes its latents and rotary keys of the new tokens, then attends to what was chosen.
    pub(super) fn record_layer(&self, sparse: &SparseLatent<T>, capture: &Capturing<'_>, layer: usize) -> Result<()> {
        let (latents, new) = (sparse.latents(), [&self.latent, &self.key_rope]);
        let cache = latents.layer(layer)?;
        let views = WriteViews::of(&latents.shape(), cache, self.slots.len(), new)?;
        views.launch(capture, &self.latent_write, &self.slots)?;
        let (keys, key_ropes) = latents_and_ropes(latents, layer)?;
        let inputs = ((&self.query, &self.query_rope), (&keys, &key_ropes), &self.chosen.indices);
        Ok(self.attends.launch_into(capture, inputs, &mut self.attention.clone())?)
    }

    /// Puts the lengths, table and slots of a padded step into the buffers.
    pub(super) fn fill(&self, group: &CapturedGroup, stream: &Stream, metadata: &AttentionMetadata) -> Result<()> {
        let (new, keys, blocks) = lengths_and_blocks(metadata);
        self.sequences.overwrite(stream, &new, keys, &blocks)?;
        let slots = scattered_slots(group.pool_and_shape(), metadata.slots().iter().copied())?;
        Ok(self.slots.overwrite(stream, &slots)?)
    }
}
