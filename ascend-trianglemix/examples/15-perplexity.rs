//! What a model loses when some of its layers leave out the middle: the perplexity of a text, by the number of such
//! layers.
//!
//! ```sh
//! cargo run --release -p ascend-trianglemix --example 15-perplexity                       # a model of random weights
//! cargo run --release -p ascend-trianglemix --example 15-perplexity -- MODEL.gguf TEXT    # a model of the architecture `llama`
//! ```
//!
//! The text is one prompt. A first pass, in which every layer is dense, measures how much attention each layer gives to
//! the middle; those that give it least leave it out first. The perplexity of the made-up model means nothing, but is
//! compared with that of its definition in double precision.

use std::error::Error;
use std::path::Path;
use std::time::{Duration, Instant};

use ascend_attention::spec::geometry::{TriangleMix, TrianglePart, TriangleRows};
use ascend_serving::prelude::*;
use ascend_testing::llama::{self, Model, Random, dense, download};
use ascend_trianglemix::{
    LayerSample, SampleMeasure, TriangleLayers, TriangleMixBackend, TriangleProbe, TriangleThresholds,
};

type Result<T> = std::result::Result<T, Box<dyn Error>>;

/// What a layer that leaves out the middle sees.
const SIZES: TriangleMix = TriangleMix::GUIDE;
/// Most tokens of a text.
const MOST_TOKENS: usize = 1024;
/// Rows whose logits are in memory at once.
const ROWS: usize = 128;

fn main() -> Result<()> {
    let mut arguments = std::env::args().skip(1);
    let Some(model) = arguments.next() else {
        return generated();
    };
    let text = arguments.next().ok_or("give a text behind the model")?;
    let (model, vocabulary) = llama::load(Path::new(&model))?;
    let mut tokens = vocabulary.encode(&std::fs::read_to_string(text)?);
    tokens.truncate(MOST_TOKENS);
    let perplexities = measure(&model, &tokens, &[0, 4, 8, 12])?;
    if perplexities.iter().any(|(_, perplexity)| !perplexity.is_finite()) {
        return Err("a perplexity that is no number".into());
    }
    Ok(())
}

/// Random tokens and a model of random weights, compared with the definition.
fn generated() -> Result<()> {
    let model = llama::generated(vec![Causality::Causal; 4]);
    let mut random = Random(11);
    let token = |_| (random.draw() % model.config.vocabulary as u64) as u32;
    let tokens: Vec<u32> = (0..500).map(token).collect();
    let all: Vec<usize> = (0..tokens.len()).collect();
    let TriangleMix { num_sink_tokens: sinks, sliding_window_size: window, num_last_tokens: last } = SIZES;
    let [sinks, window, first_last] = [sinks as usize, window as usize, tokens.len() - last as usize];
    for (layers, got) in measure(&model, &tokens, &[0, 2, 4])? {
        let sees = |layer: usize, row: usize, key: usize| {
            let kept = || !layers.contains(layer) || key < sinks || row - key <= window || row >= first_last;
            key <= row && kept()
        };
        let mut surprise = Surprise::default();
        for (row, logits) in dense::logits(&model, &tokens, &all, sees).iter().enumerate() {
            surprise.add(logits.iter().copied(), tokens.get(row + 1));
        }
        let want = surprise.perplexity();
        // Attention is rounded to bf16 in four layers, errors of which the mean over the rows leaves little.
        let off = (got / want - 1.0).abs();
        if off.is_nan() || off > 2e-3 {
            return Err(format!("a perplexity of {got}, by the definition {want}").into());
        }
    }
    println!("as expected");
    Ok(())
}

/// The perplexity of the tokens with so many layers that leave out the middle, for each count.
fn measure(model: &Model, tokens: &[u32], counts: &[usize]) -> Result<Vec<(TriangleLayers, f64)>> {
    let runtime = Runtime::auto()?;
    let stream = runtime.device(0)?.stream()?;
    println!("{} on {}: {} tokens", stream.device().soc_name(), runtime.platform(), tokens.len());
    let mut probe = TriangleProbe::new(model.layers.len(), SIZES)?;
    perplexity(model, tokens, &stream, TriangleLayers::default(), Some(&mut probe))?;
    println!("layers that leave out the middle | pairs of row and key | perplexity | attention, ms");
    let whole = TriangleRows::whole(tokens.len() as u64);
    let pairs = |part| SIZES.geometry(part, whole).visible() as f64;
    let left_out = 1.0 - pairs(TrianglePart::Triangle) / pairs(TrianglePart::Dense);
    let mut measured = Vec::new();
    for &count in counts {
        let layers = probe.layers(count);
        let (perplexity, time) = perplexity(model, tokens, &stream, layers.clone(), None)?;
        let kept = 1.0 - left_out * count as f64 / model.layers.len() as f64;
        let names = if count == 0 { "none".into() } else { format!("{count}: {layers}") };
        println!("{names} | {:.1} % | {perplexity:.3} | {:.0}", 100.0 * kept, 1e3 * time.as_secs_f64());
        measured.push((layers, perplexity));
    }
    Ok(measured)
}

/// The perplexity of the tokens, and the time that attention took. A probe records how much attention the middle of
/// each layer gets.
fn perplexity(
    model: &Model,
    tokens: &[u32],
    stream: &Stream,
    layers: TriangleLayers,
    mut probe: Option<&mut TriangleProbe>,
) -> Result<(f64, Duration)> {
    let config = &model.config;
    let (count, heads, kv_heads, dim) = (model.layers.len(), config.heads, config.kv_heads, config.head_dim);
    let blocks = tokens.len().div_ceil(128) + 1;
    let cache = CacheShape::new(count, kv_heads, dim);
    let cache = PagedKvCache::<bf16>::new(stream.device(), blocks, 128, cache, PadPolicy::SkipNegative)?;
    let triangle = TriangleMixBackend { layers, sizes: SIZES, thresholds: TriangleThresholds::ALWAYS };
    let backends = Backends::none().with(triangle).with(Backend::Fused);
    let mut attention = Attention::new(AttentionShape::new(heads, kv_heads, dim), cache, backends);
    let mut sequence = attention.sequence();
    attention.grow(stream, &mut sequence, tokens.len())?;
    let request = BatchRequest::of(&sequence, tokens.len()).prompt_len(tokens.len());
    let metadata = attention.metadata(&[request], StatePolicy::default())?;

    let positions: Vec<usize> = (0..tokens.len()).collect();
    let mut time = Duration::ZERO;
    let mut step = attention.begin(stream, &metadata)?;
    let state = model.forward(tokens, &positions, |layer, attended| -> Result<Vec<f32>> {
        if let Some(probe) = &mut probe {
            let (query, key, value) = (&attended.query[..], &attended.key[..], &attended.value[..]);
            let scale = 1.0 / (dim as f64).sqrt();
            let tokens = tokens.len();
            let sample = LayerSample { tokens, heads, kv_heads, dim, value_dim: dim, scale, query, key, value };
            probe.record_sample(layer, &sample, SampleMeasure::AttentionMass)?;
        }
        let [query, key, value] = attended.upload(stream, config)?;
        stream.synchronize()?;
        let begun = Instant::now();
        let output = step.forward(layer, (&query, &key, &value))?;
        stream.synchronize()?;
        time += begun.elapsed();
        Ok(download(stream, output)?)
    })?;
    step.end()?;

    let mut surprise = Surprise::default();
    let mut next = tokens.iter().skip(1);
    for rows in state.chunks(ROWS * config.width) {
        for logits in model.logits(rows).chunks(config.vocabulary) {
            surprise.add(logits.iter().map(|logit| f64::from(*logit)), next.next());
        }
    }
    Ok((surprise.perplexity(), time))
}

/// The negated logarithms of the probabilities that a model gave to the tokens of a text.
#[derive(Default)]
struct Surprise {
    sum: f64,
    tokens: usize,
}

impl Surprise {
    /// Adds the token behind a row of logits; nothing behind the last one.
    fn add(&mut self, logits: impl Iterator<Item = f64> + Clone, next: Option<&u32>) {
        let Some(logit) = next.and_then(|next| logits.clone().nth(*next as usize)) else {
            return;
        };
        let most = logits.clone().fold(f64::NEG_INFINITY, f64::max);
        let sum: f64 = logits.map(|logit| (logit - most).exp()).sum();
        self.sum += most + sum.ln() - logit;
        self.tokens += 1;
    }

    fn perplexity(&self) -> f64 {
        (self.sum / self.tokens as f64).exp()
    }
}
