//! The online softmax of the decode kernel: from the scores of a sub-tile to weights, running maximum and running sum.
//!
//! The scores of a query tile are interleaved, so a vector holds those of several keys. The maximum and the sum of each
//! query are folded across the lanes once for a sub-tile (Milakov and Gimelshein 2018, blockwise).

use super::{DecodeBuffers, SCORES, SubTile, query_tiles};
use crate::kernel::attention::Attention;
use crate::kernel::mask::DropMask;
use crate::kernel::online_softmax::exp2;
use crate::kernel::online_softmax::weights;
use crate::kernel::simd::{Kernel, Simd, Vector, WIDTH};

impl SubTile<'_> {
    /// Scales, biases and hides the scores of `R` queries from `query` on.
    #[inline(always)]
    fn correct<S: Simd, const R: usize>(&self, simd: S, buffers: &mut DecodeBuffers<'_>, query: usize) {
        let scores = &mut buffers.scores[query * SCORES..][..(self.rows.len() * R).div_ceil(WIDTH)];
        self.bias::<S, R>(simd, query, scores);
        self.hide::<S, R>(simd, query, scores);
    }

    /// Whether scores differ from the products of queries and keys.
    pub(super) fn needs_correction(&self) -> bool {
        self.attention.rescales()
            || self.attention.bias.is_some()
            || self.hidden.is_some()
            || !self.rows.len().is_multiple_of(WIDTH)
    }

    /// Scales the scores, unless the queries were scaled, caps them, and adds the position bias.
    #[inline(always)]
    fn bias<S: Simd, const R: usize>(&self, simd: S, query: usize, scores: &mut [Vector]) {
        if !self.attention.rescales() && self.attention.bias.is_none() {
            return;
        }
        self.attention.rescale(scores.as_flattened_mut().iter_mut());
        for r in 0..R {
            let query = self.task.queries.start + query + r;
            let (row, head) = self.attention.row_and_head(self.task.kv_head, query);
            let mut bias = [[0.0; WIDTH]; SCORES];
            if row as u64 >= self.sequence.geometry.q_len()
                || !self.attention.read_bias(simd, self.sequence, (row, head), &self.rows, &mut bias)
            {
                continue;
            }
            let scores = scores.as_flattened_mut().iter_mut().skip(r).step_by(R);
            for (score, bias) in scores.zip(bias.as_flattened()) {
                *score += bias;
            }
        }
    }

    /// Drops weights.
    pub(super) fn drop_weights(&self, dropout: &DropMask, buffers: &mut DecodeBuffers<'_>) {
        let Some(dropped) = &self.sequence.dropped else {
            return;
        };
        for (first, together) in query_tiles(self.count()) {
            let weights = buffers.scores[first * SCORES..].as_flattened_mut();
            for r in 0..together {
                let query = self.task.queries.start + first + r;
                let (row, head) = self.attention.row_and_head(self.task.kv_head, query);
                let first_bit = dropped.at(0, head, row) as u64;
                let of_query = weights.iter_mut().skip(r).step_by(together);
                for (key, weight) in self.rows.clone().zip(of_query) {
                    if !dropout.keeps(first_bit + key as u64) {
                        *weight = 0.0;
                    }
                }
            }
        }
    }

    /// Hides the scores of keys that a query does not see, and those past the last key.
    #[inline(always)]
    fn hide<S: Simd, const R: usize>(&self, simd: S, query: usize, scores: &mut [Vector]) {
        if let Some(hidden) = self.hidden {
            for (score, hidden) in scores.iter_mut().zip(hidden.chunks(WIDTH / R)) {
                let mut lanes = 0;
                for (j, hidden) in hidden.iter().enumerate() {
                    lanes |= (hidden >> query & ((1 << R) - 1)) << (j * R);
                }
                simd.store(simd.hide(simd.load(score), lanes), score);
            }
        }
        let used = self.rows.len() * R % WIDTH;
        if used != 0
            && let Some(score) = scores.last_mut()
        {
            simd.store(simd.hide(simd.load(score), u16::MAX << used), score);
        }
    }
}

/// Scales, biases and hides the scores of a sub-tile.
pub(super) struct CorrectScores<'a, 's> {
    pub(super) sub_tile: &'a SubTile<'a>,
    pub(super) buffers: &'a mut DecodeBuffers<'s>,
}

impl Kernel for CorrectScores<'_, '_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        for (query, together) in query_tiles(self.sub_tile.count()) {
            match together {
                4 => self.sub_tile.correct::<S, 4>(simd, self.buffers, query),
                2 => self.sub_tile.correct::<S, 2>(simd, self.buffers, query),
                _ => self.sub_tile.correct::<S, 1>(simd, self.buffers, query),
            }
        }
    }
}

/// Updates the online softmax of every query: raises the running maximum, replaces the scores of a sub-tile by their
/// rounded weights and adds these to the running sum.
pub(super) struct UpdateSoftmax<'a, 's> {
    pub(super) sub_tile: &'a SubTile<'a>,
    pub(super) buffers: &'a mut DecodeBuffers<'s>,
}

impl Kernel for UpdateSoftmax<'_, '_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let (attention, buffers, keys) = (self.sub_tile.attention, self.buffers, self.sub_tile.rows.len());
        for (query, together) in query_tiles(self.sub_tile.count()) {
            match together {
                4 => update_softmax::<S, 4>(simd, attention, buffers, query, keys),
                2 => update_softmax::<S, 2>(simd, attention, buffers, query, keys),
                _ => update_softmax::<S, 1>(simd, attention, buffers, query, keys),
            }
        }
    }
}

/// Combines each of the first `R` lanes with all lanes a multiple of `R` after it. `R` is a power of two.
#[inline(always)]
fn fold<const R: usize>(vector: &Vector, combine: impl Fn(f32, f32) -> f32) -> [f32; R] {
    let mut lanes = *vector;
    let mut half = WIDTH / 2;
    while half >= R {
        for i in 0..half {
            lanes[i] = combine(lanes[i], lanes[i + half]);
        }
        half /= 2;
    }
    let mut folded = [0.0; R];
    folded.copy_from_slice(&lanes[..R]);
    folded
}

/// Updates the online softmax of `R` queries from `query` on with the scores of `keys` keys.
#[inline(always)]
fn update_softmax<S: Simd, const R: usize>(
    simd: S,
    attention: &Attention,
    buffers: &mut DecodeBuffers<'_>,
    query: usize,
    keys: usize,
) {
    let scores = &mut buffers.scores[query * SCORES..][..(keys * R).div_ceil(WIDTH)];
    let mut old = [0.0; WIDTH];
    for (i, old) in old.iter_mut().enumerate() {
        *old = buffers.max[query + i % R];
    }
    // A NaN does not become the maximum; it reaches sum and output through its weight.
    let mut most = simd.load(&old);
    for score in scores.iter() {
        most = simd.larger(simd.load(score), most);
    }
    let mut max = [0.0; WIDTH];
    simd.store(most, &mut max);
    let highest: [f32; R] = fold(&max, |a, b| if a > b { a } else { b });
    for (i, max) in max.iter_mut().enumerate() {
        *max = highest[i % R];
    }
    // The maximum is -inf until a key is seen; the difference to it must not be NaN.
    let shift = simd.larger(simd.load(&max), simd.splat(f32::MIN));
    let sums = weights::<S, 1>(simd, attention, scores, 0, shift);
    let mut rescale = [0.0; WIDTH];
    simd.store(exp2(simd, simd.subtract(simd.load(&old), shift)), &mut rescale);
    let mut sum = [0.0; WIDTH];
    simd.store(sums, &mut sum);
    let sum: [f32; R] = fold(&sum, |a, b| a + b);
    for r in 0..R {
        buffers.max[query + r] = highest[r];
        buffers.rescale[query + r] = rescale[r];
        buffers.sum[query + r] = buffers.sum[query + r] * rescale[r] + sum[r];
    }
}
