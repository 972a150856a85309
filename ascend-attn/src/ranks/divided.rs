//! The batch on several ranks, each of which has a part of the keys and some of the heads.

use std::ops::Range;
use std::thread;
use std::time::Duration;

use ascend_attention::comm::Communicator;
use ascend_attention::{Device, Number, Stream};
use ascend_serving::kv::{CacheShape, CacheWrite, PadPolicy, PagedKvCache, Sequence};
use ascend_serving::{AttentionShape, BatchRequest, ContextAttention, Error, Result, rules};

use super::Work;
use super::rows::{Kind, of_step, queries, upload_keys};
use super::whole::all_queries;

/// The parts of a layer, as its marks name them, in order.
pub(super) const PARTS: [&str; 5] = ["write", "gather", "attention", "exchange", "merge"];

/// Steps on one rank.
pub(super) struct RankSteps {
    /// The time of each part of each step.
    pub(super) times: Vec<[Duration; PARTS.len()]>,
    /// The outputs of the last step, `[rows, N, D]`.
    pub(super) output: Vec<f32>,
    /// The rows of the last step that the rank has computed.
    pub(super) rows: Vec<Range<usize>>,
    /// Bytes that the rank sends in a layer of a step.
    pub(super) sent_bytes: u64,
}

pub(super) fn steps<T: Number>(devices: &[Device], work: &Work) -> Result<Vec<RankSteps>> {
    let ranks = Communicator::all(devices)?;
    thread::scope(|scope| {
        let threads: Vec<_> = ranks.into_iter().map(|rank| scope.spawn(|| steps_of_rank::<T>(rank, work))).collect();
        let joined = threads.into_iter().map(|thread| match thread.join() {
            Ok(outcome) => outcome,
            Err(panic) => std::panic::resume_unwind(panic),
        });
        let mut outcomes: Vec<Result<RankSteps>> = joined.collect();
        // The rank that failed by itself says why; the others that it has left.
        let own = |outcome: &Result<RankSteps>| outcome.as_ref().is_err_and(|error| !is_of_others(error));
        if let Some(failed) = outcomes.iter().position(own) {
            outcomes.swap(0, failed);
        }
        outcomes.into_iter().collect()
    })
}

/// Whether an error may be about what another rank has done.
fn is_of_others(error: &Error) -> bool {
    use ascend_attention::Error as Call;
    error.breaks(&rules::RANKS_BATCH) || matches!(error, Error::Attention(Call::Hccl { .. } | Call::Acl { .. }))
}

fn steps_of_rank<T: Number>(communicator: Communicator, work: &Work) -> Result<RankSteps> {
    let stream = communicator.device().stream()?;
    let blocks = work.requests * work.all_tokens().div_ceil(work.block_size * work.ranks);
    let shape = CacheShape::new(1, work.kv_heads, work.head_dim);
    let pad = PadPolicy::SkipNegative;
    let cache = PagedKvCache::<T>::new(stream.device(), blocks, work.block_size, shape, pad)?;
    let heads = AttentionShape::new(work.heads, work.kv_heads, work.head_dim);
    let mut attention = ContextAttention::new(communicator, heads, cache, work.run)?;
    let mut sequences = Vec::with_capacity(work.requests);
    for request in 0..work.requests {
        let mut sequence = attention.sequence();
        fill(&stream, &mut attention, &mut sequence, work, request)?;
        sequences.push(sequence);
    }
    let (mut times, mut output, mut rows, mut sent_bytes) = (Vec::new(), Vec::new(), Vec::new(), 0);
    for step in 0..work.steps {
        for sequence in &mut sequences {
            attention.grow(&stream, sequence, work.new)?;
        }
        let requests: Vec<_> = sequences.iter().map(|sequence| BatchRequest::of(sequence, work.new)).collect();
        let query = match work.by_rows {
            true => all_queries::<T>(work, step),
            false => queries::<T>(work, attention.rank(), step),
        };
        rows = match work.by_rows {
            true => attention.division().split(&requests, PadPolicy::SkipNegative)?.rows(attention.rank()),
            false => std::iter::once(0..work.rows()).collect(),
        };
        let upload = |all: &[T], heads: usize| {
            let row = heads * work.head_dim;
            let own: Vec<T> = rows.iter().flat_map(|rows| all[rows.start * row..rows.end * row].to_vec()).collect();
            stream.upload(&own, [own.len() / row, heads, work.head_dim])
        };
        let [key, value] = [Kind::Key, Kind::Value].map(|kind| upload(&of_step::<T>(work, kind, step), work.kv_heads));
        let (query, key, value) = (upload(&query, work.heads_of_rank())?, key?, value?);
        // The ranks begin together, so that none waits for another in its times.
        if let Some(communicator) = attention.communicator_mut() {
            communicator.barrier(&stream)?;
        }
        let mut current = match work.by_rows {
            true => attention.begin_rows(&stream, &requests)?,
            false => attention.begin(&stream, &requests)?,
        };
        sent_bytes = current.sent_bytes();
        current.mark_parts();
        let attended = current.forward(0, (&query, &key, &value))?.clone();
        stream.synchronize()?;
        let mut parts = [Duration::ZERO; PARTS.len()];
        for pair in current.marks().windows(2) {
            if let [(_, start), (part, end)] = pair
                && let Some(at) = PARTS.iter().position(|known| known == part)
            {
                parts[at] = end.elapsed_since(start)?;
            }
        }
        times.push(parts);
        current.end()?;
        if step + 1 == work.steps {
            output = attended.download(&stream)?.into_iter().map(|x| x.to_f64() as f32).collect();
        }
    }
    Ok(RankSteps { times, output, rows, sent_bytes })
}

/// Writes the keys of a request that are cached before the first step and that the rank holds.
fn fill<T: Number>(
    stream: &Stream,
    attention: &mut ContextAttention<T>,
    sequence: &mut Sequence,
    work: &Work,
    request: usize,
) -> Result<()> {
    attention.grow(stream, sequence, work.tokens)?;
    let division = attention.division();
    let split = division.split(&[BatchRequest::of(sequence, work.tokens)], PadPolicy::SkipNegative)?;
    let [key, value] = upload_keys::<T>(stream, work, request, 0..work.tokens)?;
    let write = CacheWrite::plan(attention.cache(), stream, split.slots(attention.rank()), &key, &value)?;
    attention.cache_mut().write(stream, &write, 0, &key, &value)?;
    Ok(attention.mark_computed(sequence, work.tokens)?)
}
