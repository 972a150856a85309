//! Attention over several ranks: heads divided over them, or contexts.

mod context_attention;
mod context_exchange;
mod context_graphs;
mod context_parallel;
mod context_step;
mod ring_attention;
mod row_order;
mod step_agreement;
mod tensor_parallel;

pub use context_attention::ContextAttention;
pub use context_exchange::ContextPart;
pub use context_graphs::{ContextGraphStep, ContextGraphs};
pub use context_parallel::{ContextParallel, ContextSplit, RankStep};
pub use context_step::ContextStep;
pub use ring_attention::RingAttention;
pub use tensor_parallel::TensorParallel;
