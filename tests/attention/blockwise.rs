//! Attention by blocks and rows under any mask, against the mask itself in double precision.

use std::num::NonZeroU64;
use std::ops::Range;

use ascend_attention::block_sparse::{BlockMask, BlockSparseAttention};
use ascend_attention::blockwise::{BlockCover, BlockwiseAttention, SIDE, SIDE_BLOCK};
use ascend_attention::mask::{HostMask, MaskForm};
use ascend_attention::spec::geometry::{BlockMap, MaskGeometry, TriangleMix, TrianglePart, TriangleRows};
use ascend_attention::spec::{Cann, Soc, SparseMode, Visibility};
use ascend_attention::{Error, Layout, Stream, Tensor, bf16, f16};
use proptest::prelude::*;

use crate::harness;
use harness::reference::{self, Half, Logical};
use harness::{filled, numbers};

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
    let plan = BlockwiseAttention::new(SCALE).plan(stream, &cover, given).unwrap();
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
                    (got.to_f64() - want).abs() <= 2.0 * T::TOLERANCE,
                    "row {row} of {sequence:?}: {got:?}, expected {want}"
                );
            }
        }
    }
    Ok(())
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
        let stream = harness::emulated_stream(soc, cann);
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
        let (mut full, mut pages, mut filled, mut row_calls) = (0u128, 0u128, 0u128, 0usize);
        // Whether each row sees full blocks, whole pages, and a last page in part.
        let mut parts = Vec::new();
        for (sequence, mask) in sequences.iter().zip(&masks) {
            let shown = |row: usize, keys: Range<usize>| {
                let keys = keys.start..keys.end.min(sequence.keys);
                let seen = keys.clone().filter(|&key| mask.sees(row as u64, key as u64)).count();
                (seen, keys.len())
            };
            let begin = parts.len();
            for rows in (0..sequence.rows).step_by(SIDE) {
                let rows = rows..sequence.rows.min(rows + SIDE);
                let mut of_rows = vec![[false; 3]; rows.len()];
                for keys in (0..sequence.keys).step_by(SIDE) {
                    let seen = rows.clone().map(|row| shown(row, keys..keys + SIDE));
                    let seen: Vec<_> = seen.collect();
                    if seen.iter().all(|(seen, of)| seen == of) {
                        full += 1;
                        of_rows.iter_mut().for_each(|parts| parts[0] = true);
                    } else {
                        pages += seen.iter().filter(|(seen, _)| *seen > 0).count() as u128;
                        let part = if keys + SIDE <= sequence.keys { 1 } else { 2 };
                        of_rows.iter_mut().zip(&seen).for_each(|(parts, (seen, _))| parts[part] |= *seen > 0);
                    }
                }
                filled += u128::from(!of_rows[0][0]);
                parts.extend(of_rows);
            }
            // Sequences are too short for a second call of the same pages.
            row_calls += [1, 2].into_iter().filter(|part| parts[begin..].iter().any(|row| row[*part])).count();
        }
        prop_assert_eq!(cover.full_blocks(), full);
        let blocks = if full > 0 { full + filled } else { 0 };
        prop_assert_eq!(cover.block_pairs(), blocks * (SIDE * SIDE) as u128);
        // Rows between two that see keys of a part take a page that nobody reads.
        let side = SIDE as u128;
        prop_assert!(cover.row_pairs() >= pages * side);
        let rows: usize = sequences.iter().map(|sequence| sequence.rows).sum();
        prop_assert!(cover.row_pairs() <= (pages + 2 * rows as u128) * side);
        prop_assert!(cover.row_mask_bytes() >= cover.row_pairs());
        let merges = parts.chunk_by(|one, next| one == next).count();
        prop_assert_eq!(cover.calls(), usize::from(full > 0) + row_calls + merges);
    }
}

/// The operator alone, with the full blocks of a mask, sees no hidden key.
#[test]
fn masks_of_full_blocks_show_no_hidden_key() {
    let stream = harness::emulated_stream(Soc::AtlasA2, Cann::V9_1);
    // Each block of rows sees the first block of keys whole.
    let masks = [MaskGeometry::prefix(300, 300, 128), MaskGeometry::prefix(200, 150, 128)];
    let maps = masks.each_ref().map(|mask| BlockMap::new(mask, SIDE_BLOCK));
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

/// The keys of maps with other sides than the mask's would be other keys to the operator.
#[test]
fn maps_of_other_sides_are_refused() {
    let invalid = &ascend_attention::rules::ARGUMENT_VALUE;
    let stream = harness::emulated_stream(Soc::AtlasA2, Cann::V9_1);
    let [whole, half, odd] = [128, 64, 129].map(|side| NonZeroU64::new(side).unwrap());
    let (long, short) = (MaskGeometry::full(128, 512), MaskGeometry::full(128, 256));
    let maps = [BlockMap::of_sides(&long, whole, whole), BlockMap::of_sides(&short, whole, half)];
    let mixed = BlockMask::full_blocks(&stream, &maps, 1).unwrap_err();
    assert!(mixed.breaks(invalid) && mixed.to_string().contains("blocks of 128 rows and 64 keys"), "{mixed}");

    // Causal blocks of 129 and of 128 keys are as many.
    let mask = MaskGeometry::prefix(130, 130, 129);
    let [wide, narrow] = [odd, whole].map(|side| BlockMap::of_sides(&mask, whole, side));
    let [wide, narrow] = [wide, narrow].map(|map| BlockMask::full_blocks(&stream, &[map], 1).unwrap());
    let ones = stream.upload(&[f16::ONE; 130 * 64], [130, 1, 64]).unwrap();
    let call = BlockSparseAttention::new(Layout::Tnd, 0.125).actual_seq_lengths(&[130], &[130]);
    let refused = call.plan((&ones, &ones, &ones, &wide)).unwrap_err();
    assert!(refused.breaks(invalid), "{refused}");
    let plan = call.plan((&ones, &ones, &ones, &narrow)).unwrap();
    assert!(plan.launch(&stream, (&ones, &ones, &ones, &wide)).unwrap_err().breaks(invalid));
    plan.launch(&stream, (&ones, &ones, &ones, &narrow)).unwrap();
    stream.synchronize().unwrap();
}

/// Without full blocks FusedInferAttentionScore is enough, and takes heads and releases that the other operator
/// refuses.
#[test]
fn masks_without_full_blocks_need_no_operator_of_blocks() {
    let window = |rows| Sequence { rows, keys: rows, shown: Shown::Band { keys_before: 20 } };
    let sequences = [window(200), Sequence { shown: Shown::Nothing, ..window(40) }, window(100)];
    let masks: Vec<AnyMask> = sequences.iter().map(Sequence::mask).collect();
    let cover = BlockCover::new(&masks).unwrap();
    assert_eq!((cover.full_blocks(), cover.block_pairs()), (0, 0));
    for (cann, dim) in [(Cann::V8_5, 128), (Cann::V9_1, 96), (Cann::V8_5, 96)] {
        let stream = harness::emulated_stream(Soc::AtlasA2, cann);
        follows::<bf16>(&stream, &sequences, ([2, 1], dim), 7).unwrap();
        follows::<bf16>(&stream, &sequences[1..2], ([2, 1], dim), 7).unwrap();
    }
}

/// A plan keeps the masks and tables of its calls, and what rows without keys become.
#[test]
fn plans_count_what_they_keep() {
    let stream = harness::emulated_stream(Soc::AtlasA2, Cann::V9_1);
    // Each fifth row sees one key, the others none.
    let shown = HostMask::from_fn(20, 128, MaskForm::INT8, |row, key| row % 5 == 0 && key == row).unwrap();
    let cover = BlockCover::new(&[shown.entry(0)]).unwrap();
    let query = stream.upload(&[f16::ONE; 20 * 2 * 64], [20, 2, 64]).unwrap();
    let key = stream.upload(&[f16::ONE; 128 * 64], [128, 1, 64]).unwrap();
    let plan = BlockwiseAttention::new(SCALE).plan(&stream, &cover, [&query, &key, &key]).unwrap();
    // 16 rows of a page, and 16 that see nothing: elements and a log-sum-exp of each head.
    let kept = 16 * (128 + size_of::<i32>()) + 16 * 2 * (64 * size_of::<f16>() + size_of::<f32>());
    assert_eq!(plan.kept_bytes(), kept);
    assert_eq!(cover.row_mask_bytes(), 16 * 128);
}

/// One row that sees every page does not give its columns to all others.
#[test]
fn rows_of_many_pages_have_calls_of_their_own() {
    let pages = 200;
    let keys = pages * SIDE;
    let rows = 600;
    let wide = |row: usize| row == 300;
    let shown = HostMask::from_fn(rows, keys, MaskForm::INT8, |row, key| match wide(row) {
        true => key % SIDE == 5,
        false => key == row,
    });
    let shown = shown.unwrap();
    let cover = BlockCover::new(&[shown.entry(0)]).unwrap();
    let side = SIDE as u128;
    assert_eq!(cover.row_pairs(), (rows - 1 + pages) as u128 * side);
    // Not the 120,000 pages of as many columns as the widest row has.
    let spare = cover.row_mask_bytes() - cover.row_pairs();
    assert!(spare <= cover.row_pairs() + 3 * 4096 * side, "{spare}");
    assert_eq!(cover.calls(), 3 + 1);
    let stream = harness::emulated_stream(Soc::AtlasA2, Cann::V9_1);
    let query = stream.upload(&vec![f16::ONE; rows * 64], [rows, 1, 64]).unwrap();
    let values: Vec<f16> = (0..keys).flat_map(|key| [f16::from_f32((key / SIDE) as f32); 64]).collect();
    let value = stream.upload(&values, [keys, 1, 64]).unwrap();
    let plan = BlockwiseAttention::new(SCALE).plan(&stream, &cover, [&query, &value, &value]).unwrap();
    assert!(plan.kept_bytes() as u128 >= cover.row_mask_bytes());
    let out = plan.launch(&stream, [&query, &value, &value]).unwrap().download(&stream).unwrap();
    for row in (0..rows).filter(|row| !wide(*row)) {
        assert_eq!(out[row * 64].to_f32(), (row / SIDE) as f32, "row {row}");
    }
    // All scores but the largest vanish beside it.
    assert_eq!(out[300 * 64].to_f32(), (pages - 1) as f32);
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

    let stream = harness::emulated_stream(Soc::AtlasA2, Cann::V9_1);
    let half =
        |stream: &Stream, rows: usize, dim: usize| stream.upload(&vec![f16::ONE; rows * dim], [rows, 1, dim]).unwrap();
    let attention = BlockwiseAttention::new(SCALE);
    let ones = half(&stream, 100, 64);
    let plan = attention.plan(&stream, &cover, [&ones; 3]).unwrap();
    assert!(plan.part_bytes() > 0);
    assert_eq!(plan.kept_bytes(), 1);
    assert_eq!(plan.launch(&stream, [&ones; 3]).unwrap().download(&stream).unwrap(), [f16::ONE; 6400]);
    let fewer = half(&stream, 99, 64);
    let planned = &ascend_attention::rules::PLAN_TENSORS;
    for given in [[&fewer, &ones, &ones], [&ones, &ones, &fewer]] {
        assert!(plan.launch(&stream, given).unwrap_err().breaks(planned));
    }
    let flat = stream.upload(&[f16::ONE; 6400], [100, 64]).unwrap();
    for given in [[&fewer, &ones, &ones], [&ones, &fewer, &ones], [&ones, &ones, &fewer], [&flat, &ones, &ones]] {
        assert!(attention.plan(&stream, &cover, given).unwrap_err().breaks(invalid));
    }
    let wide = half(&stream, 100, 96);
    assert!(attention.takes(&stream, [&ones; 3]).unwrap() && !attention.takes(&stream, [&wide; 3]).unwrap());
    let wide = attention.plan(&stream, &cover, [&wide; 3]).unwrap_err();
    assert!(wide.breaks(&ascend_attention::spec::ops::block_sparse_attention::rules::HEAD_DIM), "{wide}");
    let older = harness::emulated_stream(Soc::AtlasA2, Cann::V8_5);
    let old = half(&older, 100, 64);
    assert!(!attention.takes(&older, [&old; 3]).unwrap());
    let missing = attention.plan(&older, &cover, [&old; 3]);
    assert!(matches!(missing, Err(Error::MissingOperator { .. })), "{missing:?}");
}

/// What is refused under a mask that some call computes is refused under one that shows nothing.
#[test]
fn tensors_that_do_not_fit_are_refused_whatever_the_mask_shows() {
    use ascend_attention::rules::{ARGUMENT_DEVICE, ARGUMENT_VALUE, PLAN_TENSORS};

    let stream = harness::emulated_stream(Soc::AtlasA2, Cann::V9_1);
    let elsewhere = stream.device().runtime().device(1).unwrap().stream().unwrap();
    let shown = [Shown::Nothing, Shown::Band { keys_before: 20 }, Shown::Prefix(200)];
    for shown in shown {
        let mask = Sequence { rows: 200, keys: 300, shown: shown.clone() }.mask();
        let cover = BlockCover::new(&[mask]).unwrap();
        let ones = |stream: &Stream, shape: [usize; 3]| filled(stream, f16::ONE, shape);
        let strided = |tensor: &Tensor<f16>| {
            let [rows, heads, dim] = <[usize; 3]>::try_from(tensor.shape()).unwrap();
            ones(&stream, [rows, heads, 2 * dim]).narrow(2, 0..dim).unwrap()
        };
        let [query, key] = [[200, 2, 64], [300, 1, 64]].map(|shape| ones(&stream, shape));
        let attention = BlockwiseAttention::new(SCALE);
        let plan = |given: [&Tensor<f16>; 3]| attention.plan(&stream, &cover, given).map(drop).unwrap_err();
        for shape in [[300, 1, 128], [300, 4, 32], [300, 7, 13], [300, 2, 64]] {
            let refused = plan([&query, &key, &ones(&stream, shape)]);
            assert!(refused.breaks(&ARGUMENT_VALUE), "{shown:?}: {refused}");
            assert!(refused.to_string().contains("given value: ["), "{refused}");
        }
        for shape in [[300, 1, 128], [300, 3, 64], [300, 0, 64]] {
            let other = ones(&stream, shape);
            let refused = plan([&query, &other, &other]);
            assert!(refused.to_string().contains("given key: ["), "{refused}");
        }
        let refused = BlockwiseAttention::new(f64::NAN).plan(&stream, &cover, [&query, &key, &key]).unwrap_err();
        assert!(refused.to_string().contains("given scale: NaN"), "{refused}");
        let refused = plan([&strided(&query), &key, &key]);
        assert!(refused.breaks(&ARGUMENT_VALUE) && refused.to_string().contains("given query: "), "{refused}");
        let refused = attention.plan(&elsewhere, &cover, [&query, &key, &key]).unwrap_err();
        assert!(refused.breaks(&ARGUMENT_DEVICE), "{refused}");

        let plan = attention.plan(&stream, &cover, [&query, &key, &key]).unwrap();
        let moved =
            [&query, &key, &key].map(|tensor| ones(&elsewhere, <[usize; 3]>::try_from(tensor.shape()).unwrap()));
        let refused = plan.launch(&stream, [&moved[0], &key, &key]).unwrap_err();
        assert!(refused.breaks(&ARGUMENT_DEVICE) && refused.to_string().contains("given query: "), "{refused}");
        let refused = plan.launch(&elsewhere, moved.each_ref()).unwrap_err();
        assert!(refused.breaks(&ARGUMENT_DEVICE), "{refused}");
        let refused = plan.launch(&stream, [&strided(&query), &key, &key]).unwrap_err();
        assert!(refused.breaks(&PLAN_TENSORS) && refused.to_string().contains("given query: "), "{refused}");
        let refused = plan.launch_into(&stream, [&query, &key, &key], &mut strided(&query)).unwrap_err();
        assert!(refused.breaks(&PLAN_TENSORS) && refused.to_string().contains("given out: "), "{refused}");
        // A part of a larger tensor is as contiguous as the planned one.
        let part = ones(&stream, [201, 2, 64]).narrow(0, 1..201).unwrap();
        plan.launch(&stream, [&part, &key, &key]).unwrap();
        stream.synchronize().unwrap();
    }
}
