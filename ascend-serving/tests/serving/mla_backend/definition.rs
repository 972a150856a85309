//! Latent attention by its definition, in which keys and values are projected and nothing is absorbed.

use std::sync::LazyLock;

use ascend_attention::{Stream, bf16};
use ascend_serving::{AttentionShape, LatentRows, Result, UpProjected};

use crate::harness::reference::Half;

use super::{DIM, LATENT, LAYERS, ROPE, harness};

/// Elements of a latent that a channel of a key or value is projected from: few, so that the reference is quick.
const TAPS: usize = 6;

/// Most heads of a model.
const HEADS: usize = 2;

/// The projections: for each layer, keys and values, and channel, which elements of a latent with which weights.
static TAPS_OF: LazyLock<Vec<[(usize, f64); TAPS]>> = LazyLock::new(|| {
    let row = |row: usize| {
        let seed = (row as u64).wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1;
        let numbers = harness::numbers(seed, 2 * TAPS);
        std::array::from_fn(|tap| {
            let at = (f64::from(numbers[tap]) + 1.0) / 2.0 * LATENT as f64;
            (at as usize % LATENT, f64::from(numbers[TAPS + tap]))
        })
    };
    (0..LAYERS * 2 * HEADS * DIM).map(row).collect()
});

/// A row of the projection of one head.
fn taps(layer: usize, value: bool, channel: usize) -> &'static [(usize, f64); TAPS] {
    &TAPS_OF[(2 * layer + usize::from(value)) * HEADS * DIM + channel]
}

/// What two tokens of one name have in common: everything.
#[derive(Clone, Copy)]
pub enum What {
    Latent,
    KeyRope,
    Query,
    QueryRope,
}

pub fn row(name: u64, layer: usize, what: What, len: usize) -> Vec<bf16> {
    let seed = (name * LAYERS as u64 + layer as u64) * 4 + what as u64;
    let numbers = harness::numbers(seed.wrapping_mul(0x2545_F491_4F6C_DD1D) | 1, len);
    numbers.into_iter().map(bf16::from_f32).collect()
}

pub fn exact(row: &[bf16]) -> Vec<f64> {
    row.iter().map(|x| x.to_f64()).collect()
}

/// Keys or values of all heads, `[N, 128]`, of one latent.
pub fn project(layer: usize, value: bool, heads: usize, latent: &[f64]) -> Vec<f64> {
    let channel = |channel: usize| {
        let taps = taps(layer, value, channel);
        taps.iter().map(|(at, weight)| latent[*at] * weight).sum()
    };
    (0..heads * DIM).map(channel).collect()
}

/// What a model does for plain queries: keys and values of all heads, from latents and rotary keys.
pub fn up_project<T: Half>(
    stream: &Stream,
    layer: usize,
    heads: usize,
    rows: LatentRows<'_, T>,
    out: &UpProjected<T>,
) -> Result<()> {
    let latents = rows.latent.download(stream)?;
    let ropes = rows.key_rope.download(stream)?;
    let of = |value: bool| -> Vec<T> {
        let latents = latents.chunks(LATENT).map(|latent| {
            let latent: Vec<f64> = latent.iter().map(|x| x.to_f64()).collect();
            project(layer, value, heads, &latent)
        });
        let numbers = latents.flatten().map(bf16::from_f64);
        numbers.map(|x| T::from_f32(x.to_f32())).collect()
    };
    out.key.overwrite(stream, &of(false))?;
    out.value.overwrite(stream, &of(true))?;
    let ropes: Vec<T> = ropes.chunks(ROPE).flat_map(|r| r.repeat(heads)).collect();
    Ok(out.key_rope.overwrite(stream, &ropes)?)
}

/// Queries with the projection of the keys multiplied in, `[N, 512]`.
pub fn absorb(layer: usize, heads: usize, query: &[bf16]) -> Vec<bf16> {
    let mut absorbed = vec![0.0; heads * LATENT];
    for (channel, x) in query.iter().enumerate() {
        for (at, weight) in taps(layer, false, channel) {
            absorbed[channel / DIM * LATENT + *at] += weight * x.to_f64();
        }
    }
    absorbed.into_iter().map(bf16::from_f64).collect()
}

/// A token's output by the definition: it is the last of `names` and sees all of them. `[N, 128]`.
pub fn dense(names: &[u64], layer: usize, shape: AttentionShape) -> Vec<f64> {
    dense_over(names, layer, shape, |_, latent| latent)
}

/// A token's output by the definition, over what is read of the latent at each position.
pub fn dense_over(
    names: &[u64],
    layer: usize,
    shape: AttentionShape,
    read: impl Fn(usize, Vec<f64>) -> Vec<f64>,
) -> Vec<f64> {
    let heads = shape.heads;
    let asks = *names.last().unwrap();
    let query = exact(&row(asks, layer, What::Query, heads * DIM));
    let query_rope = exact(&row(asks, layer, What::QueryRope, heads * ROPE));
    let seen: Vec<_> = names
        .iter()
        .enumerate()
        .map(|(position, name)| {
            let latent = read(position, exact(&row(*name, layer, What::Latent, LATENT)));
            let rope = exact(&row(*name, layer, What::KeyRope, ROPE));
            let key = project(layer, false, heads, &latent);
            (key, rope, project(layer, true, heads, &latent))
        })
        .collect();
    let dot = |a: &[f64], b: &[f64]| a.iter().zip(b).map(|(a, b)| a * b).sum::<f64>();
    let mut out = Vec::new();
    for head in 0..heads {
        let (of, of_rope) = (head * DIM..(head + 1) * DIM, head * ROPE..(head + 1) * ROPE);
        let score = |(key, rope, _): &(Vec<f64>, Vec<f64>, Vec<f64>)| {
            let nope = dot(&query[of.clone()], &key[of.clone()]);
            shape.scale * (nope + dot(&query_rope[of_rope.clone()], rope))
        };
        let scores: Vec<f64> = seen.iter().map(score).collect();
        let max = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        let sum: f64 = scores.iter().map(|s| (s - max).exp()).sum();
        let mut mean = vec![0.0; DIM];
        for (score, (_, _, value)) in scores.iter().zip(&seen) {
            let weight = (score - max).exp() / sum;
            for (x, v) in mean.iter_mut().zip(&value[of.clone()]) {
                *x += weight * v;
            }
        }
        out.extend(mean);
    }
    out
}
