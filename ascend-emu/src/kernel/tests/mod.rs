//! The kernels against the oracle.

mod case;
mod data;
mod edges;
mod flash_attention_score;
mod flash_calls;
mod formulas;
mod golden;
mod layouts;
mod masks;
mod paths;
mod places;
mod properties;

use ascend_testing::calls;
