//! Tensors: device memory with a shape.

mod any;
mod range_report;
mod shape;
mod transfer;
mod typed;

pub use any::AnyTensor;
pub use range_report::{Number, RangeReport};
pub(crate) use shape::has_len;
pub use typed::Tensor;
