//! The scores of an indexer and attention to chosen keys, in double precision.

use ascend_attention::bf16;

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

fn exact(name: u64, layer: usize, what: What, len: usize) -> Vec<f64> {
    let row = row(name, layer, what, len);
    row.iter().map(|x| x.to_f64()).collect()
}

fn dot(a: &[f64], b: &[f64]) -> f64 {
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}

/// The places of the keys that the last of `names` reads, out of all of them. `None` where the scores of two keys, one
/// that is chosen and one that is not, are too close to tell.
pub fn chosen(names: &[u64], indexer: usize) -> Option<Vec<usize>> {
    let mut places: Vec<usize> = (0..names.len()).collect();
    if names.len() <= COUNT {
        return Some(places);
    }
    let asks = *names.last().unwrap();
    let query = exact(asks, indexer, What::IndexQuery, INDEX_HEADS * INDEX);
    let weights = exact(asks, indexer, What::IndexWeights, INDEX_HEADS);
    let score = |name: &u64| -> f64 {
        let key = exact(*name, indexer, What::IndexKey, INDEX);
        let heads = query.chunks(INDEX).zip(&weights);
        heads.map(|(q, w)| w * dot(q, &key).max(0.0)).sum()
    };
    let scores: Vec<f64> = names.iter().map(score).collect();
    places.sort_by(|a, b| scores[*b].total_cmp(&scores[*a]));
    let gap = scores[places[COUNT - 1]] - scores[places[COUNT]];
    places.truncate(COUNT);
    (gap > 1e-3).then_some(places)
}

/// Attention of the last of `names` to the keys at these places, `[N, 512]`.
pub fn attended(names: &[u64], layer: usize, scale: f64, places: &[usize]) -> Vec<f64> {
    let asks = *names.last().unwrap();
    let query = exact(asks, layer, What::Query, HEADS * LATENT);
    let query_rope = exact(asks, layer, What::QueryRope, HEADS * ROPE);
    let keys = places.iter().map(|place| {
        let name = names[*place];
        let latent = exact(name, layer, What::Latent, LATENT);
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
