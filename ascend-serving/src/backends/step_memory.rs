//! Device memory that a planned step needs.

use ascend_attention::attention::BlockTable;
use ascend_attention::{Element, Output, Tensor, Violation};

use crate::error::Result;
use crate::rules;

/// Memory on the device that a planned step needs besides the cache, the step's block table and the tensors of its
/// layers. From [`StepPlan::memory`](crate::StepPlan::memory).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub struct StepMemory {
    /// Bytes that the plan holds until it is dropped: masks, tables of its own, keys that were copied or dequantised.
    pub held: usize,
    /// Bytes that a layer holds until the device has computed it: the outputs of the calls that are merged, with their
    /// log-sum-exps. All queued layers hold them at the same time.
    pub layer: usize,
    /// The largest workspace of its calls, which the stream keeps for other calls.
    pub workspace: usize,
}

impl StepMemory {
    /// Bytes needed while `layers` layers are queued; `usize::MAX` where the sum overflows.
    pub fn total(self, layers: usize) -> usize {
        let layers = self.layer.saturating_mul(layers);
        self.held.saturating_add(self.workspace).saturating_add(layers)
    }

    /// The memory of a plan whose calls need these workspaces, one after the other.
    pub fn of_calls(workspaces: impl IntoIterator<Item = usize>) -> Self {
        Self { workspace: workspaces.into_iter().max().unwrap_or(0), ..Self::default() }
    }

    /// Adds bytes that the plan holds.
    #[must_use]
    pub fn holding(mut self, bytes: impl IntoIterator<Item = usize>) -> Self {
        self.held = bytes.into_iter().fold(self.held, usize::saturating_add);
        self
    }

    /// Adds bytes that each layer holds.
    #[must_use]
    pub fn taking(mut self, bytes: impl IntoIterator<Item = usize>) -> Self {
        self.layer = bytes.into_iter().fold(self.layer, usize::saturating_add);
        self
    }

    /// The memory of two plans that are both held, of which each layer runs both, one after the other.
    pub(crate) fn then(self, other: Self) -> Self {
        Self { layer: self.layer.saturating_add(other.layer), ..self.beside(other) }
    }

    /// The memory of two plans that are both held, where each layer runs one of them.
    #[must_use]
    pub fn beside(self, other: Self) -> Self {
        Self {
            held: self.held.saturating_add(other.held),
            layer: self.layer.max(other.layer),
            workspace: self.workspace.max(other.workspace),
        }
    }
}

/// The most bytes on the device while `layers` layers are queued.
#[derive(Clone, Copy, Debug)]
pub(super) struct MemoryLimit {
    pub(super) bytes: usize,
    pub(super) layers: usize,
}

impl MemoryLimit {
    pub(super) fn admits(self, memory: StepMemory) -> Result<(), Violation> {
        let Self { bytes, layers } = self;
        let needed = memory.total(layers);
        if needed <= bytes {
            return Ok(());
        }
        let StepMemory { held, layer, workspace } = memory;
        Err(rules::BACKEND_MEMORY.broken(
            format_args!(
                "{needed} bytes besides the cache: {held} for the step, {layer} for each of {layers} layers, \
                 {workspace} of workspace"
            ),
            format_args!("at most {bytes}"),
        ))
    }
}

/// Bytes of a tensor's elements.
pub(crate) fn tensor_bytes<T: Element>(tensor: &Tensor<T>) -> usize {
    tensor.len().saturating_mul(size_of::<T>())
}

/// Bytes of an output, log-sum-exps included.
pub(crate) fn output_bytes<T: Element>(output: &Output<T>) -> usize {
    let lse = output.softmax_lse.as_ref().map_or(0, tensor_bytes);
    tensor_bytes(&output.attention).saturating_add(lse)
}

/// Bytes of a block table, of INT32.
pub(crate) fn table_bytes(table: &BlockTable) -> usize {
    let places = table.sequences().saturating_mul(table.columns());
    places.saturating_mul(size_of::<i32>())
}
