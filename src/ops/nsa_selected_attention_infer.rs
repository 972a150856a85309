//! NsaSelectedAttentionInfer: attention to the tokens of selected blocks of a paged cache.
//!
//! [`NsaSelectedAttentionInfer`] describes a call, which is planned once and launched per layer as an
//! [`NsaSelectedPlan`]. Lengths and blocks of the sequences are a [`SparseSequences`], which the host knows.

use ascend_spec::nsa_selected_attention_infer_arguments;
use ascend_spec::ops::nsa_selected_attention_infer::{NsaSelectedCall, Parameter, Version, rules};

use crate::error::Result;
use crate::memory::Element;
use crate::operator::{AllowedLints, EntryPoints, NamedTensors, entry_points, lints_of, phase_one};
use crate::ops::operation::{self, PlainCall, PlainOperation, Sealed};
use crate::ops::sparse_sequences::{SparseSequences, require_outputs, too_many_rows};
use crate::tensor::{AnyTensor, Tensor};

entry_points! {
    nsa_selected_attention_infer_arguments, NsaSelectedCall<'_>, AnyArguments::NsaSelectedAttentionInfer;
    Version::V1 => 1: aclnnNsaSelectedAttentionInferGetWorkspaceSize, aclnnNsaSelectedAttentionInfer;
}

/// What to do where the installed CANN has no such operator.
const INSTEAD: &str = "attend to all tokens, by FusedInferAttentionScore";

/// A call of NsaSelectedAttentionInfer: attention in which each row reads the blocks of tokens that a list names for
/// each key head, up to its own position.
///
/// Describe it, plan it for tensors of certain shapes, and launch the [`NsaSelectedPlan`] once a layer. Lists are the
/// blocks that
/// [`NsaCompressAttentionInfer`](crate::nsa_compress_attention_infer::NsaCompressAttentionInfer) selects: blocks first,
/// then entries below 0, as many in the list of each key head of a row.
///
/// Source: aclnnNsaSelectedAttentionInfer, since CANN 8.5, on Atlas A2 and A3; elsewhere planning is an
/// [`Error::MissingOperator`](crate::Error::MissingOperator) or an [`Error::Violation`](crate::Error::Violation).
///
/// ```
/// use ascend_attention::nsa_selected_attention_infer::NsaSelectedAttentionInfer;
/// use ascend_attention::sparse::SparseSequences;
/// use ascend_attention::{Runtime, f16};
///
/// # fn main() -> ascend_attention::Result<()> {
/// # #[cfg(feature = "emulation")] {
/// let stream = Runtime::emulated()?.device(0)?.stream()?;
/// // A row of 256 tokens in 4 blocks of 64, whose values are the number of their block.
/// let query = stream.upload(&[f16::ZERO; 192], [1, 1, 192])?;
/// let key = stream.upload(&[f16::ZERO; 256 * 192], [4, 64, 192])?;
/// let values: Vec<f16> = (0..4).flat_map(|block| [f16::from_f32(block as f32); 64 * 128]).collect();
/// let value = stream.upload(&values, [4, 64, 128])?;
/// let selected = stream.upload(&[0, 3, 2], [1, 1, 3])?;
/// let sequences = SparseSequences::packed(&stream, &[1], &[256])?.paged(&stream, &[[0, 1, 2, 3]])?;
/// let inputs = (&query, &key, &value, &selected);
/// let plan = NsaSelectedAttentionInfer::new(192f64.sqrt().recip()).plan(&sequences, inputs)?;
/// // A query of zeros gives all tokens the same weight.
/// let mean = plan.launch(&stream, inputs)?.download(&stream)?[0].to_f32();
/// assert!((mean - 5.0 / 3.0).abs() < 1e-3);
/// # }
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug)]
#[must_use = "a description does nothing until planned"]
pub struct NsaSelectedAttentionInfer {
    scale: f64,
    select_block_size: i64,
    kv_heads: i64,
    allowed: AllowedLints,
}

impl NsaSelectedAttentionInfer {
    /// A call with this factor of the scores, one key head and blocks of 64 tokens.
    pub fn new(scale: f64) -> Self {
        Self { scale, select_block_size: 64, kv_heads: 1, allowed: AllowedLints::default() }
    }

    /// Sets how many tokens each entry of a list names (`selectBlockSize`). It is not the number of tokens of a cache's
    /// block.
    pub fn select_block_size(mut self, tokens: usize) -> Self {
        self.select_block_size = i64::try_from(tokens).unwrap_or(i64::MAX);
        self
    }

    /// Sets the number of key heads (`numKeyValueHeads`).
    pub fn kv_heads(mut self, kv_heads: usize) -> Self {
        self.kv_heads = i64::try_from(kv_heads).unwrap_or(i64::MAX);
        self
    }

    /// Lets a call through that breaks this lint, which stays within the call's tensors.
    pub fn allow_lint(mut self, id: &str) -> Self {
        self.allowed.lint(id);
        self
    }

    /// Checks a call with queries `[T, N1, 192]` or `[B, S, N1, 192]`, as in `sequences`, caches of keys and values
    /// `[blocks, page, N2 * D]` or `[blocks, page, N2, D]`, and lists of blocks `[T, N2, count]` or
    /// `[B, S, N2, count]`; and prepares it for tensors of these shapes and strides. Nothing is launched, and the
    /// tensors are not kept.
    ///
    /// # Errors
    /// Before any function of the operator is called: [`Error::Violation`](crate::Error::Violation), by
    /// `nsa_selected_attention.contents` for blocks that the cache does not have;
    /// [`Error::UnknownProduct`](crate::Error::UnknownProduct),
    /// [`Error::MissingOperator`](crate::Error::MissingOperator),
    /// [`ARGUMENT_DEVICE`](crate::rules::ARGUMENT_DEVICE) for tensors of different devices. After that
    /// [`Error::Aclnn`](crate::Error::Aclnn), should the operator refuse the call nevertheless.
    #[doc(alias = "aclnnNsaSelectedAttentionInferGetWorkspaceSize")]
    pub fn plan<'a, T: Element>(
        &self,
        sequences: &SparseSequences,
        inputs: impl Into<NsaSelectedInputs<'a, T>>,
    ) -> Result<NsaSelectedPlan> {
        let inputs = inputs.into();
        let NsaSelectedInputs { query, key, selected, .. } = inputs;
        let context = query.memory().context();
        NsaSelectedCall::check_device(Version::V1, context, INSTEAD, inputs.each())?;
        sequences.on(context)?;
        let ([queries, tokens], fixed) = sequences.lengths()?;
        let axes = query.desc().shape;
        let tensors: NamedTensors<'_, _> = Self::tensors(sequences, &inputs).collect();
        let mut call = NsaSelectedCall {
            actual_q_seq_len: Some(&queries),
            actual_kv_seq_len: Some(&tokens),
            layout: Some(sequences.layouts()[0]),
            num_heads: axes.rank().checked_sub(2).and_then(|axis| axes.get(axis)).copied().unwrap_or(0),
            num_key_value_heads: self.kv_heads,
            select_block_size: self.select_block_size,
            select_block_count: selected.desc().shape.last().copied().unwrap_or(0),
            page_block_size: key.desc().shape.get(1).copied().unwrap_or(0),
            scale: self.scale,
            ..NsaSelectedCall::default()
        };
        call.describe(&tensors);
        call.output = call.attention();
        NsaSelectedPlan::of_call((&call, Version::V1), query, &tensors, || {
            let target = context.target()?;
            require_outputs(call.output, query, || too_many_rows(query))?;
            let problem = call.check(target)?;
            call.lint(target, &self.allowed.ids(lints_of::<Version>)?)?;
            let within = sequences.check(&problem.attention.sequences, &rules::CONTENTS, None, &[])?;
            Ok((PlainOperation::new(sequences.clone(), [fixed, within]), problem.is_idle()))
        })
    }
}

/// What a launch reads. From queries, keys, values and lists of blocks.
#[derive(Clone, Copy, Debug)]
pub struct NsaSelectedInputs<'a, T: Element> {
    query: &'a Tensor<T>,
    key: &'a Tensor<T>,
    value: &'a Tensor<T>,
    selected: &'a Tensor<i32>,
}

type SelectedTensors<'a, T> = (&'a Tensor<T>, &'a Tensor<T>, &'a Tensor<T>, &'a Tensor<i32>);

impl<'a, T: Element> From<SelectedTensors<'a, T>> for NsaSelectedInputs<'a, T> {
    /// Queries, keys, values and lists of blocks.
    fn from((query, key, value, selected): SelectedTensors<'a, T>) -> Self {
        Self { query, key, value, selected }
    }
}

impl<'a, T: Element> NsaSelectedInputs<'a, T> {
    /// The tensor of each argument.
    fn each(&self) -> [(Parameter, &'a AnyTensor); 4] {
        [
            (Parameter::Query, self.query),
            (Parameter::Key, self.key),
            (Parameter::Value, self.value),
            (Parameter::TopkIndices, self.selected),
        ]
    }
}

/// A call of NsaSelectedAttentionInfer that was checked and prepared. From [`NsaSelectedAttentionInfer::plan`].
///
/// A launch reads [`NsaSelectedInputs`], and writes contiguous attention with the shape of the queries and the elements
/// of a value.
pub type NsaSelectedPlan = operation::Plan<PlainOperation<NsaSelectedAttentionInfer>>;

impl Sealed for NsaSelectedAttentionInfer {}

impl PlainCall for NsaSelectedAttentionInfer {
    type Inputs<'a, T: Element> = NsaSelectedInputs<'a, T>;
    type Output<T: Element> = Tensor<T>;
    type Parameter = Parameter;
    type Kept = SparseSequences;
    const OUTPUTS: &'static [Parameter] = &[Parameter::Output];

    fn tensors<'t, 'i: 't, T: Element>(
        sequences: &'t SparseSequences,
        inputs: &'t NsaSelectedInputs<'i, T>,
    ) -> impl Iterator<Item = (Parameter, &'t AnyTensor)> {
        inputs.each().into_iter().chain(sequences.table(Parameter::BlockTable))
    }
}
