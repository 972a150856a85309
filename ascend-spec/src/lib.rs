//! The contract of the Ascend CANN attention operators, as pure data and functions.
//!
//! What a call may look like and what it computes is written here once: the safe layer checks a call before it is
//! made, the emulator checks it inside the call, and the kernels compute which keys a query row sees. Nothing here
//! touches memory or a device, and checking a call that breaks no rule allocates nothing.
//!
//! ```
//! use ascend_spec::ops::fused_infer_attention_score::{FiaCall, Version};
//! use ascend_spec::{Cann, DType, Soc, Target, TensorDesc, Violation};
//!
//! let shape = |s| TensorDesc::contiguous(DType::Float16, &[1, 8, s, 128]);
//! let (key, value) = ([shape(512).unwrap()], [shape(512).unwrap()]);
//! let mut call = FiaCall::new("BNSD");
//! call.num_heads = 8;
//! call.query = shape(64);
//! call.attention_out = shape(64);
//! (call.key, call.value) = (&key, &value);
//! let target = Target::new(Soc::AtlasA2, Cann::V9_1);
//! assert_eq!(call.check(Version::V1, target)?.problem.kv_len(0), 512);
//!
//! call.sparse_mode = 3; // causal, but no mask is given
//! let refusal = call.check(Version::V1, target).unwrap_err();
//! assert_eq!(refusal.rule.id, "atten_mask.required");
//! # Ok::<(), Violation>(())
//! ```
#![forbid(unsafe_code)]
#![warn(missing_docs)]

#[macro_use]
pub mod operator;

mod allowed;
pub mod attention_problem;
mod cann;
pub mod collective;
mod content_fault;
mod contract;
pub mod declared;
mod dims;
mod dtype;
mod every_operator;
mod format;
pub mod geometry;
mod layout;
pub mod minifloat;
pub mod ops;
mod rule;
mod soc;
mod target;
mod tensor;

pub use cann::{Cann, Release, UnknownRelease};
pub use content_fault::ContentFault;
pub use contract::each_lint;
pub use dims::Dims;
pub use dtype::DType;
pub use every_operator::{every_rule, is_exported};
pub use format::Format;
pub use geometry::{
    CompressedMask, Lengths, MaskDemand, MaskGeometry, Operator, SparseMode, Sparsity, TOKENS_UNBOUNDED, Tile,
    Visibility,
};
pub use layout::{Axes, Extents, Layout, View};
pub use operator::{Change, NewArgument, OperatorVersion};
pub use rule::{
    API_ERROR, FIND_KERNEL_ERROR, INNER_NULLPTR, Level, PARAM_INVALID, PARAM_NULLPTR, RUNTIME_ERROR, Rule, Scope, Span,
    TILING_ERROR, UNSUPPORTED, Violation,
};
pub use soc::Soc;
pub use target::{StridedKeys, Target, UnreleasedTarget};
pub use tensor::TensorDesc;
