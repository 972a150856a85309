//! TriangleMix on Huawei Ascend CANN: prefill that leaves out the middle of the causal triangle in the layers that do
//! not need it, by calls of the stock operator. The source is arXiv 2507.21526; which keys a row sees is
//! [`TriangleMix`](ascend_attention::spec::geometry::TriangleMix).
//!
//! - [`TriangleMixBackend`]: the backend for steps of [`ascend_serving`]; [`TrianglePrefill`]: the prefill of one
//!   prompt. [`TriangleThresholds`] decide when leaving keys out is worth the additional calls, [`TriangleChoice`]
//!   reports it. [`TriangleCost`] predicts which calls do so with less work, [`BlockSparseUse`] chooses them.
//! - [`TriangleLayers`]: the layers that leave keys out; [`TrianglePreset`]: those that are published for a model.
//! - [`TriangleProbe`]: measures which layers can do without the middle, from a [`LayerSample`] on the host or a
//!   [`WeightGradientSample`] on a device.
//! - [`TriangleMasks`]: the masks of each part of the triangle, for calls of one's own.
//! - [`TriangleForecast`], [`LayerComparison`]: what is saved, counted and measured.
//!
//! Without the feature `emulation`, which is on by default, the crate needs an NPU to run. Nothing has run on an NPU
//! yet.

#![warn(missing_docs)]
#![forbid(unsafe_code)]
#![cfg_attr(not(test), warn(clippy::arithmetic_side_effects))]
#![cfg_attr(docsrs, feature(doc_cfg))]

mod backend;
mod comparison;
mod cost;
mod forecast;
mod layers;
mod masks;
mod prefill;
mod presets;
mod probe;
mod rows;
pub mod rules;
mod sample;
mod weight_gradient;

pub use backend::TriangleMixBackend;
pub use comparison::LayerComparison;
pub use cost::TriangleCost;
pub use forecast::TriangleForecast;
pub use layers::TriangleLayers;
pub use masks::TriangleMasks;
pub use prefill::{TrianglePlan, TrianglePrefill};
pub use presets::{PresetSource, TrianglePreset};
pub use probe::{Contribution, ProbeMeasure, TriangleProbe};
pub use rows::{BlockSparseUse, TriangleChoice, TriangleThresholds, WhyDense};
pub use sample::{LayerSample, PartSums, SampleMeasure, SampleReal};
pub use weight_gradient::WeightGradientSample;
