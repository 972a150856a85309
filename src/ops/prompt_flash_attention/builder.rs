//! A call for several query rows, described step by step.

use ascend_spec::Layout;
use ascend_spec::ops::prompt_flash_attention::{Parameter, PromptCall};

use crate::error::Result;
use crate::mask::Mask;
use crate::memory::Element;
use crate::operator::AllowedLints;
use crate::ops::attention_settings::{Numbers, Settings, setters};
use crate::ops::fused_infer_attention_score::{CallTensors, Inputs};
use crate::ops::inference_attention::{Described, InferencePlan, no_such_input};

/// A call that was checked and prepared. From [`PromptFlashAttention::plan`].
pub type PromptPlan = InferencePlan<Parameter>;

/// A call of PromptFlashAttention, `softmax(scale * Q K^T) V` over the keys that a [`Mask`] shows, several query rows a
/// sequence.
///
/// It is the fused attention of the Atlas inference series (310P), which has no
/// [`FusedInferAttention`](crate::FusedInferAttention), and runs on Atlas A2 and A3 too. Unlike that, it has no paged
/// cache, no tensor lists, no rotary parts, no shared prefix, no left padding and no log-sum-exp. It takes FLOAT16,
/// on Atlas A2 and A3 BF16, or INT8; the layouts BSH, BSND, BNSD, BNSD_BSND and TND; sparse modes 0 to 4. What is not
/// set has the operator's default, except [`inner_precise`](Self::inner_precise), which is high precision, and
/// [`scale`](Self::scale), which has to be set.
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
#[derive(Clone, Debug)]
#[must_use = "a description does nothing until planned"]
pub struct PromptFlashAttention {
    settings: Settings,
    mask: Mask,
    allowed: AllowedLints,
}

impl PromptFlashAttention {
    /// A call with tensors of these axis orders (`inputLayout`).
    pub fn new(layout: Layout) -> Self {
        Self {
            settings: Settings::new(layout),
            mask: Mask::none(),
            allowed: AllowedLints::default(),
        }
    }

    setters!();

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

    /// Lengths of the keys (`actualSeqLengthsKv`), in the form of [`actual_seq_lengths`](Self::actual_seq_lengths).
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
    /// A tuple of query, key and value does, and [`Inputs`] for calls with a position bias or a
    /// [`Quantisation`](crate::attention::Quantisation) of `Output` or `Int8`. Each launch then provides tensors of
    /// the same kinds, shapes and element types.
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
    #[doc(alias = "aclnnPromptFlashAttentionV3GetWorkspaceSize")]
    pub fn plan<'a, T: Element>(&self, inputs: impl Into<Inputs<'a, T>>) -> Result<PromptPlan> {
        self.prepare(inputs.into().tensors())
    }

    fn prepare(&self, tensors: CallTensors<'_>) -> Result<PromptPlan> {
        let described = Described::new(tensors)?;
        let Numbers {
            num_heads,
            num_key_value_heads,
            scale,
            inner_precise,
        } = self.settings.numbers()?;
        let mut call = PromptCall {
            atten_mask: self.mask.tensor().map(|mask| *mask.desc()),
            actual_seq_lengths: self.settings.queries()?,
            actual_seq_lengths_kv: self.settings.keys()?,
            num_heads,
            num_key_value_heads,
            scale,
            inner_precise,
            sparse_mode: self.mask.sparse_mode().acl(),
            pre_tokens: self.mask.pre_tokens(),
            next_tokens: self.mask.next_tokens(),
            ..PromptCall::new(self.settings.layout.as_str())
        };
        for &(argument, desc) in &described.tensors {
            match call.single_mut(argument.parameter) {
                Some(given) if argument.index == 0 => *given = Some(desc),
                _ => return Err(no_such_input::<Parameter>(argument.name())),
            }
        }
        call.attention_out = Some(described.output_of(&call.as_fused()));
        let mask = self.mask.tensor();
        InferencePlan::new(&call, &described, mask, &self.settings, &self.allowed)
    }
}
