//! A call, described step by step.

use std::marker::PhantomData;

use ascend_spec::Layout;

use crate::error::Result;
use crate::mask::Mask;
use crate::memory::Element;
use crate::operator::AllowedLints;
use crate::ops::attention_settings::{Settings, setters};
use crate::ops::fused_infer_attention_score::Inputs;

use super::inputs::{Described, InferenceParameter};
use super::plan::InferencePlan;

/// A call of PromptFlashAttention or IncreFlashAttention; `P` are the operator's parameters. See
/// [`PromptFlashAttention`](crate::prompt::PromptFlashAttention) and
/// [`IncreFlashAttention`](crate::incre::IncreFlashAttention).
#[derive(Clone, Debug)]
#[must_use = "a description does nothing until planned"]
pub struct InferenceAttention<P> {
    pub(crate) settings: Settings,
    pub(crate) mask: Mask,
    pub(crate) allowed: AllowedLints,
    parameters: PhantomData<P>,
}

/// An operator that [`InferenceAttention`] describes a call of.
pub(crate) trait InferenceOperator: InferenceParameter {
    /// Checks the call with these inputs and prepares it.
    fn plan(attention: &InferenceAttention<Self>, described: &Described<'_, Self>) -> Result<InferencePlan<Self>>;
}

#[allow(private_bounds, reason = "sealed: the bound has no public name")]
impl<P: InferenceOperator> InferenceAttention<P> {
    /// A call with tensors of these axis orders (`inputLayout`).
    pub fn new(layout: Layout) -> Self {
        Self {
            settings: Settings::new(layout),
            mask: Mask::none(),
            allowed: AllowedLints::default(),
            parameters: PhantomData,
        }
    }

    setters!();

    /// Lengths of the keys: the number of valid keys of each sequence, or one number for all; with TND where the keys
    /// of each end, cumulative. A paged cache needs them. CANN calls them `actualSeqLengthsKv` in
    /// PromptFlashAttention, `actualSeqLengths` in IncreFlashAttention.
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
    /// A tuple of query, key and value does, and [`Inputs`] for calls that read more: a position bias, or a
    /// [`Quantisation`](crate::attention::Quantisation) of `Output` or `Int8`; with IncreFlashAttention also a paged
    /// cache, a key and value for each sequence, left padding of the keys, or a quantisation of `KeyValue` by merged
    /// scales a channel or a tensor. Each launch then provides tensors of the same kinds, shapes and element types.
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
    #[doc(alias = "aclnnIncreFlashAttentionV4GetWorkspaceSize")]
    pub fn plan<'a, T: Element>(&self, inputs: impl Into<Inputs<'a, T>>) -> Result<InferencePlan<P>> {
        P::plan(self, &Described::new(inputs.into().tensors())?)
    }
}
