//! From a batch of requests to attention calls.
//!
//! - [`Attention`]: the attention of a model over a paged cache, step by step, layer by layer.
//! - [`AttentionBackend`]: a way to compute a step; [`Backends`] tries them in order and says why one was refused.
//! - [`Fused`], [`FusedInTwo`], [`PagedDecode`]: backends by FusedInferAttentionScore.
//! - [`Hybrid`]: other backends for other layers and other kinds of steps.
//! - [`Mla`]: multi-head latent attention, absorbed or plain; [`LatentTensors`] says who projects what.
//! - [`AttentionMetadata`]: what the calls of a step share, from a batch of [`BatchRequest`]s; [`RecordedBatch`] is the
//!   batch as a file.
//! - [`Causality`]: which keys a token sees, and the one way from there to the operator's mask.
//! - [`Cumulative`] and [`PerRequest`]: lengths that cannot be mixed up; [`CallLengths`] gives a call the form it needs.
//! - [`GroupedAttention`]: models with several kinds of layers, such as full and windowed ones.
//! - [`AttentionGraphs`]: decode steps replayed from graphs captured for some sizes, layer by layer; [`GraphPool`] with
//!   launches of one's own.
//! - [`PageIndices`], [`TokenIndices`] and [`PageTable`](crate::kv::PageTable): the index formats of engines.
//! - [`LocalBatch`]: attention within chunks, by virtual requests.
//! - [`DraftTree`], [`CustomMask`]: speculative decoding.
//! - [`CascadePrefill`], [`SharedPrefixDecode`]: cached prefixes apart, merged.
//! - [`ContextParallel`]: contexts divided over ranks.
//! - [`TreeVerification`]: drafted trees, by two calls of the stock operator and a merge; [`LatentTreeVerification`]: those of
//!   latent attention, by one call where the release has a tree mask.
//! - [`TriangleMixPrefill`]: TriangleMix by calls of the stock operator, as a backend; [`TrianglePrefill`] is that of one
//!   prompt.
//! - [`RangeReport`]: what numbers a tensor holds.
//! - [`SplitLimits`]: into how many parts to split the keys of a decode step.

#![cfg_attr(not(test), warn(clippy::arithmetic_side_effects))]

mod attention_graphs;
mod backend;
mod batch;
mod cascade_prefill;
mod causality;
mod context_chunks;
mod context_parallel;
mod custom_mask;
mod draft_tree;
mod engine;
mod fused;
mod fused_in_two;
mod graph_pool;
mod grouped_attention;
mod grouped_batch;
mod hybrid;
mod index;
mod latent;
mod latent_tree;
mod layer_check;
mod lengths;
mod local_attention;
mod metadata;
mod mla;
mod mla_decode;
mod mla_prefill;
mod paged_decode;
mod ran_layers;
mod range_report;
mod shared_prefix_decode;
mod split_kv;
mod state;
mod step_part;
mod tree_verification;
mod triangle_mix;
mod triangle_prefill;
mod triangle_rows;

pub use attention_graphs::{AttentionGraphStep, AttentionGraphs, GraphLimits, GraphTensors};
pub use backend::{
    AttentionBackend, AttentionShape, Backends, LayerTensors, RefusedBackend, Selected,
    StepContext, StepPlan,
};
pub use batch::{BatchRequest, BatchSettings, RecordedBatch, SequenceExtent};
pub use cascade_prefill::CascadePrefill;
pub use causality::Causality;
pub use context_parallel::{ContextParallel, ContextPlan, ContextSplit, NewTokens, RankStep};
pub use custom_mask::{CustomMask, MaskExtent, MaskWord, PackedBits};
pub use draft_tree::{Accepted, DraftTree};
pub use engine::{Attention, Step};
pub use fused::Fused;
pub use fused_in_two::FusedInTwo;
pub use graph_pool::{GraphPool, GraphStep};
pub use grouped_attention::{GroupedAttention, GroupedStep, LayerGroup};
pub use grouped_batch::{GroupedMetadata, GroupedRequest, GroupedSequence};
pub use hybrid::{Hybrid, LayerSet, Phase};
pub use index::{PageIndices, TokenIndices, window_start};
pub use latent::{LatentForm, LatentRows, LatentTensors, UpProjected, UpProjection};
pub use latent_tree::{LatentTreePlan, LatentTreeTensors, LatentTreeVerification};
pub use lengths::{CallLengths, Cumulative, PerRequest};
pub use local_attention::LocalBatch;
pub use metadata::AttentionMetadata;
pub use mla::Mla;
pub use paged_decode::PagedDecode;
pub use range_report::{Number, RangeReport};
pub use shared_prefix_decode::{SharedGroup, SharedPrefixDecode, SharedPrefixGate};
pub use split_kv::SplitLimits;
pub use state::{AttentionState, Drafting, StatePolicy};
pub use tree_verification::{TreePlan, TreeTensors, TreeVerification};
pub use triangle_mix::TriangleMixPrefill;
pub use triangle_prefill::{TrianglePlan, TrianglePrefill};
pub use triangle_rows::{TriangleChoice, TriangleGate, WhyDense};
