//! IncreFlashAttention: attention of one query row a sequence, the decoding of the Atlas inference series (310P).
//!
//! [`IncreFlashAttention`] describes a call, which is planned once and launched per layer as an [`IncrePlan`]. What a
//! call reads is given as the [`Inputs`](crate::attention::Inputs) of FusedInferAttention; it takes fewer kinds of
//! them.

pub use super::inference_attention::{InferenceAttention, InferenceOperation, InferencePlan};

use ascend_spec::incre_flash_attention_arguments;
use ascend_spec::ops::incre_flash_attention::{IncreCall, Parameter, Version};

use crate::error::Result;
use crate::mask::Mask;
use crate::operator::{entry_points, phase_one};
use crate::ops::attention_settings::Numbers;
use crate::ops::inference_attention::{Described, InferenceCall, InferenceOperator, InferenceParameter};
use crate::tensor::AnyTensor;

/// A call that was checked and prepared. From [`IncreFlashAttention::plan`].
pub type IncrePlan = InferencePlan<Parameter>;

/// A call of IncreFlashAttention, `softmax(scale * Q K^T) V` with one query row a sequence, over a cache that may be
/// paged.
///
/// It is the fused attention of the Atlas inference series (310P), which has no
/// [`FusedInferAttention`](crate::FusedInferAttention), and runs on Atlas A2 and A3 too. Unlike that, it has no sparse
/// modes, rotary parts, shared prefix, log-sum-exp and separate scales of key and value. It takes the layouts BSH, BSND
/// and BNSD. What is not set has the operator's default, except [`inner_precise`](IncreFlashAttention::inner_precise),
/// which is high precision, and [`scale`](IncreFlashAttention::scale), which has to be set.
///
/// Source: aclnnIncreFlashAttentionV4, since CANN 8.1. Ascend 950 refuses it.
///
/// ```
/// use ascend_attention::attention::{BlockTable, Inputs};
/// use ascend_attention::incre::IncreFlashAttention;
/// use ascend_attention::{Layout, Runtime, f16};
///
/// # fn main() -> ascend_attention::Result<()> {
/// # #[cfg(feature = "emulation")] {
/// let stream = Runtime::emulated()?.device(0)?.stream()?;
/// let cache = stream.upload(&vec![f16::ONE; 6 * 16 * 128], [6, 16, 128])?; // 6 blocks of 16 tokens
/// let query = stream.upload(&vec![f16::ONE; 2 * 128], [2, 1, 128])?;
///
/// // Sequence 0 has 20 keys, in the blocks 4 and 1; sequence 1 has 7, in block 3.
/// let table = BlockTable::from_rows(&stream, &[vec![4, 1], vec![3]], 16)?;
/// let inputs = Inputs::new(&query, &cache, &cache).paged(&table);
/// let plan = IncreFlashAttention::new(Layout::Bsh)
///     .scale(1.0 / 128f64.sqrt())
///     .actual_seq_lengths_kv([20, 7])
///     .plan(inputs)?;
/// let attention = plan.launch(&stream, inputs)?;
/// assert_eq!(attention.download(&stream)?, vec![f16::ONE; 2 * 128]);
/// # }
/// # Ok(())
/// # }
/// ```
pub type IncreFlashAttention = InferenceAttention<Parameter>;

impl IncreFlashAttention {
    /// The keys that the row of each sequence does not see, where the tensor is 1 (`attenMask`): BOOL, INT8 or UINT8
    /// `[B, Skv]`, `[B, 1, Skv]` or `[B, 1, 1, Skv]`. The tensor stays the same for all launches of a plan. Unset: it
    /// sees all.
    pub fn mask(mut self, hidden: impl Into<AnyTensor>) -> Self {
        self.mask = Mask::all_mask(hidden);
        self
    }
}

entry_points! {
    incre_flash_attention_arguments, IncreCall<'_>, AnyArguments::IncreFlashAttention;
    Version::V1 => 1: aclnnIncreFlashAttentionGetWorkspaceSize, aclnnIncreFlashAttention;
    Version::V2 => 2: aclnnIncreFlashAttentionV2GetWorkspaceSize, aclnnIncreFlashAttentionV2;
    Version::V3 => 3: aclnnIncreFlashAttentionV3GetWorkspaceSize, aclnnIncreFlashAttentionV3;
    Version::V4 => 4: aclnnIncreFlashAttentionV4GetWorkspaceSize, aclnnIncreFlashAttentionV4;
}

impl InferenceCall for IncreCall<'_> {
    /// The others are deprecated, and V1 and V2 compute without a position bias.
    const VERSION: Version = Version::V4;
}

impl InferenceParameter for Parameter {
    type Call<'a> = IncreCall<'a>;
    const OPERATOR: &'static str = "IncreFlashAttention";
    const QUERY: Self = Parameter::Query;
    const ATTEN_MASK: Self = Parameter::AttenMask;
    const ATTENTION_OUT: Self = Parameter::AttentionOut;
}

impl InferenceOperator for Parameter {
    fn plan(attention: &IncreFlashAttention, described: &Described<'_, Self>) -> Result<IncrePlan> {
        let IncreFlashAttention { settings, mask, allowed, .. } = attention;
        let (key, value) = (described.list(Parameter::Key), described.list(Parameter::Value));
        let Numbers { num_heads, num_key_value_heads, scale, inner_precise } = settings.numbers()?;
        let mut call = IncreCall {
            key: &key,
            value: &value,
            atten_mask: mask.tensor().map(|mask| *mask.desc()),
            actual_seq_lengths: settings.keys()?,
            num_heads,
            num_key_value_heads,
            scale,
            inner_precise,
            block_size: described.features.block_size(),
            ..IncreCall::new(settings.layout.as_str())
        };
        for &(argument, desc) in &described.tensors {
            if let Some(given) = call.single_mut(argument.parameter) {
                *given = Some(desc);
            }
        }
        call.attention_out = Some(described.output_of(&call.as_fused()));
        InferencePlan::checked(&call, described, mask.tensor(), settings, allowed)
    }
}
