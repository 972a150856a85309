//! FusedInferAttentionScore: describe a call, plan it once, launch it per layer.
//!
//! [`FusedInferAttention`] is the way for most programs. [`Arguments`] takes every argument of the operator by name, for
//! tools that replay calls.

mod arguments;
mod builder;
mod call;
mod descriptor;
mod operator;
mod parameter;
mod plan;
mod tensor_list;

pub use arguments::Arguments;
pub use builder::{FusedInferAttention, InnerPrecise};
pub use parameter::Parameter;
pub use plan::{Output, Plan};
pub use tensor_list::TensorList;
