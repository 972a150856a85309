//! The range check of a model's steps.

use ascend_attention::{Element, Number};

use crate::error::Result;
use crate::sharing::lock;

use super::attention::Attention;
use super::range_check::{RangeCheck, RangeChecker, RangeFinding};

impl<T: Element> Attention<T> {
    /// Sets the check of the numbers of the steps that begin from now on, those that are replayed from its graphs among
    /// them, or removes it. Findings of an earlier check that were not taken are dropped.
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
        *lock(&self.range_checker) = RangeChecker::make(check)?;
        Ok(())
    }

    /// Takes the findings of the range check since the last call, in work that the device has finished: the oldest 256
    /// at most, with the layers as the model numbers them. A warning (`tracing`) reports each finding, too, when it is
    /// found. Without a check there are none.
    ///
    /// # Errors
    /// [`Acl`](ascend_attention::Error::Acl): a copy, or work before it on the stream, failed.
    pub fn range_findings(&mut self) -> Result<Vec<RangeFinding>> {
        self.take_findings(false)
    }

    /// Waits for all layers that are queued, and takes the findings as [`range_findings`](Self::range_findings) does.
    ///
    /// # Errors
    /// As for [`Attention::range_findings`].
    pub fn await_range_findings(&mut self) -> Result<Vec<RangeFinding>> {
        self.take_findings(true)
    }

    fn take_findings(&self, wait: bool) -> Result<Vec<RangeFinding>> {
        lock(&self.range_checker).as_mut().map_or(Ok(Vec::new()), |checker| checker.take(wait))
    }
}
