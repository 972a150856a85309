//! The calls of a step of sparse attention, over caches of the query's type and over quantised ones.

use ascend_attention::indexer::{IndexerPlan, LightningIndexer};
use ascend_attention::quant_indexer::{QuantIndexerPlan, QuantLightningIndexer};
use ascend_attention::quant_sparse_flash::{KvQuantSparseFlashAttention, QuantSparseFlashPlan};
use ascend_attention::sparse::SparseSequences;
use ascend_attention::sparse_flash::{SparseAttention, SparseFlashAttention, SparseFlashPlan};
use ascend_attention::spec::ops::kv_quant_sparse_flash_attention::QuantSparseFlashCall;
use ascend_attention::spec::ops::sparse_flash_attention::SparseFlashCall;
use ascend_attention::{Element, Stream, Tensor, f16};

use crate::backends::size;
use crate::error::Result;
use crate::kv::{PagedKvCache, quantise_index_queries};

use super::sparse_inputs::{IndexerTensors, SparseTensors};

/// The call by which layers attend, over one kind of cache of latents.
#[derive(Debug)]
#[allow(clippy::large_enum_variant, reason = "a step has one")]
pub(super) enum AttendCall {
    /// Also what such a call writes of maxima and sums, which is nothing.
    Plain(SparseFlashPlan, Tensor<f32>),
    Quantised(QuantSparseFlashPlan),
}

impl AttendCall {
    /// Plans attention of a layer to the keys of a choice.
    pub(super) fn plan<T: Element>(
        scale: f64,
        sequences: &SparseSequences,
        latents: &PagedKvCache<T>,
        layer: usize,
        tensors: SparseTensors<'_, T>,
    ) -> Result<Self> {
        let SparseTensors { query, query_rope, choice, .. } = tensors;
        let keys_per_index = choice.keys_per_index();
        if latents.is_quantised() {
            let rows = paged(&latents.quantised_layer(layer)?.cache.key, latents)?;
            let call = KvQuantSparseFlashAttention::new(scale).sparse_block_size(keys_per_index);
            return Ok(Self::Quantised(call.plan(sequences, (query, &rows, choice.indices()))?));
        }
        let (keys, key_ropes) = latents_and_ropes(latents, layer)?;
        let call = SparseFlashAttention::new(scale).sparse_block_size(keys_per_index);
        let inputs = ((query, query_rope), (&keys, &key_ropes), choice.indices());
        Ok(Self::Plain(call.plan(sequences, inputs)?, Tensor::empty(latents.device(), [0])?))
    }

    /// Queues the attention of a layer.
    pub(super) fn launch_into<T: Element>(
        &self,
        stream: &Stream,
        latents: &PagedKvCache<T>,
        layer: usize,
        tensors: SparseTensors<'_, T>,
        output: &mut Tensor<T>,
    ) -> Result<()> {
        let SparseTensors { query, query_rope, choice, .. } = tensors;
        match self {
            Self::Plain(plan, none) => {
                let (keys, key_ropes) = latents_and_ropes(latents, layer)?;
                let inputs = ((query, query_rope), (&keys, &key_ropes), choice.indices());
                let mut attention = SparseAttention::from((output.clone(), none.clone(), none.clone()));
                Ok(plan.launch_into(stream, inputs, &mut attention)?)
            }
            Self::Quantised(plan) => {
                let rows = paged(&latents.quantised_layer(layer)?.cache.key, latents)?;
                Ok(plan.launch_into(stream, (query, &rows, choice.indices()), output)?)
            }
        }
    }

    /// Refuses heads with which no call attends to this cache.
    pub(super) fn check_heads<T: Element>(latents: &PagedKvCache<T>, heads: usize) -> Result<()> {
        let (target, heads) = (latents.device().target()?, i64::try_from(heads).unwrap_or(i64::MAX));
        let verdict = match latents.is_quantised() {
            true => QuantSparseFlashCall::check_heads(target, heads),
            false => SparseFlashCall::check_heads(target, heads),
        };
        Ok(verdict?)
    }

    /// The most keys that an index may name in attention to this cache.
    pub(super) fn most_keys_per_index<T: Element>(latents: &PagedKvCache<T>) -> Result<usize> {
        let (target, block_size) = (latents.device().target()?, latents.pool().block_size());
        Ok(match latents.is_quantised() {
            true => QuantSparseFlashCall::largest_sparse_block_size(target, block_size),
            false => SparseFlashCall::largest_sparse_block_size(target, block_size),
        })
    }
}

/// The call by which indexers choose, over one kind of cache of index keys.
#[derive(Debug)]
pub(super) enum IndexCall {
    Plain(IndexerPlan),
    Quantised(QuantIndexerPlan),
}

impl IndexCall {
    /// Plans the choice of `count` keys by an indexer.
    pub(super) fn plan<T: Element, W: Element>(
        count: usize,
        sequences: &SparseSequences,
        index_keys: &PagedKvCache<T>,
        indexer: usize,
        tensors: IndexerTensors<'_, T, W>,
    ) -> Result<Self> {
        let IndexerTensors { query, weights, .. } = tensors;
        if index_keys.is_quantised() {
            let device = index_keys.device();
            let quantised = Tensor::<i8>::empty(device, query.shape())?;
            let scales = Tensor::<f16>::empty(device, [size(query, 0), size(query, 1)])?;
            let (keys, key_scales) = keys_and_scales(index_keys, indexer)?;
            let inputs = ((&quantised, &scales), (&keys, &key_scales), weights);
            return Ok(Self::Quantised(QuantLightningIndexer::new(count).plan(sequences, inputs)?));
        }
        let keys = paged(&index_keys.layer(indexer)?.key, index_keys)?;
        Ok(Self::Plain(LightningIndexer::new(count).plan(sequences, (query, &keys, weights))?))
    }

    /// Prepares the launch of an indexer, whose first `rows` rows are those of requests. Over a quantised cache it
    /// waits for the queries, and quantises them.
    pub(super) fn prepare<'a, T: Element, W: Element>(
        &'a self,
        stream: &Stream,
        index_keys: &PagedKvCache<T>,
        indexer: usize,
        IndexerTensors { query, weights, .. }: IndexerTensors<'a, T, W>,
        rows: usize,
    ) -> Result<IndexLaunch<'a, T, W>> {
        Ok(match self {
            Self::Plain(plan) => {
                let keys = paged(&index_keys.layer(indexer)?.key, index_keys)?;
                IndexLaunch::Plain { plan, query, keys, weights }
            }
            Self::Quantised(plan) => {
                let query = quantise_index_queries(stream, query, rows)?;
                IndexLaunch::Quantised { plan, query, keys: keys_and_scales(index_keys, indexer)?, weights }
            }
        })
    }
}

/// A launch of an indexer, with all that it reads.
#[allow(clippy::large_enum_variant, reason = "an indexer has one, and launches it at once")]
pub(super) enum IndexLaunch<'a, T: Element, W: Element> {
    Plain {
        plan: &'a IndexerPlan,
        query: &'a Tensor<T>,
        keys: Tensor<T>,
        weights: &'a Tensor<W>,
    },
    Quantised {
        plan: &'a QuantIndexerPlan,
        query: (Tensor<i8>, Tensor<f16>),
        keys: (Tensor<i8>, Tensor<f16>),
        weights: &'a Tensor<W>,
    },
}

impl<T: Element, W: Element> IndexLaunch<'_, T, W> {
    /// Queues the launch, with the indices that it writes.
    pub(super) fn queue(&self, stream: &Stream) -> Result<Tensor<i32>> {
        match self {
            Self::Plain { plan, query, keys, weights } => Ok(plan.launch(stream, (*query, keys, *weights))?.indices),
            Self::Quantised { plan, query: (query, scales), keys: (keys, key_scales), weights } => {
                Ok(plan.launch(stream, ((query, scales), (keys, key_scales), *weights))?)
            }
        }
    }
}

/// Latents and rotary keys of a layer, as SparseFlashAttention reads them.
pub(super) fn latents_and_ropes<T: Element>(latents: &PagedKvCache<T>, layer: usize) -> Result<(Tensor<T>, Tensor<T>)> {
    let cache = latents.layer(layer)?;
    Ok((paged(&cache.key, latents)?, paged(&cache.value, latents)?))
}

/// Quantised keys of an indexer and their scales, as QuantLightningIndexer reads them.
fn keys_and_scales<T: Element>(index_keys: &PagedKvCache<T>, indexer: usize) -> Result<(Tensor<i8>, Tensor<f16>)> {
    let layer = index_keys.quantised_layer(indexer)?;
    Ok((paged(&layer.cache.key, index_keys)?, layer.index_scales()?.clone()))
}

/// A layer of a cache, whose tokens have one head, as the operators read it: `[blocks, block size, 1, D]`.
pub(super) fn paged<E: Element, T: Element>(tensor: &Tensor<E>, cache: &PagedKvCache<T>) -> Result<Tensor<E>> {
    let (blocks, block_size) = (cache.pool().blocks(), cache.pool().block_size());
    Ok(tensor.reshape([blocks, block_size, 1, size(tensor, 2)])?)
}
