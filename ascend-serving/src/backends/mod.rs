//! Ways to compute the attention of a step.

mod backend;
mod cascade_prefill;
mod fused;
mod fused_in_two;
mod hybrid;
mod latent;
mod paged_decode;
mod shared_prefix_decode;
mod triangle;

pub use backend::{
    AttentionBackend, AttentionShape, Backends, LayerTensors, RefusedBackend, Selected,
    StepContext, StepPlan,
};
pub(crate) use backend::{no_backend, size, without_lse};
pub use cascade_prefill::CascadePrefill;
pub use fused::Fused;
pub use fused_in_two::FusedInTwo;
pub use hybrid::{Hybrid, LayerSet, Phase};
pub use latent::{LatentForm, LatentRows, LatentTensors, Mla, UpProjected, UpProjection};
pub use paged_decode::PagedDecode;
pub use shared_prefix_decode::{SharedGroup, SharedPrefixDecode, SharedPrefixGate};
pub use triangle::{
    TriangleChoice, TriangleGate, TriangleMixPrefill, TrianglePlan, TrianglePrefill, WhyDense,
};
