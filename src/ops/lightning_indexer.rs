//! LightningIndexer: chooses the keys that each row of sparse attention reads.
//!
//! [`LightningIndexer`] describes a call, which is planned once and launched per layer as an [`IndexerPlan`]. Lengths
//! and blocks of the sequences are a [`SparseSequences`], which the host knows.

use ascend_spec::lightning_indexer_arguments;
use ascend_spec::ops::lightning_indexer::{IndexerCall, Parameter, Version, rules};

use crate::error::Result;
use crate::memory::Element;
use crate::operator::{AllowedLints, EntryPoints, NamedTensors, entry_points, lints_of, phase_one};
use crate::ops::operation::{self, PlainCall, PlainOperation, Sealed, outputs};
use crate::ops::sparse_sequences::{SparseSequences, require_outputs, too_many_keys};
use crate::tensor::{AnyTensor, Tensor};

entry_points! {
    lightning_indexer_arguments, IndexerCall<'_>, AnyArguments::LightningIndexer;
    Version::V1 => 1: aclnnLightningIndexerGetWorkspaceSize, aclnnLightningIndexer;
}

/// What to do where the installed CANN has no such operator.
const INSTEAD: &str = "attend to all keys, or choose them on the host";

/// A call of LightningIndexer, which chooses for each query row the keys with the best scores: the sum over heads of
/// `weight * max(0, query · key)`.
///
/// Describe it, plan it for tensors of certain shapes, and launch the [`IndexerPlan`] once a layer.
///
/// Source: aclnnLightningIndexer, since CANN 8.5, on Ascend 950 since 9.1; before, planning is an
/// [`Error::MissingOperator`](crate::Error::MissingOperator) or an [`Error::Violation`](crate::Error::Violation).
///
/// ```
/// use ascend_attention::indexer::LightningIndexer;
/// use ascend_attention::sparse::SparseSequences;
/// use ascend_attention::{Runtime, f16};
///
/// # fn main() -> ascend_attention::Result<()> {
/// # #[cfg(feature = "emulation")] {
/// let stream = Runtime::emulated()?.device(0)?.stream()?;
/// // One row with 8 heads, and 4 keys that are more and more like it.
/// let query = stream.upload(&[f16::ONE; 8 * 128], [1, 8, 128])?;
/// let keys: Vec<f16> = (0..4).flat_map(|key| [f16::from_f32(key as f32 * 0.1); 128]).collect();
/// let key = stream.upload(&keys, [4, 1, 128])?;
/// let weights = stream.upload(&[f16::ONE; 8], [1, 8])?;
/// let sequences = SparseSequences::packed(&stream, &[1], &[4])?;
/// let plan = LightningIndexer::new(2).plan(&sequences, (&query, &key, &weights))?;
/// let chosen = plan.launch(&stream, (&query, &key, &weights))?;
/// let mut indices = chosen.indices.download(&stream)?;
/// indices.sort();
/// assert_eq!(indices, [2, 3]);
/// # }
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug)]
#[must_use = "a description does nothing until planned"]
pub struct LightningIndexer {
    count: i64,
    causal: bool,
    return_values: bool,
    allowed: AllowedLints,
}

impl LightningIndexer {
    /// A call by which each row chooses `count` keys (`sparseCount`; most models use 2048) among those up to its own
    /// position: the top-k of its scores.
    pub fn new(count: usize) -> Self {
        Self {
            count: i64::try_from(count).unwrap_or(i64::MAX),
            causal: true,
            return_values: false,
            allowed: AllowedLints::default(),
        }
    }

    /// Sets whether a row chooses only among the keys up to its own position, counted from the end of its sequence
    /// (`sparseMode` 3), or among all (0).
    pub fn causal(mut self, causal: bool) -> Self {
        self.causal = causal;
        self
    }

    /// Sets whether the scores are returned as well, which is not possible for keys in a paged cache.
    pub fn return_values(mut self, return_values: bool) -> Self {
        self.return_values = return_values;
        self
    }

    /// Lets a call through that breaks this lint, such as `indexer.none_chosen`.
    pub fn allow_lint(mut self, id: &str) -> Self {
        self.allowed.lint(id);
        self
    }

    /// Checks a call with queries, keys and weights in the layouts of `sequences`, and prepares it for tensors of these
    /// shapes and strides. Nothing is launched, and the tensors are not kept.
    ///
    /// # Errors
    /// Before any function of the operator is called: [`Error::Violation`](crate::Error::Violation), by
    /// `indexer.contents` for lengths and blocks that the tensors do not have;
    /// [`Error::UnknownProduct`](crate::Error::UnknownProduct),
    /// [`Error::MissingOperator`](crate::Error::MissingOperator),
    /// [`ARGUMENT_DEVICE`](crate::rules::ARGUMENT_DEVICE) for tensors of different devices. After that
    /// [`Error::Aclnn`](crate::Error::Aclnn), should the operator refuse the call nevertheless.
    #[doc(alias = "aclnnLightningIndexerGetWorkspaceSize")]
    pub fn plan<'a, T: Element>(
        &self,
        sequences: &SparseSequences,
        inputs: impl Into<IndexerInputs<'a, T>>,
    ) -> Result<IndexerPlan> {
        let inputs = inputs.into();
        let context = inputs.query.memory().context();
        IndexerCall::check_device(Version::V1, context, INSTEAD, inputs.each())?;
        sequences.on(context)?;
        let [layout_query, layout_key] = sequences.layouts();
        let tensors: NamedTensors<'_, _> = Self::tensors(sequences, &inputs).collect();
        let mut call = IndexerCall {
            layout_query,
            layout_key,
            sparse_count: self.count,
            sparse_mode: if self.causal { 3 } else { 0 },
            return_values: self.return_values,
            ..IndexerCall::default()
        };
        call.describe(&tensors);
        let outputs = call.outputs();
        call.sparse_indices = outputs.map(|[indices, _]| indices);
        call.sparse_values = outputs.map(|[_, values]| values);
        IndexerPlan::of_call((&call, Version::V1), inputs.query, &tensors, || {
            let target = context.target()?;
            require_outputs(outputs, inputs.query, || too_many_keys(self.count))?;
            let problem = call.check(target)?;
            let allowed = self.allowed.ids(lints_of::<Version>)?;
            call.lint(target, &allowed)?;
            let lints = [&rules::ROWS_LEFT_OUT, &rules::ROWS_WITHOUT_KEYS];
            let numbers = sequences.check(&problem.sequences, &rules::CONTENTS, lints, &allowed)?;
            Ok((PlainOperation::new(sequences.clone(), [numbers]), problem.is_idle()))
        })
    }
}

/// What a launch reads. From queries, keys and weights.
#[derive(Clone, Copy, Debug)]
pub struct IndexerInputs<'a, T: Element> {
    query: &'a Tensor<T>,
    key: &'a Tensor<T>,
    weights: &'a AnyTensor,
}

impl<'a, T: Element, W: Element> From<(&'a Tensor<T>, &'a Tensor<T>, &'a Tensor<W>)> for IndexerInputs<'a, T> {
    /// Queries, keys and weights.
    fn from((query, key, weights): (&'a Tensor<T>, &'a Tensor<T>, &'a Tensor<W>)) -> Self {
        Self { query, key, weights }
    }
}

impl<'a, T: Element> IndexerInputs<'a, T> {
    /// The tensor of each argument.
    fn each(&self) -> [(Parameter, &'a AnyTensor); 3] {
        [(Parameter::Query, self.query), (Parameter::Key, self.key), (Parameter::Weights, self.weights)]
    }
}

/// What a launch writes.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct ChosenKeys<T: Element> {
    /// The chosen keys of each row, by their position in the sequence, and -1 after the last: `[B, S1, 1, count]` or
    /// `[T1, 1, count]`. On Atlas A2 and A3 the best come first; on Ascend 950 they are in no order.
    pub indices: Tensor<i32>,
    /// Their scores, and -inf where there is no key; empty unless they are asked for.
    pub values: Tensor<T>,
}

outputs! { ChosenKeys { indices, values } }

/// A call of LightningIndexer that was checked and prepared. From [`LightningIndexer::plan`].
///
/// A launch reads queries, keys and weights, and writes contiguous [`ChosenKeys`].
pub type IndexerPlan = operation::Plan<PlainOperation<LightningIndexer>>;

impl Sealed for LightningIndexer {}

impl PlainCall for LightningIndexer {
    type Inputs<'a, T: Element> = IndexerInputs<'a, T>;
    type Output<T: Element> = ChosenKeys<T>;
    type Parameter = Parameter;
    type Kept = SparseSequences;
    const OUTPUTS: &'static [Parameter] = &[Parameter::SparseIndices, Parameter::SparseValues];

    fn tensors<'t, 'i: 't, T: Element>(
        sequences: &'t SparseSequences,
        inputs: &'t IndexerInputs<'i, T>,
    ) -> impl Iterator<Item = (Parameter, &'t AnyTensor)> {
        inputs.each().into_iter().chain(sequences.each(IndexerCall::CONTENTS))
    }
}
