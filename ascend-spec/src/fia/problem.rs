//! A call that holds every rule, resolved to what a kernel needs.

use super::resolve::rows;
use super::rules::lengths;
use super::{Affine, Cache, Checker, FiaCall, Grid, MaskUse, Operand, Slopes};
use crate::layout::View;
use crate::{DType, Layout, MaskGeometry, SparseMode, Target, TensorDesc};
use std::ops::Range;

/// Which of the operator's two paths takes the call.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Route {
    /// Several query rows a sequence (CANN's prompt path).
    Prefill,
    /// One query row a sequence, or the absorbed form of multi-head latent attention (CANN's incremental path).
    Decode,
}

/// How much there is to do.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Work {
    /// The query is empty: success, nothing is written.
    Nothing,
    /// Key or value is empty: the output is filled with 0, the log-sum-exp with +inf.
    Fill,
    /// Attention.
    Attend,
}

/// Rows of one tensor: where they lie and what their elements are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rows {
    /// Axes. For `INT4` the unit is half a byte. Where `lanes` is not 0, `dim` is the stride from one run of `lanes`
    /// elements, which lie side by side, to the next.
    pub view: View,
    /// Elements in a run of an NZ cache; 0 where `view.dim` is the stride of single elements.
    pub lanes: usize,
    /// Element type.
    pub dtype: DType,
}

/// Where key and value of one sequence lie.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KeyValue {
    /// Index of the tensor in the key list and in the value list.
    pub list_index: usize,
    /// Index of the sequence on the batch axis of all three tensors; of no use where the cache is paged.
    pub batch: usize,
    /// Key tensor; its batch axis counts blocks where the cache is paged.
    pub key: Rows,
    /// Value tensor, as the key.
    pub value: Rows,
    /// Rotary part of the key, as the key. Beside a list, whose tensors have no batch axis, there is one tensor for all
    /// sequences, and the view begins at this one.
    pub key_rope: Option<Rows>,
}

/// A paged cache and its block table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Pages {
    /// How the cache lies.
    pub cache: Cache,
    /// Tokens in a block.
    pub block_size: usize,
    /// Blocks of the cache: ids are below this.
    pub blocks: usize,
    /// First element of the table, `INT32`.
    pub offset: i64,
    /// Elements from one sequence to the next.
    pub row: i64,
    /// Elements from one block of a sequence to the next.
    pub column: i64,
    /// Blocks that a row of the table can name.
    pub columns: usize,
}

/// A shared prefix: the keys before the first of every sequence.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Prefix {
    /// Valid rows.
    pub len: usize,
    /// Key rows; batch 0.
    pub key: Rows,
    /// Value rows; batch 0.
    pub value: Rows,
}

/// An INT8 query: three factors, read from tensors of one element.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Int8Query {
    /// Factor of the scores before the scale.
    pub deq_scale1: Grid,
    /// Factor of the weights, which are rounded to integers after it.
    pub quant_scale1: Grid,
    /// Factor of the output.
    pub deq_scale2: Grid,
}

/// Contents of the padding tensors, which only the device knows.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Padding {
    /// `queryPaddingSize`: rows after the last valid query row.
    pub query: i64,
    /// `kvPaddingSize`: rows after the last valid key row.
    pub key: i64,
}

/// Where the rows of one sequence are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Sequence {
    /// First valid row on the query's row axis; output, log-sum-exp and rotary part have the same.
    pub q_first: usize,
    /// Valid query rows.
    pub q_len: usize,
    /// First valid row on the key's row axis (of the first block where the cache is paged).
    pub kv_first: usize,
    /// Valid keys, without a shared prefix.
    pub kv_len: usize,
    /// Position of the first valid key in its sequence, which scales of single tokens count: rows before it are padding.
    pub kv_position: usize,
    /// Keys of the shared prefix, which come first.
    pub prefix: usize,
}

impl Sequence {
    /// Keys altogether.
    pub fn keys(&self) -> usize {
        self.prefix.saturating_add(self.kv_len)
    }
}

/// A call that holds every rule: sizes, strides, lengths and visibility, ready to compute.
///
/// Made by [`FiaCall::check`] alone, so that a kernel may rely on it: lengths lie within the tensors' axes, heads
/// divide, the mask covers every row and key that is looked up.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Problem<'a> {
    /// The call.
    pub call: &'a FiaCall<'a>,
    /// How much there is to do.
    pub work: Work,
    /// What the call was checked for.
    pub target: Target,
    /// Which of the operator's checks judged it.
    pub checker: Checker,
    /// Path.
    pub route: Route,
    /// Axis orders.
    pub layout: Layout,
    /// Number of sequences.
    pub batch: usize,
    /// Query heads.
    pub heads: usize,
    /// Key and value heads; divides `heads`.
    pub kv_heads: usize,
    /// Rows of the query's row axis: of one sequence, or of all where they are packed.
    pub query_rows: usize,
    /// Most keys that a sequence can have, without a shared prefix.
    pub key_rows: usize,
    /// Head dimension of query and key, without the rotary part.
    pub head_dim: usize,
    /// Head dimension of value and output.
    pub value_dim: usize,
    /// Head dimension of the rotary parts, 0 where there are none.
    pub rope_dim: usize,
    /// Sparse mode in force, after what the path ignores.
    pub mode: SparseMode,
    /// What the mask tensor is for.
    pub mask: MaskUse,
    /// Query.
    pub query: Rows,
    /// Rotary part of the query.
    pub query_rope: Option<Rows>,
    /// Output.
    pub out: Rows,
    /// Log-sum-exp (head dimension 1), if it is written.
    pub lse: Option<Rows>,
    /// Additive position bias; the view's `dim` steps over keys.
    pub pse: Option<Rows>,
    /// Position bias that is made of one slope a head.
    pub slopes: Option<Slopes>,
    /// Paged cache.
    pub pages: Option<Pages>,
    /// Shared prefix.
    pub prefix: Option<Prefix>,
    /// One logit a head that counts in maximum and sum and has no value.
    pub sink: Option<Grid>,
    /// What makes values of a quantised query.
    pub query_affine: Option<Affine>,
    /// What makes values of quantised keys.
    pub key_affine: Option<Affine>,
    /// What makes values of quantised values.
    pub value_affine: Option<Affine>,
    /// Whether the scales of query and key are also those of their rotary parts, which are stored divided by them.
    pub scaled_rope: bool,
    /// Factor of the probabilities before they are rounded (MXFP8). It leaves the output as it is and adds its logarithm
    /// to the log-sum-exp.
    pub probability_scale: Option<Grid>,
    /// An INT8 query outside of the absorbed form.
    pub int8_query: Option<Int8Query>,
    /// What makes numbers of a quantised output: `value * scale + offset`, rounded to its type.
    pub out_affine: Option<Affine>,
    /// Whether every sequence has its own key and value tensor.
    pub(super) kv_list: bool,
    /// Whether the padding of query and key is in force.
    pub(super) padded: (bool, bool),
    /// Whether tokens and mode are as if they hid nothing.
    pub(super) all_tokens: bool,
    /// Key and value of the first tensor; the others of a list have the same but for `row` strides.
    pub(super) first: KeyValue,
}

impl<'a> Problem<'a> {
    /// Most query rows, and most keys, of a sequence; beyond them the operator warns and promises nothing (check D15).
    pub const MOST_ROWS: usize = 20_971_520;

    /// Query heads that share one key head.
    pub fn group(&self) -> usize {
        self.heads / self.kv_heads.max(1)
    }

    /// Element type that products are computed in: the query's, or for a quantised query the output's half-precision type.
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

    /// Factor of the scores.
    pub fn scale(&self) -> f64 {
        self.call.scale
    }

    /// Whether sequences are packed behind one another.
    pub fn is_packed(&self) -> bool {
        self.layout.is_packed()
    }

    /// The padding tensors that count, for the caller to read and hand to [`Problem::sequence`].
    pub fn padding_operands(&self) -> (Option<Operand>, Option<Operand>) {
        (
            self.padded.0.then_some(Operand::QueryPaddingSize),
            self.padded.1.then_some(Operand::KvPaddingSize),
        )
    }

    /// Valid query rows of sequence `b`; rows of a padded query outside of them are written as 0 with log-sum-exp +inf.
    pub fn q_len(&self, b: usize) -> usize {
        if self.route == Route::Decode && !self.is_packed() {
            return self.query_rows;
        }
        let rows = self.query_rows as i64;
        size(lengths::q_len(self.call, self.layout, rows, b)).min(self.query_rows)
    }

    /// Valid keys of sequence `b`, without a shared prefix. The split-fuse path takes lengths beyond the block table: the
    /// keys there are in no block.
    pub fn kv_len(&self, b: usize) -> usize {
        let rows = self.kv_rows(b);
        let paged = self.pages.is_some();
        let most = match paged && self.checker == Checker::SplitFuse {
            true => usize::MAX,
            false => rows,
        };
        size(lengths::kv_len(
            self.call,
            self.layout,
            paged,
            rows as i64,
            b,
        ))
        .min(most)
    }

    /// Where the rows of sequence `b` are.
    pub fn sequence(&self, b: usize, padding: Padding) -> Sequence {
        let (q_len, kv_len) = (self.q_len(b), self.kv_len(b));
        let starts = |ends: Option<&[i64]>| match b.checked_sub(1) {
            Some(before) => size(ends.and_then(|ends| ends.get(before)).copied().unwrap_or(0)),
            None => 0,
        };
        let padded =
            |rows: usize, len: usize, pad: i64| rows.saturating_sub(size(pad)).saturating_sub(len);
        let (mut q_first, mut kv_first) = (0, 0);
        if self.is_packed() {
            q_first = starts(self.call.actual_seq_lengths).min(self.query_rows);
            if self.pages.is_none() {
                kv_first = starts(self.call.actual_seq_lengths_kv).min(self.key_rows);
            }
        }
        if self.padded.0 {
            q_first = padded(self.query_rows, q_len, padding.query);
        }
        if self.padded.1 {
            kv_first = padded(self.kv_rows(b), kv_len, padding.key);
        }
        // The split-fuse path takes ends that lead nowhere.
        let kv_most = match self.is_packed() && self.pages.is_none() {
            true => self.key_rows - kv_first,
            false => kv_len,
        };
        Sequence {
            kv_position: match self.padded.1 {
                true => kv_first,
                false => 0,
            },
            q_first,
            q_len: q_len.min(self.query_rows - q_first),
            kv_first,
            kv_len: kv_len.min(kv_most),
            prefix: self.prefix.map_or(0, |prefix| prefix.len),
        }
    }

    /// Visible keys of each row of sequence `b`, a shared prefix first, before a full mask tensor.
    pub fn geometry(&self, b: usize) -> MaskGeometry {
        let prefix = self.prefix.map_or(0, |prefix| prefix.len);
        let padded = self.padded.0 || self.padded.1;
        let tokens = |tokens: i64| {
            if self.all_tokens || (padded && self.mode == SparseMode::DefaultMask) {
                FiaCall::ALL_TOKENS
            } else {
                tokens
            }
        };
        MaskGeometry::new(
            self.mode,
            !matches!(self.mask, MaskUse::None),
            self.q_len(b) as u64,
            self.kv_len(b).saturating_add(prefix) as u64,
            tokens(self.call.pre_tokens),
            tokens(self.call.next_tokens),
        )
    }

    /// Whether a row that the mask tensor leaves without keys comes out as 0 (`inner_precise` 2 and 3). Otherwise the
    /// operator's additive masking makes it the mean of the values that [`Problem::geometry`] lets it see. Rows that
    /// the geometry leaves without keys are always 0.
    pub fn corrects_blind_rows(&self) -> bool {
        self.call.inner_precise & 2 != 0 || (self.target.is_950() && self.corrects_by_itself())
    }

    /// Whether Ascend 950 corrects them unasked: in latent attention, and in mode 0 with padding or where tokens leave a
    /// row without keys.
    fn corrects_by_itself(&self) -> bool {
        let latent = self.rope_dim > 0 || (self.head_dim, self.value_dim) == (192, 128);
        let masked = self.mode == SparseMode::DefaultMask && !matches!(self.mask, MaskUse::None);
        let band = |b| {
            let geometry = self.geometry(b);
            let last = geometry.q_len().saturating_sub(1);
            let blind = |row: u64| geometry.span(row..row + 1).is_empty();
            geometry.q_len() > 0 && geometry.kv_len() > 0 && (blind(0) || blind(last))
        };
        let padded = self.padded.0 || self.padded.1;
        latent || masked && (padded || self.looked_at().any(band))
    }

    /// Sequences that differ from one another; those behind are like the last of them.
    pub(in crate::fia) fn looked_at(&self) -> Range<usize> {
        0..lengths::distinct(self.call, self.batch)
    }

    /// Where key and value of sequence `b` lie.
    pub fn key_value(&self, b: usize) -> KeyValue {
        if !self.kv_list {
            return KeyValue {
                batch: if self.is_packed() || self.pages.is_some() {
                    0
                } else {
                    b
                },
                ..self.first
            };
        }
        let one = |first: Rows, desc: Option<&TensorDesc>, dim: usize| {
            let own = desc.map(|desc| rows(self.layout.input(), desc, dim as i64));
            Rows {
                view: own.map_or(first.view, |own| own.view),
                ..first
            }
        };
        KeyValue {
            list_index: b,
            batch: 0,
            key: one(self.first.key, self.call.key.get(b), self.head_dim),
            value: one(self.first.value, self.call.value.get(b), self.value_dim),
            key_rope: self.first.key_rope.map(|rope| Rows {
                view: rope.view.of_batch(b),
                ..rope
            }),
        }
    }

    /// Rows on the row axis of the key tensor of sequence `b`; of a paged cache, what its table row can hold.
    pub(in crate::fia) fn kv_rows(&self, b: usize) -> usize {
        if self.kv_list {
            self.kv_axis(b)
        } else {
            self.key_rows
        }
    }

    /// Rows on the row axis of a key tensor that is not paged.
    pub(in crate::fia) fn kv_axis(&self, b: usize) -> usize {
        let index = if self.kv_list { b } else { 0 };
        let axis = self.layout.input().row_axis();
        let rows = |key: &TensorDesc| key.shape.get(axis).copied().map(size);
        self.call.key.get(index).and_then(rows).unwrap_or(0)
    }
}

fn size(value: i64) -> usize {
    usize::try_from(value).unwrap_or(0)
}
