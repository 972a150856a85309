//! RingAttentionUpdate: merges what [`FlashAttention`](crate::flash::FlashAttention) computed over two parts of the
//! keys.
//!
//! A ring of ranks passes keys and values on from rank to rank; each rank attends with its own rows to what arrives,
//! and merges the result with what it has: [`RingUpdate`], planned once and launched for each part as a [`RingPlan`].

mod versions;

pub(crate) use versions::phases_of;

use std::fmt;

use ascend_spec::TensorDesc;
use ascend_spec::ops::flash_attention_score::SoftmaxOrder;
use ascend_spec::ops::ring_attention_update::{Argument, Parameter, RingUpdateCall};

use crate::error::{Error, Result};
use crate::memory::Element;
use crate::operator::{AllowedLints, EntryPoints, PreparedCall, Tensors};
use crate::ops::flash_attention_score::{FlashOutput, InputLayout, Keyless, PlannedOutput, SoftmaxState, StateRows};
use crate::ops::operation::{self, Operation, Sealed};
use crate::runtime::{Queue, Stream};
use crate::tensor::AnyTensor;

use versions::{Starts, choose, merged_keyless};

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
        let parts = Launch::of(previous, current, None);
        let mut call = RingUpdateCall {
            actual_seq_qlen: starts.as_ref().map(|(_, starts)| *starts.desc()),
            input_layout: Some(rows.layout.as_str()),
            input_softmax_layout: match rows.order {
                SoftmaxOrder::SameAsInput => Some(InputLayout::Tnd.as_str()),
                SoftmaxOrder::Batches | SoftmaxOrder::SequenceBlocks => None,
            },
            attn_out: Some(packed(&previous.attention)),
            softmax_max: Some(packed(previous.softmax.max())),
            softmax_sum: Some(packed(previous.softmax.sum())),
            ..RingUpdateCall::default()
        };
        call.describe(&parts);
        let planned = self.prepare(stream, &call, &starts, (previous, current));
        RingPlan::recorded(planned, context, &call, &parts, fixed(&starts))
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
        Ok(RingPlan::new(prepared, operation))
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

/// Describes a contiguous tensor of the same shape.
fn packed(tensor: &AnyTensor) -> TensorDesc {
    let desc = tensor.desc();
    TensorDesc::packed(desc.dtype, desc.shape)
}

/// A merge that was checked and prepared. From [`RingUpdate::plan`].
///
/// A launch reads the pair of the previous part and the current one, and writes their merge. It refuses parts of other
/// orders or ends of sequences than the planned ones, and sequences without keys in a part. The replays of a captured
/// merge write an output of this plan's ([`Plan::output`](operation::Plan::output)): the capture refuses a merged part
/// whose state describes other rows.
pub type RingPlan = operation::Plan<RingOperation>;

/// RingAttentionUpdate, as its [`RingPlan`] knows it.
#[derive(Debug)]
pub struct RingOperation {
    output: PlannedOutput,
    allowed: AllowedLints,
}

/// Attention, maxima and sums.
struct Part<'a>(&'a AnyTensor, &'a SoftmaxState);

/// The tensors of a launch.
struct Launch<'a> {
    previous: Part<'a>,
    current: Part<'a>,
    /// `None` for a merge that is only planned.
    merged: Option<Part<'a>>,
}

impl<'a> Launch<'a> {
    fn of<T: Element>(
        previous: &'a FlashOutput<T>,
        current: &'a FlashOutput<T>,
        merged: Option<&'a FlashOutput<T>>,
    ) -> Self {
        let part = |output: &'a FlashOutput<T>| Part(&output.attention, &output.softmax);
        Self { previous: part(previous), current: part(current), merged: merged.map(part) }
    }
}

impl Tensors<Parameter> for Launch<'_> {
    fn each<'t>(&'t self, mut visit: impl FnMut(Argument, &'t AnyTensor) -> Result<()>) -> Result<()> {
        use Parameter as P;
        let merged = self.merged.as_ref();
        let merged = merged.map(|part| (part, [P::AttnOut, P::SoftmaxMax, P::SoftmaxSum]));
        let parts = [
            (&self.previous, [P::PrevAttnOut, P::PrevSoftmaxMax, P::PrevSoftmaxSum]),
            (&self.current, [P::CurAttnOut, P::CurSoftmaxMax, P::CurSoftmaxSum]),
        ];
        for (Part(attention, softmax), parameters) in merged.into_iter().chain(parts) {
            let tensors = [*attention, softmax.max(), softmax.sum()];
            for (parameter, tensor) in parameters.into_iter().zip(tensors) {
                visit(parameter.into(), tensor)?;
            }
        }
        Ok(())
    }
}

impl Sealed for RingOperation {}

impl Operation for RingOperation {
    type Inputs<'a, T: Element> = (&'a FlashOutput<T>, &'a FlashOutput<T>);
    type Output<T: Element> = FlashOutput<T>;
    type Parameter = Parameter;

    fn output<T: Element>(&self, plan: &RingPlan) -> Result<FlashOutput<T>> {
        self.output.empty(plan.context())
    }

    fn launch<T: Element>(
        &self,
        plan: &RingPlan,
        queue: &impl Queue,
        &(previous, current): &(&FlashOutput<T>, &FlashOutput<T>),
        merged: &mut FlashOutput<T>,
    ) -> Result<()> {
        let keyless = self.keyless(previous, current)?;
        let rows = &self.output.rows;
        merged.softmax.admits(queue, "merged", rows, &keyless)?;
        let launch = Launch::of(previous, current, Some(merged));
        let launched = plan.queue(queue, &launch, || Ok(()))?;
        // Also after a failure: part of the work may have been queued.
        merged.softmax.rewrite(rows, keyless);
        launched
    }

    fn describe(&self, _: &RingPlan, text: &mut fmt::DebugStruct<'_, '_>) {
        text.field("layout", &self.output.rows.layout);
    }
}

impl RingOperation {
    /// The sequences that the merged part has no keys for. Refuses parts of other rows.
    fn keyless<T: Element>(&self, previous: &FlashOutput<T>, current: &FlashOutput<T>) -> Result<Keyless> {
        for (argument, part) in [("previous", previous), ("current", current)] {
            if part.softmax.rows() != &self.output.rows {
                return Err(Error::not_as_planned(argument, part.softmax.rows(), &self.output.rows));
            }
        }
        merged_keyless(&previous.softmax, &current.softmax, &self.allowed)
    }
}
