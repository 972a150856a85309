//! Tensors: device memory with a shape.

mod any;
mod shape;
mod typed;
mod upload;

pub use any::AnyTensor;
pub use typed::Tensor;
