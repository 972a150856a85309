//! Another block table for a step that has begun.

use ascend_attention::attention::BlockTable;
use ascend_attention::bf16;
use ascend_serving::Step;

fn rebind(step: &mut Step<'_, bf16>, other: BlockTable) {
    step.block_table = other;
}

fn main() {}
