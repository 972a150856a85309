//! Attention over several ranks: heads divided over them, or contexts.

mod context_attention;
mod context_exchange;
mod context_graphs;
mod context_parallel;
mod context_step;
mod paged_rows;
mod ring_attention;
mod row_exchange;
mod row_order;
mod row_split;
mod step_agreement;
mod tensor_parallel;
mod zigzag;

pub use context_attention::ContextAttention;
pub use context_graphs::ContextGraphs;
pub use context_parallel::{ContextParallel, ContextSplit};
pub use context_step::ContextStep;
pub use ring_attention::RingAttention;
pub use tensor_parallel::TensorParallel;
