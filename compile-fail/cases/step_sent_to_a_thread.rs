//! A step that goes on in a thread which may outlive its cache and stream.

use ascend_attention::{Stream, Tensor, bf16};
use ascend_serving::{Attention, AttentionMetadata, Error};

fn send(
    stream: &Stream,
    attention: &mut Attention<bf16>,
    metadata: &AttentionMetadata,
    tokens: Tensor<bf16>,
) -> Result<(), Error> {
    let mut step = attention.begin(stream, metadata)?;
    std::thread::spawn(move || step.forward(0, (&tokens, &tokens, &tokens)).map(drop));
    Ok(())
}

fn main() {}
