//! The contract of FlashAttentionScore: the operator's verdicts, and a call for every rule.

mod bounds;
mod described;
mod rules;
mod verdicts;
