//! The kernels against the oracle.

#[path = "../../../tests/calls/mod.rs"]
mod calls;
mod case;
mod data;
mod edges;
mod flash_attention_score;
mod flash_calls;
mod formulas;
#[path = "../../../tests/golden/mod.rs"]
mod golden;
mod layouts;
mod masks;
mod paths;
mod places;
mod properties;
