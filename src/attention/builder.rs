//! A call, described step by step.

use ascend_spec::Layout;
use ascend_spec::fia::FiaCall;

use crate::error::Result;
use crate::mask::Mask;
use crate::memory::Element;
use crate::tensor::Tensor;

use super::arguments::Arguments;
use super::parameter::Parameter;
use super::plan::Plan;
use super::tensor_list::TensorList;

/// CANN's `innerPrecise`: precision, and what becomes of rows that a mask tensor leaves without keys.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum InnerPrecise {
    /// High precision. Rows without keys come out as the mean of the values.
    #[default]
    HighPrecision = 0,
    /// High performance (matters for f16 alone). Rows without keys as above.
    HighPerformance = 1,
    /// High precision; rows without keys come out as 0. Not with a single query row a sequence.
    HighPrecisionCorrected = 2,
    /// High performance; rows without keys come out as 0. Not with a single query row a sequence.
    HighPerformanceCorrected = 3,
}

/// A call of FusedInferAttentionScore, `softmax(scale * Q K^T) V` over the keys that a [`Mask`] shows.
///
/// Describe it once, [`plan`](Self::plan) it for tensors of certain shapes, and launch the [`Plan`] with as many tensors
/// of these shapes as there are layers. What is not set has the operator's default, except
/// [`inner_precise`](Self::inner_precise), which is high precision.
///
/// Source: aclnnFusedInferAttentionScore V1 to V5; the oldest version that can express the call is used.
#[derive(Clone, Debug)]
#[must_use = "a description does nothing until planned"]
pub struct FusedInferAttention {
    arguments: Arguments,
}

impl FusedInferAttention {
    /// A call with tensors of these axis orders (`inputLayout`).
    pub fn new(layout: Layout) -> Self {
        Self {
            arguments: Arguments::new(&FiaCall::new(layout.as_str())),
        }
    }

    fn with(mut self, change: impl FnOnce(&mut FiaCall<'static>)) -> Self {
        change(self.arguments.call.plain_mut());
        self
    }

    /// Number of query heads (`numHeads`). Unset: 1.
    pub fn heads(self, num_heads: i64) -> Self {
        self.with(|call| call.num_heads = num_heads)
    }

    /// Number of key and value heads, a divisor of the query heads (`numKeyValueHeads`). Unset: as many as query heads.
    pub fn kv_heads(self, num_key_value_heads: i64) -> Self {
        self.with(|call| call.num_key_value_heads = num_key_value_heads)
    }

    /// Factor of the scores, usually `1 / sqrt(D)` (`scaleValue`). Unset: 1.
    pub fn scale(self, scale: f64) -> Self {
        self.with(|call| call.scale = scale)
    }

    /// Which keys a query sees (`sparseMode`, `attenMask`, `preTokens`, `nextTokens`). Unset: all. The tensor of the mask
    /// stays the same for all launches of a plan.
    pub fn mask(mut self, mask: Mask) -> Self {
        let call = self.arguments.call.plain_mut();
        call.sparse_mode = mask.sparse_mode().acl();
        call.pre_tokens = mask.pre_tokens();
        call.next_tokens = mask.next_tokens();
        match mask.tensor() {
            Some(tensor) => {
                self.arguments.set(Parameter::AttenMask, tensor.clone());
            }
            None => {
                call.atten_mask = None;
                self.arguments
                    .tensors
                    .retain(|(parameter, _)| *parameter != Parameter::AttenMask);
            }
        }
        self
    }

    /// Number of valid query rows of each sequence, or one number for all (`actualSeqLengths`). Unset: all rows. The rows
    /// behind are not computed.
    pub fn actual_seq_lengths(mut self, lengths: impl Into<Vec<i64>>) -> Self {
        self.arguments.call.actual_seq_lengths = Some(lengths.into());
        self
    }

    /// Number of valid keys of each sequence, or one number for all (`actualSeqLengthsKv`). Unset: all rows.
    pub fn actual_seq_lengths_kv(mut self, lengths: impl Into<Vec<i64>>) -> Self {
        self.arguments.call.actual_seq_lengths_kv = Some(lengths.into());
        self
    }

    /// Whether the log-sum-exp of each row's scores is computed too (`softmaxLseFlag`). Unset: no.
    pub fn softmax_lse(self, computed: bool) -> Self {
        self.with(|call| call.softmax_lse_flag = computed)
    }

    /// Precision (`innerPrecise`). Unset: [`InnerPrecise::HighPrecision`].
    pub fn inner_precise(self, inner_precise: InnerPrecise) -> Self {
        self.with(|call| call.inner_precise = inner_precise as i64)
    }

    /// Lets the call through although it breaks a lint, by the lint's id: the operator takes the call and ignores,
    /// misreads or overruns something.
    pub fn allow_lint(mut self, id: &str) -> Self {
        self.arguments.allow_lint(id);
        self
    }

    /// Checks the call against every rule of the operator and prepares it for tensors of these shapes. Nothing is
    /// launched, and the tensors are not kept. Key and value are a tensor each, or a list with a tensor for each
    /// sequence.
    ///
    /// Since CANN 8.1.
    ///
    /// # Errors
    /// Before any function of the operator is called: [`Error::Violation`](crate::Error::Violation) for a broken rule or
    /// lint, [`Error::Unsupported`](crate::Error::Unsupported), [`Error::UnknownProduct`](crate::Error::UnknownProduct),
    /// [`Error::OperatorVersion`](crate::Error::OperatorVersion),
    /// [`Error::InvalidArgument`](crate::Error::InvalidArgument) for tensors of different devices. After that
    /// [`Error::Aclnn`](crate::Error::Aclnn), should the operator refuse the call nevertheless.
    #[doc(alias = "aclnnFusedInferAttentionScoreGetWorkspaceSize")]
    #[doc(alias = "aclSetAclOpExecutorRepeatable")]
    pub fn plan<T, K, V>(&self, query: &Tensor<T>, key: &K, value: &V) -> Result<Plan>
    where
        T: Element,
        K: TensorList<T> + ?Sized,
        V: TensorList<T> + ?Sized,
    {
        let mut arguments = self.arguments.clone();
        arguments.set(Parameter::Query, query);
        for tensor in (0..key.count()).filter_map(|index| key.tensor(index)) {
            arguments.push_key(tensor);
        }
        for tensor in (0..value.count()).filter_map(|index| value.tensor(index)) {
            arguments.push_value(tensor);
        }
        let kept = |parameter| parameter != Parameter::Query;
        Plan::new(query.memory().context(), &arguments, kept)
    }
}
