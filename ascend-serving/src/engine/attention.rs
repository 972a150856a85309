//! Attention with a cache: what a model's layers call.

use ascend_attention::{Element, Number, Stream};

use crate::backends::{AttentionShape, Backends};
use crate::batch::AttentionMetadata;
use crate::error::Result;
use crate::kv::{PagedKvCache, Sequence};

use super::attention_options::AttentionOptions;
use super::range_check::{RangeCheck, RangeChecker, RangeFinding};

/// The attention of a model: heads, a paged cache, and the ways to compute.
///
/// Each step begins with its [`AttentionMetadata`](crate::AttentionMetadata), and each layer of the step calls
/// [`Step::forward`](crate::Step::forward).
#[derive(Debug)]
pub struct Attention<T: Element> {
    pub(super) shape: AttentionShape,
    pub(super) cache: PagedKvCache<T>,
    pub(super) backends: Backends<T>,
    pub(super) range_checker: Option<RangeChecker<T>>,
}

impl<T: Element> Attention<T> {
    /// Attention of these heads over a cache.
    pub fn new(shape: AttentionShape, cache: PagedKvCache<T>, backends: Backends<T>) -> Self {
        Self {
            shape,
            cache,
            backends,
            range_checker: None,
        }
    }

    /// The same, where the model asks for nothing that no operator computes.
    ///
    /// # Errors
    /// As for [`AttentionOptions::check`].
    pub fn with_options(self, options: &AttentionOptions) -> Result<Self> {
        options.check()?;
        Ok(self)
    }

    /// Looks at the numbers of the steps that begin from now on, or at none; steps that are replayed from graphs have a check of
    /// their own ([`AttentionGraphs::set_range_check`](crate::AttentionGraphs::set_range_check)). What an earlier check has found and nobody has
    /// taken is dropped.
    ///
    /// ```
    /// # fn main() -> ascend_serving::Result<()> {
    /// # #[cfg(feature = "emulation")] {
    /// use ascend_attention::{Runtime, f16};
    /// use ascend_serving::kv::{CacheShape, PadPolicy, PagedKvCache, Sequence};
    /// use ascend_serving::{
    ///     Attention, AttentionMetadata, AttentionShape, Backends, BatchRequest, BatchSettings, Causality, Fused, LayerTensor,
    ///     RangeCheck,
    /// };
    ///
    /// let stream = Runtime::emulated()?.device(0)?.stream()?;
    /// let shape = CacheShape::new(1, 1, 16);
    /// let cache = PagedKvCache::<f16>::new(stream.device(), 2, 128, shape, PadPolicy::SkipNegative)?;
    /// let mut attention = Attention::new(AttentionShape::new(1, 1, 16), cache, Backends::none().with(Fused));
    /// attention.set_range_check(RangeCheck::always().limit(1e4))?;
    ///
    /// let mut sequence = Sequence::new(attention.cache().pool());
    /// attention.grow(&stream, &mut sequence, 3)?;
    /// let settings = BatchSettings::of(attention.cache(), Causality::Causal);
    /// let metadata = AttentionMetadata::new(&[BatchRequest::of(&sequence, 3)], settings)?;
    /// let rows = stream.upload(&[f16::ONE; 48], [3, 1, 16])?;
    /// let mut large = vec![f16::ONE; 48];
    /// large[2 * 16 + 5] = f16::from_f32(2e4);
    /// let large = stream.upload(&large, [3, 1, 16])?;
    /// let mut step = attention.begin(&stream, &metadata)?;
    /// step.forward(0, &large, &rows, &rows)?;
    /// drop(step);
    ///
    /// let found = attention.await_range_findings()?;
    /// assert_eq!((found.len(), found[0].tensor), (1, LayerTensor::Query));
    /// assert_eq!((found[0].token, found[0].element), (2, 5));
    /// # }
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// [`InvalidArgument`](ascend_attention::Error::InvalidArgument) for a limit below 0 or NaN.
    pub fn set_range_check(&mut self, check: impl Into<Option<RangeCheck>>) -> Result<()>
    where
        T: Number,
    {
        self.range_checker = check.into().map(RangeChecker::new).transpose()?;
        Ok(())
    }

    /// What the range check has found since this was last asked, in what the device is done with: the oldest 256 at most. Each
    /// is told by a warning (`tracing`), too, when it is found. Nothing without a check.
    ///
    /// # Errors
    /// [`Acl`](ascend_attention::Error::Acl): a copy, or work before it on the stream, failed.
    pub fn range_findings(&mut self) -> Result<Vec<RangeFinding>> {
        let checker = self.range_checker.as_mut();
        checker.map_or(Ok(Vec::new()), |checker| checker.take(false))
    }

    /// The same, and waits for all layers that are queued.
    ///
    /// # Errors
    /// As for [`Attention::range_findings`].
    pub fn await_range_findings(&mut self) -> Result<Vec<RangeFinding>> {
        let checker = self.range_checker.as_mut();
        checker.map_or(Ok(Vec::new()), |checker| checker.take(true))
    }

    /// The heads.
    pub fn shape(&self) -> AttentionShape {
        self.shape
    }

    /// The cache.
    pub fn cache(&self) -> &PagedKvCache<T> {
        &self.cache
    }

    /// The backends, in the order in which they are tried.
    pub fn backends(&self) -> &Backends<T> {
        &self.backends
    }

    /// The cache, to grow sequences in ([`Attention::grow`] does so too) and copy blocks.
    pub fn cache_mut(&mut self) -> &mut PagedKvCache<T> {
        &mut self.cache
    }

    /// Queues the copies that blocks of a step still wait for in this cache, where other caches share its pool. Steps of
    /// [`Attention::begin`] do this themselves; [`AttentionGraphs::begin`](crate::AttentionGraphs::begin) has no cache to do it
    /// in.
    ///
    /// # Errors
    /// As for [`Attention::begin`], of sequences and blocks; [`Acl`](ascend_attention::Error::Acl).
    pub fn queue_pending_copies(
        &mut self,
        stream: &Stream,
        metadata: &AttentionMetadata,
    ) -> Result<()> {
        self.cache.admits(stream)?;
        metadata.goes_with(self.cache.pool())?;
        let _lease = self.cache.pool().begin_step(stream);
        metadata.check_blocks_held(self.cache.pool())?;
        // This cache has what is copied.
        let _progress = metadata.begin_progress(self.cache.entry())?;
        self.cache
            .queue_pending_copies(stream, metadata.sequence_blocks())
    }

    /// Makes room for `tokens` more tokens of a sequence, and queues the copies of blocks that it shared: steps on other streams
    /// that write such a block, or read the copy, have to wait for this one. Waits for blocks that steps in flight may still
    /// read, before it says that there are none.
    ///
    /// # Errors
    /// As for [`PagedKvCache::grow`].
    pub fn grow(&mut self, stream: &Stream, sequence: &mut Sequence, tokens: usize) -> Result<()> {
        self.cache.grow(stream, sequence, tokens).map(drop)
    }
}
