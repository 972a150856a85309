//! Operators, one folder each: the description of a call, its rules, and what a call that holds them asks to compute.

pub mod flash_attention_score;
pub mod gather_pa_kv_cache;
pub mod incre_flash_attention;
pub mod prompt_flash_attention;
pub mod ring_attention_update;
