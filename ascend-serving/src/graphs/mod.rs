//! Graphs that were captured for some sizes: their pool, their tensors, and the layers that share a cache.
//!
//! What is captured of them stands beside the steps without graphs: [`AttentionGraphs`](crate::AttentionGraphs) in
//! `engine`, [`TreeGraphs`](crate::TreeGraphs) in `drafts`, [`SparseGraphs`](crate::SparseGraphs) in `sparse`,
//! [`ContextGraphs`](crate::ContextGraphs) in `ranks`.

mod captured_group;
mod fitting_steps;
mod graph_limits;
mod graph_pool;
mod graph_tensors;

pub(crate) use captured_group::CapturedGroup;
pub(crate) use fitting_steps::fitting_rows;
pub use graph_limits::GraphLimits;
pub(crate) use graph_limits::{ConvolutionWeights, RowsPerRequest};
pub use graph_pool::{GraphPool, GraphStep};
pub(crate) use graph_pool::{Replays, not_while_capturing};
pub use graph_tensors::GraphTensors;
pub(crate) use graph_tensors::{
    CachedLayer, CapturedProgram, GroupBuffers, LentTensors, ReplayedProgram, check_captured, copy_rows, zeros,
};
