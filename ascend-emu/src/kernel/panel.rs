//! Attention of a block of many queries: prefill, and decode with large groups.
//!
//! The tile of scores is kept with keys down and queries across, so that a vector holds one key's scores of a *panel*
//! of 16 queries. Neither key nor value tiles need transposing, and maxima, sums and exponentials run along the
//! vectors without horizontal steps. Both products keep as many sums as the registers hold (see [`super::simd`]): scores
//! take rows of keys by panels, output takes rows of queries by 16 value columns.
//!
//! A thread needs `(2 * 192 + 2 * 96) * d + 192 * 96` floats for head dimension `d`: 0.36 MB at 128. More queries to a
//! block fetch each tile less often; more keys to a tile touch the output less often; both are bounded by what the second
//! cache holds.

use super::attention::{Attention, Sequence};
use super::element::Element;
use super::finish::State;
use super::products::{score, union, weigh};
use super::schedule::Task;
use super::scratch::{Scratch, take};
use super::simd::{Shape, Simd, Vector, WIDTH};
use super::tile::{Hidden, KEYS, look, quantise, read_bias, read_keys, read_values};
use ascend_spec::Tile;
use std::ops::Range;

/// Queries in a block.
pub(crate) const QUERIES: usize = 192;

/// Panels in a block.
const PANELS: usize = QUERIES / WIDTH;

/// Tiles that are passed over at once where nobody sees them.
const STRIDE: usize = 16;

const _: () = assert!(QUERIES.is_multiple_of(WIDTH));
const _: () = assert!(QUERIES.is_multiple_of(Shape::MOST_ROWS));
const _: () = assert!(KEYS.is_multiple_of(Shape::MOST_ROWS));

/// What the panels of a block see of a tile. Keys count from the tile's first.
struct Sight {
    /// The keys that any query of a panel sees.
    keys: [Range<usize>; PANELS],
    /// Whether some of them are hidden from some queries.
    mixed: [bool; PANELS],
    /// Which.
    hidden: [Hidden; PANELS],
}

/// The buffers of a block.
pub(super) struct Block<'s> {
    /// Panels in use: the scores of a key are so many vectors.
    pub(super) panels: usize,
    /// Of each panel, element `d` of its queries.
    pub(super) queries: &'s mut [Vector],
    /// A tile of keys, row by row.
    pub(super) keys: &'s mut [Vector],
    /// A tile of values, column by column.
    pub(super) values: &'s mut [Vector],
    /// Of each key, the score and then the weight of each query; one key more than used.
    pub(super) scores: &'s mut [Vector],
    /// Output of each query, row by row, not yet divided by the sum.
    pub(super) out: &'s mut [Vector],
    /// Running maximum of each query.
    max: &'s mut [Vector],
    /// Running sum of each query.
    sum: &'s mut [Vector],
    /// Factor of each query that the last tile puts on what was before.
    pub(super) decay: &'s mut [Vector],
}

impl<'s> Block<'s> {
    fn new(
        scratch: &'s mut Scratch,
        panels: usize,
        dim: usize,
        key_vectors: usize,
        columns: usize,
    ) -> Self {
        // A kernel of many rows goes past the last query.
        let queries = (panels * WIDTH).next_multiple_of(Shape::MOST_ROWS);
        let sizes = [
            panels * dim,
            KEYS * key_vectors,
            KEYS * columns,
            KEYS * panels + 1,
            queries * columns,
            panels,
            panels,
            panels + 1,
        ];
        let mut rest = scratch.vectors(sizes.iter().sum());
        let [queries, keys, values, scores, out, max, sum, decay] =
            sizes.map(|size| take(&mut rest, size));
        out.fill([0.0; WIDTH]);
        max.fill([f32::NEG_INFINITY; WIDTH]);
        sum.fill([0.0; WIDTH]);
        decay.fill([1.0; WIDTH]);
        Block {
            panels,
            queries,
            keys,
            values,
            scores,
            out,
            max,
            sum,
            decay,
        }
    }
}

/// Attends to the keys of `task`: maximum, sum and output of each of its queries.
#[inline(always)]
pub(super) fn attend<'s, T: Element, S: Simd>(
    simd: S,
    attention: &Attention<T>,
    sequence: &Sequence<T>,
    task: &Task,
    scratch: &'s mut Scratch,
) -> State<'s> {
    let (dim, key_vectors) = (attention.dim, attention.vectors());
    let columns = attention.columns();
    let count = task.queries.len().min(QUERIES);
    let panels = count.div_ceil(WIDTH);
    let mut block = Block::new(scratch, panels, dim, key_vectors, columns);
    let mut seen = Sight {
        keys: [const { 0..0 }; PANELS],
        mixed: [false; PANELS],
        hidden: [[0; KEYS]; PANELS],
    };
    pack_queries(simd, attention, sequence, task, &mut block);

    let block_rows = attention.rows(&task.queries);
    let mut first = task.keys.start;
    while first < task.keys.end {
        let many = first as u64..task.keys.end.min(first + STRIDE * KEYS) as u64;
        if sequence.geometry.tile(block_rows.clone(), many.clone()) == Tile::None {
            first = many.end as usize;
            continue;
        }
        let tile = first..task.keys.end.min(first + KEYS);
        first = tile.end;
        for panel in 0..panels {
            let start = task.queries.start + panel * WIDTH;
            let queries = start..task.queries.end.min(start + WIDTH);
            let rows = attention.rows(&queries);
            let group = attention.group;
            let lanes = |row: u64| {
                // The queries of a row that are the panel's.
                let first = (row as usize * group).max(queries.start) - start;
                let end = ((row as usize + 1) * group).min(queries.end) - start;
                ((1u32 << end) - (1u32 << first)) as u16
            };
            let hidden = &mut seen.hidden[panel];
            (seen.keys[panel], seen.mixed[panel]) =
                look(attention, sequence, rows, &tile, lanes, hidden);
        }
        let keys = &seen.keys[..panels];
        let all = union(keys);
        if all.is_empty() {
            continue;
        }
        let (rows, head) = (tile.start + all.start..tile.start + all.end, task.kv_head);
        let tile_keys = &mut block.keys[all.start * key_vectors..];
        read_keys(simd, attention, sequence, head, rows.clone(), tile_keys);
        let values = &mut block.values[all.start..];
        let finite = read_values(simd, attention, sequence, head, rows, values);

        score(simd, &mut block, dim, keys);
        for panel in 0..panels {
            if attention.scale != 1.0 || attention.bias.is_some() {
                let of = (panel, &seen.keys[panel]);
                bias(simd, attention, sequence, task, &mut block, of, tile.start);
            }
            let hidden = seen.mixed[panel].then_some(&seen.hidden[panel]);
            let of = (panel, &seen.keys[panel], hidden);
            soften::<T, S>(simd, &mut block, attention.quantum, of, &all);
        }
        weigh(simd, &mut block, count, keys, finite);
    }
    let Block { out, max, sum, .. } = block;
    State {
        max: &mut max.as_flattened_mut()[..count],
        sum: &mut sum.as_flattened_mut()[..count],
        out: &mut out[..count * columns],
    }
}

/// Widens the queries and puts them across. Rows past the sequence's length are zeros.
#[inline(always)]
fn pack_queries<T: Element, S: Simd>(
    simd: S,
    attention: &Attention<T>,
    sequence: &Sequence<T>,
    task: &Task,
    block: &mut Block<'_>,
) {
    let dim = attention.dim;
    // The key tile is not in use yet.
    let wide = &mut block.keys[..attention.vectors()];
    let rows = sequence.geometry.q_len() as usize;
    let lanes = block.panels * WIDTH;
    for lane in 0..lanes {
        let query = task.queries.start + lane;
        let (row, head) = attention.place(task.kv_head, query);
        if query < task.queries.end && row < rows {
            attention.read_query(simd, sequence, (row, head), wide, 1);
        } else {
            wide.fill([0.0; WIDTH]);
        }
        let panel = &mut block.queries[lane / WIDTH * dim..][..dim];
        for (across, &value) in panel.iter_mut().zip(wide.as_flattened()) {
            across[lane % WIDTH] = value;
        }
    }
}

/// Scales the scores of a panel where the queries are not, and adds the position bias. Keys count from `first`.
#[inline(always)]
fn bias<T: Element, S: Simd>(
    simd: S,
    attention: &Attention<T>,
    sequence: &Sequence<T>,
    task: &Task,
    block: &mut Block<'_>,
    (panel, seen): (usize, &Range<usize>),
    first: usize,
) {
    let keys = first + seen.start..first + seen.end;
    let panels = block.panels;
    let scores = &mut block.scores[seen.start * panels..seen.end * panels];
    for score in scores.iter_mut().skip(panel).step_by(panels) {
        for score in score {
            *score *= attention.scale;
        }
    }
    let start = task.queries.start + panel * WIDTH;
    for (lane, query) in (start..task.queries.end).take(WIDTH).enumerate() {
        let place = attention.place(task.kv_head, query);
        if place.0 as u64 >= sequence.geometry.q_len() {
            break;
        }
        let mut bias = [[0.0; WIDTH]; KEYS / WIDTH];
        if !read_bias(simd, attention, sequence, place, &keys, &mut bias) {
            break;
        }
        let scores = scores.iter_mut().skip(panel).step_by(panels);
        for (score, bias) in scores.zip(bias.as_flattened()) {
            score[lane] += bias;
        }
    }
}

/// Scores to weights: hides, moves the running maximum, takes powers, adds them up and rounds them to the element type
/// or to integers. Weights of keys in `all` that the panel does not see are 0.
#[inline(always)]
fn soften<T: Element, S: Simd>(
    simd: S,
    block: &mut Block<'_>,
    quantum: Option<f32>,
    (panel, seen, hidden): (usize, &Range<usize>, Option<&Hidden>),
    all: &Range<usize>,
) {
    let Range { start, end } = *seen;
    let panels = block.panels;
    if start == end {
        for scores in block.scores[all.start * panels..all.end * panels].chunks_exact_mut(panels) {
            scores[panel] = [0.0; WIDTH];
        }
        block.decay[panel] = [1.0; WIDTH];
        return;
    }
    for unseen in [all.start..start, end..all.end] {
        let scores = &mut block.scores[unseen.start * panels..unseen.end * panels];
        for scores in scores.chunks_exact_mut(panels) {
            scores[panel] = [0.0; WIDTH];
        }
    }
    let scores = &mut block.scores[start * panels..end * panels];
    if let Some(hidden) = hidden {
        let scores = scores.chunks_exact_mut(panels);
        for (scores, &lanes) in scores.zip(&hidden[start..end]) {
            let score = simd.load(&scores[panel]);
            simd.store(simd.hide(score, lanes), &mut scores[panel]);
        }
    }

    let old = simd.load(&block.max[panel]);
    // Four at a time, since each waits for the one before. NaN is no maximum; it reaches the sum and the output through
    // its power.
    let mut most = [old; 4];
    let fours = scores.chunks_exact(4 * panels);
    for scores in fours.remainder().chunks_exact(panels) {
        most[0] = simd.larger(simd.load(&scores[panel]), most[0]);
    }
    for four in fours {
        for i in 0..4 {
            most[i] = simd.larger(simd.load(&four[i * panels + panel]), most[i]);
        }
    }
    let max = simd.larger(simd.larger(most[0], most[1]), simd.larger(most[2], most[3]));
    // Before anything is seen the maximum is -inf; the difference to it must not be NaN.
    let shift = simd.larger(max, simd.splat(f32::MIN));
    let decay = simd.exp2(simd.subtract(old, shift));
    let mut sum = simd.splat(0.0);
    if let Some(quantum) = quantum {
        for scores in scores.chunks_exact_mut(panels) {
            let weight = simd.exp2(simd.subtract(simd.load(&scores[panel]), shift));
            sum = simd.add(sum, weight);
            simd.store(weight, &mut scores[panel]);
            scores[panel] = quantise(&scores[panel], quantum);
        }
    } else {
        for scores in scores.chunks_exact_mut(panels) {
            let weight = simd.exp2(simd.subtract(simd.load(&scores[panel]), shift));
            sum = simd.add(sum, weight);
            simd.store(T::round(simd, weight), &mut scores[panel]);
        }
    }
    let sum = simd.mul_add(simd.load(&block.sum[panel]), decay, sum);
    simd.store(sum, &mut block.sum[panel]);
    simd.store(max, &mut block.max[panel]);
    simd.store(decay, &mut block.decay[panel]);
}
