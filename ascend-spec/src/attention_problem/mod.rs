//! What a kernel computes: attention, stated without the arguments of any operator.
//!
//! An operator's own code checks a call and resolves it into an [`AttentionProblem`]: sizes, the places of all rows
//! in memory, lengths, visible keys, scales. Tensors are named by their [`TensorRole`]; the operator maps each role
//! to the argument that plays it.

mod bias_contents;
mod grid;
mod position_bias;
mod role;
mod rows;
mod scale;
mod sequence_terms;
mod sequences;
mod soft_cap;
mod touches;
mod visibility;

pub use bias_contents::{BiasFaults, BiasNumber};
pub(crate) use bias_contents::{BiasLints, as_held, lint_bias};
pub use grid::{Counts, Cut, Cuts, Grid};
pub use grid::{Int8Query, ScaleOffset};
pub use position_bias::{BiasTensor, Slopes};
pub use role::TensorRole;
pub use rows::SmallTensor;
pub use rows::{ByteRange, KeyValue, Rows};
pub use rows::{Pages, Prefix};
pub(crate) use scale::lint_scale;
pub use scale::{inverted_scale, score_scale};
pub use sequence_terms::{Dropout, SequenceTerms, SoftmaxOutputs};
pub use sequences::{Padding, SequenceLengths, SequenceRows};
pub use soft_cap::SoftCap;
pub use visibility::{MaskRows, MaskTensor, MaskUse, TreeMask};

use crate::layout::Extents;
use crate::operator::{Argument, ArgumentList, DeclaredVersion, EntryPoint};
use crate::{DType, SparseMode, Target, TensorDesc, Violation};
pub(crate) use rows::KeyValueList;

/// What a kernel has to do for a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Work {
    /// Nothing is written, because the query or every output is empty.
    Nothing,
    /// The output and the softmax outputs are filled with 0 and the log-sum-exp with +inf, because an input is empty.
    Fill,
    /// Attention.
    Attend,
}

/// Attention to compute: sizes, strides, lengths and visibility of a call that an operator has checked.
///
/// Only an operator's check makes one, so a kernel may rely on it: lengths lie within the tensors' axes, and the mask
/// covers every row and key that is read.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct AttentionProblem<'a> {
    /// What a kernel has to do.
    pub work: Work,
    /// Number of sequences.
    pub batch: usize,
    /// Number of query heads.
    pub heads: usize,
    /// Number of key and value heads. It divides `heads` except in packed calls that break the lint
    /// `split_fuse.heads_divide`.
    pub kv_heads: usize,
    /// Size of the query's row axis: the rows of one sequence, or of all sequences if they are packed.
    pub query_rows: usize,
    /// The most keys that a sequence can have, without a shared prefix.
    pub key_rows: usize,
    /// Head dimension of query and key, without the rotary part.
    pub head_dim: usize,
    /// Head dimension of value and output.
    pub value_dim: usize,
    /// Head dimension of the rotary parts; 0 without them.
    pub rope_dim: usize,
    /// Whether the sequences are packed one after another on the row axis, without a batch axis.
    pub packed: bool,
    /// Factor of the scores.
    pub scale: f64,
    /// Cap of the scaled scores. No operator has one: an operator's check leaves it out.
    pub soft_cap: Option<SoftCap>,
    /// Query lengths.
    pub query_lengths: SequenceLengths<'a>,
    /// Key lengths, without a shared prefix.
    pub key_lengths: SequenceLengths<'a>,
    /// Whether a key length may exceed what the block table holds; the keys beyond are in no block.
    pub keys_beyond_table: bool,
    /// Number of rows after the last valid query row of each sequence, if the query is left padded. `INT64`.
    pub query_padding: Option<SmallTensor>,
    /// Number of rows after the last valid key of each sequence, if the keys are left padded. `INT64`.
    pub key_padding: Option<SmallTensor>,
    /// Sparse mode in force.
    pub mode: SparseMode,
    /// Keys visible before and after the diagonal.
    pub tokens: (i64, i64),
    /// What the mask tensor is for.
    pub mask: MaskUse,
    /// The bytes of the mask tensor by its description; `None` without one, or if no memory could hold it.
    pub mask_described: Option<ByteRange>,
    /// Whether a row is written as 0 if the mask tensor hides all its keys. Otherwise it is the mean of the values
    /// that [`AttentionProblem::geometry`] lets it see. Rows that the geometry leaves without keys are always 0.
    pub zeroes_masked_rows: bool,
    /// Query.
    pub query: Rows,
    /// Rotary part of the query.
    pub query_rope: Option<Rows>,
    /// Output.
    pub out: Rows,
    /// Log-sum-exp, with head dimension 1, if it is written.
    pub lse: Option<Rows>,
    /// Additive position bias from a tensor.
    pub bias: Option<BiasTensor>,
    /// Additive position bias from one slope for each head.
    pub slopes: Option<Slopes>,
    /// Paged cache.
    pub pages: Option<Pages>,
    /// Shared prefix.
    pub prefix: Option<Prefix>,
    /// Attention sink: for each head a logit that counts in maximum and sum and has no value.
    pub sink: Option<Grid>,
    /// Dequantisation of the query.
    pub query_quantisation: Option<ScaleOffset>,
    /// Dequantisation of the keys.
    pub key_quantisation: Option<ScaleOffset>,
    /// Dequantisation of the values.
    pub value_quantisation: Option<ScaleOffset>,
    /// Whether the scales of query and key also apply to their rotary parts, which are stored divided by them.
    pub scaled_rope: bool,
    /// Factor of the weights before they are rounded (MXFP8). It does not change the output and adds its logarithm to
    /// the log-sum-exp.
    pub probability_scale: Option<Grid>,
    /// Factors of an `INT8` query that is multiplied with `INT8` keys.
    pub int8_query: Option<Int8Query>,
    /// Quantisation of the output: `value * scale + offset`, rounded to its type.
    pub out_quantisation: Option<ScaleOffset>,
    /// Dropout.
    pub dropout: Option<Dropout>,
    /// Maximum and sum of each row, if they are written. A row whose keys are all hidden by a mask tensor is then the
    /// mean of all values, unless such rows are zeros.
    pub softmax: Option<SoftmaxOutputs>,
    /// Visible keys, mask, bias and softmax outputs of each sequence; empty where the fields above hold for all
    /// sequences.
    pub terms: Vec<SequenceTerms>,
    /// Key and value of the first tensor; the others of a list differ in their strides.
    pub(crate) first: KeyValue,
    /// The tensors of keys and values, if every sequence has its own.
    pub(crate) list: Option<KeyValueList<'a>>,
    /// Size of the row axis of the first key tensor; of no use if the cache is paged.
    pub(crate) first_key_rows: usize,
}

impl<'a> AttentionProblem<'a> {
    /// A problem of size 0 with tensors of `dtype`; an operator fills in the fields that its call has.
    pub(crate) fn blank(dtype: DType) -> AttentionProblem<'a> {
        let none = Rows::none(dtype);
        AttentionProblem {
            work: Work::Nothing,
            batch: 0,
            heads: 0,
            kv_heads: 0,
            query_rows: 0,
            key_rows: 0,
            head_dim: 0,
            value_dim: 0,
            rope_dim: 0,
            packed: false,
            scale: 1.0,
            soft_cap: None,
            query_lengths: SequenceLengths::All,
            key_lengths: SequenceLengths::All,
            keys_beyond_table: false,
            query_padding: None,
            key_padding: None,
            mode: SparseMode::DefaultMask,
            tokens: (0, 0),
            mask: MaskUse::None,
            mask_described: None,
            zeroes_masked_rows: false,
            query: none,
            query_rope: None,
            out: none,
            lse: None,
            bias: None,
            slopes: None,
            pages: None,
            prefix: None,
            sink: None,
            query_quantisation: None,
            key_quantisation: None,
            value_quantisation: None,
            scaled_rope: false,
            probability_scale: None,
            int8_query: None,
            out_quantisation: None,
            dropout: None,
            softmax: None,
            terms: Vec::new(),
            first: KeyValue { list_index: 0, batch: 0, key: none, value: none, key_rope: None },
            list: None,
            first_key_rows: 0,
        }
    }
}

impl AttentionProblem<'_> {
    /// Number of query heads that share a key head. Query heads left over by the division belong to no key head, and
    /// nothing is computed for them.
    pub fn group(&self) -> usize {
        self.heads.checked_div(self.kv_heads).unwrap_or(0)
    }

    /// Whether every query head belongs to a key head.
    pub(crate) fn is_grouped(&self) -> bool {
        self.kv_heads.saturating_mul(self.group()) == self.heads
    }

    /// Element type of the weights: the query's, or for a quantised query the output's half-precision type.
    pub fn dtype(&self) -> DType {
        match (self.query.dtype, self.out.dtype) {
            (DType::Int8 | DType::Float8E4M3Fn | DType::HiFloat8, out) if out.is_half() => out,
            (DType::Int8 | DType::Float8E4M3Fn | DType::HiFloat8, _) => DType::Float16,
            (query, _) => query,
        }
    }

    /// Element type of the output.
    pub fn out_dtype(&self) -> DType {
        self.out.dtype
    }

    /// Whether query or keys are left padded.
    pub(crate) fn is_padded(&self) -> bool {
        self.query_padding.is_some() || self.key_padding.is_some()
    }
}

/// Sizes of batch, heads, rows and head dimension as the extents of a tensor.
fn extents(sizes: [usize; 4]) -> Extents {
    let [batch, heads, rows, dim] = sizes.map(|size| i64::try_from(size).unwrap_or(i64::MAX));
    Extents { batch, heads, rows, dim }
}

/// A dimension of a description as a size; a negative one counts as 0.
pub(crate) fn size(value: i64) -> usize {
    usize::try_from(value).unwrap_or(0)
}

/// The arguments of an attention operator.
pub trait AttentionArguments: ArgumentList<Tensor = TensorDesc> {
    /// The operator's versions.
    type Version: DeclaredVersion;

    /// Checks a call of a version for a target, reports each lint that the call breaks, and returns what it computes;
    /// `None` for a call that computes nothing.
    ///
    /// # Errors
    /// [`Violation`] by the first broken rule, or [`UNSUPPORTED`](crate::UNSUPPORTED) for what no kernel computes.
    fn resolve(
        &self,
        version: Self::Version,
        target: Target,
        report: &mut dyn FnMut(Violation),
    ) -> Result<Option<AttentionProblem<'static>>, Violation>;

    /// The argument whose tensor plays a role; `None` for roles that the operator has no argument for.
    fn of_role(role: TensorRole) -> Option<Argument<Self::Parameter>>;

    /// The parameters of a version's entry point.
    fn entry_point(version: Self::Version) -> EntryPoint<Self::Parameter> {
        EntryPoint::Version(version.info().number())
    }
}
