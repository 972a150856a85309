//! Attention of a few queries that share a key head: decode.
//!
//! With fewer queries than a vector has lanes, scores are dot products along the head dimension. One, two or four
//! queries are computed together, so that each vector of a key is read and widened once for them; their scores take
//! turns, key by key, so that softmax still fills its vectors. Keys and values are read where they lie, without a copy,
//! if they are whole vectors of one type; stored bytes become values in registers. Scores of several keys and four queries
//! are added up at a time, which loads each query once for all of them.
//!
//! # Memory
//!
//! A cache is read once, so that decode is as fast as memory if products and memory do not wait for each other. A tile is
//! computed in steps whose keys and values fit a first cache. While the scores of a step are computed, its values are asked for,
//! and while its output is, the next keys; both also ask for rows that are read later to be brought into the second cache,
//! which waits for more cache lines at a time than the first. A request stands in the products' own loops, next to the vector in
//! the same place of the row that is read. Between the products of two steps nobody asks for anything, so little is done
//! there: what lies where is looked up once a run, scores that are just products go straight to the softmax. The pages of a
//! new block are looked up together.
//!
//! `decode_b16_h32kv8_4096_d128` in `FLOAT16` on two threads, medians of runs in turns on a busy machine, AVX-512 / AVX2:
//! 18.6 / 16.7 ms with requests for the first cache alone, whole tiles ahead and row by row; 13.9 / 17.3 ms with steps and
//! both caches, vector by vector; 13.7 / 14.6 ms with the rest. In blocks of 128: 17.8 / 16.5, 15.1 / 17.9 and 13.1 / 14.6 ms.
//!
//! A thread needs `48 * 2 * d` floats for head dimension `d` beside a few rows: 0.05 MB at 128.

use super::ahead::{AHEAD, Ahead};
use super::attention::{Attention, Sequence};
use super::factors::{Conversion, OfHead};
use super::fetch::{Fetch, Places, stride};
use super::finish::State;
use super::keys::Found;
use super::lines::{Converted, Fetched, Lines, Rows};
use super::requests::{Asks, Upcoming};
use super::schedule::{Task, Work};
use super::scratch::take;
use super::simd::{Kernel, Shape, Simd, Vector, WIDTH, all_finite};
use super::source::Stored;
use super::strip_products::{Correct, Outputs, Scores, Weights};
use super::tile::{KEYS, look};
use ascend_spec::DType;
use half::{bf16, f16};
use std::iter;
use std::ops::Range;

/// The largest number of queries for which this is the faster way.
pub(super) const QUERIES: usize = 8;

/// Keys of a step.
pub(super) const STEP_KEYS: usize = KEYS / 2;

/// Runs of constant pitch that the keys of a step may lie in: blocks of 16, and a border anywhere.
const RUNS: usize = STEP_KEYS / 16 + 1;

/// How far ahead rows are asked for that the second cache is to keep, in keys.
const FAR: usize = STEP_KEYS;

/// Vectors of a step's scores of one query; one more is for products that no key has, past the last.
pub(super) const SCORES: usize = STEP_KEYS / WIDTH + 1;

const _: () = assert!(STEP_KEYS.is_multiple_of(Shape::ROWS) && STEP_KEYS.is_multiple_of(WIDTH));

/// The buffers of a strip.
pub(super) struct Strip<'s> {
    /// Queries; those that are computed together take turns, a vector each.
    pub(super) queries: &'s mut [Vector],
    /// Of the queries that are computed together, key by key, the scores and then the weights of the step.
    pub(super) scores: &'s mut [Vector],
    /// Output of each query, row by row, not yet divided by the sum.
    pub(super) out: &'s mut [Vector],
    /// Running maximum of each query.
    pub(super) max: [f32; QUERIES],
    /// Running sum of each query.
    pub(super) sum: [f32; QUERIES],
    /// Factor of each query that the last step puts on what was before.
    pub(super) decay: [f32; QUERIES],
}

impl Strip<'_> {
    /// Forgets the keys that were seen.
    fn clear(&mut self) {
        self.out.fill([0.0; WIDTH]);
        self.max = [f32::NEG_INFINITY; QUERIES];
        self.sum = [0.0; QUERIES];
    }
}

/// Attends to the keys of `task`: maximum, sum and output of each of its queries, at most [`QUERIES`].
pub(super) struct Attend<'a, 's>(pub(super) Work<'a, 's>);

impl<'s> Kernel for Attend<'_, 's> {
    type Output = State<'s>;

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) -> State<'s> {
        attend(simd, self.0)
    }
}

#[inline(always)]
fn attend<'s, S: Simd>(simd: S, work: Work<'_, 's>) -> State<'s> {
    let Work {
        attention,
        sequence,
        task,
        scratch,
    } = work;
    let (vectors, columns) = (attention.vectors(), attention.columns());
    let count = task.queries.len().min(QUERIES);
    let sizes = [
        QUERIES * vectors,
        STEP_KEYS * stride(vectors),
        STEP_KEYS * stride(columns),
        QUERIES * SCORES,
        QUERIES * columns,
        1,
        1,
    ];
    let bits = attention.mask.as_ref().map_or(0, |_| AHEAD);
    let (mut rest, bits) = scratch.vectors_and_bits(sizes.iter().sum(), bits);
    let [queries, keys, values, scores, out, max, sum] = sizes.map(|size| take(&mut rest, size));
    let mut strip = Strip {
        queries,
        scores,
        out,
        max: [f32::NEG_INFINITY; QUERIES],
        sum: [0.0; QUERIES],
        decay: [1.0; QUERIES],
    };
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

    let mut ahead = Ahead::new(bits);
    let mut hidden = [0; KEYS];
    let of_rows = attention.rows(&task.queries);
    // Where values are read in place, nobody has looked whether they are finite. The output tells, and is then computed
    // again: a value of weight 0 must add nothing, whatever it is.
    for with_care in [false, true] {
        strip.clear();
        let mut streamed = false;
        let mut found = [Found::NOTHING; 3];
        for first in task.keys.clone().step_by(KEYS) {
            let tile = first..task.keys.end.min(first + KEYS);
            let lanes = |row: u64| {
                let first = (row as usize * attention.group).max(task.queries.start);
                let end = ((row as usize + 1) * attention.group).min(task.queries.end);
                ((1u32 << (end - task.queries.start)) - (1u32 << (first - task.queries.start)))
                    as u16
            };
            let rows = of_rows.clone();
            let of = (&tile, task.keys.end);
            let (seen, mixed) = look(
                attention,
                sequence,
                rows,
                of,
                lanes,
                &mut ahead,
                &mut hidden,
            );
            if seen.is_empty() {
                continue;
            }
            let hidden = mixed.then_some(&hidden[seen.clone()]);
            let tile = Step {
                attention,
                sequence,
                task,
                rows: tile.start + seen.start..tile.start + seen.end,
                hidden,
            };
            for first in (0..seen.len()).step_by(STEP_KEYS) {
                let step = tile.part(first..seen.len().min(first + STEP_KEYS));
                let done = if with_care || attention.held == DType::Float {
                    None
                } else if S::IN_PLACE {
                    step.in_place(simd, &mut strip, &mut found)
                } else {
                    None
                };
                match done {
                    Some(()) => streamed = true,
                    None => step.fetch(simd, &mut strip, keys, values),
                }
            }
        }
        if !streamed || all_finite(simd, strip.out) {
            break;
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
pub(super) fn turns(count: usize) -> impl Iterator<Item = (usize, usize)> {
    let mut lane = 0;
    iter::from_fn(move || {
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
#[derive(Clone)]
pub(super) struct Step<'a> {
    pub(super) attention: &'a Attention,
    pub(super) sequence: &'a Sequence,
    pub(super) task: &'a Task,
    /// The keys.
    pub(super) rows: Range<usize>,
    /// Which queries do not see which of them.
    pub(super) hidden: Option<&'a [u16]>,
}

/// Keys of a step that lie a constant pitch apart, and so do their values.
#[derive(Clone, Copy)]
struct Run<R> {
    /// The first of them, counted from the step's.
    first: usize,
    count: usize,
    keys: R,
    values: R,
}

/// The runs of a step, in order, and then none.
type Runs<R> = [Option<Run<R>>; RUNS];

impl Step<'_> {
    /// Some of its keys, counted from the first.
    fn part(&self, keys: Range<usize>) -> Self {
        let first = self.rows.start;
        Step {
            rows: first + keys.start..first + keys.end,
            hidden: self.hidden.map(|hidden| &hidden[keys]),
            ..self.clone()
        }
    }

    /// Queries that look.
    pub(super) fn count(&self) -> usize {
        self.task.queries.len().min(QUERIES)
    }

    /// Computes the step from keys and values where they lie, if they are whole vectors of one type. Single precision, which
    /// no cache holds, has no kernels for that.
    #[inline(always)]
    fn in_place<S: Simd>(
        &self,
        simd: S,
        strip: &mut Strip<'_>,
        found: &mut [Found; 3],
    ) -> Option<()> {
        let attention = self.attention;
        match (&attention.key_conversion, &attention.value_conversion) {
            (None, None) if attention.held == DType::Bf16 => {
                self.stream::<bf16, S>(simd, strip, found)
            }
            (None, None) => self.stream::<f16, S>(simd, strip, found),
            (Some(key), Some(value)) => self.convert(simd, strip, [key, value], found),
            _ => None,
        }
    }

    /// Computes the step from keys and values where they lie, if they are whole vectors of type `T`.
    #[inline(always)]
    fn stream<T: Stored, S: Simd>(
        &self,
        simd: S,
        strip: &mut Strip<'_>,
        found: &mut [Found; 3],
    ) -> Option<()> {
        let mut runs = [None; RUNS];
        self.runs::<T>(&mut runs)?;
        let of_runs = || runs.iter().flatten().copied();
        self.pass(simd, strip, of_runs, &self.asks(&runs, found));
        Some(())
    }

    /// [`Step::stream`] of stored bytes, which become values in registers.
    #[inline(always)]
    fn convert<S: Simd>(
        &self,
        simd: S,
        strip: &mut Strip<'_>,
        [of_key, of_value]: [&Conversion; 2],
        found: &mut [Found; 3],
    ) -> Option<()> {
        if of_key.is_parted() || of_value.is_parted() {
            return None;
        }
        let mut runs = [None; RUNS];
        self.runs::<i8>(&mut runs)?;
        let (of, head) = (&self.sequence.keys, self.task.kv_head);
        let asks = self.asks(&runs, found);
        let (key, value) = (of_key.of_head(head), of_value.of_head(head));
        // The common forms on their own: what an element is multiplied with is then not decided for each vector anew.
        if let (Some(key), Some(value)) = (key.channels(), value.channels()) {
            let none = [(0.0, 0.0); STEP_KEYS];
            self.pass_converted(simd, strip, &runs, (key, &none), (value, &none), &asks);
            return Some(());
        }
        let keys = of.of_rows(of_key, head, self.rows.clone());
        let values = of.of_rows(of_value, head, self.rows.clone());
        if let (Some(key), Some(value)) = (key.rows(), value.rows()) {
            self.pass_converted(simd, strip, &runs, (key, &keys), (value, &values), &asks);
        } else {
            self.pass_converted(simd, strip, &runs, (key, &keys), (value, &values), &asks);
        }
        Some(())
    }

    /// [`Step::pass`] of stored bytes, given what converts the keys and what converts the values: of their head, and of each
    /// row.
    #[inline(always)]
    fn pass_converted<S: Simd, H: OfHead>(
        &self,
        simd: S,
        strip: &mut Strip<'_>,
        runs: &Runs<Lines<i8>>,
        keys: (H, &[(f32, f32)]),
        values: (H, &[(f32, f32)]),
        asks: &[Asks; 2],
    ) {
        let converted = |run: &Run<Lines<i8>>| Run {
            first: run.first,
            count: run.count,
            keys: Converted {
                lines: run.keys,
                of_head: keys.0,
                of_rows: &keys.1[run.first..],
            },
            values: Converted {
                lines: run.values,
                of_head: values.0,
                of_rows: &values.1[run.first..],
            },
        };
        self.pass(simd, strip, || runs.iter().flatten().map(converted), asks);
    }

    /// Finds where keys and values lie, if they are whole vectors of type `T`, in few places, and keys have no rotary part.
    #[inline(always)]
    fn runs<T: Stored>(&self, runs: &mut Runs<Lines<T>>) -> Option<()> {
        let (of, head) = (&self.sequence.keys, self.task.kv_head);
        if of.key.rope.is_some() {
            return None;
        }
        let Range { mut start, end } = self.rows;
        for run in runs {
            if start == end {
                break;
            }
            let keys = of.lines::<T>(&of.key, head, start..end)?;
            let values = of.lines::<T>(&of.value, head, start..start + keys.count())?;
            let count = values.count();
            *run = Some(Run {
                first: start - self.rows.start,
                count,
                keys,
                values,
            });
            start += count;
        }
        (start == end).then_some(())
    }

    /// What to ask for while scores, and while outputs are computed.
    #[inline(always)]
    fn asks<T: Stored>(&self, runs: &Runs<Lines<T>>, found: &mut [Found; 3]) -> [Asks; 2] {
        let (of, head) = (&self.sequence.keys, self.task.kv_head);
        let mut here = [Upcoming::NONE; 2];
        for (here, run) in here.iter_mut().zip(runs.iter().flatten()) {
            *here = run.values.upcoming();
        }
        let end = self.task.keys.end;
        let behind = |by| end.min(self.rows.start + by)..end.min(self.rows.end + by);
        let [far_values, next_keys, far_keys] = found;
        // Pages of a new block are looked up together, those of its keys and of its values: one by one it would take longer.
        let farthest = behind(STEP_KEYS + FAR).start;
        if !far_keys.has(farthest) {
            for part in [&of.key, &of.value] {
                if let Some(lines) = of.lines::<T>(part, head, farthest..end) {
                    lines.upcoming().find_pages();
                }
            }
        }
        let at_hand = (&raw const self.rows).cast();
        let far = of.upcoming::<T>(&of.value, head, behind(FAR), (far_values, end));
        let of_scores = Asks::new(here, far, at_hand);
        let next = of.upcoming::<T>(&of.key, head, behind(STEP_KEYS), (next_keys, end));
        let far = of.upcoming::<T>(&of.key, head, behind(STEP_KEYS + FAR), (far_keys, end));
        let of_outputs = Asks::new(next, far, at_hand);
        [of_scores, of_outputs]
    }

    /// Computes the step, and asks for others on the way.
    #[inline(always)]
    fn pass<S: Simd, R: Rows, I: Iterator<Item = Run<R>>>(
        &self,
        simd: S,
        strip: &mut Strip<'_>,
        runs: impl Fn() -> I,
        [of_scores, of_outputs]: &[Asks; 2],
    ) {
        self.weights(simd, strip, runs(), of_scores);
        self.outputs(simd, strip, runs(), of_outputs);
    }

    /// Computes the weights. The softmax is that of the whole step, so that numbers do not depend on where rows lie.
    #[inline(always)]
    fn weights<S: Simd, R: Rows>(
        &self,
        simd: S,
        strip: &mut Strip<'_>,
        runs: impl Iterator<Item = Run<R>>,
        asks: &Asks,
    ) {
        let step = self;
        for run in runs {
            for (place, asking) in asks.along(run.first..run.first + run.count) {
                simd.apart(Scores {
                    step,
                    strip,
                    keys: run.keys.after(place.start - run.first),
                    place,
                    asking,
                });
            }
        }
        if step.corrects() {
            simd.apart(Correct { step, strip });
        }
        simd.apart(Weights { step, strip });
    }

    /// Adds the weighted values to the output.
    #[inline(always)]
    fn outputs<S: Simd, R: Rows>(
        &self,
        simd: S,
        strip: &mut Strip<'_>,
        runs: impl Iterator<Item = Run<R>>,
        asks: &Asks,
    ) {
        for run in runs {
            for (place, asking) in asks.along(run.first..run.first + run.count) {
                simd.apart(Outputs {
                    step: self,
                    strip,
                    values: run.values.after(place.start - run.first),
                    place,
                    asking,
                });
            }
        }
    }

    /// Computes the step from keys and values that are fetched first.
    #[inline(always)]
    fn fetch<S: Simd>(
        &self,
        simd: S,
        strip: &mut Strip<'_>,
        keys: &mut [Vector],
        values: &mut [Vector],
    ) {
        let attention = self.attention;
        let fetch = Fetch {
            attention,
            sequence: self.sequence,
            kv_head: self.task.kv_head,
            rows: self.rows.clone(),
            with_care: true,
        };
        fetch.keys(simd, Places::Rows(&mut *keys));
        let finite = fetch.values(simd, Places::Rows(&mut *values));
        let fetched = |vectors, row| Fetched {
            vectors,
            row: stride(row),
            first: 0,
        };
        let all = Run {
            first: 0,
            count: self.rows.len(),
            keys: fetched(keys, attention.vectors()),
            values: fetched(values, attention.columns()),
        };
        let asks = Asks::nothing(keys.as_ptr().cast());
        self.weights(simd, strip, iter::once(all), &asks);
        if finite {
            self.outputs(simd, strip, iter::once(all), &asks);
        } else {
            self.outputs_with_care(strip, values);
        }
    }
}
