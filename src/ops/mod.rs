//! Operators, each in a folder of its own.

pub(crate) mod attention_update;
pub mod scatter_pa_kv_cache;
