//! Ranks against one device and against memory, in one run: `cargo bench -p ascend-attn --bench ranks`.
//!
//! | case | measured | compared with |
//! |---|---|---|
//! | all-gather | 64 MiB of each of two ranks to both | as many bytes copied by as many threads as the machine has |
//! | decode | a token of each of 8 requests with 32k keys, which two ranks divide, 8 query heads each | one device with all keys and 16 heads |
//!
//! Ranks are threads of this process, each with a device of the emulation. The machine's threads are shared by all
//! devices, so that two ranks have no more of them than one device.

mod pairs;

use std::panic::resume_unwind;
use std::process::ExitCode;
use std::thread;

use ascend_attention::comm::Communicator;
use ascend_attention::{Device, Runtime, Stream, Tensor, f16};
use ascend_serving::kv::{CacheShape, CacheWrite, PadPolicy, PagedKvCache, Sequence};
use ascend_serving::{Attention, AttentionShape, Backends, BatchRequest, ContextAttention, Result, StatePolicy};
use pairs::{numbers, report, seconds};
use rayon::prelude::*;

const RANKS: usize = 2;
/// Elements that a rank gives to an all-gather, and of a part of the copy.
const GATHERED: usize = 32 << 20;
const PART: usize = 1 << 16;
const REQUESTS: usize = 8;
const KEYS: usize = 32 * 1024;
const BLOCK: usize = 128;
/// Consecutive tokens on one rank.
const RUN: usize = 16;
const HEADS: usize = 8;
const DIM: usize = 128;

fn main() -> ExitCode {
    pairs::main(run)
}

fn run(pairs: usize) -> Result<()> {
    let runtime = Runtime::emulated()?;
    let devices = (0..RANKS as i32).map(|id| runtime.device(id)).collect::<Result<Vec<_>, _>>()?;
    all_gather(&devices, pairs)?;
    decode(&devices, pairs)
}

/// Runs a part of each rank, all at once.
fn on_threads<R: Send>(ranks: &mut [R], part: impl Fn(&mut R) -> Result<()> + Sync) -> Result<()> {
    thread::scope(|scope| {
        let threads: Vec<_> = ranks.iter_mut().map(|rank| scope.spawn(|| part(rank))).collect();
        threads.into_iter().try_for_each(|thread| thread.join().unwrap_or_else(|panic| resume_unwind(panic)))
    })
}

fn all_gather(devices: &[Device], pairs: usize) -> Result<()> {
    let mut ranks = Vec::new();
    for communicator in Communicator::all(devices)? {
        let stream = communicator.device().stream()?;
        let send = numbers(&stream, &[GATHERED], f16::from_f32)?;
        let receive = numbers(&stream, &[RANKS * GATHERED], f16::from_f32)?;
        ranks.push((communicator, stream, send, receive));
    }
    let from = vec![f16::ONE; RANKS * RANKS * GATHERED];
    let mut to = from.clone();
    let timer = devices[0].stream()?;
    let mut measured = Vec::new();
    for _ in 0..=pairs {
        let gather = || {
            on_threads(&mut ranks, |(communicator, stream, send, receive)| {
                communicator.all_gather(stream, send, receive)?;
                Ok(stream.synchronize()?)
            })
        };
        let gathered = seconds(&timer, gather)?;
        let copied = seconds(&timer, || -> Result<()> {
            let parts = to.par_chunks_mut(PART).zip(from.par_chunks(PART));
            parts.for_each(|(to, from)| to.copy_from_slice(from));
            Ok(())
        })?;
        measured.push([1e3 * gathered, 1e3 * copied]);
    }
    // The first pair touches all memory.
    report("all-gather", ["ms of two ranks", "ms to copy as much"], &measured[1..]);
    Ok(())
}

/// The new tokens of a step: a query of some heads, a key and a value of each request.
struct Tokens([Tensor<f16>; 3]);

impl Tokens {
    fn new(stream: &Stream, heads: usize) -> Result<Self> {
        let rows = |heads: usize| numbers(stream, &[REQUESTS, heads, DIM], f16::from_f32);
        Ok(Self([rows(heads)?, rows(1)?, rows(1)?]))
    }

    fn inputs(&self) -> (&Tensor<f16>, &Tensor<f16>, &Tensor<f16>) {
        let [query, key, value] = &self.0;
        (query, key, value)
    }
}

/// A rank, with its stream, its requests and what it adds to them.
struct Rank {
    attention: ContextAttention<f16>,
    stream: Stream,
    sequences: Vec<Sequence>,
    tokens: Tokens,
}

impl Rank {
    fn new(communicator: Communicator, steps: usize) -> Result<Self> {
        let stream = communicator.device().stream()?;
        let blocks = REQUESTS * (KEYS + steps).div_ceil(RANKS * BLOCK);
        let cache = cache(&stream, blocks)?;
        let mut attention = ContextAttention::new(communicator, AttentionShape::new(HEADS, 1, DIM), cache, RUN)?;
        let keys = numbers(&stream, &[KEYS, 1, DIM], f16::from_f32)?;
        let mut sequences = Vec::new();
        for _ in 0..REQUESTS {
            let mut sequence = attention.sequence();
            attention.grow(&stream, &mut sequence, KEYS)?;
            let all = [BatchRequest::of(&sequence, KEYS)];
            let split = attention.division().split(&all, PadPolicy::SkipNegative)?;
            let slots = split.slots(attention.rank());
            let write = CacheWrite::plan(attention.cache(), &stream, slots, &keys, &keys)?;
            attention.cache_mut().write(&stream, &write, 0, &keys, &keys)?;
            attention.mark_computed(&sequence, KEYS)?;
            sequences.push(sequence);
        }
        let tokens = Tokens::new(&stream, HEADS)?;
        Ok(Self { attention, stream, sequences, tokens })
    }

    fn step(&mut self) -> Result<()> {
        for sequence in &mut self.sequences {
            self.attention.grow(&self.stream, sequence, 1)?;
        }
        let requests: Vec<_> = self.sequences.iter().map(|sequence| BatchRequest::of(sequence, 1)).collect();
        let mut step = self.attention.begin(&self.stream, &requests)?;
        step.forward(0, self.tokens.inputs())?;
        step.end()?;
        Ok(self.stream.synchronize()?)
    }
}

fn cache(stream: &Stream, blocks: usize) -> Result<PagedKvCache<f16>> {
    PagedKvCache::new(stream.device(), blocks, BLOCK, CacheShape::new(1, 1, DIM), PadPolicy::SkipNegative)
}

fn decode(devices: &[Device], pairs: usize) -> Result<()> {
    let steps = pairs + 1;
    let stream = devices[0].stream()?;
    let blocks = REQUESTS * (KEYS + steps).div_ceil(BLOCK);
    let heads = AttentionShape::new(RANKS * HEADS, 1, DIM);
    let mut whole = Attention::new(heads, cache(&stream, blocks)?, Backends::standard(stream.device()));
    let keys = numbers(&stream, &[KEYS, 1, DIM], f16::from_f32)?;
    let mut sequences = Vec::new();
    for _ in 0..REQUESTS {
        let mut sequence = whole.sequence();
        let slots = whole.cache_mut().grow(&stream, &mut sequence, KEYS)?;
        let write = CacheWrite::plan(whole.cache(), &stream, &slots, &keys, &keys)?;
        whole.cache_mut().write(&stream, &write, 0, &keys, &keys)?;
        whole.cache().mark_computed(&sequence, KEYS)?;
        sequences.push(sequence);
    }
    let tokens = Tokens::new(&stream, RANKS * HEADS)?;
    let ranks = Communicator::all(devices)?.into_iter().map(|rank| Rank::new(rank, steps));
    let mut ranks = ranks.collect::<Result<Vec<_>>>()?;

    let mut measured = Vec::new();
    for _ in 0..steps {
        let divided = seconds(&stream, || on_threads(&mut ranks, Rank::step))?;
        let on_one = seconds(&stream, || {
            for sequence in &mut sequences {
                whole.grow(&stream, sequence, 1)?;
            }
            let requests: Vec<_> = sequences.iter().map(|sequence| BatchRequest::of(sequence, 1)).collect();
            let metadata = whole.metadata(&requests, StatePolicy::default())?;
            let mut step = whole.begin(&stream, &metadata)?;
            step.forward(0, tokens.inputs())?;
            step.end()
        })?;
        measured.push([1e3 * divided, 1e3 * on_one]);
    }
    report("decode", ["ms of two ranks", "ms of one device"], &measured[1..]);
    Ok(())
}
