//! The storage of a sequence's keys and values: rows of a tensor, pages of a cache, and a shared prefix.

pub(crate) mod block_table;
pub(crate) mod listed_rows;
pub(crate) mod tile_rows;

use super::SUB_TILE_KEYS;
use super::dequantise::{Quantisation, ScalePosition};
use super::prefetch::{PrefetchRows, TilePrefetch};
use super::simd::{Simd, Vector, WIDTH};
use super::tensor::input::{InPlaceElement, InputTensor, clear};
use block_table::BlockIds;
use half::{bf16, f16};
use listed_rows::ListedRows;
use std::ops::Range;
use tile_rows::StridedRows;

/// The keys, or the values, of a sequence.
#[derive(Debug)]
pub(crate) struct KvTensor {
    /// Elements of a row, without the rotary part.
    pub(crate) dim: usize,
    /// The tensor of the sequence's own rows, or the paged cache.
    pub(crate) own: InputTensor,
    /// The tensor of the shared prefix, whose rows precede the sequence's own.
    pub(crate) prefix: InputTensor,
    /// The rotary part, which continues each row.
    pub(crate) rope: Option<InputTensor>,
}

/// The keys and values of a sequence. Those of the shared prefix come first.
#[derive(Debug)]
pub(crate) struct KeyValues {
    pub(crate) key: KvTensor,
    pub(crate) value: KvTensor,
    /// Number of keys in the shared prefix.
    pub(crate) prefix: usize,
    /// Number of the sequence in the batch.
    pub(crate) sequence: usize,
    pub(crate) storage: Storage,
}

/// How a sequence's own rows are stored.
#[derive(Debug)]
pub(crate) enum Storage {
    /// Consecutive rows, from row `first` on, at `batch` of the batch axis.
    Rows {
        batch: usize,
        first: usize,
        /// Position of the first row in the sequence; the rows before it are padding.
        position: usize,
    },
    /// In the pages of a cache.
    Pages(BlockIds),
    /// Where a list says.
    Listed(ListedRows),
}

/// The position of a key's row in memory.
#[derive(Clone, Copy, Debug)]
struct RowPosition {
    in_prefix: bool,
    batch: usize,
    row: usize,
    scale: ScalePosition,
}

/// The segment of rows that was found last. The next rows to prefetch are often in it, too.
#[derive(Debug)]
pub(crate) struct PrefetchedRows {
    keys: Range<usize>,
    rows: PrefetchRows,
}

impl PrefetchedRows {
    pub(crate) const NONE: PrefetchedRows = PrefetchedRows { keys: 0..0, rows: PrefetchRows::NONE };

    /// Whether the segment contains the row of `key`.
    #[inline(always)]
    pub(crate) fn contains(&self, key: usize) -> bool {
        self.keys.contains(&key)
    }
}

/// A segment of the rows of keys, or of values.
#[derive(Clone, Copy, Debug)]
pub(crate) struct RowsInPlace<T> {
    pub(crate) rows: StridedRows<T>,
    /// Their rotary parts; `None` where there are none, or none that are whole vectors of `T`.
    pub(crate) rope: Option<StridedRows<T>>,
}

impl<T> RowsInPlace<T> {
    /// The rows, and their rotary parts.
    #[inline(always)]
    pub(crate) fn all(self) -> impl Iterator<Item = StridedRows<T>> {
        std::iter::once(self.rows).chain(self.rope)
    }
}

impl KeyValues {
    /// The position of a key's row; `None` if the cache does not have its block.
    #[inline(always)]
    fn position(&self, key: usize) -> Option<RowPosition> {
        let position_at = |in_prefix, batch, row, token| RowPosition {
            in_prefix,
            batch,
            row,
            scale: ScalePosition { sequence: (self.sequence, token), stored: (batch, row) },
        };
        if key < self.prefix {
            return Some(position_at(true, 0, key, key));
        }
        let own = key - self.prefix;
        Some(match &self.storage {
            Storage::Rows { batch, first, position } => position_at(false, *batch, first + own, position + own),
            Storage::Pages(blocks) => {
                let (block, row) = blocks.find(own)?;
                position_at(false, block, row, own)
            }
            Storage::Listed(rows) => {
                let (batch, row) = rows.find(own)?;
                position_at(false, batch, row, own)
            }
        })
    }

    /// Widens the row of a key of `tensor`, followed by its rotary part: vector `i` goes to `out[i * step]`. Adds NaN
    /// to `nonfinite` if an element is not finite. If the cache does not have a key's block, the row is zeros.
    #[inline(always)]
    pub(crate) fn read<S: Simd>(
        &self,
        simd: S,
        tensor: &KvTensor,
        quantisation: Option<&Quantisation>,
        (head, key): (usize, usize),
        out: (&mut [Vector], usize),
        nonfinite: &mut S::Register,
    ) {
        let position = self.position(key);
        tensor.read(simd, quantisation, position, head, out, nonfinite);
    }

    /// Whether each value is the beginning of its key, as in latent attention.
    pub(crate) fn values_are_keys(&self) -> bool {
        let (key, value) = (&self.key, &self.value);
        self.prefix == 0 && value.dim <= key.dim && key.own.coincides(&value.own)
    }

    /// Scale and offset of each of the rows `keys`, which are those of a sub-tile.
    pub(crate) fn of_rows(
        &self,
        quantisation: &Quantisation,
        head: usize,
        keys: Range<usize>,
    ) -> [(f32, f32); SUB_TILE_KEYS] {
        let mut of_rows = [(0.0, 0.0); SUB_TILE_KEYS];
        for (of_row, key) in of_rows.iter_mut().zip(keys) {
            if let Some(position) = self.position(key) {
                *of_row = quantisation.of_row(position.scale, head);
            }
        }
        of_rows
    }

    /// The longest segment at the beginning of the rows `keys` of `tensor`. Returns `None` unless the rows, without
    /// their rotary parts, are whole vectors of `T`.
    #[inline(always)]
    pub(crate) fn rows_in_place<T: InPlaceElement>(
        &self,
        tensor: &KvTensor,
        head: usize,
        keys: Range<usize>,
    ) -> Option<RowsInPlace<T>> {
        if keys.is_empty() {
            return None;
        }
        let position = self.position(keys.start)?;
        let left = match &self.storage {
            _ if position.in_prefix => self.prefix - keys.start,
            Storage::Rows { .. } => keys.len(),
            Storage::Pages(blocks) => blocks.size() - position.row,
            Storage::Listed(rows) => rows.run(keys.start, keys.len()),
        };
        let count = left.min(keys.len());
        let rows_of = |tensor: &InputTensor, dim: usize| {
            let tensor = T::of(tensor).filter(|tensor| tensor.sizes().dim == dim)?;
            let (first, pitch) = tensor.rows_in_place((position.batch, head, position.row), count)?;
            // SAFETY: the rows exist, as `ReadTensor::rows_in_place` checked, and may be read by the contract of their
            // tensor.
            Some(unsafe { StridedRows::new(first, pitch, count, dim / WIDTH) })
        };
        let rope = tensor.rope.as_ref().filter(|_| !position.in_prefix);
        Some(RowsInPlace {
            rows: rows_of(if position.in_prefix { &tensor.prefix } else { &tensor.own }, tensor.dim)?,
            rope: rope.and_then(|rope| rows_of(rope, rope.sizes().dim)),
        })
    }

    /// Whether rows that follow each other in the sequence may each be anywhere.
    #[inline(always)]
    pub(crate) fn is_listed(&self) -> bool {
        matches!(self.storage, Storage::Listed(_))
    }

    /// The rows `keys` of `tensor` to prefetch, in at most two segments. Takes the first segment from `found` if it
    /// contains the first key; otherwise finds it, up to key `end`, and stores it in `found`.
    #[inline(always)]
    pub(crate) fn rows_to_prefetch<T: InPlaceElement>(
        &self,
        tensor: &KvTensor,
        head: usize,
        keys: Range<usize>,
        (found, end): (&mut PrefetchedRows, usize),
    ) -> [PrefetchRows; 2] {
        let rows = |keys| {
            let rows = self.rows_in_place::<T>(tensor, head, keys);
            rows.map_or(PrefetchRows::NONE, |found| found.rows.to_prefetch())
        };
        if !found.contains(keys.start) {
            found.rows = rows(keys.start..end);
            found.keys = keys.start..keys.start + found.rows.count();
        }
        let first = found.rows.part(keys.start - found.keys.start, keys.len());
        let left = keys.start + first.count()..keys.end;
        let second = match first.count() {
            0 => PrefetchRows::NONE,
            _ => rows(left),
        };
        [first, second]
    }

    /// Adds the rows `keys` of `tensor` to `prefetch`. Rows that are not whole vectors of one type are left to the
    /// hardware prefetcher.
    pub(crate) fn prefetch(&self, tensor: &KvTensor, head: usize, keys: &Range<usize>, prefetch: &mut TilePrefetch) {
        match &tensor.own {
            InputTensor::F32(_) => self.prefetch_as::<f32>(tensor, head, keys, prefetch),
            InputTensor::F16(_) => self.prefetch_as::<f16>(tensor, head, keys, prefetch),
            InputTensor::Bf16(_) => self.prefetch_as::<bf16>(tensor, head, keys, prefetch),
            InputTensor::Int8(_) => self.prefetch_as::<i8>(tensor, head, keys, prefetch),
            InputTensor::E4m3(_)
            | InputTensor::HiFloat8(_)
            | InputTensor::FourBit(_)
            | InputTensor::QuantisedRows(_)
            | InputTensor::Absent => {}
        }
    }

    fn prefetch_as<T: InPlaceElement>(
        &self,
        tensor: &KvTensor,
        head: usize,
        keys: &Range<usize>,
        prefetch: &mut TilePrefetch,
    ) {
        let mut keys = keys.clone();
        while let Some(found) = self.rows_in_place::<T>(tensor, head, keys.clone()) {
            keys.start += found.rows.count();
            found.all().for_each(|rows| prefetch.add(rows.to_prefetch()));
        }
    }
}

impl KvTensor {
    #[inline(always)]
    fn read<S: Simd>(
        &self,
        simd: S,
        quantisation: Option<&Quantisation>,
        position: Option<RowPosition>,
        head: usize,
        (out, step): (&mut [Vector], usize),
        nonfinite: &mut S::Register,
    ) {
        let vectors = self.dim.div_ceil(WIDTH);
        let Some(position) = position else {
            let rope = self.rope.map_or(0, |rope| rope.sizes().dim);
            clear(out, step, vectors + rope.div_ceil(WIDTH));
            return;
        };
        let tensor = if position.in_prefix { &self.prefix } else { &self.own };
        let row = (position.batch, head, position.row);
        tensor.read(simd, row, 0..self.dim, out, step, nonfinite);
        if let Some(quantisation) = quantisation {
            let row = (&mut *out, step, self.dim);
            quantisation.dequantise(simd, position.scale, head, row, nonfinite);
        }
        if let Some(rope) = &self.rope {
            let (out, dim) = (&mut out[vectors * step..], rope.sizes().dim);
            if position.in_prefix {
                clear(out, step, dim.div_ceil(WIDTH));
            } else {
                rope.read(simd, row, 0..dim, out, step, nonfinite);
            }
        }
    }
}
