//! Multi-head latent attention: who projects what, and the calls that compute it.

mod context_chunks;
mod decode;
mod mla;
mod prefill;
mod tensors;

pub use mla::Mla;
pub use tensors::{LatentForm, LatentRows, LatentTensors, UpProjected, UpProjection};
