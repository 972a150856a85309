//! A call, described step by step.

use std::sync::Arc;

use ascend_spec::ops::flash_attention_score::{FlashAttentionCall, InputLayout, Parameter, SoftmaxOrder, Work};
use ascend_spec::{DType, Dims, TensorDesc};

use crate::error::Result;
use crate::memory::Element;
use crate::operator::{AllowedLints, EntryPoints, Lengths, PreparedCall, Tensors, heads};
use crate::ops::operation::{no_elements, no_scale};
use crate::tensor::AnyTensor;

use super::inputs::FlashTensors;
use super::plan::FlashOperation;
use super::softmax_state::PlannedOutput;
use super::softmax_state::{StateRows, keyless};
use super::{FlashInputs, FlashMask, FlashPlan, versions};

/// The value of `innerPrecise` that has rows without visible keys corrected.
const CORRECTED: i64 = 2;

/// A call of FlashAttentionScore, forward: `dropout(softmax(scale * Q K^T)) V` over the keys that a [`FlashMask`]
/// shows, and the maximum and sum of each row.
///
/// Describe it once, [`plan`](Self::plan) it for tensors of certain shapes, and launch the [`FlashPlan`] with as many
/// tensors of these shapes as there are layers. What is not set has the operator's default, except
/// [`scale`](Self::scale), which has to be set. Query, key and value are FLOAT16, BF16 or FLOAT32, all the same, with
/// head dimensions up to 768; the value's may be smaller. The number of key heads is that of the key tensor; it
/// divides the number of query heads.
///
/// Atlas A2, Atlas A3 and Ascend 950, since CANN 8.1.
///
/// Source: aclnnFlashAttentionScore V1 to V4 and, for packed sequences ([`InputLayout::Tnd`]),
/// aclnnFlashAttentionVarLenScore V1 to V5; the oldest version that can express the call is used.
///
/// ```
/// use ascend_attention::flash::{FlashAttention, FlashMask, InputLayout};
/// use ascend_attention::{CausalOrigin, Error, Runtime};
///
/// # fn main() -> ascend_attention::Result<()> {
/// # #[cfg(feature = "emulation")] {
/// let device = Runtime::emulated()?.device(0)?;
/// let stream = device.stream()?;
/// let rows = stream.upload(&[1f32; 2 * 5 * 64], [1, 2, 5, 64])?; // batch, heads, rows, head dimension
/// let call = FlashAttention::new(InputLayout::Bnsd).heads(2).scale(0.125);
///
/// // Masks for inference are INT8 on this product, which this operator does not take.
/// let inference = device.masks().causal(CausalOrigin::LeftUp)?;
/// let refused = call.clone().mask(inference).plan((&rows, &rows, &rows));
/// assert!(matches!(refused, Err(Error::Violation(_))));
///
/// let causal = FlashMask::causal(&device.masks(), CausalOrigin::LeftUp)?;
/// let plan = call.mask(causal).plan((&rows, &rows, &rows))?;
/// let output = plan.launch(&stream, (&rows, &rows, &rows))?;
/// assert_eq!(output.attention.download(&stream)?, vec![1.0; 2 * 5 * 64]);
/// assert!((output.softmax.max().download(&stream)?[0] - 8.0).abs() < 1e-5); // 64 times 0.125
/// assert_eq!(output.softmax.sum().download(&stream)?[8], 2.0); // the second row sees two keys
/// # }
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug)]
#[must_use = "a description does nothing until planned"]
pub struct FlashAttention {
    layout: InputLayout,
    num_heads: Option<usize>,
    scale: Option<f64>,
    mask: FlashMask,
    actual_seq_lengths: Option<Lengths>,
    actual_seq_lengths_kv: Option<Lengths>,
    zeroes_masked_rows: bool,
    like_query: bool,
    allowed: AllowedLints,
}

impl FlashAttention {
    /// A call with tensors of these axis orders (`inputLayout`).
    pub fn new(layout: InputLayout) -> Self {
        Self {
            layout,
            num_heads: None,
            scale: None,
            mask: FlashMask::none(),
            actual_seq_lengths: None,
            actual_seq_lengths_kv: None,
            zeroes_masked_rows: false,
            like_query: false,
            allowed: AllowedLints::default(),
        }
    }

    /// Number of query heads (`headNum`). Unset: 1.
    pub fn heads(mut self, num_heads: usize) -> Self {
        self.num_heads = Some(num_heads);
        self
    }

    /// Factor of the scores, usually `1 / sqrt(D)` (`scaleValue`). It has no default: a call without one is refused.
    pub fn scale(mut self, scale: f64) -> Self {
        self.scale = Some(scale);
        self
    }

    /// Which keys a row sees. The tensor of the mask stays the same for all launches of a plan. **Unset: all.**
    pub fn mask(mut self, mask: impl Into<FlashMask>) -> Self {
        self.mask = mask.into();
        self
    }

    /// Where the query rows of each packed sequence end, cumulative (`actualSeqQLen`): `[3, 8]` for 3 rows and 5.
    /// Where query and key both have rows after the last sequence, both lists end with a 0: those rows of the outputs
    /// become 0.
    pub fn actual_seq_lengths(mut self, ends: impl Into<Vec<usize>>) -> Self {
        self.actual_seq_lengths = Some(Lengths::new("actual_seq_lengths", ends.into()));
        self
    }

    /// Where the keys of each packed sequence end, cumulative (`actualSeqKvLen`).
    pub fn actual_seq_lengths_kv(mut self, ends: impl Into<Vec<usize>>) -> Self {
        self.actual_seq_lengths_kv = Some(Lengths::new("actual_seq_lengths_kv", ends.into()));
        self
    }

    /// Fully masked rows, which see no key, come out as 0 (`innerPrecise` 2). Unset: as the operator finds by itself,
    /// else as the mean of the values.
    pub fn zero_masked_rows(mut self) -> Self {
        self.zeroes_masked_rows = true;
        self
    }

    /// Gives maxima and sums of packed sequences the order of the query, `[T, N, 8]` ([`SoftmaxOrder::SameAsInput`],
    /// `softmaxOutLayout`). Unset: a block `[N, Sq, 8]` for each sequence, one after the other.
    ///
    /// Since V4 of the operator for packed sequences, after CANN 8.1.
    pub fn softmax_like_query(mut self) -> Self {
        self.like_query = true;
        self
    }

    /// Lets the call through although it breaks a lint, by the lint's id: the operator takes the call and ignores or
    /// misreads something. Lints that [overrun](ascend_spec::Rule::overruns) memory are not among them: planning then
    /// is an [`ARGUMENT_VALUE`](crate::rules::ARGUMENT_VALUE) that names
    /// [`allow_overrun`](Self::allow_overrun).
    pub fn allow_lint(mut self, id: &str) -> Self {
        self.allowed.lint(id);
        self
    }

    /// As [`allow_lint`](Self::allow_lint), but for any lint, also one that overruns memory, such as
    /// `flash.drop_mask_short`.
    ///
    /// # Safety
    /// All that the operator reads and writes in launches of the call is in memory that the call's tensors are views
    /// of, and nothing else uses the part that it writes. [`Rule::reach`](ascend_spec::Rule::reach) describes where
    /// the lint leads.
    pub unsafe fn allow_overrun(mut self, id: &str) -> Self {
        // SAFETY: handed on to the caller.
        unsafe { self.allowed.overrun(id) };
        self
    }

    /// Checks the call against every rule of the operator and prepares it for tensors of these shapes. Nothing is
    /// launched, and the tensors are not kept.
    ///
    /// A tuple of query, key and value does, and [`FlashInputs`] for calls that read more. Each launch then provides
    /// tensors of the same kinds, shapes and element types.
    ///
    /// # Errors
    /// Before any function of the operator is called: [`Error::Violation`](crate::Error::Violation) for a broken rule
    /// or lint, [`UNSUPPORTED`](ascend_spec::UNSUPPORTED),
    /// [`Error::UnknownProduct`](crate::Error::UnknownProduct),
    /// [`Error::OperatorVersion`](crate::Error::OperatorVersion),
    /// [`ARGUMENT_VALUE`](crate::rules::ARGUMENT_VALUE) without a scale or without elements, and for tensors
    /// of different devices, [`LENGTHS_OVERFLOW`](crate::rules::LENGTHS_OVERFLOW) for lengths beyond
    /// INT64. After that [`Error::Aclnn`](crate::Error::Aclnn), should the operator refuse the call nevertheless.
    #[doc(alias = "aclnnFlashAttentionScoreGetWorkspaceSize")]
    #[doc(alias = "aclnnFlashAttentionVarLenScoreGetWorkspaceSize")]
    pub fn plan<'a, T: Element>(&self, inputs: impl Into<FlashInputs<'a, T>>) -> Result<FlashPlan> {
        self.plan_tensors(&inputs.into().tensors())
    }

    fn plan_tensors(&self, inputs: &FlashTensors<'_>) -> Result<FlashPlan> {
        let query = inputs.query();
        let context = query.memory().context();
        inputs.each(|argument, tensor| tensor.on(argument.name(), context))?;
        if let Some(mask) = self.mask.tensor() {
            mask.on(Parameter::AttenMask.name(), context)?;
        }
        let features = inputs.features();
        let mut call = FlashAttentionCall::new(self.layout.as_str());
        call.describe(inputs);
        features.describe(&mut call);
        self.mask.describe(&mut call)?;
        call.num_heads = heads("num_heads", self.num_heads)?.unwrap_or(call.num_heads);
        call.scale = self.scale.unwrap_or(call.scale);
        call.actual_seq_lengths = Lengths::given(&self.actual_seq_lengths)?;
        call.actual_seq_lengths_kv = Lengths::given(&self.actual_seq_lengths_kv)?;
        call.inner_precise = if self.zeroes_masked_rows { CORRECTED } else { 0 };
        call.softmax_out_layout = self.like_query.then_some(FlashAttentionCall::SAME_AS_INPUT);
        // A placeholder: the contract refuses inputs that imply no outputs.
        let (attention, softmax) =
            call.implied_outputs().unwrap_or((*query.desc(), TensorDesc::packed(DType::Float, Dims::of([0]))));
        call.attention_out = Some(attention);
        (call.softmax_max, call.softmax_sum) = (Some(softmax), Some(softmax));
        let reserved = TensorDesc::packed(query.dtype(), Dims::of([0]));
        call.softmax_out = Some(reserved);
        let planned = self.prepare(&call, inputs, [attention, softmax, reserved]);
        let mask = self.mask.tensor().map(|mask| (Parameter::AttenMask, mask));
        FlashPlan::recorded(planned, context, &call, inputs, mask)
    }

    fn prepare(
        &self,
        call: &FlashAttentionCall<'_>,
        inputs: &FlashTensors<'_>,
        [attention, softmax, reserved]: [TensorDesc; 3],
    ) -> Result<FlashPlan> {
        let query = inputs.query();
        let context = query.memory().context();
        let api = context.runtime().api();
        let (version, problem) = versions::choose(api, context.target()?, call, &self.allowed)?;
        if self.scale.is_none() {
            return Err(no_scale(problem.head_dim));
        }
        if problem.work == Work::Nothing {
            return Err(no_elements(query));
        }
        let features = inputs.features().of_scores(&problem)?;
        let rows = StateRows {
            layout: self.layout,
            order: match (self.layout.is_packed(), self.like_query) {
                (false, _) => SoftmaxOrder::Batches,
                (true, false) => SoftmaxOrder::SequenceBlocks,
                (true, true) => SoftmaxOrder::SameAsInput,
            },
            ends: call.actual_seq_lengths.map(Arc::from),
        };
        let ends = call.actual_seq_lengths.zip(call.actual_seq_lengths_kv);
        let keyless = ends.and_then(|(rows, keys)| keyless(rows, keys));
        let reserved = AnyTensor::empty(context, reserved)?;
        let mut fixed = vec![(Parameter::SoftmaxOut, &reserved)];
        fixed.extend(self.mask.tensor().map(|mask| (Parameter::AttenMask, mask)));
        let output = PlannedOutput { attention, softmax, rows, keyless };
        let operation = FlashOperation { features, output, allowed: self.allowed.clone() };
        let prepared = PreparedCall::standing_in(context, call, version, false, query, &fixed)?;
        Ok(FlashPlan::new(prepared, operation))
    }
}
