//! Attention to chosen keys, as the operators SparseFlashAttention and KvQuantSparseFlashAttention compute it.
//!
//! Each query row is a sequence of its own for the attention kernels, whose keys are in the order of the row's list and
//! which is read by all heads at once. Loading tiles, products, the online softmax, splits along the keys and threads
//! are those of any other call, and so a result depends on the call and the instruction set alone. Packed rows are
//! dequantised where a tile is loaded.

use super::attention::{Attention, Listed};
use super::element_view::ElementView;
use super::kv::listed_rows::ListedRows;
use super::kv::{KeyValues, KvTensor, Storage};
use super::schedule;
use super::sequence::Sequence;
use super::tensor::input::InputTensor;
use super::tensor::output::OutputTensor;
use super::tensor::strided::{Sizes, WriteTensor};
use super::token_rows::TokenRows;
use crate::host_memory::{HostMemoryExhausted, try_collect, try_with_capacity};
use ascend_spec::attention_problem::Rows;
use ascend_spec::ops::sparse_flash_attention::SparseFlashProblem;
use ascend_spec::ops::sparse_sequences::{SparseContents, SparseSequence};
use ascend_spec::{TensorDesc, View};

/// Rows that are computed at a time: their lists of keys are in memory.
const ROWS: usize = 256;

/// The tensors of one call.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Buffers<'a> {
    pub query: TokenRows<'a>,
    /// `None` where `query` has the rotary parts too.
    pub query_rope: Option<TokenRows<'a>>,
    pub key: TokenRows<'a>,
    /// `None` where `key` has packed rows.
    pub key_rope: Option<TokenRows<'a>>,
    pub out: TokenRows<'a>,
    /// Maximum and sum of each row, where they are written.
    pub softmax: Option<[TokenRows<'a>; 2]>,
    /// One more logit for each head, of FLOAT.
    pub sinks: Option<ElementView>,
    /// The lists of all rows, one after the other.
    pub lists: &'a [i64],
}

/// Computes all rows, on the current rayon pool. Keys of blocks that the cache does not have count as zeros.
///
/// # Errors
/// There is no host memory for the keys of a row.
///
/// # Safety
///
/// The tensors are those of a call that the problem resolves; their bytes, as the problem counts those that a launch
/// touches, are live, those of the outputs accessed by no other thread, and all others written by none.
pub(crate) unsafe fn run(
    problem: &SparseFlashProblem,
    contents: SparseContents<'_>,
    buffers: &Buffers<'_>,
) -> Result<(), HostMemoryExhausted> {
    let [of_query, of_key] = [problem.sequences.query, problem.sequences.key].map(|room| room.layout);
    let (out, sizes) = buffers.out.rows(of_query);
    // SAFETY: the caller keeps this contract.
    let (mut attention, key, rope) = unsafe {
        let latent = Listed {
            query: buffers.query.input(of_query),
            query_rope: buffers.query_rope.map(|rope| rope.input(of_query)),
            out: OutputTensor::new(buffers.out.base, &out, sizes, buffers.out.types(), None),
            lse: None,
            value_dim: SparseFlashProblem::DIM,
            group: sizes.heads,
            scale: problem.scale,
            dtype: buffers.query.desc.dtype,
        };
        let rope = buffers.key_rope.map(|rope| rope.input(of_key));
        let key = match rope {
            Some(_) => buffers.key.input(of_key),
            None => buffers.key.quantised_rows(of_key, buffers.query.desc.dtype),
        };
        (Attention::listed(latent), key, rope)
    };
    if let Some(sinks) = buffers.sinks {
        // SAFETY: the caller keeps this contract: there is a logit for each head.
        attention.sink = Some(try_collect((0..sizes.heads).map(|head| unsafe { sinks.read::<f32>(head) }))?);
    }
    let each = problem.sequences.each(contents);
    let rows = each.flat_map(|sequence| (0..sequence.written).map(move |row| (sequence, row)));
    schedule::compute_listed(attention, ROWS, rows, |(sequence, row)| {
        let storage = Storage::Listed(listed(problem, &contents, buffers.lists, (&sequence, row))?);
        let number = sequence.first_query + row;
        let place = match sizes.batch {
            1 => (0, number),
            _ => (number / sizes.rows.max(1), number % sizes.rows.max(1)),
        };
        let softmax = (buffers.softmax.as_ref())
            // SAFETY: the caller keeps this contract.
            .map(|outputs| outputs.map(|output| unsafe { softmax_row(&output, place) }));
        let kv = latent_rows(key, rope, storage);
        let (batch, row) = place;
        let rows = (batch, 0, row..row + 1);
        Ok(Some(Sequence::listed(rows, kv, softmax)))
    })
}

/// Where the keys are that a row reads.
fn listed(
    problem: &SparseFlashProblem,
    contents: &SparseContents<'_>,
    lists: &[i64],
    (sequence, row): (&SparseSequence, usize),
) -> Result<ListedRows, HostMemoryExhausted> {
    let candidates = problem.sequences.candidates(sequence, row);
    let first = (sequence.first_query + row).saturating_mul(problem.entries);
    let list = lists.get(first..).unwrap_or_default();
    let list = &list[..list.len().min(problem.entries)];
    let chosen = problem.chosen(list, candidates);
    let mut rows = try_with_capacity(chosen.clone().map(|keys| keys.len()).sum())?;
    rows.extend(chosen.flatten().map(|key| problem.sequences.key(contents, sequence, key)));
    Ok(ListedRows::new(rows))
}

/// The keys of a row, whose beginning are the values.
fn latent_rows(key: InputTensor, rope: Option<InputTensor>, storage: Storage) -> KeyValues {
    let tensor = |dim, rope| KvTensor { dim, own: key, prefix: InputTensor::Absent, rope };
    KeyValues {
        key: tensor(key.sizes().dim, rope),
        value: tensor(SparseFlashProblem::DIM, None),
        prefix: 0,
        sequence: 0,
        storage,
    }
}

/// The numbers of one row, a head each, in a tensor `[B, 1, S1, N1]` or `[1, T1, N1]`.
///
/// # Safety
///
/// Every element may be written as long as the value is used, and is accessed by no one else.
unsafe fn softmax_row(output: &TokenRows<'_>, (batch, row): (usize, usize)) -> WriteTensor<f32> {
    let TensorDesc { shape, strides, .. } = output.desc;
    let axis = |from_end: usize| shape.rank().wrapping_sub(from_end);
    let stride = |from_end: usize| strides.get(axis(from_end)).copied().unwrap_or(0);
    let heads = shape.last().map_or(0, |&heads| heads.max(0) as usize);
    let step = |index: usize, stride: i64| (index as i64).saturating_mul(stride);
    let rows = Rows {
        view: View {
            offset: output.desc.offset + step(batch, stride(4)) + step(row, stride(2)),
            batch: 0,
            head: stride(1),
            row: 0,
            dim: 1,
        },
        lanes: 0,
        dtype: output.desc.dtype,
    };
    let sizes = Sizes { batch: 1, heads, rows: 1, dim: 1 };
    // SAFETY: the caller's promise.
    unsafe { WriteTensor::new(output.base, &rows, sizes) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kernel::simd::Level;
    use crate::kernel::tests::halves;
    use ascend_spec::DType;
    use ascend_spec::ops::sparse_sequences::{Room, SparseSequences, TokenLayout};
    use half::f16;

    const DIM: usize = SparseFlashProblem::DIM;
    const ROPE: usize = SparseFlashProblem::ROPE_DIM;

    /// One sequence of rows whose lists are strides through the blocks.
    struct Call {
        problem: SparseFlashProblem,
        keys: usize,
        tensors: [Vec<f16>; 4],
        lists: Vec<i64>,
        sinks: Option<Vec<f32>>,
    }

    impl Call {
        fn new([heads, rows, keys, entries, block]: [usize; 5]) -> Self {
            let room = |rows| Room { layout: TokenLayout::Tnd, outer: 1, rows };
            let blocks = keys.div_ceil(block);
            let list = |row| (0..entries).map(move |place| ((place * 7 + row) % blocks) as i64);
            Call {
                problem: SparseFlashProblem {
                    sequences: SparseSequences {
                        batch: 1,
                        query: room(rows),
                        key: room(keys),
                        columns: 0,
                        causal: true,
                    },
                    heads,
                    entries,
                    block,
                    scale: 0.1,
                    softmax: true,
                    overruns: false,
                },
                keys,
                tensors: [
                    halves(1, rows * heads * DIM),
                    halves(2, rows * heads * ROPE),
                    halves(3, keys * DIM),
                    halves(4, keys * ROPE),
                ],
                lists: (0..rows).flat_map(list).collect(),
                sinks: None,
            }
        }

        fn rows(&self) -> usize {
            self.problem.sequences.query.rows
        }

        /// Attention, maxima and sums.
        fn run(&self, level: Level, threads: usize) -> (Vec<f16>, [Vec<f32>; 2]) {
            let (rows, heads) = (self.rows(), self.problem.heads);
            let desc = |dtype, shape: &[usize]| {
                let shape: Vec<i64> = shape.iter().map(|&size| size as i64).collect();
                TensorDesc::contiguous(dtype, &shape).unwrap()
            };
            let half = DType::Float16;
            let descs = [
                desc(half, &[rows, heads, DIM]),
                desc(half, &[rows, heads, ROPE]),
                desc(half, &[self.keys, 1, DIM]),
                desc(half, &[self.keys, 1, ROPE]),
                desc(DType::Float, &[1, rows, heads]),
                desc(DType::Float, &[heads]),
            ];
            let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build();
            pool.unwrap().install(|| {
                let mut out = vec![f16::INFINITY; rows * heads * DIM];
                let mut softmax = [(); 2].map(|()| vec![f32::INFINITY; rows * heads]);
                let read = |index: usize| TokenRows {
                    desc: &descs[index],
                    base: self.tensors[index].as_ptr().cast_mut().cast(),
                };
                let buffers = Buffers {
                    query: read(0),
                    query_rope: Some(read(1)),
                    key: read(2),
                    key_rope: Some(read(3)),
                    out: TokenRows { desc: &descs[0], base: out.as_mut_ptr().cast() },
                    softmax: Some(
                        softmax
                            .each_mut()
                            .map(|numbers| TokenRows { desc: &descs[4], base: numbers.as_mut_ptr().cast() }),
                    ),
                    sinks: (self.sinks.as_ref())
                        .map(|sinks| ElementView::new(sinks.as_ptr().cast_mut().cast(), descs[5])),
                    lists: &self.lists,
                };
                let numbers = [vec![rows as i64], vec![self.keys as i64], Vec::new()];
                let contents = SparseContents::of(&numbers);
                // SAFETY: the tensors are those of the problem, and live.
                level.with(|| unsafe { super::run(&self.problem, contents, &buffers) }).unwrap();
                (out, softmax)
            })
        }

        /// The keys that a row reads, by the definition.
        fn chosen(&self, row: usize) -> Vec<usize> {
            let (block, entries) = (self.problem.block, self.problem.entries);
            let candidates = self.keys + row + 1 - self.rows();
            let list = &self.lists[row * entries..][..entries];
            let read = list.iter().take(candidates.div_ceil(block));
            let keys = read.flat_map(|&entry| (0..block).map(move |key| entry as usize * block + key));
            keys.filter(|&key| key < candidates).collect()
        }
    }

    /// What the definition says of a row of a head: its maximum, its sum and its output.
    fn defined(call: &Call, query: usize) -> (f64, f64, Vec<f64>) {
        let exact = |tensor: usize, row: usize, dim: usize| {
            let elements = &call.tensors[tensor][row * dim..][..dim];
            elements.iter().map(|element| element.to_f64())
        };
        let dot = |tensors: [usize; 2], rows: [usize; 2], dim| -> f64 {
            let pairs = exact(tensors[0], rows[0], dim).zip(exact(tensors[1], rows[1], dim));
            pairs.map(|(a, b)| a * b).sum()
        };
        let keys = call.chosen(query / call.problem.heads);
        let score = |&key: &usize| 0.1 * (dot([0, 2], [query, key], DIM) + dot([1, 3], [query, key], ROPE));
        let scores: Vec<f64> = keys.iter().map(score).collect();
        let sink = call.sinks.as_ref().map(|sinks| f64::from(sinks[query % call.problem.heads]));
        let logits = || scores.iter().copied().chain(sink);
        let max = logits().fold(f64::NEG_INFINITY, f64::max);
        let sum: f64 = logits().map(|score| (score - max).exp()).sum();
        let mut out = vec![0.0; DIM];
        for (key, score) in keys.iter().zip(&scores) {
            let weight = (score - max).exp() / sum;
            for (out, value) in out.iter_mut().zip(exact(2, *key, DIM)) {
                *out += weight * value;
            }
        }
        (max, sum, out)
    }

    #[test]
    fn every_instruction_set_attends_to_the_lists_and_threads_change_no_bit() {
        let sizes = [[1, 3, 40, 40, 1], [2, 2, 1500, 700, 2], [16, 5, 120, 13, 8], [128, 1, 800, 700, 1]];
        for (sizes, has_sinks) in sizes.into_iter().flat_map(|sizes| [(sizes, false), (sizes, true)]) {
            let mut call = Call::new(sizes);
            // Some are the largest logit of their row.
            call.sinks = has_sinks.then(|| (0..call.problem.heads).map(|head| head as f32 * 3.0 - 4.0).collect());
            let queries = call.rows() * call.problem.heads;
            let wanted: Vec<_> = (0..queries).map(|query| defined(&call, query)).collect();
            for level in Level::all() {
                let got = call.run(level, 1);
                assert_eq!(call.run(level, 4), got, "{} {sizes:?}", level.name());
                let (out, [maxima, sums]) = got;
                for (query, (max, sum, want)) in wanted.iter().enumerate() {
                    assert!((f64::from(maxima[query]) - max).abs() < 1e-4, "{sizes:?}");
                    assert!((f64::from(sums[query]) / sum - 1.0).abs() < 1e-4, "{sizes:?}");
                    for (got, want) in out[query * DIM..].iter().zip(want) {
                        assert!((got.to_f64() - want).abs() < 2e-3, "{sizes:?}: {got} is not {want}");
                    }
                }
            }
        }
    }
}
