//! Random calls.

use super::case::{Case, Mask};
use super::data::levels;
use super::flash_calls::{FlashCall, TARGET};
use crate::kernel::simd::Level;
use ascend_spec::geometry::{TriangleMix, TrianglePart, TriangleRows};
use ascend_spec::ops::fused_infer_attention_score::{self as fia, FiaCall};
use ascend_spec::{DType, Layout, MaskGeometry, Operator, SparseMode, TensorDesc};
use proptest::prelude::*;

const LAYOUTS: [Layout; 4] = [Layout::Bnsd, Layout::Bsnd, Layout::Bsh, Layout::BnsdBsnd];
const HALVES: [DType; 2] = [DType::Float16, DType::Bf16];

fn level() -> impl Strategy<Value = Level> {
    proptest::sample::select(levels())
}

/// Sizes around the edges of KV tiles, query blocks and lane groups.
fn length() -> impl Strategy<Value = usize> {
    prop_oneof![
        4 => 1usize..40,
        2 => 40usize..230,
        1 => proptest::sample::select(vec![1usize, 15, 16, 17, 95, 96, 97, 191, 192, 193]),
    ]
}

/// The number of heads and their sharing.
fn heads() -> impl Strategy<Value = (usize, usize)> {
    proptest::sample::select(vec![(1, 1), (2, 1), (1, 2), (2, 2), (1, 3), (1, 4), (2, 5), (1, 8), (1, 9), (1, 17)])
}

/// Scores from flat to peaked.
fn scale(dim: usize) -> impl Strategy<Value = f64> {
    let usual = 1.0 / (dim as f64).sqrt();
    prop_oneof![3 => Just(usual), 1 => Just(usual * 6.0), 1 => Just(-usual), 1 => Just(0.0)]
}

fn lengths(batch: usize, most: usize) -> impl Strategy<Value = Option<Vec<i64>>> {
    let most = most as i64;
    prop_oneof![
        2 => Just(None),
        1 => (0..=most).prop_map(|len| Some(vec![len])),
        2 => proptest::collection::vec(0..=most, batch).prop_map(Some),
    ]
}

/// A full mask of every rank, with rows and keys to spare, hiding a few keys, most, or whole stretches.
fn mask(batch: usize, rows: usize, keys: usize) -> impl Strategy<Value = Mask> {
    let shape = (0usize..6, 0usize..3, 0usize..20);
    let dtype = proptest::sample::select(vec![DType::Int8, DType::UInt8, DType::Bool]);
    (shape, dtype, 0usize..5, any::<u64>()).prop_map(move |((rank, more_rows, more_keys), dtype, kind, seed)| {
        let (i, j) = (rows + more_rows, keys + more_keys);
        let shape = match rank {
            0 => vec![i, j],
            1 => vec![1, i, j],
            2 => vec![batch, i, j],
            3 => vec![1, 1, i, j],
            _ => vec![batch, 1, i, j],
        };
        let mut state = seed | 1;
        let mut random = || {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            state
        };
        let count: usize = shape.iter().product();
        let bytes = (0..count)
            .map(|at| {
                let hides = match kind {
                    0 => random() % 10 == 0,
                    1 => random() % 20 != 0,
                    2 => (at % j) / 50 % 2 == (at / j) / 30 % 2,
                    3 => at % j > at / j % i,
                    _ => false,
                };
                // Anything but 0 hides.
                if hides { (random() % 255) as u8 + 1 } else { 0 }
            })
            .collect();
        Mask { shape: shape.into_iter().map(|n| n as i64).collect(), dtype, bytes }
    })
}

/// A call of the prefill path.
fn prefill() -> impl Strategy<Value = Case> {
    let kind = (
        proptest::sample::select(HALVES.to_vec()),
        proptest::sample::select(LAYOUTS.to_vec()),
        proptest::sample::select(Operator::FusedInferAttentionScore.sparse_modes().to_vec()),
        any::<bool>(),
        0i64..4,
        any::<u64>(),
    );
    let sizes = (1usize..4, heads(), length().prop_map(|n| n + 1), length(), 1usize..=8, any::<bool>());
    (kind, sizes, -5i64..60, -5i64..60).prop_flat_map(|(kind, sizes, pre, next)| {
        let (dtype, layout, mode, lse, inner_precise, seed) = kind;
        let (batch, (kv_heads, group), rows, keys, dim, list) = sizes;
        // The oracle takes its time: large heads go with few scores.
        let scores = batch * kv_heads * group * rows * keys;
        let dim = match scores {
            ..20_000 if seed % 3 == 0 => dim * 64,
            ..200_000 => dim * 16,
            _ => 16,
        };
        let key_rows =
            if list && batch > 1 { (0..batch).map(|b| (keys / (b + 1)).max(1)).collect() } else { vec![keys] };
        let shortest = key_rows.iter().copied().min().unwrap_or(1);
        let wants_mask = mode == SparseMode::AllMask || mode == SparseMode::DefaultMask && seed % 3 != 0;
        let mask = mask(batch, rows, keys).prop_map(move |mask| wants_mask.then_some(mask));
        let parts = (lengths(batch, rows), lengths(batch, shortest), mask, scale(dim));
        parts.prop_map(move |(q_lens, kv_lens, mask, scale)| {
            // A band is not empty, and reaches into the shortest sequence.
            let unbounded = seed % 4 == 0;
            let least = |lens: &Option<Vec<i64>>, all: usize| {
                lens.iter().flatten().copied().min().unwrap_or(all as i64).min(all as i64)
            };
            let (q_least, kv_least) = (least(&q_lens, rows), least(&kv_lens, shortest));
            let (pre_most, next_most) = match mode {
                SparseMode::Band => (q_least, kv_least),
                _ => (kv_least, q_least),
            };
            let pre = pre.max(1 - pre_most).max(-4);
            let next = if pre < 0 { next.max(-pre) } else { next.max(1 - next_most).max(-pre) };
            let pre = if next < 0 { pre.max(-next) } else { pre };
            let (pre, next) = if pre_most == 0 || next_most == 0 { (pre.max(0), next.max(0)) } else { (pre, next) };
            Case {
                dtype,
                layout,
                batch,
                kv_heads,
                group,
                rows,
                key_rows: key_rows.clone(),
                dim,
                mode,
                mask: mask.clone(),
                tokens: if unbounded { (FiaCall::ALL_TOKENS, next.max(0)) } else { (pre, next) },
                q_lens: q_lens.clone(),
                kv_lens: kv_lens.clone(),
                inner_precise,
                lse,
                scale,
                spread: if seed % 5 == 0 { 3 } else { 1 },
                seed,
            }
        })
    })
}

/// A call of the decode path.
fn decode() -> impl Strategy<Value = Case> {
    let kind = (
        proptest::sample::select(HALVES.to_vec()),
        proptest::sample::select(vec![Layout::Bnsd, Layout::Bsnd, Layout::Bsh]),
        any::<bool>(),
        0i64..2,
        any::<u64>(),
        0usize..4,
    );
    let keys = prop_oneof![4 => length(), 1 => 600usize..1500];
    let sizes = (1usize..5, heads(), keys, 1usize..=512, any::<bool>());
    (kind, sizes).prop_flat_map(|(kind, sizes)| {
        let (dtype, layout, lse, inner_precise, seed, masked) = kind;
        let (batch, (kv_heads, group), keys, dim, list) = sizes;
        let dim = if seed % 3 == 0 { dim } else { (dim / 16 * 16).max(16) };
        let key_rows: Vec<usize> =
            if list && batch > 1 { (0..batch).map(|b| (keys / (b + 1)).max(1)).collect() } else { vec![keys] };
        let shortest = key_rows.iter().copied().min().unwrap_or(1);
        let mask = mask(batch, 1, keys).prop_map(move |mut mask| {
            // The first axis is the batch, always.
            let last = mask.shape.last().copied().unwrap_or(1);
            mask.shape = if masked == 1 { vec![batch as i64, last] } else { vec![batch as i64, 1, 1, last] };
            let count = batch * last as usize;
            mask.bytes = mask.bytes.iter().copied().cycle().take(count).collect();
            (masked > 0 && masked < 3).then_some(mask)
        });
        // Modes 3 and 4 change nothing for one row with a compressed mask.
        let mode = if masked == 3 { SparseMode::RightDownCausal } else { SparseMode::DefaultMask };
        (lengths(batch, shortest), mask, scale(dim)).prop_map(move |(kv_lens, mask, scale)| Case {
            dtype,
            layout,
            batch,
            kv_heads,
            group,
            rows: 1,
            key_rows: key_rows.clone(),
            dim,
            mode,
            mask,
            tokens: (FiaCall::ALL_TOKENS, FiaCall::ALL_TOKENS),
            q_lens: None,
            kv_lens,
            inner_precise,
            lse,
            scale,
            spread: if seed % 5 == 0 { 2 } else { 1 },
            seed,
        })
    })
}

/// A third of the cases that `PROPTEST_CASES` sets, because the oracle is slow, and little shrinking.
fn config() -> ProptestConfig {
    let default = ProptestConfig::default();
    ProptestConfig { cases: (default.cases / 3).max(1), max_shrink_iters: 300, ..default }
}

/// A prompt of one layer of TriangleMix, or the rest of it.
fn triangle() -> impl Strategy<Value = (Case, MaskGeometry)> {
    let sizes = (1usize..300, 0u64..30, 0u64..60, 0u64..60, 0u64..40);
    let part = proptest::sample::select(TrianglePart::ALL.to_vec());
    (sizes, part, heads(), any::<u64>()).prop_map(
        |((count, sinks, window, last, before), part, (kv_heads, group), seed)| {
            let rows =
                TriangleRows { first_row: before, rows: count as u64 + 1, prompt_len: before + count as u64 + 1 };
            let keys = rows.keys() as usize;
            let sizes = [1, kv_heads, group, count + 1, keys, 16];
            let dtype = HALVES[seed as usize % 2];
            let mut case = Case::plain(dtype, sizes);
            case.seed = seed;
            let geometry = TriangleMix::new(sinks, window, last).geometry(part, rows);
            (case, geometry)
        },
    )
}

proptest! {
    #![proptest_config(config())]

    #[test]
    fn regions_of_keys_agree_with_the_oracle((case, geometry) in triangle(), level in level()) {
        let checked = case.with(|problem, data| {
            data.geometry = Some(geometry);
            let want = data.oracle(problem);
            data.run(problem, level);
            data.compare(problem, &want)
        });
        if let Err(difference) = checked {
            prop_assert!(false, "{} under {:?}\n{:?}", difference, level, case);
        }
    }

    #[test]
    fn prefill_agrees_with_the_oracle(case in prefill(), level in level()) {
        if let Err(difference) = case.check(level) {
            prop_assert!(false, "{} under {:?}", difference, level);
        }
    }

    #[test]
    fn decode_agrees_with_the_oracle(case in decode(), level in level()) {
        if let Err(difference) = case.check(level) {
            prop_assert!(false, "{} under {:?}", difference, level);
        }
    }

    #[test]
    fn single_precision_agrees_with_the_oracle(mut case in prop_oneof![prefill(), decode()], level in level()) {
        case.dtype = DType::Float;
        if let Err(difference) = case.check(level) {
            prop_assert!(false, "{} under {:?}", difference, level);
        }
    }
    #[test]
    fn flash_attention_score_agrees_with_the_oracle(seed: u64, level in level()) {
        let call = FlashCall::random(seed, false);
        if let Err(difference) = call.check(level) {
            prop_assert!(false, "{} under {:?}\n{:?}", difference, level, call.arguments);
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { max_shrink_iters: 20, ..ProptestConfig::default() })]

    /// The operators of training and of inference are one computation wherever both can express it.
    #[test]
    fn flash_attention_score_is_fused_infer_attention_score_bit_for_bit(seed: u64, level in level()) {
        let (flash, fused) = shared_call(seed);
        let [flash_out, fused_out] = [flash.compute(level), flash.compute_as(&fused.call(), level)];
        prop_assert_eq!(flash_out, fused_out, "{:?} {:?}", level, flash.arguments);
    }
}

/// A call that both operators can express.
fn shared_call(seed: u64) -> (FlashCall, fia::Arguments<TensorDesc>) {
    for next in 0.. {
        let flash = FlashCall::random(seed.wrapping_add(next), true);
        let arguments = &flash.arguments;
        let mut fused = FiaCall::new(arguments.input_layout.as_deref().unwrap()).to_arguments();
        fused.query = arguments.query;
        (fused.key, fused.value) = (arguments.key.into_iter().collect(), arguments.value.into_iter().collect());
        (fused.atten_mask, fused.attention_out) = (arguments.atten_mask, arguments.attention_out);
        fused.num_heads = arguments.num_heads;
        let shape = arguments.key.unwrap().shape;
        fused.num_key_value_heads = match (arguments.input_layout.as_deref(), &shape[..]) {
            (Some("BSH"), &[_, _, hidden]) => {
                hidden / (arguments.query.unwrap().shape.last().unwrap() / arguments.num_heads)
            }
            (Some("BNSD"), &[_, heads, ..]) | (Some("TND"), &[_, heads, _]) => heads,
            (_, shape) => shape[2],
        };
        (fused.scale, fused.sparse_mode) = (arguments.scale, arguments.sparse_mode);
        (fused.pre_tokens, fused.next_tokens) = (arguments.pre_tokens, arguments.next_tokens);
        fused.actual_seq_lengths.clone_from(&arguments.actual_seq_lengths);
        fused.actual_seq_lengths_kv.clone_from(&arguments.actual_seq_lengths_kv);
        let call = fused.call();
        let checked = call.check(fia::Version::V4, TARGET);
        // One row without a sequence axis of its own is masked in a way of its own.
        let same = checked.is_ok_and(|checked| checked.route == fia::Route::Prefill || call.atten_mask.is_none());
        if same {
            return (flash, fused);
        }
    }
    unreachable!("some call is one of both")
}
