//! Attention over several ranks: heads divided over them, or contexts.

mod context_attention;
mod context_exchange;
mod context_parallel;
mod row_order;
mod tensor_parallel;

pub use context_attention::{ContextAttention, ContextStep};
pub use context_exchange::ContextPart;
pub use context_parallel::{ContextParallel, ContextSplit, RankStep};
pub use tensor_parallel::TensorParallel;
