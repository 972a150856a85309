//! The decode kernel: attention of up to eight queries that share a key head.
//!
//! The algorithm is that of the prefill kernel, FlashAttention-2 (Dao 2023) with the online softmax (Milakov and
//! Gimelshein 2018), arranged for few queries. Decode reads each key and value once, so its speed is that of memory.
//! Long key ranges are cut among tasks by `schedule`, as in flash decoding, and `split_kv` combines the results.
//!
//! Scores are dot products along the head dimension, since there are fewer queries than a vector has lanes. A query
//! tile of one, two or four queries is computed at once, so that each vector of a key is read and widened once for
//! it. The scores of a query tile are interleaved, key by key, so that the softmax works on full vectors.
//!
//! Keys and values are read in place, without a copy, where they are whole vectors of one element type; INT8 elements
//! are dequantised in registers. Other rows are loaded into a buffer first.
//!
//! # Prefetching
//!
//! A KV tile is computed in two sub-tiles, whose keys and values fit the L1 cache. While the scores of a sub-tile are
//! computed, its values are prefetched into L1; while its output is computed, the keys of the next sub-tile are. Both
//! loops also prefetch later rows into L2, which can wait for more cache lines at a time than L1. The products' own
//! loops issue the prefetches, one beside each vector that they read.

mod products;
mod softmax;
mod sub_tile;

use super::attention::Attention;
use super::attention::{Task, TaskContext};
use super::kv::PrefetchedRows;
use super::online_softmax::OnlineSoftmax;
use super::scratch::take;
use super::sequence::Sequence;
use super::simd::{Kernel, Shape, Simd, Vector, WIDTH, all_finite};
use super::tile_load::stride;
use super::visibility::{Lanes, find_visible};
use super::visibility::{MaskWindow, WINDOW_KEYS};
use super::{SUB_TILE_KEYS, TILE_KEYS};
use ascend_spec::DType;
use std::iter;
use std::ops::Range;

/// The largest number of queries that the decode kernel takes; for more, the prefill kernel is faster.
pub(crate) const QUERIES: usize = 8;

/// Vectors of one query's scores of a sub-tile. The last one takes products of keys past the end.
const SCORES: usize = SUB_TILE_KEYS / WIDTH + 1;

const _: () = assert!(SUB_TILE_KEYS.is_multiple_of(Shape::ROWS) && SUB_TILE_KEYS.is_multiple_of(WIDTH));

/// Some keys of a task, and the queries that see them.
#[derive(Clone)]
struct SubTile<'a> {
    attention: &'a Attention,
    sequence: &'a Sequence,
    task: &'a Task,
    /// The keys.
    rows: Range<usize>,
    /// The queries that each key is hidden from; `None` if all queries see all keys.
    hidden: Option<&'a [u16]>,
}

/// The buffers of a task.
struct DecodeBuffers<'s> {
    /// Queries; those of a query tile are interleaved, vector by vector.
    queries: &'s mut [Vector],
    /// For each query tile, key by key, the scores of a sub-tile; the softmax replaces them by weights.
    scores: &'s mut [Vector],
    /// Output of each query, row by row, not yet divided by the running sum.
    out: &'s mut [Vector],
    /// Running maximum of each query.
    max: [f32; QUERIES],
    /// Running sum of each query.
    sum: [f32; QUERIES],
    /// Factor by which the sub-tile rescales the output of each query.
    rescale: [f32; QUERIES],
}

impl DecodeBuffers<'_> {
    /// Resets output, running maximum and running sum.
    fn clear(&mut self) {
        self.out.fill([0.0; WIDTH]);
        self.max = [f32::NEG_INFINITY; QUERIES];
        self.sum = [0.0; QUERIES];
    }
}

/// Runs the decode kernel on a task of at most [`QUERIES`] queries: computes running maximum, running sum and output
/// of each.
pub(crate) struct Attend<'a, 's>(pub(crate) TaskContext<'a, 's>);

impl<'s> Kernel for Attend<'_, 's> {
    type Output = OnlineSoftmax<'s>;

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) -> OnlineSoftmax<'s> {
        attend(simd, self.0)
    }
}

#[inline(always)]
fn attend<'s, S: Simd>(simd: S, context: TaskContext<'_, 's>) -> OnlineSoftmax<'s> {
    let TaskContext { attention, sequence, task, scratch } = context;
    let (vectors, columns) = (attention.vectors(), attention.columns());
    let count = task.queries.len().min(QUERIES);
    let sizes = [
        QUERIES * vectors,
        SUB_TILE_KEYS * stride(vectors),
        SUB_TILE_KEYS * stride(columns),
        QUERIES * SCORES,
        QUERIES * columns,
        1,
        1,
    ];
    let bits = attention.mask.as_ref().map_or(0, |_| WINDOW_KEYS);
    let (mut rest, bits) = scratch.vectors_and_bits(sizes.iter().sum(), bits);
    let [queries, keys, values, scores, out, max, sum] = sizes.map(|size| take(&mut rest, size));
    let mut buffers = DecodeBuffers {
        queries,
        scores,
        out,
        max: [f32::NEG_INFINITY; QUERIES],
        sum: [0.0; QUERIES],
        rescale: [1.0; QUERIES],
    };
    buffers.queries.fill([0.0; WIDTH]);
    let rows = sequence.geometry.q_len() as usize;
    for (first, together) in query_tiles(count) {
        for r in 0..together {
            let query = task.queries.start + first + r;
            let (row, head) = attention.row_and_head(task.kv_head, query);
            if row < rows {
                let out = &mut buffers.queries[first * vectors + r..];
                attention.read_query(simd, sequence, (row, head), out, together);
            }
        }
    }

    let mut window = MaskWindow::new(bits);
    let mut hidden = [0; TILE_KEYS];
    let rows = attention.rows(&task.queries);
    let lanes = Lanes { kv_head: task.kv_head, group: attention.group, queries: task.queries.clone() };
    // A hidden key adds nothing, even if its value is infinite or NaN, but values that are read in place are
    // multiplied by their weight 0 unchecked, which gives NaN. Only where the output is not finite is the task
    // computed again, checked.
    for check_finite in [false, true] {
        buffers.clear();
        let mut in_place = false;
        let mut prefetched = [PrefetchedRows::NONE; 3];
        for first in task.keys.clone().step_by(TILE_KEYS) {
            let tile = first..task.keys.end.min(first + TILE_KEYS);
            let (visible, mixed) = find_visible(
                attention,
                sequence,
                rows.clone(),
                (&tile, task.keys.end),
                &lanes,
                &mut window,
                &mut hidden,
            );
            if visible.is_empty() {
                continue;
            }
            let hidden = mixed.then_some(&hidden[visible.clone()]);
            let tile = SubTile {
                attention,
                sequence,
                task,
                rows: tile.start + visible.start..tile.start + visible.end,
                hidden,
            };
            for first in (0..visible.len()).step_by(SUB_TILE_KEYS) {
                let sub_tile = tile.part(first..visible.len().min(first + SUB_TILE_KEYS));
                let done = if check_finite || attention.weight_dtype == DType::Float {
                    None
                } else if S::IN_PLACE {
                    sub_tile.attend_in_place(simd, &mut buffers, &mut prefetched)
                } else {
                    None
                };
                match done {
                    Some(()) => in_place = true,
                    None => sub_tile.attend_loaded(simd, &mut buffers, keys, values),
                }
            }
        }
        if !in_place || all_finite(simd, buffers.out) {
            break;
        }
    }
    let (max, sum) = (max.as_flattened_mut(), sum.as_flattened_mut());
    max[..QUERIES].copy_from_slice(&buffers.max);
    sum[..QUERIES].copy_from_slice(&buffers.sum);
    let DecodeBuffers { out, .. } = buffers;
    OnlineSoftmax { max: &mut max[..count], sum: &mut sum[..count], out: &mut out[..count * columns] }
}

/// Cuts `count` queries into query tiles: returns the first query of each, and its number of queries.
#[inline(always)]
fn query_tiles(count: usize) -> impl Iterator<Item = (usize, usize)> {
    let mut next = 0;
    iter::from_fn(move || {
        let together = match count - next {
            0 => return None,
            1 => 1,
            2 | 3 => 2,
            _ => 4,
        };
        next += together;
        Some((next - together, together))
    })
}
