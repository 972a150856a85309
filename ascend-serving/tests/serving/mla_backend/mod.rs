//! Multi-head latent attention over its paged cache: whatever the schedule and the form of the queries, every token
//! gets what the definition gives it, in which keys and values are projected and nothing is absorbed.

mod captured;
pub mod definition;
mod engine;
use crate::harness;
mod refusals;
mod schedules;
mod tensors;

pub const LATENT: usize = 512;
pub const ROPE: usize = 64;
pub const DIM: usize = 128;
const LAYERS: usize = 2;
