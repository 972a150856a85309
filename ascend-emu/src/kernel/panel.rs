//! Attention of a block of many queries: prefill, and decode with large groups.
//!
//! The tile of scores is kept with keys down and queries across, so that a vector holds one key's scores of a *panel*
//! of 16 queries. Neither key nor value tiles need transposing, and maxima, sums and exponentials run along the
//! vectors without horizontal steps. Both products work on 6 x 16 accumulators, which with their operands fill the 16
//! registers of AVX2: scores take 6 keys by a panel, output takes 6 queries by 16 value columns.
//!
//! A thread needs `96 * 4 * d + 96 * 96` floats and 9 KiB for head dimension `d`: 0.25 MB at 128.

use super::attention::{Attention, Sequence};
use super::element::Element;
use super::exp::{exp, exponentiate};
use super::finish::State;
use super::schedule::Task;
use super::scratch::{Scratch, take};
use super::simd::{Simd, Vector, WIDTH};
use super::tile::{KEYS, quantise, read_bias, read_keys, read_mask, read_values};
use ascend_spec::Tile;
use std::ops::Range;

/// Queries in a block.
pub(crate) const QUERIES: usize = 96;

/// Panels in a block.
const PANELS: usize = QUERIES / WIDTH;

/// Rows of accumulators.
const ROWS: usize = 6;

const _: () = assert!(QUERIES.is_multiple_of(WIDTH));
const _: () = assert!(QUERIES.is_multiple_of(ROWS) && KEYS.is_multiple_of(ROWS));

/// What a panel sees of a tile. Keys count from the tile's first.
#[derive(Clone, Debug)]
struct Sight {
    /// The keys that any query of the panel sees.
    keys: Range<usize>,
    /// The first key of each query, and the one after its last, if they differ.
    each: Option<([u32; WIDTH], [u32; WIDTH])>,
    /// Whether mask bytes hide some of them.
    hidden: bool,
}

impl Sight {
    const NOTHING: Sight = Sight {
        keys: 0..0,
        each: None,
        hidden: false,
    };
}

/// The smallest range that holds what each of the panels sees.
fn union(seen: &[Sight]) -> Range<usize> {
    let seen = seen.iter().map(|sight| sight.keys.clone());
    let union = seen
        .filter(|keys| !keys.is_empty())
        .reduce(|a, b| a.start.min(b.start)..a.end.max(b.end));
    union.unwrap_or(0..0)
}

/// The buffers of a block.
struct Block<'s> {
    /// Of each panel, element `d` of its queries.
    queries: &'s mut [Vector],
    /// A tile of keys, row by row.
    keys: &'s mut [Vector],
    /// A tile of values, column by column.
    values: &'s mut [Vector],
    /// Of each key, the score and then the weight of each query; one key more than used.
    scores: &'s mut [Vector],
    /// Output of each query, row by row, not yet divided by the sum.
    out: &'s mut [Vector],
    /// Running maximum of each query.
    max: &'s mut [Vector],
    /// Running sum of each query.
    sum: &'s mut [Vector],
    /// Factor of each query that the last tile puts on what was before.
    decay: &'s mut [Vector],
    /// Mask bytes, placed as the scores.
    hidden: &'s mut [u8],
}

impl<'s> Block<'s> {
    fn new(scratch: &'s mut Scratch, dim: usize, key_vectors: usize, columns: usize) -> Self {
        let sizes = [
            PANELS * dim,
            KEYS * key_vectors,
            KEYS * columns,
            (KEYS + 1) * PANELS,
            QUERIES * columns,
            PANELS,
            PANELS,
            PANELS,
        ];
        let (mut rest, hidden) = scratch.split(sizes.iter().sum(), (KEYS + 1) * QUERIES);
        let [queries, keys, values, scores, out, max, sum, decay] =
            sizes.map(|size| take(&mut rest, size));
        out.fill([0.0; WIDTH]);
        max.fill([f32::NEG_INFINITY; WIDTH]);
        sum.fill([0.0; WIDTH]);
        decay.fill([1.0; WIDTH]);
        Block {
            queries,
            keys,
            values,
            scores,
            out,
            max,
            sum,
            decay,
            hidden,
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
    let mut block = Block::new(scratch, dim, key_vectors, columns);
    pack_queries(simd, attention, sequence, task, &mut block);

    for first in task.keys.clone().step_by(KEYS) {
        let tile = first..task.keys.end.min(first + KEYS);
        let mut seen = [Sight::NOTHING; PANELS];
        let seen = &mut seen[..panels];
        look(attention, sequence, task, &tile, seen, block.hidden);
        let all = union(seen);
        if all.is_empty() {
            continue;
        }
        let rows = first + all.start..first + all.end;
        let keys = &mut block.keys[all.start * key_vectors..];
        let head = task.kv_head;
        read_keys(simd, attention, sequence, head, rows.clone(), keys);
        let values = &mut block.values[all.start..];
        let finite = read_values(simd, attention, sequence, head, rows, values);

        for (panel, sight) in seen.iter().enumerate() {
            score(simd, &mut block, dim, panel, &sight.keys);
            let scale = if attention.bias.is_some() {
                let of = (panel, sight);
                bias(simd, attention, sequence, task, &mut block, of, first);
                1.0
            } else {
                attention.scale
            };
            let numbers = (scale, attention.quantum);
            soften::<T, S>(simd, &mut block, numbers, panel, sight, &all);
        }
        for query in (0..count).step_by(ROWS) {
            let last_panel = ((query + ROWS - 1) / WIDTH).min(panels - 1);
            let keys = union(&seen[query / WIDTH..=last_panel]);
            weigh(simd, &mut block, query, &keys, finite);
        }
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
    for lane in 0..QUERIES {
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

/// Finds what each panel sees of a tile, and fetches the mask bytes if there are any.
#[inline(always)]
fn look<T: Element>(
    attention: &Attention<T>,
    sequence: &Sequence<T>,
    task: &Task,
    tile: &Range<usize>,
    seen: &mut [Sight],
    hidden: &mut [u8],
) {
    let local = |keys: Range<usize>| keys.start - tile.start..keys.end - tile.start;
    for (panel, sight) in seen.iter_mut().enumerate() {
        let start = task.queries.start + panel * WIDTH;
        let queries = start..task.queries.end.min(start + WIDTH);
        let rows = attention.rows(&queries);
        *sight = Sight::NOTHING;
        let keys = tile.start as u64..tile.end as u64;
        match sequence.geometry.tile(rows.clone(), keys) {
            Tile::None => continue,
            Tile::All => sight.keys = 0..tile.len(),
            Tile::Mixed => {
                sight.keys = local(sequence.span(rows, tile));
                let (mut first, mut end) = ([0; WIDTH], [0; WIDTH]);
                for (query, (first, end)) in queries.clone().zip(first.iter_mut().zip(&mut end)) {
                    let row = (query / attention.group) as u64;
                    let keys = local(sequence.span(row..row + 1, tile));
                    (*first, *end) = (keys.start as u32, keys.end as u32);
                }
                sight.each = Some((first, end));
            }
        }
        if attention.mask.is_some() {
            look_at_mask(attention, sequence, queries, tile, panel, sight, hidden);
        }
    }
}

/// Fetches the mask bytes of a panel and puts them across.
#[inline(always)]
fn look_at_mask<T: Element>(
    attention: &Attention<T>,
    sequence: &Sequence<T>,
    queries: Range<usize>,
    tile: &Range<usize>,
    panel: usize,
    sight: &mut Sight,
    hidden: &mut [u8],
) {
    let hidden = &mut hidden[panel * WIDTH..];
    let (mut all, mut any) = (0xff, 0);
    let mut bytes = [0; KEYS];
    let mut fetched = None;
    for (lane, query) in queries.enumerate() {
        let row = (query / attention.group) as u64;
        if fetched != Some(row) {
            fetched = Some(row);
            match read_mask(attention, sequence, row, tile, &mut bytes) {
                Some(bytes) => {
                    for byte in bytes {
                        // Any byte but 0 hides; make it 0xff.
                        *byte = if *byte == 0 { 0 } else { 0xff };
                        any |= *byte;
                        all &= *byte;
                    }
                }
                // Nobody looks at such a row.
                None => bytes = [0; KEYS],
            }
        }
        for (across, &byte) in hidden.chunks_mut(QUERIES).zip(&bytes) {
            across[lane] = byte;
        }
    }
    sight.hidden = any != 0;
    if all != 0 {
        sight.keys = 0..0;
    }
}

/// Products of a panel's queries with the keys it sees, six at a time from a multiple of six on.
#[inline(always)]
fn score<S: Simd>(simd: S, block: &mut Block<'_>, dim: usize, panel: usize, keys: &Range<usize>) {
    if keys.is_empty() {
        return;
    }
    let queries = &block.queries[panel * dim..][..dim];
    let stride = dim.next_multiple_of(WIDTH);
    let tile = block.keys.as_flattened();
    for first in (keys.start / ROWS * ROWS..keys.end).step_by(ROWS) {
        let tile = &tile[first * stride..][..ROWS * stride];
        let mut rows = [tile; ROWS];
        for (r, row) in rows.iter_mut().enumerate() {
            *row = &tile[r * stride..][..queries.len()];
        }
        let mut products = [simd.splat(0.0); ROWS];
        for (d, query) in queries.iter().enumerate() {
            let query = simd.load(query);
            for r in 0..ROWS {
                products[r] = simd.mul_add(simd.splat(rows[r][d]), query, products[r]);
            }
        }
        let scores = block.scores[first * PANELS..].as_chunks_mut::<PANELS>().0;
        for (scores, products) in scores.iter_mut().zip(products) {
            simd.store(products, &mut scores[panel]);
        }
    }
}

/// Scales the scores of a panel and adds the position bias. Keys count from `first`.
#[inline(always)]
fn bias<T: Element, S: Simd>(
    simd: S,
    attention: &Attention<T>,
    sequence: &Sequence<T>,
    task: &Task,
    block: &mut Block<'_>,
    (panel, sight): (usize, &Sight),
    first: usize,
) {
    let keys = first + sight.keys.start..first + sight.keys.end;
    let scores = &mut block.scores.as_chunks_mut::<PANELS>().0[sight.keys.clone()];
    for scores in scores.iter_mut() {
        for score in &mut scores[panel] {
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
        read_bias(simd, attention, sequence, place, &keys, &mut bias);
        for (scores, bias) in scores.iter_mut().zip(bias.as_flattened()) {
            scores[panel][lane] += bias;
        }
    }
}

/// Scores to weights: scales, hides, moves the running maximum, takes exponentials, adds them up and rounds them to
/// the element type or to integers. Weights of keys in `all` that the panel does not see are 0.
#[inline(always)]
fn soften<T: Element, S: Simd>(
    simd: S,
    block: &mut Block<'_>,
    (scale, quantum): (f32, Option<f32>),
    panel: usize,
    sight: &Sight,
    all: &Range<usize>,
) {
    let Range { start, end } = sight.keys;
    let scores = block.scores.as_chunks_mut::<PANELS>().0;
    if start == end {
        for scores in &mut scores[all.clone()] {
            scores[panel] = [0.0; WIDTH];
        }
        block.decay[panel] = [1.0; WIDTH];
        return;
    }
    for unseen in [all.start..start, end..all.end] {
        for scores in &mut scores[unseen] {
            scores[panel] = [0.0; WIDTH];
        }
    }

    let old = block.max[panel];
    let mut max = old;
    let mut hidden = block.hidden[start * QUERIES + panel * WIDTH..].chunks(QUERIES);
    for (key, scores) in (start as u32..).zip(&mut scores[start..end]) {
        let score = &mut scores[panel];
        for score in score.iter_mut() {
            *score *= scale;
        }
        if let Some((first, end)) = &sight.each {
            for i in 0..WIDTH {
                let sees = (first[i] <= key) & (key < end[i]);
                score[i] = if sees { score[i] } else { f32::NEG_INFINITY };
            }
        }
        if sight.hidden
            && let Some(hidden) = hidden.next().and_then(|bytes| bytes.first_chunk::<WIDTH>())
        {
            for i in 0..WIDTH {
                score[i] = if hidden[i] == 0 {
                    score[i]
                } else {
                    f32::NEG_INFINITY
                };
            }
        }
        for i in 0..WIDTH {
            // NaN is no maximum; it reaches the sum and the output through its exponential.
            max[i] = if score[i] > max[i] { score[i] } else { max[i] };
        }
    }

    let mut shift = max;
    let mut decay = [0.0; WIDTH];
    for i in 0..WIDTH {
        // Before anything is seen the maximum is -inf; the difference to it must not be NaN.
        shift[i] = if max[i] == f32::NEG_INFINITY {
            0.0
        } else {
            max[i]
        };
        decay[i] = old[i] - shift[i];
    }
    decay = exp(simd, &decay);
    let mut sum = [0.0; WIDTH];
    if let Some(quantum) = quantum {
        for scores in &mut scores[start..end] {
            scores[panel] = quantise(
                &exponentiate(simd, &scores[panel], &shift, &mut sum),
                quantum,
            );
        }
    } else {
        for scores in &mut scores[start..end] {
            let weight = exponentiate(simd, &scores[panel], &shift, &mut sum);
            simd.store(T::round(simd, simd.load(&weight)), &mut scores[panel]);
        }
    }
    for i in 0..WIDTH {
        block.sum[panel][i] = simd.mul_add_one(block.sum[panel][i], decay[i], sum[i]);
    }
    block.max[panel] = max;
    block.decay[panel] = decay;
}

/// Adds the weighted values of `keys` to the output of six queries from `query` on.
#[inline(always)]
fn weigh<S: Simd>(simd: S, block: &mut Block<'_>, query: usize, keys: &Range<usize>, finite: bool) {
    if keys.is_empty() {
        return;
    }
    let columns = block.values.len() / KEYS;
    // Chunk `j` begins with the six queries' weights of key `j`.
    let weights = &block.scores.as_flattened()[query..];
    let weights = &weights.as_chunks::<QUERIES>().0[keys.clone()];
    let mut decay = [0.0; ROWS];
    decay.copy_from_slice(&block.decay.as_flattened()[query..][..ROWS]);
    let out = &mut block.out[query * columns..][..ROWS * columns];
    for column in 0..columns {
        let values = &block.values[column * KEYS..][keys.clone()];
        if !finite {
            weigh_with_care(weights, values, &decay, &mut out[column..], columns);
            continue;
        }
        let mut sums = [simd.splat(0.0); ROWS];
        for (r, out) in out[column..].iter().step_by(columns).enumerate().take(ROWS) {
            sums[r] = simd.multiply(simd.load(out), simd.splat(decay[r]));
        }
        for (weight, value) in weights.iter().zip(values) {
            let value = simd.load(value);
            for r in 0..ROWS {
                sums[r] = simd.mul_add(simd.splat(weight[r]), value, sums[r]);
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
    weights: &[[f32; QUERIES]],
    values: &[Vector],
    decay: &[f32; ROWS],
    out: &mut [Vector],
    columns: usize,
) {
    for ((r, decay), out) in decay
        .iter()
        .enumerate()
        .zip(out.iter_mut().step_by(columns))
    {
        for out in out.iter_mut() {
            *out *= decay;
        }
        for (weight, value) in weights.iter().zip(values) {
            if weight[r] != 0.0 {
                for (out, value) in out.iter_mut().zip(value) {
                    *out += weight[r] * value;
                }
            }
        }
    }
}
