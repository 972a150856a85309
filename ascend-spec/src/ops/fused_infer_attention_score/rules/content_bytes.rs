//! The content of tensors whose elements are positions in other tensors, as bytes.

use super::contents::ContentBounds;
use crate::ops::fused_infer_attention_score::Parameter;
use crate::{DType, Violation};

impl ContentBounds {
    /// The tensors whose elements are positions in other tensors.
    pub const PARAMETERS: [Parameter; 3] = [
        Parameter::BlockTable,
        Parameter::QueryPaddingSize,
        Parameter::KvPaddingSize,
    ];

    /// Whether the operator reads a tensor of positions in this form: a table `[B, M]` in INT32, or a size in INT64.
    pub fn reads(dtype: DType, shape: &[usize]) -> bool {
        matches!((dtype, shape), (DType::Int32, [_, _]) | (DType::Int64, [1]))
    }

    /// Checks the content of such a tensor, little-endian, against the call. Content in another form than
    /// [`ContentBounds::reads`] names is not checked.
    ///
    /// # Errors
    /// As for [`ContentBounds::admits_table`] and [`ContentBounds::admits_padding`].
    pub fn admits_content(
        &self,
        parameter: Parameter,
        (dtype, shape): (DType, &[usize]),
        bytes: &[u8],
    ) -> Result<(), Violation> {
        match (dtype, shape) {
            (DType::Int32, &[_, columns]) => {
                let ids = bytes.as_chunks().0.iter();
                let table: Vec<i32> = ids.map(|id| i32::from_le_bytes(*id)).collect();
                self.admits_table(&table, columns)
            }
            (DType::Int64, [1]) => {
                let size = bytes.as_chunks().0.first().copied().map(i64::from_le_bytes);
                self.admits_padding(parameter, size.unwrap_or(0))
            }
            _ => Ok(()),
        }
    }
}
