//! Ways to compute the attention of a step.

mod backend;
mod batched_queries;
mod cascade_prefill;
mod chunked_local;
mod copied_rows;
mod dense_rows;
mod fused;
mod fused_in_two;
mod hybrid;
mod latent;
mod latent_tensors;
mod masked;
mod mxfp8;
mod paged_decode;
mod program;
mod prompt_and_incre;
mod quantised_decode;
mod quantised_prefill;
mod registry;
mod shared_prefix_decode;
mod split_decode;
mod step_memory;
mod step_plan;
mod triangle;

pub use backend::{AttentionBackend, AttentionShape, LayerTensors, StepContext};
pub(crate) use backend::{batched, size};
pub use batched_queries::BatchedQueries;
pub use cascade_prefill::CascadePrefill;
pub use chunked_local::ChunkedLocal;
pub use fused::Fused;
pub use fused_in_two::FusedInTwo;
pub use hybrid::{Hybrid, LayerSet, Phase};
pub use latent::Mla;
pub use latent_tensors::{LatentForm, LatentRows, LatentTensors, UpProjected, UpProjection};
pub use masked::Masked;
pub use mxfp8::MxFp8;
pub use paged_decode::PagedDecode;
pub(crate) use paged_decode::{layout as decode_layout, rows as decode_rows};
pub use program::{StepCall, StepProgram};
pub use prompt_and_incre::PromptAndIncre;
pub use quantised_decode::QuantisedDecode;
pub use quantised_prefill::QuantisedPrefill;
pub use registry::{Backends, RefusedBackend, Selected};
pub(crate) use registry::{Recorded, no_backend};
pub use shared_prefix_decode::{SharedGroup, SharedPrefixDecode, SharedPrefixGate};
pub use split_decode::{KeySplit, SplitDecode};
pub use step_memory::StepMemory;
pub(crate) use step_memory::{output_bytes, table_bytes, tensor_bytes};
pub(crate) use step_plan::attention_alone;
pub use step_plan::{StepPlan, StepStage};
pub use triangle::{
    TriangleChoice, TriangleGate, TriangleMixPrefill, TrianglePlan, TrianglePrefill, WhyDense,
};
