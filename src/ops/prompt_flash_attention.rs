//! PromptFlashAttention: attention of several query rows a sequence, the prefill of the Atlas inference series (310P).
//!
//! [`PromptFlashAttention`] describes a call, which is planned once and launched per layer as a [`PromptPlan`]. What
//! a call reads is given as the [`Inputs`](crate::attention::Inputs) of FusedInferAttention; it takes fewer kinds of
//! them.

pub use super::inference_attention::{InferenceAttention, InferenceOperation, InferencePlan};

use ascend_spec::ops::prompt_flash_attention::{Parameter, PromptCall, Version};
use ascend_spec::prompt_flash_attention_arguments;

use crate::error::Result;
use crate::mask::Mask;
use crate::operator::{entry_points, phase_one};
use crate::ops::attention_settings::Numbers;
use crate::ops::inference_attention::{Described, InferenceCall, InferenceOperator, InferenceParameter, no_such_input};

/// A call that was checked and prepared. From [`PromptFlashAttention::plan`].
pub type PromptPlan = InferencePlan<Parameter>;

/// A call of PromptFlashAttention, `softmax(scale * Q K^T) V` over the keys that a [`Mask`] shows, several query rows a
/// sequence.
///
/// It is the fused attention of the Atlas inference series (310P), which has no
/// [`FusedInferAttention`](crate::FusedInferAttention), and runs on Atlas A2 and A3 too. Unlike that, it has no paged
/// cache, no tensor lists, no rotary parts, no shared prefix, no left padding and no log-sum-exp. It takes FLOAT16, on
/// Atlas A2 and A3 BF16, or INT8; the layouts BSH, BSND, BNSD, BNSD_BSND and TND; sparse modes 0 to 4. What is not set
/// has the operator's default, except [`inner_precise`](PromptFlashAttention::inner_precise), which is high precision,
/// and [`scale`](PromptFlashAttention::scale), which has to be set.
///
/// Source: aclnnPromptFlashAttentionV3, since CANN 8.1. Ascend 950 refuses it.
///
/// ```
/// use ascend_attention::prompt::PromptFlashAttention;
/// use ascend_attention::{CausalOrigin, Layout, Runtime, f16};
///
/// # fn main() -> ascend_attention::Result<()> {
/// # #[cfg(feature = "emulation")] {
/// let device = Runtime::emulated()?.device(0)?;
/// let stream = device.stream()?;
/// let x = stream.upload(&vec![f16::ONE; 2 * 8 * 64], [1, 2, 8, 64])?; // batch, heads, rows, head dimension
/// let plan = PromptFlashAttention::new(Layout::Bnsd)
///     .heads(2)
///     .scale(0.125)
///     .mask(device.masks().causal(CausalOrigin::LeftUp)?)
///     .plan((&x, &x, &x))?;
/// let attention = plan.launch(&stream, (&x, &x, &x))?;
/// assert_eq!(attention.download(&stream)?, vec![f16::ONE; 2 * 8 * 64]);
/// # }
/// # Ok(())
/// # }
/// ```
pub type PromptFlashAttention = InferenceAttention<Parameter>;

impl PromptFlashAttention {
    /// Which keys a query sees. The tensor of the mask stays the same for all launches of a plan. **Unset: all.**
    pub fn mask(mut self, mask: Mask) -> Self {
        self.mask = mask;
        self
    }

    /// Lengths of the queries (`actualSeqLengths`): the valid rows of each sequence, or one number for all; with TND
    /// where the rows of each end, cumulative.
    pub fn actual_seq_lengths(mut self, lengths: impl Into<Vec<usize>>) -> Self {
        self.settings.give_queries(lengths.into());
        self
    }
}

entry_points! {
    prompt_flash_attention_arguments, PromptCall<'_>, AnyArguments::PromptFlashAttention;
    Version::V1 => 1: aclnnPromptFlashAttentionGetWorkspaceSize, aclnnPromptFlashAttention;
    Version::V2 => 2: aclnnPromptFlashAttentionV2GetWorkspaceSize, aclnnPromptFlashAttentionV2;
    Version::V3 => 3: aclnnPromptFlashAttentionV3GetWorkspaceSize, aclnnPromptFlashAttentionV3;
}

impl InferenceCall for PromptCall<'_> {
    /// V1 and V2 are deprecated, and compute without a position bias.
    const VERSION: Version = Version::V3;
}

impl InferenceParameter for Parameter {
    type Call<'a> = PromptCall<'a>;
    const OPERATOR: &'static str = "PromptFlashAttention";
    const QUERY: Self = Parameter::Query;
    const ATTEN_MASK: Self = Parameter::AttenMask;
    const ATTENTION_OUT: Self = Parameter::AttentionOut;
}

impl InferenceOperator for Parameter {
    fn plan(attention: &PromptFlashAttention, described: &Described<'_, Self>) -> Result<PromptPlan> {
        let PromptFlashAttention { settings, mask, allowed, .. } = attention;
        let Numbers { num_heads, num_key_value_heads, scale, inner_precise } = settings.numbers()?;
        let mut call = PromptCall {
            atten_mask: mask.tensor().map(|mask| *mask.desc()),
            actual_seq_lengths: settings.queries()?,
            actual_seq_lengths_kv: settings.keys()?,
            num_heads,
            num_key_value_heads,
            scale,
            inner_precise,
            sparse_mode: mask.sparse_mode().acl(),
            pre_tokens: mask.pre_tokens(),
            next_tokens: mask.next_tokens(),
            ..PromptCall::new(settings.layout.as_str())
        };
        for &(argument, desc) in &described.tensors {
            match call.single_mut(argument.parameter) {
                Some(given) if argument.index == 0 => *given = Some(desc),
                _ => return Err(no_such_input::<Parameter>(argument.name())),
            }
        }
        call.attention_out = Some(described.output_of(&call.as_fused()));
        InferencePlan::checked(&call, described, mask.tensor(), settings, allowed)
    }
}
