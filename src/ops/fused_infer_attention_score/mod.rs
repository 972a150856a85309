//! FusedInferAttentionScore: describe a call, plan it once, launch it per layer.
//!
//! [`FusedInferAttention`] is the way for most programs. What a call reads beyond query, key and value (a paged cache's
//! [`BlockTable`], rotary parts, a [`SharedPrefix`], scales of a [`Quantisation`], ...) is given together with them, as
//! [`Inputs`]. [`Arguments`] takes every argument of the operator by name, for tools that replay calls.

mod arguments;
mod block_table;
mod builder;
mod contents;
mod inputs;
mod lengths;
mod plan;
mod pse_shift;
mod quantisation;
mod shared_prefix;
mod soft_cap;
mod unset;
mod versions;

pub use crate::ops::attention_settings::InnerPrecise;
pub use arguments::Arguments;
pub use ascend_spec::ops::fused_infer_attention_score::{AntiquantMode, Cache, Parameter};
pub use block_table::BlockTable;
pub use builder::FusedInferAttention;
pub use contents::PaddingSize;
pub(crate) use contents::Reading;
pub(crate) use inputs::{CallTensors, Features, Launch};
pub use inputs::{Inputs, Output};
pub use lengths::{CallLengths, Cumulative, PerRequest};
pub use plan::{AttentionOperation, Plan};
pub(crate) use plan::{CapturedTable, OwnedBindings};
pub use pse_shift::{Distance, PseShift};
pub use quantisation::{Affine, Antiquantisation, Quantisation};
pub use shared_prefix::SharedPrefix;
pub(crate) use versions::phases_of;
