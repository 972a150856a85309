//! A call that holds every rule, resolved to what a kernel needs.

use super::FiaCall;
use crate::layout::{Extents, View};
use crate::{DType, Layout, MaskGeometry, SparseMode, TensorDesc};
use std::ops::Range;

/// Which of the operator's two paths takes the call.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Route {
    /// Several query rows a sequence (CANN's prompt path).
    Prefill,
    /// One query row a sequence (CANN's incremental path).
    Decode,
}

/// How a paged cache lies.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Cache {
    /// `[blocks, block size, heads * dim]`.
    BnBsH,
    /// `[blocks, heads, block size, dim]`.
    BnNBsD,
    /// `[blocks, heads, dim / c, block size, c]` with `c` elements in 32 bytes.
    Nz,
}

impl std::fmt::Display for Cache {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Cache::BnBsH => "BnBsH",
            Cache::BnNBsD => "BnNBsD",
            Cache::Nz => "NZ",
        })
    }
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

/// Strides, in elements (bytes), of a full mask tensor; an axis that is broadcast has stride 0.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MaskTensor {
    /// First element.
    pub offset: i64,
    /// From one batch entry to the next.
    pub batch: i64,
    /// From one query row to the next.
    pub row: i64,
    /// From one key to the next.
    pub key: i64,
}

impl MaskTensor {
    /// Element index of key 0 in row `i` of batch entry `b`.
    pub fn at(&self, b: usize, i: usize) -> i64 {
        self.offset
            .saturating_add((b as i64).saturating_mul(self.batch))
            .saturating_add((i as i64).saturating_mul(self.row))
    }
}

/// What the mask tensor is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MaskUse {
    /// There is none.
    None,
    /// It is the compressed mask of modes 2, 3 and 4: [`MaskGeometry`] says it all.
    Compressed,
    /// It hides keys on top of [`MaskGeometry`]: non-zero hides.
    Full(MaskTensor),
}

/// Where key and value of one batch entry lie.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KeyValue {
    /// Index of the tensor in the key list and in the value list.
    pub list_index: usize,
    /// Index of the batch entry within that tensor.
    pub batch: usize,
    /// Axes of the key tensor.
    pub key: View,
    /// Axes of the value tensor.
    pub value: View,
}

/// A tensor of a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[allow(missing_docs)] // The operator's argument names; the numbers are places in the tensor list.
pub enum Operand {
    Query,
    Key(usize),
    Value(usize),
    AttenMask,
    AttentionOut,
    SoftmaxLse,
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
    /// Rows of the query's sequence axis; lengths are at most this.
    pub query_rows: usize,
    /// Rows of the longest key tensor's sequence axis.
    pub key_rows: usize,
    /// Head dimension of query and key.
    pub head_dim: usize,
    /// Head dimension of value and output.
    pub value_dim: usize,
    /// Sparse mode in force, after what the path ignores.
    pub mode: SparseMode,
    /// What the mask tensor is for.
    pub mask: MaskUse,
    /// Axes of the query.
    pub query: View,
    /// Axes of the output.
    pub out: View,
    /// Axes of the log-sum-exp (head dimension 1), if it is written.
    pub lse: Option<View>,
    /// Whether every batch entry has its own key and value tensor.
    pub(super) kv_list: bool,
    pub(super) query_dtype: DType,
    pub(super) out_dtype: DType,
}

impl<'a> Problem<'a> {
    /// Query heads that share one key head.
    pub fn group(&self) -> usize {
        self.heads / self.kv_heads.max(1)
    }

    /// Element type of query, key and value.
    pub fn dtype(&self) -> DType {
        self.query_dtype
    }

    /// Element type of the output.
    pub fn out_dtype(&self) -> DType {
        self.out_dtype
    }

    /// Factor of the scores.
    pub fn scale(&self) -> f64 {
        self.call.scale
    }

    /// Valid query rows of sequence `b`; the rows after them are written as 0 with log-sum-exp +inf.
    pub fn q_len(&self, b: usize) -> usize {
        match (self.route, self.call.actual_seq_lengths) {
            (Route::Prefill, Some(lengths)) => {
                length(lengths, b, self.query_rows).min(self.query_rows)
            }
            _ => self.query_rows,
        }
    }

    /// Valid keys of sequence `b`.
    pub fn kv_len(&self, b: usize) -> usize {
        let rows = self.kv_rows(b);
        match self.call.actual_seq_lengths_kv {
            Some(lengths) => length(lengths, b, rows).min(rows),
            None => rows,
        }
    }

    /// Visible keys of each row of sequence `b`, before a full mask tensor.
    pub fn geometry(&self, b: usize) -> MaskGeometry {
        MaskGeometry::new(
            self.mode,
            !matches!(self.mask, MaskUse::None) && self.route == Route::Prefill,
            self.q_len(b) as u64,
            self.kv_len(b) as u64,
            self.call.pre_tokens,
            self.call.next_tokens,
        )
    }

    /// Whether a row that the mask tensor leaves without keys comes out as 0 (`inner_precise` 2 and 3). Otherwise the
    /// operator's additive masking makes it the mean of the values that [`Problem::geometry`] lets it see. Rows that
    /// the geometry leaves without keys are always 0.
    pub fn corrects_blind_rows(&self) -> bool {
        self.call.inner_precise & 2 != 0
    }

    /// Where key and value of sequence `b` lie.
    pub fn key_value(&self, b: usize) -> Option<KeyValue> {
        let list_index = if self.kv_list { b } else { 0 };
        let axes = self.layout.input();
        Some(KeyValue {
            list_index,
            batch: if self.kv_list { 0 } else { b },
            key: axes.view(self.call.key.get(list_index)?, self.head_dim as i64)?,
            value: axes.view(self.call.value.get(list_index)?, self.value_dim as i64)?,
        })
    }

    /// Calls `visit` with every tensor that the call touches and the bytes it touches, from the tensor's base address.
    /// `None` for a range means that no memory could hold it.
    pub fn touches(&self, visit: &mut dyn FnMut(Operand, Option<Range<u64>>)) {
        if self.work == Work::Nothing {
            return;
        }
        let extents = |heads: usize, rows: usize, dim: usize| Extents {
            batch: self.batch as i64,
            heads: heads as i64,
            rows: rows as i64,
            dim: dim as i64,
        };
        let out = extents(self.heads, self.query_rows, self.value_dim);
        visit(Operand::AttentionOut, bytes(&self.out, out, self.out_dtype));
        if let Some(lse) = &self.lse {
            let of = extents(self.heads, self.query_rows, 1);
            visit(Operand::SoftmaxLse, bytes(lse, of, DType::Float));
        }
        if self.work == Work::Fill {
            return;
        }
        let query = extents(self.heads, self.query_rows, self.head_dim);
        visit(Operand::Query, bytes(&self.query, query, self.query_dtype));
        let tensors = if self.kv_list { self.batch } else { 1 };
        for b in 0..tensors {
            let Some(at) = self.key_value(b) else {
                continue;
            };
            let mut key = extents(self.kv_heads, self.kv_rows(b), self.head_dim);
            if self.kv_list {
                key.batch = 1;
            }
            let value = Extents {
                dim: self.value_dim as i64,
                ..key
            };
            visit(Operand::Key(b), bytes(&at.key, key, self.query_dtype));
            visit(Operand::Value(b), bytes(&at.value, value, self.query_dtype));
        }
        if let (false, Some(mask)) = (self.mask == MaskUse::None, self.call.mask()) {
            visit(Operand::AttenMask, mask.byte_range());
        }
    }

    /// Rows of the sequence axis of the key tensor of sequence `b`.
    fn kv_rows(&self, b: usize) -> usize {
        let index = if self.kv_list { b } else { 0 };
        let rows = |key: &TensorDesc| {
            let extents = self
                .layout
                .input()
                .extents(&key.shape, self.kv_heads as i64)?;
            usize::try_from(extents.rows).ok()
        };
        self.call.key.get(index).and_then(rows).unwrap_or(0)
    }
}

/// Entry `b` of a length array: an empty one means `all`, one entry stands for every sequence.
fn length(lengths: &[i64], b: usize, all: usize) -> usize {
    let entry = match lengths {
        [] => return all,
        [one] => Some(one),
        several => several.get(b),
    };
    entry
        .and_then(|&len| usize::try_from(len).ok())
        .unwrap_or(0)
}

fn bytes(view: &View, of: Extents, dtype: DType) -> Option<Range<u64>> {
    let elements = view.elements(of)?;
    let size = dtype.size()? as u64;
    Some(elements.start.checked_mul(size)?..elements.end.checked_mul(size)?)
}
