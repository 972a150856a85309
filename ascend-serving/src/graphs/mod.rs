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

pub use attention_graph_step::AttentionGraphStep;
pub use attention_graphs::AttentionGraphs;
pub(crate) use captured_group::{CapturedGroup, fitting_rows};
pub use graph_limits::GraphLimits;
pub(crate) use graph_limits::RowsEach;
pub use graph_pool::{GraphPool, GraphStep};
pub(crate) use graph_pool::{Replays, not_while_capturing};
pub use graph_tensors::GraphTensors;
pub(crate) use graph_tensors::{CapturedProgram, copy_rows, zeros};
pub use linear_buffers::LinearGraphTensors;
pub use linear_capture::LinearCapture;
