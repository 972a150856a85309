//! What the parts of the causal triangle contribute in one layer, from its queries, keys and values.

mod part_sums;
mod sample_real;
mod tile;

use std::num::NonZero;
use std::ops::Range;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;

use ascend_attention::spec::geometry::TriangleMix;

use ascend_attention::{Error, Result};

pub use part_sums::PartSums;
pub(crate) use part_sums::Parts;
pub use sample_real::SampleReal;
use tile::{KEYS, ROWS, Softmax, Tile, Values};

/// Queries, keys and values of one layer over a whole prompt, row-major in host memory.
#[derive(Clone, Copy, Debug)]
pub struct LayerSample<'a, R> {
    /// Tokens of the prompt.
    pub tokens: usize,
    /// Heads of the queries.
    pub heads: usize,
    /// Heads of keys and values; each serves the same number of query heads.
    pub kv_heads: usize,
    /// Elements of a head of queries and keys.
    pub dim: usize,
    /// Elements of a head of values.
    pub value_dim: usize,
    /// What scores are multiplied by.
    pub scale: f64,
    /// `[tokens, heads, dim]`.
    pub query: &'a [R],
    /// `[tokens, kv_heads, dim]`.
    pub key: &'a [R],
    /// `[tokens, kv_heads, value_dim]`.
    pub value: &'a [R],
}

/// What is summed up over the parts, with scores `S = scale Q Kᵀ`, weights `P = softmax(S)`, outputs `O = P V` and
/// the gradient `dO` with respect to the outputs, `[tokens, heads, value_dim]`.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub enum SampleMeasure<'a, R> {
    /// `|dP|` with `dP = dO Vᵀ`: the gradient with respect to the weights, which is what the paper looks at.
    WeightGradient(&'a [R]),
    /// `|P ∘ (dP - rowsum(P ∘ dP))|`: the gradient with respect to the scores, which is small where weights are.
    ScoreGradient(&'a [R]),
    /// `P`, as a share of all rows' weights: how much attention the part gets. It takes no gradient.
    AttentionMass,
}

/// Refuses sizes of 0, and query heads that do not share the others evenly.
pub(crate) fn check_sizes(sizes: &[(&'static str, usize)], heads: usize, kv_heads: usize) -> Result<()> {
    for &(name, given) in sizes {
        if given == 0 {
            return Err(Error::invalid(name, given, "at least 1").fix("leave empty samples out"));
        }
    }
    if heads.checked_rem(kv_heads) != Some(0) {
        let allowed = format_args!("a multiple of kv_heads, {kv_heads}");
        return Err(Error::invalid("heads", heads, allowed).fix("give the heads of the model"));
    }
    Ok(())
}

/// The vector of a head in a row of `[rows, heads, dim]`.
fn vector<R>(vectors: &[R], heads: usize, dim: usize, row: usize, head: usize) -> &[R] {
    let first = row.saturating_mul(heads).saturating_add(head);
    let first = first.saturating_mul(dim);
    vectors.get(first..first.saturating_add(dim)).unwrap_or_default()
}

impl<R: SampleReal> LayerSample<'_, R> {
    /// What each part contributes: the mean over the query heads of the sum over the part's cells.
    ///
    /// Scores are computed in tiles of 32 rows and 64 keys, so that memory does not grow with the square of the
    /// tokens, on all processors; the result does not depend on their number. In `f32` the dot products are single
    /// precision, everything else double.
    ///
    /// # Errors
    /// [`ARGUMENT_VALUE`](crate::rules::ARGUMENT_VALUE) if there is no token, head or element, the query heads are
    /// no multiple of the others, a slice has another number of elements than its shape, an element or the scale is
    /// not finite, or the elements are so large that sums are not.
    pub fn parts(&self, sizes: TriangleMix, measure: SampleMeasure<'_, R>) -> Result<PartSums> {
        self.check(measure)?;
        let parts = Parts::new(sizes, self.tokens);
        let bands = self.tokens.div_ceil(ROWS);
        let items = self.heads.saturating_mul(bands);
        let next = AtomicUsize::new(0);
        let work = || {
            let mut done = Vec::new();
            let mut tile = Tile::new();
            loop {
                let item = next.fetch_add(1, Ordering::Relaxed);
                if item >= items {
                    return done;
                }
                // The bands with the most keys first.
                let head = item.checked_rem(self.heads).unwrap_or(0);
                let band = bands.saturating_sub(item.checked_div(self.heads).unwrap_or(0));
                let first = band.saturating_sub(1).saturating_mul(ROWS);
                let rows = first..first.saturating_add(ROWS).min(self.tokens);
                done.push((item, self.band(&parts, measure, head, rows, &mut tile)));
            }
        };
        let threads = thread::available_parallelism().map_or(1, NonZero::get);
        let mut sums = thread::scope(|scope| {
            let helpers = 1..threads.min(items);
            // The other threads do the work of one that cannot be started.
            let start = |_| thread::Builder::new().spawn_scoped(scope, work).ok();
            let helpers: Vec<_> = helpers.filter_map(start).collect();
            let mut sums = work();
            for helper in helpers {
                match helper.join() {
                    Ok(done) => sums.extend(done),
                    Err(panic) => std::panic::resume_unwind(panic),
                }
            }
            sums
        });
        // Sums depend on their order, and threads finish in any.
        sums.sort_unstable_by_key(|(item, _)| *item);
        let mut all = PartSums::default();
        for (_, band) in sums {
            all.add(band);
        }
        let mut count = self.heads as f64;
        if let SampleMeasure::AttentionMass = measure {
            count *= self.tokens as f64;
        }
        all.over(count).finite("divide the output gradient, or take f64")
    }

    fn check(&self, measure: SampleMeasure<'_, R>) -> Result<()> {
        let sizes = [
            ("tokens", self.tokens),
            ("heads", self.heads),
            ("kv_heads", self.kv_heads),
            ("dim", self.dim),
            ("value_dim", self.value_dim),
        ];
        check_sizes(&sizes, self.heads, self.kv_heads)?;
        if !self.scale.is_finite() {
            return Err(Error::invalid("scale", self.scale, "a finite number")
                .fix("give one over the root of the head dimension"));
        }
        let gradient = match measure {
            SampleMeasure::WeightGradient(gradient) | SampleMeasure::ScoreGradient(gradient) => Some(gradient),
            SampleMeasure::AttentionMass => None,
        };
        let slices = [
            ("query", Some(self.query), self.heads, self.dim),
            ("key", Some(self.key), self.kv_heads, self.dim),
            ("value", Some(self.value), self.kv_heads, self.value_dim),
            ("output gradient", gradient, self.heads, self.value_dim),
        ];
        for (name, slice, heads, dim) in slices {
            let Some(slice) = slice else { continue };
            let row = heads.checked_mul(dim);
            if row.and_then(|row| row.checked_mul(self.tokens)) != Some(slice.len()) {
                return Err(Error::invalid(
                    name,
                    format_args!("{} elements", slice.len()),
                    format_args!("[{}, {heads}, {dim}]", self.tokens),
                )
                .fix("bring contiguous rows of all heads"));
            }
            if let Some(at) = slice.iter().position(|x| !x.is_finite()) {
                return Err(Error::invalid(
                    name,
                    format_args!("an element at {at} that is not finite"),
                    "finite numbers",
                )
                .fix("leave the sample out, or find the layer that overflows by `Tensor::range_report`"));
            }
        }
        Ok(())
    }

    /// The sums of some rows of a head.
    fn band(
        &self,
        parts: &Parts,
        measure: SampleMeasure<'_, R>,
        head: usize,
        rows: Range<usize>,
        tile: &mut Tile,
    ) -> PartSums {
        let group = self.heads.checked_div(self.kv_heads).unwrap_or(1);
        let kv_head = head.checked_div(group).unwrap_or(0);
        let scores = |row, key| {
            let query = vector(self.query, self.heads, self.dim, row, head);
            let key = vector(self.key, self.kv_heads, self.dim, key, kv_head);
            let score = R::dot(query, key) * self.scale;
            // Overflow to -inf would pass for a key that the row does not see.
            if score.is_finite() { score } else { f64::NAN }
        };
        let gradients = |gradient_rows: &[R], row, key| {
            let gradient = vector(gradient_rows, self.heads, self.value_dim, row, head);
            let value = vector(self.value, self.kv_heads, self.value_dim, key, kv_head);
            R::dot(gradient, value)
        };
        let tiles = || (0..rows.end).step_by(KEYS);
        let keys_of = |first: usize| first..first.saturating_add(KEYS).min(rows.end);
        let mut softmax = [Softmax::EMPTY; ROWS];
        if let SampleMeasure::AttentionMass | SampleMeasure::ScoreGradient(_) = measure {
            for first in tiles() {
                let keys = keys_of(first);
                tile.fill(Values::Scores, &rows, &keys, scores);
                if let SampleMeasure::ScoreGradient(gradient_rows) = measure {
                    tile.fill(Values::Gradients, &rows, &keys, |row, key| gradients(gradient_rows, row, key));
                }
                for (softmax, (scores, gradients)) in softmax.iter_mut().zip(tile.rows()) {
                    softmax.add(scores, gradients);
                }
            }
        }
        let mut sums = PartSums::default();
        for first in tiles() {
            let keys = keys_of(first);
            if let SampleMeasure::AttentionMass | SampleMeasure::ScoreGradient(_) = measure {
                tile.fill(Values::Scores, &rows, &keys, scores);
            }
            if let SampleMeasure::WeightGradient(gradient_rows) | SampleMeasure::ScoreGradient(gradient_rows) = measure
            {
                tile.fill(Values::Gradients, &rows, &keys, |row, key| gradients(gradient_rows, row, key));
            }
            for ((row, softmax), (scores, gradients)) in rows.clone().zip(&softmax).zip(tile.rows_mut()) {
                // Replaces the score of each cell by the value that is summed up.
                for (cell, gradient) in scores.iter_mut().zip(gradients) {
                    *cell = match measure {
                        SampleMeasure::WeightGradient(_) => gradient.abs(),
                        SampleMeasure::ScoreGradient(_) => (softmax.weight(*cell) * (*gradient - softmax.mean())).abs(),
                        SampleMeasure::AttentionMass => softmax.weight(*cell),
                    };
                }
                sums.add(parts.row_sums(row, &keys, scores));
            }
        }
        sums
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

    use super::*;
    use proptest::prelude::*;

    /// Numbers between -1 and 1 that depend on a seed.
    fn numbers(seed: u64, count: usize) -> Vec<f64> {
        let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
        let next = |_| {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            // A number that f32 holds exactly.
            f64::from((state >> 40) as f32 / (1u32 << 23) as f32 - 1.0)
        };
        (0..count).map(next).collect()
    }

    /// The formulas over whole matrices, and the parts by their definition.
    fn naive(sizes: TriangleMix, sample: &LayerSample<'_, f64>, gradient: &[f64]) -> [PartSums; 3] {
        let (n, group) = (sample.tokens, sample.heads / sample.kv_heads);
        let mut sums = [PartSums::default(); 3];
        for head in 0..sample.heads {
            let kv = head / group;
            for i in 0..n {
                let score = |j: usize| -> f64 {
                    let products = (0..sample.dim).map(|d| {
                        sample.query[(i * sample.heads + head) * sample.dim + d]
                            * sample.key[(j * sample.kv_heads + kv) * sample.dim + d]
                    });
                    products.sum::<f64>() * sample.scale
                };
                let d_weight = |j: usize| -> f64 {
                    let products = (0..sample.value_dim).map(|d| {
                        gradient[(i * sample.heads + head) * sample.value_dim + d]
                            * sample.value[(j * sample.kv_heads + kv) * sample.value_dim + d]
                    });
                    products.sum()
                };
                let largest = (0..=i).map(score).fold(f64::MIN, f64::max);
                let total: f64 = (0..=i).map(|j| (score(j) - largest).exp()).sum();
                let weight = |j: usize| (score(j) - largest).exp() / total;
                let mean: f64 = (0..=i).map(|j| weight(j) * d_weight(j)).sum();
                for j in 0..=i {
                    let near = (i - j) as u64 <= sizes.sliding_window_size;
                    let streaming = near || (j as u64) < sizes.num_sink_tokens;
                    let last = i as u64 + sizes.num_last_tokens >= n as u64;
                    let values = [d_weight(j).abs(), (weight(j) * (d_weight(j) - mean)).abs(), weight(j) / n as f64];
                    for (sums, value) in sums.iter_mut().zip(values) {
                        match (streaming, last) {
                            (true, _) => sums.streaming += value / sample.heads as f64,
                            (false, true) => sums.last += value / sample.heads as f64,
                            (false, false) => sums.middle += value / sample.heads as f64,
                        }
                    }
                }
            }
        }
        sums
    }

    fn close(got: PartSums, want: PartSums, within: f64) -> bool {
        let pairs = [(got.streaming, want.streaming), (got.last, want.last), (got.middle, want.middle)];
        let mut pairs = pairs.into_iter();
        pairs.all(|(got, want)| (got - want).abs() <= within * (1.0 + want.abs()))
    }

    fn three<R: SampleReal>(sample: &LayerSample<'_, R>, sizes: TriangleMix, gradient: &[R]) -> [PartSums; 3] {
        [SampleMeasure::WeightGradient(gradient), SampleMeasure::ScoreGradient(gradient), SampleMeasure::AttentionMass]
            .map(|measure| sample.parts(sizes, measure).unwrap())
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(24))]

        #[test]
        fn every_measure_is_its_formula_over_whole_matrices(
            tokens in 1usize..120, kv_heads in 1usize..3, group in 1usize..3, dims in (1usize..20, 1usize..20),
            sizes in (0u64..20, 0u64..40, 0u64..40), scale in 0.1f64..4.0, seed: u64,
        ) {
            let sizes = TriangleMix::new(sizes.0, sizes.1, sizes.2);
            let (heads, dim, value_dim) = (kv_heads * group, dims.0, dims.1);
            let query = numbers(seed, tokens * heads * dim);
            let key = numbers(seed ^ 1, tokens * kv_heads * dim);
            let value = numbers(seed ^ 2, tokens * kv_heads * value_dim);
            let gradient = numbers(seed ^ 3, tokens * heads * value_dim);
            let (query, key, value) = (&query[..], &key[..], &value[..]);
            let sample = LayerSample { tokens, heads, kv_heads, dim, value_dim, scale, query, key, value };
            let want = naive(sizes, &sample, &gradient);
            for (got, want) in three(&sample, sizes, &gradient).into_iter().zip(want) {
                prop_assert!(close(got, want, 1e-11), "{:?} {:?}", got, want);
            }
            let narrow = |sample: &[f64]| sample.iter().map(|&x| x as f32).collect::<Vec<f32>>();
            let (query, key, value, gradient) = (narrow(query), narrow(key), narrow(value), narrow(&gradient));
            let (query, key, value) = (&query[..], &key[..], &value[..]);
            let sample = LayerSample { tokens, heads, kv_heads, dim, value_dim, scale, query, key, value };
            for (got, want) in three(&sample, sizes, &gradient).into_iter().zip(want) {
                prop_assert!(close(got, want, 1e-5), "{:?} {:?}", got, want);
            }
            let mass = sample.parts(sizes, SampleMeasure::AttentionMass).unwrap();
            prop_assert!((mass.streaming + mass.last + mass.middle - 1.0).abs() < 1e-12);
        }
    }

    #[test]
    fn samples_that_do_not_fit_are_refused() {
        let (data, sizes) = ([0.5f32; 24], TriangleMix::new(1, 1, 1));
        let sample = LayerSample {
            tokens: 3,
            heads: 2,
            kv_heads: 1,
            dim: 4,
            value_dim: 2,
            scale: 1.0,
            query: &data[..],
            key: &data[..12],
            value: &data[..6],
        };
        let mass = SampleMeasure::AttentionMass;
        assert!(sample.parts(sizes, mass).is_ok());
        let refused = |sample: LayerSample<'_, f32>, measure, why: &str| {
            let error = sample.parts(sizes, measure).unwrap_err().to_string();
            assert!(error.contains(why), "{error}");
        };
        refused(LayerSample { tokens: 0, ..sample }, mass, "tokens");
        refused(LayerSample { tokens: 4, ..sample }, mass, "[4, 2, 4]");
        refused(LayerSample { kv_heads: 3, ..sample }, mass, "kv_heads");
        refused(LayerSample { dim: usize::MAX, ..sample }, mass, "query");
        refused(LayerSample { scale: f64::NAN, ..sample }, mass, "scale");
        refused(sample, SampleMeasure::WeightGradient(&data), "[3, 2, 2]");
        let mut key = [0.5f32; 12];
        key[7] = f32::NAN;
        refused(LayerSample { key: &key, ..sample }, mass, "at 7");
        let large = [f32::MAX; 24];
        let (query, key) = (&large[..], &large[..12]);
        refused(LayerSample { query, key, ..sample }, mass, "divide");
    }

    /// Two tokens of one head of 8 elements, with a scale that makes large products small.
    fn two_tokens<'a, R>(query: &'a [R], key: &'a [R], value: &'a [R]) -> LayerSample<'a, R> {
        LayerSample { tokens: 2, heads: 1, kv_heads: 1, dim: 8, value_dim: 8, scale: 1e-37, query, key, value }
    }

    #[test]
    fn a_sum_that_overflows_downwards_is_refused() {
        let (query, mut key) = ([1e19f32; 16], [0f32; 16]);
        let value = [1f32; 16];
        key[8..12].copy_from_slice(&[-2e19, -2e19, 3e19, 3e19]);
        let sample = two_tokens(&query, &key, &value);
        let sizes = TriangleMix::new(0, 0, 0);
        let sizes_of = |measure| sample.parts(sizes, measure);
        for measure in [SampleMeasure::AttentionMass, SampleMeasure::ScoreGradient(&value)] {
            let error = sizes_of(measure).unwrap_err().to_string();
            assert!(error.contains("finite"), "{error}");
        }
        // The scores do not count here.
        assert!(sizes_of(SampleMeasure::WeightGradient(&value)).is_ok());
        let wide = |sample: &[f32]| sample.iter().map(|&x| f64::from(x)).collect::<Vec<_>>();
        let (query, key, value) = (wide(&query), wide(&key), wide(&value));
        let sample = two_tokens(&query, &key, &value);
        assert!(sample.parts(sizes, SampleMeasure::AttentionMass).is_ok());
    }
}
