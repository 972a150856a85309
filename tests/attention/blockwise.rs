//! Attention by blocks and rows under any mask, against the mask itself in double precision.

use std::num::NonZeroU64;
use std::ops::Range;

use ascend_attention::block_sparse::{BlockMask, BlockSparseAttention};
use ascend_attention::blockwise::{BlockCover, BlockwiseAttention, SIDE};
use ascend_attention::mask::{HostMask, MaskForm};
use ascend_attention::spec::geometry::{BlockMap, MaskGeometry, TriangleMix, TrianglePart, TriangleRows};
use ascend_attention::spec::{Cann, Soc, SparseMode, Visibility};
use ascend_attention::{Error, Layout, Machine, Runtime, Stream, bf16, f16};
use proptest::prelude::*;

use crate::harness;
use harness::numbers;
use harness::reference::{self, Half, Logical};

const SCALE: f64 = 0.15;

/// The mask of one sequence, by what it is made from.
#[derive(Clone, Debug)]
enum Shown {
    /// A window, or causal where it is long.
    Band {
        keys_before: i64,
    },
    Triangle {
        sizes: [u64; 3],
        first_row: u64,
    },
    Prefix(u64),
    /// A share of all keys.
    Bitmap {
        share: f32,
        seed: u64,
    },
    /// Blocks, alternately whole and hidden, and the row's own key.
    Checkered,
    Nothing,
}

#[derive(Clone, Debug)]
struct Sequence {
    rows: usize,
    keys: usize,
    shown: Shown,
}

enum AnyMask {
    Geometry(MaskGeometry),
    Host(HostMask),
}

impl Visibility for AnyMask {
    fn q_len(&self) -> u64 {
        match self {
            Self::Geometry(geometry) => geometry.q_len(),
            Self::Host(mask) => mask.entry(0).q_len(),
        }
    }

    fn kv_len(&self) -> u64 {
        match self {
            Self::Geometry(geometry) => geometry.kv_len(),
            Self::Host(mask) => mask.entry(0).kv_len(),
        }
    }

    fn each_run(&self, row: u64, visit: &mut dyn FnMut(Range<u64>)) {
        match self {
            Self::Geometry(geometry) => geometry.runs(row).for_each(visit),
            Self::Host(mask) => mask.entry(0).each_run(row, visit),
        }
    }

    fn sees(&self, row: u64, key: u64) -> bool {
        match self {
            Self::Geometry(geometry) => geometry.sees(row, key),
            Self::Host(mask) => mask.entry(0).sees(row, key),
        }
    }
}

impl Sequence {
    fn mask(&self) -> AnyMask {
        let (rows, keys) = (self.rows as u64, self.keys as u64);
        let host = |shows: &dyn Fn(usize, usize) -> bool| {
            let mask = HostMask::from_fn(self.rows, self.keys, MaskForm::INT8, shows);
            AnyMask::Host(mask.unwrap())
        };
        match &self.shown {
            Shown::Band { keys_before } => {
                AnyMask::Geometry(MaskGeometry::new(SparseMode::Band, true, rows, keys, *keys_before, 0))
            }
            Shown::Triangle { sizes: [sinks, window, last], first_row } => {
                let rows = TriangleRows { first_row: *first_row, rows, prompt_len: first_row + rows };
                AnyMask::Geometry(TriangleMix::new(*sinks, *window, *last).geometry(TrianglePart::Triangle, rows))
            }
            Shown::Prefix(prefix) => AnyMask::Geometry(MaskGeometry::prefix(rows, keys, *prefix)),
            Shown::Bitmap { share, seed } => {
                let draws = numbers(*seed, self.rows * self.keys);
                host(&|row, key| draws[row * self.keys + key].abs() < *share)
            }
            Shown::Checkered => host(&|row, key| row == key || (row / SIDE + key / SIDE).is_multiple_of(2)),
            Shown::Nothing => host(&|_, _| false),
        }
    }
}

fn sequences() -> impl Strategy<Value = Vec<Sequence>> {
    let shown = prop_oneof![
        (0i64..400).prop_map(|keys_before| Shown::Band { keys_before }),
        (0u64..200, 0u64..300, 0u64..200)
            .prop_map(|(sinks, window, last)| Shown::Triangle { sizes: [sinks, window, last], first_row: 0 }),
        (0u64..500).prop_map(Shown::Prefix),
        (prop_oneof![Just(0.003f32), Just(0.5)], any::<u64>()).prop_map(|(share, seed)| Shown::Bitmap { share, seed }),
        Just(Shown::Checkered),
        Just(Shown::Nothing),
    ];
    let sequence = (1usize..300, 0usize..200, shown).prop_map(|(rows, before, shown)| {
        let shown = match shown {
            Shown::Triangle { sizes, .. } => Shown::Triangle { sizes, first_row: before as u64 },
            other => other,
        };
        Sequence { rows, keys: rows + before, shown }
    });
    let long = |all: &Vec<Sequence>| all.iter().map(|sequence| sequence.keys).sum::<usize>() >= SIDE;
    prop::collection::vec(sequence, 1..4).prop_filter("a page of keys", long)
}

/// Runs the masks, packed one behind the other, and compares each row of one head with the definition.
fn follows<T: Half + std::fmt::Debug>(
    stream: &Stream,
    sequences: &[Sequence],
    ([group, kv_heads], dim): ([usize; 2], usize),
    seed: u64,
) -> Result<(), TestCaseError> {
    let heads = group * kv_heads;
    let masks: Vec<AnyMask> = sequences.iter().map(Sequence::mask).collect();
    let logical = |part: u64, heads: usize, length: fn(&Sequence) -> usize| -> Vec<Logical<T>> {
        let all = sequences.iter().zip(0u64..);
        all.map(|(sequence, index)| {
            let seed = (seed % (1 << 40)) * 64 + index * 4 + part;
            Logical::random(seed, [1, heads, length(sequence), dim])
        })
        .collect()
    };
    let logical = [
        logical(1, heads, |sequence| sequence.rows),
        logical(2, kv_heads, |sequence| sequence.keys),
        logical(3, kv_heads, |sequence| sequence.keys),
    ];
    let tensors = logical.each_ref().map(|of| {
        let elements: Vec<T> = of.iter().flat_map(|of| of.packed(0..of.rows)).collect();
        let heads = of[0].heads;
        stream.upload(&elements, [elements.len() / heads / dim, heads, dim]).unwrap()
    });
    let given = tensors.each_ref();
    let cover = BlockCover::new(&masks).unwrap();
    let plan = BlockwiseAttention::new(heads, kv_heads, SCALE).plan(stream, &cover, given).unwrap();
    let mut out = stream.upload(&vec![T::NAN; tensors[0].len()], tensors[0].shape()).unwrap();
    plan.launch_into(stream, given, &mut out).unwrap();
    let out = out.download(stream).unwrap();
    let mut rows = out.chunks(heads * dim);
    for (index, (sequence, mask)) in sequences.iter().zip(&masks).enumerate() {
        let [query, key, value] = logical.each_ref().map(|of| of[index].exact());
        for row in 0..sequence.rows {
            let head = row * 7 % heads;
            let visible = |key: usize| mask.sees(row as u64, key as u64);
            let want = reference::row(&query, &key, &value, (0, 0), head, row, SCALE, visible);
            let want = want.map_or_else(|| vec![0.0; dim], |(row, _)| row);
            let got = &rows.next().unwrap()[head * dim..][..dim];
            for (got, want) in got.iter().zip(want) {
                // The parts are rounded before they are merged.
                prop_assert!(
                    (got.to() - want).abs() <= 2.0 * T::TOLERANCE,
                    "row {row} of {sequence:?}: {got:?}, expected {want}"
                );
            }
        }
    }
    Ok(())
}

fn stream_of(soc: Soc, cann: Cann) -> Stream {
    let runtime = Runtime::emulated_as(&Machine::new(soc, cann)).unwrap();
    runtime.device(0).unwrap().stream().unwrap()
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(24) })]

    #[test]
    fn any_masks_of_packed_sequences_are_followed_exactly(
        sequences in sequences(), heads in (1usize..4, 1usize..3), wide: bool, half: bool, seed: u64,
        target in 0usize..6,
    ) {
        let (soc, cann) = [
            (Soc::AtlasA2, Cann::V9_0),
            (Soc::AtlasA3, Cann::V9_1),
            (Soc::AtlasA2, Cann::V9_2),
            (Soc::AtlasA3, Cann::V9_0),
            (Soc::Ascend950, Cann::V9_1),
            (Soc::Ascend950, Cann::V9_2),
        ][target];
        let stream = stream_of(soc, cann);
        let shape = (heads.into(), if wide { 128 } else { 64 });
        match half {
            true => follows::<f16>(&stream, &sequences, shape, seed)?,
            false => follows::<bf16>(&stream, &sequences, shape, seed)?,
        }
    }

    #[test]
    fn covers_count_what_they_compute(sequences in sequences()) {
        let masks: Vec<AnyMask> = sequences.iter().map(Sequence::mask).collect();
        let cover = BlockCover::new(&masks).unwrap();
        let (mut full, mut pages) = (0u128, 0u128);
        for (sequence, mask) in sequences.iter().zip(&masks) {
            let shown = |row: usize, keys: Range<usize>| {
                let keys = keys.start..keys.end.min(sequence.keys);
                let seen = keys.clone().filter(|&key| mask.sees(row as u64, key as u64)).count();
                (seen, keys.len())
            };
            for rows in (0..sequence.rows).step_by(SIDE) {
                let rows = rows..sequence.rows.min(rows + SIDE);
                for keys in (0..sequence.keys).step_by(SIDE) {
                    let seen = rows.clone().map(|row| shown(row, keys..keys + SIDE));
                    let seen: Vec<_> = seen.collect();
                    if seen.iter().all(|(seen, of)| seen == of) {
                        full += 1;
                    } else {
                        pages += seen.iter().filter(|(seen, _)| *seen > 0).count() as u128;
                    }
                }
            }
        }
        prop_assert_eq!(cover.full_blocks(), full);
        prop_assert_eq!(cover.block_pairs(), full * (SIDE * SIDE) as u128);
        // Rows between two that see keys of a part take a page that nobody reads.
        let side = SIDE as u128;
        prop_assert!(cover.row_pairs() >= pages * side);
        let rows: usize = sequences.iter().map(|sequence| sequence.rows).sum();
        prop_assert!(cover.row_pairs() <= (pages + 2 * rows as u128) * side);
        prop_assert!(cover.calls() >= 2);
    }
}

/// The operator alone, with the full blocks of a mask, sees no hidden key.
#[test]
fn masks_of_full_blocks_show_no_hidden_key() {
    let stream = stream_of(Soc::AtlasA2, Cann::V9_1);
    // Each block of rows sees the first block of keys whole.
    let masks = [MaskGeometry::prefix(300, 300, 128), MaskGeometry::prefix(200, 150, 128)];
    let side = NonZeroU64::new(128).unwrap();
    let maps = masks.each_ref().map(|mask| BlockMap::new(mask, side));
    let mask = BlockMask::full_blocks(&stream, &maps, 2).unwrap();
    let ones = |rows: usize| stream.upload(&vec![f16::ONE; rows * 2 * 64], [rows, 2, 64]).unwrap();
    // The value of a key is the number of its block.
    let values: Vec<f16> = (0..450).flat_map(|key| [f16::from_f32((key / 128) as f32); 128]).collect();
    let value = stream.upload(&values, [450, 2, 64]).unwrap();
    let (query, key) = (ones(500), ones(450));
    let inputs = (&query, &key, &value, &mask);
    let plan = BlockSparseAttention::new(Layout::Tnd, 0.0).allow_lint("block_sparse.scale_zero");
    let plan = plan.actual_seq_lengths(&[300, 200], &[300, 150]).softmax_lse(true).plan(inputs).unwrap();
    let got = plan.launch(&stream, inputs).unwrap();
    let (out, lse) = (got.out.download(&stream).unwrap(), got.softmax_lse.unwrap());
    let lse = lse.download(&stream).unwrap();
    for row in 0..300 {
        let keys = (row / 128).max(1) * 128;
        let mean: f32 = (0..keys).map(|key| (key / 128) as f32).sum::<f32>() / keys as f32;
        for head in 0..2 {
            assert_eq!(out[(row * 2 + head) * 64].to_f32(), mean, "row {row}");
            assert!((lse[row * 2 + head] - (keys as f32).ln()).abs() < 1e-5, "row {row}");
        }
    }
    let refused = BlockMask::full_blocks(&stream, &maps, usize::MAX).unwrap_err();
    assert!(refused.breaks(&ascend_attention::rules::ARGUMENT_VALUE), "{refused}");
}

#[test]
fn what_no_call_computes_is_refused() {
    let invalid = &ascend_attention::rules::ARGUMENT_VALUE;
    let mask = |rows, keys| MaskGeometry::new(SparseMode::RightDownCausal, true, rows, keys, 0, 0);
    let refused = |masks: &[MaskGeometry]| BlockCover::new(masks).unwrap_err().breaks(invalid);
    assert!(refused(&[]));
    assert!(refused(&[mask(3, 200), mask(0, 200)]));
    assert!(refused(&[mask(3, 0)]));
    assert!(refused(&[mask(1, 1 << 40)]));
    // A causal mask of 100 keys has no page; one that shows them all needs none.
    assert!(refused(&[mask(100, 100)]));
    let full = MaskGeometry::full(100, 100);
    let cover = BlockCover::new(&[full]).unwrap();
    assert_eq!((cover.full_blocks(), cover.row_pairs()), (1, 0));

    let stream = stream_of(Soc::AtlasA2, Cann::V9_1);
    let half =
        |stream: &Stream, rows: usize, dim: usize| stream.upload(&vec![f16::ONE; rows * dim], [rows, 1, dim]).unwrap();
    let attention = BlockwiseAttention::new(1, 1, SCALE);
    let ones = half(&stream, 100, 64);
    let plan = attention.plan(&stream, &cover, [&ones; 3]).unwrap();
    assert!(plan.part_bytes() > 0 && plan.kept_bytes() == 1);
    assert_eq!(plan.launch(&stream, [&ones; 3]).unwrap().download(&stream).unwrap(), [f16::ONE; 6400]);
    let fewer = half(&stream, 99, 64);
    let planned = &ascend_attention::rules::PLAN_TENSORS;
    for given in [[&fewer, &ones, &ones], [&ones, &ones, &fewer]] {
        assert!(plan.launch(&stream, given).unwrap_err().breaks(planned));
    }
    let uncovered = attention.plan(&stream, &cover, [&fewer, &ones, &ones]);
    assert!(uncovered.unwrap_err().breaks(&ascend_attention::spec::ops::block_sparse_attention::rules::LENGTH_SUM));
    let wide = half(&stream, 100, 96);
    let wide = attention.plan(&stream, &cover, [&wide; 3]).unwrap_err();
    assert!(wide.breaks(&ascend_attention::spec::ops::block_sparse_attention::rules::HEAD_DIM), "{wide}");
    let older = stream_of(Soc::AtlasA2, Cann::V8_5);
    let old = half(&older, 100, 64);
    let missing = attention.plan(&older, &cover, [&old; 3]);
    assert!(matches!(missing, Err(Error::MissingOperator { .. })), "{missing:?}");
}
