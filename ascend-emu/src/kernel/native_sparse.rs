//! Attention of native sparse attention over a paged cache, and the choice of blocks by its weights.
//!
//! Each row of each key head is a sequence of its own for the attention kernels, which all query heads of the key head
//! read at once and whose tokens a list names. The weights by which blocks are chosen are computed again, head by head,
//! in single precision; of equal scores the block that comes first is the better one.

use super::attention::{Attention, Listed};
use super::element_view::ElementView;
use super::kv::listed_rows::ListedRows;
use super::kv::{KeyValues, Storage};
use super::schedule;
use super::scratch::Scratch;
use super::sequence::Sequence;
use super::simd::{Kernel, Level, Simd, WIDTH, total};
use super::tensor::input::InputTensor;
use super::tensor::output::OutputTensor;
use super::tensor::strided::Sizes;
use super::token_rows::TokenRows;
use super::top_k::{Candidate, best};
use crate::host_memory::{HostMemoryExhausted, try_repeat, try_with_capacity};
use ascend_spec::ops::native_sparse::NsaAttention;
use ascend_spec::ops::nsa_compress_attention_infer::NsaCompressAttentionProblem;
use ascend_spec::ops::sparse_sequences::{SparseContents, SparseSequence, TokenLayout};
use rayon::prelude::*;

/// Rows that are computed at a time: their lists of tokens are in memory.
const ROWS: usize = 256;

/// The tensors of one call, with axes of heads.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Buffers<'a> {
    pub query: TokenRows<'a>,
    pub key: TokenRows<'a>,
    pub value: TokenRows<'a>,
    pub out: TokenRows<'a>,
}

/// A row of a sequence, and a key head.
#[derive(Clone, Copy, Debug)]
pub(crate) struct HeadRow {
    pub sequence: SparseSequence,
    pub row: usize,
    pub kv_head: usize,
}

impl HeadRow {
    /// All rows and key heads of a call.
    fn all<'a>(attention: &'a NsaAttention, contents: SparseContents<'a>) -> impl Iterator<Item = HeadRow> + use<'a> {
        let rows = attention.sequences.each(contents);
        let rows = rows.flat_map(|sequence| (0..sequence.queries).map(move |row| (sequence, row)));
        let kv_heads = attention.kv_heads;
        rows.flat_map(move |(sequence, row)| (0..kv_heads).map(move |kv_head| HeadRow { sequence, row, kv_head }))
    }

    /// Number of the row among those of the query tensor.
    pub(crate) fn number(&self) -> usize {
        self.sequence.first_query + self.row
    }

    /// The row on the axes of sequences and rows.
    fn place(&self, sizes: Sizes) -> (usize, usize) {
        let number = self.number();
        match sizes.batch {
            1 => (0, number),
            _ => (number / sizes.rows.max(1), number % sizes.rows.max(1)),
        }
    }
}

/// The tokens that each row of each key head attends to.
pub(crate) type Tokens<'t> = &'t dyn Fn(&HeadRow, &mut dyn FnMut(usize));

/// Attends, on the current rayon pool. Tokens of blocks that the cache does not have count as zeros.
///
/// # Errors
/// There is no host memory for the tokens of a row.
///
/// # Safety
///
/// The tensors are those of a call that `attention` resolves; their bytes are live, those of the output accessed by no
/// other thread, and all others written by none.
pub(crate) unsafe fn attend(
    attention: &NsaAttention,
    contents: SparseContents<'_>,
    buffers: &Buffers<'_>,
    tokens: Tokens<'_>,
) -> Result<(), HostMemoryExhausted> {
    let layout = attention.sequences.query.layout;
    let (out, sizes) = buffers.out.rows(layout);
    // SAFETY: the caller keeps this contract.
    let call = unsafe {
        Attention::listed(Listed {
            query: buffers.query.input(layout),
            query_rope: None,
            out: OutputTensor::new(buffers.out.base, &out, sizes, buffers.out.types(), None),
            lse: None,
            value_dim: attention.value_dim,
            group: attention.group(),
            scale: attention.scale,
            dtype: buffers.query.desc.dtype,
        })
    };
    let [keys, values] = [buffers.key, buffers.value].map(|cache| cache.rows(TokenLayout::PaBsnd));
    schedule::compute_listed(call, ROWS, HeadRow::all(attention, contents), |row| {
        let mut count = 0;
        tokens(&row, &mut |_| count += 1);
        let mut listed = try_with_capacity(count)?;
        tokens(&row, &mut |token| listed.push(attention.sequences.key(&contents, &row.sequence, token)));
        // SAFETY: the caller keeps this contract.
        let (key, value) = unsafe { (buffers.key.head(keys, row.kv_head), buffers.value.head(values, row.kv_head)) };
        let (sequence, storage) = (row.sequence.index, Storage::Listed(ListedRows::new(listed)));
        let kv = KeyValues { key, value, prefix: 0, sequence, storage };
        let (batch, number) = row.place(sizes);
        let place = (batch, row.kv_head * attention.group(), number..number + 1);
        Ok(Some(Sequence::listed(place, kv, None)))
    })
}

/// Chooses the blocks of each row and key head by the weights of compressed tokens, of which a row sees the first
/// `visible(row)`, on the current rayon pool.
///
/// # Errors
/// There is no host memory for the scores of a row.
///
/// # Safety
///
/// As for [`attend`]; `selected` are the elements of the output of blocks, which no other thread accesses.
pub(crate) unsafe fn select(
    problem: &NsaCompressAttentionProblem,
    contents: SparseContents<'_>,
    [query, key]: [TokenRows<'_>; 2],
    visible: &(dyn Fn(&HeadRow) -> usize + Sync),
    selected: ElementView,
) -> Result<(), HostMemoryExhausted> {
    let level = Level::chosen();
    let attention = &problem.attention;
    // SAFETY: the caller keeps this contract.
    let (query, key) = unsafe { (query.input(attention.sequences.query.layout), key.input(TokenLayout::PaBsnd)) };
    let mut rows = try_with_capacity(attention.sequences.query.total().saturating_mul(attention.kv_heads))?;
    rows.extend(HeadRow::all(attention, contents));
    // Elements of a view may share memory, so only one thread writes to one.
    let least = if selected.is_contiguous() { 1 } else { usize::MAX };
    rows.par_iter().with_min_len(least).try_for_each(|row| {
        let seen = visible(row);
        let mut scores = try_repeat(0.0, attention.group().saturating_mul(seen))?;
        Scratch::with(|scratch| {
            level.run(Scores { problem, contents, query: &query, key: &key, row, scores: &mut scores, scratch });
        });
        let weights = weights(&scores, seen)?;
        let blocks = problem.blocks(row.sequence.keys);
        let forced = NsaCompressAttentionProblem::forced(blocks);
        let mut all = try_with_capacity(blocks)?;
        all.extend((0..blocks).map(|block| {
            let parts = problem.parts(block).filter_map(|part| weights.get(part));
            // A score that is no number is the least, so that the forced ones are always among the best.
            let score = match forced.iter().any(|forced| forced.contains(&block)) {
                true => f32::MAX,
                false => Some(parts.sum()).filter(|score: &f32| !score.is_nan()).unwrap_or(f32::NEG_INFINITY),
            };
            Candidate::new(score, block)
        }));
        let chosen = best(all, attention.selected, true);
        let first = (row.number() * attention.kv_heads + row.kv_head) * attention.selected;
        for place in 0..attention.selected {
            let block = chosen.get(place).map_or(-1, |block| block.position() as i32);
            // SAFETY: the caller keeps this contract: the output has an element for each block of each row and key
            // head, and no other thread has this row, or there is one thread.
            unsafe { selected.write(first + place, block) };
        }
        Ok(())
    })
}

/// The sum of the weights of each of `seen` tokens over heads, whose scores stand one head after the other.
fn weights(scores: &[f32], seen: usize) -> Result<Vec<f32>, HostMemoryExhausted> {
    let mut weights = try_repeat(0.0, seen)?;
    for scores in scores.chunks(seen.max(1)) {
        let max = scores.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        let sum: f32 = scores.iter().map(|score| (score - max).exp()).sum();
        for (weight, score) in weights.iter_mut().zip(scores) {
            *weight += (score - max).exp() / sum;
        }
    }
    Ok(weights)
}

/// Scores the tokens that a row sees, for the query heads of its key head.
struct Scores<'a> {
    problem: &'a NsaCompressAttentionProblem,
    contents: SparseContents<'a>,
    query: &'a InputTensor,
    key: &'a InputTensor,
    row: &'a HeadRow,
    /// For each head the scores of all tokens.
    scores: &'a mut [f32],
    scratch: &'a mut Scratch,
}

impl Kernel for Scores<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let Scores { problem, contents, query, key, row, scores, scratch } = self;
        let (attention, ignored) = (&problem.attention, &mut simd.splat(0.0));
        let (group, dim) = (attention.group(), query.sizes().dim);
        let seen = scores.len() / group.max(1);
        let vectors = dim.div_ceil(WIDTH);
        let (queries, token) = scratch.vectors((group + 1) * vectors).split_at_mut(group * vectors);
        let (batch, number) = row.place(query.sizes());
        for (head, to) in queries.chunks_mut(vectors.max(1)).enumerate() {
            query.read(simd, (batch, row.kv_head * group + head, number), 0..dim, to, 1, ignored);
        }
        let scale = attention.scale as f32;
        for position in 0..seen {
            match attention.sequences.key(&contents, &row.sequence, position) {
                Some((outer, place)) => key.read(simd, (outer, row.kv_head, place), 0..dim, token, 1, ignored),
                None => token.fill([0.0; WIDTH]),
            }
            for (head, query) in queries.chunks(vectors.max(1)).enumerate() {
                let mut sum = simd.splat(0.0);
                for (query, token) in query.iter().zip(&*token) {
                    sum = simd.mul_add(simd.load(query), simd.load(token), sum);
                }
                let mut sums = [0.0; WIDTH];
                simd.store(sum, &mut sums);
                scores[head * seen + position] = total(&sums) * scale;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kernel::tests::halves;
    use ascend_spec::ops::native_sparse::Compression;
    use ascend_spec::ops::sparse_sequences::{Room, SparseSequences};
    use ascend_spec::{DType, TensorDesc};
    use half::f16;

    const ROWS: usize = 2;
    const KV_HEADS: usize = 2;
    const GROUP: usize = 3;
    const DIM: usize = 40;
    const PAGE: usize = 16;
    const TOKENS: usize = 60;
    const COUNT: usize = 6;

    fn problem() -> NsaCompressAttentionProblem {
        NsaCompressAttentionProblem {
            attention: NsaAttention {
                sequences: SparseSequences {
                    batch: 1,
                    query: Room { layout: TokenLayout::Tnd, outer: 1, rows: ROWS },
                    key: Room { layout: TokenLayout::PaBsnd, outer: 4, rows: PAGE },
                    columns: 4,
                    causal: true,
                },
                heads: KV_HEADS * GROUP,
                kv_heads: KV_HEADS,
                value_dim: DIM,
                selected: COUNT,
                scale: 0.5,
            },
            compression: Compression { block: 32, stride: 16 },
            select: 64,
        }
    }

    /// The scores of the blocks of a row and a key head, in double precision.
    fn defined(tensors: &[Vec<f16>; 2], row: usize, kv_head: usize) -> Vec<f64> {
        let mut weights = vec![0.0; TOKENS];
        for head in kv_head * GROUP..(kv_head + 1) * GROUP {
            let query = &tensors[0][(row * KV_HEADS * GROUP + head) * DIM..][..DIM];
            let score = |token: usize| {
                // Blocks are in the reverse order.
                let place = (3 - token / PAGE) * PAGE + token % PAGE;
                let key = &tensors[1][(place * KV_HEADS + kv_head) * DIM..][..DIM];
                let products = query.iter().zip(key).map(|(q, k)| q.to_f64() * k.to_f64());
                (0.5 * products.sum::<f64>()).exp()
            };
            let scores: Vec<f64> = (0..TOKENS).map(score).collect();
            let sum: f64 = scores.iter().sum();
            weights.iter_mut().zip(scores).for_each(|(weight, score)| *weight += score / sum);
        }
        // Blocks of 64 tokens, of which one compressed token begins every 16 and has 32.
        let score = |block: usize| {
            let parts = (0..4).flat_map(|m| (0..2).map(move |n| 4 * (block + 1) - m - n));
            parts.filter_map(|part| weights.get(part)).sum()
        };
        (0..(59 * 16 + 32usize).div_ceil(64)).map(score).collect()
    }

    #[test]
    fn every_instruction_set_selects_the_best_blocks_and_threads_change_none() {
        let tensors = [halves(1, ROWS * KV_HEADS * GROUP * DIM), halves(2, 4 * PAGE * KV_HEADS * DIM)];
        let desc = |dtype, shape: &[i64]| TensorDesc::contiguous(dtype, shape).unwrap();
        let sizes = [ROWS, KV_HEADS * GROUP, DIM, PAGE, KV_HEADS, COUNT].map(|size| size as i64);
        let [rows, heads, dim, page, kv_heads, count] = sizes;
        let descs = [desc(DType::Float16, &[rows, heads, dim]), desc(DType::Float16, &[4, page, kv_heads, dim])];
        let run = |level: Level, threads| {
            let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
            pool.install(|| {
                let mut selected = vec![77i32; ROWS * KV_HEADS * COUNT];
                let read = |at: usize| TokenRows { desc: &descs[at], base: tensors[at].as_ptr().cast_mut().cast() };
                let elements =
                    ElementView::new(selected.as_mut_ptr().cast(), desc(DType::Int32, &[rows, kv_heads, count]));
                let numbers = [vec![rows], vec![TOKENS as i64], vec![3, 2, 1, 0]];
                let contents = SparseContents::of(&numbers);
                // SAFETY: the tensors are those of the problem, and live.
                level
                    .with(|| unsafe { select(&problem(), contents, [read(0), read(1)], &|_| TOKENS, elements) })
                    .unwrap();
                selected
            })
        };
        for level in Level::all() {
            let got = run(level, 1);
            assert_eq!(run(level, 4), got, "{}", level.name());
            for (at, got) in got.chunks(COUNT).enumerate() {
                let scores = defined(&tensors, at / KV_HEADS, at % KV_HEADS);
                let last = scores.len() - 1;
                assert_eq!(got[..3], [0, last as i32 - 1, last as i32], "{}", level.name());
                let mut others: Vec<usize> = (1..last - 1).collect();
                others.sort_by(|&a, &b| scores[b].total_cmp(&scores[a]));
                for (&got, &want) in got[3..].iter().zip(&others) {
                    assert!((scores[got as usize] - scores[want]).abs() < 1e-5, "{}: {got}, {want}", level.name());
                }
            }
        }
    }
}
