//! The two products of a strip and the softmax between them: dot products of a step's keys with a few queries, and weighted
//! sums of its values.

use super::attention::Attention;
use super::exp::exp2;
use super::fetch::stride;
use super::lines::{Row, Rows};
use super::requests::{Asking, CACHE_LINE};
use super::simd::{Kernel, Shape, Simd, Vector, WIDTH};
use super::softmax::weights;
use super::strip::{QUERIES, SCORES, Step, Strip, turns};
use super::tile::read_bias;
use std::ops::Range;

/// Rows of values that are added without a branch between them.
const FEW: usize = 4;

impl Step<'_> {
    /// Products of the keys at `place` with `R` queries from `lane` on, `J` keys at a time.
    #[inline(always)]
    fn scores<S: Simd, K: Rows, const R: usize, const J: usize>(
        &self,
        simd: S,
        strip: &mut Strip<'_>,
        lane: usize,
        (keys, place): (K, &Range<usize>),
        mut asking: Asking,
    ) {
        let count = place.len();
        let vectors = strip.queries.len() / QUERIES;
        let queries = strip.queries[lane * vectors..][..R * vectors]
            .as_chunks::<R>()
            .0;
        let scores = strip.scores[lane * SCORES..][..R * SCORES].as_flattened_mut();
        let of_steps = scores[place.start * R..].chunks_exact_mut(J * R);
        for (first, scores) in (0..count).step_by(J).zip(of_steps) {
            // Past the last key a product is computed again, which the next key's takes the place of, or which is hidden.
            let mut of = [keys.row(first); J];
            if first + J <= count {
                of = keys.rows(first);
            } else {
                for (j, of) in of.iter_mut().enumerate().take(count - first) {
                    *of = keys.row(first + j);
                }
            }
            assert!(of.iter().all(|key| queries.len() <= key.vectors()));
            let mut sums = [[simd.nothing(); R]; J];
            for (i, queries) in queries.iter().enumerate() {
                let byte = i * K::BYTES;
                if byte.is_multiple_of(CACHE_LINE) {
                    for j in 0..J {
                        asking.ask(j, byte);
                    }
                }
                let mut keys = [simd.splat(0.0); J];
                for j in 0..J {
                    keys[j] = of[j].at(simd, i);
                }
                simd.dots(queries, keys, &mut sums);
            }
            asking = asking.from(J);
            let sum = |i: usize| sums[i / R][i % R];
            if let Ok(scores) = <&mut Vector>::try_from(&mut *scores) {
                let mut of = [simd.nothing(); WIDTH];
                for (i, of) in of.iter_mut().enumerate() {
                    *of = sum(i);
                }
                *scores = simd.totals_of_sixteen(of);
            } else {
                for (four, scores) in scores.as_chunks_mut::<4>().0.iter_mut().enumerate() {
                    let sum = |i: usize| sum(4 * four + i);
                    *scores = simd.totals([sum(0), sum(1), sum(2), sum(3)]);
                }
            }
        }
    }

    /// Scales, biases and hides scores of `R` queries from `lane` on.
    #[inline(always)]
    fn correct<S: Simd, const R: usize>(&self, simd: S, strip: &mut Strip<'_>, lane: usize) {
        let scores = &mut strip.scores[lane * SCORES..][..(self.rows.len() * R).div_ceil(WIDTH)];
        self.bias::<S, R>(simd, lane, scores);
        self.hide::<S, R>(simd, lane, scores);
    }

    /// Whether scores are not just products.
    pub(super) fn corrects(&self) -> bool {
        self.attention.scale != 1.0
            || self.attention.bias.is_some()
            || self.hidden.is_some()
            || !self.rows.len().is_multiple_of(WIDTH)
    }

    /// Scales scores where the queries are not, and adds the position bias.
    #[inline(always)]
    fn bias<S: Simd, const R: usize>(&self, simd: S, lane: usize, scores: &mut [Vector]) {
        let scale = self.attention.scale;
        if scale == 1.0 && self.attention.bias.is_none() {
            return;
        }
        for score in scores.as_flattened_mut() {
            *score *= scale;
        }
        for r in 0..R {
            let query = self.task.queries.start + lane + r;
            let place = self.attention.place(self.task.kv_head, query);
            let mut bias = [[0.0; WIDTH]; SCORES];
            if place.0 as u64 >= self.sequence.geometry.q_len()
                || !read_bias(
                    simd,
                    self.attention,
                    self.sequence,
                    place,
                    &self.rows,
                    &mut bias,
                )
            {
                continue;
            }
            let scores = scores.as_flattened_mut().iter_mut().skip(r).step_by(R);
            for (score, bias) in scores.zip(bias.as_flattened()) {
                *score += bias;
            }
        }
    }

    /// Hides what some queries do not see, and what is past the last key.
    #[inline(always)]
    fn hide<S: Simd, const R: usize>(&self, simd: S, lane: usize, scores: &mut [Vector]) {
        if let Some(hidden) = self.hidden {
            for (score, hidden) in scores.iter_mut().zip(hidden.chunks(WIDTH / R)) {
                let mut lanes = 0;
                for (j, hidden) in hidden.iter().enumerate() {
                    lanes |= (hidden >> lane & ((1 << R) - 1)) << (j * R);
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

    /// Adds the weighted values at `place` to the output of `R` queries from `lane` on, `C` columns at a time.
    #[inline(always)]
    fn weigh<S: Simd, V: Rows, const R: usize, const C: usize>(
        &self,
        simd: S,
        strip: &mut Strip<'_>,
        lane: usize,
        values: (V, &Range<usize>),
        asking: Asking,
    ) {
        let columns = strip.out.len() / QUERIES;
        let mut column = 0;
        while column + C <= columns {
            self.weigh_columns::<S, V, R, C>(simd, strip, (lane, column), values, asking);
            column += C;
        }
        while column < columns {
            self.weigh_columns::<S, V, R, 1>(simd, strip, (lane, column), values, asking);
            column += 1;
        }
    }

    #[inline(always)]
    fn weigh_columns<S: Simd, V: Rows, const R: usize, const C: usize>(
        &self,
        simd: S,
        strip: &mut Strip<'_>,
        (lane, column): (usize, usize),
        (values, place): (V, &Range<usize>),
        mut asking: Asking,
    ) {
        let columns = strip.out.len() / QUERIES;
        let weights = strip.scores[lane * SCORES..][..R * SCORES].as_flattened();
        let weights = &weights.as_chunks::<R>().0[place.clone()];
        let out = &mut strip.out[lane * columns..][..R * columns];
        let mut sums = [[simd.splat(0.0); C]; R];
        for r in 0..R {
            // The first values of a step meet what was before.
            let decay = if place.start == 0 {
                strip.decay[lane + r]
            } else {
                1.0
            };
            let decay = simd.splat(decay);
            for c in 0..C {
                let out = simd.load(&out[r * columns + column + c]);
                sums[r][c] = simd.multiply(out, decay);
            }
        }
        // Each pass over the rows asks for the same columns of others, or, if those are less than a cache line, for all columns
        // of such a line in some of the rows.
        let lines = (C * V::BYTES).div_ceil(CACHE_LINE);
        let turns = (CACHE_LINE / (C * V::BYTES)).clamp(1, FEW);
        let (turn, byte) = (
            column / C % turns,
            column * V::BYTES / CACHE_LINE * CACHE_LINE,
        );
        let values = values.from(column);
        let (steps, rest) = weights.as_chunks::<FEW>();
        for (step, weights) in steps.iter().enumerate() {
            let rows: [V::Row; FEW] = values.rows(step * FEW);
            for j in 0..FEW {
                if j % turns == 0 {
                    for line in 0..lines {
                        asking.ask(turn + j, byte + line * CACHE_LINE);
                    }
                }
                add_row(simd, rows[j], &weights[j], &mut sums);
            }
            asking = asking.from(FEW);
        }
        for (j, weights) in rest.iter().enumerate() {
            let row = values.row(steps.len() * FEW + j);
            add_row(simd, row, weights, &mut sums);
        }
        for r in 0..R {
            for c in 0..C {
                simd.store(sums[r][c], &mut out[r * columns + column + c]);
            }
        }
    }

    /// [`Outputs`] where some values are infinite or NaN: a key of weight 0, hidden perhaps, adds nothing.
    #[cold]
    pub(super) fn outputs_with_care(&self, strip: &mut Strip<'_>, values: &[Vector]) {
        let columns = strip.out.len() / QUERIES;
        for (lane, together) in turns(self.count()) {
            for r in 0..together {
                let weights = strip.scores[lane * SCORES..].as_flattened().iter();
                let weights = weights.skip(r).step_by(together).take(self.rows.len());
                let out = &mut strip.out[(lane + r) * columns..][..columns];
                for out in out.as_flattened_mut() {
                    *out *= strip.decay[lane + r];
                }
                let values = values.chunks(stride(columns));
                for (weight, values) in weights.zip(values).filter(|(weight, _)| **weight != 0.0) {
                    for (out, value) in out.iter_mut().zip(values) {
                        for (out, value) in out.iter_mut().zip(value) {
                            *out += weight * value;
                        }
                    }
                }
            }
        }
    }
}

/// Adds the first columns of a weighted row to their sums.
#[inline(always)]
fn add_row<S: Simd, R: Row, const QUERIES: usize, const COLUMNS: usize>(
    simd: S,
    row: R,
    weights: &[f32; QUERIES],
    sums: &mut [[S::Register; COLUMNS]; QUERIES],
) {
    let mut of = [simd.splat(0.0); COLUMNS];
    for (c, of) in of.iter_mut().enumerate() {
        *of = row.at(simd, c);
    }
    for r in 0..QUERIES {
        let weight = simd.splat(weights[r]);
        for c in 0..COLUMNS {
            sums[r][c] = simd.mul_add(weight, of[c], sums[r][c]);
        }
    }
}

/// Computes the products of some of a step's keys with every query.
pub(super) struct Scores<'a, 's, R> {
    pub(super) step: &'a Step<'a>,
    pub(super) strip: &'a mut Strip<'s>,
    pub(super) keys: R,
    /// Which of the step's keys they are.
    pub(super) place: Range<usize>,
    /// Asked for on the way.
    pub(super) asking: Asking,
}

impl<R: Rows> Kernel for Scores<'_, '_, R> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let (step, strip, keys) = (self.step, self.strip, (self.keys, &self.place));
        // Every turn asks for the same: what an earlier one had brought takes little time.
        let asking = self.asking;
        for (lane, together) in turns(step.count()) {
            match (together, S::SHAPE) {
                (4, Shape::Wide) => step.scores::<S, R, 4, 4>(simd, strip, lane, keys, asking),
                (4, Shape::Six) => step.scores::<S, R, 4, 3>(simd, strip, lane, keys, asking),
                (4, Shape::Two) => step.scores::<S, R, 4, 1>(simd, strip, lane, keys, asking),
                (2, Shape::Two) => step.scores::<S, R, 2, 2>(simd, strip, lane, keys, asking),
                (2, _) => step.scores::<S, R, 2, 4>(simd, strip, lane, keys, asking),
                (_, Shape::Two) => step.scores::<S, R, 1, 4>(simd, strip, lane, keys, asking),
                _ => step.scores::<S, R, 1, 8>(simd, strip, lane, keys, asking),
            }
        }
    }
}

/// Makes scores of the products of a step's keys with every query.
pub(super) struct Correct<'a, 's> {
    pub(super) step: &'a Step<'a>,
    pub(super) strip: &'a mut Strip<'s>,
}

impl Kernel for Correct<'_, '_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        for (lane, together) in turns(self.step.count()) {
            match together {
                4 => self.step.correct::<S, 4>(simd, self.strip, lane),
                2 => self.step.correct::<S, 2>(simd, self.strip, lane),
                _ => self.step.correct::<S, 1>(simd, self.strip, lane),
            }
        }
    }
}

/// Turns the scores of a step's keys with every query into weights.
pub(super) struct Weights<'a, 's> {
    pub(super) step: &'a Step<'a>,
    pub(super) strip: &'a mut Strip<'s>,
}

impl Kernel for Weights<'_, '_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let (attention, strip, keys) = (self.step.attention, self.strip, self.step.rows.len());
        for (lane, together) in turns(self.step.count()) {
            match together {
                4 => soften::<S, 4>(simd, attention, strip, lane, keys),
                2 => soften::<S, 2>(simd, attention, strip, lane, keys),
                _ => soften::<S, 1>(simd, attention, strip, lane, keys),
            }
        }
    }
}

/// Adds some of a step's values, weighted, to the output of every query.
pub(super) struct Outputs<'a, 's, R> {
    pub(super) step: &'a Step<'a>,
    pub(super) strip: &'a mut Strip<'s>,
    pub(super) values: R,
    /// Which of the step's keys they belong to.
    pub(super) place: Range<usize>,
    /// Asked for on the way.
    pub(super) asking: Asking,
}

impl<R: Rows> Kernel for Outputs<'_, '_, R> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let (step, strip, values) = (self.step, self.strip, (self.values, &self.place));
        let asking = self.asking;
        for (lane, together) in turns(step.count()) {
            match (together, S::SHAPE) {
                (4, Shape::Wide) => step.weigh::<S, R, 4, 4>(simd, strip, lane, values, asking),
                (4, _) => step.weigh::<S, R, 4, 1>(simd, strip, lane, values, asking),
                (2, Shape::Wide) => step.weigh::<S, R, 2, 4>(simd, strip, lane, values, asking),
                (2, _) => step.weigh::<S, R, 2, 2>(simd, strip, lane, values, asking),
                _ => step.weigh::<S, R, 1, 4>(simd, strip, lane, values, asking),
            }
        }
    }
}

/// The first `R` lanes, combined with those that lie a multiple of `R` behind. `R` is a power of two.
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

/// Scores of `R` queries to weights: moves the running maxima, takes powers, adds them up and rounds them to the element
/// type or to integers.
#[inline(always)]
fn soften<S: Simd, const R: usize>(
    simd: S,
    attention: &Attention,
    strip: &mut Strip<'_>,
    lane: usize,
    keys: usize,
) {
    let scores = &mut strip.scores[lane * SCORES..][..(keys * R).div_ceil(WIDTH)];
    let mut old = [0.0; WIDTH];
    for (i, old) in old.iter_mut().enumerate() {
        *old = strip.max[lane + i % R];
    }
    // NaN is no maximum; it reaches the sum and the output through its power.
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
    // Before anything is seen the maximum is -inf; the difference to it must not be NaN.
    let shift = simd.larger(simd.load(&max), simd.splat(f32::MIN));
    let sums = weights::<S, 1>(simd, attention, scores, 0, shift);
    let mut decay = [0.0; WIDTH];
    simd.store(
        exp2(simd, simd.subtract(simd.load(&old), shift)),
        &mut decay,
    );
    let mut sum = [0.0; WIDTH];
    simd.store(sums, &mut sum);
    let sum: [f32; R] = fold(&sum, |a, b| a + b);
    for r in 0..R {
        strip.max[lane + r] = highest[r];
        strip.decay[lane + r] = decay[r];
        strip.sum[lane + r] = strip.sum[lane + r] * decay[r] + sum[r];
    }
}
