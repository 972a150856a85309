//! The output of a replayed layer read after the next layer has overwritten it.

use ascend_attention::{Stream, Tensor, bf16};
use ascend_serving::Step;
use ascend_serving::Error;

fn collected(
    stream: &Stream,
    step: &mut Step<'_, bf16>,
    rows: &Tensor<bf16>,
) -> Result<Vec<bf16>, Error> {
    let first = step.forward(0, (rows, rows, rows))?;
    step.forward(1, (rows, rows, rows))?;
    Ok(first.download(stream)?)
}

fn main() {}
