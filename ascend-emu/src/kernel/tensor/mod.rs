//! Tensors in memory: element types, strided access, inputs and outputs of any element type.

pub(crate) mod element;
pub(crate) mod input;
pub(crate) mod output;
pub(crate) mod strided;
