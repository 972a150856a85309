//! What a launch reads on the device and takes for places in other tensors.

use ascend_spec::fia::{Parameter, Places};
use ascend_spec::{DType, Violation};

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

/// The tensors whose elements are places in others.
pub(crate) const PLACED: [Parameter; 3] = [
    Parameter::BlockTable,
    Parameter::QueryPaddingSize,
    Parameter::KvPaddingSize,
];

/// Whether a tensor of places is as the operator reads it: a table `[B, M]` in INT32, or a size in INT64.
pub(super) fn is_read(dtype: DType, shape: &[usize]) -> bool {
    matches!((dtype, shape), (DType::Int32, [_, _]) | (DType::Int64, [1]))
}

/// Holds the content of such a tensor against a call; one that is not as the operator reads it is none.
pub(crate) fn admits_content(
    places: &Places,
    parameter: Parameter,
    (dtype, shape): (DType, &[usize]),
    bytes: &[u8],
) -> std::result::Result<(), Violation> {
    match (dtype, shape) {
        (DType::Int32, &[_, columns]) => {
            let ids = bytes.as_chunks().0.iter();
            let table: Vec<i32> = ids.map(|id| i32::from_le_bytes(*id)).collect();
            places.admits_table(&table, columns)
        }
        (DType::Int64, [1]) => {
            let size = bytes.as_chunks().0.first().copied().map(i64::from_le_bytes);
            places.admits_padding(parameter, size.unwrap_or(0))
        }
        _ => Ok(()),
    }
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
