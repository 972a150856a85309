//! Keys written into a cache that an engine owns, by somebody who may only look at it; and into one that was given
//! away.

use ascend_attention::{Stream, Tensor, bf16};
use ascend_serving::kv::{CacheWrite, PagedKvCache};
use ascend_serving::{Attention, AttentionShape, Backends, Error};

fn look(
    stream: &Stream,
    attention: &Attention<bf16>,
    write: &CacheWrite,
    tokens: &Tensor<bf16>,
) -> Result<(), Error> {
    attention.cache().write(stream, write, 0, tokens, tokens)
}

fn given_away(
    stream: &Stream,
    mut cache: PagedKvCache<bf16>,
    write: &CacheWrite,
    tokens: &Tensor<bf16>,
) -> Result<(), Error> {
    let _attention = Attention::new(AttentionShape::new(1, 1, 64), cache, Backends::none());
    cache.write(stream, write, 0, tokens, tokens)
}

fn main() {}
