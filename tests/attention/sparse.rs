//! Attention to chosen keys: random calls against the definition in double precision, and refusals.

use ascend_attention::indexer::LightningIndexer;
use ascend_attention::sparse::SparseSequences;
use ascend_attention::sparse_flash::{SparseAttention, SparseFlashAttention, SparseFlashInputs, SparseFlashPlan};
use ascend_attention::spec::{Cann, Soc};
use ascend_attention::{Error, Number, Stream, Tensor, bf16, f16};
use proptest::prelude::*;

use crate::harness;
use crate::sparse_batches::{Batch, Placed, batches};
use harness::{filled, numbers, violated};

const DIM: usize = 512;
const ROPE: usize = 64;
const SCALE: f64 = 0.05;

/// A random call.
#[derive(Clone, Debug)]
pub(crate) struct Draw {
    pub(crate) batch: Batch,
    pub(crate) heads: usize,
    pub(crate) entries: usize,
    pub(crate) block: usize,
    pub(crate) causal: bool,
    pub(crate) softmax: bool,
    /// Whether each head has a logit more.
    pub(crate) sinks: bool,
    /// Whether lists name any blocks in any order, and not each of some blocks once.
    pub(crate) wild: bool,
    pub(crate) seed: u64,
}

pub(crate) fn draws() -> impl Strategy<Value = Draw> {
    let heads = prop_oneof![Just(1usize), Just(2), Just(8), Just(32)];
    let block = prop_oneof![Just(1usize), Just(2), Just(8), Just(16)];
    let flags = (any::<bool>(), any::<bool>(), any::<bool>());
    (batches(), heads, 1usize..90, block, flags, any::<u64>()).prop_map(
        |(batch, heads, entries, block, (causal, softmax, wild), seed)| Draw {
            softmax: softmax && batch.block_size.is_none(),
            batch,
            heads,
            entries,
            block,
            causal,
            sinks: false,
            wild,
            seed,
        },
    )
}

/// The tensors of a call.
struct Call<T: Number> {
    query: Tensor<T>,
    query_rope: Tensor<T>,
    key: Tensor<T>,
    key_rope: Tensor<T>,
    lists: Vec<i32>,
    indices: Tensor<i32>,
    sinks: Tensor<f32>,
    placed: Placed,
}

impl Draw {
    fn upload<T: Number>(&self, stream: &Stream, of: fn(f32) -> T) -> Call<T> {
        let placed = self.batch.place(stream);
        let tensor = |seed: u64, rows: &[usize], last: [usize; 2]| {
            let shape = [rows, &last].concat();
            let elements = numbers(self.seed ^ seed, shape.iter().product());
            let elements: Vec<T> = elements.into_iter().map(of).collect();
            stream.upload(&elements, &shape[..]).unwrap()
        };
        let lists = self.lists(&placed);
        let shape = [&placed.query_rows[..], &[1, self.entries]].concat();
        Call {
            query: tensor(1, &placed.query_rows, [self.heads, DIM]),
            query_rope: tensor(2, &placed.query_rows, [self.heads, ROPE]),
            key: tensor(3, &placed.key_rows, [1, DIM]),
            key_rope: tensor(4, &placed.key_rows, [1, ROPE]),
            indices: stream.upload(&lists, &shape[..]).unwrap(),
            lists,
            // Some are the largest logit of their row.
            sinks: stream.upload(&numbers(self.seed ^ 5, self.heads), [self.heads]).unwrap(),
            placed,
        }
    }

    /// The lists of all rows, those of no sequence empty.
    pub(crate) fn lists(&self, placed: &Placed) -> Vec<i32> {
        let rows: usize = placed.query_rows.iter().product();
        let mut lists = vec![-1; rows * self.entries];
        for (index, (first, _)) in placed.places.iter().enumerate() {
            for row in 0..self.batch.lengths[index].0 {
                let list = &mut lists[(first + row) * self.entries..][..self.entries];
                let candidates = self.batch.candidates(index, row, self.causal);
                let blocks = candidates.div_ceil(self.block);
                let seed = self.seed ^ ((first + row + 7) as u64);
                let random = numbers(seed, self.entries.max(blocks));
                if self.wild {
                    for (entry, number) in list.iter_mut().zip(&random) {
                        // From -1 to one block behind the last.
                        *entry = ((number + 1.0) / 2.0 * (blocks + 2) as f32) as i32 - 1;
                    }
                } else {
                    let mut order: Vec<usize> = (0..blocks).collect();
                    order.sort_by(|&a, &b| random[a].total_cmp(&random[b]));
                    for (entry, block) in list.iter_mut().zip(order) {
                        *entry = i32::try_from(block).unwrap();
                    }
                }
            }
        }
        lists
    }

    /// The keys that a row reads, by their position.
    pub(crate) fn chosen(&self, list: &[i32], candidates: usize) -> Vec<usize> {
        let mut keys = Vec::new();
        for (place, &entry) in list.iter().enumerate() {
            if entry == -1 || place * self.block >= candidates {
                break;
            }
            let first = usize::try_from(entry).unwrap() * self.block;
            keys.extend((first..first + self.block).filter(|&key| key < candidates));
        }
        keys
    }

    /// Compares attention with the definition. `rounding` is that of an element.
    fn compare<T: Number>(&self, stream: &Stream, call: &Call<T>, got: &SparseAttention<T>, rounding: f64) {
        fn exact<N: Number>(stream: &Stream, tensor: &Tensor<N>) -> Vec<f64> {
            let elements = tensor.download(stream).unwrap();
            elements.into_iter().map(Number::to_f64).collect()
        }
        let [query, query_rope] = [&call.query, &call.query_rope].map(|of| exact(stream, of));
        let [key, key_rope] = [&call.key, &call.key_rope].map(|of| exact(stream, of));
        let out = exact(stream, &got.out);
        let sinks = exact(stream, &call.sinks);
        let [max, sum] = [&got.softmax_max, &got.softmax_sum].map(|of| exact(stream, of));
        for (index, (first, places)) in call.placed.places.iter().enumerate() {
            for row in 0..self.batch.written(&call.placed, self.batch.lengths[index].0) {
                let number = first + row;
                let list = &call.lists[number * self.entries..][..self.entries];
                let candidates = self.batch.candidates(index, row, self.causal);
                let keys = self.chosen(list, candidates);
                for head in number * self.heads..(number + 1) * self.heads {
                    let dot = |a: &[f64], b: &[f64], at: usize, dim: usize| -> f64 {
                        let pairs = a[head * dim..][..dim].iter().zip(&b[at * dim..][..dim]);
                        pairs.map(|(a, b)| a * b).sum()
                    };
                    let score = |&position: &usize| {
                        let at = places[position];
                        SCALE * (dot(&query, &key, at, DIM) + dot(&query_rope, &key_rope, at, ROPE))
                    };
                    let scores: Vec<f64> = keys.iter().map(score).collect();
                    let logits = || scores.iter().copied().chain(self.sinks.then_some(sinks[head % self.heads]));
                    let highest = logits().fold(f64::NEG_INFINITY, f64::max);
                    let total: f64 = logits().map(|score| (score - highest).exp()).sum();
                    let mut want = vec![0.0; DIM];
                    for (&position, score) in keys.iter().zip(&scores) {
                        let values = &key[places[position] * DIM..][..DIM];
                        for (want, value) in want.iter_mut().zip(values) {
                            *want += (score - highest).exp() / total * value;
                        }
                    }
                    for (got, want) in out[head * DIM..].iter().zip(&want) {
                        assert!((got - want).abs() <= rounding, "{self:?}: {got} is not {want}");
                    }
                    if self.softmax {
                        let none = keys.is_empty() && !self.sinks;
                        let (highest, total) = if none { (0.0, 0.0) } else { (highest, total) };
                        let (max, sum) = (max[head], sum[head]);
                        assert!((max - highest).abs() <= 1e-4, "{self:?}: {max} is not {highest}");
                        assert!((sum - total).abs() <= 1e-4 * total, "{self:?}: {sum} is not {total}");
                    }
                }
            }
        }
    }

    fn run<T: Number>(&self, stream: &Stream, of: fn(f32) -> T, rounding: f64) {
        harness::expect_odd_sparse_lists();
        let call = self.upload(stream, of);
        let sparse = SparseFlashAttention::new(SCALE).sparse_block_size(self.block);
        let sparse = sparse.causal(self.causal).return_softmax_lse(self.softmax);
        // Some rows see no key, and some are of no sequence.
        let sparse = sparse.allow_lint("sparse_flash.rows_without_keys");
        let sparse = sparse.allow_lint("sparse_flash.rows_left_out");
        let inputs = ((&call.query, &call.query_rope), (&call.key, &call.key_rope), &call.indices);
        let inputs = SparseFlashInputs::from(inputs);
        let inputs = if self.sinks { inputs.sinks(&call.sinks) } else { inputs };
        let plan = sparse.plan(&call.placed.sequences, inputs).unwrap();
        let got = plan.launch(stream, inputs).unwrap();
        self.compare(stream, &call, &got, rounding);
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(40))]

    #[test]
    fn rows_attend_to_their_lists_on_every_product_and_release(
        draw in draws(), half: bool, sinks: bool, target in 0..5,
    ) {
        let (soc, cann) = match target {
            0 => (Soc::AtlasA2, Cann::V8_5),
            1 => (Soc::AtlasA3, Cann::V9_0),
            2 => (Soc::AtlasA2, Cann::V9_1),
            3 => (Soc::Ascend950, Cann::V9_1),
            _ => (Soc::Ascend950, Cann::V9_2),
        };
        let stream = harness::emulated_stream(soc, cann);
        let draw = match soc {
            // Any number of heads, and single keys.
            Soc::Ascend950 => {
                let sinks = sinks && cann == Cann::V9_2 && draw.batch.block_size.is_none();
                Draw { heads: draw.heads + 1, block: 1, sinks, ..draw }
            }
            _ => draw,
        };
        match half {
            true => draw.run(&stream, f16::from_f32, 2e-3),
            false => draw.run(&stream, bf16::from_f32, 1.6e-2),
        }
    }
}

#[test]
fn rows_attend_to_the_keys_that_the_indexer_chooses() {
    let stream = harness::emulated_stream(Soc::AtlasA2, Cann::V9_1);
    let upload = |seed, shape: &[usize]| {
        let elements = numbers(seed, shape.iter().product());
        let elements: Vec<f16> = elements.into_iter().map(f16::from_f32).collect();
        stream.upload(&elements, shape).unwrap()
    };
    let sequences = SparseSequences::packed(&stream, &[2], &[40]).unwrap();
    let (index_query, index_key) = (upload(1, &[2, 8, 128]), upload(2, &[40, 1, 128]));
    let weights = upload(3, &[2, 8]);
    let (query, query_rope) = (upload(4, &[2, 4, DIM]), upload(5, &[2, 4, ROPE]));
    let (key, key_rope) = (upload(6, &[40, 1, DIM]), upload(7, &[40, 1, ROPE]));
    let mut outs = Vec::new();
    // All keys in the order of their scores, and all in the order of positions: the same attention.
    let indexer = (&index_query, &index_key, &weights);
    let plan = LightningIndexer::new(64).plan(&sequences, indexer).unwrap();
    let chosen = plan.launch(&stream, indexer).unwrap().indices;
    let list = |keys: i32| (0..64).map(move |key| if key < keys { key } else { -1 });
    let all: Vec<i32> = list(39).chain(list(40)).collect();
    let all = stream.upload(&all, [2, 1, 64]).unwrap();
    for indices in [&chosen, &all] {
        let inputs = ((&query, &query_rope), (&key, &key_rope), indices);
        let plan = SparseFlashAttention::new(SCALE).plan(&sequences, inputs).unwrap();
        let out = plan.launch(&stream, inputs).unwrap().out;
        outs.push(out.download(&stream).unwrap());
    }
    for (a, b) in outs[0].iter().zip(&outs[1]) {
        assert!((a.to_f64() - b.to_f64()).abs() <= 2e-3);
    }
}

#[test]
fn sequences_beyond_the_tensors_and_other_contracts_are_refused() {
    let stream = harness::emulated_stream(Soc::AtlasA2, Cann::V9_1);
    let half = |shape: &[usize]| filled(&stream, f16::ONE, shape);
    let (query, query_rope) = (half(&[3, 8, DIM]), half(&[3, 8, ROPE]));
    let (key, key_rope) = (half(&[40, 1, DIM]), half(&[40, 1, ROPE]));
    let indices = stream.upload(&[-1; 3 * 16], [3, 1, 16]).unwrap();
    let inputs = ((&query, &query_rope), (&key, &key_rope), &indices);
    let sparse = SparseFlashAttention::new(SCALE);
    let packed = |queries: &[usize], keys: &[usize]| SparseSequences::packed(&stream, queries, keys).unwrap();
    let sequences = packed(&[1, 2], &[20, 20]);
    let plan = sparse.plan(&sequences, inputs).unwrap();
    assert_eq!(plan.operator(), "aclnnSparseFlashAttention");
    let got = plan.launch(&stream, inputs).unwrap();
    let shapes = (got.out.shape(), got.softmax_max.shape(), got.softmax_sum.shape());
    assert_eq!(shapes, (&[3, 8, DIM][..], &[0][..], &[0][..]));
    let narrow = (&query, &half(&[3, 8, 32]));
    let other = plan.launch(&stream, (narrow, inputs.1, &indices));
    let plan_tensors = &ascend_attention::rules::PLAN_TENSORS;
    assert!(other.unwrap_err().breaks(plan_tensors));
    assert_eq!(violated(sparse.plan(&sequences, (narrow, inputs.1, &indices))), "sparse_flash.query_rope");

    for (queries, keys) in [(&[1, 3], &[20, 20]), (&[1, 2], &[20, 21])] {
        let plan = sparse.plan(&packed(queries, keys), inputs);
        assert_eq!(violated(plan), "sparse_flash.contents");
    }
    let (cache, rope_cache) = (half(&[4, 16, 1, DIM]), half(&[4, 16, 1, ROPE]));
    let blocks = |rows: &[Vec<usize>]| sequences.paged(&stream, rows).unwrap();
    let paged = (inputs.0, (&cache, &rope_cache), &indices);
    let table = blocks(&[vec![3, 0], vec![1, 2]]);
    sparse.plan(&table, paged).unwrap();
    for rows in [[vec![3, 0], vec![1, 4]], [vec![3, 0], vec![1]], [vec![3], vec![1]]] {
        assert_eq!(violated(sparse.plan(&blocks(&rows), paged)), "sparse_flash.contents");
    }
    let with_softmax = sparse.clone().return_softmax_lse(true);
    assert_eq!(violated(with_softmax.plan(&table, paged)), "sparse_flash.softmax_paged");
    let flat = query.reshape([3 * 8 * DIM]).unwrap();
    let refused = with_softmax.plan(&sequences, ((&flat, &query_rope), inputs.1, &indices)).unwrap_err().to_string();
    assert!(refused.contains("[T1, N1, D]"), "{refused}");
    let blocks_of_3 = sparse.clone().sparse_block_size(3);
    assert_eq!(violated(blocks_of_3.plan(&sequences, inputs)), "sparse_flash.sparse_block_size");
    for (of, rule) in [([&[2], &[6]], "sparse_flash.rows_left_out"), ([&[3], &[2]], "sparse_flash.rows_without_keys")] {
        let [queries, keys]: [&[usize; 1]; 2] = of;
        let sequences = SparseSequences::packed(&stream, queries, keys).unwrap();
        assert_eq!(violated(sparse.plan(&sequences, inputs)), rule);
    }
    let none = stream.upload(&[0i32; 0], [3, 1, 0]).unwrap();
    let empty = (inputs.0, inputs.1, &none);
    assert_eq!(violated(sparse.plan(&sequences, empty)), "sparse_flash.none_chosen");
    let zeros = sparse.allow_lint("sparse_flash.none_chosen").plan(&sequences, empty).unwrap();
    let zeros = zeros.launch(&stream, empty).unwrap().out.download(&stream).unwrap();
    assert!(zeros.iter().all(|&element| element == f16::ZERO));
}

#[test]
fn sinks_are_for_one_product_and_release_and_go_with_every_launch() {
    fn planned(soc: Soc, cann: Cann, heads: usize, paged: bool) -> Result<SparseFlashPlan, Error> {
        let stream = harness::emulated_stream(soc, cann);
        let half = |shape: &[usize]| filled(&stream, f16::ONE, shape);
        let (query, query_rope) = (half(&[2, 8, DIM]), half(&[2, 8, ROPE]));
        let (key, key_rope) = (half(&[16, 1, DIM]), half(&[16, 1, ROPE]));
        let indices = stream.upload(&[3, 5, -1, 0, 1, 2], [2, 1, 3]).unwrap();
        let sinks = stream.upload(&vec![0f32; heads], [heads]).unwrap();
        let sequences = SparseSequences::packed(&stream, &[2], &[16]).unwrap();
        let sparse = SparseFlashAttention::new(SCALE);
        if paged {
            let (key, key_rope) = (half(&[1, 16, 1, DIM]), half(&[1, 16, 1, ROPE]));
            let sequences = sequences.paged(&stream, &[[0]]).unwrap();
            let inputs = ((&query, &query_rope), (&key, &key_rope), &indices);
            return sparse.plan(&sequences, SparseFlashInputs::from(inputs).sinks(&sinks));
        }
        let inputs = ((&query, &query_rope), (&key, &key_rope), &indices);
        let with_sinks = SparseFlashInputs::from(inputs).sinks(&sinks);
        let plan = sparse.plan(&sequences, with_sinks)?;
        assert_eq!(plan.operator(), "aclnnSparseFlashAttentionV2");
        // The keys and the sink have logits far apart: the sink weighs nothing.
        let out = plan.launch(&stream, with_sinks)?.out.download(&stream)?;
        assert!(out.iter().all(|x| (x.to_f32() - 1.0).abs() < 1e-3));
        let plan_tensors = &ascend_attention::rules::PLAN_TENSORS;
        let without = plan.launch(&stream, inputs);
        assert!(without.unwrap_err().breaks(plan_tensors));
        let plain = sparse.plan(&sequences, inputs)?;
        assert_eq!(plain.operator(), "aclnnSparseFlashAttention");
        assert!(plain.launch(&stream, with_sinks).unwrap_err().breaks(plan_tensors));
        Ok(plan)
    }
    planned(Soc::Ascend950, Cann::V9_2, 8, false).unwrap();
    assert_eq!(violated(planned(Soc::Ascend950, Cann::V9_2, 8, true)), "sparse_flash.sinks_paged");
    assert_eq!(violated(planned(Soc::Ascend950, Cann::V9_2, 4, false)), "sparse_flash.sinks_shape");
    assert_eq!(violated(planned(Soc::AtlasA2, Cann::V9_2, 8, false)), "sparse_flash.sinks");
    let older = planned(Soc::Ascend950, Cann::V9_1, 8, false).unwrap_err();
    assert!(older.to_string().contains("aclnnSparseFlashAttentionV2"), "{older}");
}
