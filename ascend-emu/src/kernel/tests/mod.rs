//! The kernels against the oracle.

mod case;
mod data;
mod delta_rule;
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
use half::f16;

/// Numbers between -1 and 1 that a half holds.
pub(super) fn halves(seed: u32, count: usize) -> Vec<f16> {
    let mut bits = seed;
    let numbers = (0..count).map(|_| {
        bits = bits.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        f16::from_f32((bits >> 20) as f32 / 2048.0 - 1.0)
    });
    numbers.collect()
}
