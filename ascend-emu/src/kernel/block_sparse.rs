//! Attention to blocks of keys, as the operator BlockSparseAttention computes it.
//!
//! Each block of query rows of a head is a sequence of its own for the attention kernels, whose keys are those of the
//! blocks that the mask names for it. Blocks that it does not name are never touched. Loading tiles, products, the
//! online softmax, splits along the keys and threads are those of any other call, and so a result depends on the call
//! and the instruction set alone.

use super::attention::{Attention, Listed};
use super::kv::listed_rows::ListedRows;
use super::kv::{KeyValues, Storage};
use super::schedule;
use super::sequence::Sequence;
use super::tensor::input::InputTensor;
use super::tensor::output::OutputTensor;
use super::tensor::strided::WriteTensor;
use super::token_rows::TokenRows;
use crate::host_memory::{HostMemoryExhausted, try_with_capacity};
use ascend_spec::ops::block_sparse_attention::{BlockSparseCall, BlockSparseProblem, RowBlock};

/// Blocks of rows that are computed at a time: their lists of keys are in memory.
const BLOCKS: usize = 1024;

/// The tensors of one call.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Buffers<'a> {
    pub query: TokenRows<'a>,
    pub key: TokenRows<'a>,
    pub value: TokenRows<'a>,
    pub out: TokenRows<'a>,
    /// The log-sum-exp of each row, where it is written.
    pub lse: Option<TokenRows<'a>>,
    /// The bytes of the mask.
    pub mask: &'a [u8],
}

/// Computes all rows for which the mask names keys, on the current rayon pool. Others are not written.
///
/// # Errors
/// There is no host memory for the keys of a block of rows.
///
/// # Safety
///
/// The tensors are those of `call`, which `problem` resolves; their bytes, as the problem counts those that a launch
/// touches, are live, those of the outputs accessed by no other thread, and all others written by none.
pub(crate) unsafe fn run(
    problem: &BlockSparseProblem,
    call: &BlockSparseCall<'_>,
    buffers: &Buffers<'_>,
) -> Result<(), HostMemoryExhausted> {
    let tensor = |tensor: TokenRows<'_>| tensor.ordered(problem.axes);
    let lse = buffers.lse.and_then(|lse| Some((lse, tensor(lse)?)));
    let (Some(query), Some(key), Some(value), Some(out)) =
        (tensor(buffers.query), tensor(buffers.key), tensor(buffers.value), tensor(buffers.out))
    else {
        return Ok(());
    };
    let types = buffers.query.types();
    // SAFETY: the caller keeps this contract.
    let attention = unsafe {
        Attention::listed(Listed {
            query: InputTensor::new(buffers.query.base, &query.0, query.1, types),
            query_rope: None,
            out: OutputTensor::new(buffers.out.base, &out.0, out.1, types, None),
            lse: lse.map(|(lse, (rows, sizes))| WriteTensor::new(lse.base, &rows, sizes)),
            value_dim: problem.dim,
            group: 1,
            scale: problem.scale.into(),
            dtype: buffers.query.desc.dtype,
        })
    };
    schedule::compute_listed(attention, BLOCKS, problem.row_blocks(call), |block| {
        let Some(keys) = listed(problem, buffers.mask, &block)? else {
            return Ok(None);
        };
        let kv_head = problem.kv_head(block.head);
        // SAFETY: the caller keeps this contract.
        let (key, value) = unsafe { (buffers.key.head(key, kv_head), buffers.value.head(value, kv_head)) };
        let (sequence, storage) = (block.sequence.index, Storage::Listed(keys));
        let kv = KeyValues { key, value, prefix: 0, sequence, storage };
        let first = block.sequence.first_query;
        let rows = first + block.rows.start..first + block.rows.end;
        let place = (block.sequence.batch, block.head, rows);
        Ok(Some(Sequence::listed(place, kv, None)))
    })
}

/// Where the keys are that a block of rows sees; `None` where it sees none.
fn listed(
    problem: &BlockSparseProblem,
    mask: &[u8],
    block: &RowBlock,
) -> Result<Option<ListedRows>, HostMemoryExhausted> {
    let sequence = &block.sequence;
    let selected = problem.selected(problem.bytes(block, mask), sequence.keys);
    let (count, keys) = selected.clone().fold((0, 0), |(count, all), keys| (count + 1, all + keys.len()));
    if keys == 0 {
        return Ok(None);
    }
    let mut blocks = try_with_capacity(count)?;
    blocks.extend(selected.map(|keys| Some((sequence.batch, sequence.first_key + keys.start))));
    Ok(Some(ListedRows::blocks(blocks, problem.block[1], keys)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kernel::simd::Level;
    use ascend_spec::{Cann, DType, Soc, Target, TensorDesc};
    use half::f16;
    use proptest::prelude::*;

    /// Where blocks of keys may be small and each layout is known.
    const TARGET: Target = Target::new(Soc::Ascend950, Cann::V9_2);
    const SCALE: f64 = 0.2;
    const OLD: f16 = f16::INFINITY;

    /// Random numbers from 0 to 1.
    fn random(seed: u64, count: usize) -> impl Iterator<Item = f32> {
        let mut bits = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15);
        (0..count).map(move |_| {
            bits = bits.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (bits >> 40) as f32 / (1u64 << 24) as f32
        })
    }

    /// A call: the query rows and the keys of its sequences, and what the mask's bytes are drawn from.
    #[derive(Clone, Debug)]
    struct Draw {
        layout: &'static str,
        /// Query heads for each key head, and key heads.
        heads: [usize; 2],
        dim: usize,
        block: [i64; 2],
        lengths: [Vec<i64>; 2],
        /// Share of blocks that rows see.
        density: f32,
        seed: u64,
    }

    fn draws() -> impl Strategy<Value = Draw> {
        let lengths = proptest::collection::vec((1i64..60, 0i64..250), 1..4);
        let block = (prop_oneof![Just(1i64), Just(7), Just(16), Just(40), Just(500)], 1i64..12);
        let shapes = (prop_oneof![Just("TND"), Just("BNSD"), Just("BSND")], 1usize..4, 1usize..3);
        let numbers = (prop_oneof![Just(0.1f32), Just(0.5), Just(1.0)], any::<u64>());
        (shapes, prop_oneof![Just(64usize), Just(128)], lengths, block, numbers).prop_map(
            |((layout, group, kv_heads), dim, lengths, (rows, keys), (density, seed))| Draw {
                layout,
                heads: [group, kv_heads],
                dim,
                block: [rows, keys * 16],
                lengths: lengths.into_iter().unzip().into(),
                density,
                seed,
            },
        )
    }

    impl Draw {
        fn batch(&self) -> usize {
            self.lengths[0].len()
        }

        /// Heads of queries and of keys.
        fn heads_of(&self, side: usize) -> usize {
            self.heads[1] * if side == 0 { self.heads[0] } else { 1 }
        }

        /// The longest sequence.
        fn most(&self, side: usize) -> usize {
            self.lengths[side].iter().copied().max().unwrap().max(1) as usize
        }

        fn shape(&self, side: usize, dim: usize) -> Vec<i64> {
            let [batch, rows, heads] = [self.batch(), self.most(side), self.heads_of(side)];
            let all = self.lengths[side].iter().sum::<i64>() as usize;
            let shape = match self.layout {
                "TND" => vec![all, heads, dim],
                "BNSD" => vec![batch, heads, rows, dim],
                _ => vec![batch, rows, heads, dim],
            };
            shape.into_iter().map(|size| size as i64).collect()
        }

        /// Number of a row among those of all heads and sequences.
        fn row(&self, side: usize, (sequence, head, row): (usize, usize, usize)) -> usize {
            let (rows, heads) = (self.most(side), self.heads_of(side));
            let before: i64 = self.lengths[side][..sequence].iter().sum();
            match self.layout {
                "TND" => (before as usize + row) * heads + head,
                "BNSD" => (sequence * heads + head) * rows + row,
                _ => (sequence * rows + row) * heads + head,
            }
        }

        /// Blocks of rows and of keys.
        fn blocks(&self) -> [usize; 2] {
            // Without keys at all the mask of TND has no block of them.
            let keys = match self.layout {
                "TND" => self.lengths[1].iter().copied().max().unwrap() as usize,
                _ => self.most(1),
            };
            [self.most(0).div_ceil(self.block[0] as usize), keys.div_ceil(self.block[1] as usize)]
        }

        fn mask(&self) -> Vec<u8> {
            let [rows, keys] = self.blocks();
            let bytes = random(self.seed ^ 9, self.batch() * self.heads_of(0) * rows * keys);
            bytes.map(|number| if number < self.density { 1 } else { 0 }).collect()
        }

        fn elements(&self, seed: u64, side: usize) -> Vec<f16> {
            let count: i64 = self.shape(side, self.dim).iter().product();
            let numbers = random(self.seed ^ seed, count as usize);
            numbers.map(|number| f16::from_f32(number * 2.0 - 1.0)).collect()
        }

        /// Attention and log-sum-exps, on so many threads.
        fn run(&self, level: Level, threads: usize) -> (Vec<f16>, Vec<f32>) {
            let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build();
            pool.unwrap().install(|| self.attend(level))
        }

        /// Attention and log-sum-exps.
        fn attend(&self, level: Level) -> (Vec<f16>, Vec<f32>) {
            let desc = |dtype, shape: &[i64]| TensorDesc::contiguous(dtype, shape).unwrap();
            let [query, key] = [0, 1].map(|side| desc(DType::Float16, &self.shape(side, self.dim)));
            let lse = desc(DType::Float, &self.shape(0, 1));
            let [rows, keys] = self.blocks();
            let mask = [self.batch(), self.heads_of(0), rows, keys].map(|size| size as i64);
            let call = BlockSparseCall {
                query: Some(query),
                key: Some(key),
                value: Some(key),
                block_sparse_mask: Some(desc(DType::Int8, &mask)),
                block_shape: Some(&self.block),
                actual_seq_lengths: Some(&self.lengths[0]),
                actual_seq_lengths_kv: Some(&self.lengths[1]),
                q_input_layout: self.layout,
                kv_input_layout: self.layout,
                num_key_value_heads: self.heads[1] as i64,
                scale: SCALE,
                inner_precise: 4,
                softmax_lse_flag: 1,
                attention_out: Some(query),
                softmax_lse: Some(lse),
                ..BlockSparseCall::default()
            };
            let problem = call.check(TARGET).unwrap();
            let inputs = [self.elements(1, 0), self.elements(2, 1), self.elements(3, 1)];
            let read = |desc, index: usize| TokenRows { desc, base: inputs[index].as_ptr().cast_mut().cast() };
            let mut out = vec![OLD; inputs[0].len()];
            let mut lses = vec![f32::NAN; inputs[0].len() / self.dim];
            let buffers = Buffers {
                query: read(&query, 0),
                key: read(&key, 1),
                value: read(&key, 2),
                out: TokenRows { desc: &query, base: out.as_mut_ptr().cast() },
                lse: Some(TokenRows { desc: &lse, base: lses.as_mut_ptr().cast() }),
                mask: &self.mask(),
            };
            // SAFETY: the tensors are those of the call, and live.
            level.with(|| unsafe { super::run(&problem, &call, &buffers) }).unwrap();
            (out, lses)
        }

        /// What the definition says of a row of a head: its output and its log-sum-exp; `None` without keys.
        fn defined(
            &self,
            [query, key, value]: &[Vec<f16>; 3],
            mask: &[u8],
            (sequence, head, row): (usize, usize, usize),
        ) -> Option<(Vec<f64>, f64)> {
            let exact = |tensor: &[f16], row: usize| -> Vec<f64> {
                tensor[row * self.dim..][..self.dim].iter().map(|number| number.to_f64()).collect()
            };
            let [rows, keys] = self.blocks();
            let of_rows = (sequence * self.heads_of(0) + head) * rows + row / self.block[0] as usize;
            let query = exact(query, self.row(0, (sequence, head, row)));
            let mut seen = Vec::new();
            for position in 0..self.lengths[1][sequence] as usize {
                if mask[of_rows * keys + position / self.block[1] as usize] == 0 {
                    continue;
                }
                let place = self.row(1, (sequence, head / self.heads[0], position));
                let pairs = query.iter().zip(exact(key, place));
                let score = SCALE * pairs.map(|(a, b)| a * b).sum::<f64>();
                seen.push((score, exact(value, place)));
            }
            let max = seen.iter().map(|(score, _)| *score).reduce(f64::max)?;
            let sum: f64 = seen.iter().map(|(score, _)| (score - max).exp()).sum();
            let mut out = vec![0.0; self.dim];
            for (score, value) in &seen {
                let weight = (score - max).exp() / sum;
                out.iter_mut().zip(value).for_each(|(out, value)| *out += weight * value);
            }
            Some((out, max + sum.ln()))
        }

        /// What the definition says of each row.
        fn wanted(&self) -> Vec<Option<(Vec<f64>, f64)>> {
            let inputs = [self.elements(1, 0), self.elements(2, 1), self.elements(3, 1)];
            let (mask, mut wanted) = (self.mask(), vec![None; inputs[0].len() / self.dim]);
            for sequence in 0..self.batch() {
                for head in 0..self.heads_of(0) {
                    for row in 0..self.lengths[0][sequence] as usize {
                        let place = (sequence, head, row);
                        wanted[self.row(0, place)] = self.defined(&inputs, &mask, place);
                    }
                }
            }
            wanted
        }

        /// Compares a run with the definition.
        fn compare(&self, level: Level, wanted: &[Option<(Vec<f64>, f64)>]) -> Result<(), TestCaseError> {
            let (got, lses) = self.run(level, 1);
            for (row, want) in wanted.iter().enumerate() {
                let (got, lse) = (&got[row * self.dim..][..self.dim], lses[row]);
                match want {
                    None => {
                        prop_assert!(lse.is_nan(), "row {row} is written");
                        prop_assert!(got.iter().all(|&got| got == OLD), "row {row} is written");
                    }
                    Some((want, want_lse)) => {
                        let off = (f64::from(lse) - want_lse).abs();
                        prop_assert!(off < 1e-4, "row {row}: {lse} is not {want_lse}");
                        for (got, want) in got.iter().zip(want) {
                            let off = (got.to_f64() - want).abs();
                            prop_assert!(off < 2e-3, "row {row}: {got} is not {want}");
                        }
                    }
                }
            }
            Ok(())
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(24))]

        /// Every instruction set attends to the blocks of the mask, up to the last key, and writes no other row.
        #[test]
        fn rows_attend_to_the_blocks_of_their_mask(draw in draws()) {
            let wanted = draw.wanted();
            for level in Level::all() {
                draw.compare(level, &wanted)?;
            }
        }
    }

    #[test]
    fn threads_change_no_bit() {
        let draw = Draw {
            layout: "TND",
            heads: [2, 2],
            dim: 64,
            block: [64, 128],
            lengths: [vec![300, 170], vec![900, 1300]],
            density: 0.5,
            seed: 5,
        };
        for level in Level::all() {
            let bits = |(out, lse): (Vec<f16>, Vec<f32>)| {
                let out: Vec<_> = out.iter().map(|number| number.to_bits()).collect();
                (out, lse.iter().map(|number| number.to_bits()).collect::<Vec<_>>())
            };
            assert_eq!(bits(draw.run(level, 4)), bits(draw.run(level, 1)), "{}", level.name());
        }
    }
}
