//! Attention to some of the cached keys: those that an indexer chooses, and native sparse attention.

mod key_choice;
mod native_plan;
mod native_sparse;
mod native_step;
mod sparse_buffers;
mod sparse_calls;
mod sparse_graphs;
mod sparse_inputs;
mod sparse_latent;
mod sparse_step;
mod step_indexers;
mod two_caches;

pub use key_choice::KeyChoice;
pub use native_plan::{NativeBranches, NativeTensors};
pub use native_sparse::NativeSparse;
pub use native_step::NativeStep;
pub use sparse_graphs::SparseGraphs;
pub use sparse_inputs::{IndexerTensors, SparseTensors};
pub use sparse_latent::SparseLatent;
pub use sparse_step::SparseStep;
