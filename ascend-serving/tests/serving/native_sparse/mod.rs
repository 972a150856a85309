//! Native sparse attention over a paged cache: whatever the schedule, each token attends to the compressed tokens, the
//! selected blocks and the window of its own history, by their definitions.

mod definition;
mod engine;
mod refusals;
mod schedules;

use crate::harness;

/// Query heads, and key heads.
const HEADS: usize = 4;
const KV_HEADS: usize = 2;
const KEY: usize = 192;
const VALUE: usize = 128;
const LAYERS: usize = 2;
