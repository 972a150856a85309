//! What most programs use, for `use ascend_attention::prelude::*`.
//!
//! It has no `Error`, `Result`, `Violation` and `rules`, which other crates here have as well: a program
//! can import the preludes of `ascend_attention` and `ascend_serving` together, beside names of its own.
//!
//! ```
//! use ascend_attention::prelude::*;
//!
//! # fn main() -> ascend_attention::Result<()> {
//! let stream = Runtime::auto()?.device(0)?.stream()?;
//! let ones = stream.upload(&[bf16::ONE; 2 * 16 * 64], [1, 2, 16, 64])?;
//! let attention = FusedInferAttention::new(Layout::Bnsd).heads(2).scale(0.125);
//! let plan = attention.plan((&ones, &ones, &ones))?;
//! let output = plan.launch(&stream, (&ones, &ones, &ones))?;
//! assert_eq!(output.attention.download(&stream)?[0], bf16::ONE);
//! # Ok(())
//! # }
//! ```

pub use crate::attention::{
    BlockTable, Cache, Cumulative, FusedInferAttention, InnerPrecise, Inputs, Output, PerRequest, Plan, PseShift,
    Quantisation,
};
pub use crate::graph::{Capturing, Graph};
pub use crate::mask::{CausalOrigin, HostMask, Mask, MaskForm, Masks, SlidingWindow};
pub use crate::{
    AnyTensor, DType, Device, DeviceBuffer, Element, Event, HostBuffer, Layout, Machine, Number, Platform, Queue,
    Runtime, SparseMode, Stream, Tensor, bf16, f16,
};
