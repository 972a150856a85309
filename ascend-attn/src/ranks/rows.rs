//! Inputs of the batch, which depend on request and token alone: one device and the ranks compute with equal ones.

use ascend_attention::{Element, Stream, Tensor, bf16, f16};
use ascend_serving::Result;

use super::Work;

/// An element type of attention.
pub(super) trait Half: Element {
    fn of(number: f32) -> Self;
    fn to(self) -> f32;
}

impl Half for f16 {
    fn of(number: f32) -> Self {
        Self::from_f32(number)
    }

    fn to(self) -> f32 {
        self.to_f32()
    }
}

impl Half for bf16 {
    fn of(number: f32) -> Self {
        Self::from_f32(number)
    }

    fn to(self) -> f32 {
        self.to_f32()
    }
}

/// Which rows.
#[derive(Clone, Copy, Debug)]
pub(super) enum Kind {
    /// Queries of a rank's heads.
    Query {
        rank: usize,
    },
    Key,
    Value,
}

/// The rows of consecutive tokens of a request, `[tokens, heads, D]`: random numbers between -1 and 1.
pub(super) fn rows<T: Half>(work: &Work, kind: Kind, request: usize, tokens: std::ops::Range<usize>) -> Vec<T> {
    let (kind, heads) = match kind {
        Kind::Query { rank } => (2 + rank, work.heads),
        Kind::Key => (0, work.kv_heads),
        Kind::Value => (1, work.kv_heads),
    };
    let mut rows = Vec::with_capacity(tokens.len() * heads * work.head_dim);
    for token in tokens {
        let mut state = ((kind * work.requests + request) * work.all_tokens() + token) as u64;
        state = (state + 1).wrapping_mul(0x9E37_79B9_7F4A_7C15);
        for _ in 0..heads * work.head_dim {
            // Xorshift.
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            rows.push(T::of((state >> 40) as f32 / (1u64 << 23) as f32 - 1.0));
        }
    }
    rows
}

/// Keys and values of consecutive tokens of a request, `[tokens, Nkv, D]`.
pub(super) fn upload_keys<T: Half>(
    stream: &Stream,
    work: &Work,
    request: usize,
    tokens: std::ops::Range<usize>,
) -> Result<[Tensor<T>; 2]> {
    let shape = [tokens.len(), work.kv_heads, work.head_dim];
    let upload = |kind| stream.upload(&rows::<T>(work, kind, request, tokens.clone()), shape);
    Ok([upload(Kind::Key)?, upload(Kind::Value)?])
}

/// The rows of all requests in a step.
pub(super) fn of_step<T: Half>(work: &Work, kind: Kind, step: usize) -> Vec<T> {
    (0..work.requests).flat_map(|request| rows::<T>(work, kind, request, tokens_of(work, step))).collect()
}

/// Keys and values of all requests in a step.
pub(super) fn upload_step<T: Half>(stream: &Stream, work: &Work, step: usize) -> Result<[Tensor<T>; 2]> {
    let upload = |kind| stream.upload(&of_step::<T>(work, kind, step), [work.rows(), work.kv_heads, work.head_dim]);
    Ok([upload(Kind::Key)?, upload(Kind::Value)?])
}

/// The new tokens of a request in a step.
pub(super) fn tokens_of(work: &Work, step: usize) -> std::ops::Range<usize> {
    let first = work.tokens + step * work.new;
    first..first + work.new
}

/// The queries of a rank in a step, `[rows, N, D]`.
pub(super) fn queries<T: Half>(work: &Work, rank: usize, step: usize) -> Vec<T> {
    of_step(work, Kind::Query { rank }, step)
}
