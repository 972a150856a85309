//! Sparse attention over a paged cache of latents, to the keys that an indexer chooses.

use ascend_attention::{Element, Stream};

use crate::backends::AttentionShape;
use crate::error::Result;
use crate::kv::{CacheShape, PagedKvCache, Sequence, move_in_caches};

use super::sparse_inputs::LayerQueries;
use super::two_caches;

/// The sparse attention of DeepSeek V3.2 and GLM-5: multi-head latent attention in which each token reads the
/// `sparse_count` keys that an indexer chooses for it.
///
/// Two caches share a pool: the latents and rotary keys of each layer ([`CacheShape::latent`]), and the keys of each
/// indexer ([`CacheShape::index_keys`]). One [`Sequence`], one growth and one metadata serve both, and so do forks,
/// shared prefixes and [`Sequence::truncate`], such as behind accepted drafts.
///
/// In a step ([`SparseLatent::begin`]) each indexer chooses keys ([`SparseStep::choose`](crate::SparseStep::choose)),
/// and each layer attends to the keys of a choice ([`SparseStep::forward`](crate::SparseStep::forward)): that of its
/// own indexer, or that of an earlier layer of the same step.
///
/// This is no [`AttentionBackend`](crate::AttentionBackend): backends compute the same attention in different ways, and
/// [`Backends`](crate::Backends) tries one after the other. Attention to chosen keys is another result, has more inputs
/// than a [`LayerInputs`](crate::LayerInputs) holds and a second cache, and layers that share what one of them chose.
///
/// Each layer is a call of LightningIndexer, where it has an indexer, and one of SparseFlashAttention, for prompts,
/// chunks of prompts, decodes and drafts alike. Where no request of a step has more than `sparse_count` tokens, every
/// key is chosen, and LightningIndexer is not called. Both operators run on Atlas A2 and A3 with CANN 8.5 or newer, and
/// on Ascend 950 with 9.1 or newer. [`capture`](Self::capture) records steps of some sizes into graphs.
///
/// Either cache may be quantised, or both: [`PagedKvCache::quantised_sparse_latents`], read by
/// KvQuantSparseFlashAttention, and [`PagedKvCache::quantised_index_keys`], read by QuantLightningIndexer. Queries come
/// joined with their rotary parts then, and weights of indexers in FLOAT16: see [`SparseTensors`](crate::SparseTensors)
/// and [`IndexerTensors`](crate::IndexerTensors). The host quantises, so that layers and indexers wait for the stream,
/// and graphs do not serve them.
///
/// ```
/// # fn main() -> ascend_serving::Result<()> {
/// # #[cfg(feature = "emulation")] {
/// use ascend_attention::{Runtime, bf16};
/// use ascend_serving::kv::{CacheShape, PadPolicy, PagedKvCache, Sequence};
/// use ascend_serving::{
///     AttentionMetadata, AttentionShape, BatchRequest, BatchSettings, Causality, IndexerTensors, SparseLatent,
///     SparseTensors,
/// };
///
/// let stream = Runtime::emulated()?.device(0)?.stream()?;
/// let cache = |shape| PagedKvCache::<bf16>::new(stream.device(), 8, 128, shape, PadPolicy::SkipNegative);
/// // Two layers, the first with an indexer of 4 heads; each token reads 16 keys with 2 heads.
/// let latents = cache(CacheShape::latent(2))?;
/// let index_keys = cache(CacheShape::index_keys(1))?.with_pool(latents.pool())?;
/// let mut sparse = SparseLatent::new(AttentionShape::latent(2), latents, index_keys)?.sparse_count(16);
///
/// let mut sequence = Sequence::new(sparse.latents().pool());
/// sparse.grow(&stream, &mut sequence, 40)?;
/// let settings = BatchSettings::of(sparse.latents(), Causality::Causal);
/// let metadata = AttentionMetadata::new(&[BatchRequest::of(&sequence, 40)], settings)?;
/// let rows = |heads: usize, dim: usize| stream.upload(&vec![bf16::ONE; 40 * heads * dim], [40, heads, dim]);
/// let weights = stream.upload(&[bf16::ONE; 40 * 4], [40, 4])?;
///
/// let mut step = sparse.begin(&stream, &metadata)?;
/// let choice = step.choose(0, IndexerTensors { query: &rows(4, 128)?, weights: &weights, key: &rows(1, 128)? })?;
/// for layer in 0..2 {
///     let output = step.forward(layer, SparseTensors {
///         query: &rows(2, 512)?,
///         query_rope: &rows(2, 64)?,
///         latent: &rows(1, 512)?,
///         key_rope: &rows(1, 64)?,
///         choice: &choice,
///     })?;
///     assert_eq!(output.shape(), [40, 2, 512]);
/// }
/// step.end()?;
/// # }
/// # Ok(())
/// # }
/// ```
#[derive(Debug)]
pub struct SparseLatent<T: Element> {
    pub(super) shape: AttentionShape,
    pub(super) latents: PagedKvCache<T>,
    pub(super) index_keys: PagedKvCache<T>,
    pub(super) sparse_count: usize,
}

impl<T: Element> SparseLatent<T> {
    /// The number of keys that a token reads in DeepSeek V3.2 and GLM-5.
    pub const SPARSE_COUNT: usize = 2048;

    /// Sparse attention of these heads over a cache of latents and one of index keys, with
    /// [`SPARSE_COUNT`](Self::SPARSE_COUNT) keys for each token.
    ///
    /// # Errors
    /// [`ARGUMENT_VALUE`](crate::rules::ARGUMENT_VALUE) for caches of other shapes, in other formats, without layers,
    /// and for heads that are not those of [`AttentionShape::latent`];
    /// [`CACHE_QUANTISED`](crate::rules::CACHE_QUANTISED) for caches that are quantised in other ways than
    /// [`PagedKvCache::quantised_sparse_latents`] and [`PagedKvCache::quantised_index_keys`];
    /// [`BLOCK_POOL`](crate::rules::BLOCK_POOL) for caches of two pools,
    /// [`OPTION_SOFT_CAP`](crate::rules::OPTION_SOFT_CAP) for heads with a cap,
    /// [`ARGUMENT_DEVICE`](crate::rules::ARGUMENT_DEVICE) for caches on two devices.
    pub fn new(shape: AttentionShape, latents: PagedKvCache<T>, index_keys: PagedKvCache<T>) -> Result<Self> {
        let sparse = Self { shape, latents, index_keys, sparse_count: Self::SPARSE_COUNT };
        sparse.check()?;
        Ok(sparse)
    }

    /// Refuses caches that the operators cannot read, or that do not go together, such as one that was put in the place
    /// of another. From then on tokens move in both of them alone.
    pub(super) fn check(&self) -> Result<()> {
        let (latents, index_keys) = (&self.latents, &self.index_keys);
        let layers = [latents, index_keys].map(|cache| cache.shape().layers);
        let wanted = [
            ("latents", latents, CacheShape::latent(layers[0])),
            ("index_keys", index_keys, CacheShape::index_keys(layers[1])),
        ];
        for (name, cache, wanted) in wanted {
            two_caches::check_cache(
                name,
                cache,
                wanted,
                "make the latents of the shape `CacheShape::latent`, and the index keys of `CacheShape::index_keys`, \
                 with the number of layers that have each, 1 or more",
            )?;
        }
        self.shape.check_cache(&latents.shape())?;
        self.shape.check_no_soft_cap("SparseFlashAttention", "attend densely by `Attention`")?;
        latents.pool().check_same(
            index_keys.pool(),
            "index keys",
            "give the index keys the pool of the latents, by `PagedKvCache::with_pool` before any sequence grows",
        )?;
        index_keys.check_device("index_keys", latents.device())?;
        latents.entry().pair();
        index_keys.entry().pair();
        Ok(())
    }

    /// The queries of layers: over quantised latents each is followed by its rotary part.
    pub(super) fn layer_queries(&self) -> LayerQueries {
        LayerQueries { heads: self.shape.heads, joined: self.latents.is_quantised() }
    }

    /// Sets how many keys each token reads (`index_topk`). LightningIndexer takes 1 to 2048 and, from CANN 9.0 on,
    /// multiples of 1024 up to 8192; a step refuses others, when it begins or at its first
    /// [`choose`](crate::SparseStep::choose).
    pub fn sparse_count(mut self, keys: usize) -> Self {
        self.sparse_count = keys;
        self
    }

    /// The heads.
    pub fn shape(&self) -> AttentionShape {
        self.shape
    }

    /// The cache of latents and rotary keys.
    pub fn latents(&self) -> &PagedKvCache<T> {
        &self.latents
    }

    /// The cache of the indexers' keys, with a layer for each indexer.
    pub fn index_keys(&self) -> &PagedKvCache<T> {
        &self.index_keys
    }

    /// The cache of latents and rotary keys, to queue copies and writes of your own. What another source has written
    /// ([`PagedKvCache::mark_computed`]) is written to both caches, and what moves is moved in both,
    /// by [`move_tokens`](Self::move_tokens) alone.
    pub fn latents_mut(&mut self) -> &mut PagedKvCache<T> {
        &mut self.latents
    }

    /// The cache of the indexers' keys, to queue copies and writes of your own.
    pub fn index_keys_mut(&mut self) -> &mut PagedKvCache<T> {
        &mut self.index_keys
    }

    /// Makes room for `tokens` more tokens of a sequence in both caches, and queues the copies of blocks that it
    /// shared. Before it reports that there are no blocks, it waits for blocks that steps in flight may still read.
    ///
    /// # Errors
    /// As for [`PagedKvCache::grow`] and [`PagedKvCache::queue_pending_copies`]. The sequence then has as many tokens
    /// as before.
    pub fn grow(&mut self, stream: &Stream, sequence: &mut Sequence, tokens: usize) -> Result<()> {
        two_caches::grow([&mut self.latents, &mut self.index_keys], stream, sequence, tokens)
    }

    /// Queues copies of cached tokens of a sequence to other positions of it, in both caches:
    /// [`PagedKvCache::move_tokens`]. Where a copy fails on the device, the tokens from the first target on do not
    /// count as computed any more in either.
    ///
    /// # Errors
    /// As for [`PagedKvCache::move_tokens`], in either cache: nothing is moved then, but by errors of the device.
    pub fn move_tokens(
        &mut self,
        stream: &Stream,
        sequence: &Sequence,
        moves: impl IntoIterator<Item = (usize, usize)>,
    ) -> Result<()> {
        sequence.check_groups(1)?;
        let caches = [&self.latents, &self.index_keys];
        move_in_caches(stream, sequence, moves, caches.map(|cache| (cache, sequence)))
    }
}
