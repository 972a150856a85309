//! The serving layer: steps of engines, drafts, prefixes, graphs of steps, several ranks.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    unreachable_pub,
    reason = "a test fails by panicking, and modules are the program's own"
)]

mod acts;
mod backend_choice;
mod backend_comparison;
mod blocks_in_flight;
mod cache_formats;
mod computed;
mod context_parallel;
mod cross_attention;
mod encoder_attention;
mod graph_backends;
mod graph_pool;
mod grouped_layers;
mod heads;
mod inference_card;
mod interleaved;
mod layer_masks;
mod layer_scales;
mod mla_backend;
mod moved_tokens;
mod multi_item;
mod mxfp8;
mod native_sparse;
mod own_backend;
mod planned_stream;
mod prefix_cache;
mod quantised;
mod quantised_caches;
mod quantised_floats;
mod quantised_latents;
mod quantised_schedule;
mod range_check;
mod refusals;
mod reported;
mod request_states;
mod routes;
mod schedule;
mod shared_keys;
mod shared_memory;
mod shared_pool;
mod side_by_side;
mod sparse_latent;
mod states;
mod step_memory;
mod tree_verification;

use ascend_testing::{harness, tokens};
