//! KvQuantSparseFlashAttention: latent attention to keys of one byte an element, which a list names for each row.
//!
//! [`KvQuantSparseFlashAttention`] describes a call, which is planned once and launched per layer as a
//! [`QuantSparseFlashPlan`]. Keys are rows that [`quantised_rows()`] makes, and lengths and blocks of the sequences a
//! [`SparseSequences`], which the host knows.

mod quantised_rows;

use ascend_spec::kv_quant_sparse_flash_attention_arguments;
use ascend_spec::ops::kv_quant_sparse_flash_attention::{Parameter, QuantSparseFlashCall, Version, rules};

use crate::error::Result;
use crate::memory::Element;
use crate::operator::{AllowedLints, EntryPoints, NamedTensors, entry_points, lints_of, phase_one};
use crate::ops::operation::{self, PlainCall, PlainOperation, Sealed};
use crate::ops::sparse_sequences::{SparseSequences, require_outputs, too_many_rows};
use crate::tensor::{AnyTensor, Tensor};
pub use quantised_rows::{RowElement, quantised_rows};

entry_points! {
    kv_quant_sparse_flash_attention_arguments, QuantSparseFlashCall<'_>, AnyArguments::KvQuantSparseFlashAttention;
    Version::V1 => 1: aclnnKvQuantSparseFlashAttentionGetWorkspaceSize, aclnnKvQuantSparseFlashAttention;
}

/// What to do where the installed CANN has no such operator.
const INSTEAD: &str = "keep keys in 16 bits, and attend by SparseFlashAttention";

/// A call of KvQuantSparseFlashAttention: as
/// [`SparseFlashAttention`](crate::sparse_flash::SparseFlashAttention), with keys of one byte an element.
///
/// Describe it, plan it for tensors of certain shapes, and launch the [`QuantSparseFlashPlan`] once a layer.
///
/// [`ScatterPaKvCache`](crate::scatter::ScatterPaKvCache) writes rows of `i8`, and on Ascend 950 of `Float8E4M3Fn`,
/// into a paged cache `[blocks, block size, 1, 656]`, as keys without values.
/// [`GatherPaKvCache`](crate::gather::GatherPaKvCache) cannot read them out on Atlas A2 and A3: 656 bytes are no
/// multiple of 32.
///
/// Source: aclnnKvQuantSparseFlashAttention, since CANN 8.5, on Ascend 950 since 9.0; before, planning is an
/// [`Error::MissingOperator`](crate::Error::MissingOperator) or an [`Error::Violation`](crate::Error::Violation).
///
/// ```
/// use ascend_attention::quant_sparse_flash::{KvQuantSparseFlashAttention, quantised_rows};
/// use ascend_attention::sparse::SparseSequences;
/// use ascend_attention::{Runtime, f16};
///
/// # fn main() -> ascend_attention::Result<()> {
/// # #[cfg(feature = "emulation")] {
/// let stream = Runtime::emulated()?.device(0)?.stream()?;
/// // One row with 8 heads, 512 elements and 64 rotary ones each, 4 keys, and a list of two of them.
/// let query = stream.upload(&[f16::ZERO; 8 * 576], [1, 8, 576])?;
/// let latents: Vec<f16> = (0..4).flat_map(|key| [f16::from_f32(key as f32); 512]).collect();
/// let rows: Vec<i8> = quantised_rows(&latents, &[f16::ZERO; 4 * 64])?;
/// let rows = stream.upload(&rows, [4, 1, 656])?;
/// let indices = stream.upload(&[1, 2, -1], [1, 1, 3])?;
/// let sequences = SparseSequences::packed(&stream, &[1], &[4])?;
/// let inputs = (&query, &rows, &indices);
/// // A query of zeros gives both keys the same weight. Heads have 128 elements and 64 rotary ones.
/// let plan = KvQuantSparseFlashAttention::new(192f64.sqrt().recip()).plan(&sequences, inputs)?;
/// let attention = plan.launch(&stream, inputs)?;
/// assert_eq!(attention.download(&stream)?, [f16::from_f32(1.5); 8 * 512]);
/// # }
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug)]
#[must_use = "a description does nothing until planned"]
pub struct KvQuantSparseFlashAttention {
    scale: f64,
    sparse_block_size: i64,
    causal: bool,
    allowed: AllowedLints,
}

impl KvQuantSparseFlashAttention {
    /// A call with this factor of the scores, of latent attention usually `1 / sqrt(192)` and not `1 / sqrt(576)`,
    /// since heads have 128 elements and 64 rotary ones before the projection is absorbed. Its lists name single keys
    /// up to the row's own position.
    pub fn new(scale: f64) -> Self {
        Self { scale, sparse_block_size: 1, causal: true, allowed: AllowedLints::default() }
    }

    /// Sets how many keys each entry of a list names (`sparseBlockSize`), 1 for the positions that an indexer gives.
    /// It is not the number of tokens of a cache's block.
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

    /// Lets a call through that breaks this lint, such as `quant_sparse_flash.none_chosen`.
    pub fn allow_lint(mut self, id: &str) -> Self {
        self.allowed.lint(id);
        self
    }

    /// Checks a call with queries and keys in the layouts of `sequences`, and prepares it for tensors of these shapes
    /// and strides. Nothing is launched, and the tensors are not kept.
    ///
    /// Nobody can see whether the rotary parts in the rows have the type of the queries, as the operator reads them:
    /// pass the queries' type to [`quantised_rows()`].
    ///
    /// # Errors
    /// Before any function of the operator is called: [`Error::Violation`](crate::Error::Violation), by
    /// `quant_sparse_flash.contents` for lengths and blocks that the tensors do not have;
    /// [`Error::UnknownProduct`](crate::Error::UnknownProduct),
    /// [`Error::MissingOperator`](crate::Error::MissingOperator),
    /// [`ARGUMENT_DEVICE`](crate::rules::ARGUMENT_DEVICE) for tensors of different devices. After that
    /// [`Error::Aclnn`](crate::Error::Aclnn), should the operator refuse the call nevertheless.
    #[doc(alias = "aclnnKvQuantSparseFlashAttentionGetWorkspaceSize")]
    pub fn plan<'a, T: Element>(
        &self,
        sequences: &SparseSequences,
        inputs: impl Into<QuantSparseFlashInputs<'a, T>>,
    ) -> Result<QuantSparseFlashPlan> {
        let inputs = inputs.into();
        let context = inputs.query.memory().context();
        QuantSparseFlashCall::check_device(Version::V1, context, INSTEAD, inputs.each())?;
        sequences.on(context)?;
        let [layout_query, layout_kv] = sequences.layouts();
        let tensors: NamedTensors<'_, _> = Self::tensors(sequences, &inputs).collect();
        let mut call = QuantSparseFlashCall {
            scale: self.scale,
            sparse_block_size: self.sparse_block_size,
            layout_query,
            layout_kv,
            sparse_mode: if self.causal { 3 } else { 0 },
            ..QuantSparseFlashCall::default()
        };
        call.describe(&tensors);
        call.attention_out = call.output();
        QuantSparseFlashPlan::of_call((&call, Version::V1), inputs.query, &tensors, || {
            let target = context.target()?;
            require_outputs(call.attention_out, inputs.query, || too_many_rows(inputs.query))?;
            let problem = call.check(target)?;
            let allowed = self.allowed.ids(lints_of::<Version>)?;
            call.lint(target, &allowed)?;
            let lints = [&rules::ROWS_LEFT_OUT, &rules::ROWS_WITHOUT_KEYS];
            let numbers = sequences.check(&problem.sequences, &rules::CONTENTS, lints, &allowed)?;
            Ok((PlainOperation::new(sequences.clone(), [numbers]), problem.is_idle()))
        })
    }
}

/// What a launch reads. From queries, rows of keys, and the lists of all rows. The rows are those that
/// [`quantised_rows()`] makes for queries of type `T`.
#[derive(Clone, Copy, Debug)]
pub struct QuantSparseFlashInputs<'a, T: Element> {
    query: &'a Tensor<T>,
    rows: &'a AnyTensor,
    indices: &'a Tensor<i32>,
}

impl<'a, T: Element, Q: RowElement> From<(&'a Tensor<T>, &'a Tensor<Q>, &'a Tensor<i32>)>
    for QuantSparseFlashInputs<'a, T>
{
    /// Queries, each followed by its rotary part, rows of keys, and lists.
    fn from((query, rows, indices): (&'a Tensor<T>, &'a Tensor<Q>, &'a Tensor<i32>)) -> Self {
        Self { query, rows, indices }
    }
}

impl<'a, T: Element> QuantSparseFlashInputs<'a, T> {
    /// The tensor of each argument. The keys are the values too.
    fn each(&self) -> [(Parameter, &'a AnyTensor); 4] {
        [
            (Parameter::Query, self.query),
            (Parameter::Key, self.rows),
            (Parameter::Value, self.rows),
            (Parameter::SparseIndices, self.indices),
        ]
    }
}

/// A call of KvQuantSparseFlashAttention that was checked and prepared. From [`KvQuantSparseFlashAttention::plan`].
///
/// A launch reads queries, rows of keys and lists, and writes contiguous attention, `[B, S1, N1, 512]` or
/// `[T1, N1, 512]`. A row without keys is 0.
pub type QuantSparseFlashPlan = operation::Plan<PlainOperation<KvQuantSparseFlashAttention>>;

impl Sealed for KvQuantSparseFlashAttention {}

impl PlainCall for KvQuantSparseFlashAttention {
    type Inputs<'a, T: Element> = QuantSparseFlashInputs<'a, T>;
    type Output<T: Element> = Tensor<T>;
    type Parameter = Parameter;
    type Kept = SparseSequences;
    const OUTPUTS: &'static [Parameter] = &[Parameter::AttentionOut];

    fn tensors<'t, 'i: 't, T: Element>(
        sequences: &'t SparseSequences,
        inputs: &'t QuantSparseFlashInputs<'i, T>,
    ) -> impl Iterator<Item = (Parameter, &'t AnyTensor)> {
        inputs.each().into_iter().chain(sequences.each(QuantSparseFlashCall::CONTENTS))
    }
}
