//! Cached latents and rotary keys, copied out of their blocks to rows of 16 bits.

use std::ops::Range;

use ascend_attention::gather::{GatherPaKvCache, GatherPlan, SequenceBlocks};
use ascend_attention::scatter::CacheOrder;
use ascend_attention::{Device, Element, Stream, Tensor, Violation};

use crate::backends::dense_rows::DenseRows;
use crate::backends::{LayerTensors, StepContext, size, tensor_bytes};
use crate::error::{Error, Result};
use crate::kv::{CachedRows, LayerCache, QuantisedLayer, bytes_of};
use crate::rules;

/// How the cached rows of some tokens are copied out of their blocks.
pub(super) struct CachedLatents {
    tokens: usize,
    rows: CopiedRows,
}

/// The copies, by what lies in a block.
enum CopiedRows {
    /// Runs of rows that are contiguous.
    Runs(CachedRows),
    /// A call of GatherPaKvCache, for rows in pieces: an NZ cache.
    Call(Box<GatherPlan>),
}

impl CachedLatents {
    /// Prepares the copies of tokens, each request's by its positions.
    ///
    /// # Errors
    /// [`LATENT_WORKSPACE`](crate::rules::LATENT_WORKSPACE) for an NZ cache and positions that do not begin with a
    /// block; as for [`GatherPaKvCache::plan`].
    pub(super) fn plan<T: Element>(
        step: &StepContext<'_>,
        first: &LayerTensors<'_, T>,
        tokens: impl Iterator<Item = (usize, Range<usize>)> + Clone,
    ) -> Result<Self> {
        let rows = match first.quantised {
            Some(cache) => Self::copied_rows(step, &cache.cache, tokens.clone())?,
            None => Self::copied_rows(step, first.cache, tokens.clone())?,
        };
        Ok(Self { tokens: tokens.map(|(_, positions)| positions.len()).sum(), rows })
    }

    fn copied_rows<E: Element>(
        step: &StepContext<'_>,
        cache: &LayerCache<E>,
        tokens: impl Iterator<Item = (usize, Range<usize>)> + Clone,
    ) -> Result<CopiedRows> {
        let block_size = step.metadata.settings().block_size();
        let Some([key, value]) = in_pieces(cache)? else {
            cache.check_contiguous(block_size)?;
            return Ok(CopiedRows::Runs(step.metadata.cached_rows(tokens)?));
        };
        let (mut rows, mut lengths) = (Vec::new(), Vec::new());
        for (request, positions) in tokens {
            if positions.start.checked_rem(block_size) != Some(0) {
                return Err(not_at_a_block(&positions, block_size).into());
            }
            let blocks = positions.start / block_size..positions.end.div_ceil(block_size);
            let row = step.metadata.table().row(request).unwrap_or_default();
            rows.push(row.get(blocks).unwrap_or_default().to_vec());
            lengths.push(positions.len());
        }
        let sequences = SequenceBlocks::new(step.stream, &rows, &lengths, size(&key, 0), block_size)?;
        let gather = GatherPaKvCache::new().cache_order(CacheOrder::PaNz);
        Ok(CopiedRows::Call(Box::new(gather.plan(&sequences, (&key, &value))?)))
    }

    /// Number of tokens.
    pub(super) fn len(&self) -> usize {
        self.tokens
    }

    /// Bytes of workspace of its call.
    pub(super) fn workspace_bytes(&self) -> usize {
        match &self.rows {
            CopiedRows::Runs(_) => 0,
            CopiedRows::Call(plan) => plan.workspace_bytes(),
        }
    }

    /// Queues the copies of a layer to rows of latents and of rotary keys, one for each token.
    fn copy<E: Element>(&self, stream: &Stream, cache: &LayerCache<E>, rows: [Tensor<E>; 2]) -> Result<()> {
        let [key, value] = rows;
        match (&self.rows, in_pieces(cache)?) {
            (CopiedRows::Call(plan), Some([keys, values])) => {
                Ok(plan.launch_into(stream, (&keys, &values), &mut (key, value))?)
            }
            (CopiedRows::Runs(rows), None) => cache.gather(stream, rows, &key, &value),
            _ => Err(Error::not_as_planned("the cache", cache.key.desc(), "a cache of the planned format")),
        }
    }
}

/// The latents and rotary keys of an NZ cache, `[blocks, D / c, block_size, c]`; `None` for other formats.
fn in_pieces<E: Element>(cache: &LayerCache<E>) -> Result<Option<[Tensor<E>; 2]>> {
    let pieces = |tensor: &Tensor<E>| match *tensor.shape() {
        [blocks, 1, parts, block_size, lanes] => Some(tensor.reshape([blocks, parts, block_size, lanes])),
        _ => None,
    };
    match (pieces(&cache.key), pieces(&cache.value)) {
        (Some(key), Some(value)) => Ok(Some([key?, value?])),
        _ => Ok(None),
    }
}

#[cold]
fn not_at_a_block(positions: &Range<usize>, block_size: usize) -> Violation {
    Violation::new(
        &rules::LATENT_WORKSPACE,
        format_args!("a chunk of an NZ cache that begins at token {}", positions.start),
        format_args!("chunks of whole blocks of {block_size} tokens"),
        "give the backend a workspace for a block of each request",
    )
}

/// Rows of cached tokens in 16 bits, used by one chunk after the other.
pub(super) struct LatentSpace<T: Element> {
    /// Latents, `[tokens, 512]`.
    latent: Tensor<T>,
    /// Rotary keys, `[tokens, 64]`.
    key_rope: Tensor<T>,
    /// Quantised latents, which are dequantised to `latent`.
    dense: Option<DenseRows<T>>,
}

impl<T: Element> LatentSpace<T> {
    /// Memory for up to `tokens` tokens of a layer like this.
    pub(super) fn new(
        device: &Device,
        tokens: usize,
        [latent_dim, rope_dim]: [usize; 2],
        quantised: Option<&QuantisedLayer>,
    ) -> Result<Self> {
        let dense = match quantised {
            None => None,
            Some(cache) => {
                let like = Tensor::empty(device, [0, 1, latent_dim])?;
                let stored = (cache.stored().dtype(), cache.latent_channels());
                Some(DenseRows::plan(device, tokens, &like, stored)?)
            }
        };
        let latent = match &dense {
            Some(dense) => dense.dequantised.narrow(0, 0..tokens)?,
            None => Tensor::empty(device, [tokens, latent_dim])?,
        };
        Ok(Self { latent, key_rope: Tensor::empty(device, [tokens, rope_dim])?, dense })
    }

    /// Bytes of device memory.
    pub(super) fn bytes(&self) -> usize {
        let latents = self.dense.as_ref().map_or(tensor_bytes(&self.latent), DenseRows::bytes);
        latents + tensor_bytes(&self.key_rope)
    }

    /// Bytes of workspace of its calls.
    pub(super) fn workspace_bytes(&self) -> usize {
        self.dense.as_ref().map_or(0, DenseRows::workspace_bytes)
    }

    /// Queues the copies of a layer's cached rows, and returns them: the first ones of this memory.
    pub(super) fn fill(
        &self,
        stream: &Stream,
        cached: &CachedLatents,
        layer: &LayerTensors<'_, T>,
    ) -> Result<[Tensor<T>; 2]> {
        let rows = [&self.latent, &self.key_rope].map(|rows| rows.narrow(0, 0..cached.len()));
        let [latent, key_rope] = rows;
        let (latent, key_rope) = (latent?, key_rope?);
        match (&self.dense, layer.quantised) {
            (None, None) => cached.copy(stream, layer.cache, [latent.clone(), key_rope.clone()])?,
            (Some(dense), Some(cache)) => {
                let quantised = dense.quantised.narrow(0, 0..cached.len())?;
                cached.copy(stream, &cache.cache, [quantised, bytes_of(&key_rope)?])?;
                dense.dequantise(stream, cache.latent_channels())?;
            }
            _ => return Err(Error::not_as_planned("the cache", "one of another type", "a cache of the planned type")),
        }
        Ok([latent, key_rope])
    }
}
