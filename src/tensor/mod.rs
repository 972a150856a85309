//! Tensors: device memory with a shape.

mod any;
mod shape;
mod transfer;
mod typed;
mod upload;

pub use any::AnyTensor;
pub(crate) use shape::has_len;
pub use typed::Tensor;
