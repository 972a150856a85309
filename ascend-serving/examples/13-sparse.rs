//! Sparse attention of DeepSeek V3.2's shape over 32768 cached tokens: each token decoded reads the 2048 keys that an
//! indexer chooses. Rows are checked against attention to these keys in f64, which also says how much of the attention
//! to all keys the choice keeps.
//!
//! ```sh
//! cargo run -p ascend-serving --example 13-sparse
//! ```

use std::collections::BTreeSet;

use ascend_serving::prelude::*;
use ascend_serving::{IndexerTensors, Result, SparseLatent, SparseTensors};
use ascend_testing::llama::product::{View, product};

const HEADS: usize = 128;
const LATENT: usize = 512; // of a token's keys and values, and of absorbed queries
const ROPE: usize = 64; // rotary part of either
const KEY: usize = LATENT + ROPE;
const INDEX_HEADS: usize = 64;
const INDEX: usize = 128; // a head of the indexer
const CACHED: usize = 32768;
const BLOCK_SIZE: usize = 128;
const BLOCKS: usize = CACHED / BLOCK_SIZE + 1;
/// Keys that the definition multiplies at once.
const TILE: usize = 2048;

/// Numbers between -1 and 1, the same in each run.
struct Random(u64);

impl Random {
    fn next(&mut self) -> f32 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 >> 40) as f32 / (1u64 << 23) as f32 - 1.0
    }

    /// Rows of noise and of some of a topic, whose elements are 1 and -1 in turn.
    fn rows(&mut self, rows: usize, dim: usize, noise: f32, topic: &[f32]) -> Vec<bf16> {
        let mut all = Vec::with_capacity(rows * dim);
        for row in 0..rows {
            for at in 0..dim {
                let sign = if at % 2 == 0 { 1.0 } else { -1.0 };
                let own = topic[row % topic.len()];
                all.push(bf16::from_f32(noise * self.next() + sign * own));
            }
        }
        all
    }
}

/// The keys of all tokens: what the caches hold.
#[derive(Default)]
struct Keys {
    latent: Vec<bf16>,
    rope: Vec<bf16>,
    index: Vec<bf16>,
}

impl Keys {
    /// Adds tokens. Few of them are much of the topic that queries ask for, and latents and index keys agree on which,
    /// as training makes them.
    fn add(&mut self, random: &mut Random, tokens: usize) -> Keys {
        let topic: Vec<f32> = (0..tokens).map(|_| random.next().powi(8)).collect();
        let new = Keys {
            latent: random.rows(tokens, LATENT, 0.5, &topic),
            rope: random.rows(tokens, ROPE, 0.5, &[0.0]),
            index: random.rows(tokens, INDEX, 0.5, &topic),
        };
        self.latent.extend(&new.latent);
        self.rope.extend(&new.rope);
        self.index.extend(&new.index);
        new
    }

    fn tokens(&self) -> usize {
        self.latent.len() / LATENT
    }

    /// Keys with their rotary parts, `[tokens, 576]`.
    fn exact(&self, tokens: impl Iterator<Item = usize>) -> Vec<f64> {
        let mut rows = Vec::new();
        for token in tokens {
            rows.extend(exact(&self.latent[token * LATENT..][..LATENT]));
            rows.extend(exact(&self.rope[token * ROPE..][..ROPE]));
        }
        rows
    }
}

fn exact(row: &[bf16]) -> impl Iterator<Item = f64> {
    row.iter().map(|x| x.to_f64())
}

/// Of a row's heads, the sums of `exp(scale * score)` over all keys up to the row's own.
fn sums_of_all(query: &[f64], keys: &Keys, seen: usize, scale: f64) -> Vec<f64> {
    let mut sums = vec![0.0; HEADS];
    for first in (0..seen).step_by(TILE) {
        let tokens = TILE.min(seen - first);
        let tile = keys.exact(first..first + tokens);
        let scores = product(View::rows_of(KEY, query), View::rows_of(KEY, &tile).transposed());
        for (sum, scores) in sums.iter_mut().zip(scores.chunks(tokens)) {
            *sum += scores.iter().map(|score| (scale * score).exp()).sum::<f64>();
        }
    }
    sums
}

/// Of a row's heads, attention to the chosen keys, `[HEADS, LATENT]`, and the sums of their `exp(scale * score)`.
fn attended(query: &[f64], keys: &Keys, chosen: &[usize], scale: f64) -> (Vec<f64>, Vec<f64>) {
    let rows = keys.exact(chosen.iter().copied());
    let scores = product(View::rows_of(KEY, query), View::rows_of(KEY, &rows).transposed());
    let weights: Vec<f64> = scores.iter().map(|score| (scale * score).exp()).collect();
    let sums: Vec<f64> = weights.chunks(chosen.len()).map(|own| own.iter().sum()).collect();
    let mut out = product(View::rows_of(chosen.len(), &weights), View::rows_of(KEY, &rows).columns(0..LATENT));
    for (row, sum) in out.chunks_mut(LATENT).zip(&sums) {
        row.iter_mut().for_each(|x| *x /= sum);
    }
    (out, sums)
}

/// How many of the chosen keys are among the best by the scores of the definition.
fn best_chosen(queries: &Queries, row: usize, keys: &Keys, seen: usize, chosen: &[usize]) -> usize {
    let query = &queries.index[row * INDEX_HEADS * INDEX..][..INDEX_HEADS * INDEX];
    let weights = &queries.weights[row * INDEX_HEADS..][..INDEX_HEADS];
    let query: Vec<f64> = exact(query).collect();
    let index: Vec<f64> = exact(&keys.index[..seen * INDEX]).collect();
    let products = product(View::rows_of(INDEX, &query), View::rows_of(INDEX, &index).transposed());
    let mut scores = vec![0.0; seen];
    for (weight, row) in exact(weights).zip(products.chunks(seen)) {
        let row = scores.iter_mut().zip(row);
        row.for_each(|(score, x)| *score += weight * x.max(0.0));
    }
    let mut sorted = scores.clone();
    sorted.sort_by(|a, b| b.total_cmp(a));
    let least = sorted[chosen.len() - 1];
    let chosen: BTreeSet<usize> = chosen.iter().copied().collect();
    chosen.iter().filter(|key| scores[**key] >= least).count()
}

/// What the tokens of a step ask for.
struct Queries {
    query: Vec<bf16>,
    rope: Vec<bf16>,
    index: Vec<bf16>,
    weights: Vec<bf16>,
}

impl Queries {
    fn new(random: &mut Random, rows: usize) -> Self {
        let weights = random.rows(rows, INDEX_HEADS, 0.5, &[0.0]);
        let weights = weights.iter().map(|x| bf16::from_f32(x.to_f32().abs()));
        Self {
            query: random.rows(rows * HEADS, LATENT, 0.5, &[0.3]),
            rope: random.rows(rows * HEADS, ROPE, 0.5, &[0.0]),
            index: random.rows(rows * INDEX_HEADS, INDEX, 0.5, &[0.25]),
            weights: weights.collect(),
        }
    }

    /// The queries of a row with their rotary parts, `[HEADS, 576]`.
    fn exact(&self, row: usize) -> Vec<f64> {
        let heads = self.query.chunks(LATENT).zip(self.rope.chunks(ROPE));
        let heads = heads.skip(row * HEADS).take(HEADS);
        heads.flat_map(|(query, rope)| exact(query).chain(exact(rope))).collect()
    }
}

/// Rows `[tokens, heads, dim]` on the device.
fn upload(stream: &Stream, rows: &[bf16], heads: usize, dim: usize) -> Result<Tensor<bf16>> {
    Ok(stream.upload(rows, [rows.len() / (heads * dim), heads, dim])?)
}

/// Attention whose prompt has been computed elsewhere: its keys are written to both caches, and named as computed.
fn with_prompt(stream: &Stream, keys: &Keys) -> Result<(SparseLatent<bf16>, Sequence)> {
    let device = stream.device();
    let cache = |shape| PagedKvCache::<bf16>::new(device, BLOCKS, BLOCK_SIZE, shape, PadPolicy::SkipNegative);
    let latents = cache(CacheShape::latent(1))?;
    let index_keys = cache(CacheShape::index_keys(1))?.with_pool(latents.pool())?;
    let mut sparse = SparseLatent::new(AttentionShape::latent(HEADS), latents, index_keys)?;

    let mut sequence = Sequence::new(sparse.latents().pool());
    let slots = sparse.latents_mut().grow(stream, &mut sequence, keys.tokens())?;
    let write = |cache: &mut PagedKvCache<bf16>, key, value| -> Result<()> {
        let write = CacheWrite::plan(cache, stream, &slots, key, value)?;
        cache.write(stream, &write, 0, key, value)?;
        Ok(cache.mark_computed(&sequence, keys.tokens())?)
    };
    let latent = upload(stream, &keys.latent, 1, LATENT)?;
    let rope = upload(stream, &keys.rope, 1, ROPE)?;
    write(sparse.latents_mut(), &latent, &rope)?;
    let index = upload(stream, &keys.index, 1, INDEX)?;
    let no_values = Tensor::empty(device, [keys.tokens(), 1, 0])?;
    write(sparse.index_keys_mut(), &index, &no_values)?;
    Ok((sparse, sequence))
}

/// Attention of a step's new tokens, and the keys that they read.
fn decode(
    stream: &Stream,
    sparse: &mut SparseLatent<bf16>,
    sequence: &mut Sequence,
    queries: &Queries,
    new: &Keys,
) -> Result<(Vec<bf16>, Vec<i32>)> {
    let rows = new.tokens();
    sparse.grow(stream, sequence, rows)?;
    let settings = BatchSettings::of(sparse.latents(), Causality::Causal);
    let batch = [BatchRequest::of(sequence, rows).drafts(rows - 1)];
    let metadata = AttentionMetadata::new(&batch, settings)?;
    let mut step = sparse.begin(stream, &metadata)?;
    let choice = step.choose(
        0,
        IndexerTensors {
            query: &upload(stream, &queries.index, INDEX_HEADS, INDEX)?,
            weights: &stream.upload(&queries.weights, [rows, INDEX_HEADS])?,
            key: &upload(stream, &new.index, 1, INDEX)?,
        },
    )?;
    let output = step
        .forward(
            0,
            SparseTensors {
                query: &upload(stream, &queries.query, HEADS, LATENT)?,
                query_rope: &upload(stream, &queries.rope, HEADS, ROPE)?,
                latent: &upload(stream, &new.latent, 1, LATENT)?,
                key_rope: &upload(stream, &new.rope, 1, ROPE)?,
                choice: &choice,
            },
        )?
        .download(stream)?;
    step.end()?;
    Ok((output, choice.indices().download(stream)?))
}

fn main() -> Result<()> {
    let runtime = Runtime::auto()?;
    let stream = runtime.device(0)?.stream()?;
    let mut random = Random(0x9E37_79B9_7F4A_7C15);
    let mut keys = Keys::default();
    keys.add(&mut random, CACHED);
    let (mut sparse, mut sequence) = with_prompt(&stream, &keys)?;
    let scale = sparse.shape().scale;

    // A decode, then one with three drafts behind it.
    for rows in [1, 4] {
        let new = keys.add(&mut random, rows);
        let queries = Queries::new(&mut random, rows);
        let (output, indices) = decode(&stream, &mut sparse, &mut sequence, &queries, &new)?;
        let (mut kept, mut least, mut worst) = (0.0, f64::INFINITY, 0f64);
        let (count, mut best) = (indices.len() / rows, usize::MAX);
        for row in 0..rows {
            let seen = keys.tokens() - rows + row + 1;
            let chosen = indices[row * count..][..count].iter();
            let chosen: Vec<usize> = chosen.map(|key| *key as usize).collect();
            best = best.min(best_chosen(&queries, row, &keys, seen, &chosen));
            let query = queries.exact(row);
            let (want, sums) = attended(&query, &keys, &chosen, scale);
            let all = sums_of_all(&query, &keys, seen, scale);
            for (chosen, all) in sums.iter().zip(all) {
                kept += chosen / all / (rows * HEADS) as f64;
                least = least.min(chosen / all);
            }
            let got = exact(&output[row * want.len()..][..want.len()]);
            let off = got.zip(&want).map(|(x, y)| (x - y).abs());
            // NaN is as far off as can be, which `f64::max` would not say.
            worst = off.fold(worst, |worst, off| match off.is_nan() {
                true => f64::INFINITY,
                false => worst.max(off),
            });
        }
        println!(
            "{rows} of {} tokens: {count} keys each, at least {best} of them the best; {:.1} % of the attention to all \
             keys is kept, {:.1} % in the worst head; furthest from the definition: {worst:.1e}",
            keys.tokens(),
            100.0 * kept,
            100.0 * least
        );
        assert!(worst < 1e-2 && kept > 0.9 && best + 4 >= count);
    }
    Ok(())
}
