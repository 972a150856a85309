//! The next step's lengths in the middle of this one.

use ascend_attention::{Stream, Tensor, bf16};
use ascend_serving::{Attention, AttentionMetadata, BatchRequest, Error};

fn renew(
    stream: &Stream,
    attention: &mut Attention<bf16>,
    metadata: &mut AttentionMetadata,
    next: &[BatchRequest<'_>],
    tokens: &Tensor<bf16>,
) -> Result<(), Error> {
    let mut step = attention.begin(stream, metadata)?;
    step.forward(0, (tokens, tokens, tokens))?;
    metadata.renew(next)?;
    step.forward(1, (tokens, tokens, tokens))?;
    Ok(())
}

fn main() {}
