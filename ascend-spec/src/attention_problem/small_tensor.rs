//! Small tensors, which are read scalar by scalar.

use super::{ByteRange, TensorRole};
use crate::{DType, TensorDesc};

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
        SmallTensor {
            role,
            dtype,
            offset: desc.offset,
            bytes: ByteRange::described(desc),
        }
    }
}
