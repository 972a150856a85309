//! QuantLightningIndexer: chooses the keys that each row of sparse attention reads, by scores of quantised queries and
//! keys.
//!
//! [`QuantLightningIndexer`] describes a call, which is planned once and launched per layer as a [`QuantIndexerPlan`].
//! Lengths and blocks of the sequences are a [`SparseSequences`], which the host knows.

use ascend_spec::ops::quant_lightning_indexer::{Parameter, QuantIndexerCall, Version, rules};
use ascend_spec::quant_lightning_indexer_arguments;

use crate::error::Result;
use crate::memory::Element;
use crate::operator::{AllowedLints, EntryPoints, NamedTensors, entry_points, lints_of, phase_one};
use crate::ops::operation::{self, PlainCall, PlainOperation, Sealed};
use crate::ops::sparse_sequences::{SparseSequences, require_outputs, too_many_keys};
use crate::tensor::{AnyTensor, Tensor};

entry_points! {
    quant_lightning_indexer_arguments, QuantIndexerCall<'_>, AnyArguments::QuantLightningIndexer;
    Version::V1 => 1: aclnnQuantLightningIndexerGetWorkspaceSize, aclnnQuantLightningIndexer;
}

/// What to do where the installed CANN has no such operator.
const INSTEAD: &str = "keep the indexer's keys in 16 bits, and choose by LightningIndexer";

/// A call of QuantLightningIndexer: as [`LightningIndexer`](crate::indexer::LightningIndexer), with queries and keys of
/// one byte an element, and scales of at least 0: one for each head of a query, one for each key.
///
/// Describe it, plan it for tensors of certain shapes, and launch the [`QuantIndexerPlan`] once a layer.
///
/// | products | queries and keys | weights | scales |
/// |---|---|---|---|
/// | Atlas A2 and A3, Ascend 950 from CANN 9.1 on | `i8` | `f16` | `f16` |
/// | Ascend 950 from CANN 9.1 on | `Float8E4M3Fn` | `f16` | `f16` |
/// | Ascend 950 | `Float8E4M3Fn`, or `HiFloat8` with a count of 2048 | `bf16` | `f32` |
///
/// Source: aclnnQuantLightningIndexer, since CANN 8.5, on Ascend 950 since 9.0; before, planning is an
/// [`Error::MissingOperator`](crate::Error::MissingOperator) or an [`Error::Violation`](crate::Error::Violation).
///
/// ```
/// use ascend_attention::quant_indexer::QuantLightningIndexer;
/// use ascend_attention::sparse::SparseSequences;
/// use ascend_attention::{Runtime, f16};
///
/// # fn main() -> ascend_attention::Result<()> {
/// # #[cfg(feature = "emulation")] {
/// let stream = Runtime::emulated()?.device(0)?.stream()?;
/// // One row with 8 heads, and 4 keys that differ by their scales.
/// let query = stream.upload(&[100i8; 8 * 128], [1, 8, 128])?;
/// let key = stream.upload(&[100i8; 4 * 128], [4, 1, 128])?;
/// let weights = stream.upload(&[f16::ONE; 8], [1, 8])?;
/// let query_scale = stream.upload(&[f16::from_f32(0.01); 8], [1, 8])?;
/// let key_scale = stream.upload(&[0.01, 0.02, 0.03, 0.04].map(f16::from_f32), [4, 1])?;
/// let sequences = SparseSequences::packed(&stream, &[1], &[4])?;
/// let inputs = ((&query, &query_scale), (&key, &key_scale), &weights);
/// let plan = QuantLightningIndexer::new(2).plan(&sequences, inputs)?;
/// let mut indices = plan.launch(&stream, inputs)?.download(&stream)?;
/// indices.sort();
/// assert_eq!(indices, [2, 3]);
/// # }
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug)]
#[must_use = "a description does nothing until planned"]
pub struct QuantLightningIndexer {
    count: i64,
    causal: bool,
    allowed: AllowedLints,
}

impl QuantLightningIndexer {
    /// A call by which each row chooses `count` keys (`sparseCount`; most models use 2048) among those up to its own
    /// position: the top-k of its scores.
    pub fn new(count: usize) -> Self {
        Self { count: i64::try_from(count).unwrap_or(i64::MAX), causal: true, allowed: AllowedLints::default() }
    }

    /// Sets whether a row chooses only among the keys up to its own position, counted from the end of its sequence
    /// (`sparseMode` 3), or among all (0).
    pub fn causal(mut self, causal: bool) -> Self {
        self.causal = causal;
        self
    }

    /// Lets a call through that breaks this lint, such as `quant_indexer.none_chosen`.
    pub fn allow_lint(mut self, id: &str) -> Self {
        self.allowed.lint(id);
        self
    }

    /// Checks a call with queries, keys, weights and scales in the layouts of `sequences`, and prepares it for tensors
    /// of these shapes and strides. Nothing is launched, and the tensors are not kept.
    ///
    /// # Errors
    /// Before any function of the operator is called: [`Error::Violation`](crate::Error::Violation), by
    /// `quant_indexer.contents` for lengths and blocks that the tensors do not have;
    /// [`Error::UnknownProduct`](crate::Error::UnknownProduct),
    /// [`Error::MissingOperator`](crate::Error::MissingOperator),
    /// [`ARGUMENT_DEVICE`](crate::rules::ARGUMENT_DEVICE) for tensors of different devices. After that
    /// [`Error::Aclnn`](crate::Error::Aclnn), should the operator refuse the call nevertheless.
    #[doc(alias = "aclnnQuantLightningIndexerGetWorkspaceSize")]
    pub fn plan<'a, T: Element>(
        &self,
        sequences: &SparseSequences,
        inputs: impl Into<QuantIndexerInputs<'a, T>>,
    ) -> Result<QuantIndexerPlan> {
        let inputs = inputs.into();
        let context = inputs.query.memory().context();
        QuantIndexerCall::check_device(Version::V1, context, INSTEAD, inputs.each())?;
        sequences.on(context)?;
        let [layout_query, layout_key] = sequences.layouts();
        let tensors: NamedTensors<'_, _> = Self::tensors(sequences, &inputs).collect();
        let mut call = QuantIndexerCall {
            layout_query,
            layout_key,
            sparse_count: self.count,
            sparse_mode: if self.causal { 3 } else { 0 },
            ..QuantIndexerCall::default()
        };
        call.describe(&tensors);
        call.sparse_indices = call.output();
        QuantIndexerPlan::of_call((&call, Version::V1), inputs.query, &tensors, || {
            let target = context.target()?;
            require_outputs(call.sparse_indices, inputs.query, || too_many_keys(self.count))?;
            let problem = call.check(target)?;
            let allowed = self.allowed.ids(lints_of::<Version>)?;
            call.lint(target, &allowed)?;
            let lints = [&rules::ROWS_LEFT_OUT, &rules::ROWS_WITHOUT_KEYS];
            let numbers = sequences.check(&problem.sequences, &rules::CONTENTS, lints, &allowed)?;
            Ok((PlainOperation::new(sequences.clone(), [numbers]), problem.is_idle()))
        })
    }
}

/// What a launch reads. From queries and keys, each with its scales, and weights.
#[derive(Clone, Copy, Debug)]
pub struct QuantIndexerInputs<'a, T: Element> {
    query: &'a Tensor<T>,
    key: &'a Tensor<T>,
    weights: &'a AnyTensor,
    /// Of queries and of keys.
    scales: [&'a AnyTensor; 2],
}

/// A tensor of quantised elements, and their scales.
type WithScales<'a, T, S> = (&'a Tensor<T>, &'a Tensor<S>);

impl<'a, T: Element, S: Element, W: Element> From<(WithScales<'a, T, S>, WithScales<'a, T, S>, &'a Tensor<W>)>
    for QuantIndexerInputs<'a, T>
{
    /// Queries and keys, each with its scales, and weights.
    fn from(
        ((query, query_scale), (key, key_scale), weights): (WithScales<'a, T, S>, WithScales<'a, T, S>, &'a Tensor<W>),
    ) -> Self {
        Self { query, key, weights, scales: [query_scale, key_scale] }
    }
}

impl<'a, T: Element> QuantIndexerInputs<'a, T> {
    /// The tensor of each argument.
    fn each(&self) -> [(Parameter, &'a AnyTensor); 5] {
        let [query_scale, key_scale] = self.scales;
        [
            (Parameter::Query, self.query),
            (Parameter::Key, self.key),
            (Parameter::Weights, self.weights),
            (Parameter::QueryDequantScale, query_scale),
            (Parameter::KeyDequantScale, key_scale),
        ]
    }
}

/// A call of QuantLightningIndexer that was checked and prepared. From [`QuantLightningIndexer::plan`].
///
/// A launch reads queries, keys, their scales and weights, and writes the chosen keys of each row, by their position in
/// the sequence, and -1 after the last: `[B, S1, 1, count]` or `[T1, 1, count]`. On Atlas A2 and A3 the best come
/// first; on Ascend 950 they are in no order.
pub type QuantIndexerPlan = operation::Plan<PlainOperation<QuantLightningIndexer>>;

impl Sealed for QuantLightningIndexer {}

impl PlainCall for QuantLightningIndexer {
    type Inputs<'a, T: Element> = QuantIndexerInputs<'a, T>;
    type Output<T: Element> = Tensor<i32>;
    type Parameter = Parameter;
    type Kept = SparseSequences;
    const OUTPUTS: &'static [Parameter] = &[Parameter::SparseIndices];

    fn tensors<'t, 'i: 't, T: Element>(
        sequences: &'t SparseSequences,
        inputs: &'t QuantIndexerInputs<'i, T>,
    ) -> impl Iterator<Item = (Parameter, &'t AnyTensor)> {
        inputs.each().into_iter().chain(sequences.each(QuantIndexerCall::CONTENTS))
    }
}
