//! Operators, each in a folder of its own.

pub mod scatter_pa_kv_cache;
