//! NsaCompressAttentionInfer: attention to compressed tokens, whose weights select blocks of original tokens.
//!
//! [`NsaCompressAttentionInfer`] describes a call, which is planned once and launched per layer as an
//! [`NsaCompressAttentionPlan`]. Lengths and blocks of the sequences are a [`SparseSequences`], which the host knows.

use ascend_spec::nsa_compress_attention_infer_arguments;
use ascend_spec::ops::nsa_compress_attention_infer::{NsaCompressAttentionCall, Parameter, Version, rules};

use crate::error::Result;
use crate::memory::Element;
use crate::operator::{AllowedLints, EntryPoints, NamedTensors, entry_points, lints_of, phase_one};
use crate::ops::operation::{self, PlainCall, PlainOperation, Sealed, outputs};
use crate::ops::sparse_sequences::{SparseSequences, require_outputs, too_many_keys};
use crate::tensor::{AnyTensor, Tensor};

entry_points! {
    nsa_compress_attention_infer_arguments, NsaCompressAttentionCall<'_>, AnyArguments::NsaCompressAttentionInfer;
    Version::V1 => 1: aclnnNsaCompressAttentionInferGetWorkspaceSize, aclnnNsaCompressAttentionInfer;
}

/// What to do where the installed CANN has no such operator.
const INSTEAD: &str = "attend to all tokens, by FusedInferAttentionScore";

/// A call of NsaCompressAttentionInfer: attention to the compressed tokens of a paged cache, by whose weights each row
/// gets the blocks of original tokens that
/// [`NsaSelectedAttentionInfer`](crate::nsa_selected_attention_infer::NsaSelectedAttentionInfer) attends to.
///
/// Describe it, plan it for tensors of certain shapes, and launch the [`NsaCompressAttentionPlan`] once a layer.
///
/// Source: aclnnNsaCompressAttentionInfer, since CANN 8.5, on Atlas A2 and A3; elsewhere planning is an
/// [`Error::MissingOperator`](crate::Error::MissingOperator) or an [`Error::Violation`](crate::Error::Violation).
///
/// ```
/// use ascend_attention::nsa_compress_attention_infer::NsaCompressAttentionInfer;
/// use ascend_attention::sparse::SparseSequences;
/// use ascend_attention::{Runtime, f16};
///
/// # fn main() -> ascend_attention::Result<()> {
/// # #[cfg(feature = "emulation")] {
/// let stream = Runtime::emulated()?.device(0)?.stream()?;
/// // A row of 512 tokens, of which blocks of 32 every 16 tokens are compressed: 31 of them.
/// let query = stream.upload(&[f16::ONE; 64], [1, 1, 64])?;
/// let mut keys = vec![f16::ZERO; 64 * 64];
/// // The one that begins with token 272 is like the query.
/// keys[17 * 64..18 * 64].fill(f16::ONE);
/// let key = stream.upload(&keys, [1, 64, 64])?;
/// let value = stream.upload(&keys, [1, 64, 64])?;
/// let sequences = SparseSequences::packed(&stream, &[1], &[31])?.paged(&stream, &[[0]])?;
/// let plan = NsaCompressAttentionInfer::new(32, 16, 0.125)
///     .select(64, 4)
///     .original_lengths(&[512])
///     .plan(&sequences, (&query, &key, &value))?;
/// let chosen = plan.launch(&stream, (&query, &key, &value))?;
/// // The first of 8 blocks of 64 tokens and the last two always, and the one with token 272.
/// let mut blocks = chosen.selected.download(&stream)?;
/// blocks.sort();
/// assert_eq!(blocks, [0, 4, 6, 7]);
/// # }
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug)]
#[must_use = "a description does nothing until planned"]
pub struct NsaCompressAttentionInfer {
    /// Tokens of a compressed block, the distance of two, tokens of a selected block, and their number.
    sizes: [i64; 4],
    scale: f64,
    kv_heads: i64,
    original: Option<Vec<i64>>,
    allowed: AllowedLints,
}

impl NsaCompressAttentionInfer {
    /// A call with this factor of the scores, to tokens of which each was made of `block` tokens, one every `stride`.
    /// There is one key head, and 16 blocks of 64 tokens are selected.
    pub fn new(block: usize, stride: usize, scale: f64) -> Self {
        let [block, stride] = [block, stride].map(|size| i64::try_from(size).unwrap_or(i64::MAX));
        let sizes = [block, stride, 64, 16];
        Self { sizes, scale, kv_heads: 1, original: None, allowed: AllowedLints::default() }
    }

    /// Sets how many blocks of how many tokens are selected for each row and key head (`selectBlockSize` and
    /// `selectBlockCount`).
    pub fn select(mut self, block: usize, count: usize) -> Self {
        let [block, count] = [block, count].map(|size| i64::try_from(size).unwrap_or(i64::MAX));
        self.sizes[2..].copy_from_slice(&[block, count]);
        self
    }

    /// Sets the number of key heads (`numKeyValueHeads`).
    pub fn kv_heads(mut self, kv_heads: usize) -> Self {
        self.kv_heads = i64::try_from(kv_heads).unwrap_or(i64::MAX);
        self
    }

    /// Sets the original tokens of each sequence (`actualSelKvSeqLen`), by which rows do not see compressed tokens that
    /// reach behind their position. Sequences with several query rows need them.
    pub fn original_lengths(mut self, lengths: &[usize]) -> Self {
        let lengths = lengths.iter().map(|&length| i64::try_from(length).unwrap_or(i64::MAX));
        self.original = Some(lengths.collect());
        self
    }

    /// Lets a call through that breaks this lint, such as `nsa_compress_attention.forced`.
    pub fn allow_lint(mut self, id: &str) -> Self {
        self.allowed.lint(id);
        self
    }

    /// Checks a call with queries `[T, N1, D]` or `[B, S, N1, D]`, as in `sequences`, whose keys are the compressed
    /// tokens, and caches of keys and values `[blocks, page, N2 * D]`; and prepares it for tensors of these shapes and
    /// strides. Nothing is launched, and the tensors are not kept.
    ///
    /// # Errors
    /// Before any function of the operator is called: [`Error::Violation`](crate::Error::Violation), by
    /// `nsa_compress_attention.contents` for blocks that the cache does not have;
    /// [`Error::UnknownProduct`](crate::Error::UnknownProduct),
    /// [`Error::MissingOperator`](crate::Error::MissingOperator),
    /// [`ARGUMENT_DEVICE`](crate::rules::ARGUMENT_DEVICE) for tensors of different devices. After that
    /// [`Error::Aclnn`](crate::Error::Aclnn), should the operator refuse the call nevertheless.
    #[doc(alias = "aclnnNsaCompressAttentionInferGetWorkspaceSize")]
    pub fn plan<T: Element>(
        &self,
        sequences: &SparseSequences,
        tensors: (&Tensor<T>, &Tensor<T>, &Tensor<T>),
    ) -> Result<NsaCompressAttentionPlan> {
        let (query, key, _) = tensors;
        let context = query.memory().context();
        NsaCompressAttentionCall::check_device(Version::V1, context, INSTEAD, inputs(tensors))?;
        sequences.on(context)?;
        let ([queries, compressed], fixed) = sequences.lengths()?;
        let [block, stride, select, count] = self.sizes;
        let axes = query.desc().shape;
        let tensors: NamedTensors<'_, _> = Self::tensors(sequences, &tensors).collect();
        let mut call = NsaCompressAttentionCall {
            actual_q_seq_len: Some(&queries),
            actual_cmp_kv_seq_len: Some(&compressed),
            actual_sel_kv_seq_len: self.original.as_deref(),
            num_heads: axes.rank().checked_sub(2).and_then(|axis| axes.get(axis)).copied().unwrap_or(0),
            num_key_value_heads: self.kv_heads,
            select_block_size: select,
            select_block_count: count,
            compress_block_size: block,
            compress_block_stride: stride,
            scale: self.scale,
            layout: sequences.layouts()[0],
            page_block_size: key.desc().shape.get(1).copied().unwrap_or(0),
            ..NsaCompressAttentionCall::default()
        };
        call.describe(&tensors);
        let outputs = call.outputs();
        call.output = outputs.map(|[output, _]| output);
        call.top_k_output = outputs.map(|[_, selected]| selected);
        NsaCompressAttentionPlan::of_call((&call, Version::V1), query, &tensors, || {
            let target = context.target()?;
            require_outputs(outputs, query, || too_many_keys(self.sizes[3]))?;
            let problem = call.check(target)?;
            call.lint(target, &self.allowed.ids(lints_of::<Version>)?)?;
            let within = sequences.check(&problem.attention.sequences, &rules::CONTENTS, None, &[])?;
            Ok((PlainOperation::new(sequences.clone(), [fixed, within]), problem.is_idle()))
        })
    }
}

/// What a launch writes.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct CompressedAttention<T: Element> {
    /// Attention, with the shape of the queries and the elements of a value.
    pub out: Tensor<T>,
    /// The selected blocks of each row and key head, by their number in the sequence: `[T, N2, count]` or
    /// `[B, S, N2, count]`. The first block and the last two are always among them, in no particular order.
    pub selected: Tensor<i32>,
}

outputs! { CompressedAttention { out, selected } }

impl<T: Element> From<(Tensor<T>, Tensor<i32>)> for CompressedAttention<T> {
    /// Tensors to write attention and selected blocks into.
    fn from((out, selected): (Tensor<T>, Tensor<i32>)) -> Self {
        Self { out, selected }
    }
}

/// Queries, keys and values as arguments.
fn inputs<'a, T: Element>(
    (query, key, value): (&'a Tensor<T>, &'a Tensor<T>, &'a Tensor<T>),
) -> [(Parameter, &'a AnyTensor); 3] {
    [(Parameter::Query, query), (Parameter::Key, key), (Parameter::Value, value)]
}

/// A call of NsaCompressAttentionInfer that was checked and prepared. From [`NsaCompressAttentionInfer::plan`].
///
/// A launch reads queries and the caches of compressed keys and values, and writes contiguous [`CompressedAttention`].
pub type NsaCompressAttentionPlan = operation::Plan<PlainOperation<NsaCompressAttentionInfer>>;

impl Sealed for NsaCompressAttentionInfer {}

impl PlainCall for NsaCompressAttentionInfer {
    type Inputs<'a, T: Element> = (&'a Tensor<T>, &'a Tensor<T>, &'a Tensor<T>);
    type Output<T: Element> = CompressedAttention<T>;
    type Parameter = Parameter;
    type Kept = SparseSequences;
    const OUTPUTS: &'static [Parameter] = &[Parameter::Output, Parameter::TopKOutput];

    fn tensors<'t, 'i: 't, T: Element>(
        sequences: &'t SparseSequences,
        &tensors: &'t (&'i Tensor<T>, &'i Tensor<T>, &'i Tensor<T>),
    ) -> impl Iterator<Item = (Parameter, &'t AnyTensor)> {
        inputs(tensors).into_iter().chain(sequences.table(Parameter::BlockTable))
    }
}
