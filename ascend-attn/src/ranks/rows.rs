//! Inputs of the batch, which depend on request and token alone: one device and the ranks compute with equal ones.

use ascend_attention::{Number, Stream, Tensor};
use ascend_serving::Result;

use super::Work;
use crate::random::Random;

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
pub(super) fn rows<T: Number>(work: &Work, kind: Kind, request: usize, tokens: std::ops::Range<usize>) -> Vec<T> {
    let (kind, heads) = match kind {
        Kind::Query { rank } => (2 + rank, work.heads),
        Kind::Key => (0, work.kv_heads),
        Kind::Value => (1, work.kv_heads),
    };
    let mut rows = Vec::with_capacity(tokens.len() * heads * work.head_dim);
    for token in tokens {
        let seed = (kind * work.requests + request) * work.all_tokens() + token;
        let mut random = Random(seed as u64);
        rows.extend((0..heads * work.head_dim).map(|_| T::from_f32(random.number())));
    }
    rows
}

/// Keys and values of consecutive tokens of a request, `[tokens, Nkv, D]`.
pub(super) fn upload_keys<T: Number>(
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
pub(super) fn of_step<T: Number>(work: &Work, kind: Kind, step: usize) -> Vec<T> {
    (0..work.requests).flat_map(|request| rows::<T>(work, kind, request, tokens_of(work, step))).collect()
}

/// Keys and values of all requests in a step.
pub(super) fn upload_step<T: Number>(stream: &Stream, work: &Work, step: usize) -> Result<[Tensor<T>; 2]> {
    let upload = |kind| stream.upload(&of_step::<T>(work, kind, step), [work.rows(), work.kv_heads, work.head_dim]);
    Ok([upload(Kind::Key)?, upload(Kind::Value)?])
}

/// The new tokens of a request in a step.
pub(super) fn tokens_of(work: &Work, step: usize) -> std::ops::Range<usize> {
    let first = work.tokens + step * work.new;
    first..first + work.new
}

/// The queries of a rank in a step, `[rows, N, D]`.
pub(super) fn queries<T: Number>(work: &Work, rank: usize, step: usize) -> Vec<T> {
    of_step(work, Kind::Query { rank }, step)
}
