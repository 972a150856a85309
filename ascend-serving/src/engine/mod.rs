//! The attention of a model, step by step and layer by layer.

mod attention;
mod grouped_attention;
mod grouped_batch;
mod layer_check;
mod ran_layers;

pub use attention::{Attention, Step};
pub use grouped_attention::{GroupedAttention, GroupedStep, LayerGroup};
pub(crate) use grouped_attention::{same_causality, same_groups};
pub use grouped_batch::{GroupedMetadata, GroupedRequest, GroupedSequence};
pub(crate) use layer_check::StepRows;
pub(crate) use ran_layers::RanLayers;
