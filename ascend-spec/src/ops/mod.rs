//! Operators, one folder each: the description of a call, its rules, and what a call that holds them asks to compute.

pub mod flash_attention_score;
pub mod ring_attention_update;
