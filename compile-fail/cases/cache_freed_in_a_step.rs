//! The cache, the stream or a sequence's blocks gone while a step uses them.

use ascend_attention::{Stream, Tensor, bf16};
use ascend_serving::kv::Sequence;
use ascend_serving::{Attention, AttentionMetadata, BatchRequest, Error};

fn cache(
    stream: Stream,
    mut attention: Attention<bf16>,
    metadata: &AttentionMetadata,
    tokens: &Tensor<bf16>,
) -> Result<(), Error> {
    let mut step = attention.begin(&stream, metadata)?;
    drop(attention);
    drop(stream);
    step.forward(0, (tokens, tokens, tokens))?;
    Ok(())
}

fn blocks(mut sequence: Sequence) {
    let request = BatchRequest::of(&sequence, 1);
    let _ = sequence.truncate(0);
    let _ = request.new;
}

fn main() {}
