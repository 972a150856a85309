//! Attention of a few queries that share a key head: decode.
//!
//! With fewer queries than a vector has lanes, scores are dot products along the head dimension. One, two or four
//! queries are computed together, so that each vector of a key is read and widened once for them; their scores take
//! turns, key by key, so that softmax still fills its vectors. Keys and values are read where they lie, without a copy,
//! if they are whole vectors of one type; stored bytes become values in registers. The values of a tile are asked for
//! while its scores are computed, and the next keys while the output is: without that a cache in memory took a fifth longer
//! on one thread and half as long again on two. Scores of several keys and four queries are added up at a time, which
//! loads each query once for all of them.
//!
//! A thread needs `96 * 2 * d` floats for head dimension `d` beside a few rows: 0.1 MB at 128.

use super::attention::{Attention, Sequence};
use super::factors::Conversion;
use super::fetch::{Places, read_keys, read_values, stride};
use super::finish::State;
use super::lines::{Converted, Fetched, Row, Rows};
use super::schedule::Task;
use super::scratch::{Scratch, take};
use super::simd::{Kernel, Shape, Simd, Vector, WIDTH};
use super::softmax::weights;
use super::source::Stored;
use super::tile::{Hidden, KEYS, look, read_bias};
use ascend_spec::DType;
use half::{bf16, f16};
use std::ops::Range;

/// The largest number of queries for which this is the faster way.
pub(super) const QUERIES: usize = 8;

/// Rows of values that are added without a branch between them.
const STEP: usize = 4;

/// Vectors of scores of one query.
const SCORES: usize = KEYS / WIDTH;

const _: () = assert!(KEYS.is_multiple_of(4) && KEYS.is_multiple_of(WIDTH));

/// The buffers of a strip.
struct Strip<'s> {
    /// Queries; those that are computed together take turns, a vector each.
    queries: &'s mut [Vector],
    /// Of the queries that are computed together, key by key, the scores and then the weights of the tile.
    scores: &'s mut [Vector],
    /// Output of each query, row by row, not yet divided by the sum.
    out: &'s mut [Vector],
    /// What `out` was before the tile.
    before: &'s mut [Vector],
    /// Running maximum of each query.
    max: [f32; QUERIES],
    /// Running sum of each query.
    sum: [f32; QUERIES],
    /// Factor of each query that the last tile puts on what was before.
    decay: [f32; QUERIES],
}

/// Attends to the keys of `task`: maximum, sum and output of each of its queries, at most [`QUERIES`].
pub(super) struct Attend<'a, 's> {
    pub(super) attention: &'a Attention,
    pub(super) sequence: &'a Sequence,
    pub(super) task: &'a Task,
    pub(super) scratch: &'s mut Scratch,
}

impl<'s> Kernel for Attend<'_, 's> {
    type Output = State<'s>;

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) -> State<'s> {
        let Attend {
            attention,
            sequence,
            task,
            scratch,
        } = self;
        attend(simd, attention, sequence, task, scratch)
    }
}

#[inline(always)]
fn attend<'s, S: Simd>(
    simd: S,
    attention: &Attention,
    sequence: &Sequence,
    task: &Task,
    scratch: &'s mut Scratch,
) -> State<'s> {
    let (vectors, columns) = (attention.vectors(), attention.columns());
    let count = task.queries.len().min(QUERIES);
    let sizes = [
        QUERIES * vectors,
        KEYS * stride(vectors),
        KEYS * stride(columns),
        QUERIES * SCORES,
        QUERIES * columns,
        QUERIES * columns,
        1,
        1,
    ];
    let mut rest = scratch.vectors(sizes.iter().sum());
    let [queries, keys, values, scores, out, before, max, sum] =
        sizes.map(|size| take(&mut rest, size));
    let mut strip = Strip {
        queries,
        scores,
        out,
        before,
        max: [f32::NEG_INFINITY; QUERIES],
        sum: [0.0; QUERIES],
        decay: [1.0; QUERIES],
    };
    strip.out.fill([0.0; WIDTH]);
    strip.queries.fill([0.0; WIDTH]);
    let rows = sequence.geometry.q_len() as usize;
    for (lane, together) in turns(count) {
        for r in 0..together {
            let (row, head) = attention.place(task.kv_head, task.queries.start + lane + r);
            if row < rows {
                let out = &mut strip.queries[lane * vectors + r..];
                attention.read_query(simd, sequence, (row, head), out, together);
            }
        }
    }

    let mut hidden = [0; KEYS];
    let of_rows = attention.rows(&task.queries);
    for first in task.keys.clone().step_by(KEYS) {
        let tile = first..task.keys.end.min(first + KEYS);
        let lanes = |row: u64| {
            let first = (row as usize * attention.group).max(task.queries.start);
            let end = ((row as usize + 1) * attention.group).min(task.queries.end);
            ((1u32 << (end - task.queries.start)) - (1u32 << (first - task.queries.start))) as u16
        };
        let rows = of_rows.clone();
        let (seen, mixed) = look(attention, sequence, rows, &tile, lanes, &mut hidden);
        if seen.is_empty() {
            continue;
        }
        let hidden = mixed.then_some(&hidden);
        let rows = tile.start + seen.start..tile.start + seen.end;
        let tile = Tile {
            attention,
            sequence,
            task,
            rows,
            seen,
            hidden,
        };
        let streamed = match (&attention.key_conversion, &attention.value_conversion) {
            (None, None) => match attention.held {
                DType::Float16 => tile.stream::<f16, S>(simd, &mut strip, values),
                DType::Bf16 => tile.stream::<bf16, S>(simd, &mut strip, values),
                _ => tile.stream::<f32, S>(simd, &mut strip, values),
            },
            (Some(key), Some(value)) => tile.convert(simd, &mut strip, [key, value], values),
            _ => None,
        };
        if streamed.is_none() {
            tile.fetch(simd, &mut strip, keys, values);
        }
    }
    let (max, sum) = (max.as_flattened_mut(), sum.as_flattened_mut());
    max[..QUERIES].copy_from_slice(&strip.max);
    sum[..QUERIES].copy_from_slice(&strip.sum);
    let Strip { out, .. } = strip;
    State {
        max: &mut max[..count],
        sum: &mut sum[..count],
        out: &mut out[..count * columns],
    }
}

/// The queries that are computed together: the first, and how many.
#[inline(always)]
fn turns(count: usize) -> impl Iterator<Item = (usize, usize)> {
    let mut lane = 0;
    std::iter::from_fn(move || {
        let together = match count - lane {
            0 => return None,
            1 => 1,
            2 | 3 => 2,
            _ => 4,
        };
        lane += together;
        Some((lane - together, together))
    })
}

/// Some keys, and who looks at them.
struct Tile<'a> {
    attention: &'a Attention,
    sequence: &'a Sequence,
    task: &'a Task,
    /// The keys that are visible.
    rows: Range<usize>,
    /// The same from the tile's first on.
    seen: Range<usize>,
    /// Which queries do not see which of the tile's keys.
    hidden: Option<&'a Hidden>,
}

impl Tile<'_> {
    /// Computes the tile from keys and values where they lie, if they are whole vectors of type `T`.
    #[inline(always)]
    fn stream<T: Stored, S: Simd>(
        &self,
        simd: S,
        strip: &mut Strip<'_>,
        fetched: &mut [Vector],
    ) -> Option<()> {
        let (of, head) = (&self.sequence.keys, self.task.kv_head);
        if of.key.rope.is_some() {
            return None;
        }
        let rows = self.rows.clone();
        let keys = of.lines::<T>(&of.key, head, rows.clone())?;
        let values = of.lines::<T>(&of.value, head, rows)?;
        let next = of.lines::<T>(&of.key, head, self.next()).unwrap_or(keys);
        self.pass(
            simd,
            strip,
            [keys.view(), values.view(), next.view()],
            fetched,
        );
        Some(())
    }

    /// [`Tile::stream`] of stored bytes, which become values in registers.
    #[inline(always)]
    fn convert<S: Simd>(
        &self,
        simd: S,
        strip: &mut Strip<'_>,
        [of_key, of_value]: [&Conversion; 2],
        fetched: &mut [Vector],
    ) -> Option<()> {
        let (of, head) = (&self.sequence.keys, self.task.kv_head);
        if of.key.rope.is_some() {
            return None;
        }
        let rows = self.rows.clone();
        let keys = of.lines::<i8>(&of.key, head, rows.clone())?;
        let values = of.lines::<i8>(&of.value, head, rows.clone())?;
        let next = of.lines::<i8>(&of.key, head, self.next()).unwrap_or(keys);
        let key_rows = of.of_rows(of_key, head, rows.clone());
        let value_rows = of.of_rows(of_value, head, rows);
        let converted = |lines, of_head, of_rows| Converted {
            lines,
            of_head,
            of_rows,
        };
        let (of_key, of_value) = (of_key.of_head(head), of_value.of_head(head));
        let keys = converted(keys.view(), of_key, &key_rows);
        let values = converted(values.view(), of_value, &value_rows);
        let next = converted(next.view(), of_key, &key_rows);
        self.pass(simd, strip, [keys, values, next], fetched);
        Some(())
    }

    /// Queries that look.
    fn count(&self) -> usize {
        self.task.queries.len().min(QUERIES)
    }

    /// The keys behind the tile's, as many.
    fn next(&self) -> Range<usize> {
        let end = self.rows.end;
        end..self.task.keys.end.min(end + KEYS)
    }

    /// Computes the tile from keys and values where they lie, and asks for the next keys.
    #[inline(always)]
    fn pass<S: Simd, R: Rows>(
        &self,
        simd: S,
        strip: &mut Strip<'_>,
        [keys, values, next]: [R; 3],
        fetched: &mut [Vector],
    ) {
        let tile = self;
        simd.apart(Scores {
            tile,
            strip,
            keys,
            values,
        });
        strip.before.copy_from_slice(strip.out);
        let finite = simd.apart(Outputs {
            tile,
            strip,
            values,
            next,
        });
        if !finite {
            strip.out.copy_from_slice(strip.before);
            let (rows, head) = (self.rows.clone(), self.task.kv_head);
            let places = Places::Rows(&mut *fetched);
            read_values(simd, self.attention, self.sequence, head, rows, places);
            self.outputs_with_care(strip, fetched);
        }
    }

    /// Computes the tile from keys and values that are fetched first.
    #[inline(always)]
    fn fetch<S: Simd>(
        &self,
        simd: S,
        strip: &mut Strip<'_>,
        keys: &mut [Vector],
        values: &mut [Vector],
    ) {
        let (attention, sequence) = (self.attention, self.sequence);
        let (rows, head) = (self.rows.clone(), self.task.kv_head);
        let places = Places::Rows(&mut *keys);
        read_keys(simd, attention, sequence, head, rows.clone(), places);
        let places = Places::Rows(&mut *values);
        let finite = read_values(simd, attention, sequence, head, rows, places);
        let fetched = |vectors, row| Fetched {
            vectors,
            row: stride(row),
        };
        let of = fetched(values, attention.columns());
        let tile = self;
        simd.apart(Scores {
            tile,
            strip,
            keys: fetched(keys, attention.vectors()),
            values: of,
        });
        if finite {
            simd.apart(Outputs {
                tile,
                strip,
                values: of,
                next: of,
            });
        } else {
            self.outputs_with_care(strip, values);
        }
    }

    /// Weights of `R` queries from `lane` on, `J` keys at a time.
    #[inline(always)]
    fn weights<S: Simd, V: Rows, const R: usize, const J: usize>(
        &self,
        simd: S,
        strip: &mut Strip<'_>,
        lane: usize,
        keys: V,
        near: Option<V>,
    ) {
        let count = self.rows.len();
        let vectors = strip.queries.len() / QUERIES;
        let queries = strip.queries[lane * vectors..][..R * vectors]
            .as_chunks::<R>()
            .0;
        let scores = &mut strip.scores[lane * SCORES..][..R * SCORES];
        let of_steps = scores.as_flattened_mut().chunks_exact_mut(J * R);
        for (first, scores) in (0..count).step_by(J).zip(of_steps) {
            // Past the last key a product is computed again, and hidden.
            let mut of = [keys.row(first); J];
            if first + J <= count {
                of = keys.rows(first);
            } else {
                for (j, of) in of.iter_mut().enumerate().take(count - first) {
                    *of = keys.row(first + j);
                }
            }
            if let Some(values) = near {
                for j in first..first + J {
                    values.prefetch(j);
                }
            }
            assert!(of.iter().all(|key| queries.len() <= key.vectors()));
            let mut sums = [[simd.nothing(); R]; J];
            for (i, queries) in queries.iter().enumerate() {
                let mut keys = [simd.splat(0.0); J];
                for j in 0..J {
                    keys[j] = of[j].at(simd, i);
                }
                simd.dots(queries, keys, &mut sums);
            }
            for (four, scores) in scores.as_chunks_mut::<4>().0.iter_mut().enumerate() {
                let sum = |i: usize| sums[(4 * four + i) / R][(4 * four + i) % R];
                *scores = simd.totals([sum(0), sum(1), sum(2), sum(3)]);
            }
        }
        let scores = &mut scores[..(count * R).div_ceil(WIDTH)];
        self.bias::<S, R>(simd, lane, scores);
        self.hide::<S, R>(simd, lane, scores);
        simd.apart(Soften::<R> {
            attention: self.attention,
            strip,
            lane,
            keys: count,
        });
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
            let hidden = &hidden[self.seen.clone()];
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

    /// Adds the weighted values to the output of `R` queries from `lane` on, `C` columns at a time.
    #[inline(always)]
    fn weigh<S: Simd, V: Rows, const R: usize, const C: usize>(
        &self,
        simd: S,
        strip: &mut Strip<'_>,
        lane: usize,
        values: (V, Option<V>),
        watch: &mut S::Register,
    ) {
        let columns = strip.out.len() / QUERIES;
        let mut column = 0;
        while column + C <= columns {
            self.weigh_columns::<S, V, R, C>(simd, strip, (lane, column), values, watch);
            column += C;
        }
        while column < columns {
            self.weigh_columns::<S, V, R, 1>(simd, strip, (lane, column), values, watch);
            column += 1;
        }
    }

    #[inline(always)]
    fn weigh_columns<S: Simd, V: Rows, const R: usize, const C: usize>(
        &self,
        simd: S,
        strip: &mut Strip<'_>,
        (lane, column): (usize, usize),
        (values, near): (V, Option<V>),
        watch: &mut S::Register,
    ) {
        let columns = strip.out.len() / QUERIES;
        let weights = strip.scores[lane * SCORES..][..R * SCORES].as_flattened();
        let weights = &weights.as_chunks::<R>().0[..self.rows.len()];
        let out = &mut strip.out[lane * columns..][..R * columns];
        let mut sums = [[simd.splat(0.0); C]; R];
        for r in 0..R {
            let decay = simd.splat(strip.decay[lane + r]);
            for c in 0..C {
                let out = simd.load(&out[r * columns + column + c]);
                sums[r][c] = simd.multiply(out, decay);
            }
        }
        // Each pass over the rows asks for its share of the next ones, evenly.
        let passes = columns.div_ceil(C);
        let (mut ask, mut due) = (column / C * KEYS.div_ceil(passes), 0);
        let (steps, rest) = weights.as_chunks::<STEP>();
        for (step, weights) in steps.iter().enumerate() {
            if let Some(next) = near {
                due += STEP;
                while due >= passes {
                    next.prefetch(ask);
                    ask += 1;
                    due -= passes;
                }
            }
            let rows: [V::Row; STEP] = values.rows(step * STEP);
            for (row, weights) in rows.into_iter().zip(weights) {
                add_row(simd, row, weights, column, &mut sums);
            }
        }
        for (j, weights) in rest.iter().enumerate() {
            let row = values.row(steps.len() * STEP + j);
            add_row(simd, row, weights, column, &mut sums);
        }
        for r in 0..R {
            for c in 0..C {
                *watch = simd.mul_add(sums[r][c], simd.splat(0.0), *watch);
                simd.store(sums[r][c], &mut out[r * columns + column + c]);
            }
        }
    }

    /// [`Tile::outputs`] where some values are infinite or NaN: a key of weight 0, hidden perhaps, adds nothing.
    #[cold]
    fn outputs_with_care(&self, strip: &mut Strip<'_>, values: &[Vector]) {
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

/// Adds columns of a weighted row to their sums.
#[inline(always)]
fn add_row<S: Simd, R: Row, const QUERIES: usize, const COLUMNS: usize>(
    simd: S,
    row: R,
    weights: &[f32; QUERIES],
    column: usize,
    sums: &mut [[S::Register; COLUMNS]; QUERIES],
) {
    let mut of = [simd.splat(0.0); COLUMNS];
    for (c, of) in of.iter_mut().enumerate() {
        *of = row.at(simd, column + c);
    }
    for r in 0..QUERIES {
        let weight = simd.splat(weights[r]);
        for c in 0..COLUMNS {
            sums[r][c] = simd.mul_add(weight, of[c], sums[r][c]);
        }
    }
}

/// Turns the products of a tile's keys with every query into weights.
struct Scores<'a, 's, R> {
    tile: &'a Tile<'a>,
    strip: &'a mut Strip<'s>,
    keys: R,
    /// Asked for on the way.
    values: R,
}

impl<R: Rows> Kernel for Scores<'_, '_, R> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let Scores {
            tile,
            strip,
            keys,
            values,
        } = self;
        for (lane, together) in turns(tile.count()) {
            // One query after the other asks for the values.
            let near = (lane == 0).then_some(values);
            match (together, S::SHAPE) {
                (4, Shape::Wide) => tile.weights::<S, R, 4, 4>(simd, strip, lane, keys, near),
                (4, Shape::Six) => tile.weights::<S, R, 4, 3>(simd, strip, lane, keys, near),
                (4, Shape::Two) => tile.weights::<S, R, 4, 1>(simd, strip, lane, keys, near),
                (2, Shape::Two) => tile.weights::<S, R, 2, 2>(simd, strip, lane, keys, near),
                (2, _) => tile.weights::<S, R, 2, 4>(simd, strip, lane, keys, near),
                (_, Shape::Two) => tile.weights::<S, R, 1, 4>(simd, strip, lane, keys, near),
                _ => tile.weights::<S, R, 1, 8>(simd, strip, lane, keys, near),
            }
        }
    }
}

/// Adds the weighted values to the output of every query. Says whether the outputs are finite.
struct Outputs<'a, 's, R> {
    tile: &'a Tile<'a>,
    strip: &'a mut Strip<'s>,
    values: R,
    /// The keys behind the tile's, which are asked for on the way.
    next: R,
}

impl<R: Rows> Kernel for Outputs<'_, '_, R> {
    type Output = bool;

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) -> bool {
        let Outputs {
            tile,
            strip,
            values,
            next,
        } = self;
        let mut watch = simd.splat(0.0);
        for (lane, together) in turns(tile.count()) {
            let of = (values, (lane == 0).then_some(next));
            match (together, S::SHAPE) {
                (4, Shape::Wide) => tile.weigh::<S, R, 4, 2>(simd, strip, lane, of, &mut watch),
                (4, _) => tile.weigh::<S, R, 4, 1>(simd, strip, lane, of, &mut watch),
                (2, Shape::Wide) => tile.weigh::<S, R, 2, 4>(simd, strip, lane, of, &mut watch),
                (2, _) => tile.weigh::<S, R, 2, 2>(simd, strip, lane, of, &mut watch),
                _ => tile.weigh::<S, R, 1, 4>(simd, strip, lane, of, &mut watch),
            }
        }
        let mut watched = [0.0; WIDTH];
        simd.store(watch, &mut watched);
        watched.iter().all(|product| *product == 0.0)
    }
}

/// The first `R` lanes, combined with those that lie a multiple of `R` behind.
#[inline(always)]
fn fold<const R: usize>(vector: &Vector, combine: impl Fn(f32, f32) -> f32) -> [f32; R] {
    let mut folded = [0.0; R];
    for (r, folded) in folded.iter_mut().enumerate() {
        let lanes = vector.iter().copied().skip(r).step_by(R);
        *folded = lanes.reduce(&combine).unwrap_or(0.0);
    }
    folded
}

/// Scores of `R` queries to weights: moves the running maxima, takes powers, adds them up and rounds them to the element
/// type or to integers.
struct Soften<'a, 's, const R: usize> {
    attention: &'a Attention,
    strip: &'a mut Strip<'s>,
    lane: usize,
    keys: usize,
}

impl<const R: usize> Kernel for Soften<'_, '_, R> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let Soften {
            attention,
            strip,
            lane,
            keys,
        } = self;
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
        simd.store(simd.exp2(simd.subtract(simd.load(&old), shift)), &mut decay);
        let mut sum = [0.0; WIDTH];
        simd.store(sums, &mut sum);
        let sum: [f32; R] = fold(&sum, |a, b| a + b);
        for r in 0..R {
            strip.max[lane + r] = highest[r];
            strip.decay[lane + r] = decay[r];
            strip.sum[lane + r] = strip.sum[lane + r] * decay[r] + sum[r];
        }
    }
}
