//! A call for one query row a sequence, described step by step.

use ascend_spec::Layout;
use ascend_spec::ops::incre_flash_attention::{IncreCall, Parameter};

use crate::error::Result;
use crate::memory::Element;
use crate::operator::AllowedLints;
use crate::ops::attention_settings::{Numbers, Settings, setters};
use crate::ops::fused_infer_attention_score::{CallTensors, Inputs};
use crate::ops::inference_attention::{Described, InferencePlan};
use crate::tensor::AnyTensor;

/// A call that was checked and prepared. From [`IncreFlashAttention::plan`].
pub type IncrePlan = InferencePlan<Parameter>;

/// A call of IncreFlashAttention, `softmax(scale * Q K^T) V` with one query row a sequence, over a cache that may be
/// paged.
///
/// It is the fused attention of the Atlas inference series (310P), which has no
/// [`FusedInferAttention`](crate::FusedInferAttention), and runs on Atlas A2 and A3 too. Unlike that, it has no
/// sparse modes, rotary parts, shared prefix, log-sum-exp and separate scales of key and value. It takes the layouts
/// BSH, BSND and BNSD. What is not set has the operator's default, except [`inner_precise`](Self::inner_precise),
/// which is high precision, and [`scale`](Self::scale), which has to be set.
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
#[derive(Clone, Debug)]
#[must_use = "a description does nothing until planned"]
pub struct IncreFlashAttention {
    settings: Settings,
    mask: Option<AnyTensor>,
    allowed: AllowedLints,
}

impl IncreFlashAttention {
    /// A call with tensors of these axis orders (`inputLayout`).
    pub fn new(layout: Layout) -> Self {
        Self {
            settings: Settings::new(layout),
            mask: None,
            allowed: AllowedLints::default(),
        }
    }

    setters!();

    /// The keys that the row of each sequence does not see, where the tensor is 1 (`attenMask`): BOOL, INT8 or UINT8
    /// `[B, Skv]`, `[B, 1, Skv]` or `[B, 1, 1, Skv]`. The tensor stays the same for all launches of a plan. Unset: it
    /// sees all.
    pub fn mask(mut self, hidden: impl Into<AnyTensor>) -> Self {
        self.mask = Some(hidden.into());
        self
    }

    /// Lengths of the keys (the operator's `actualSeqLengths`): the number of valid keys of each sequence, or one
    /// number for all. A paged cache needs them.
    pub fn actual_seq_lengths_kv(mut self, lengths: impl Into<Vec<usize>>) -> Self {
        self.settings.give_keys(lengths.into());
        self
    }

    /// Lets the call through although it breaks a lint that stays within the call's tensors, by the lint's id.
    pub fn allow_lint(mut self, id: &str) -> Self {
        self.allowed.lint(id);
        self
    }

    /// Checks the call against every rule of the operator and prepares it for tensors of these shapes. Nothing is
    /// launched, and the tensors are not kept.
    ///
    /// A tuple of query, key and value does, and [`Inputs`] for calls over a paged cache, with a key and value for
    /// each sequence, a position bias, left padding of the keys, or a
    /// [`Quantisation`](crate::attention::Quantisation) of `Output`, `Int8` or `KeyValue` by merged scales a channel
    /// or a tensor. Each launch then provides tensors of the same kinds, shapes and element types.
    ///
    /// # Errors
    /// Before any function of the operator is called: [`Error::Violation`](crate::Error::Violation) for a broken rule
    /// or lint, [`UNSUPPORTED`](ascend_spec::UNSUPPORTED),
    /// [`Error::UnknownProduct`](crate::Error::UnknownProduct),
    /// [`Error::MissingOperator`](crate::Error::MissingOperator),
    /// [`ARGUMENT_VALUE`](crate::rules::ARGUMENT_VALUE) without a scale or without elements, for tensors of
    /// different devices and for other kinds of inputs,
    /// [`LENGTHS_OVERFLOW`](crate::rules::LENGTHS_OVERFLOW) for lengths beyond INT64. After that
    /// [`Error::Aclnn`](crate::Error::Aclnn), should the operator refuse the call nevertheless.
    #[doc(alias = "aclnnIncreFlashAttentionV4GetWorkspaceSize")]
    pub fn plan<'a, T: Element>(&self, inputs: impl Into<Inputs<'a, T>>) -> Result<IncrePlan> {
        self.prepare(inputs.into().tensors())
    }

    fn prepare(&self, tensors: CallTensors<'_>) -> Result<IncrePlan> {
        let described = Described::new(tensors)?;
        let (key, value) = (
            described.list(Parameter::Key),
            described.list(Parameter::Value),
        );
        let Numbers {
            num_heads,
            num_key_value_heads,
            scale,
            inner_precise,
        } = self.settings.numbers()?;
        let mut call = IncreCall {
            key: &key,
            value: &value,
            atten_mask: self.mask.as_ref().map(|mask| *mask.desc()),
            actual_seq_lengths: self.settings.keys()?,
            num_heads,
            num_key_value_heads,
            scale,
            inner_precise,
            block_size: described.features.block_size(),
            ..IncreCall::new(self.settings.layout.as_str())
        };
        for &(argument, desc) in &described.tensors {
            if let Some(given) = call.single_mut(argument.parameter) {
                *given = Some(desc);
            }
        }
        call.attention_out = Some(described.output_of(&call.as_fused()));
        let mask = self.mask.as_ref();
        InferencePlan::new(&call, &described, mask, &self.settings, &self.allowed)
    }
}
