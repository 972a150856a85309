//! The tensors that captured layers read and write.

use ascend_attention::attention::BlockTable;
use ascend_attention::scatter::SlotMapping;
use ascend_attention::{Element, Tensor};

use crate::kv::ChannelQuantiser;

/// The tensors of a captured layer, with a row for each token of the captured size: its requests times the tokens of
/// each. All layers of a group and size have the same tensors. In [`TreeGraphs`](crate::TreeGraphs) the tensors are
/// `[size, heads, nodes, D]`.
#[derive(Debug)]
pub struct GraphTensors<T: Element> {
    /// Queries, `[rows, N, D]`.
    pub query: Tensor<T>,
    /// Keys of the step, `[rows, Nkv, D]`.
    pub key: Tensor<T>,
    /// Values of the step.
    pub value: Tensor<T>,
    /// The attention, `[rows, N, Dv]`.
    pub output: Tensor<T>,
}

/// The buffers of the graphs of a size, for the layers that share a cache.
#[derive(Debug)]
pub(super) struct GroupBuffers<T: Element> {
    pub(super) table: BlockTable,
    pub(super) slots: SlotMapping,
    /// The tensor of each named mask that a layer has, `[requests, tokens of each, keys]`.
    pub(super) masks: Vec<Tensor<i8>>,
    /// The quantisers of keys and of values, where the cache is quantised.
    pub(super) quantisers: Option<[ChannelQuantiser; 2]>,
    pub(super) tensors: GraphTensors<T>,
}
