//! Where rows of queries, keys, values and outputs are in memory: in tensors, pages, and tensors of a few scalars.

use super::{AttentionProblem, TensorRole, size};
use crate::layout::{Axes, Extents, View};
use crate::{DType, TensorDesc};
use std::borrow::Cow;
use std::ops::Range;

/// Bytes of a tensor, counted from its base address.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ByteRange {
    /// The first byte.
    pub start: u64,
    /// The byte after the last one.
    pub end: u64,
}

impl ByteRange {
    /// The bytes of a description; `None` if no memory could hold them.
    pub(crate) fn described(desc: &TensorDesc) -> Option<Self> {
        let Range { start, end } = desc.byte_range()?;
        Some(ByteRange { start, end })
    }

    /// These bytes as a [`Range`].
    pub fn range(self) -> Range<u64> {
        self.start..self.end
    }
}

/// The rows of one tensor: where they are, and the type of their elements.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rows {
    /// Strides of the axes in elements; of `INT4`, in half bytes. Where `lanes` is not 0, `dim` is the stride from
    /// one group of `lanes` contiguous elements to the next.
    pub view: View,
    /// Number of contiguous elements in an NZ cache; 0 where `view.dim` is the stride of single elements.
    pub lanes: usize,
    /// Element type.
    pub dtype: DType,
}

impl Rows {
    /// No rows.
    pub(crate) const fn none(dtype: DType) -> Self {
        Rows { view: View::NONE, lanes: 0, dtype }
    }

    /// The rows of a tensor with these axes and head dimension `dim`, whose rank has been checked.
    pub(crate) fn new(axes: Axes, desc: &TensorDesc, dim: i64) -> Self {
        let view = axes.view(desc, dim).unwrap_or(View::NONE);
        let (view, dtype) = match desc.dtype {
            // Each INT32 holds eight INT4 elements, which are contiguous whatever the stride says.
            DType::Int32 => {
                let view = View {
                    offset: view.offset.saturating_mul(8),
                    batch: view.batch.saturating_mul(8),
                    head: match axes {
                        Axes::Bsh => dim,
                        _ => view.head.saturating_mul(8),
                    },
                    row: view.row.saturating_mul(8),
                    dim: 1,
                };
                (view, DType::Int4)
            }
            dtype => (view, dtype),
        };
        Rows { view, lanes: 0, dtype }
    }

    /// Element `dim` of the row `(batch, head, row)`, counted from the tensor's base address; saturates where no memory
    /// could hold it.
    pub fn element(&self, (batch, head, row): (usize, usize, usize), dim: usize) -> i64 {
        let group_size = self.lanes.max(1);
        let inside = if self.lanes == 0 { 0 } else { dim % group_size };
        let step = (dim / group_size) as i64;
        (self.view.at(batch, head, row))
            .saturating_add(step.saturating_mul(self.view.dim))
            .saturating_add(inside as i64)
    }

    /// The bytes that a tensor with these extents touches.
    pub(super) fn bytes(&self, extents: Extents) -> Option<Range<u64>> {
        let elements = match self.lanes as i64 {
            0 => self.view.elements(extents)?,
            lanes => {
                let groups = Extents { dim: extents.dim / lanes, ..extents };
                let range = self.view.elements(groups)?;
                range.start..range.end.checked_add(lanes as u64 - 1)?
            }
        };
        let bits = u64::from(self.dtype.bits());
        let (start, end) = (elements.start.checked_mul(bits)?, elements.end.checked_mul(bits)?);
        (bits > 0).then(|| start / 8..end.div_ceil(8))
    }
}

/// Where the keys and values of one sequence are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KeyValue {
    /// Index of the sequence's tensors in the list of keys and in the list of values.
    pub list_index: usize,
    /// Index of the sequence on the batch axis of all three tensors; of no use if the cache is paged.
    pub batch: usize,
    /// Key tensor; its batch axis counts blocks if the cache is paged.
    pub key: Rows,
    /// Value tensor; its batch axis counts blocks if the cache is paged.
    pub value: Rows,
    /// Rotary part of the key; its batch axis counts blocks if the cache is paged. Beside a list of keys, whose
    /// tensors have no batch axis, there is one rotary tensor for all sequences, and the view begins at this
    /// sequence.
    pub key_rope: Option<Rows>,
}

/// Keys and values where every sequence has its own tensors.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct KeyValueList<'a> {
    pub(crate) keys: Cow<'a, [TensorDesc]>,
    pub(crate) values: Cow<'a, [TensorDesc]>,
    /// Order of the tensors' axes.
    pub(crate) axes: Axes,
}

impl KeyValueList<'_> {
    /// These tensors in owned lists.
    pub(super) fn into_owned(self) -> KeyValueList<'static> {
        KeyValueList { keys: self.keys.into_owned().into(), values: self.values.into_owned().into(), axes: self.axes }
    }
}

impl AttentionProblem<'_> {
    /// Where the keys and values of sequence `b` are.
    pub fn key_value(&self, b: usize) -> KeyValue {
        let Some(list) = &self.list else {
            let shared = self.packed || self.pages.is_some();
            return KeyValue { batch: if shared { 0 } else { b }, ..self.first };
        };
        let one = |first: Rows, desc: Option<&TensorDesc>, dim: usize| {
            let own = desc.map(|desc| Rows::new(list.axes, desc, dim as i64));
            Rows { view: own.map_or(first.view, |own| own.view), ..first }
        };
        KeyValue {
            list_index: b,
            batch: 0,
            key: one(self.first.key, list.keys.get(b), self.head_dim),
            value: one(self.first.value, list.values.get(b), self.value_dim),
            key_rope: self.first.key_rope.map(|rope| Rows { view: rope.view.of_batch(b), ..rope }),
        }
    }

    /// Size of the row axis of the key tensor of sequence `b`; of a paged cache, the number of tokens that a row of
    /// the block table can hold.
    pub(crate) fn key_rows_of(&self, b: usize) -> usize {
        match self.list {
            Some(_) => self.key_axis_of(b),
            None => self.key_rows,
        }
    }

    /// Size of the row axis of the key tensor of sequence `b`, which is not paged.
    pub(crate) fn key_axis_of(&self, b: usize) -> usize {
        let Some(list) = &self.list else {
            return self.first_key_rows;
        };
        let axis = list.axes.row_axis();
        let rows = |key: &TensorDesc| key.shape.get(axis).copied().map(size);
        list.keys.get(b).and_then(rows).unwrap_or(0)
    }
}

/// A small tensor: scales, offsets, slopes, a block table, a padding. It is read element by element, within the bytes
/// of its description.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SmallTensor {
    /// Its role.
    pub role: TensorRole,
    /// Element type.
    pub dtype: DType,
    /// Offset of its first element from the base address, in elements.
    pub offset: i64,
    /// The bytes of its description; `None` if no memory could hold it.
    pub bytes: Option<ByteRange>,
}

impl SmallTensor {
    /// The tensor of a description, read as elements of `dtype`.
    pub(crate) fn new(role: TensorRole, desc: &TensorDesc, dtype: DType) -> Self {
        SmallTensor { role, dtype, offset: desc.offset, bytes: ByteRange::described(desc) }
    }
}

/// A paged cache and its block table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Pages {
    /// Number of tokens in a block.
    pub block_size: usize,
    /// Number of blocks in the cache; every block id is below it.
    pub blocks: usize,
    /// Block table, `INT32`.
    pub table: SmallTensor,
    /// Elements of the table from one sequence to the next.
    pub row: i64,
    /// Elements of the table from one block of a sequence to the next.
    pub column: i64,
    /// Number of blocks that a row of the table can name.
    pub columns: usize,
}

/// A shared prefix: keys and values that precede those of every sequence.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Prefix {
    /// Number of valid rows.
    pub len: usize,
    /// Key rows, of batch 0.
    pub key: Rows,
    /// Value rows, of batch 0.
    pub value: Rows,
}
