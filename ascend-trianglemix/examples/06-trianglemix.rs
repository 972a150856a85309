//! TriangleMix in a serving loop: a prompt in chunks beside a request that decodes, checked against the definition.
//!
//! ```sh
//! cargo run --release -p ascend-trianglemix --example 06-trianglemix
//! ```

use std::error::Error;
use std::time::{Duration, Instant};

use ascend_attention::spec::geometry::{TriangleMix, TrianglePart, TriangleRows};
use ascend_serving::prelude::*;
use ascend_trianglemix::{TriangleLayers, TriangleMixBackend, TriangleThresholds};

const HEADS: usize = 4;
const KV_HEADS: usize = 2;
const DIM: usize = 64;
const LAYERS: usize = 4;
const PROMPT: usize = 3000;
const CHUNK: usize = 1024;

fn main() -> Result<(), Box<dyn Error>> {
    let runtime = Runtime::auto()?;
    let device = runtime.device(0)?;
    let stream = device.stream()?;

    // The deeper half of the layers leaves the middle out, whenever a chunk has enough of it.
    let triangle = TriangleMixBackend {
        layers: TriangleLayers::from_start(LAYERS / 2, LAYERS)?,
        sizes: TriangleMix::GUIDE_LONG_CONTEXT,
        thresholds: TriangleThresholds {
            min_saved_pairs: 100_000,
            ..TriangleThresholds::MEASURED
        },
    };
    let sizes = triangle.sizes;
    let whole = TriangleRows::whole(PROMPT as u64);
    let pairs = |part| sizes.geometry(part, whole).visible() as f64;
    let density = pairs(TrianglePart::Triangle) / pairs(TrianglePart::Dense);
    println!(
        "layers {} see {:.1} % of the triangle of {PROMPT} tokens",
        triangle.layers,
        100.0 * density
    );

    let shape = AttentionShape::new(HEADS, KV_HEADS, DIM);
    let of = CacheShape::new(LAYERS, KV_HEADS, DIM);
    let cache = PagedKvCache::new(&device, 64, 128, of, PadPolicy::SkipNegative)?;
    let settings =
        BatchSettings::of(&cache, Causality::Causal).policy(StatePolicy::new(true, None));
    let pool = cache.pool().clone();
    let backends = Backends::none()
        .with(triangle)
        .with(PagedDecode)
        .with(FusedAttention);
    let mut attention = Attention::new(shape, cache, backends);

    // Tokens are numbers. The prompt's are 0, 1, ...; those of the request that decodes begin far behind.
    let mut prompt = Sequence::new(&pool);
    let mut decoding = Sequence::new(&pool);
    let first = |other: bool| u64::from(other) * 1_000_000;
    let mut times = [Duration::ZERO; 2];
    let (mut worst, mut rows) = (0f64, 0);
    // The prompt in chunks, and one step behind it, in which both decode.
    while prompt.len() <= PROMPT {
        let new = CHUNK.min(PROMPT - prompt.len()).max(1);
        let _ = (decoding.grow(1)?, prompt.grow(new)?);
        let batch = [
            BatchRequest::of(&decoding, 1),
            BatchRequest::of(&prompt, new).prompt_len(PROMPT),
        ];
        let metadata = AttentionMetadata::new(&batch, settings)?;
        let last = first(true) + decoding.len() as u64 - 1;
        let chunk = (prompt.len() - new) as u64..prompt.len() as u64;
        let tokens: Vec<u64> = std::iter::once(last).chain(chunk).collect();

        let mut step = attention.begin(&stream, &metadata)?;
        let mut outputs = Vec::new();
        for layer in 0..LAYERS {
            let query = packed(&stream, &tokens, layer, 0, HEADS)?;
            let key = packed(&stream, &tokens, layer, 1, KV_HEADS)?;
            let value = packed(&stream, &tokens, layer, 2, KV_HEADS)?;
            let begun = Instant::now();
            outputs.push(step.forward(layer, (&query, &key, &value))?);
            stream.synchronize()?;
            if let Some(time) = times.get_mut(usize::from(layer >= LAYERS / 2)) {
                *time += begun.elapsed();
            }
        }
        if let Some(selected) = step.selected() {
            println!("{new} tokens up to {}: {}", prompt.len(), selected.name);
            for refused in &selected.refused {
                println!("  not {refused}");
            }
        }
        drop(step);

        // Some rows against the definition, in double precision.
        for (layer, output) in outputs.iter().enumerate() {
            let output = output.download(&stream)?;
            for (at, token) in tokens.iter().enumerate().step_by(97) {
                let own = *token >= first(true);
                let row = token - first(own);
                let sees = |key: u64| {
                    let last = row + sizes.num_last_tokens >= PROMPT as u64;
                    let near = row - key <= sizes.sliding_window_size;
                    layer < LAYERS / 2 || own || last || near || key < sizes.num_sink_tokens
                };
                let seen = (0..=row).filter(|key| sees(*key));
                let seen: Vec<u64> = seen.map(|key| key + first(own)).collect();
                let got = &output[at * HEADS * DIM..][..HEADS * DIM];
                for (got, want) in got.iter().zip(dense(*token, &seen, layer, shape.scale)) {
                    let error = (got.to_f64() - want).abs();
                    worst = if error.is_nan() {
                        f64::INFINITY
                    } else {
                        worst.max(error)
                    };
                }
                rows += 1;
            }
        }
    }
    let [dense, sparse] = times.map(|time| time.as_secs_f64() * 1e3 / (LAYERS / 2) as f64);
    println!("a dense layer: {dense:.0} ms, one with the triangle: {sparse:.0} ms");
    println!("{rows} rows against the definition, worst error {worst:.1e}");
    drop((prompt, decoding));
    if worst > 2e-2 || pool.held_blocks() > 0 {
        return Err("the answer is wrong, or a block was lost".into());
    }
    println!("as expected");
    Ok(())
}

/// The query (0), key (1) or value (2) of a token: numbers made from its own.
fn row(token: u64, layer: usize, what: u64, heads: usize) -> Vec<bf16> {
    let mut state =
        (token * 16 + layer as u64 * 4 + what + 1).wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1;
    let mut number = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        bf16::from_f32((state >> 40) as f32 / (1u64 << 23) as f32 - 1.0)
    };
    (0..heads * DIM).map(|_| number()).collect()
}

fn packed(
    stream: &Stream,
    tokens: &[u64],
    layer: usize,
    what: u64,
    heads: usize,
) -> ascend_attention::Result<Tensor<bf16>> {
    let rows = tokens
        .iter()
        .flat_map(|token| row(*token, layer, what, heads));
    stream.upload(&rows.collect::<Vec<_>>(), [tokens.len(), heads, DIM])
}

/// Attention of a token over those that it sees.
fn dense(token: u64, seen: &[u64], layer: usize, scale: f64) -> Vec<f64> {
    let exact = |token: u64, what, heads| -> Vec<f64> {
        let row = row(token, layer, what, heads);
        row.into_iter().map(|x| x.to_f64()).collect()
    };
    let query = exact(token, 0, HEADS);
    let keys: Vec<_> = seen.iter().map(|key| exact(*key, 1, KV_HEADS)).collect();
    let values: Vec<_> = seen.iter().map(|key| exact(*key, 2, KV_HEADS)).collect();
    let mut out = Vec::new();
    for head in 0..HEADS {
        let kv = head / (HEADS / KV_HEADS) * DIM;
        let dot =
            |key: &Vec<f64>| -> f64 { (0..DIM).map(|d| query[head * DIM + d] * key[kv + d]).sum() };
        let weights: Vec<f64> = keys.iter().map(|key| (scale * dot(key)).exp()).collect();
        let total: f64 = weights.iter().sum();
        out.extend((0..DIM).map(|d| {
            let pairs = weights.iter().zip(&values);
            pairs
                .map(|(weight, value)| weight * value[kv + d])
                .sum::<f64>()
                / total
        }));
    }
    out
}
