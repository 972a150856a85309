//! Attention to blocks of keys: random calls against the definition in double precision, and refusals.

use ascend_attention::block_sparse::{BlockMask, BlockSparseAttention};
use ascend_attention::spec::{Cann, Soc};
use ascend_attention::{Error, Layout, Number, Stream, Tensor, bf16, f16};
use proptest::prelude::*;

use crate::harness;
use harness::{filled, numbers, violated};

const DIM: usize = 64;
const SCALE: f64 = 0.15;
const KEYS: usize = 128;

/// A random call.
#[derive(Clone, Debug)]
struct Draw {
    layout: Layout,
    /// Query heads for each key head, and key heads.
    heads: [usize; 2],
    /// Rows of a block, which has 128 keys.
    rows: usize,
    lengths: [Vec<i64>; 2],
    lse: bool,
    seed: u64,
}

fn draws() -> impl Strategy<Value = Draw> {
    let lengths = prop::collection::vec((1i64..50, 1i64..400), 1..4);
    let layout = prop_oneof![Just(Layout::Tnd), Just(Layout::Bnsd), Just(Layout::Bsnd)];
    let rows = prop_oneof![Just(1usize), Just(16), Just(33), Just(200)];
    let heads = (1usize..4, 1usize..3);
    (layout, heads, rows, lengths, any::<bool>(), any::<u64>()).prop_map(|(layout, heads, rows, lengths, lse, seed)| {
        Draw { layout, heads: heads.into(), rows, lengths: lengths.into_iter().unzip().into(), lse, seed }
    })
}

impl Draw {
    fn heads_of(&self, side: usize) -> usize {
        self.heads[1] * if side == 0 { self.heads[0] } else { 1 }
    }

    fn most(&self, side: usize) -> usize {
        self.lengths[side].iter().copied().max().unwrap() as usize
    }

    fn shape(&self, side: usize) -> Vec<usize> {
        let (batch, rows) = (self.lengths[0].len(), self.most(side));
        let all = self.lengths[side].iter().sum::<i64>() as usize;
        let heads = self.heads_of(side);
        match self.layout {
            Layout::Tnd => vec![all, heads, DIM],
            Layout::Bnsd => vec![batch, heads, rows, DIM],
            _ => vec![batch, rows, heads, DIM],
        }
    }

    /// Number of a row among those of all heads and sequences.
    fn row(&self, side: usize, (sequence, head, row): (usize, usize, usize)) -> usize {
        let (rows, heads) = (self.most(side), self.heads_of(side));
        let before = self.lengths[side][..sequence].iter().sum::<i64>() as usize;
        match self.layout {
            Layout::Tnd => (before + row) * heads + head,
            Layout::Bnsd => (sequence * heads + head) * rows + row,
            _ => (sequence * rows + row) * heads + head,
        }
    }

    fn blocks(&self) -> [usize; 2] {
        [self.most(0).div_ceil(self.rows), self.most(1).div_ceil(KEYS)]
    }

    /// The mask, which names the first block for each block of rows, and none behind the keys of a sequence.
    fn mask(&self) -> Vec<i8> {
        let [rows, keys] = self.blocks();
        let of_sequence = self.heads_of(0) * rows * keys;
        let random = numbers(self.seed ^ 7, self.lengths[0].len() * of_sequence);
        let bytes = random.iter().enumerate().map(|(place, &number)| {
            let first = place % keys * KEYS;
            let inside = first < self.lengths[1][place / of_sequence] as usize;
            i8::from(first == 0 || inside && number > 0.2)
        });
        bytes.collect()
    }

    fn run<T: Number>(&self, stream: &Stream, of: fn(f32) -> T, rounding: f64) {
        let tensor = |seed: u64, side: usize| -> Tensor<T> {
            let shape = self.shape(side);
            let elements = numbers(self.seed ^ seed, shape.iter().product());
            let elements: Vec<T> = elements.into_iter().map(of).collect();
            stream.upload(&elements, &shape[..]).unwrap()
        };
        let [query, key, value] = [(1, 0), (2, 1), (3, 1)].map(|(seed, side)| tensor(seed, side));
        let ([rows, keys], bytes) = (self.blocks(), self.mask());
        let shape = [self.lengths[0].len(), self.heads_of(0), rows, keys];
        let mask = BlockMask::upload(stream, &bytes, shape).unwrap();
        let attention = BlockSparseAttention::new(self.layout, SCALE)
            .block_shape(self.rows, KEYS)
            .actual_seq_lengths(&self.lengths[0], &self.lengths[1])
            .softmax_lse(self.lse);
        let inputs = (&query, &key, &value, &mask);
        let plan = attention.plan(inputs).unwrap();
        let got = plan.launch(stream, inputs).unwrap();
        let exact = |tensor: &Tensor<T>| -> Vec<f64> {
            let elements = tensor.download(stream).unwrap();
            elements.into_iter().map(Number::to_f64).collect()
        };
        let [query, key, value, out] = [&query, &key, &value, &got.out].map(exact);
        let lse = got.softmax_lse.map(|lse| lse.download(stream).unwrap());
        assert_eq!(lse.is_some(), self.lse);
        for sequence in 0..self.lengths[0].len() {
            for head in 0..self.heads_of(0) {
                for row in 0..self.lengths[0][sequence] as usize {
                    let of_rows = (sequence * self.heads_of(0) + head) * rows + row / self.rows;
                    let bytes = &bytes[of_rows * keys..][..keys];
                    let number = self.row(0, (sequence, head, row));
                    let vector = |all: &[f64], at: usize| all[at * DIM..][..DIM].to_vec();
                    let of_query = vector(&query, number);
                    let seen: Vec<_> = (0..self.lengths[1][sequence] as usize)
                        .filter(|key| bytes[key / KEYS] != 0)
                        .map(|position| {
                            let at = self.row(1, (sequence, head / self.heads[0], position));
                            let pairs = of_query.iter().zip(vector(&key, at));
                            let score = SCALE * pairs.map(|(a, b)| a * b).sum::<f64>();
                            (score, vector(&value, at))
                        })
                        .collect();
                    let highest = seen.iter().map(|(score, _)| *score).reduce(f64::max);
                    let highest = highest.unwrap();
                    let total: f64 = seen.iter().map(|(score, _)| (score - highest).exp()).sum();
                    for column in 0..DIM {
                        let weighed = seen.iter().map(|(score, value)| (score - highest).exp() / total * value[column]);
                        let (got, want) = (out[number * DIM + column], weighed.sum::<f64>());
                        assert!((got - want).abs() <= rounding, "{self:?}: {got} is not {want}");
                    }
                    if let Some(lse) = &lse {
                        let (got, want) = (f64::from(lse[number]), highest + total.ln());
                        assert!((got - want).abs() < 1e-4, "{self:?}: {got} is not {want}");
                    }
                }
            }
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(20))]

    #[test]
    fn rows_attend_to_their_blocks_on_every_product_and_release(draw in draws(), half: bool, target in 0..5) {
        let (soc, cann) = match target {
            0 => (Soc::AtlasA2, Cann::V9_0),
            1 => (Soc::AtlasA3, Cann::V9_1),
            2 => (Soc::AtlasA2, Cann::V9_2),
            3 => (Soc::Ascend950, Cann::V9_1),
            _ => (Soc::Ascend950, Cann::V9_2),
        };
        let stream = harness::emulated_stream(soc, cann);
        let draw = match (soc, draw.layout) {
            (Soc::Ascend950, _) | (_, Layout::Tnd) => draw,
            _ => Draw { layout: Layout::Bnsd, ..draw },
        };
        match half {
            true => draw.run(&stream, f16::from_f32, 2e-3),
            false => draw.run(&stream, bf16::from_f32, 1.6e-2),
        }
    }
}

#[test]
fn masks_that_lead_to_other_keys_and_other_contracts_are_refused() {
    let stream = harness::emulated_stream(Soc::AtlasA2, Cann::V9_1);
    let half = |shape: &[usize]| filled(&stream, f16::ONE, shape);
    let mask = |bytes: [i8; 8]| BlockMask::upload(&stream, &bytes, [2, 1, 2, 2]).unwrap();
    let (query, key) = (half(&[200, 1, DIM]), half(&[300, 1, DIM]));
    let attention = BlockSparseAttention::new(Layout::Tnd, SCALE);
    let ragged = attention.clone().actual_seq_lengths(&[150, 50], &[200, 100]);
    let good = mask([1, 1, 0, 1, 1, 0, 1, 1]);
    let inputs = (&query, &key, &key, &good);
    let plan = ragged.plan(inputs).unwrap();
    assert_eq!(plan.operator(), "aclnnBlockSparseAttention");
    let got = plan.launch(&stream, inputs).unwrap();
    assert_eq!(got.out.shape(), [200, 1, DIM]);
    assert!(got.softmax_lse.is_none());

    // The second sequence has one block of keys: at the plan and at a launch with another mask.
    let beyond = mask([1, 1, 0, 1, 0, 1, 0, 0]);
    let contents = &ascend_attention::spec::ops::block_sparse_attention::rules::CONTENTS;
    let lead_astray = (&query, &key, &key, &beyond);
    assert_eq!(violated(ragged.plan(lead_astray)), contents.id);
    assert!(plan.launch(&stream, lead_astray).unwrap_err().breaks(contents));
    // Rows that see nothing are not written: at the plan and at a launch with another mask.
    let empty = mask([1, 1, 0, 0, 1, 0, 1, 1]);
    let without_keys = &ascend_attention::spec::ops::block_sparse_attention::rules::ROWS_WITHOUT_KEYS;
    let hidden = (&query, &key, &key, &empty);
    let refused = ragged.plan(hidden).unwrap_err();
    assert!(refused.breaks(without_keys) && refused.to_string().contains("[0, 0, 1] names no block"), "{refused}");
    assert!(plan.launch(&stream, hidden).unwrap_err().breaks(without_keys));
    ragged.clone().allow_lint(without_keys.id).plan(hidden).unwrap().launch(&stream, hidden).unwrap();
    // A mask that the host does not know could lead astray, but for sequences with as many blocks.
    let on_device = stream.upload(&[1i8; 8], [2, 1, 2, 2]).unwrap();
    let on_device = BlockMask::from(on_device);
    let unknown = (&query, &key, &key, &on_device);
    assert_eq!(violated(ragged.plan(unknown)), contents.id);
    let even = attention.clone().actual_seq_lengths(&[150, 50], &[150, 150]);
    let plan = even.plan(unknown).unwrap();
    plan.launch(&stream, unknown).unwrap();

    assert_eq!(violated(attention.plan(inputs)), "block_sparse.lengths");
    let narrow = ragged.clone().block_shape(128, 64);
    assert_eq!(violated(narrow.plan(inputs)), "block_sparse.block_keys");
    let precise = ragged.clone().inner_precise(4);
    assert_eq!(violated(precise.plan(inputs)), "block_sparse.precision");
    let swapped = BlockSparseAttention::new(Layout::Bsh, SCALE);
    assert_eq!(violated(swapped.plan(inputs)), "block_sparse.layout");
    // A release without the operator.
    let older = harness::emulated_stream(Soc::AtlasA2, Cann::V8_5);
    let old = older.upload(&[f16::ONE; DIM], [1, 1, DIM]).unwrap();
    let mask = BlockMask::upload(&older, &[1], [1, 1, 1, 1]).unwrap();
    let plan = attention.actual_seq_lengths(&[1], &[1]).plan((&old, &old, &old, &mask));
    assert!(matches!(plan, Err(Error::MissingOperator { .. })), "{plan:?}");
}
