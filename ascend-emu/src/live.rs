//! Counts of the handles and memory that a process has not given back.

use crate::collectives::COMMUNICATORS;
use crate::descriptor::{BOOL_ARRAYS, FLOAT_ARRAYS, INT_ARRAYS, SCALAR_LISTS, SCALARS, TENSOR_LISTS, TENSORS};
use crate::executor::EXECUTORS;
use crate::runtime::capturable_event::EVENTS;
use crate::runtime::context::CONTEXTS;
use crate::runtime::graph::{GRAPHS, GROUPS};
use crate::runtime::notify::NOTIFIES;
use crate::runtime::stream::STREAMS;
use crate::sanitizer::allocation_table;

/// Handles that are not destroyed and memory that is not freed, in the whole process.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Live {
    /// `aclTensor`.
    pub tensors: usize,
    /// `aclTensorList`.
    pub tensor_lists: usize,
    /// `aclIntArray`.
    pub int_arrays: usize,
    /// `aclFloatArray` and `aclBoolArray`.
    pub other_arrays: usize,
    /// `aclScalar` and `aclScalarList`.
    pub scalars: usize,
    /// `aclOpExecutor`: repeatable ones, and ordinary ones that phase two has not used up.
    pub executors: usize,
    /// `aclTensorDesc` and `aclDataBuffer`.
    pub described: usize,
    /// Streams, without the default ones.
    pub streams: usize,
    /// Events.
    pub events: usize,
    /// Notifies.
    pub notifies: usize,
    /// Communicators: ranks that have not left theirs.
    pub communicators: usize,
    /// Contexts, with the default ones of devices in use.
    pub contexts: usize,
    /// Captured graphs.
    pub graphs: usize,
    /// Task groups; they end with their graph.
    pub task_groups: usize,
    /// Allocations of device memory.
    pub device_allocations: usize,
    /// Bytes of the allocations of device memory, as requested.
    pub device_bytes: u64,
    /// Allocations of pinned host memory.
    pub host_allocations: usize,
    /// Ranges of host memory that are registered.
    pub host_registrations: usize,
    /// Handles of physical memory.
    pub physical_memories: usize,
    /// Ranges of addresses that are reserved.
    pub address_ranges: usize,
}

impl Live {
    /// Whether everything was given back.
    pub fn is_empty(&self) -> bool {
        *self == Live::default()
    }
}

/// Counts what has not been given back.
pub fn live() -> Live {
    let (device_allocations, device_bytes, host_allocations) = allocation_table::totals();
    let (physical_memories, address_ranges) = allocation_table::virtual_totals();
    Live {
        tensors: TENSORS.len(),
        tensor_lists: TENSOR_LISTS.len(),
        int_arrays: INT_ARRAYS.len(),
        other_arrays: FLOAT_ARRAYS.len() + BOOL_ARRAYS.len(),
        scalars: SCALARS.len() + SCALAR_LISTS.len(),
        executors: EXECUTORS.len(),
        #[cfg(feature = "glue")]
        described: crate::glue::by_name::live(),
        #[cfg(not(feature = "glue"))]
        described: 0,
        streams: STREAMS.len(),
        events: EVENTS.len(),
        notifies: NOTIFIES.len(),
        communicators: COMMUNICATORS.len(),
        contexts: CONTEXTS.len(),
        graphs: GRAPHS.len(),
        task_groups: GROUPS.len(),
        device_allocations,
        device_bytes,
        host_allocations,
        host_registrations: allocation_table::registrations(),
        physical_memories,
        address_ranges,
    }
}
