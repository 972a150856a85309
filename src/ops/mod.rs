//! Operators, each in a folder of its own.

pub(crate) mod attention_update;
pub mod fused_infer_attention_score;
pub mod gather_pa_kv_cache;
pub mod scatter_pa_kv_cache;
