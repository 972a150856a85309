//! The operators around FlashAttentionScore, prompt and incremental attention through their C functions.

#[macro_use]
pub(crate) mod call;
#[macro_use]
mod case;
mod cuts;
mod guarded;
mod incre;
mod memory;
mod prompt;
mod reference;
mod ring;
mod score;
