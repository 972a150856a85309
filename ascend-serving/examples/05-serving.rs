//! A serving loop over a paged cache, checked against whole-sequence attention:
//! `cargo run -p ascend-serving --example 05-serving`; with `-- --int8` over a cache of INT8.
//!
//! Requests arrive one after the other and share a prompt prefix. Their prompts are computed in chunks beside the
//! decoding of others, one step verifies drafts, and blocks are used again by later requests. There is no model: a
//! token's query, key and value are random numbers made from its number, and its "next token" too.

use std::error::Error;

use ascend_serving::prelude::*;
// Random rows in the place of a model's projections, and attention by its definition.
use ascend_testing::tokens::{DIM, dense, packed};

const HEADS: usize = 4;
const KV_HEADS: usize = 2;
const LAYERS: usize = 2;
const BLOCKS: usize = 32;
const BLOCK_SIZE: usize = 128;
/// Prompt tokens computed in one step.
const CHUNK: usize = 96;
/// Tokens that all prompts begin with.
const SHARED: usize = 150;
/// Graphs are captured for some sizes only; steps are padded to multiples of this.
const SIZE: usize = 8;

/// A request: all its tokens so far, and those of them that are cached.
struct Request {
    tokens: Vec<u64>,
    cached: Sequence,
    left: usize,
}

fn main() -> Result<(), Box<dyn Error>> {
    let runtime = Runtime::auto()?;
    let device = runtime.device(0)?;
    let stream = device.stream()?;
    println!("{} on {}", device.soc_name(), runtime.platform());

    let int8 = std::env::args().any(|argument| argument == "--int8");
    let cache = cache(&stream, int8)?;
    let backends = Backends::standard(stream.device());
    let pool = cache.pool().clone();
    println!("cache: {} blocks of {} tokens, {} KiB", pool.blocks(), pool.block_size(), cache.bytes() >> 10);
    let settings = BatchSettings::of(&cache, Causality::Causal).policy(StatePolicy::new(true, Some(Drafting::Mtp)));
    let shape = AttentionShape::new(HEADS, KV_HEADS, DIM);
    let mut attention = Attention::new(shape, cache, backends);

    let mut waiting: Vec<Vec<u64>> = (0..6).map(prompt).collect();
    waiting.reverse();
    let total = waiting.len();
    let mut running: Vec<Request> = Vec::new();
    let (mut step, mut worst, mut rows) = (0, 0f64, 0);
    while !waiting.is_empty() || !running.is_empty() {
        // One request arrives every other step. It begins with the cached prefix of another one where there is one.
        if step % 2 == 0
            && running.len() < 3
            && let Some(tokens) = waiting.pop()
        {
            let donor = running.iter().find(|other| other.cached.len() >= SHARED);
            let cached = match donor {
                Some(donor) => donor.cached.share_prefix(SHARED)?,
                None => Sequence::new(&pool),
            };
            let left = 4 + step % 5;
            running.push(Request { tokens, cached, left });
        }

        // What each request adds: a chunk of its prompt, or the next token with two drafts at times.
        let mut work = Vec::new();
        for request in &mut running {
            let prompt = request.tokens.len() - request.cached.len();
            let (new, drafts) = match prompt {
                1 if step % 4 == 3 => {
                    let drafted = draft(&request.tokens);
                    request.tokens.extend(drafted);
                    (3, 2)
                }
                _ => (prompt.min(CHUNK), 0),
            };
            attention.grow(&stream, &mut request.cached, new)?;
            work.push((new, drafts));
        }
        let batch: Vec<BatchRequest<'_>> = running
            .iter()
            .zip(&work)
            .map(|(request, (new, drafts))| BatchRequest::of(&request.cached, *new).drafts(*drafts))
            .collect();
        let mut metadata = AttentionMetadata::new(&batch, settings)?;
        // Padding would keep steps from decoding over integers: one row a request there.
        if !int8 {
            metadata.pad_to(metadata.tokens().next_multiple_of(SIZE))?;
        }

        // Every layer: write the new keys and values, attend.
        let mut tokens: Vec<u64> = Vec::new();
        for (request, (new, _)) in running.iter().zip(&work) {
            let cached = request.cached.len();
            tokens.extend(&request.tokens[cached - *new..cached]);
        }
        tokens.resize(metadata.tokens(), 0);
        let mut outputs = Vec::new();
        let mut layers = attention.begin(&stream, &metadata)?;
        for layer in 0..LAYERS {
            let query = packed(&stream, &tokens, layer, 0, HEADS);
            let key = packed(&stream, &tokens, layer, 1, KV_HEADS);
            let value = packed(&stream, &tokens, layer, 2, KV_HEADS);
            outputs.push(layers.forward(layer, (&query, &key, &value))?.clone());
        }
        let served = layers.selected(0).map_or("nothing", |selected| selected.name);
        drop(layers);

        // The last row of each request against its whole sequence in double precision.
        for (layer, output) in outputs.iter().enumerate() {
            let output = output.download(&stream)?;
            let mut end = 0;
            for (request, (new, _)) in running.iter().zip(&work) {
                end += *new;
                let want = dense(&request.tokens[..request.cached.len()], layer, shape, |_| true);
                let got = &output[(end - 1) * HEADS * DIM..][..HEADS * DIM];
                let errors = got.iter().zip(&want).map(|(g, w)| (g.to_f64() - w).abs());
                worst = errors.fold(worst, |worst, error| match error.is_nan() {
                    true => f64::INFINITY,
                    false => worst.max(error),
                });
                rows += 1;
            }
        }

        // Drafts that were wrong are taken back; whoever is ready goes on with its next token, or ends.
        for (request, (_, drafts)) in running.iter_mut().zip(&work) {
            if *drafts > 0 {
                let tree = DraftTree::chain(*drafts)?;
                let first = request.tokens.len() - 1 - *drafts;
                let predicted: Vec<u64> =
                    (first..request.tokens.len()).map(|last| next(&request.tokens[..=last])).collect();
                let accepted = tree.accept_greedy(&request.tokens[first..], &predicted)?;
                let wrong = *drafts - accepted.drafts();
                request.cached.truncate(request.cached.len() - wrong)?;
                request.tokens.truncate(request.cached.len());
            }
            if request.cached.len() == request.tokens.len() {
                request.tokens.push(next(&request.tokens));
                request.left -= 1;
            }
        }
        running.retain(|request| request.left > 0);
        step += 1;

        let done = total - waiting.len() - running.len();
        println!(
            "step {step:2} [{}{}] {:?} by {served}: {} tokens of {} requests, {} blocks held",
            "#".repeat(done),
            ".".repeat(total - done),
            metadata.state(),
            metadata.actual_tokens(),
            metadata.requests(),
            pool.held_blocks()
        );
    }

    println!("{rows} rows against whole sequences, worst error {worst:.1e}");
    // A step of the scales is 1/127, of numbers between -1 and 1.
    let allowed = if int8 { 2e-2 } else { 1e-2 };
    if rows == 0 || worst > allowed || pool.held_blocks() > 0 {
        return Err("the answer is wrong, or a block was lost".into());
    }
    println!("as expected");
    Ok(())
}

fn cache(stream: &Stream, int8: bool) -> ascend_serving::Result<PagedKvCache<bf16>> {
    let shape = CacheShape::new(LAYERS, KV_HEADS, DIM);
    let pad = PadPolicy::SkipNegative;
    if !int8 {
        return PagedKvCache::new(stream.device(), BLOCKS, BLOCK_SIZE, shape, pad);
    }
    // Numbers between -1 and 1. A model's scales come from a calibration: `ChannelScales::covering`.
    let scales = vec![ChannelScales::uniform(&shape, 1.0 / 127.0, 1.0 / 127.0)?; LAYERS];
    PagedKvCache::quantised(stream, BLOCKS, BLOCK_SIZE, shape, pad, QuantisedType::Int8, &scales)
}

/// A prompt: a beginning that all have, and some tokens of its own.
fn prompt(request: u64) -> Vec<u64> {
    let own = (0..20 + request * 33).map(|token| 10_000 * (request + 1) + token);
    (1..=SHARED as u64).chain(own).collect()
}

/// What the "model" puts behind these tokens.
fn next(tokens: &[u64]) -> u64 {
    let mixed = tokens.iter().rev().take(3).fold(7, |mixed: u64, token| mixed.wrapping_mul(31).wrapping_add(*token));
    1_000_000 + mixed % 1_000_000
}

/// Two drafts: the first is right, the second now and then.
fn draft(tokens: &[u64]) -> [u64; 2] {
    let first = next(tokens);
    let second = next(&[tokens, &[first]].concat());
    [first, second + u64::from(second.is_multiple_of(3))]
}
