//! The attention of a model, step by step and layer by layer.

mod attention;
mod attention_graphs;
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
mod in_place;
mod layer_check;
mod layer_group;
mod layer_scales;
mod leased_states;
mod linear_buffers;
mod linear_calls;
mod linear_step;
mod planned_layers;
mod range_check;
mod range_findings;
mod replayed_layers;
mod step;

pub use attention::Attention;
pub use attention_graphs::AttentionGraphs;
pub use attention_options::AttentionOptions;
pub use backend_choice::BackendChoice;
pub use backend_comparison::{
    BackendComparison, BackendDeviation, BackendTrial, ServedStep, StepComparison, compare_backends,
};
pub use cache_accuracy::{CacheAccuracy, compare_caches};
pub use convolution_step::ConvolutionInputs;
pub use cross_attention::{CrossAttention, CrossStep, Encoding};
pub use encoder_attention::EncoderAttention;
pub(crate) use layer_check::{STEP_HEADS_FIX, StepRows, check_output};
pub use layer_group::LayerGroup;
pub use linear_buffers::{ConvolutionGraphTensors, LinearGraphTensors};
pub use range_check::{LayerTensor, RangeCheck, RangeFinding};
pub use step::Step;
