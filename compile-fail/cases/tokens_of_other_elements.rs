//! Tokens of another element type than the cache has.

use ascend_attention::{Tensor, bf16, f16};
use ascend_serving::Error;
use ascend_serving::Step;

fn forward(
    step: &mut Step<'_, bf16>,
    query: &Tensor<bf16>,
    key: &Tensor<f16>,
) -> Result<(), Error> {
    step.forward(0, (query, key, key))?;
    Ok(())
}

fn main() {}
