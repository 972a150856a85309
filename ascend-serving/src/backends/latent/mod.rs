//! Multi-head latent attention: the calls that compute it.

mod context_chunks;
mod decode;
mod mla;
mod prefill;

pub use mla::Mla;
