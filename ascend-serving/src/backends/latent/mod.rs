//! Multi-head latent attention: the calls that compute it.

mod cached_latents;
mod context_chunks;
mod mla;
mod prefill;
mod refusals;

pub(super) use mla::{is_batch_invariant, program, quantised_program};
