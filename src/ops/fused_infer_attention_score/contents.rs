//! Tensors that a launch reads on the device and takes for positions in other tensors.

use ascend_spec::ops::fused_infer_attention_score::{ContentBounds, Parameter};

use crate::error::{Error, Result};
use crate::runtime::{LaunchQueue, Stream};
use crate::tensor::Tensor;

use super::block_table::BlockTable;

/// The tensors of a launch whose elements are positions in other tensors.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct GivenContents<'a> {
    pub(super) block_table: Option<&'a BlockTable>,
    pub(super) query_padding: Option<&'a PaddingSize>,
    pub(super) kv_padding: Option<&'a PaddingSize>,
}

/// When the device reads tensors of positions.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Reading {
    /// Never: the call is only planned.
    Planned,
    /// In a launch.
    Launched,
    /// In each replay of a graph, with the content of that time.
    Captured,
}

impl Reading {
    /// When the device reads them for a launch on this queue.
    pub(crate) fn on(queue: &impl LaunchQueue) -> Self {
        match queue.runs_now() {
            true => Self::Launched,
            false => Self::Captured,
        }
    }
}

impl GivenContents<'_> {
    /// Refuses positions outside of the tensors that a call has, and rows of a table that are too short for it.
    #[inline]
    pub(crate) fn admitted(&self, bounds: Option<&ContentBounds>, reading: Reading) -> Result<()> {
        let Some(bounds) = bounds else {
            return Ok(());
        };
        if let Some(table) = self.block_table {
            let rows = reading != Reading::Captured;
            table.admitted(bounds, rows, reading != Reading::Planned)?;
        }
        for (parameter, size) in
            [(Parameter::QueryPaddingSize, self.query_padding), (Parameter::KvPaddingSize, self.kv_padding)]
        {
            if let Some(rows) = size.and_then(PaddingSize::rows) {
                bounds.admits_padding(parameter, rows)?;
            }
        }
        Ok(())
    }
}

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
        let size = i64::try_from(rows)
            .map_err(|_| Error::invalid("padding_size", rows, i64::MAX).fix("give at most the rows of the query"))?;
        let tensor = stream.upload(&[size], [1])?;
        tensor.freeze();
        Ok(Self { tensor, rows: Some(size) })
    }

    /// A size that is on the device already, `[1]`. It is not checked.
    ///
    /// # Safety
    /// Whenever a launched call reads this tensor, its number is at most the length of the call's row axis minus the
    /// length of its longest sequence.
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
