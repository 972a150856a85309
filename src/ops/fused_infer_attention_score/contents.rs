//! Tensors that a launch reads on the device and takes for positions in other tensors.

use ascend_spec::ops::fused_infer_attention_score::{ContentBounds, Parameter};

use crate::error::Result;
use crate::runtime::LaunchQueue;

use super::block_table::BlockTable;
use super::padding_size::PaddingSize;

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
        for (parameter, size) in [
            (Parameter::QueryPaddingSize, self.query_padding),
            (Parameter::KvPaddingSize, self.kv_padding),
        ] {
            if let Some(rows) = size.and_then(PaddingSize::rows) {
                bounds.admits_padding(parameter, rows)?;
            }
        }
        Ok(())
    }
}
