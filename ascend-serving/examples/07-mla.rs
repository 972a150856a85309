//! Multi-head latent attention over a paged cache of latents: a prompt in chunks with plain queries, decoding and
//! verifying drafts with absorbed ones. Every row is checked against the definition in f64. With `--int8` the latents
//! are of one byte, and so are the absorbed queries.
//!
//! ```sh
//! cargo run -p ascend-serving --example 07-mla
//! cargo run -p ascend-serving --example 07-mla -- --int8
//! ```

use ascend_serving::kv::Cache;
use ascend_serving::prelude::*;
use ascend_serving::{LatentForm, LatentRows, LatentTensors, LayerInputs, Result, UpProjected};

const HEADS: usize = 4;
const LATENT: usize = 512; // what a token's keys and values are projected from
const ROPE: usize = 64; // rotary part of a key, one for all heads
const DIM: usize = 128; // a head of a key without rotary part, and of a value
const BLOCKS: usize = 16;
const BLOCK_SIZE: usize = 16;
const PROMPT: usize = 150;
const CHUNK: usize = 64;
const DECODED: usize = 3;
const DRAFTS: usize = 2;

/// `len` numbers between -1 and 1, the same for each seed.
fn random(seed: usize, len: usize) -> Vec<bf16> {
    let mut state = (seed as u64).wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1;
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        bf16::from_f32((state >> 40) as f32 / (1u64 << 23) as f32 - 1.0)
    };
    (0..len).map(|_| next()).collect()
}

fn exact(row: &[bf16]) -> Vec<f64> {
    row.iter().map(|x| x.to_f64()).collect()
}

/// What the model's own layers compute around attention: here the projections, and a token's rows out of its number.
struct Model {
    /// Latents to keys and to values, `[HEADS * DIM, LATENT]`.
    w_uk: Vec<f64>,
    w_uv: Vec<f64>,
}

impl Model {
    fn new() -> Self {
        let scale = (LATENT as f64).sqrt().recip();
        let weights = |seed| {
            let weights = random(seed, HEADS * DIM * LATENT);
            weights.iter().map(|w| scale * w.to_f64()).collect()
        };
        Self { w_uk: weights(1), w_uv: weights(2) }
    }

    fn latent(token: usize) -> Vec<bf16> {
        random(10 * token + 3, LATENT)
    }
    fn key_rope(token: usize) -> Vec<bf16> {
        random(10 * token + 4, ROPE)
    }
    fn query(token: usize) -> Vec<bf16> {
        random(10 * token + 5, HEADS * DIM)
    }
    fn query_rope(token: usize) -> Vec<bf16> {
        random(10 * token + 6, HEADS * ROPE)
    }

    fn project(weights: &[f64], latent: &[f64]) -> Vec<f64> {
        let rows = weights.chunks_exact(LATENT);
        rows.map(|row| dot(row, latent)).collect()
    }

    /// `W_UK` multiplied into the query of each head: `[HEADS, LATENT]`.
    fn absorb(&self, token: usize) -> Vec<bf16> {
        let mut absorbed = vec![0.0; HEADS * LATENT];
        for (channel, x) in exact(&Self::query(token)).iter().enumerate() {
            let row = &self.w_uk[channel * LATENT..][..LATENT];
            let head = &mut absorbed[channel / DIM * LATENT..][..LATENT];
            head.iter_mut().zip(row).for_each(|(sum, w)| *sum += w * x);
        }
        absorbed.into_iter().map(bf16::from_f64).collect()
    }

    /// Keys and values of all heads. On an NPU these are the model's matrix products on the stream; this crate has
    /// none.
    fn up_project(&self, stream: &Stream, rows: LatentRows<'_, bf16>, out: &UpProjected<bf16>) -> Result<()> {
        let latents = rows.latent.download(stream)?;
        let project = |weights: &[f64]| -> Vec<bf16> {
            let rows = latents.chunks_exact(LATENT);
            let rows = rows.flat_map(|latent| Self::project(weights, &exact(latent)));
            rows.map(bf16::from_f64).collect()
        };
        out.key.overwrite(stream, &project(&self.w_uk))?;
        out.value.overwrite(stream, &project(&self.w_uv))?;
        let ropes = rows.key_rope.download(stream)?;
        let ropes = ropes.chunks_exact(ROPE).flat_map(|rope| rope.repeat(HEADS));
        out.key_rope.overwrite(stream, &ropes.collect::<Vec<_>>())?;
        Ok(())
    }

    /// A token's attention by the definition, over the tokens up to it: `[HEADS * DIM]`.
    fn definition(&self, token: usize, scale: f64, keys: &[[Vec<f64>; 3]]) -> Vec<f64> {
        let query = exact(&Self::query(token));
        let query_rope = exact(&Self::query_rope(token));
        let mut out = vec![0.0; HEADS * DIM];
        for head in 0..HEADS {
            let (at, rope_at) = (head * DIM..(head + 1) * DIM, head * ROPE..(head + 1) * ROPE);
            let score = |[key, rope, _]: &[Vec<f64>; 3]| {
                let nope = dot(&query[at.clone()], &key[at.clone()]);
                (scale * (nope + dot(&query_rope[rope_at.clone()], rope))).exp()
            };
            let weights: Vec<f64> = keys[..=token].iter().map(score).collect();
            let sum: f64 = weights.iter().sum();
            for (weight, [_, _, value]) in weights.iter().zip(keys) {
                let row = out[at.clone()].iter_mut().zip(&value[at.clone()]);
                row.for_each(|(x, v)| *x += weight / sum * v);
            }
        }
        out
    }
}

fn dot(a: &[f64], b: &[f64]) -> f64 {
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}

fn main() -> Result<()> {
    let runtime = Runtime::auto()?;
    let device = runtime.device(0)?;
    let stream = device.stream()?;
    let model = Model::new();
    let shape = AttentionShape::latent(HEADS);
    let pad = PadPolicy::SkipNegative;
    // Room for 48 cached tokens at a time, so that the later chunks of the prompt read what is cached in several.
    let token_bytes = 2 * (LATENT + ROPE + HEADS * (2 * DIM + ROPE));
    // Of a calibration, here over latents between -1 and 1.
    let scale = match std::env::args().any(|argument| argument == "--int8") {
        true => Some(LatentScale::covering(QuantisedType::Int8, &[bf16::ONE])?),
        false => None,
    };
    let (cache, mla) = match scale {
        None => {
            let cache = PagedKvCache::new(&device, BLOCKS, BLOCK_SIZE, CacheShape::latent(1), pad)?;
            (cache, Backend::Mla { workspace_bytes: 48 * token_bytes })
        }
        Some(scale) => {
            // The operator takes NZ blocks of 128 tokens.
            let shape = CacheShape::latent(1).format(Cache::Nz);
            let cache = PagedKvCache::quantised_latents(&stream, 2, 128, shape, pad, QuantisedType::Int8, &[scale])?;
            (cache, Backend::QUANTISED_MLA_256_MIB)
        }
    };
    let settings = BatchSettings::of(&cache, Causality::Causal).policy(StatePolicy::new(true, None));
    let mut attention = Attention::new(shape, cache, Backends::none().with(mla));
    let mut sequence = Sequence::new(attention.cache().pool());

    let mut steps = vec![];
    for first in (0..PROMPT).step_by(CHUNK) {
        steps.push((CHUNK.min(PROMPT - first), 0));
    }
    steps.extend([(1, 0); DECODED]);
    steps.push((1 + DRAFTS, DRAFTS));
    let tokens: usize = steps.iter().map(|(new, _)| new).sum();
    let keys: Vec<_> = (0..tokens)
        .map(|token| {
            let latent = exact(&Model::latent(token));
            [Model::project(&model.w_uk, &latent), exact(&Model::key_rope(token)), Model::project(&model.w_uv, &latent)]
        })
        .collect();

    let mut worst = 0f64;
    let mut first = 0;
    for (new, drafts) in steps {
        let of_step = first..first + new;
        let upload = |heads: usize, dim: usize, row: &dyn Fn(usize) -> Vec<bf16>| {
            let rows: Vec<bf16> = of_step.clone().flat_map(row).collect();
            stream.upload(&rows, [new, heads, dim])
        };
        let grown = sequence.grow(new)?;
        attention.cache_mut().copy_blocks(&stream, &grown.copies)?;
        let mut settings = settings;
        settings.policy.drafting = (drafts > 0).then_some(Drafting::Mtp);
        let batch = [BatchRequest::of(&sequence, new).drafts(drafts)];
        let metadata = AttentionMetadata::new(&batch, settings)?;

        // Short steps read the latents as they are; for prompts, keys and values are projected out of them.
        let absorbed = metadata.absorbs_queries();
        let up_project = |stream: &Stream, _: usize, rows: LatentRows<'_, bf16>, out: &UpProjected<bf16>| {
            model.up_project(stream, rows, out)
        };
        let (query, form): (Tensor<bf16>, _) = match absorbed {
            true => (upload(HEADS, LATENT, &|token| model.absorb(token))?, LatentForm::Absorbed),
            false => (upload(HEADS, DIM, &Model::query)?, LatentForm::Plain(&up_project)),
        };
        let query_rope = upload(HEADS, ROPE, &Model::query_rope)?;
        let latent = upload(1, LATENT, &Model::latent)?;
        let key_rope = upload(1, ROPE, &Model::key_rope)?;
        // Kernels of the model make these on an NPU.
        let quantised = scale.filter(|_| absorbed).map(|scale| {
            QuantisedQueries::quantise_on_host(&stream, QuantisedType::Int8, (&query, &query_rope), scale)
        });
        let quantised = quantised.transpose()?;
        let inputs = match &quantised {
            Some((queries, divided)) => LayerInputs::quantised_latent(queries, divided, &latent, &key_rope),
            None => {
                let tensors = LatentTensors { query_rope: &query_rope, form };
                LayerInputs::latent(&query, &latent, &key_rope, tensors)
            }
        };
        let mut step = attention.begin(&stream, &metadata)?;
        let output = step.forward(0, inputs)?.clone();
        step.end()?;
        println!("{:?}, tokens {of_step:?}: {}", metadata.state(), output.desc());

        let output = exact(&output.download(&stream)?);
        for (at, token) in of_step.clone().enumerate() {
            let row: Vec<f64> = match absorbed {
                false => output[at * HEADS * DIM..][..HEADS * DIM].to_vec(),
                // `[HEADS, new, LATENT]`: the projection of the values is the model's.
                true => (0..HEADS)
                    .flat_map(|head| {
                        let latent = &output[(head * new + at) * LATENT..][..LATENT];
                        let weights = &model.w_uv[head * DIM * LATENT..][..DIM * LATENT];
                        Model::project(weights, latent)
                    })
                    .collect(),
            };
            let want = model.definition(token, shape.scale, &keys);
            let off = row.iter().zip(&want).map(|(x, y)| (x - y).abs());
            // NaN is as far off as can be, which `f64::max` would not say.
            worst = off.fold(worst, |worst, off| match off.is_nan() {
                true => f64::INFINITY,
                false => worst.max(off),
            });
        }
        first += new;
    }
    // Of the drafts, say, the first is right: the token behind it goes.
    sequence.truncate(tokens - 1)?;
    println!(
        "{} tokens cached, {} blocks held; furthest from the definition: {worst:.1e}",
        sequence.len(),
        attention.cache().pool().held_blocks()
    );
    assert!(worst < if scale.is_some() { 2e-2 } else { 1e-2 });
    Ok(())
}
