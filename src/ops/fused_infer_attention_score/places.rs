//! What a launch reads on the device and takes for places in other tensors.

use ascend_spec::fia::{Parameter, Places};

use crate::error::Result;

use super::block_table::BlockTable;
use super::padding_size::PaddingSize;

/// The tensors of a launch whose elements are places in other tensors.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct GivenPlaces<'a> {
    pub(super) block_table: Option<&'a BlockTable>,
    pub(super) query_padding: Option<&'a PaddingSize>,
    pub(super) kv_padding: Option<&'a PaddingSize>,
}

/// When the device reads them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Reading {
    /// Never: the call is only planned.
    Planned,
    /// In a launch.
    Launched,
    /// In each replay of a graph, with the content of that time.
    Captured,
}

impl GivenPlaces<'_> {
    /// Refuses places outside of the tensors that a call has, and rows of a table that are too short for it.
    #[inline]
    pub(super) fn admitted(&self, places: Option<&Places>, reading: Reading) -> Result<()> {
        let Some(places) = places else {
            return Ok(());
        };
        if let Some(table) = self.block_table {
            let rows = reading != Reading::Captured;
            table.admitted(places, rows, reading != Reading::Planned)?;
        }
        for (parameter, size) in [
            (Parameter::QueryPaddingSize, self.query_padding),
            (Parameter::KvPaddingSize, self.kv_padding),
        ] {
            if let Some(rows) = size.and_then(PaddingSize::rows) {
                places.admits_padding(parameter, rows)?;
            }
        }
        Ok(())
    }
}
