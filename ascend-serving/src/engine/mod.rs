//! The attention of a model, step by step and layer by layer.

mod attention;
mod attention_options;
mod backend_choice;
mod backend_comparison;
mod cache_accuracy;
mod cached_tokens;
mod cross_attention;
mod element_place;
mod encoder_attention;
mod key_choice;
mod layer_check;
mod layer_group;
mod layer_inputs;
mod native_plan;
mod native_sparse;
mod native_step;
mod native_tensors;
mod queued_layers;
mod range_check;
mod sparse_calls;
mod sparse_inputs;
mod sparse_latent;
mod sparse_step;
mod step;
mod step_indexers;
mod two_caches;

pub use attention::Attention;
pub use attention_options::AttentionOptions;
pub use backend_choice::BackendChoice;
pub use backend_comparison::{
    BackendComparison, BackendDeviation, BackendTrial, ServedStep, StepComparison, compare_backends,
};
pub use cache_accuracy::{CacheAccuracy, compare_caches};
pub use cross_attention::{CrossAttention, CrossStep, Encoding};
pub use encoder_attention::{EncoderAttention, EncoderPlan};
pub use key_choice::KeyChoice;
pub(crate) use layer_check::{STEP_HEADS_FIX, StepRows};
pub use layer_group::LayerGroup;
pub(crate) use layer_group::LayerPlace;
pub use layer_inputs::LayerInputs;
pub(crate) use layer_inputs::names_of_keys;
pub use native_sparse::NativeSparse;
pub use native_step::NativeStep;
pub use native_tensors::{NativeBranches, NativeTensors};
pub(crate) use queued_layers::{QueuedLayers, STEP_AGAIN};
pub use range_check::{LayerTensor, RangeCheck, RangeFinding};
pub(crate) use range_check::{RangeChecker, latent_tensors, packed_tensors, take_findings};
pub(crate) use sparse_calls::{latents_and_ropes, paged};
pub use sparse_inputs::{IndexerTensors, SparseTensors};
pub(crate) use sparse_inputs::{LayerQueries, SparseRows, lengths_and_blocks};
pub use sparse_latent::SparseLatent;
pub(crate) use sparse_step::SPARSE_AGAIN;
pub use sparse_step::SparseStep;
pub use step::Step;
pub(crate) use step_indexers::StepIndexers;
pub(crate) use two_caches::begin_in;
