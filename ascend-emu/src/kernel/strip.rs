//! Attention of a few queries that share a key head: decode.
//!
//! With fewer queries than a vector has lanes, scores are dot products along the head dimension, four queries to a key
//! so that each vector of a key is read once, and softmax runs along the keys.

use super::attention::{Attention, Sequence};
use super::element::Element;
use super::exp::{exp_one, exponentiate};
use super::finish::State;
use super::schedule::Task;
use super::scratch::{Scratch, take};
use super::simd::{Simd, Vector, WIDTH};
use super::tile::{KEYS, quantise, read_bias, read_keys, read_mask, read_values};
use std::ops::Range;

/// The largest number of queries for which this is the faster way.
pub(super) const QUERIES: usize = 8;

/// Vectors of scores of one query.
const SCORES: usize = KEYS / WIDTH;

/// The buffers of a strip.
struct Strip<'s> {
    /// Queries; those that are computed together take turns, a vector each.
    queries: &'s mut [Vector],
    /// A tile of keys, row by row.
    keys: &'s mut [Vector],
    /// A tile of values, column by column.
    values: &'s mut [Vector],
    /// Of each query, the scores and then the weights of the tile.
    scores: &'s mut [Vector],
    /// Output of each query, row by row, not yet divided by the sum.
    out: &'s mut [Vector],
    /// Running maximum of each query.
    max: &'s mut [f32],
    /// Running sum of each query.
    sum: &'s mut [f32],
    /// Factor of each query that the last tile puts on what was before.
    decay: [f32; QUERIES],
}

/// Attends to the keys of `task`: maximum, sum and output of each of its queries, at most [`QUERIES`].
#[inline(always)]
pub(super) fn attend<'s, T: Element, S: Simd>(
    simd: S,
    attention: &Attention<T>,
    sequence: &Sequence<T>,
    task: &Task,
    scratch: &'s mut Scratch,
) -> State<'s> {
    let (vectors, columns) = (attention.vectors(), attention.columns());
    let count = task.queries.len().min(QUERIES);
    let sizes = [
        QUERIES * vectors,
        KEYS * vectors,
        KEYS * columns,
        QUERIES * SCORES,
        QUERIES * columns,
        1,
        1,
    ];
    let (mut rest, _) = scratch.split(sizes.iter().sum(), 0);
    let [queries, keys, values, scores, out, max, sum] = sizes.map(|size| take(&mut rest, size));
    let mut strip = Strip {
        queries,
        keys,
        values,
        scores,
        out,
        max: &mut max.as_flattened_mut()[..count],
        sum: &mut sum.as_flattened_mut()[..count],
        decay: [1.0; QUERIES],
    };
    strip.out.fill([0.0; WIDTH]);
    strip.max.fill(f32::NEG_INFINITY);
    strip.sum.fill(0.0);
    strip.queries.fill([0.0; WIDTH]);
    let rows = sequence.geometry.q_len() as usize;
    let mut lane = 0;
    while lane < count {
        let together = together(count - lane);
        for r in 0..together {
            let (row, head) = attention.place(task.kv_head, task.queries.start + lane + r);
            if row < rows {
                let out = &mut strip.queries[lane * vectors + r..];
                attention.read_query(simd, sequence, (row, head), out, together);
            }
        }
        lane += together;
    }

    for first in task.keys.clone().step_by(KEYS) {
        let tile = first..task.keys.end.min(first + KEYS);
        let seen = sequence.span(attention.rows(&task.queries), &tile);
        if seen.is_empty() {
            continue;
        }
        let (head, keys) = (task.kv_head, seen.clone());
        read_keys(simd, attention, sequence, head, keys.clone(), strip.keys);
        let finite = read_values(simd, attention, sequence, head, keys, strip.values);
        let mut lane = 0;
        while lane < count {
            let together = together(count - lane);
            match together {
                4 => score::<S, 4>(simd, &mut strip, lane, seen.len()),
                2 => score::<S, 2>(simd, &mut strip, lane, seen.len()),
                _ => score::<S, 1>(simd, &mut strip, lane, seen.len()),
            }
            lane += together;
        }
        for (lane, query) in task.queries.clone().enumerate() {
            let row = (query / attention.group) as u64;
            let sees = sequence.span(row..row + 1, &seen);
            let sees = sees.start - seen.start..sees.end - seen.start;
            let mut bytes = [0; KEYS];
            let hidden = read_mask(attention, sequence, row, &seen, &mut bytes).is_some();
            let hidden = hidden.then_some(&bytes);
            let place = attention.place(task.kv_head, query);
            let scale = if bias(simd, attention, sequence, &mut strip, lane, place, &seen) {
                1.0
            } else {
                attention.scale
            };
            let numbers = (scale, attention.quantum);
            soften::<T, S>(simd, &mut strip, numbers, lane, &sees, hidden);
        }
        let mut lane = 0;
        while lane < count {
            let together = together(count - lane);
            match together {
                4 => weigh::<S, 4>(simd, &mut strip, lane, seen.len(), finite),
                2 => weigh::<S, 2>(simd, &mut strip, lane, seen.len(), finite),
                _ => weigh::<S, 1>(simd, &mut strip, lane, seen.len(), finite),
            }
            lane += together;
        }
    }
    let Strip { out, max, sum, .. } = strip;
    State {
        max,
        sum,
        out: &mut out[..count * columns],
    }
}

/// How many of the next `left` queries are computed together.
#[inline(always)]
fn together(left: usize) -> usize {
    match left {
        4.. => 4,
        2.. => 2,
        _ => 1,
    }
}

/// Sum of a vector, in halves.
#[inline(always)]
fn total(v: &Vector) -> f32 {
    let mut eight = [0.0; 8];
    for i in 0..8 {
        eight[i] = v[i] + v[i + 8];
    }
    let mut four = [0.0; 4];
    for i in 0..4 {
        four[i] = eight[i] + eight[i + 4];
    }
    (four[0] + four[2]) + (four[1] + four[3])
}

/// Products of `R` queries from `lane` on with the first `keys` keys of the tile.
#[inline(always)]
fn score<S: Simd, const R: usize>(simd: S, strip: &mut Strip<'_>, lane: usize, keys: usize) {
    let vectors = strip.queries.len() / QUERIES;
    let queries = strip.queries[lane * vectors..][..R * vectors]
        .as_chunks::<R>()
        .0;
    let scores = strip.scores[lane * SCORES..][..R * SCORES].as_flattened_mut();
    for (j, key) in strip.keys.chunks_exact(vectors).take(keys).enumerate() {
        let mut products = [simd.splat(0.0); R];
        for (queries, key) in queries.iter().zip(key) {
            let key = simd.load(key);
            for r in 0..R {
                products[r] = simd.mul_add(simd.load(&queries[r]), key, products[r]);
            }
        }
        let mut totals = [0.0; R];
        for r in 0..R {
            let mut product = [0.0; WIDTH];
            simd.store(products[r], &mut product);
            totals[r] = total(&product);
        }
        for (scores, total) in scores.chunks_exact_mut(KEYS).zip(totals) {
            scores[j] = total;
        }
    }
}

/// Scales the scores of one query and adds the position bias, if there is one.
#[inline(always)]
fn bias<T: Element, S: Simd>(
    simd: S,
    attention: &Attention<T>,
    sequence: &Sequence<T>,
    strip: &mut Strip<'_>,
    lane: usize,
    place: (usize, usize),
    keys: &Range<usize>,
) -> bool {
    let mut bias = [[0.0; WIDTH]; SCORES];
    if place.0 as u64 >= sequence.geometry.q_len()
        || !read_bias(simd, attention, sequence, place, keys, &mut bias)
    {
        return false;
    }
    let scores = &mut strip.scores[lane * SCORES..][..SCORES];
    for (scores, bias) in scores.iter_mut().zip(&bias) {
        for i in 0..WIDTH {
            scores[i] = simd.mul_add_one(scores[i], attention.scale, bias[i]);
        }
    }
    true
}

/// Scores of one query to weights: scales, hides, moves the running maximum, takes exponentials, adds them up and
/// rounds them to the element type or to integers. Weights of keys that it does not see are 0.
#[inline(always)]
fn soften<T: Element, S: Simd>(
    simd: S,
    strip: &mut Strip<'_>,
    (scale, quantum): (f32, Option<f32>),
    lane: usize,
    sees: &Range<usize>,
    hidden: Option<&[u8; KEYS]>,
) {
    let scores = &mut strip.scores[lane * SCORES..][..SCORES];
    let (first, end) = (sees.start as u32, sees.end as u32);
    let old = strip.max[lane];
    let mut max = [old; WIDTH];
    for (v, score) in scores.iter_mut().enumerate() {
        for (key, score) in ((v * WIDTH) as u32..).zip(score.iter_mut()) {
            let sees = (first <= key) & (key < end);
            *score = if sees {
                *score * scale
            } else {
                f32::NEG_INFINITY
            };
        }
        if let Some(hidden) = hidden {
            for i in 0..WIDTH {
                let hidden = hidden[v * WIDTH + i] != 0;
                score[i] = if hidden { f32::NEG_INFINITY } else { score[i] };
            }
        }
        for i in 0..WIDTH {
            // NaN is no maximum; it reaches the sum and the output through its exponential.
            max[i] = if score[i] > max[i] { score[i] } else { max[i] };
        }
    }
    let mut highest = old;
    for max in max {
        highest = if max > highest { max } else { highest };
    }
    // Before anything is seen the maximum is -inf; the difference to it must not be NaN.
    let shift = if highest == f32::NEG_INFINITY {
        0.0
    } else {
        highest
    };
    let mut sum = [0.0; WIDTH];
    let shift = [shift; WIDTH];
    if let Some(quantum) = quantum {
        for score in scores.iter_mut() {
            *score = quantise(&exponentiate(simd, score, &shift, &mut sum), quantum);
        }
    } else {
        for score in scores.iter_mut() {
            let weight = exponentiate(simd, score, &shift, &mut sum);
            simd.store(T::round(simd, simd.load(&weight)), score);
        }
    }
    let decay = exp_one(simd, old - shift[0]);
    strip.decay[lane] = decay;
    strip.sum[lane] = strip.sum[lane] * decay + total(&sum);
    strip.max[lane] = highest;
}

/// Adds the weighted values of the first `keys` keys of the tile to the output of `R` queries from `lane` on.
#[inline(always)]
fn weigh<S: Simd, const R: usize>(
    simd: S,
    strip: &mut Strip<'_>,
    lane: usize,
    keys: usize,
    finite: bool,
) {
    let columns = strip.values.len() / KEYS;
    let weights = strip.scores[lane * SCORES..][..R * SCORES].as_flattened();
    let mut of = [weights; R];
    for (r, of) in of.iter_mut().enumerate() {
        *of = &weights[r * KEYS..][..keys];
    }
    let mut decay = [0.0; R];
    decay.copy_from_slice(&strip.decay[lane..][..R]);
    let out = &mut strip.out[lane * columns..][..R * columns];
    for column in 0..columns {
        let values = &strip.values[column * KEYS..][..keys];
        if !finite {
            weigh_with_care(&of, values, &decay, &mut out[column..], columns);
            continue;
        }
        let mut sums = [simd.splat(0.0); R];
        for (r, out) in out[column..].iter().step_by(columns).enumerate().take(R) {
            sums[r] = simd.multiply(simd.load(out), simd.splat(decay[r]));
        }
        let of = of.map(|weights| &weights[..values.len()]);
        for (j, value) in values.iter().enumerate() {
            let value = simd.load(value);
            for r in 0..R {
                sums[r] = simd.mul_add(simd.splat(of[r][j]), value, sums[r]);
            }
        }
        for (out, sums) in out[column..].iter_mut().step_by(columns).zip(sums) {
            simd.store(sums, out);
        }
    }
}

/// One column of [`weigh`] where some values are infinite or NaN: a key of weight 0, hidden perhaps, adds nothing.
#[cold]
fn weigh_with_care(
    weights: &[&[f32]],
    values: &[Vector],
    decay: &[f32],
    out: &mut [Vector],
    columns: usize,
) {
    for ((weights, decay), out) in weights
        .iter()
        .zip(decay)
        .zip(out.iter_mut().step_by(columns))
    {
        for out in out.iter_mut() {
            *out *= decay;
        }
        for (&weight, value) in weights.iter().zip(values) {
            if weight != 0.0 {
                for (out, value) in out.iter_mut().zip(value) {
                    *out += weight * value;
                }
            }
        }
    }
}
