//! Steps replayed from graphs that were captured for some sizes.

mod attention_graph_step;
mod attention_graphs;
mod captured_group;
mod graph_limits;
mod graph_pool;
mod graph_tensors;
mod linear_buffers;
mod linear_capture;
mod linear_replay;
mod sparse_buffers;
mod sparse_graph_step;
mod sparse_graphs;

pub use attention_graph_step::AttentionGraphStep;
pub use attention_graphs::AttentionGraphs;
pub use graph_limits::GraphLimits;
pub(crate) use graph_limits::RowsEach;
pub(crate) use graph_pool::Replays;
pub use graph_pool::{GraphPool, GraphStep};
pub use graph_tensors::GraphTensors;
pub(crate) use graph_tensors::zeros;
pub use linear_buffers::LinearGraphTensors;
pub use linear_capture::LinearCapture;
pub use sparse_graph_step::SparseGraphStep;
pub use sparse_graphs::SparseGraphs;
