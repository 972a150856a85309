//! A merge, described step by step.

use ascend_spec::TensorDesc;
use ascend_spec::declared::AnyArguments;
use ascend_spec::ops::flash_attention_score::SoftmaxOrder;
use ascend_spec::ops::ring_attention_update::{Parameter, RingUpdateCall};

use crate::case_file::LiveCall;
use crate::error::{Error, Result};
use crate::memory::Element;
use crate::operator::{AllowedLints, PreparedCall};
use crate::ops::flash_attention_score::{FlashOutput, InputLayout, PlannedOutput, StateRows};
use crate::ops::operation::record_refusal;
use crate::runtime::Stream;
use crate::tensor::{AnyTensor, Tensor};

use super::RingPlan;
use super::plan::{Launch, RingOperation};
use super::versions::merged_keyless;
use super::versions::{Starts, choose};

/// A call of RingAttentionUpdate, which merges attention over two parts of the keys, with the maxima and sums of each
/// part.
///
/// `M = max(m1, m2)`, `S = s1 exp(m1 - M) + s2 exp(m2 - M)`, `O = (o1 s1 exp(m1 - M) + o2 s2 exp(m2 - M)) / S`.
/// Describe it, plan it for outputs of certain shapes, and launch the [`RingPlan`] for each part that arrives. The
/// parts come from [`FlashAttention`](crate::flash::FlashAttention) with the same query, in the layout SBH or TND;
/// packed heads have a multiple of 64 dimensions.
///
/// A row whose keys are all hidden in one part takes what it has in the other. One that sees none in both ends with
/// an infinite sum, and the next merge with NaN: merge first a part in which every row sees a key, such as the rank's
/// own.
///
/// A packed sequence that has no keys at all in a part has maximum and sum 0 there, which the merge takes for a score
/// of 0: where the other part's maximum is far below 0 its row is lost, as NaN. Such parts are refused by the lint
/// `ring.one_empty`, which [`allow_lint`](Self::allow_lint) lets through where maxima are known to be above; without
/// keys in both, by `ring.both_empty`. Marked rows after the last sequence belong to none and cannot be merged.
///
/// Atlas A2, Atlas A3 and Ascend 950, since CANN 8.1; maxima and sums of packed sequences in the query's order
/// ([`softmax_like_query`](crate::flash::FlashAttention::softmax_like_query)) need a newer one.
///
/// Source: aclnnRingAttentionUpdate V1 and V2; the oldest version that can express the call is used.
///
/// ```
/// use ascend_attention::Runtime;
/// use ascend_attention::flash::{FlashAttention, InputLayout};
/// use ascend_attention::ring::RingUpdate;
///
/// # fn main() -> ascend_attention::Result<()> {
/// # #[cfg(feature = "emulation")] {
/// let stream = Runtime::emulated()?.device(0)?.stream()?;
/// let query = stream.upload(&[0f32; 3 * 64], [3, 1, 64])?; // rows, batch, hidden size: all keys weigh alike
/// let near = stream.upload(&[1f32; 4 * 64], [4, 1, 64])?;
/// let far = stream.upload(&[3f32; 4 * 64], [4, 1, 64])?;
/// let plan = FlashAttention::new(InputLayout::Sbh).heads(1).scale(0.125).plan((&query, &near, &near))?;
/// let first = plan.launch(&stream, (&query, &near, &near))?;
/// let second = plan.launch(&stream, (&query, &far, &far))?;
/// let both = RingUpdate::new().plan(&stream, (&first, &second))?.launch(&stream, (&first, &second))?;
/// assert_eq!(both.attention.download(&stream)?, vec![2.0; 3 * 64]);
/// assert_eq!(both.softmax.sum().download(&stream)?[0], 8.0);
/// # }
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug, Default)]
#[must_use = "a description does nothing until planned"]
pub struct RingUpdate {
    allowed: AllowedLints,
}

impl RingUpdate {
    /// A merge.
    pub fn new() -> Self {
        Self::default()
    }

    /// Lets the call through although it breaks a lint that stays within the call's tensors, by the lint's id.
    pub fn allow_lint(mut self, id: &str) -> Self {
        self.allowed.lint(id);
        self
    }

    /// Checks a merge of outputs like these and prepares it. Nothing is merged, and the outputs are not kept; ends of
    /// packed sequences are copied to the device by the stream.
    ///
    /// # Errors
    /// Before any function of the operator is called: [`ARGUMENT_DEVICE`](crate::rules::ARGUMENT_DEVICE) or
    /// [`ARGUMENT_VALUE`](crate::rules::ARGUMENT_VALUE) for parts of other orders or sequences, and of different
    /// devices; [`Error::Violation`], [`UNSUPPORTED`](ascend_spec::UNSUPPORTED), [`Error::UnknownProduct`],
    /// [`Error::OperatorVersion`]; as for [`Stream::upload`]. After that [`Error::Aclnn`], should the operator
    /// refuse the call nevertheless.
    #[doc(alias = "aclnnRingAttentionUpdateGetWorkspaceSize")]
    pub fn plan<T: Element>(
        &self,
        stream: &Stream,
        (previous, current): (&FlashOutput<T>, &FlashOutput<T>),
    ) -> Result<RingPlan> {
        let context = stream.context();
        let rows = previous.softmax.rows();
        if current.softmax.rows() != rows {
            return Err(Error::invalid(
                "current",
                current.softmax.rows(),
                format_args!("those of the previous part: {rows}"),
            )
            .fix("merge parts of the same queries"));
        }
        let starts = starts(stream, rows)?;
        let call = describe(previous, current, rows, starts.as_ref().map(|(_, tensor)| tensor));
        let planned = self.prepare(stream, &call, &starts, (previous, current));
        let parts = Launch::of(previous, current, None);
        record_refusal(planned, || {
            let call = AnyArguments::RingAttentionUpdate(call.to_arguments());
            LiveCall::new(context, &call, 1, &parts, fixed(&starts))
        })
    }

    fn prepare<T: Element>(
        &self,
        stream: &Stream,
        call: &RingUpdateCall<'_>,
        starts: &Starts,
        (previous, current): (&FlashOutput<T>, &FlashOutput<T>),
    ) -> Result<RingPlan> {
        let context = stream.context();
        for (name, part) in [("previous", previous), ("current", current)] {
            for tensor in [&*part.attention, part.softmax.max(), part.softmax.sum()] {
                tensor.on(name, context)?;
            }
        }
        let api = context.runtime().api();
        let version = choose(api, context.target()?, call, &self.allowed, starts)?;
        let keyless = merged_keyless(&previous.softmax, &current.softmax, &self.allowed)?;
        let stand_in = &previous.attention;
        let operation = RingOperation {
            output: PlannedOutput {
                attention: packed(&previous.attention),
                softmax: packed(previous.softmax.max()),
                rows: previous.softmax.rows().clone(),
                keyless,
            },
            allowed: self.allowed.clone(),
        };
        let prepared = PreparedCall::standing_in(context, call, version, false, stand_in, &fixed(starts))?;
        let recorded = AnyArguments::RingAttentionUpdate(call.to_arguments());
        Ok(RingPlan::new(prepared, operation).recorded_as(recorded, version.number()))
    }
}

/// The tensors that stay the same for all launches.
fn fixed(starts: &Starts) -> Vec<(Parameter, &AnyTensor)> {
    let starts = starts.iter();
    starts.map(|(_, tensor)| (Parameter::ActualSeqQlen, &**tensor)).collect()
}

fn starts(stream: &Stream, rows: &StateRows) -> Result<Starts> {
    let Some(ends) = &rows.ends else {
        return Ok(None);
    };
    let starts: Vec<i64> = std::iter::once(0).chain(ends.iter().copied()).collect();
    let tensor = stream.upload(&starts, [starts.len()])?;
    tensor.freeze();
    Ok(Some((starts, tensor)))
}

fn describe<T: Element>(
    previous: &FlashOutput<T>,
    current: &FlashOutput<T>,
    rows: &StateRows,
    starts: Option<&Tensor<i64>>,
) -> RingUpdateCall<'static> {
    let desc = |tensor: &AnyTensor| Some(*tensor.desc());
    let new = |tensor: &AnyTensor| Some(packed(tensor));
    RingUpdateCall {
        prev_attn_out: desc(&previous.attention),
        prev_softmax_max: desc(previous.softmax.max()),
        prev_softmax_sum: desc(previous.softmax.sum()),
        cur_attn_out: desc(&current.attention),
        cur_softmax_max: desc(current.softmax.max()),
        cur_softmax_sum: desc(current.softmax.sum()),
        actual_seq_qlen: starts.map(|starts| *starts.desc()),
        input_layout: Some(rows.layout.as_str()),
        input_softmax_layout: match rows.order {
            SoftmaxOrder::SameAsInput => Some(InputLayout::Tnd.as_str()),
            SoftmaxOrder::Batches | SoftmaxOrder::SequenceBlocks => None,
        },
        attn_out: new(&previous.attention),
        softmax_max: new(previous.softmax.max()),
        softmax_sum: new(previous.softmax.sum()),
    }
}

/// Describes a contiguous tensor of the same shape.
fn packed(tensor: &AnyTensor) -> TensorDesc {
    let desc = tensor.desc();
    TensorDesc::packed(desc.dtype, desc.shape)
}
