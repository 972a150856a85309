//! The batch on one device, which has all keys and the heads of all ranks.

use std::time::Duration;

use ascend_attention::{Device, Number, Stream};
use ascend_serving::kv::{CacheShape, CacheWrite, PadPolicy, PagedKvCache, Sequence};
use ascend_serving::{Attention, AttentionShape, Backends, BatchRequest, Result, StatePolicy};

use super::Work;
use super::rows::{queries, upload_keys, upload_step};

/// Steps on one device.
pub(super) struct WholeSteps {
    /// The time of each step.
    pub(super) times: Vec<Duration>,
    /// The outputs of the last step, `[rows, heads, D]`, with the heads in the order of [`place`].
    pub(super) output: Vec<f32>,
}

/// The number of a rank's head among those of all ranks: heads over one key head are next to each other.
pub(super) fn place(work: &Work, rank: usize, head: usize) -> usize {
    let group = work.heads / work.kv_heads.max(1);
    let (key_head, inner) = (head / group.max(1), head % group.max(1));
    (key_head * work.ranks + rank) * group + inner
}

pub(super) fn steps<T: Number>(device: &Device, work: &Work) -> Result<WholeSteps> {
    let stream = device.stream()?;
    let blocks = work.requests * work.all_tokens().div_ceil(work.block_size);
    let shape = CacheShape::new(1, work.kv_heads, work.head_dim);
    let cache = PagedKvCache::<T>::new(device, blocks, work.block_size, shape, PadPolicy::SkipNegative)?;
    let heads = AttentionShape::new(work.heads * work.ranks, work.kv_heads, work.head_dim);
    let mut attention = Attention::new(heads, cache, Backends::standard(device));
    let mut sequences = Vec::with_capacity(work.requests);
    for request in 0..work.requests {
        let mut sequence = attention.sequence();
        fill(&stream, &mut attention, &mut sequence, work, request)?;
        sequences.push(sequence);
    }
    let (mut times, mut output) = (Vec::new(), Vec::new());
    for step in 0..work.steps {
        for sequence in &mut sequences {
            attention.grow(&stream, sequence, work.new)?;
        }
        let [key, value] = upload_step::<T>(&stream, work, step)?;
        let query = all_queries::<T>(work, step);
        let query = stream.upload(&query, [work.rows(), heads.heads, work.head_dim])?;
        let requests: Vec<_> = sequences.iter().map(|sequence| BatchRequest::of(sequence, work.new)).collect();
        let metadata = attention.metadata(&requests, StatePolicy::default())?;
        let mut current = attention.begin(&stream, &metadata)?;
        let start = stream.record_timing_event()?;
        let attended = current.forward(0, (&query, &key, &value))?.clone();
        let end = stream.record_timing_event()?;
        current.end()?;
        stream.synchronize()?;
        times.push(end.elapsed_since(&start)?);
        if step + 1 == work.steps {
            output = attended.download(&stream)?.into_iter().map(|x| x.to_f64() as f32).collect();
        }
    }
    Ok(WholeSteps { times, output })
}

/// Writes the keys of a request that are cached before the first step.
fn fill<T: Number>(
    stream: &Stream,
    attention: &mut Attention<T>,
    sequence: &mut Sequence,
    work: &Work,
    request: usize,
) -> Result<()> {
    let slots = attention.cache_mut().grow(stream, sequence, work.tokens)?;
    let [key, value] = upload_keys::<T>(stream, work, request, 0..work.tokens)?;
    let write = CacheWrite::plan(attention.cache(), stream, &slots, &key, &value)?;
    attention.cache_mut().write(stream, &write, 0, &key, &value)?;
    Ok(attention.cache().mark_computed(sequence, work.tokens)?)
}

/// The queries of all ranks, `[rows, heads of all, D]`.
pub(super) fn all_queries<T: Number>(work: &Work, step: usize) -> Vec<T> {
    let (heads, dim) = (work.heads * work.ranks, work.head_dim);
    let mut all = vec![T::from_f32(0.0); work.rows() * heads * dim];
    for rank in 0..work.ranks {
        let own = queries::<T>(work, rank, step);
        for (row, head) in (0..work.rows()).flat_map(|row| (0..work.heads).map(move |head| (row, head))) {
            let (from, to) = ((row * work.heads + head) * dim, (row * heads + place(work, rank, head)) * dim);
            all[to..to + dim].copy_from_slice(&own[from..from + dim]);
        }
    }
    all
}
