//! Small tensors of scalars: scales, offsets, lengths and block tables.

use crate::kernel::Buffers;
use ascend_spec::DType;
use ascend_spec::attention_problem::SmallTensor;
use ascend_spec::minifloat::Float8E8M0;
use half::{bf16, f16};
use std::ops::Range;

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
// SAFETY: as above.
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
            bytes: tensor
                .bytes
                .map_or(0..0, |bytes| count(bytes.start)..count(bytes.end)),
        }
    }

    /// The bytes of an element; `None` outside of the tensor.
    #[inline(always)]
    fn element<const SIZE: usize>(&self, index: i64) -> Option<[u8; SIZE]> {
        let at = index.checked_mul(SIZE as i64)?;
        let end = at.checked_add(SIZE as i64)?;
        let inside = self.bytes.start <= at && end <= self.bytes.end;
        // SAFETY: the bytes lie within those that may be read by the contract of `new`; no alignment is assumed.
        inside.then(|| unsafe {
            self.base
                .wrapping_offset(at as isize)
                .cast::<[u8; SIZE]>()
                .read_unaligned()
        })
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
