//! TriangleMix in a serving loop: a prompt in chunks beside a request that decodes, checked against the definition.
//!
//! ```sh
//! cargo run --release -p ascend-trianglemix --example 06-trianglemix
//! ```

use std::error::Error;
use std::time::{Duration, Instant};

use ascend_attention::spec::geometry::{TriangleMix, TrianglePart, TriangleRows};
use ascend_serving::prelude::*;
// Random rows in the place of a model's projections, and attention by its definition.
use ascend_testing::tokens::{DIM, dense, packed};
use ascend_trianglemix::{TriangleLayers, TriangleMixBackend, TriangleThresholds};

const HEADS: usize = 4;
const KV_HEADS: usize = 2;
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
        thresholds: TriangleThresholds { min_saved_pairs: 100_000, ..TriangleThresholds::MEASURED },
    };
    let sizes = triangle.sizes;
    let whole = TriangleRows::whole(PROMPT as u64);
    let pairs = |part| sizes.geometry(part, whole).visible() as f64;
    let density = pairs(TrianglePart::Triangle) / pairs(TrianglePart::Dense);
    println!("layers {} see {:.1} % of the triangle of {PROMPT} tokens", triangle.layers, 100.0 * density);

    let shape = AttentionShape::new(HEADS, KV_HEADS, DIM);
    let cache_shape = CacheShape::new(LAYERS, KV_HEADS, DIM);
    let cache = PagedKvCache::<bf16>::new(&device, 64, 128, cache_shape, PadPolicy::SkipNegative)?;
    let settings = BatchSettings::of(&cache, Causality::Causal).policy(StatePolicy::new(true, None));
    let pool = cache.pool().clone();
    let backends = Backends::none().with(triangle).with(Backend::PagedDecode).with(Backend::Fused);
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
        let batch = [BatchRequest::of(&decoding, 1), BatchRequest::of(&prompt, new).prompt_len(PROMPT)];
        let metadata = AttentionMetadata::new(&batch, settings)?;
        let last = first(true) + decoding.len() as u64 - 1;
        let chunk = (prompt.len() - new) as u64..prompt.len() as u64;
        let tokens: Vec<u64> = std::iter::once(last).chain(chunk).collect();

        let mut step = attention.begin(&stream, &metadata)?;
        let mut outputs = Vec::new();
        for layer in 0..LAYERS {
            let query = packed(&stream, &tokens, layer, 0, HEADS);
            let key = packed(&stream, &tokens, layer, 1, KV_HEADS);
            let value = packed(&stream, &tokens, layer, 2, KV_HEADS);
            let begun = Instant::now();
            outputs.push(step.forward(layer, (&query, &key, &value))?.clone());
            stream.synchronize()?;
            if let Some(time) = times.get_mut(usize::from(layer >= LAYERS / 2)) {
                *time += begun.elapsed();
            }
        }
        if let Some(selected) = step.selected(0) {
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
                let names: Vec<u64> = (0..=row).map(|key| key + first(own)).collect();
                let want = dense(&names, layer, shape, |place| sees(place as u64));
                let got = &output[at * HEADS * DIM..][..HEADS * DIM];
                for (got, want) in got.iter().zip(want) {
                    let error = (got.to_f64() - want).abs();
                    worst = if error.is_nan() { f64::INFINITY } else { worst.max(error) };
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
