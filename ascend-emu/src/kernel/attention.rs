//! A call as the kernels see it: sequences, tensors by row, and the numbering of queries.

use super::Buffers;
use super::blocks::Blocks;
use super::cells::Cells;
use super::factors::{Conversion, Coordinates, Factors, Numbers};
use super::keys::{Keys, Part, Place};
use super::mask::{Bias, MaskBytes};
use super::output::Output;
use super::simd::{Kernel, Simd, Vector, WIDTH};
use super::source::{Source, Types};
use super::tensors::{Sink, Sizes};
use ascend_spec::fia::{self, Affine, Grid, MaskRows, Operand, Padding, Problem, Rows, Work};
use ascend_spec::{DType, MaskGeometry};
use rayon::prelude::*;
use std::ops::Range;
use std::sync::Arc;

/// One call. A *query* is one row of one head; the queries that share a key head are numbered row by row, and within
/// a row head by head, so that neighbours see nearly the same keys.
#[derive(Debug)]
pub(super) struct Attention {
    pub(super) sequences: Vec<Sequence>,
    pub(super) kv_heads: usize,
    /// Query heads that share a key head.
    pub(super) group: usize,
    /// Elements of a query and of a key, the rotary part included.
    pub(super) dim: usize,
    /// Elements of a value and of an output.
    pub(super) value_dim: usize,
    /// Factor of the queries: the scale and `log2 e`, unless they are whole numbers, whose products are exact.
    query_scale: f32,
    /// Factor of the products of queries and keys that the queries do not have.
    pub(super) scale: f32,
    query: Source,
    query_rope: Option<Source>,
    query_conversion: Option<Conversion>,
    /// Factor of the query's rotary part, beside the scale of its row: the scale of the keys, where it is that of their
    /// rotary part, too.
    rope_scale: Option<f32>,
    pub(super) key_conversion: Option<Conversion>,
    pub(super) value_conversion: Option<Conversion>,
    pub(super) out: Output,
    pub(super) lse: Option<Sink<f32>>,
    pub(super) mask: Option<MaskBytes>,
    pub(super) bias: Option<Bias>,
    /// Of each head, the logit that has no value.
    pub(super) sink: Option<Vec<f32>>,
    /// Element type that weights are rounded to.
    pub(super) held: DType,
    /// Factor of the weights, where they are rounded to integers after it.
    pub(super) quantum: Option<f32>,
    /// Factor of the output.
    pub(super) gain: f32,
    /// Summand of the log-sum-exp.
    pub(super) lse_summand: f32,
    /// Whether a row that the mask tensor leaves without keys comes out as 0.
    pub(super) corrects_blind_rows: bool,
}

/// One entry of the batch.
#[derive(Debug)]
pub(super) struct Sequence {
    /// Visible keys of each row, before the mask tensor.
    pub(super) geometry: MaskGeometry,
    pub(super) keys: Keys,
    /// Place on the batch axis of query and output.
    pub(super) batch: usize,
    /// Rows that are written: those of the geometry first, then those around them, which are blank.
    pub(super) rows: usize,
    /// The first row's place on the tensors' row axis.
    first: usize,
    /// Rows on that axis.
    end: usize,
    /// Row 0 and key 0 in the position bias.
    pub(super) origin: (usize, usize),
    /// Where the mask tensor says what the rows see, if it is read.
    pub(super) mask: Option<MaskRows>,
    /// Summary of the mask tensor, if there is one and it is worth it.
    pub(super) cells: Option<Arc<Cells>>,
}

impl Attention {
    /// # Safety
    ///
    /// As for [`super::run`], for as long as the value is used; with `single`, for tensors of the problem's element type
    /// that hold `FLOAT`.
    pub(super) unsafe fn new(problem: &Problem<'_>, buffers: &Buffers<'_>, single: bool) -> Self {
        let attends = problem.work == Work::Attend;
        let own = problem.dtype();
        let held = if single { DType::Float } else { own };
        let types = Types { own, held };
        let batch = if problem.is_packed() {
            1
        } else {
            problem.batch
        };
        let sizes = |dim| Sizes {
            batch,
            heads: problem.heads,
            rows: problem.query_rows,
            dim,
        };
        let source = |operand, rows: &Rows, dim| {
            // SAFETY: the problem touches all of the query and of its rotary part.
            unsafe { Source::new(buffers.base(operand), rows, sizes(dim), types) }
        };
        let conversion = |affine: &Option<Affine>, heads, dim| {
            let affine = affine.as_ref()?;
            // SAFETY: the problem touches the tensors of its grids.
            Some(unsafe { Conversion::new(problem, buffers, affine, heads, dim) })
        };
        let factors = |grid: Grid, heads| {
            // SAFETY: as above.
            unsafe { Factors::new(problem.call, buffers, &grid, heads, 1) }
        };
        let int8 = problem.int8_query.map(|int8| {
            [int8.deq_scale1, int8.quant_scale1, int8.deq_scale2]
                .map(|grid| factors(grid, 1).of_row((0, 0, 0)))
        });
        let first = |grid: Grid| factors(grid, 1).of_row((0, 0, 0));
        let keys_scale = problem.key_affine.map(|affine| affine.scale);
        let scale = problem.scale() * int8.map_or(1.0, |[scale, ..]| f64::from(scale));
        let scale = (scale * std::f64::consts::LOG2_E) as f32;
        let (keys, values) = (problem.head_dim, problem.value_dim);
        let group = if attends { problem.group().max(1) } else { 1 };
        let padding = if attends {
            // SAFETY: the problem touches its padding tensors.
            unsafe { read_padding(problem, buffers) }
        } else {
            Padding::default()
        };
        Attention {
            sequences: if attends {
                let all = problem.sequences(padding).enumerate();
                // SAFETY: the problem touches the key rows of each sequence.
                all.map(|(b, of)| unsafe { Sequence::new(problem, buffers, b, of, types) })
                    .collect()
            } else {
                (0..batch).map(|b| Sequence::blank(problem, b)).collect()
            },
            // Where there are no keys their heads do not count, and no rule has looked at them.
            kv_heads: problem.heads / group,
            group,
            dim: match problem.rope_dim {
                0 => keys,
                rope => keys.next_multiple_of(WIDTH) + rope,
            },
            value_dim: values,
            query_scale: if int8.is_some() { 1.0 } else { scale },
            scale: if int8.is_some() { scale } else { 1.0 },
            query: source(Operand::Query, &problem.query, keys),
            query_rope: problem
                .query_rope
                .map(|rope| source(Operand::QueryRope, &rope, problem.rope_dim)),
            query_conversion: conversion(&problem.query_affine, problem.heads, keys),
            rope_scale: keys_scale.filter(|_| problem.scaled_rope).map(first),
            key_conversion: conversion(&problem.key_affine, problem.kv_heads, keys),
            value_conversion: conversion(&problem.value_affine, problem.kv_heads, values),
            // SAFETY: the problem touches all of the output, and nobody else does.
            out: unsafe {
                let conversion = conversion(&problem.out_affine, problem.heads, values);
                let base = buffers.base(Operand::AttentionOut);
                Output::new(base, &problem.out, sizes(values), types, conversion)
            },
            lse: problem.lse.map(|rows| {
                // SAFETY: the problem touches all of the log-sum-exp, and nobody else does.
                unsafe { Sink::new(buffers.base(Operand::SoftmaxLse), &rows, sizes(1)) }
            }),
            // SAFETY: the problem touches the mask.
            mask: (attends && problem.mask.is_tensor())
                .then(|| unsafe { MaskBytes::new(problem, buffers) }),
            // SAFETY: the problem touches the position bias.
            bias: unsafe { Bias::new(problem, buffers, types) },
            sink: problem.sink.map(|grid| {
                let logits = factors(grid, problem.heads);
                let heads = 0..problem.heads;
                heads.map(|head| logits.of_row((0, head, 0))).collect()
            }),
            held,
            quantum: int8.map(|[_, quantum, _]| quantum),
            gain: int8.map_or(1.0, |[.., gain]| gain),
            lse_summand: problem
                .probability_scale
                .map_or(0.0, |grid| first(grid).ln()),
            corrects_blind_rows: problem.corrects_blind_rows(),
        }
    }

    /// Puts `geometry` in place of that of each sequence of the same lengths.
    pub(super) fn see(&mut self, geometry: &MaskGeometry) {
        let lengths = |of: &MaskGeometry| (of.q_len(), of.kv_len());
        for sequence in &mut self.sequences {
            if lengths(&sequence.geometry) == lengths(geometry) {
                sequence.geometry = *geometry;
            }
        }
    }

    /// Summarises the mask tensor, once for all sequences that it means the same to. Gives the bytes that this takes.
    pub(super) fn summarise_mask(&mut self) -> usize {
        let Some(mask) = &self.mask else {
            return 0;
        };
        let mut bytes = 0;
        let mut made: Option<(_, Arc<Cells>)> = None;
        for sequence in &mut self.sequences {
            if !Cells::worth(sequence) {
                continue;
            }
            let of = (sequence.mask, sequence.geometry);
            if let Some((_, cells)) = made.as_ref().filter(|(same, _)| *same == of) {
                sequence.cells = Some(Arc::clone(cells));
                continue;
            }
            let mut cells = Cells::new(sequence);
            let rows: Vec<_> = cells.rows_mut().enumerate().collect();
            let of_rows = &*sequence;
            rows.into_par_iter()
                .with_min_len(8)
                .for_each(|(number, row)| Cells::fill(row, number, mask, of_rows));
            bytes += cells.bytes();
            let cells = Arc::new(cells);
            sequence.cells = Some(Arc::clone(&cells));
            made = Some((of, cells));
        }
        bytes
    }

    /// Whether the tiles of a sequence's keys do for its values, too.
    pub(super) fn values_are_keys(&self, sequence: &Sequence) -> bool {
        let plain = self.key_conversion.is_none() && self.value_conversion.is_none();
        plain && sequence.keys.hold_values()
    }

    /// Vectors that hold a query or a key.
    pub(super) fn vectors(&self) -> usize {
        self.dim.div_ceil(WIDTH)
    }

    /// Vectors that hold a value or an output.
    pub(super) fn columns(&self) -> usize {
        self.value_dim.div_ceil(WIDTH)
    }

    /// Row of the sequence, and head, of a query.
    #[inline(always)]
    pub(super) fn place(&self, kv_head: usize, query: usize) -> (usize, usize) {
        (
            query / self.group,
            kv_head * self.group + query % self.group,
        )
    }

    /// The rows that a range of queries, not empty, belongs to.
    #[inline(always)]
    pub(super) fn rows(&self, queries: &Range<usize>) -> Range<u64> {
        let end = queries.end.div_ceil(self.group);
        (queries.start / self.group) as u64..end as u64
    }

    /// Widens a query and multiplies it by its factor: its vector number `i` goes to `out[i * step]`.
    #[inline(always)]
    pub(super) fn read_query<S: Simd>(
        &self,
        simd: S,
        sequence: &Sequence,
        (row, head): (usize, usize),
        out: &mut [Vector],
        step: usize,
    ) {
        simd.apart(ReadQuery {
            attention: self,
            at: sequence.at(head, row),
            out,
            step,
        });
    }

    /// Whether no two sequences write the same rows.
    pub(super) fn is_disjoint(&self) -> bool {
        self.sequences.windows(2).all(|pair| {
            pair[0].batch != pair[1].batch || pair[0].first + pair[0].rows <= pair[1].first
        })
    }
}

impl Sequence {
    /// # Safety
    ///
    /// As for [`Attention::new`].
    unsafe fn new(
        problem: &Problem<'_>,
        buffers: &Buffers<'_>,
        b: usize,
        (of, mask): (fia::Sequence, Option<MaskRows>),
        types: Types,
    ) -> Self {
        let at = problem.key_value(b);
        let (batch, rows) = match &problem.pages {
            Some(pages) => (pages.blocks, pages.block_size),
            None => (at.batch + 1, of.kv_first.saturating_add(of.kv_len)),
        };
        let sizes = |batch, rows, dim| Sizes {
            batch,
            heads: problem.kv_heads,
            rows,
            dim,
        };
        let source = |operand, rows_of: &Rows, dim| {
            // SAFETY: the problem touches at least the valid rows of this tensor, or all of it where it is paged.
            unsafe {
                Source::new(
                    buffers.base(operand),
                    rows_of,
                    sizes(batch, rows, dim),
                    types,
                )
            }
        };
        let shared = |operand, rows: Option<Rows>, dim| match rows {
            Some(rows) => {
                let sizes = sizes(1, of.prefix, dim);
                // SAFETY: the problem touches the prefix.
                unsafe { Source::new(buffers.base(operand), &rows, sizes, types) }
            }
            None => Source::Nothing,
        };
        let (prefix, index) = (&problem.prefix, at.list_index);
        Sequence {
            geometry: problem.geometry(b),
            keys: Keys {
                key: Part {
                    dim: problem.head_dim,
                    own: source(Operand::Key(index), &at.key, problem.head_dim),
                    prefix: shared(
                        Operand::KeySharedPrefix,
                        prefix.map(|prefix| prefix.key),
                        problem.head_dim,
                    ),
                    rope: at
                        .key_rope
                        .map(|rope| source(Operand::KeyRope, &rope, problem.rope_dim)),
                },
                value: Part {
                    dim: problem.value_dim,
                    own: source(Operand::Value(index), &at.value, problem.value_dim),
                    prefix: shared(
                        Operand::ValueSharedPrefix,
                        prefix.map(|prefix| prefix.value),
                        problem.value_dim,
                    ),
                    rope: None,
                },
                prefix: of.prefix,
                sequence: b,
                place: match &problem.pages {
                    Some(pages) => {
                        // SAFETY: the problem touches the block table.
                        Place::Pages(unsafe { Blocks::read(problem, buffers, pages, b, of.kv_len) })
                    }
                    None => Place::Rows {
                        batch: at.batch,
                        first: of.kv_first,
                        position: of.kv_position,
                    },
                },
            },
            batch: if problem.is_packed() { 0 } else { b },
            rows: if problem.is_packed() {
                of.q_len
            } else {
                problem.query_rows
            },
            first: of.q_first,
            end: problem.query_rows,
            origin: problem.origin(&of),
            mask,
            cells: None,
        }
    }

    /// Rows without keys, all that the tensors have.
    fn blank(problem: &Problem<'_>, batch: usize) -> Self {
        let part = || Part {
            dim: 0,
            own: Source::Nothing,
            prefix: Source::Nothing,
            rope: None,
        };
        Sequence {
            geometry: MaskGeometry::full(0, 0),
            keys: Keys {
                key: part(),
                value: part(),
                prefix: 0,
                sequence: batch,
                place: Place::Rows {
                    batch: 0,
                    first: 0,
                    position: 0,
                },
            },
            batch,
            rows: problem.query_rows,
            first: 0,
            end: problem.query_rows,
            origin: (0, 0),
            mask: None,
            cells: None,
        }
    }

    /// Where a row lies in query, output and log-sum-exp. Rows past the last one of the tensors come before the first.
    #[inline(always)]
    pub(super) fn at(&self, head: usize, row: usize) -> (usize, usize, usize) {
        let row = self.first + row;
        let row = if row < self.end { row } else { row - self.end };
        (self.batch, head, row)
    }

    /// The keys, of `within`, that any of `rows` sees.
    #[inline(always)]
    pub(super) fn span(&self, rows: Range<u64>, within: &Range<usize>) -> Range<usize> {
        let span = self.geometry.span(rows);
        // Both ends are at most the key length, a usize.
        let (start, end) = (span.start as usize, span.end as usize);
        let (start, end) = (start.max(within.start), end.min(within.end));
        start..end.max(start)
    }
}

/// One query to read.
struct ReadQuery<'a> {
    attention: &'a Attention,
    /// Batch, head and row.
    at: (usize, usize, usize),
    out: &'a mut [Vector],
    step: usize,
}

impl Kernel for ReadQuery<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let ReadQuery {
            attention,
            at,
            out,
            step,
        } = self;
        let watch = &mut simd.splat(0.0);
        let dim = attention.query.sizes().dim;
        attention.query.read(simd, at, 0..dim, out, step, watch);
        let coordinates = Coordinates {
            sequence: (at.0, at.2),
            stored: (at.0, at.2),
        };
        if let Some(conversion) = &attention.query_conversion {
            conversion.to_values(simd, coordinates, at.1, (&mut *out, step, dim), watch);
        }
        if let Some(rope) = &attention.query_rope {
            let out = &mut out[dim.div_ceil(WIDTH) * step..];
            let dim = rope.sizes().dim;
            rope.read(simd, at, 0..dim, out, step, watch);
            if let (Some(scale), Some(conversion)) =
                (attention.rope_scale, &attention.query_conversion)
            {
                let (of_row, _) = conversion.of_row(coordinates, at.1);
                let scale = simd.splat(scale * of_row);
                for out in out.iter_mut().step_by(step).take(dim.div_ceil(WIDTH)) {
                    simd.store(simd.multiply(simd.load(out), scale), out);
                }
            }
        }
        let scale = simd.splat(attention.query_scale);
        for out in out.iter_mut().step_by(step).take(attention.vectors()) {
            simd.store(simd.multiply(simd.load(out), scale), out);
        }
    }
}

/// Reads the padding tensors that count; what cannot be read is 0.
///
/// # Safety
///
/// Their bytes may be read.
unsafe fn read_padding(problem: &Problem<'_>, buffers: &Buffers<'_>) -> Padding {
    let read = |operand: Option<Operand>| {
        let operand = operand?;
        let desc = operand.of(problem.call)?;
        // SAFETY: the caller keeps this contract.
        let numbers = unsafe { Numbers::new(problem.call, buffers, operand, DType::Int64) };
        numbers.integer(desc.offset)
    };
    let (query, key) = problem.padding_operands();
    Padding {
        query: read(query).unwrap_or(0),
        key: read(key).unwrap_or(0),
    }
}
