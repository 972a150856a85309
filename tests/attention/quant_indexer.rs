//! Keys chosen by quantised scores: random calls against the definition in double precision, ties by scores; refusals.

use std::collections::BTreeSet;

use ascend_attention::Element;
use ascend_attention::quant_indexer::QuantLightningIndexer;
use ascend_attention::sparse::SparseSequences;
use ascend_attention::spec::minifloat::{Float8E4M3Fn, HiFloat8};
use ascend_attention::spec::{Cann, Soc};
use ascend_attention::{Number, Stream, bf16, f16};
use proptest::prelude::*;

use crate::harness;
use crate::sparse_batches::{Batch, batches};
use harness::{filled, numbers, violated};

const DIM: usize = 128;

/// A random call.
#[derive(Clone, Debug)]
struct Draw {
    batch: Batch,
    heads: usize,
    count: usize,
    causal: bool,
    seed: u64,
}

fn draws() -> impl Strategy<Value = Draw> {
    let heads = prop_oneof![Just(8usize), Just(16), Just(24), Just(64)];
    (batches(), heads, 1usize..90, any::<bool>(), any::<u64>()).prop_map(|(batch, heads, count, causal, seed)| Draw {
        batch,
        heads,
        count,
        causal,
        seed,
    })
}

/// Element types of a call: how numbers between -1 and 1 become elements and what elements are, how weights and scales
/// are rounded, and how far a score may be from the definition, as a part of the sum of the magnitudes of its terms.
struct Types<Q, W, S> {
    element: fn(f32) -> Q,
    value: fn(Q) -> f32,
    weight: fn(f32) -> W,
    scale: fn(f32) -> S,
    rounding: f64,
}

/// Products and weights are rounded to halves.
const INT8: Types<i8, f16, f16> = Types {
    element: |number| (number * 127.0) as i8,
    value: f32::from,
    weight: f16::from_f32,
    scale: f16::from_f32,
    rounding: 1.5e-3,
};

const HIFLOAT8: Types<HiFloat8, bf16, f32> = Types {
    element: HiFloat8::from_f32,
    value: HiFloat8::to_f32,
    weight: bf16::from_f32,
    scale: |number| number,
    rounding: 1e-5,
};

impl Draw {
    fn with_heads(self, heads: usize) -> Self {
        Draw { heads, ..self }
    }

    fn run<Q: Element, W: Number, S: Number>(&self, stream: &Stream, types: &Types<Q, W, S>, best_first: bool) {
        let placed = self.batch.place(stream);
        let shape = |rows: &[usize], last: &[usize]| [rows, last].concat();
        let random = |seed: u64, shape: &[usize]| numbers(self.seed ^ seed, shape.iter().product());
        let of_query = shape(&placed.query_rows, &[self.heads, DIM]);
        let of_weights = shape(&placed.query_rows, &[self.heads]);
        let (of_key, of_scale) = (shape(&placed.key_rows, &[1, DIM]), shape(&placed.key_rows, &[1]));
        let elements =
            |seed, shape: &[usize]| -> Vec<Q> { random(seed, shape).into_iter().map(types.element).collect() };
        // Scales are above 0.
        let scales = |seed, shape: &[usize]| -> Vec<S> {
            let scale = |number: f32| (types.scale)((number + 1.5) / 64.0);
            random(seed, shape).into_iter().map(scale).collect()
        };
        let (query, key) = (elements(1, &of_query), elements(2, &of_key));
        let (query_scale, key_scale) = (scales(4, &of_weights), scales(5, &of_scale));
        let weights: Vec<W> = random(3, &of_weights).into_iter().map(types.weight).collect();
        let inputs = (
            (&stream.upload(&query, &of_query[..]).unwrap(), &stream.upload(&query_scale, &of_weights[..]).unwrap()),
            (&stream.upload(&key, &of_key[..]).unwrap(), &stream.upload(&key_scale, &of_scale[..]).unwrap()),
            &stream.upload(&weights, &of_weights[..]).unwrap(),
        );
        // Some rows see no key, and some are of no sequence.
        let call = QuantLightningIndexer::new(self.count).causal(self.causal);
        let call = call.allow_lint("quant_indexer.rows_without_keys");
        let call = call.allow_lint("quant_indexer.rows_left_out");
        let plan = call.plan(&placed.sequences, inputs).unwrap();
        let indices = plan.launch(stream, inputs).unwrap().download(stream).unwrap();

        let value = |element: &Q| f64::from((types.value)(*element));
        for (index, (first, places)) in placed.places.iter().enumerate() {
            for row in 0..self.batch.written(&placed, self.batch.lengths[index].0) {
                let number = first + row;
                // The score of a key, and the sum of the magnitudes of its terms.
                let score = |&key_row: &usize| -> (f64, f64) {
                    let of_head = |head: usize| {
                        let head = number * self.heads + head;
                        let pairs = query[head * DIM..][..DIM].iter().zip(&key[key_row * DIM..]);
                        let dot: f64 = pairs.map(|(q, k)| value(q) * value(k)).sum();
                        let scale = query_scale[head].to_f64() * key_scale[key_row].to_f64();
                        weights[head].to_f64() * (scale * dot).max(0.0)
                    };
                    let terms = (0..self.heads).map(of_head);
                    terms.fold((0.0, 0.0), |(sum, all), term| (sum + term, all + term.abs()))
                };
                let candidates = self.batch.candidates(index, row, self.causal);
                let scores: Vec<(f64, f64)> = places[..candidates].iter().map(score).collect();
                let got = &indices[number * self.count..][..self.count];
                let kept = self.count.min(candidates);
                assert!(got[kept..].iter().all(|&index| index == -1), "{self:?}: {got:?}");
                let distinct: BTreeSet<i32> = got[..kept].iter().copied().collect();
                assert_eq!(distinct.len(), kept, "{self:?}: a key twice");
                let largest = scores.iter().map(|(_, all)| *all).fold(0.0, f64::max);
                let near = |a: f64, b: f64| (a - b).abs() <= 2.0 * types.rounding * largest + 1e-9;
                let of = |&index: &i32| scores[usize::try_from(index).unwrap()].0;
                let mut of_got: Vec<f64> = got[..kept].iter().map(of).collect();
                if best_first {
                    let ordered = |pair: &[f64]| pair[0] > pair[1] || near(pair[0], pair[1]);
                    assert!(of_got.windows(2).all(ordered), "{self:?}: {of_got:?}");
                }
                of_got.sort_by(|a, b| b.total_cmp(a));
                let mut best: Vec<f64> = scores.iter().map(|(score, _)| *score).collect();
                best.sort_by(|a, b| b.total_cmp(a));
                for (got, want) in of_got.iter().zip(&best) {
                    assert!(near(*got, *want), "{self:?}: {got} is not {want}");
                }
            }
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(32))]

    #[test]
    fn rows_choose_by_quantised_scores_on_every_product_and_release(draw in draws(), target in 0..6) {
        let e4m3 = |rounding| (Float8E4M3Fn::from_f32 as fn(f32) -> _, Float8E4M3Fn::to_f32 as fn(_) -> f32, rounding);
        match target {
            0 => draw.with_heads(64).run(&harness::emulated_stream(Soc::AtlasA2, Cann::V8_5), &INT8, true),
            1 => draw.run(&harness::emulated_stream(Soc::AtlasA3, Cann::V9_1), &INT8, true),
            2 => draw.run(&harness::emulated_stream(Soc::Ascend950, Cann::V9_1), &INT8, false),
            3 => {
                let (element, value, rounding) = e4m3(1e-5);
                let (weight, scale) = (bf16::from_f32, |number| number);
                let types = Types { element, value, weight, scale, rounding };
                draw.with_heads(24).run(&harness::emulated_stream(Soc::Ascend950, Cann::V9_0), &types, false);
            }
            4 => {
                let (element, value, rounding) = e4m3(1e-5);
                let (weight, scale) = (f16::from_f32, f16::from_f32);
                let types = Types { element, value, weight, scale, rounding };
                draw.run(&harness::emulated_stream(Soc::Ascend950, Cann::V9_2), &types, false);
            }
            _ => Draw { count: 2048, ..draw }.run(&harness::emulated_stream(Soc::Ascend950, Cann::V9_2), &HIFLOAT8, false),
        }
    }
}

#[test]
fn rows_choose_2048_of_more_keys_of_hifloat8() {
    for block_size in [None, Some(128)] {
        let batch = Batch { lengths: vec![(2, 2300)], packed: true, block_size };
        let draw = Draw { batch, heads: 8, count: 2048, causal: true, seed: 7 };
        draw.run(&harness::emulated_stream(Soc::Ascend950, Cann::V9_2), &HIFLOAT8, false);
    }
}

/// The key of two that a row chooses, whose heads have these weights and scales.
fn chosen<const HEADS: usize>(heads: [([i8; 2], f16, f16); HEADS], keys: [[i8; 2]; 2]) -> i32 {
    let stream = harness::emulated_stream(Soc::AtlasA2, Cann::V9_1);
    let rows =
        |rows: &[[i8; 2]]| -> Vec<i8> { rows.iter().flat_map(|row| [&row[..], &[0; DIM - 2]].concat()).collect() };
    let query = stream.upload(&rows(&heads.map(|(elements, ..)| elements)), [1, HEADS, DIM]).unwrap();
    let weights = stream.upload(&heads.map(|(_, weight, _)| weight), [1, HEADS]).unwrap();
    let query_scale = stream.upload(&heads.map(|(.., scale)| scale), [1, HEADS]).unwrap();
    let key = stream.upload(&rows(&keys), [2, 1, DIM]).unwrap();
    let key_scale = stream.upload(&[f16::ONE; 2], [2, 1]).unwrap();
    let sequences = SparseSequences::packed(&stream, &[1], &[2]).unwrap();
    let inputs = ((&query, &query_scale), (&key, &key_scale), &weights);
    let plan = QuantLightningIndexer::new(1).plan(&sequences, inputs).unwrap();
    plan.launch(&stream, inputs).unwrap().download(&stream).unwrap()[0]
}

/// Of keys that score alike the first is chosen, so the second shows whether its score is the larger one.
#[test]
fn int8_scores_are_rounded_to_halves() {
    // 4098 / 1024 rounds to 4096 / 1024, 4104 / 1024 does not.
    for (last, want) in [(1, 0), (4, 1)] {
        assert_eq!(chosen([([64, 2], f16::ONE, f16::ONE)], [[64, 0], [64, last]]), want);
    }
    // (1 + 2^-10)^2 rounds to 1 + 2^-9, the weight of the other head.
    let [one, two] = [1, 2].map(|units| f16::from_bits(f16::ONE.to_bits() + units));
    let heads = |of_first: f16| [([32, 0], of_first, one), ([0, 32], two, f16::ONE)];
    let keys = [[0, 32], [32, 0]];
    assert_eq!([one, two].map(|weight| chosen(heads(weight), keys)), [0, 1]);
}

#[test]
fn sequences_beyond_the_tensors_and_other_contracts_are_refused() {
    let stream = harness::emulated_stream(Soc::AtlasA2, Cann::V9_1);
    let query = stream.upload(&[1i8; 3 * 8 * DIM], [3, 8, DIM]).unwrap();
    let key = stream.upload(&[1i8; 40 * DIM], [40, 1, DIM]).unwrap();
    let halves = |shape: &[usize]| filled(&stream, f16::ONE, shape);
    let (weights, query_scale, key_scale) = (halves(&[3, 8]), halves(&[3, 8]), halves(&[40, 1]));
    let inputs = ((&query, &query_scale), (&key, &key_scale), &weights);
    let packed = |queries: &[usize], keys: &[usize]| SparseSequences::packed(&stream, queries, keys).unwrap();
    let call = QuantLightningIndexer::new(16);
    let sequences = packed(&[1, 2], &[20, 20]);
    let plan = call.plan(&sequences, inputs).unwrap();
    assert_eq!(plan.operator(), "aclnnQuantLightningIndexer");
    assert_eq!(plan.launch(&stream, inputs).unwrap().shape(), [3, 1, 16]);
    for (queries, keys, rule) in [
        (&[1, 3], &[20, 20], "contents"),
        (&[1, 2], &[20, 21], "contents"),
        (&[1, 1], &[20, 20], "rows_left_out"),
        (&[1, 2], &[20, 1], "rows_without_keys"),
    ] {
        let plan = call.plan(&packed(queries, keys), inputs);
        assert_eq!(violated(plan), format!("quant_indexer.{rule}"));
    }
    let short = halves(&[39, 1]);
    let plan = call.plan(&sequences, (inputs.0, (&key, &short), &weights));
    assert_eq!(violated(plan), "quant_indexer.key_scale");
    assert_eq!(violated(QuantLightningIndexer::new(2049).plan(&sequences, inputs)), "quant_indexer.count");
    // Rows of so many indices cannot be described, nor can those of a query without heads.
    let refused = QuantLightningIndexer::new(usize::MAX).plan(&sequences, inputs).unwrap_err().to_string();
    assert!(refused.contains("choose fewer keys"), "{refused}");
    let flat = query.reshape([3 * 8 * DIM]).unwrap();
    let flat = ((&flat, &query_scale), (&key, &key_scale), &weights);
    let refused = call.plan(&sequences, flat).unwrap_err().to_string();
    assert!(refused.contains("[T1, N1, D]"), "{refused}");
}
