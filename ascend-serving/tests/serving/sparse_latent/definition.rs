//! The scores of an indexer and attention to chosen keys, in double precision.

use ascend_attention::{bf16, f16};

use super::{COUNT, HEADS, INDEX, INDEX_HEADS, LATENT, ROPE, harness};

/// What two tokens of one name have in common: everything.
#[derive(Clone, Copy)]
pub enum What {
    Latent,
    KeyRope,
    Query,
    QueryRope,
    IndexKey,
    IndexQuery,
    IndexWeights,
}

/// Numbers of a token in a layer, or in an indexer.
pub fn row(name: u64, layer: usize, what: What, len: usize) -> Vec<bf16> {
    let seed = (name * 8 + layer as u64) * 8 + what as u64;
    let numbers = harness::numbers(seed.wrapping_mul(0x2545_F491_4F6C_DD1D) | 1, len);
    numbers.into_iter().map(bf16::from_f32).collect()
}

/// Numbers that are quantised in groups of `group`, each by the scale that makes its largest number 127: integers, and
/// the scale of each group, which is no less as `scale` rounds it.
fn quantised(numbers: &[f64], group: usize, scale: impl Fn(f64) -> f64) -> (Vec<f64>, Vec<f64>) {
    let mut scales = Vec::new();
    let mut integers = Vec::new();
    for group in numbers.chunks(group) {
        let largest = group.iter().fold(0f64, |most, x| most.max(x.abs()));
        let own = if largest > 0.0 { scale(largest / 127.0) } else { 1.0 };
        integers.extend(group.iter().map(|x| ((*x as f32 / own as f32).round_ties_even() as f64).clamp(-128.0, 127.0)));
        scales.push(own);
    }
    (integers, scales)
}

/// The least number of FLOAT16 that is no less.
fn half_above(number: f64) -> f64 {
    let half = f16::from_f64(number);
    let above = if half.to_f64() < number { f16::from_bits(half.to_bits() + 1) } else { half };
    above.to_f64()
}

/// A latent as a row of 656 bytes stands for it.
fn stored_latent(latent: &[f64]) -> Vec<f64> {
    let (integers, scales) = quantised(latent, 128, |scale| f64::from(scale as f32));
    let numbers = integers.chunks(128).zip(scales);
    numbers.flat_map(|(group, scale)| group.iter().map(move |x| bf16::from_f64(x * scale).to_f64())).collect()
}

/// An index query or key as its integers and scales stand for it.
fn stored_heads(heads: &[f64]) -> Vec<f64> {
    let (integers, scales) = quantised(heads, INDEX, half_above);
    let numbers = integers.chunks(INDEX).zip(scales);
    numbers.flat_map(|(head, scale)| head.iter().map(move |x| x * scale)).collect()
}

fn exact(name: u64, layer: usize, what: What, len: usize) -> Vec<f64> {
    let row = row(name, layer, what, len);
    row.iter().map(|x| x.to_f64()).collect()
}

fn dot(a: &[f64], b: &[f64]) -> f64 {
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}

/// The places of the keys that the last of `names` reads, out of all of them. `None` where the scores of two keys, one
/// that is chosen and one that is not, are too close to tell.
pub fn chosen(names: &[u64], indexer: usize, is_quantised: bool) -> Option<Vec<usize>> {
    let mut places: Vec<usize> = (0..names.len()).collect();
    if names.len() <= COUNT {
        return Some(places);
    }
    let asks = *names.last().unwrap();
    let stored = |heads: Vec<f64>| if is_quantised { stored_heads(&heads) } else { heads };
    let query = stored(exact(asks, indexer, What::IndexQuery, INDEX_HEADS * INDEX));
    let weights = exact(asks, indexer, What::IndexWeights, INDEX_HEADS);
    let score = |name: &u64| -> f64 {
        let key = stored(exact(*name, indexer, What::IndexKey, INDEX));
        let heads = query.chunks(INDEX).zip(&weights);
        heads.map(|(q, w)| w * dot(q, &key).max(0.0)).sum()
    };
    let scores: Vec<f64> = names.iter().map(score).collect();
    places.sort_by(|a, b| scores[*b].total_cmp(&scores[*a]));
    let gap = scores[places[COUNT - 1]] - scores[places[COUNT]];
    places.truncate(COUNT);
    // Quantised scores are sums of products of FLOAT16.
    (gap > if is_quantised { 2e-2 } else { 1e-3 }).then_some(places)
}

/// Attention of the last of `names` to the keys at these places, `[N, 512]`.
pub fn attended(names: &[u64], layer: usize, scale: f64, places: &[usize], is_quantised: bool) -> Vec<f64> {
    let asks = *names.last().unwrap();
    let query = exact(asks, layer, What::Query, HEADS * LATENT);
    let query_rope = exact(asks, layer, What::QueryRope, HEADS * ROPE);
    let keys = places.iter().map(|place| {
        let name = names[*place];
        let latent = exact(name, layer, What::Latent, LATENT);
        let latent = if is_quantised { stored_latent(&latent) } else { latent };
        (latent, exact(name, layer, What::KeyRope, ROPE))
    });
    let keys: Vec<_> = keys.collect();
    let heads = query.chunks(LATENT).zip(query_rope.chunks(ROPE));
    let heads = heads.flat_map(|(query, query_rope)| {
        let weight =
            |(latent, rope): &(Vec<f64>, Vec<f64>)| (scale * (dot(query, latent) + dot(query_rope, rope))).exp();
        let weights: Vec<f64> = keys.iter().map(weight).collect();
        let sum: f64 = weights.iter().sum();
        let mut mean = vec![0.0; LATENT];
        for (weight, (latent, _)) in weights.iter().zip(&keys) {
            let elements = mean.iter_mut().zip(latent);
            elements.for_each(|(x, v)| *x += weight / sum * v);
        }
        mean
    });
    heads.collect()
}
