//! Checks the numbers in the tensors of steps, to find the first layer that overflows.

use std::borrow::Cow;
use std::collections::VecDeque;
use std::fmt;
use std::num::NonZeroUsize;
use std::sync::{Arc, Mutex};

use ascend_attention::{AnyTensor, Element, HostBuffer, Number, RangeReport, Stream, Tensor, Transfer};

use crate::backends::{LatentForm, LatentTensors, size};
use crate::batch::AttentionMetadata;
use crate::error::{Error, Result};

use super::element_place::{ElementPlace, TokenHeads, TokenOrder, request_ends};

/// Which steps are checked, and for which numbers: NaN, infinities, and numbers beyond a limit.
///
/// The inputs and outputs of layers are copied to pinned host memory after their launches and checked when the device
/// has finished. A layer waits for the oldest copy only where 1024 copies are pending (four a layer, up to seven of
/// latent attention), and for a strided tensor, which is copied through the host. Padding is left out.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct RangeCheck {
    every: NonZeroUsize,
    limit: f64,
}

impl RangeCheck {
    /// Checks every step.
    pub fn always() -> Self {
        Self::sampled(NonZeroUsize::MIN)
    }

    /// Checks the next step, and every `steps`-th one after it. Steps with and without graphs are one series: where
    /// they take turns, an even number checks those of one kind alone.
    pub fn sampled(steps: NonZeroUsize) -> Self {
        Self { every: steps, limit: f64::INFINITY }
    }

    /// Also reports finite numbers that are farther from 0 than `limit`. A limit that is NaN or below 0 is refused
    /// when the check is set.
    #[must_use]
    pub fn limit(mut self, limit: f64) -> Self {
        self.limit = limit;
        self
    }
}

/// Which tensor of a layer: one of its inputs, or its output.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum LayerTensor {
    /// Its queries.
    Query,
    /// The rotary parts of the queries of latent attention. Beside quantised queries, where they are divided by scales
    /// that may be small, [`RangeCheck::limit`] is not applied to them.
    QueryRope,
    /// Its new keys; the latents in latent attention.
    Key,
    /// Its new values; the rotary keys in latent attention.
    Value,
    /// Its attention.
    Output,
}

impl fmt::Display for LayerTensor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Query => "query",
            Self::QueryRope => "query_rope",
            Self::Key => "key",
            Self::Value => "value",
            Self::Output => "output",
        })
    }
}

/// A tensor of a layer with a number that the check reports.
#[derive(Clone, Copy, Debug, PartialEq)]
#[non_exhaustive]
pub struct RangeFinding {
    /// The step, counted from 0 since the check was set, over steps without graphs and with them.
    pub step: u64,
    /// The layer, as the model numbers it.
    pub layer: usize,
    /// The tensor of the layer.
    pub tensor: LayerTensor,
    /// The request of the first offender, by its place in the batch.
    pub request: usize,
    /// The place of the token among the request's tokens in this step.
    pub token: usize,
    /// The head.
    pub head: usize,
    /// The element of the head.
    pub element: usize,
    /// The first offender itself.
    pub value: f64,
    /// The report of all numbers of the tensor without its padding; [`RangeReport::first`] is an index into these
    /// numbers.
    pub report: RangeReport,
}

impl fmt::Display for RangeFinding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { step, layer, tensor, request, token, head, element, value, report } = self;
        write!(
            f,
            "step {step}, layer {layer}, {tensor}: {value} at element {element} of head {head} of token {token} of \
             request {request}; {} NaN, {} infinite, {} beyond the limit",
            report.nan, report.inf, report.over
        )
    }
}

/// Most findings that are kept until they are taken; the first ones, since they are the cause of the others.
const MOST_FINDINGS: usize = 256;
/// Copies in flight after which a layer waits for the oldest.
const MOST_PENDING: usize = 1024;
/// Most host buffers that are kept for later layers.
const MOST_SPARE: usize = 16;

/// The check of an [`Attention`](crate::Attention) and its graphs, and what it has found.
pub(crate) struct RangeChecker<T: Element> {
    check: Arc<RangeCheck>,
    report: fn(&[T], f64) -> RangeReport,
    number: fn(T) -> f64,
    /// Steps that have begun.
    steps: u64,
    pending: VecDeque<Pending<T>>,
    spare: Vec<HostBuffer<T>>,
    findings: Vec<RangeFinding>,
}

/// The checker that an attention shares with its graphs, while a check is set.
pub(crate) type SharedChecker<T> = Arc<Mutex<Option<RangeChecker<T>>>>;

/// A step in progress that is checked.
#[derive(Clone, Debug)]
pub(crate) struct CheckedStep {
    /// The check that it began under: another one that is set meanwhile checks later steps.
    check: Arc<RangeCheck>,
    number: u64,
    /// The end of each request's tokens.
    ends: Arc<[usize]>,
}

/// A tensor of a layer, and the tokens of the step that it holds.
#[derive(Clone, Copy, Debug)]
pub(crate) struct CheckedTensor<'a, T: Element> {
    pub(crate) tensor: LayerTensor,
    pub(crate) elements: &'a Tensor<T>,
    pub(crate) order: TokenOrder,
    /// The index in the step of its first token.
    pub(crate) first_token: usize,
    /// Whether its numbers are compared with the limit.
    is_limited: bool,
}

impl<'a, T: Element> CheckedTensor<'a, T> {
    /// A tensor of all tokens of the step, `[tokens, N, D]`.
    pub(crate) fn packed(tensor: LayerTensor, elements: &'a Tensor<T>) -> Self {
        Self { tensor, elements, order: TokenOrder::TokensFirst, first_token: 0, is_limited: true }
    }
}

/// The inputs of a layer.
pub(crate) fn packed_inputs<'a, T: Element>([query, key, value]: [&'a Tensor<T>; 3]) -> [CheckedTensor<'a, T>; 3] {
    use LayerTensor::{Key, Query, Value};
    [(Query, query), (Key, key), (Value, value)].map(|(tensor, elements)| CheckedTensor::packed(tensor, elements))
}

/// The inputs and the output of a layer.
pub(crate) fn packed_tensors<'a, T: Element>(
    inputs: [&'a Tensor<T>; 3],
    output: &'a Tensor<T>,
) -> [CheckedTensor<'a, T>; 4] {
    let [query, key, value] = packed_inputs(inputs);
    let output = CheckedTensor::packed(LayerTensor::Output, output);
    [query, key, value, output]
}

/// The inputs and the outputs of a layer of latent attention. Absorbed queries and their output hold the first tokens
/// of the step.
pub(crate) fn latent_tensors<'a, T: Element>(
    [query, latent, key_rope]: [&'a Tensor<T>; 3],
    tensors: &LatentTensors<'a, T>,
    output: &'a Tensor<T>,
) -> impl Iterator<Item = CheckedTensor<'a, T>> {
    use LayerTensor::{Key, Output, Query, QueryRope, Value};
    let packed = CheckedTensor::packed;
    let heads_first = |elements| CheckedTensor { order: TokenOrder::HeadsFirst, ..packed(Output, elements) };
    // The bytes of quantised queries are numbers of any size.
    let behind = |absorbed: &AnyTensor, checked| CheckedTensor { first_token: size(absorbed, 0), ..checked };
    let (absorbed, query, decoded, output) = match tensors.form {
        LatentForm::Absorbed => (None, Some(packed(Query, query)), None, heads_first(output)),
        LatentForm::Quantised(_) => (None, None, None, heads_first(output)),
        LatentForm::Plain(_) => (None, Some(packed(Query, query)), None, packed(Output, output)),
        LatentForm::Mixed { absorbed, decoded, .. } => (
            Some(packed(Query, absorbed)),
            Some(behind(absorbed, packed(Query, query))),
            Some(heads_first(decoded)),
            behind(absorbed, packed(Output, output)),
        ),
        LatentForm::QuantisedMixed { absorbed, decoded, .. } => (
            None,
            Some(behind(absorbed.query(), packed(Query, query))),
            Some(heads_first(decoded)),
            behind(absorbed.query(), packed(Output, output)),
        ),
    };
    let is_divided = matches!(tensors.form, LatentForm::Quantised(_) | LatentForm::QuantisedMixed { .. });
    [
        absorbed,
        query,
        Some(CheckedTensor { is_limited: !is_divided, ..packed(QueryRope, tensors.query_rope) }),
        Some(packed(Key, latent)),
        Some(packed(Value, key_rope)),
        decoded,
        Some(output),
    ]
    .into_iter()
    .flatten()
}

/// A copy that may still be running.
struct Pending<T: Element> {
    copy: Transfer<T>,
    step: u64,
    layer: usize,
    tensor: LayerTensor,
    ends: Arc<[usize]>,
    copied_tokens: usize,
    rows: TokenHeads,
    limit: f64,
}

/// The elements of a copy of `copied_tokens` tokens, without those of its padding.
fn without_padding<'a, T: Copy>(copied: &'a [T], copied_tokens: usize, rows: &TokenHeads) -> Cow<'a, [T]> {
    if rows.tokens == copied_tokens {
        return Cow::Borrowed(copied);
    }
    let [kept, all] = [rows.tokens, copied_tokens].map(|tokens| tokens.saturating_mul(rows.head_size));
    let heads = copied.chunks(all.max(1));
    let heads = heads.flat_map(|head| head.get(..kept).unwrap_or(head));
    Cow::Owned(heads.copied().collect())
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
    /// The checker of a check that is set, or none for a check that is removed.
    ///
    /// # Errors
    /// [`ARGUMENT_VALUE`](crate::rules::ARGUMENT_VALUE) for a limit below 0 or NaN.
    pub(crate) fn make(check: impl Into<Option<RangeCheck>>) -> Result<Option<Self>> {
        check.into().map(Self::new).transpose()
    }

    fn new(check: RangeCheck) -> Result<Self> {
        if check.limit.is_nan() || check.limit < 0.0 {
            return Err(Error::invalid(
                "RangeCheck.limit",
                check.limit,
                "a number of at least 0; infinity finds NaN and infinities alone",
            )
            .fix("give infinity to find NaN and infinities alone"));
        }
        Ok(Self {
            check: Arc::new(check),
            report: RangeReport::of_elements,
            number: T::to_f64,
            steps: 0,
            pending: VecDeque::new(),
            spare: Vec::new(),
            findings: Vec::new(),
        })
    }
}

impl<T: Element> RangeChecker<T> {
    /// Counts a step that begins, and says whether it is checked.
    pub(crate) fn begin(&mut self, metadata: &AttentionMetadata) -> Option<CheckedStep> {
        let number = self.steps;
        let every = u64::try_from(self.check.every.get()).unwrap_or(u64::MAX);
        self.steps = self.steps.saturating_add(1);
        let check = Arc::clone(&self.check);
        number.is_multiple_of(every).then(|| CheckedStep { check, number, ends: request_ends(metadata).into() })
    }

    /// Queues copies of the tensors of a layer of a step, and checks older copies that are complete.
    pub(crate) fn check<'t>(
        &mut self,
        stream: &Stream,
        (step, layer): (&CheckedStep, usize),
        tensors: impl IntoIterator<Item = CheckedTensor<'t, T>>,
    ) -> Result<()> {
        let CheckedStep { check, number, ends } = step;
        if !Arc::ptr_eq(check, &self.check) {
            return Ok(());
        }
        self.collect(false)?;
        let of_step = ends.last().copied().unwrap_or(0);
        for checked in tensors {
            let CheckedTensor { tensor, elements, order, first_token, is_limited } = checked;
            let axis_len = |axis: usize| elements.shape().get(axis).copied().unwrap_or(1);
            let (given, heads) = match order {
                TokenOrder::TokensFirst => (axis_len(0), axis_len(1)),
                TokenOrder::HeadsFirst => (axis_len(1), axis_len(0)),
            };
            let tokens = of_step.saturating_sub(first_token).min(given);
            // With heads before tokens the padding is copied, too: the rest alone would be strided.
            let (elements, copied_tokens) = match order {
                TokenOrder::TokensFirst => (elements.narrow(0, 0..tokens)?, tokens),
                TokenOrder::HeadsFirst => (elements.clone(), given),
            };
            if elements.is_empty() || tokens == 0 {
                continue;
            }
            let elements = elements.contiguous(stream)?;
            if self.pending.len() >= MOST_PENDING {
                self.collect_one()?;
            }
            let mut spare = self.spare.iter();
            let host = match spare.position(|host| host.len() == elements.len()) {
                Some(at) => self.spare.remove(at),
                None => stream.device().host_buffer(elements.len())?,
            };
            self.pending.push_back(Pending {
                copy: elements.download_async(stream, host)?,
                step: *number,
                layer,
                tensor,
                ends: Arc::clone(ends),
                copied_tokens,
                rows: TokenHeads { order, first_token, tokens, heads, head_size: axis_len(2) },
                limit: if is_limited { self.check.limit } else { f64::INFINITY },
            });
        }
        Ok(())
    }

    /// Takes the findings; with `wait`, after all queued copies.
    pub(crate) fn take(&mut self, wait: bool) -> Result<Vec<RangeFinding>> {
        self.collect(wait)?;
        Ok(std::mem::take(&mut self.findings))
    }

    /// Checks the copies that are complete, or waits for all.
    fn collect(&mut self, wait: bool) -> Result<()> {
        while let Some(oldest) = self.pending.front() {
            if !wait && !oldest.copy.is_complete()? {
                break;
            }
            self.collect_one()?;
        }
        Ok(())
    }

    /// Waits for the oldest copy and checks it.
    fn collect_one(&mut self) -> Result<()> {
        let Some(oldest) = self.pending.pop_front() else {
            return Ok(());
        };
        let Pending { copy, step, layer, tensor, ends, copied_tokens, rows, limit } = oldest;
        let host = copy.wait()?;
        let elements = without_padding(&host, copied_tokens, &rows);
        let report = (self.report)(&elements, limit);
        let offender = report.first.and_then(|at| Some((at, *elements.get(at)?)));
        if let Some((at, value)) = offender {
            let ElementPlace { request, token, head, element } = rows.place(at, &ends);
            let finding = RangeFinding {
                step,
                layer,
                tensor,
                request,
                token,
                head,
                element,
                value: (self.number)(value),
                report,
            };
            tracing::warn!("{finding}");
            if self.findings.len() < MOST_FINDINGS {
                self.findings.push(finding);
            }
        }
        // The oldest buffer is dropped, so that sizes that are no longer used do not fill the list.
        if self.spare.len() >= MOST_SPARE {
            self.spare.remove(0);
        }
        self.spare.push(host);
        Ok(())
    }
}
