//! Attention with a cache: what a model's layers call.

use ascend_attention::{Element, Number, Stream};

use crate::backends::{AttentionShape, Backends};
use crate::error::Result;
use crate::kv::{PagedKvCache, Sequence};

use super::range_check::{RangeCheck, RangeChecker, RangeFinding, take_findings};

/// The attention of a model: its heads, a paged cache, and the backends that compute it.
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
    /// Attention of these heads over a cache, computed by these backends.
    pub fn new(shape: AttentionShape, cache: PagedKvCache<T>, backends: Backends<T>) -> Self {
        Self { shape, cache, backends, range_checker: None }
    }

    /// Sets the check of the numbers of the steps that begin from now on, or removes it; steps that are replayed from
    /// graphs have a check of their own
    /// ([`AttentionGraphs::set_range_check`](crate::AttentionGraphs::set_range_check)). Findings of an earlier check
    /// that were not taken are dropped.
    ///
    /// ```
    /// # fn main() -> ascend_serving::Result<()> {
    /// # #[cfg(feature = "emulation")] {
    /// use ascend_attention::{Runtime, f16};
    /// use ascend_serving::kv::{CacheShape, PadPolicy, PagedKvCache, Sequence};
    /// use ascend_serving::{
    ///     Attention, AttentionMetadata, AttentionShape, Backends, BatchRequest, BatchSettings, Causality, LayerTensor,
    ///     RangeCheck,
    /// };
    ///
    /// let stream = Runtime::emulated()?.device(0)?.stream()?;
    /// let shape = CacheShape::new(1, 1, 16);
    /// let cache = PagedKvCache::<f16>::new(stream.device(), 2, 128, shape, PadPolicy::SkipNegative)?;
    /// let mut attention = Attention::new(AttentionShape::new(1, 1, 16), cache, Backends::standard(stream.device()));
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
    /// step.forward(0, (&large, &rows, &rows))?;
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
    /// [`ARGUMENT_VALUE`](crate::rules::ARGUMENT_VALUE) for a limit below 0 or NaN.
    pub fn set_range_check(&mut self, check: impl Into<Option<RangeCheck>>) -> Result<()>
    where
        T: Number,
    {
        self.range_checker = RangeChecker::make(check)?;
        Ok(())
    }

    /// Takes the findings of the range check since the last call, in work that the device has finished: the oldest
    /// 256 at most. A warning (`tracing`) reports each finding, too, when it is found. Without a check there are
    /// none.
    ///
    /// # Errors
    /// [`Acl`](ascend_attention::Error::Acl): a copy, or work before it on the stream, failed.
    pub fn range_findings(&mut self) -> Result<Vec<RangeFinding>> {
        take_findings(&mut self.range_checker, false)
    }

    /// Waits for all layers that are queued, and takes the findings as [`range_findings`](Self::range_findings) does.
    ///
    /// # Errors
    /// As for [`Attention::range_findings`].
    pub fn await_range_findings(&mut self) -> Result<Vec<RangeFinding>> {
        take_findings(&mut self.range_checker, true)
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

    /// The cache, to copy blocks and to grow sequences in ([`Attention::grow`] does so too).
    pub fn cache_mut(&mut self) -> &mut PagedKvCache<T> {
        &mut self.cache
    }

    /// Makes room for `tokens` more tokens of a sequence, and queues the copies of blocks that it shared: steps on
    /// other streams that write such a block, or read the copy, have to wait for this one. Before it reports that
    /// there are no blocks, it waits for blocks that steps in flight may still read.
    ///
    /// # Errors
    /// As for [`PagedKvCache::grow`].
    pub fn grow(&mut self, stream: &Stream, sequence: &mut Sequence, tokens: usize) -> Result<()> {
        self.cache.grow(stream, sequence, tokens).map(drop)
    }
}
