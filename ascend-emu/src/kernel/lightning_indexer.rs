//! Choosing the keys of sparse attention, as the operators LightningIndexer and QuantLightningIndexer do: the lightning
//! indexer of DeepSeek-V3.2.
//!
//! The score of a key is `Σ w max(0, q · k)` over the heads of a row. A task owns a block of rows, whose heads are
//! the lanes of the prefill kernel's products, and passes over the keys in tiles; ReLU, weights and the sum over heads
//! follow while the products are in the L1 cache. Then each row selects the best keys of ranges of keys, then those of
//! all, in linear time. Of equal scores the key that comes first is the better one, so that ranges change no choice.
//!
//! Scores are in single precision and summed in the order of dimensions, then of heads: they depend on the call and the
//! instruction set alone, not on tiles or threads. Quantised heads have their scale in the weight, and keys theirs
//! after the sum. With INT8, products are divided by 1024, and weights and products rounded to FLOAT16.

use super::TILE_KEYS;
use super::element_view::ElementView;
use super::kv::tile_rows::StridedRows;
use super::merge::Number;
use super::prefill::{LANE_GROUPS, score_tile};
use super::scratch::{Scratch, take};
use super::simd::{Kernel, Level, Simd, Vector, WIDTH, total};
use super::tensor::Element as _;
use super::tensor::input::{InPlaceElement, InputTensor};
use super::tile_load::{Destination, SLICE, tile_index, tile_vectors};
use super::token_rows::TokenRows;
use super::top_k::{Candidate, best, keep_best};
use crate::host_memory::{HostMemoryExhausted, try_collect, try_repeat, try_with_capacity};
use ascend_spec::DType;
use ascend_spec::ops::lightning_indexer::IndexerProblem;
use ascend_spec::ops::sparse_sequences::{SparseContents, SparseSequence};
use half::{bf16, f16};
use rayon::prelude::*;
use std::ops::Range;

/// Most lane groups of a block of rows: as many queries as a query block of the prefill kernel.
const BLOCK_GROUPS: usize = 24;

/// What products of INT8 are multiplied by before they are rounded.
const INT8_UNIT: f32 = 1.0 / 1024.0;

/// Keys that a thread scores at a time.
const CHUNK: usize = 16 * TILE_KEYS;

/// Keys that a thread selects from at a time, where threads share those of a row.
const SELECTED: usize = 8 * 1024;

/// Blocks for each thread below which threads share the keys of a block too, so that none waits for the last one.
const FEW_BLOCKS: usize = 4;

/// The tensors of one call.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Buffers<'a> {
    pub query: TokenRows<'a>,
    pub key: TokenRows<'a>,
    pub weights: TokenRows<'a>,
    pub indices: ElementView,
    /// `None` where no scores are written.
    pub values: Option<ElementView>,
    /// Scales of the heads of rows and of keys, where these are quantised.
    pub scales: Option<[TokenRows<'a>; 2]>,
}

/// Chooses the keys of all rows, on the current rayon pool. Keys of blocks that the cache does not have count as zeros.
///
/// # Errors
/// There is no host memory for the scores of a block of rows.
///
/// # Safety
///
/// The tensors are those of a call that the problem resolves; their bytes, as the problem counts those that a launch
/// touches, are live, those of the outputs accessed by no other thread, and all others written by none.
pub(crate) unsafe fn run(
    problem: &IndexerProblem,
    contents: SparseContents<'_>,
    buffers: &Buffers<'_>,
) -> Result<(), HostMemoryExhausted> {
    let layout = problem.sequences.query.layout;
    // SAFETY: the caller keeps this contract.
    let call = unsafe {
        IndexerRun {
            level: Level::chosen(),
            problem,
            contents,
            query: buffers.query.input(layout),
            key: buffers.key.input(problem.sequences.key.layout),
            weights: buffers.weights.input(layout),
            scales: buffers.scales.map(|[query, key]| [query.input(layout), key.input(problem.sequences.key.layout)]),
            rounds: buffers.query.desc.dtype == DType::Int8,
            groups: problem.heads.div_ceil(WIDTH),
        }
    };
    let most = (BLOCK_GROUPS / call.groups.max(1)).max(1);
    let blocks = |sequence: SparseSequence| {
        // Of nearly the same number of rows.
        let rows = sequence.written.div_ceil(sequence.written.div_ceil(most).max(1));
        let firsts = (0..sequence.written).step_by(rows.max(1));
        firsts.map(move |first| RowBlock { sequence, rows: first..sequence.written.min(first + rows) })
    };
    let count: usize = (problem.sequences.each(contents)).map(|sequence| sequence.written.div_ceil(most)).sum();
    let mut all = try_with_capacity(count)?;
    all.extend(problem.sequences.each(contents).flat_map(blocks));
    let (dtype, outputs) = (buffers.query.desc.dtype, (buffers.indices, buffers.values));
    // Elements of a view may share memory, so only one thread writes to one.
    let values = buffers.values.as_ref();
    let apart = buffers.indices.is_contiguous() && values.is_none_or(ElementView::is_contiguous);
    let least = if apart { 1 } else { usize::MAX };
    let parallel = all.len() < FEW_BLOCKS * rayon::current_num_threads();
    let blocks = all.par_iter().with_min_len(least);
    blocks.try_for_each(|block| {
        let chosen = call.choose(block, parallel)?;
        for (row, chosen) in block.rows.clone().zip(chosen) {
            let row = block.sequence.first_query + row;
            // SAFETY: the caller keeps this contract; no other thread has this row, or there is one thread. The dtype
            // of the scores is the query's.
            unsafe {
                match dtype {
                    DType::Float16 => write::<f16>(problem, row, &chosen, &outputs),
                    _ => write::<bf16>(problem, row, &chosen, &outputs),
                }
            }
        }
        Ok(())
    })
}

/// Writes the chosen keys of a row.
///
/// # Safety
///
/// As for [`run`]; the scores have elements `T`, and no other thread has the row.
unsafe fn write<T: Number>(
    problem: &IndexerProblem,
    row: usize,
    chosen: &[Candidate],
    (indices, values): &(ElementView, Option<ElementView>),
) {
    for place in 0..problem.count {
        let candidate = chosen.get(place);
        let element = row * problem.count + place;
        let position = candidate.map_or(-1, |candidate| candidate.position() as i32);
        // SAFETY: the caller keeps this contract: the outputs have an element for each key of each row.
        unsafe {
            indices.write(element, position);
            if let Some(values) = values {
                let score = candidate.map_or(f32::NEG_INFINITY, |candidate| candidate.score());
                values.write(element, T::narrow(score));
            }
        }
    }
}

/// Rows of a sequence.
struct RowBlock {
    sequence: SparseSequence,
    rows: Range<usize>,
}

/// One call.
struct IndexerRun<'a> {
    level: Level,
    problem: &'a IndexerProblem,
    contents: SparseContents<'a>,
    query: InputTensor,
    key: InputTensor,
    weights: InputTensor,
    /// Scales of the heads of rows and of keys.
    scales: Option<[InputTensor; 2]>,
    /// Whether weights and products are rounded to FLOAT16.
    rounds: bool,
    /// Lane groups of a row.
    groups: usize,
}

impl IndexerRun<'_> {
    /// Chooses the keys of each row of a block. With `parallel`, threads share the keys.
    fn choose(&self, block: &RowBlock, parallel: bool) -> Result<Vec<Vec<Candidate>>, HostMemoryExhausted> {
        let candidates = |row| self.problem.sequences.candidates(&block.sequence, row);
        let keys = block.rows.clone().map(candidates).max().unwrap_or(0);
        let rows = block.rows.len();
        let groups = (rows * self.groups).next_multiple_of(LANE_GROUPS);
        let vectors = self.query.sizes().dim.div_ceil(WIDTH);
        let mut queries = try_repeat([0.0; WIDTH], groups * (vectors * WIDTH + 1))?;
        let (packed, weights) = queries.split_at_mut(groups * vectors * WIDTH);
        let chunks = keys.div_ceil(CHUNK);
        let mut scores = try_repeat(0.0, chunks.saturating_mul(rows * CHUNK))?;
        if keys > 0 {
            self.level.run(PackQueries { call: self, block, vectors, packed: &mut *packed, weights: &mut *weights });
        }
        let score = |(chunk, scores): (usize, &mut [f32])| {
            let first = chunk * CHUNK;
            Scratch::with(|scratch| {
                self.level.run(ScoreKeys {
                    call: self,
                    block,
                    vectors,
                    queries: packed,
                    weights,
                    keys: first..keys.min(first + CHUNK),
                    scores,
                    scratch,
                });
            });
        };
        match parallel {
            true => {
                let chunks = scores.par_chunks_mut(rows * CHUNK);
                chunks.enumerate().for_each(score);
            }
            false => scores.chunks_mut(rows * CHUNK).enumerate().for_each(score),
        }
        let select = |(number, row): (usize, usize)| {
            let score = |key: usize| scores[(key / CHUNK * rows + number) * CHUNK + key % CHUNK];
            let (keys, count) = (candidates(row), self.problem.count);
            let part = |first: usize| {
                let all = first..keys.min(first + SELECTED);
                let mut all = try_collect(all.map(|key| Candidate::new(score(key), key)))?;
                keep_best(&mut all, count);
                Ok(all)
            };
            let firsts = (0..keys.div_ceil(SELECTED)).into_par_iter().with_min_len(if parallel { 1 } else { keys });
            let parts: Vec<_> = firsts.map(|part_of| part(part_of * SELECTED)).collect::<Result<_, _>>()?;
            let mut all = try_with_capacity(parts.iter().map(Vec::len).sum())?;
            parts.iter().for_each(|part| all.extend_from_slice(part));
            Ok(best(all, count, self.problem.best_first))
        };
        match parallel {
            true => block.rows.clone().into_par_iter().enumerate().map(select).collect(),
            false => block.rows.clone().enumerate().map(select).collect(),
        }
    }
}

/// Widens queries and weights of a block, with one head in each lane. Each row begins with a lane group.
struct PackQueries<'a> {
    call: &'a IndexerRun<'a>,
    block: &'a RowBlock,
    /// Vectors of a query.
    vectors: usize,
    packed: &'a mut [Vector],
    weights: &'a mut [Vector],
}

impl Kernel for PackQueries<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let PackQueries { call, block, vectors, packed, weights } = self;
        let ignored = &mut simd.splat(0.0);
        let sizes = call.query.sizes();
        for (number, row) in block.rows.clone().enumerate() {
            let row = block.sequence.first_query + row;
            let (batch, row) = match sizes.batch {
                1 => (0, row),
                _ => (row / sizes.rows.max(1), row % sizes.rows.max(1)),
            };
            let weights = &mut weights[number * call.groups..][..call.groups];
            call.weights.read(simd, (batch, 0, row), 0..sizes.heads, weights, 1, ignored);
            if let Some([scales, _]) = &call.scales {
                for (group, weight) in weights.iter_mut().enumerate() {
                    let heads = group * WIDTH..sizes.heads.min((group + 1) * WIDTH);
                    let scale = &mut [[0.0; WIDTH]];
                    scales.read(simd, (batch, 0, row), heads, scale, 1, ignored);
                    let scaled = simd.multiply(simd.load(weight), simd.load(&scale[0]));
                    simd.store(call.rounded(simd, scaled), weight);
                }
            }
            for group in 0..call.groups {
                let first = (number * call.groups + group) * vectors * WIDTH;
                let packed = &mut packed[first..][..vectors * WIDTH];
                let heads = (sizes.heads - group * WIDTH).min(WIDTH);
                for (i, packed) in packed.as_chunks_mut::<WIDTH>().0.iter_mut().enumerate() {
                    let mut lanes = [[0.0; WIDTH]; WIDTH];
                    let columns = i * WIDTH..sizes.dim.min((i + 1) * WIDTH);
                    for (lane, to) in lanes[..heads].iter_mut().enumerate() {
                        let place = (batch, group * WIDTH + lane, row);
                        let to = std::slice::from_mut(to);
                        call.query.read(simd, place, columns.clone(), to, 1, ignored);
                    }
                    *packed = simd.transpose(&lanes);
                }
            }
        }
    }
}

/// Scores some keys for the rows of a block.
struct ScoreKeys<'a> {
    call: &'a IndexerRun<'a>,
    block: &'a RowBlock,
    /// Vectors of a key.
    vectors: usize,
    queries: &'a [Vector],
    weights: &'a [Vector],
    keys: Range<usize>,
    /// For each row the scores of [`CHUNK`] keys.
    scores: &'a mut [f32],
    scratch: &'a mut Scratch,
}

impl Kernel for ScoreKeys<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let ScoreKeys { call, block, vectors, queries, weights, keys, scores, scratch } = self;
        let rows = block.rows.len();
        let sizes = [tile_vectors(vectors), TILE_KEYS * LANE_GROUPS, rows * TILE_KEYS];
        let mut rest = scratch.vectors(sizes.iter().sum());
        let [tile, products, sums] = sizes.map(|size| take(&mut rest, size));
        let of_tile = LANE_GROUPS * vectors * WIDTH;
        for first in keys.clone().step_by(TILE_KEYS) {
            let count = (keys.end - first).min(TILE_KEYS);
            call.load(simd, block, first..first + count, tile);
            sums.fill([0.0; WIDTH]);
            for (number, queries) in queries.chunks(of_tile).enumerate() {
                let group = number * LANE_GROUPS;
                let groups = (rows * call.groups - group).min(LANE_GROUPS);
                let visible: [_; LANE_GROUPS] = std::array::from_fn(|_| 0..count);
                score_tile(simd, [queries, tile], vectors, &visible[..groups], products);
                for (lane_group, weight) in weights[group..][..groups].iter().enumerate() {
                    let weight = simd.load(weight);
                    let row = (group + lane_group) / call.groups;
                    let sums = &mut sums[row * TILE_KEYS..][..count];
                    let products = products[lane_group..].iter().step_by(LANE_GROUPS);
                    for (sum, product) in sums.iter_mut().zip(products) {
                        let positive = simd.larger(simd.load(product), simd.splat(0.0));
                        let positive = match call.rounds {
                            true => call.rounded(simd, simd.multiply(positive, simd.splat(INT8_UNIT))),
                            false => positive,
                        };
                        simd.store(simd.mul_add(positive, weight, simd.load(sum)), sum);
                    }
                }
            }
            let mut scales = [1.0; TILE_KEYS];
            if let Some([_, of_keys]) = &call.scales {
                for (scale, key) in scales.iter_mut().zip(first..first + count) {
                    *scale = call.key_scale(simd, of_keys, block, key);
                }
            }
            for (scores, sums) in scores.chunks_mut(CHUNK).zip(sums.chunks(TILE_KEYS)) {
                let scores = &mut scores[first - keys.start..][..count];
                for ((score, sum), scale) in scores.iter_mut().zip(sums).zip(&scales) {
                    *score = total(sum) * scale;
                }
            }
        }
    }
}

impl IndexerRun<'_> {
    /// The numbers rounded to FLOAT16, as INT8 calls keep them, or as they are.
    #[inline(always)]
    fn rounded<S: Simd>(&self, simd: S, numbers: S::Register) -> S::Register {
        match self.rounds {
            true => f16::round(simd, numbers),
            false => numbers,
        }
    }

    /// The scale of a key of a block's sequence; 1 where the cache does not have its block.
    #[inline(always)]
    fn key_scale<S: Simd>(&self, simd: S, scales: &InputTensor, block: &RowBlock, key: usize) -> f32 {
        let sequences = &self.problem.sequences;
        let place = sequences.key(&self.contents, &block.sequence, key);
        place.map_or(1.0, |(outer, row)| {
            let scale = &mut [[0.0; WIDTH]];
            scales.read(simd, (outer, 0, row), 0..1, scale, 1, &mut simd.splat(0.0));
            scale[0][0]
        })
    }

    /// Loads keys of a block's sequence into a tile.
    #[inline(always)]
    fn load<S: Simd>(&self, simd: S, block: &RowBlock, keys: Range<usize>, tile: &mut [Vector]) {
        match &self.key {
            InputTensor::F16(_) => self.load_as::<f16, S>(simd, block, keys, tile),
            InputTensor::Bf16(_) => self.load_as::<bf16, S>(simd, block, keys, tile),
            _ => self.load_as::<i8, S>(simd, block, keys, tile),
        }
    }

    /// Loads keys, those of elements `T` in place.
    #[inline(always)]
    fn load_as<T: InPlaceElement, S: Simd>(&self, simd: S, block: &RowBlock, keys: Range<usize>, tile: &mut [Vector]) {
        let Self { problem, key, .. } = self;
        let (dim, ignored) = (key.sizes().dim, &mut simd.splat(0.0));
        let mut done = 0;
        while done < keys.len() {
            let position = keys.start + done;
            let count = problem.sequences.run(position).min(keys.len() - done);
            let place = problem.sequences.key(&self.contents, &block.sequence, position);
            let rows = place.zip(T::of(key)).and_then(|((outer, row), key)| {
                let (first, pitch) = key.rows_in_place((outer, 0, row), count)?;
                // SAFETY: the rows exist, as `rows_in_place` checked, and may be read by the contract of their tensor.
                Some(unsafe { StridedRows::<T>::new(first, pitch, count, dim / WIDTH) })
            });
            // The operator's heads are one slice.
            let to = &mut tile[tile_index(done, 0)..];
            done += match (rows, place) {
                (Some(rows), _) => {
                    let mut to = Destination::Tile { tile: to, first: 0, row: &mut [] };
                    to.widen(simd, rows, dim / WIDTH, (0, 0), None);
                    count
                }
                (None, Some((outer, row))) => {
                    key.read(simd, (outer, 0, row), 0..dim, &mut to[..dim.div_ceil(WIDTH).min(SLICE)], 1, ignored);
                    1
                }
                (None, None) => {
                    to[..dim.div_ceil(WIDTH).min(SLICE)].fill([0.0; WIDTH]);
                    1
                }
            };
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kernel::tests::halves;
    use ascend_spec::TensorDesc;
    use ascend_spec::ops::sparse_sequences::{Room, SparseSequences, TokenLayout};

    const DIM: usize = 128;

    #[test]
    fn every_instruction_set_chooses_the_best_and_threads_change_no_bit() {
        for (heads, rows, keys, count) in [(1, 3, 40, 7), (20, 5, 3000, 64), (64, 7, 200, 256)] {
            let [query, key, weights] =
                [(1, rows * heads * DIM), (2, keys * DIM), (3, rows * heads)].map(|(seed, count)| halves(seed, count));
            let room = |rows| Room { layout: TokenLayout::Tnd, outer: 1, rows };
            let problem = IndexerProblem {
                sequences: SparseSequences { batch: 1, query: room(rows), key: room(keys), columns: 0, causal: true },
                heads,
                count,
                values: true,
                best_first: true,
                overruns: false,
            };
            let desc = |dtype, shape: &[usize]| {
                let shape: Vec<i64> = shape.iter().map(|&size| size as i64).collect();
                TensorDesc::contiguous(dtype, &shape).unwrap()
            };
            let descs = [
                desc(DType::Float16, &[rows, heads, DIM]),
                desc(DType::Float16, &[keys, 1, DIM]),
                desc(DType::Float16, &[rows, heads]),
                desc(DType::Int32, &[rows, 1, count]),
                desc(DType::Float16, &[rows, 1, count]),
            ];
            let run = |level: Level, threads: usize| {
                let mut indices = vec![7i32; rows * count];
                let mut values = vec![f16::ONE; rows * count];
                let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
                let (q, k) = ([rows as i64], [keys as i64]);
                let contents = SparseContents { query_lengths: &q, key_lengths: &k, block_table: &[] };
                let ran = pool.install(|| {
                    let source = |desc, data: &[f16]| TokenRows { desc, base: data.as_ptr().cast_mut().cast() };
                    let buffers = Buffers {
                        query: source(&descs[0], &query),
                        key: source(&descs[1], &key),
                        weights: source(&descs[2], &weights),
                        indices: ElementView::new(indices.as_mut_ptr().cast(), descs[3]),
                        values: Some(ElementView::new(values.as_mut_ptr().cast(), descs[4])),
                        scales: None,
                    };
                    // SAFETY: the tensors are those of the problem, and live.
                    level.with(|| unsafe { super::run(&problem, contents, &buffers) })
                });
                ran.unwrap();
                (indices, values)
            };
            for level in Level::all() {
                let (indices, values) = run(level, 1);
                assert_eq!(run(level, 4), (indices.clone(), values.clone()), "{}", level.name());
                for row in 0..rows {
                    let candidates = keys + row + 1 - rows;
                    let score = |at: usize| -> f64 {
                        let of_head = |head: usize| {
                            let query = &query[(row * heads + head) * DIM..][..DIM];
                            let pairs = query.iter().zip(&key[at * DIM..][..DIM]);
                            let dot: f64 = pairs.map(|(q, k)| q.to_f64() * k.to_f64()).sum();
                            weights[row * heads + head].to_f64() * dot.max(0.0)
                        };
                        (0..heads).map(of_head).sum()
                    };
                    let mut all: Vec<f64> = (0..candidates).map(score).collect();
                    let got = &indices[row * count..][..count];
                    let written = count.min(candidates);
                    assert!(got[written..].iter().all(|&index| index == -1));
                    let mut seen = std::collections::BTreeSet::new();
                    let got: Vec<f64> = got[..written]
                        .iter()
                        .map(|&index| {
                            assert!(seen.insert(index), "{index} twice");
                            all[usize::try_from(index).unwrap()]
                        })
                        .collect();
                    all.sort_by(|a, b| b.total_cmp(a));
                    let of_row = &values[row * count..];
                    for ((got, want), value) in got.iter().zip(&all).zip(of_row) {
                        assert!((got - want).abs() <= 1e-4, "{got} is not {want}");
                        assert!((value.to_f64() - got).abs() <= 1e-2 + 1e-3 * got.abs());
                    }
                }
            }
        }
    }
}
