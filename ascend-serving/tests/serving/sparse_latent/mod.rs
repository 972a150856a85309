//! Sparse attention over a paged cache of latents: whatever the schedule, each token attends to the keys that its own
//! indexer's scores choose by their definition, in every layer that shares the choice.

mod captured;
mod definition;
mod engine;
mod quantised;
mod refusals;
mod schedules;

use crate::harness;

const LATENT: usize = 512;
const ROPE: usize = 64;
/// Elements of an indexer's head.
const INDEX: usize = 128;
const HEADS: usize = 2;
const INDEX_HEADS: usize = 8;
/// Keys that a token reads.
const COUNT: usize = 24;
const LAYERS: usize = 3;
/// The last layer shares the choice of the one before.
const INDEXERS: usize = 2;
