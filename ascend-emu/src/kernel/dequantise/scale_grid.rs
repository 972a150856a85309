//! Grids of scales, or of offsets: one for a tensor, for each head, channel, token or group of elements.

use crate::kernel::Buffers;
use crate::kernel::simd::{Vector, WIDTH};
use ascend_spec::DType;
use ascend_spec::attention_problem::{Cuts, Grid, SmallTensor};
use ascend_spec::minifloat::Float8E8M0;
use half::{bf16, f16};
use std::ops::Range;

/// A grid of scales or offsets.
#[derive(Debug)]
pub(crate) struct ScaleGrid {
    scalars: ScalarTensor,
    grid: Grid,
    /// Whether groups of neighbouring elements share an entry; such entries are read again for each row.
    per_group: bool,
    /// The entries of a per-channel grid, `vectors` vectors for each head. Empty for other grids.
    channels: Vec<Vector>,
    vectors: usize,
}

impl ScaleGrid {
    /// The grid of a tensor with `heads` heads and rows of `dim` elements.
    ///
    /// # Safety
    ///
    /// As long as the value is used, the bytes of the grid's tensor may be read.
    pub(crate) unsafe fn new(buffers: &Buffers<'_>, grid: &Grid, heads: usize, dim: usize) -> Self {
        // SAFETY: the caller keeps this contract.
        let scalars = unsafe { ScalarTensor::new(buffers, &grid.tensor) };
        let vectors = dim.div_ceil(WIDTH);
        let per_group = grid.cuts != Cuts::NONE;
        let mut channels = Vec::new();
        if grid.view.dim != 0 && !per_group {
            channels.resize(heads * vectors, [0.0; WIDTH]);
            for (head, vectors) in channels.chunks_exact_mut(vectors.max(1)).enumerate() {
                let values = vectors.as_flattened_mut().iter_mut().take(dim);
                for (d, value) in values.enumerate() {
                    let index = grid.at((0, head, 0), d);
                    *value = scalars.float(index).unwrap_or(f32::NAN);
                }
            }
        }
        ScaleGrid { scalars, grid: *grid, per_group, channels, vectors }
    }

    /// Whether groups of neighbouring elements share an entry.
    pub(super) fn is_per_group(&self) -> bool {
        self.per_group
    }

    /// The entry of a row whose elements share one; NaN if the tensor does not have it.
    pub(crate) fn of_row(&self, row: (usize, usize, usize)) -> f32 {
        self.of_element(row, 0)
    }

    /// The entry of element `d` of a row; NaN if the tensor does not have it.
    fn of_element(&self, row: (usize, usize, usize), d: usize) -> f32 {
        let entry = self.scalars.float(self.grid.at(row, d));
        entry.unwrap_or(f32::NAN)
    }

    /// The entries of vector `i` of a row; `of_row` is the entry that all elements share, if there is one.
    #[inline(always)]
    pub(super) fn vector(&self, row: (usize, usize, usize), i: usize, of_row: f32) -> Vector {
        if self.per_group {
            return self.read_vector(row, i);
        }
        let head = row.1;
        let channels = self.channels.get(head * self.vectors + i);
        channels.copied().unwrap_or([of_row; WIDTH])
    }

    /// The entries of vector `i` of a row, read one by one.
    #[inline(never)]
    fn read_vector(&self, row: (usize, usize, usize), i: usize) -> Vector {
        std::array::from_fn(|l| self.of_element(row, i * WIDTH + l))
    }

    /// The entries of a head's channels; empty unless the grid is per channel.
    pub(super) fn of_head(&self, head: usize) -> &[Vector] {
        let first = head.saturating_mul(self.vectors);
        let channels = self.channels.get(first..).unwrap_or_default();
        channels.get(..self.vectors).unwrap_or_default()
    }

    /// The entry of a row whose elements share one; 0 for other grids.
    #[inline(always)]
    pub(super) fn row_entry(&self, row: (usize, usize, usize)) -> f32 {
        if self.channels.is_empty() && !self.per_group { self.of_row(row) } else { 0.0 }
    }
}

/// A small tensor, read scalar by scalar within the bytes of its description.
#[derive(Clone, Debug)]
pub(crate) struct ScalarTensor {
    base: *const u8,
    dtype: DType,
    /// Bytes that may be read.
    bytes: Range<i64>,
}

// SAFETY: the address is only read through, which the contract of `new` allows on any thread.
unsafe impl Send for ScalarTensor {}
// SAFETY: the address is only read through, which the contract of `new` allows on any thread.
unsafe impl Sync for ScalarTensor {}

impl ScalarTensor {
    /// The elements of a small tensor.
    ///
    /// # Safety
    ///
    /// As long as the value is used, the bytes of `tensor` may be read.
    pub(crate) unsafe fn new(buffers: &Buffers<'_>, tensor: &SmallTensor) -> Self {
        let count = |byte: u64| i64::try_from(byte).unwrap_or(i64::MAX);
        ScalarTensor {
            base: buffers.base(tensor.role),
            dtype: tensor.dtype,
            bytes: tensor.bytes.map_or(0..0, |bytes| count(bytes.start)..count(bytes.end)),
        }
    }

    /// The bytes of an element; `None` outside of the tensor.
    #[inline(always)]
    fn element<const SIZE: usize>(&self, index: i64) -> Option<[u8; SIZE]> {
        let start = index.checked_mul(SIZE as i64)?;
        let end = start.checked_add(SIZE as i64)?;
        let inside = self.bytes.start <= start && end <= self.bytes.end;
        // SAFETY: the bytes are within those that may be read by the contract of `new`; no alignment is assumed.
        inside.then(|| unsafe { self.base.wrapping_offset(start as isize).cast::<[u8; SIZE]>().read_unaligned() })
    }

    /// An element as a float; `None` outside of the tensor and for types that scales do not have.
    pub(crate) fn float(&self, index: i64) -> Option<f32> {
        Some(match self.dtype {
            DType::Float => f32::from_ne_bytes(self.element(index)?),
            DType::Float16 => f16::from_ne_bytes(self.element(index)?).to_f32(),
            DType::Bf16 => bf16::from_ne_bytes(self.element(index)?).to_f32(),
            // The hardware stores scales as single precision in the lower half.
            DType::UInt64 => f32::from_bits(u64::from_ne_bytes(self.element(index)?) as u32),
            DType::Float8E8M0 => Float8E8M0::from_bits(self.element::<1>(index)?[0]).to_f32(),
            _ => return None,
        })
    }

    /// An element as an integer; `None` outside of the tensor and for other types.
    pub(crate) fn integer(&self, index: i64) -> Option<i64> {
        match self.dtype {
            DType::Int32 => Some(i64::from(i32::from_ne_bytes(self.element(index)?))),
            DType::Int64 => Some(i64::from_ne_bytes(self.element(index)?)),
            _ => None,
        }
    }
}
