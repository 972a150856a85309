//! The attention of a model, step by step and layer by layer.

mod attention;
mod attention_options;
mod backend_choice;
mod backend_comparison;
mod cache_accuracy;
mod cached_tokens;
mod convolution_calls;
mod convolution_step;
mod cross_attention;
mod element_place;
mod encoder_attention;
mod layer_check;
mod layer_group;
mod layer_inputs;
mod layer_scales;
mod leased_states;
mod linear_calls;
mod linear_step;
mod queued_layers;
mod range_check;
mod step;

pub use attention::Attention;
pub use attention_options::AttentionOptions;
pub use backend_choice::BackendChoice;
pub use backend_comparison::{
    BackendComparison, BackendDeviation, BackendTrial, ServedStep, StepComparison, compare_backends,
};
pub use cache_accuracy::{CacheAccuracy, compare_caches};
pub(crate) use convolution_calls::{ConvolutionCalls, ConvolutionRows, ConvolutionTensors};
pub use convolution_step::ConvolutionInputs;
pub use cross_attention::{CrossAttention, CrossStep, Encoding};
pub use encoder_attention::EncoderAttention;
pub(crate) use layer_check::{STEP_HEADS_FIX, StepRows};
pub use layer_group::LayerGroup;
pub(crate) use layer_group::LayerPlace;
pub(crate) use layer_inputs::names_of_keys;
pub use layer_inputs::{AnyLayerInputs, LayerInputs};
pub(crate) use leased_states::{LeasedStates, STATES_AGAIN};
pub(crate) use queued_layers::{QueuedLayers, STEP_AGAIN};
pub use range_check::{LayerTensor, RangeCheck, RangeFinding};
pub(crate) use range_check::{RangeChecker, latent_tensors, packed_tensors, take_findings};
pub use step::Step;
