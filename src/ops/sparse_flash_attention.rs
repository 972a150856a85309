//! SparseFlashAttention: latent attention to the keys that a list names for each row.
//!
//! [`SparseFlashAttention`] describes a call, which is planned once and launched per layer as a [`SparseFlashPlan`].
//! Lengths and blocks of the sequences are a [`SparseSequences`], which the host knows.

use ascend_spec::ops::sparse_flash_attention::{Parameter, SparseFlashCall, Version, rules};
use ascend_spec::sparse_flash_attention_arguments;

use crate::error::Result;
use crate::memory::Element;
use crate::operator::{AllowedLints, EntryPoints, NamedTensors, entry_points, lints_of, phase_one};
use crate::ops::operation::{self, PlainCall, PlainOperation, Sealed, outputs};
use crate::ops::sparse_sequences::{SparseSequences, require_outputs, too_many_rows};
use crate::tensor::{AnyTensor, Tensor};

entry_points! {
    sparse_flash_attention_arguments, SparseFlashCall<'_>, AnyArguments::SparseFlashAttention;
    Version::V1 => 1: aclnnSparseFlashAttentionGetWorkspaceSize, aclnnSparseFlashAttention;
    Version::V2 => 2: aclnnSparseFlashAttentionV2GetWorkspaceSize, aclnnSparseFlashAttentionV2;
}

/// What to do where the installed CANN has no such version of the operator.
const fn instead(version: Version) -> &'static str {
    match version {
        Version::V1 => "attend to all keys, by latent attention of FusedInferAttentionScore",
        Version::V2 => "attend without sinks, as Atlas A2 and A3 do with every release",
    }
}

/// A call of SparseFlashAttention: latent attention in its absorbed form, in which each row reads the keys that its
/// list names, as [`LightningIndexer`](crate::indexer::LightningIndexer) chooses them.
///
/// Describe it, plan it for tensors of certain shapes, and launch the [`SparseFlashPlan`] once a layer.
///
/// Source: aclnnSparseFlashAttention, since CANN 8.5, on Ascend 950 since 9.1; before, planning is an
/// [`Error::MissingOperator`](crate::Error::MissingOperator) or an [`Error::Violation`](crate::Error::Violation). With
/// [sinks](SparseFlashInputs::sinks) aclnnSparseFlashAttentionV2, since CANN 9.2, on Ascend 950.
///
/// ```
/// use ascend_attention::sparse::SparseSequences;
/// use ascend_attention::sparse_flash::SparseFlashAttention;
/// use ascend_attention::{Runtime, f16};
///
/// # fn main() -> ascend_attention::Result<()> {
/// # #[cfg(feature = "emulation")] {
/// let stream = Runtime::emulated()?.device(0)?.stream()?;
/// // One row with 8 heads, 4 keys, and a list of two of them.
/// let query = stream.upload(&[f16::ZERO; 8 * 512], [1, 8, 512])?;
/// let query_rope = stream.upload(&[f16::ZERO; 8 * 64], [1, 8, 64])?;
/// let keys: Vec<f16> = (0..4).flat_map(|key| [f16::from_f32(key as f32); 512]).collect();
/// let key = stream.upload(&keys, [4, 1, 512])?;
/// let key_rope = stream.upload(&[f16::ZERO; 4 * 64], [4, 1, 64])?;
/// let indices = stream.upload(&[1, 2, -1], [1, 1, 3])?;
/// let sequences = SparseSequences::packed(&stream, &[1], &[4])?;
/// let inputs = ((&query, &query_rope), (&key, &key_rope), &indices);
/// // A query of zeros gives both keys the same weight. Heads have 128 elements and 64 rotary ones.
/// let plan = SparseFlashAttention::new(192f64.sqrt().recip()).plan(&sequences, inputs)?;
/// let attention = plan.launch(&stream, inputs)?;
/// assert_eq!(attention.out.download(&stream)?, [f16::from_f32(1.5); 8 * 512]);
/// # }
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug)]
#[must_use = "a description does nothing until planned"]
pub struct SparseFlashAttention {
    scale: f64,
    sparse_block_size: i64,
    causal: bool,
    return_softmax_lse: bool,
    allowed: AllowedLints,
}

impl SparseFlashAttention {
    /// A call with this factor of the scores, of latent attention usually `1 / sqrt(192)` and not `1 / sqrt(576)`,
    /// since heads have 128 elements and 64 rotary ones before the projection is absorbed. Its lists name single keys
    /// up to the row's own position.
    pub fn new(scale: f64) -> Self {
        Self { scale, sparse_block_size: 1, causal: true, return_softmax_lse: false, allowed: AllowedLints::default() }
    }

    /// Sets how many keys each entry of a list names (`sparseBlockSize`), 1 for the positions that LightningIndexer
    /// gives. It is not the number of tokens of a cache's block.
    pub fn sparse_block_size(mut self, keys: usize) -> Self {
        self.sparse_block_size = i64::try_from(keys).unwrap_or(i64::MAX);
        self
    }

    /// Sets whether a row may read only the keys up to its own position, counted from the end of its sequence
    /// (`sparseMode` 3), or all (0).
    pub fn causal(mut self, causal: bool) -> Self {
        self.causal = causal;
        self
    }

    /// Sets whether maximum and sum of each row are returned as well, which is not possible for keys in a paged cache.
    pub fn return_softmax_lse(mut self, return_softmax_lse: bool) -> Self {
        self.return_softmax_lse = return_softmax_lse;
        self
    }

    /// Lets a call through that breaks this lint, such as `sparse_flash.none_chosen`.
    pub fn allow_lint(mut self, id: &str) -> Self {
        self.allowed.lint(id);
        self
    }

    /// Checks a call with queries and keys in the layouts of `sequences`, and prepares it for tensors of these shapes
    /// and strides. Nothing is launched, and the tensors are not kept.
    ///
    /// # Errors
    /// Before any function of the operator is called: [`Error::Violation`](crate::Error::Violation), by
    /// `sparse_flash.contents` for lengths and blocks that the tensors do not have;
    /// [`Error::UnknownProduct`](crate::Error::UnknownProduct),
    /// [`Error::MissingOperator`](crate::Error::MissingOperator),
    /// [`ARGUMENT_DEVICE`](crate::rules::ARGUMENT_DEVICE) for tensors of different devices. After that
    /// [`Error::Aclnn`](crate::Error::Aclnn), should the operator refuse the call nevertheless.
    #[doc(alias = "aclnnSparseFlashAttentionGetWorkspaceSize")]
    pub fn plan<'a, T: Element>(
        &self,
        sequences: &SparseSequences,
        inputs: impl Into<SparseFlashInputs<'a, T>>,
    ) -> Result<SparseFlashPlan> {
        let inputs = inputs.into();
        let context = inputs.query.memory().context();
        let version = if inputs.sinks.is_some() { Version::V2 } else { Version::V1 };
        SparseFlashCall::check_device(version, context, instead(version), inputs.each())?;
        sequences.on(context)?;
        let [layout_query, layout_kv] = sequences.layouts();
        let tensors: NamedTensors<'_, _> = Self::tensors(sequences, &inputs).collect();
        let mut call = SparseFlashCall {
            scale: self.scale,
            sparse_block_size: self.sparse_block_size,
            layout_query,
            layout_kv,
            sparse_mode: if self.causal { 3 } else { 0 },
            return_softmax_lse: self.return_softmax_lse,
            ..SparseFlashCall::default()
        };
        call.describe(&tensors);
        let outputs = call.outputs();
        call.attention_out = outputs.map(|[out, _]| out);
        call.softmax_max = outputs.map(|[_, softmax]| softmax);
        call.softmax_sum = call.softmax_max;
        SparseFlashPlan::of_call((&call, version), inputs.query, &tensors, || {
            let target = context.target()?;
            require_outputs(outputs, inputs.query, || too_many_rows(inputs.query))?;
            let problem = call.check(version, target)?;
            let allowed = self.allowed.ids(lints_of::<Version>)?;
            call.lint(target, &allowed)?;
            let lints = [&rules::ROWS_LEFT_OUT, &rules::ROWS_WITHOUT_KEYS];
            let numbers = sequences.check(&problem.sequences, &rules::CONTENTS, lints, &allowed)?;
            Ok((PlainOperation::new(sequences.clone(), [numbers]), problem.is_idle()))
        })
    }
}

/// What a launch reads. From queries and keys, each with its rotary part, and the lists of all rows; with
/// [sinks](Self::sinks) or without.
#[derive(Clone, Copy, Debug)]
pub struct SparseFlashInputs<'a, T: Element> {
    query: &'a Tensor<T>,
    query_rope: &'a Tensor<T>,
    key: &'a Tensor<T>,
    key_rope: &'a Tensor<T>,
    indices: &'a Tensor<i32>,
    sinks: Option<&'a Tensor<f32>>,
}

/// A tensor without its rotary part, and the rotary part.
type WithRope<'a, T> = (&'a Tensor<T>, &'a Tensor<T>);

impl<'a, T: Element> From<(WithRope<'a, T>, WithRope<'a, T>, &'a Tensor<i32>)> for SparseFlashInputs<'a, T> {
    /// Queries and keys, each with its rotary part, and lists.
    fn from(
        ((query, query_rope), (key, key_rope), indices): (WithRope<'a, T>, WithRope<'a, T>, &'a Tensor<i32>),
    ) -> Self {
        Self { query, query_rope, key, key_rope, indices, sinks: None }
    }
}

impl<'a, T: Element> SparseFlashInputs<'a, T> {
    /// Adds one more logit for each head, `[N1]`, which has no value: it counts in the maximum and the sum of each row.
    /// A row without keys is 0, its maximum the sink and its sum 1. On Ascend 950 with CANN 9.2, and not for keys in a
    /// paged cache. A plan is made with sinks and launched with sinks, or neither.
    pub fn sinks(self, sinks: &'a Tensor<f32>) -> Self {
        Self { sinks: Some(sinks), ..self }
    }

    /// The tensor of each argument. The keys are the values too.
    fn each(&self) -> impl Iterator<Item = (Parameter, &'a AnyTensor)> {
        let all: [(_, &AnyTensor); 6] = [
            (Parameter::Query, self.query),
            (Parameter::Key, self.key),
            (Parameter::Value, self.key),
            (Parameter::SparseIndices, self.indices),
            (Parameter::QueryRope, self.query_rope),
            (Parameter::KeyRope, self.key_rope),
        ];
        all.into_iter().chain(self.sinks.map(|sinks| (Parameter::Sinks, &**sinks)))
    }
}

/// What a launch writes.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct SparseAttention<T: Element> {
    /// Attention, with the shape of the queries. A row without keys is 0.
    pub out: Tensor<T>,
    /// The largest score of each row and head, `[B, 1, S1, N1]` or `[1, T1, N1]`, and 0 without keys; empty unless it
    /// is asked for.
    pub softmax_max: Tensor<f32>,
    /// The sum of the exponentials of the scores, from which the largest is taken, in the same shape.
    pub softmax_sum: Tensor<f32>,
}

outputs! { SparseAttention { out, softmax_max, softmax_sum } }

impl<T: Element> From<(Tensor<T>, Tensor<f32>, Tensor<f32>)> for SparseAttention<T> {
    /// Tensors to write attention, maxima and sums into; the latter are `[0]` unless they are asked for.
    fn from((out, softmax_max, softmax_sum): (Tensor<T>, Tensor<f32>, Tensor<f32>)) -> Self {
        Self { out, softmax_max, softmax_sum }
    }
}

/// A call of SparseFlashAttention that was checked and prepared. From [`SparseFlashAttention::plan`].
///
/// A launch reads queries, keys, their rotary parts and lists, and writes contiguous [`SparseAttention`].
pub type SparseFlashPlan = operation::Plan<PlainOperation<SparseFlashAttention>>;

impl Sealed for SparseFlashAttention {}

impl PlainCall for SparseFlashAttention {
    type Inputs<'a, T: Element> = SparseFlashInputs<'a, T>;
    type Output<T: Element> = SparseAttention<T>;
    type Parameter = Parameter;
    type Kept = SparseSequences;
    const OUTPUTS: &'static [Parameter] = &[Parameter::AttentionOut, Parameter::SoftmaxMax, Parameter::SoftmaxSum];

    fn tensors<'t, 'i: 't, T: Element>(
        sequences: &'t SparseSequences,
        inputs: &'t SparseFlashInputs<'i, T>,
    ) -> impl Iterator<Item = (Parameter, &'t AnyTensor)> {
        inputs.each().chain(sequences.each(SparseFlashCall::CONTENTS))
    }
}
