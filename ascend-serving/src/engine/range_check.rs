//! Looks at the numbers that go through the layers of steps: for the first layer that overflows.

use std::collections::VecDeque;
use std::fmt;
use std::num::NonZeroUsize;
use std::sync::Arc;

use ascend_attention::{Element, HostBuffer, Number, RangeReport, Stream, Tensor, Transfer};

use crate::batch::AttentionMetadata;
use crate::error::{Error, Result};

/// Which steps are looked at, and what is found: NaN, infinities, and numbers beyond a limit.
///
/// What layers bring and what they get is copied to pinned host memory behind their launches and looked at when the device is
/// done. Nothing waits for that, unless the device is 1024 copies behind, four a layer: then a layer waits for the oldest.
/// Padding is left out.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct RangeCheck {
    every: NonZeroUsize,
    limit: f64,
}

impl RangeCheck {
    /// Each step.
    pub fn always() -> Self {
        Self::sampled(NonZeroUsize::MIN)
    }

    /// The next step, and every one that is a multiple of `steps` behind it.
    pub fn sampled(steps: NonZeroUsize) -> Self {
        Self {
            every: steps,
            limit: f64::INFINITY,
        }
    }

    /// Also reports finite numbers that are farther from 0 than `limit`. A limit that is NaN or below 0 is refused when the
    /// check is set.
    #[must_use]
    pub fn limit(mut self, limit: f64) -> Self {
        self.limit = limit;
        self
    }
}

/// Which tensor of a layer: one of its inputs, or its output.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum LayerTensor {
    /// Its queries.
    Query,
    /// Its new keys; of latent attention the latents.
    Key,
    /// Its new values; of latent attention the rotary keys.
    Value,
    /// Its attention.
    Output,
}

impl fmt::Display for LayerTensor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Query => "query",
            Self::Key => "key",
            Self::Value => "value",
            Self::Output => "output",
        })
    }
}

/// A tensor of a layer that holds what it should not.
#[derive(Clone, Copy, Debug, PartialEq)]
#[non_exhaustive]
pub struct RangeFinding {
    /// The step, counted from 0 since the check was set.
    pub step: u64,
    /// The layer, as the cache numbers it; where groups of layers have caches of their own, as the model does.
    pub layer: usize,
    /// Which of its tensors.
    pub tensor: LayerTensor,
    /// The request of the first offender, by its place in the batch.
    pub request: usize,
    /// Which of the request's tokens in this step.
    pub token: usize,
    /// The head.
    pub head: usize,
    /// The element of the head.
    pub element: usize,
    /// The first offender itself.
    pub value: f64,
    /// All numbers of the tensor. [`RangeReport::first`] counts from the first token of the step.
    pub report: RangeReport,
}

impl fmt::Display for RangeFinding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            step,
            layer,
            tensor,
            request,
            token,
            head,
            element,
            value,
            report,
        } = self;
        write!(
            f,
            "step {step}, layer {layer}, {tensor}: {value} at element {element} of head {head} of token {token} of request \
             {request}; {} NaN, {} infinite, {} beyond the limit",
            report.nan, report.inf, report.over
        )
    }
}

/// Findings that are kept until they are taken; the first ones, since they are the cause of the others.
const MOST_FINDINGS: usize = 256;
/// Copies in flight, behind which a layer waits for the oldest.
const MOST_PENDING: usize = 1024;
/// Host buffers that are kept for later layers.
const MOST_SPARE: usize = 16;

/// The check of an [`Attention`](crate::Attention), and what it has found.
pub(crate) struct RangeChecker<T: Element> {
    check: RangeCheck,
    report: fn(&[T], f64) -> RangeReport,
    number: fn(T) -> f64,
    /// Steps that have begun.
    steps: u64,
    /// Of the step in progress, if it is looked at, the rows behind each request.
    rows: Option<Arc<[usize]>>,
    pending: VecDeque<Pending<T>>,
    spare: Vec<HostBuffer<T>>,
    findings: Vec<RangeFinding>,
}

/// A copy that may not be over.
struct Pending<T: Element> {
    copy: Transfer<T>,
    step: u64,
    layer: usize,
    tensor: LayerTensor,
    rows: Arc<[usize]>,
    /// Elements of a row.
    row_size: usize,
    /// Elements of a head.
    head_size: usize,
}

impl<T: Element> fmt::Debug for RangeChecker<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RangeChecker")
            .field("check", &self.check)
            .field("pending", &self.pending.len())
            .field("findings", &self.findings)
            .finish_non_exhaustive()
    }
}

impl<T: Number> RangeChecker<T> {
    pub(crate) fn new(check: RangeCheck) -> Result<Self> {
        if check.limit.is_nan() || check.limit < 0.0 {
            return Err(Error::invalid(
                "RangeCheck.limit",
                check.limit,
                "a number of at least 0; infinity finds NaN and infinities alone",
            ));
        }
        Ok(Self {
            check,
            report: RangeReport::of_elements,
            number: T::to_f64,
            steps: 0,
            rows: None,
            pending: VecDeque::new(),
            spare: Vec::new(),
            findings: Vec::new(),
        })
    }
}

impl<T: Element> RangeChecker<T> {
    /// Counts a step that begins.
    pub(crate) fn begin(&mut self, metadata: &AttentionMetadata) {
        let every = u64::try_from(self.check.every.get()).unwrap_or(u64::MAX);
        let looked_at = self.steps.is_multiple_of(every);
        self.steps = self.steps.saturating_add(1);
        self.rows = looked_at.then(|| {
            let requests = metadata.new_and_cached().take(metadata.requests());
            let ends = requests.scan(0usize, |end, (new, _)| {
                *end = end.saturating_add(new);
                Some(*end)
            });
            ends.collect()
        });
    }

    /// Queues copies of the query, key, value and output of a layer, if the step is looked at, and looks at older copies that are over.
    pub(crate) fn look(
        &mut self,
        stream: &Stream,
        layer: usize,
        tensors: [&Tensor<T>; 4],
    ) -> Result<()> {
        let Some(rows) = self.rows.clone() else {
            return Ok(());
        };
        self.collect(false)?;
        use LayerTensor::{Key, Output, Query, Value};
        for (tensor, of) in [Query, Key, Value, Output].into_iter().zip(tensors) {
            let count = rows.last().copied().unwrap_or(0);
            let count = count.min(of.shape().first().copied().unwrap_or(0));
            let of = of.narrow(0, 0..count)?;
            let of = if of.is_contiguous() {
                of
            } else {
                of.contiguous(stream)?
            };
            if of.is_empty() {
                continue;
            }
            if self.pending.len() >= MOST_PENDING {
                self.collect_one()?;
            }
            let spare = self.spare.iter().position(|host| host.len() == of.len());
            let host = match spare {
                Some(at) => self.spare.remove(at),
                None => stream.device().host_buffer(of.len())?,
            };
            self.pending.push_back(Pending {
                copy: of.download_async(stream, host)?,
                step: self.steps.saturating_sub(1),
                layer,
                tensor,
                rows: Arc::clone(&rows),
                row_size: of.len().checked_div(count).unwrap_or(1).max(1),
                head_size: of.shape().last().copied().unwrap_or(1).max(1),
            });
        }
        Ok(())
    }

    /// Takes what was found; with `wait`, in every copy that is queued.
    pub(crate) fn take(&mut self, wait: bool) -> Result<Vec<RangeFinding>> {
        self.collect(wait)?;
        Ok(std::mem::take(&mut self.findings))
    }

    /// Looks at the copies that are over, or waits for all.
    fn collect(&mut self, wait: bool) -> Result<()> {
        while let Some(oldest) = self.pending.front() {
            if !wait && !oldest.copy.is_complete()? {
                break;
            }
            self.collect_one()?;
        }
        Ok(())
    }

    /// Waits for the oldest copy and looks at it.
    fn collect_one(&mut self) -> Result<()> {
        let Some(oldest) = self.pending.pop_front() else {
            return Ok(());
        };
        let Pending {
            copy,
            step,
            layer,
            tensor,
            rows,
            row_size,
            head_size,
        } = oldest;
        let host = copy.wait()?;
        let report = (self.report)(&host, self.check.limit);
        let offender = report.first.and_then(|at| Some((at, *host.get(at)?)));
        if let Some((at, value)) = offender {
            let row = at.checked_div(row_size).unwrap_or(0);
            let in_row = at.checked_rem(row_size).unwrap_or(0);
            let request = rows.partition_point(|end| *end <= row);
            let before = request.checked_sub(1).and_then(|before| rows.get(before));
            let finding = RangeFinding {
                step,
                layer,
                tensor,
                request,
                token: row.saturating_sub(before.copied().unwrap_or(0)),
                head: in_row.checked_div(head_size).unwrap_or(0),
                element: in_row.checked_rem(head_size).unwrap_or(0),
                value: (self.number)(value),
                report,
            };
            tracing::warn!("{finding}");
            if self.findings.len() < MOST_FINDINGS {
                self.findings.push(finding);
            }
        }
        // Sizes that come no more make room.
        if self.spare.len() >= MOST_SPARE {
            self.spare.remove(0);
        }
        self.spare.push(host);
        Ok(())
    }
}
