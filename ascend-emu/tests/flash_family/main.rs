//! The operators around FlashAttentionScore, prompt and incremental attention through their C functions.

#![allow(
    clippy::undocumented_unsafe_blocks,
    reason = "each call keeps the contract of ascend_emu::abi: pointers are null or to live objects"
)]
#![allow(clippy::unwrap_used, clippy::panic, reason = "tests")]

#[path = "../bench/mod.rs"]
mod bench;
#[macro_use]
mod call;
#[macro_use]
mod case;
mod cuts;
mod incre;
mod prompt;
mod reference;
mod ring;
mod score;
