//! The sequences of a call: their visible keys, and the positions of their rows.

use super::Buffers;
use super::kv::block_table::BlockIds;
use super::kv::{KeyValues, KvTensor, Storage};
use super::mask::MaskSummary;
use super::tensor::input::{ElementTypes, InputTensor};
use super::tensor::strided::{Sizes, WriteTensor};
use crate::host_memory::HostMemoryExhausted;
use ascend_spec::attention_problem::{self, AttentionProblem, MaskRows, Rows, TensorRole};
use ascend_spec::{MaskGeometry, View};
use std::ops::Range;
use std::sync::Arc;

/// A sequence: one entry of the batch.
#[derive(Debug)]
pub(super) struct Sequence {
    /// Visible keys of each row, before the mask tensor.
    pub(super) geometry: MaskGeometry,
    pub(super) kv: KeyValues,
    /// Index on the batch axis of query and output.
    pub(super) batch: usize,
    /// Index of the first head on their axis of heads.
    head: usize,
    /// Number of rows to write: those of the geometry, followed by the rows around them, which have no keys.
    pub(super) rows: usize,
    /// Index of the first row on the tensors' row axis.
    first: usize,
    /// Size of the tensors' row axis.
    end: usize,
    /// Position of row 0 and key 0 in the position bias.
    pub(super) origin: (usize, usize),
    /// The positions of the sequence's rows in the mask tensor, if it is read.
    pub(super) mask: Option<MaskRows>,
    /// The positions of the sequence's bits in the drop mask, if there is one.
    pub(super) dropped: Option<View>,
    /// Maximum and sum of each row, if they are written.
    pub(super) softmax: Option<[WriteTensor<f32>; 2]>,
    /// Summary of the mask tensor, if there is one and a summary pays.
    pub(super) mask_summary: Option<Arc<MaskSummary>>,
}

impl Sequence {
    /// Sequence number `b` of a problem.
    ///
    /// # Errors
    /// There is no host memory for the blocks of a cache.
    ///
    /// # Safety
    ///
    /// As for [`super::run`], for as long as the value is used; tensors have the element types in `types`.
    pub(super) unsafe fn new(
        problem: &AttentionProblem<'_>,
        buffers: &Buffers<'_>,
        b: usize,
        (extent, mask): (attention_problem::SequenceRows, Option<MaskRows>),
        types: ElementTypes,
    ) -> Result<Self, HostMemoryExhausted> {
        let key_value = problem.key_value(b);
        let (batch, rows) = match &problem.pages {
            Some(pages) => (pages.blocks, pages.block_size),
            None => (key_value.batch + 1, extent.kv_first.saturating_add(extent.kv_len)),
        };
        let sizes = |batch, rows, dim| Sizes { batch, heads: problem.kv_heads, rows, dim };
        let source = |role, rows_of: &Rows, dim| {
            // SAFETY: the problem touches at least the valid rows of this tensor, or all of it where it is paged.
            unsafe { InputTensor::new(buffers.base(role), rows_of, sizes(batch, rows, dim), types) }
        };
        let shared = |role, rows: Option<Rows>, dim| match rows {
            Some(rows) => {
                let sizes = sizes(1, extent.prefix, dim);
                // SAFETY: the problem touches the prefix.
                unsafe { InputTensor::new(buffers.base(role), &rows, sizes, types) }
            }
            None => InputTensor::Absent,
        };
        let (prefix, index) = (&problem.prefix, key_value.list_index);
        Ok(Sequence {
            geometry: problem.geometry(b),
            kv: KeyValues {
                key: KvTensor {
                    dim: problem.head_dim,
                    own: source(TensorRole::Key(index), &key_value.key, problem.head_dim),
                    prefix: shared(TensorRole::KeyPrefix, prefix.map(|prefix| prefix.key), problem.head_dim),
                    rope: key_value.key_rope.map(|rope| source(TensorRole::KeyRope, &rope, problem.rope_dim)),
                },
                value: KvTensor {
                    dim: problem.value_dim,
                    own: source(TensorRole::Value(index), &key_value.value, problem.value_dim),
                    prefix: shared(TensorRole::ValuePrefix, prefix.map(|prefix| prefix.value), problem.value_dim),
                    rope: None,
                },
                prefix: extent.prefix,
                sequence: b,
                storage: match &problem.pages {
                    Some(pages) => {
                        // SAFETY: the problem touches the block table.
                        Storage::Pages(unsafe { BlockIds::read(buffers, pages, b, extent.kv_len) }?)
                    }
                    None => {
                        Storage::Rows { batch: key_value.batch, first: extent.kv_first, position: extent.kv_position }
                    }
                },
            },
            batch: if problem.packed { 0 } else { b },
            head: 0,
            rows: if problem.packed { extent.q_len } else { problem.query_rows },
            first: extent.q_first,
            end: problem.query_rows,
            origin: match problem.slopes {
                Some(_) => problem.positions(b, &extent),
                None => problem.origin(&extent),
            },
            mask,
            dropped: problem.terms_of(b).and_then(|terms| terms.dropped),
            // SAFETY: the problem touches the softmax outputs, and nothing else does.
            softmax: unsafe { softmax_outputs(problem, buffers, b, extent.q_len) },
            mask_summary: None,
        })
    }

    /// Sequence number `batch` of a problem without keys: it has all rows of the tensors.
    ///
    /// # Safety
    ///
    /// As for [`super::run`], for as long as the value is used.
    pub(super) unsafe fn without_keys(problem: &AttentionProblem<'_>, buffers: &Buffers<'_>, batch: usize) -> Self {
        let tensor = || KvTensor { dim: 0, own: InputTensor::Absent, prefix: InputTensor::Absent, rope: None };
        Sequence {
            geometry: MaskGeometry::full(0, 0),
            kv: KeyValues {
                key: tensor(),
                value: tensor(),
                prefix: 0,
                sequence: batch,
                storage: Storage::Rows { batch: 0, first: 0, position: 0 },
            },
            batch,
            head: 0,
            rows: problem.query_rows,
            first: 0,
            end: problem.query_rows,
            origin: (0, 0),
            mask: None,
            dropped: None,
            // SAFETY: the problem touches the softmax outputs, and nothing else does.
            softmax: unsafe { softmax_outputs(problem, buffers, batch, problem.query_rows) },
            mask_summary: None,
        }
    }

    /// Rows of the tensors, from a batch entry, head and row on, which see all of the listed keys. `softmax` is where
    /// maximum and sum of each go.
    pub(super) fn listed(
        (batch, head, rows): (usize, usize, Range<usize>),
        kv: KeyValues,
        softmax: Option<[WriteTensor<f32>; 2]>,
    ) -> Self {
        let keys = match &kv.storage {
            Storage::Listed(rows) => rows.len(),
            Storage::Rows { .. } | Storage::Pages(_) => 0,
        };
        Sequence {
            geometry: MaskGeometry::full(rows.len() as u64, keys as u64),
            kv,
            batch,
            head,
            rows: rows.len(),
            first: rows.start,
            end: rows.end,
            origin: (0, 0),
            mask: None,
            dropped: None,
            softmax,
            mask_summary: None,
        }
    }

    /// Whether the sequence's rows end before those of `next`, or are of another batch entry or head.
    pub(super) fn ends_before(&self, next: &Self) -> bool {
        let apart = self.batch != next.batch || self.head != next.head;
        apart || self.first + self.rows <= next.first
    }

    /// Position of a row in query, output and log-sum-exp. Rows past the last one of the tensors wrap around to the
    /// first.
    #[inline(always)]
    pub(super) fn at(&self, head: usize, row: usize) -> (usize, usize, usize) {
        let row = self.first + row;
        let row = if row < self.end { row } else { row - self.end };
        (self.batch, self.head + head, row)
    }

    /// The smallest range of keys in `within` that contains all that some row of `rows` sees.
    #[inline(always)]
    pub(super) fn span(&self, rows: Range<u64>, within: &Range<usize>) -> Range<usize> {
        let span = self.geometry.span(rows);
        // Both ends are at most the key length, a usize.
        let (start, end) = (span.start as usize, span.end as usize);
        let (start, end) = (start.max(within.start), end.min(within.end));
        start..end.max(start)
    }
}

/// The rows of a sequence in the softmax outputs, if they are written.
///
/// # Safety
///
/// As long as the value is used, the bytes of both that the problem touches may be written, and no other code
/// accesses them.
unsafe fn softmax_outputs(
    problem: &AttentionProblem<'_>,
    buffers: &Buffers<'_>,
    b: usize,
    rows: usize,
) -> Option<[WriteTensor<f32>; 2]> {
    let softmax = problem.softmax?;
    let output = |role, offset| {
        let (rows, extents) = problem.softmax_rows(b, rows, offset)?;
        // SAFETY: the problem touches the numbers of each row of the sequence.
        Some(unsafe { WriteTensor::new(buffers.base(role), &rows, extents.into()) })
    };
    Some([output(TensorRole::SoftmaxMax, softmax.max_offset)?, output(TensorRole::SoftmaxSum, softmax.sum_offset)?])
}
