//! A call, described step by step.

use ascend_spec::ops::fused_infer_attention_score::{FiaCall, Parameter};
use ascend_spec::{Cann, DType, Layout, TensorDesc};
use smallvec::SmallVec;

use crate::error::{Error, Result};
use crate::mask::Mask;
use crate::memory::Element;
use crate::operator::EntryPoints;
use crate::ops::attention_settings::{Numbers, Settings, setters};

use super::contents::Reading;
use super::inputs::{Bindings, Inputs};
use super::plan::{Plan, imply_outputs, refused};
use super::soft_cap::CallCap;
use super::versions::Allowed;
use super::{unset, versions};

/// A call of FusedInferAttentionScore, `softmax(scale * Q K^T) V` over the keys that a [`Mask`] shows.
///
/// Describe it once, [`plan`](Self::plan) it for tensors of certain shapes, and launch the [`Plan`] with as many
/// tensors of these shapes as there are layers. What is not set has the operator's default, except
/// [`inner_precise`](Self::inner_precise), which is high precision, and [`scale`](Self::scale), which has to be set.
///
/// Source: aclnnFusedInferAttentionScore V1 to V5; the oldest version that can express the call and is not
/// deprecated is used.
#[derive(Clone, Debug)]
#[must_use = "a description does nothing until planned"]
pub struct FusedInferAttention {
    settings: Settings,
    mask: Mask,
    softmax_lse: bool,
    out_dtype: Option<DType>,
    allowed: Allowed,
    soft_cap: CallCap,
}

impl FusedInferAttention {
    /// A call with tensors of these axis orders (`inputLayout`).
    pub fn new(layout: Layout) -> Self {
        let defaults = FiaCall::new(layout.as_str());
        Self {
            settings: Settings::new(layout),
            mask: Mask::none(),
            softmax_lse: defaults.softmax_lse_flag,
            out_dtype: None,
            allowed: Allowed::default(),
            soft_cap: CallCap::default(),
        }
    }

    setters!();

    /// Which keys a query sees (`sparseMode`, `attenMask`, `preTokens`, `nextTokens`). The tensor of the mask stays
    /// the same for all launches of a plan.
    ///
    /// **Unset: all, also those of later tokens**, as for encoders and for decoding a single token. The prefill of a
    /// language model needs [`Masks::causal`](crate::mask::Masks::causal): without it the operator computes other
    /// numbers, and no rule is broken. [`Mask::none`] states that every key is meant.
    pub fn mask(mut self, mask: Mask) -> Self {
        self.mask = mask;
        self
    }

    /// Lengths of the queries (`actualSeqLengths`). In batched layouts the number of valid query rows of each
    /// sequence, or one number for all; unset, all rows; the rows after them are not computed. In packed layouts
    /// (TND, NTD) where the rows of each sequence end, cumulative: `[3, 8]` for 3 rows and 5.
    /// [`CallLengths`](super::CallLengths) applies both lists in the form that a call needs. A length beyond INT64 is
    /// refused when the call is planned.
    pub fn actual_seq_lengths(mut self, lengths: impl Into<Vec<usize>>) -> Self {
        self.settings.give_queries(lengths.into());
        self
    }

    /// Lengths of the keys (`actualSeqLengthsKv`). In batched layouts, and over a paged cache in all of them, the
    /// number of valid keys of each sequence, or one number for all; unset, all rows. In packed layouts without a
    /// paged cache where the keys of each sequence end, cumulative. [`CallLengths`](super::CallLengths) tells them
    /// apart by type.
    pub fn actual_seq_lengths_kv(mut self, lengths: impl Into<Vec<usize>>) -> Self {
        self.settings.give_keys(lengths.into());
        self
    }

    /// Whether the log-sum-exp of each row's scores is computed too (`softmaxLseFlag`). Unset: no.
    pub fn softmax_lse(mut self, computed: bool) -> Self {
        self.softmax_lse = computed;
        self
    }

    /// Element type of the output. Unset: INT8 where the call quantises its output, else the query's, or that of the
    /// rotary parts where the query is quantised. Ascend 950 also writes FLOAT8_E4M3FN and HIFLOAT8, and BF16 where a
    /// quantised query has no rotary part.
    pub fn out_dtype(mut self, dtype: DType) -> Self {
        self.out_dtype = Some(dtype);
        self
    }

    /// **Computed by the emulation alone**: no operator of an NPU caps scores, and on any other platform than
    /// [`Platform::Emulated`](crate::Platform::Emulated) planning is an
    /// [`EMULATED_ONLY`](crate::rules::EMULATED_ONLY). Each scaled score becomes `cap * tanh(score / cap)` before
    /// position bias, mask and softmax, as in Gemma 2 (`attn_logit_softcapping`, 50) and Grok (30), so that what a
    /// model with caps does around its attention can be tested without an NPU. A sink is no score and stays as it is.
    ///
    /// Launches of such a plan are not recorded in case files, which hold calls of the operator.
    ///
    /// ```
    /// # #[cfg(feature = "emulation")]
    /// # fn main() -> ascend_attention::Result<()> {
    /// use ascend_attention::{FusedInferAttention, Layout, Runtime, f16};
    ///
    /// let stream = Runtime::emulated()?.device(0)?.stream()?;
    /// let query = stream.upload(&[f16::ONE; 64], [1, 1, 1, 64])?;
    /// let key = stream.upload(&[[f16::ONE; 64], [f16::ZERO; 64]].concat(), [1, 1, 2, 64])?;
    /// // Scores of 64 and 0: the first key has nearly all the weight, and less with a cap of 1.
    /// let call = FusedInferAttention::new(Layout::Bnsd).heads(1).scale(1.0);
    /// let first = |call: FusedInferAttention| {
    ///     let plan = call.plan((&query, &key, &key))?;
    ///     plan.launch(&stream, (&query, &key, &key))?.attention.download(&stream)
    /// };
    /// assert_eq!(first(call.clone())?[0], f16::ONE);
    /// let weight = 1f64.exp() / (1f64.exp() + 1.0);
    /// assert!((first(call.emulated_only_soft_cap(1.0))?[0].to_f64() - weight).abs() < 1e-3);
    /// # Ok(())
    /// # }
    /// # #[cfg(not(feature = "emulation"))]
    /// # fn main() {}
    /// ```
    #[doc(alias = "logits_soft_cap")]
    #[doc(alias = "attn_logit_softcapping")]
    pub fn emulated_only_soft_cap(mut self, cap: f64) -> Self {
        self.soft_cap = CallCap(Some(cap));
        self
    }

    /// Lets the call through although it breaks a lint, by the lint's id: the operator takes the call and ignores or
    /// misreads something. Lints that [overrun](ascend_spec::Rule::overruns) memory are not among them: planning then
    /// is an [`ARGUMENT_VALUE`](crate::rules::ARGUMENT_VALUE) that names [`allow_overrun`](Self::allow_overrun).
    pub fn allow_lint(mut self, id: &str) -> Self {
        self.allowed.lint(id);
        self
    }

    /// As [`allow_lint`](Self::allow_lint), but for any lint, also one that overruns memory, such as
    /// `attention_out.shape_unchecked`: the operator goes by other sizes than the tensors have.
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

    /// Requires that every known release of CANN from `release` on takes the call on this product, and that all of
    /// them compute the same. The lints `portable.refused` and `portable.meaning` name what another release would
    /// refuse, compute otherwise or ignore; [`allow_lint`](Self::allow_lint) lets them through. Planning costs a
    /// check for each release.
    ///
    /// ```
    /// use ascend_attention::spec::Cann;
    /// use ascend_attention::{CausalOrigin, Error, FusedInferAttention, Layout, Runtime, f16};
    ///
    /// # fn main() -> ascend_attention::Result<()> {
    /// let device = Runtime::auto()?.device(0)?;
    /// let stream = device.stream()?;
    /// let query = stream.upload(&[f16::ONE; 2 * 96], [1, 2, 1, 96])?;
    /// let key = stream.upload(&[f16::ONE; 32 * 2 * 96], [1, 2, 32, 96])?;
    /// let attention = FusedInferAttention::new(Layout::Bnsd).heads(2).scale(0.1);
    /// attention.clone().portable_since(Cann::V8_5).plan((&query, &key, &key))?;
    ///
    /// // 9.0 refuses the triangle of a single row, other releases read it as another mask.
    /// let causal = attention.mask(device.masks().causal(CausalOrigin::RightDown)?);
    /// let refused = causal.portable_since(Cann::V8_5).plan((&query, &key, &key));
    /// assert!(matches!(refused, Err(Error::Violation(_))));
    /// # Ok(())
    /// # }
    /// ```
    pub fn portable_since(mut self, release: Cann) -> Self {
        self.allowed.portable_since(release);
        self
    }

    /// Checks the call against every rule of the operator and prepares it for tensors of these shapes. Nothing is
    /// launched, and the tensors are not kept.
    ///
    /// A tuple of query, key and value does, and [`Inputs`] for calls that read more, or integers: paged attention, a
    /// key and value for each sequence, rotary parts, a shared prefix, quantisation and so on. Each launch then
    /// provides tensors of the same kinds, shapes and element types.
    ///
    /// Since CANN 8.1.
    ///
    /// # Errors
    /// Before any function of the operator is called: [`ARGUMENT_VALUE`](crate::rules::ARGUMENT_VALUE)
    /// without a [`scale`](Self::scale), for heads beyond INT64, or for a
    /// [cap](Self::emulated_only_soft_cap) below 1.2e-38 or not finite in 32 bits;
    /// [`EMULATED_ONLY`](crate::rules::EMULATED_ONLY) for a cap on a platform that is not emulated;
    /// [`LENGTHS_OVERFLOW`](crate::rules::LENGTHS_OVERFLOW) for lengths beyond INT64;
    /// [`Error::Violation`](crate::Error::Violation) for a broken rule or lint,
    /// [`UNSUPPORTED`](ascend_spec::UNSUPPORTED), [`Error::UnknownProduct`](crate::Error::UnknownProduct),
    /// [`Error::OperatorVersion`](crate::Error::OperatorVersion),
    /// [`ARGUMENT_DEVICE`](crate::rules::ARGUMENT_DEVICE) for tensors of different devices. After that
    /// [`Error::Aclnn`](crate::Error::Aclnn), should the operator refuse the call nevertheless.
    #[doc(alias = "aclnnFusedInferAttentionScoreGetWorkspaceSize")]
    #[doc(alias = "aclSetAclOpExecutorRepeatable")]
    pub fn plan<'a, T: Element>(&self, inputs: impl Into<Inputs<'a, T>>) -> Result<Plan> {
        self.plan_bindings(&inputs.into().tensors(), Reading::Planned)
    }

    /// As [`plan`](Self::plan), but for tensors in any form; `reading` is when the device reads their
    /// content.
    pub(crate) fn plan_bindings(&self, bindings: &impl Bindings, reading: Reading) -> Result<Plan> {
        let (mut key, mut value) = (Descs::new(), Descs::new());
        let mut context = None;
        bindings.each(|argument, tensor| {
            match argument.parameter {
                Parameter::Key => key.push(*tensor.desc()),
                Parameter::Value => value.push(*tensor.desc()),
                Parameter::Query => context = Some(tensor.memory().context()),
                _ => {}
            }
            Ok(())
        })?;
        let Some(context) = context else {
            return Err(Error::invalid("query", "none", "a tensor").fix("bring the query"));
        };
        self.soft_cap.admitted(context)?;
        let features = bindings.features().unwrap_or_default();
        let Numbers { num_heads, num_key_value_heads, scale, inner_precise } = self.settings.numbers()?;
        let mut call = FiaCall {
            key: &key,
            value: &value,
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
            softmax_lse_flag: self.softmax_lse,
            ..FiaCall::new(self.settings.layout.as_str())
        };
        features.describe(&mut call);
        call.describe(bindings);
        imply_outputs(&mut call);
        if let (Some(dtype), Some(out)) = (self.out_dtype, &mut call.attention_out) {
            out.dtype = dtype;
        }
        let named = |error| unset::block_table(self.heads_named(error, &call), &call);
        if self.settings.scale.is_none() {
            // The error of a broken rule is more useful.
            let (api, target) = (context.runtime().api(), context.target()?);
            let allowed = self.allowed.ids()?;
            let broken = versions::choose(api, target, &call, &allowed).err();
            let error = broken.map_or_else(|| unset::scale(&call), named);
            let mask = self.mask.tensor();
            return refused(Err(error), context, (&call, &self.allowed), mask, bindings);
        }
        let Self { allowed, soft_cap, .. } = self;
        Plan::checked(context, (&call, *soft_cap), allowed, self.mask.tensor(), bindings, reading).map_err(named)
    }

    /// Adds to a refusal that the heads are not set.
    fn heads_named(&self, error: Error, call: &FiaCall<'_>) -> Error {
        match self.settings.num_heads {
            Some(_) => error,
            None => unset::heads(error, call),
        }
    }
}

type Descs = SmallVec<[TensorDesc; 1]>;
