//! Decode steps replayed from graphs that were captured for some sizes.

mod attention_graphs;
mod graph_pool;

pub use attention_graphs::{AttentionGraphStep, AttentionGraphs, GraphLimits, GraphTensors};
pub use graph_pool::{GraphPool, GraphStep};
