//! Multi-head latent attention over its paged cache: whatever the schedule and the form of the queries, every token gets
//! what the definition gives it, in which keys and values are projected and nothing is absorbed.

#![allow(
    clippy::unwrap_used,
    clippy::panic,
    unreachable_pub,
    reason = "a test fails by panicking"
)]

mod definition;
mod engine;
#[path = "../harness/mod.rs"]
mod harness;
mod refusals;
mod schedules;

const LATENT: usize = 512;
const ROPE: usize = 64;
const DIM: usize = 128;
const LAYERS: usize = 2;
