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

use super::ahead::{AHEAD, Ahead};
use super::attention::{Attention, Sequence};
use super::factors::Conversion;
use super::fetch::{Fetch, Places, stride};
use super::finish::State;
use super::lines::{Converted, Fetched, Lines, Rows};
use super::schedule::{Task, Work};
use super::scratch::take;
use super::simd::{Kernel, Shape, Simd, Vector, WIDTH, all_finite};
use super::source::Stored;
use super::strip_products::{Outputs, Scores};
use super::tile::{Hidden, KEYS, look};
use ascend_spec::DType;
use half::{bf16, f16};
use std::ops::Range;

/// The largest number of queries for which this is the faster way.
pub(super) const QUERIES: usize = 8;

/// Vectors of scores of one query.
pub(super) const SCORES: usize = KEYS / WIDTH;

const _: () = assert!(KEYS.is_multiple_of(Shape::ROWS) && KEYS.is_multiple_of(WIDTH));

/// The buffers of a strip.
pub(super) struct Strip<'s> {
    /// Queries; those that are computed together take turns, a vector each.
    pub(super) queries: &'s mut [Vector],
    /// Of the queries that are computed together, key by key, the scores and then the weights of the tile.
    pub(super) scores: &'s mut [Vector],
    /// Output of each query, row by row, not yet divided by the sum.
    pub(super) out: &'s mut [Vector],
    /// Running maximum of each query.
    pub(super) max: [f32; QUERIES],
    /// Running sum of each query.
    pub(super) sum: [f32; QUERIES],
    /// Factor of each query that the last tile puts on what was before.
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
        KEYS * stride(vectors),
        KEYS * stride(columns),
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
            let done = match (&attention.key_conversion, &attention.value_conversion) {
                _ if with_care => None,
                (None, None) => match attention.held {
                    DType::Float16 => tile.stream::<f16, S>(simd, &mut strip),
                    DType::Bf16 => tile.stream::<bf16, S>(simd, &mut strip),
                    _ => tile.stream::<f32, S>(simd, &mut strip),
                },
                (Some(key), Some(value)) => tile.convert(simd, &mut strip, [key, value]),
                _ => None,
            };
            match done {
                Some(()) => streamed = true,
                None => tile.fetch(simd, &mut strip, keys, values),
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
pub(super) struct Tile<'a> {
    pub(super) attention: &'a Attention,
    pub(super) sequence: &'a Sequence,
    pub(super) task: &'a Task,
    /// The keys that are visible.
    pub(super) rows: Range<usize>,
    /// The same from the tile's first on.
    pub(super) seen: Range<usize>,
    /// Which queries do not see which of the tile's keys.
    pub(super) hidden: Option<&'a Hidden>,
}

impl Tile<'_> {
    /// Computes the tile from keys and values where they lie, if they are whole vectors of type `T`.
    #[inline(always)]
    fn stream<T: Stored, S: Simd>(&self, simd: S, strip: &mut Strip<'_>) -> Option<()> {
        let [keys, values, next] = self.lines::<T>()?;
        self.pass(simd, strip, [keys.view(), values.view(), next.view()]);
        Some(())
    }

    /// [`Tile::stream`] of stored bytes, which become values in registers.
    #[inline(always)]
    fn convert<S: Simd>(
        &self,
        simd: S,
        strip: &mut Strip<'_>,
        [of_key, of_value]: [&Conversion; 2],
    ) -> Option<()> {
        let [keys, values, next] = self.lines::<i8>()?;
        let (of, head) = (&self.sequence.keys, self.task.kv_head);
        let rows = self.rows.clone();
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
        self.pass(simd, strip, [keys, values, next]);
        Some(())
    }

    /// Where the tile's keys and values lie, and the next keys, if they are whole vectors of type `T` and keys have no
    /// rotary part.
    #[inline(always)]
    fn lines<T: Stored>(&self) -> Option<[Lines<T>; 3]> {
        let (of, head) = (&self.sequence.keys, self.task.kv_head);
        if of.key.rope.is_some() {
            return None;
        }
        let keys = of.lines::<T>(&of.key, head, self.rows.clone())?;
        let values = of.lines::<T>(&of.value, head, self.rows.clone())?;
        let next = of.lines::<T>(&of.key, head, self.next());
        Some([keys, values, next.unwrap_or(keys)])
    }

    /// Queries that look.
    pub(super) fn count(&self) -> usize {
        self.task.queries.len().min(QUERIES)
    }

    /// The keys behind the tile's, as many.
    fn next(&self) -> Range<usize> {
        let end = self.rows.end;
        end..self.task.keys.end.min(end + KEYS)
    }

    /// Computes the tile from keys and values where they lie, and asks for the next keys.
    #[inline(always)]
    fn pass<S: Simd, R: Rows>(&self, simd: S, strip: &mut Strip<'_>, [keys, values, next]: [R; 3]) {
        let tile = self;
        simd.apart(Scores {
            tile,
            strip,
            keys,
            values,
        });
        simd.apart(Outputs {
            tile,
            strip,
            values,
            next,
        });
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
}
