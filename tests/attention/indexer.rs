//! Chosen keys: random calls against the definition in double precision, ties by scores; refusals.

use std::collections::BTreeSet;

use ascend_attention::indexer::{ChosenKeys, IndexerPlan, LightningIndexer};
use ascend_attention::sparse::SparseSequences;
use ascend_attention::spec::{Cann, Soc};
use ascend_attention::{Graph, Number, Stream, Tensor, bf16, f16};
use proptest::prelude::*;

use crate::harness;
use crate::sparse_batches::{Batch, Placed, batches};
use harness::{filled, numbers, violated};

const DIM: usize = 128;

/// How numbers of rows and of weights are rounded.
type Rounding<T, W> = (fn(f32) -> T, fn(f32) -> W);

/// A random call.
#[derive(Clone, Debug)]
struct Draw {
    batch: Batch,
    heads: usize,
    count: usize,
    causal: bool,
    values: bool,
    seed: u64,
}

fn draws() -> impl Strategy<Value = Draw> {
    let heads = prop_oneof![Just(8usize), Just(16), Just(24), Just(32), Just(64)];
    let flags = (any::<bool>(), any::<bool>());
    (batches(), heads, 1usize..90, flags, any::<u64>()).prop_map(|(batch, heads, count, (causal, values), seed)| {
        let values = values && batch.block_size.is_none();
        Draw { batch, heads, count, causal, values, seed }
    })
}

/// The tensors of a call, and where the definition finds their rows.
struct Call<T: Number, W: Number> {
    query: Tensor<T>,
    key: Tensor<T>,
    weights: Tensor<W>,
    placed: Placed,
}

impl Draw {
    fn upload<T: Number, W: Number>(
        &self,
        stream: &Stream,
        of_rows: fn(f32) -> T,
        of_weights: fn(f32) -> W,
    ) -> Call<T, W> {
        let placed = self.batch.place(stream);
        let tensor = |seed: u64, shape: &[usize]| {
            let elements = numbers(self.seed ^ seed, shape.iter().product());
            elements.into_iter().map(of_rows).collect::<Vec<_>>()
        };
        let query_shape = [&placed.query_rows[..], &[self.heads, DIM]].concat();
        let weights_shape = [&placed.query_rows[..], &[self.heads]].concat();
        let key_shape = [&placed.key_rows[..], &[1, DIM]].concat();
        let weights: Vec<W> =
            numbers(self.seed ^ 3, weights_shape.iter().product()).into_iter().map(of_weights).collect();
        Call {
            query: stream.upload(&tensor(1, &query_shape), &query_shape[..]).unwrap(),
            key: stream.upload(&tensor(2, &key_shape), &key_shape[..]).unwrap(),
            weights: stream.upload(&weights, &weights_shape[..]).unwrap(),
            placed,
        }
    }

    /// Compares what was chosen with the definition. `rounding` is that of a score.
    fn compare<T: Number, W: Number>(
        &self,
        stream: &Stream,
        call: &Call<T, W>,
        chosen: &ChosenKeys<T>,
        rounding: f64,
        best_first: bool,
    ) {
        fn exact<N: Number>(stream: &Stream, tensor: &Tensor<N>) -> Vec<f64> {
            let elements = tensor.download(stream).unwrap();
            elements.into_iter().map(Number::to_f64).collect()
        }
        let [query, key] = [&call.query, &call.key].map(|tensor| exact(stream, tensor));
        let (weights, values) = (exact(stream, &call.weights), exact(stream, &chosen.values));
        let indices = chosen.indices.download(stream).unwrap();
        for (index, (first, places)) in call.placed.places.iter().enumerate() {
            // Rows of a padded sequence behind its end get no key.
            let written = self.batch.written(&call.placed, self.batch.lengths[index].0);
            for row in 0..written {
                let candidates = self.batch.candidates(index, row, self.causal);
                let number = first + row;
                let score = |key_row: &usize| -> f64 {
                    let of_head = |head: usize| {
                        let query = &query[(number * self.heads + head) * DIM..][..DIM];
                        let pairs = query.iter().zip(&key[key_row * DIM..][..DIM]);
                        let dot: f64 = pairs.map(|(q, k)| q * k).sum();
                        weights[number * self.heads + head] * dot.max(0.0)
                    };
                    (0..self.heads).map(of_head).sum()
                };
                let scores: Vec<f64> = places[..candidates].iter().map(score).collect();
                let got = &indices[number * self.count..][..self.count];
                let kept = self.count.min(candidates);
                assert!(got[kept..].iter().all(|&index| index == -1), "{self:?}: {got:?}");
                let distinct: BTreeSet<i32> = got[..kept].iter().copied().collect();
                assert_eq!(distinct.len(), kept, "{self:?}: a key twice");
                let of_got: Vec<f64> =
                    got[..kept].iter().map(|&index| scores[usize::try_from(index).unwrap()]).collect();
                let mut best = scores;
                best.sort_by(|a, b| b.total_cmp(a));
                let mut sorted = of_got.clone();
                sorted.sort_by(|a, b| b.total_cmp(a));
                for (got, want) in sorted.iter().zip(&best) {
                    assert!((got - want).abs() <= 1e-3, "{self:?}: {got} is not {want}");
                }
                let in_order = of_got.windows(2).all(|pair| pair[0] >= pair[1] - 1e-3);
                assert!(!best_first || in_order, "{self:?}: {of_got:?}");
                if self.values {
                    let values = &values[number * self.count..][..self.count];
                    for (value, score) in values.iter().zip(&of_got) {
                        assert!((value - score).abs() <= 1e-3 + rounding * score.abs());
                    }
                    assert!(values[kept..].iter().all(|&value| value == f64::NEG_INFINITY));
                }
            }
        }
    }

    fn run<T: Number, W: Number>(
        &self,
        stream: &Stream,
        (of_rows, of_weights): Rounding<T, W>,
        rounding: f64,
        best_first: bool,
    ) {
        let call = self.upload(stream, of_rows, of_weights);
        let indexer = LightningIndexer::new(self.count).causal(self.causal);
        let indexer = indexer.return_values(self.values);
        // Some rows see no key, and some are of no sequence.
        let indexer = indexer.allow_lint("indexer.rows_without_keys");
        let indexer = indexer.allow_lint("indexer.rows_left_out");
        let inputs = (&call.query, &call.key, &call.weights);
        let plan = indexer.plan(&call.placed.sequences, inputs).unwrap();
        let chosen = plan.launch(stream, inputs).unwrap();
        self.compare(stream, &call, &chosen, rounding, best_first);
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    #[test]
    fn the_best_keys_are_chosen_on_every_product_and_release(draw in draws(), dtypes in 0..4, target in 0..5) {
        let (soc, cann) = match target {
            0 => (Soc::AtlasA2, Cann::V8_5),
            1 => (Soc::AtlasA3, Cann::V9_0),
            2 => (Soc::AtlasA2, Cann::V9_1),
            3 => (Soc::Ascend950, Cann::V9_1),
            _ => (Soc::Ascend950, Cann::V9_2),
        };
        let stream = harness::emulated_stream(soc, cann);
        let best_first = soc != Soc::Ascend950;
        let single: fn(f32) -> f32 = |value| value;
        let takes_single = cann > Cann::V8_5 && best_first;
        match dtypes {
            0 if takes_single => draw.run(&stream, (f16::from_f32, single), 1e-3, best_first),
            1 if takes_single => draw.run(&stream, (bf16::from_f32, single), 8e-3, best_first),
            0 | 2 => draw.run(&stream, (f16::from_f32, f16::from_f32), 1e-3, best_first),
            _ => draw.run(&stream, (bf16::from_f32, bf16::from_f32), 8e-3, best_first),
        }
    }
}

#[test]
fn sequences_beyond_the_tensors_and_other_contracts_are_refused() {
    let stream = harness::emulated_stream(Soc::AtlasA2, Cann::V9_1);
    let half = |shape: &[usize]| filled(&stream, f16::ONE, shape);
    let (query, key, weights) = (half(&[3, 8, DIM]), half(&[40, 1, DIM]), half(&[3, 8]));
    let inputs = (&query, &key, &weights);
    let indexer = LightningIndexer::new(16);
    let packed = |queries: &[usize], keys: &[usize]| SparseSequences::packed(&stream, queries, keys).unwrap();
    let sequences = packed(&[1, 2], &[20, 20]);
    let plan = indexer.plan(&sequences, inputs).unwrap();
    assert_eq!(plan.operator(), "aclnnLightningIndexer");
    let chosen = plan.launch(&stream, inputs).unwrap();
    assert_eq!((chosen.indices.shape(), chosen.values.shape()), (&[3, 1, 16][..], &[0][..]));
    let other = plan.launch(&stream, (&half(&[4, 8, DIM]), &key, &weights));
    assert!(other.unwrap_err().breaks(&ascend_attention::rules::PLAN_TENSORS));

    for (queries, keys) in [(&[1, 3], &[20, 20]), (&[1, 2], &[20, 21])] {
        assert_eq!(violated(indexer.plan(&packed(queries, keys), inputs)), "indexer.contents");
    }
    let cache = half(&[4, 16, 1, DIM]);
    let blocks = |rows: &[Vec<usize>]| sequences.paged(&stream, rows).unwrap();
    let paged = (&query, &cache, &weights);
    indexer.plan(&blocks(&[vec![3, 0], vec![1, 2]]), paged).unwrap();
    for rows in [[vec![3, 0], vec![1, 4]], [vec![3, 0], vec![1]], [vec![3], vec![1]]] {
        assert_eq!(violated(indexer.plan(&blocks(&rows), paged)), "indexer.contents");
    }
    assert_eq!(violated(LightningIndexer::new(2049).plan(&sequences, inputs)), "indexer.count");
    let refused = LightningIndexer::new(usize::MAX).plan(&sequences, inputs).unwrap_err().to_string();
    assert!(refused.contains("choose fewer keys"), "{refused}");
    let with_values = indexer.clone().return_values(true);
    let table = blocks(&[vec![3, 0], vec![1, 2]]);
    assert_eq!(violated(with_values.plan(&table, paged)), "indexer.values_paged");
    assert_eq!(violated(LightningIndexer::new(0).plan(&sequences, inputs)), "indexer.none_chosen");
    assert!(SparseSequences::packed(&stream, &[1], &[1, 2]).is_err());
    assert!(SparseSequences::packed(&stream, &[usize::MAX], &[1]).is_err());
    assert!(sequences.paged(&stream, &[vec![0]]).is_err());
}

#[test]
fn overwritten_sequences_are_those_of_plans_and_captured_launches() {
    let stream = harness::stream();
    // Keys that are the more like the queries, the later they come in a block.
    let query = stream.upload(&[f16::ONE; 3 * 8 * DIM], [3, 8, DIM]).unwrap();
    let weights = stream.upload(&[f16::ONE; 3 * 8], [3, 8]).unwrap();
    let keys: Vec<f16> = (0..4 * 16).flat_map(|key| [f16::from_f32(key as f32 / 64.0); DIM]).collect();
    let cache = stream.upload(&keys, [4, 16, 1, DIM]).unwrap();
    let inputs = (&query, &cache, &weights);
    let made = |queries: &[usize], keys: &[usize], rows: &[Vec<usize>]| {
        SparseSequences::packed(&stream, queries, keys).unwrap().paged(&stream, rows).unwrap()
    };
    let chosen_by = |plan: &IndexerPlan| {
        let chosen = plan.launch(&stream, inputs).unwrap();
        chosen.indices.download(&stream).unwrap()
    };
    let indexer = LightningIndexer::new(4);
    let sequences = made(&[1, 2], &[20, 20], &[vec![3, 0], vec![1, 2]]);
    let plan = indexer.plan(&sequences, inputs).unwrap();
    let mut replayed: ChosenKeys<f16> = plan.output().unwrap();
    let (mut graph, ()) =
        Graph::capture(stream.device(), (), |capture, ()| plan.launch_into(capture, inputs, &mut replayed)).unwrap();
    let before = chosen_by(&plan);

    let (queries, lengths, rows) = ([2, 1], [9, 30], [vec![2], vec![0, 1]]);
    sequences.overwrite(&stream, &queries, &lengths, &rows).unwrap();
    let after = chosen_by(&indexer.plan(&made(&queries, &lengths, &rows), inputs).unwrap());
    assert_ne!(after, before);
    assert_eq!(chosen_by(&plan), after);
    let update = graph.update();
    graph.launch(&stream, update).unwrap();
    assert_eq!(replayed.indices.download(&stream).unwrap(), after);
    // A clone has the same memory, and pages of it the lengths that were written last.
    assert_eq!(sequences.clone().key_lengths().download(&stream).unwrap(), [9, 30]);
    assert_eq!(sequences.paged(&stream, &rows).unwrap().query_lengths().download(&stream).unwrap(), [2, 3]);

    // What a plan of the sequences refuses is not written.
    type Rows = [Vec<usize>; 2];
    let refused: [([usize; 2], [usize; 2], Rows, &str); 5] = [
        ([1, 3], [9, 9], [vec![0], vec![1]], "indexer.contents"),
        ([1, 2], [9, 33], [vec![0], vec![1, 2]], "indexer.contents"),
        ([1, 2], [9, 17], [vec![0], vec![1]], "indexer.contents"),
        ([1, 2], [9, 9], [vec![0], vec![4]], "indexer.contents"),
        ([1, 2], [9, 9], [vec![0], vec![1, 2, 3]], "2 rows of at most 2 blocks"),
    ];
    for (queries, keys, rows, word) in refused {
        let refused = sequences.overwrite(&stream, &queries, &keys, &rows).unwrap_err();
        assert!(refused.to_string().contains(word), "{refused}");
    }
    let few = sequences.overwrite(&stream, &[3], &[9], &[[0]]).unwrap_err().to_string();
    assert!(few.contains("2 of each"), "{few}");
    let left_out = sequences.overwrite(&stream, &[1, 1], &[9, 9], &[[0], [1]]).unwrap_err().to_string();
    assert!(left_out.contains("indexer.rows_left_out"), "{left_out}");
    let unpaged = SparseSequences::packed(&stream, &[1], &[4]).unwrap();
    let unpaged = unpaged.overwrite(&stream, &[1], &[4], &[[0]]).unwrap_err().to_string();
    assert!(unpaged.contains("plan with them"), "{unpaged}");
    assert_eq!(chosen_by(&plan), after);
    // The tensors can be read, and written by `overwrite` alone.
    let block_table = sequences.block_table().unwrap();
    assert!(block_table.copy_from(&stream, &block_table.clone()).is_err());
}
