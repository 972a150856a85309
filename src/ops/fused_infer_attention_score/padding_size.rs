//! Left padding.

use crate::error::{Error, Result};
use crate::runtime::Stream;
use crate::tensor::Tensor;

/// Number of unused rows after the last row of every sequence, whose rows are then at the end of the axis, right
/// before the unused ones (`queryPaddingSize`, `kvPaddingSize`).
///
/// INT64 `[1]`, read on the device when the operator runs. Made from a number on the host it is checked by each call
/// that uses it: with the sequence's own rows it has to fit in the axis. Cloning shares the memory.
///
/// Since CANN 8.1.
#[derive(Clone, Debug)]
pub struct PaddingSize {
    tensor: Tensor<i64>,
    /// `None` if it is not known.
    rows: Option<i64>,
}

impl PaddingSize {
    /// A padding of `rows` unused rows.
    ///
    /// # Errors
    /// [`ARGUMENT_VALUE`](crate::rules::ARGUMENT_VALUE) for a number beyond INT64; otherwise as for
    /// [`Stream::upload`].
    pub fn new(stream: &Stream, rows: usize) -> Result<Self> {
        let size = i64::try_from(rows).map_err(|_| {
            Error::invalid("padding_size", rows, i64::MAX).fix("give at most the rows of the query")
        })?;
        let tensor = stream.upload(&[size], [1])?;
        tensor.freeze();
        Ok(Self {
            tensor,
            rows: Some(size),
        })
    }

    /// A size that is on the device already, `[1]`. It is not checked.
    ///
    /// # Safety
    /// Whenever a call that was launched with it runs, it holds at most the rows of the call's axis less those of its
    /// longest sequence.
    pub unsafe fn from_tensor(tensor: Tensor<i64>) -> Self {
        Self { tensor, rows: None }
    }

    /// The size on the device. Nothing can be written to one that was made from a number.
    pub fn tensor(&self) -> &Tensor<i64> {
        &self.tensor
    }

    /// The number, if it is known.
    pub(super) fn rows(&self) -> Option<i64> {
        self.rows
    }
}
