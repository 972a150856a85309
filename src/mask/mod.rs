//! Which keys a query sees: masks for the operators, on the host and on a device.
//!
//! A [`Mask`] is what an operator takes: sparse mode, tensor and window together. [`Masks`], from
//! [`Device::masks`](crate::Device::masks), makes them and keeps their tensors in a [`MaskCache`]. A [`HostMask`] is
//! the content of a tensor, in a [`MaskForm`]: which element type, and which value hides.
//!
//! | mask | made by | who uses it |
//! |---|---|---|
//! | none | [`Masks::bidirectional`] | encoders, vision towers, poolers without a causal mask |
//! | causal, compressed | [`Masks::causal`] | prefill and decoding of every serving system |
//! | split-fuse | [`Masks::chunked_prefill`] | vLLM-Ascend, chunks of prompts and decoding rows in one call |
//! | causal, full | [`Masks::causal_full`], [`Masks::causal_matrix`] | operators without sparse modes |
//! | causal, a view of the full one | [`Masks::causal_view`] | operators without sparse modes |
//! | pooling | [`Masks::pooling`] | vLLM-Ascend's pooling runner |
//! | latent attention | [`Masks::mla`] | vLLM-Ascend and SGLang, prefill of multi-head latent attention |
//! | sliding window | [`Masks::sliding_window`], [`Masks::sliding_window_matrix`] | Mistral, Gemma, gpt-oss |
//! | prefix | [`Masks::prefix`], [`Masks::prefix_matrix`], [`Masks::template`] | prefix language models, training |
//! | local chunks | [`Masks::local`] | Llama 4 |
//! | context parallel | [`Masks::context_parallel`] | decoding with drafts on several ranks, vLLM-Ascend |
//! | token tree | [`Masks::tree`] | speculative verification, SGLang |
//! | token tree, without its context | [`Masks::drafts`], [`Masks::packed_drafts`] | verification, latents (CANN 9.1) |
//! | formula | [`Masks::geometry`] | TriangleMix, sparse prefill of long prompts |
//! | custom | [`Masks::custom`] | everything else |
//!
//! # Rows that see nothing
//!
//! A softmax over a row of `-inf` is NaN. The operators of this crate take flags instead, and
//! [`InnerPrecise`](crate::InnerPrecise)'s corrected forms make such a row 0. Where another operator takes an
//! additive mask, [`MaskForm::infinite`] is refused for a mask with such a row: [`MaskForm::lowest`] makes it the
//! mean of the values, which is finite. `f32::MIN` and -1e6 do not help in f16: there both are `-inf`.

#![cfg_attr(not(test), warn(clippy::arithmetic_side_effects))]

mod cache;
mod causal;
mod convert;
mod form;
mod full_masks;
mod host;
mod masks;
mod sliding_window;
mod tree;
mod value;

pub use cache::{CacheCounts, MaskCache};
pub use causal::CausalOrigin;
pub use form::MaskForm;
pub use host::HostMask;
pub(crate) use host::reserve;
pub use masks::Masks;
pub use sliding_window::SlidingWindow;
pub use value::Mask;
