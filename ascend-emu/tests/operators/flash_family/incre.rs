//! IncreFlashAttention: golden cases, any lengths against double precision, paged caches, statuses by version and
//! product.

use super::call::{OnDevice, PhaseTwo, on_chip, run};
use super::case::{cases, numbers};
use super::reference::{self, Sizes, attend, bytes};
use crate::bench::*;
use approx::abs_diff_eq;
use ascend_emu::abi::*;
use ascend_emu::{Check, FindingKind, check_scope, findings};
use ascend_spec::ops::incre_flash_attention;
use ascend_spec::{arguments_of_version, incre_flash_attention_arguments};
use ascend_sys::bindings::{aclDataType, aclOpExecutor};
use half::f16;
use proptest::prelude::*;

type Arguments = incre_flash_attention::Arguments<OnDevice>;

const HALF: aclDataType = aclDataType::ACL_FLOAT16;

pub(crate) fn prepare(version: u8, arguments: &Arguments) -> (i32, (u64, *mut aclOpExecutor)) {
    match version {
        1 => incre_flash_attention_arguments! { arguments_of_version {
            1 phase_one { aclnnIncreFlashAttentionGetWorkspaceSize, arguments }
        } },
        2 => incre_flash_attention_arguments! { arguments_of_version {
            2 phase_one { aclnnIncreFlashAttentionV2GetWorkspaceSize, arguments }
        } },
        3 => incre_flash_attention_arguments! { arguments_of_version {
            3 phase_one { aclnnIncreFlashAttentionV3GetWorkspaceSize, arguments }
        } },
        _ => incre_flash_attention_arguments! { arguments_of_version {
            4 phase_one { aclnnIncreFlashAttentionV4GetWorkspaceSize, arguments }
        } },
    }
}

fn compute(version: u8, arguments: &Arguments) -> i32 {
    let (status, prepared) = prepare(version, arguments);
    if status != 0 {
        return status;
    }
    let two: PhaseTwo = match version {
        1 => aclnnIncreFlashAttention,
        2 => aclnnIncreFlashAttentionV2,
        3 => aclnnIncreFlashAttentionV3,
        _ => aclnnIncreFlashAttentionV4,
    };
    run(two, prepared)
}

#[test]
fn golden_cases_are_computed() {
    let _bench = Bench::new();
    let cases = cases("incre_flash_attention", 3);
    for case in &cases {
        let inputs = case.inputs("query");
        let arguments = arguments!(case, ascend_spec::ops::incre_flash_attention, |_| inputs[0].dtype);
        let status = compute(case.version(), &arguments);
        assert_eq!(status, 0, "{}: {}", case.name, message());
        let out = arguments.attention_out.as_ref().unwrap();
        case.compare("attention_out", out, ["atol", "rtol"]);
    }
}

const HEADS: usize = 4;
const KV_HEADS: usize = 2;
const DIM: usize = 32;
const BLOCK: usize = 16;

/// A call with keys of these lengths, and what it computes: keys in one tensor, or in the pages of a cache.
fn call(lengths: &[usize], paged: bool, seed: usize) -> (Arguments, Vec<f64>) {
    let longest = lengths.iter().copied().max().unwrap().next_multiple_of(BLOCK);
    let of = Sizes {
        batch: lengths.len(),
        heads: HEADS,
        kv_heads: KV_HEADS,
        rows: 1,
        keys: longest,
        dim: DIM,
        value_dim: DIM,
    };
    let query = reference::numbers(seed, of.batch * HEADS * DIM);
    let [key, value] = [1, 2].map(|i| reference::numbers(seed + i, of.batch * KV_HEADS * longest * DIM));
    let scale = 0.25;
    let want = attend(of, [&query, &key, &value], scale, &|b, _, j| j < lengths[b]);
    let batch = of.batch as i64;
    let (n, kv, d) = (HEADS as i64, KV_HEADS as i64, DIM as i64);
    let columns = longest / BLOCK;
    let blocks = of.batch * columns;
    // Blocks lie in the cache the other way round.
    let table: Vec<i32> = (0..blocks as i32).rev().collect();
    let stored = |dense: &[f16]| {
        if !paged {
            return OnDevice::new(HALF, &[batch, kv, longest as i64, d], &bytes(dense));
        }
        let mut cache = vec![f16::NAN; dense.len()];
        for (at, &number) in dense.iter().enumerate() {
            let (d, j, head) = (at % DIM, at / DIM % longest, at / DIM / longest);
            let (b, head) = (head / KV_HEADS, head % KV_HEADS);
            let block = table[b * columns + j / BLOCK] as usize;
            cache[((block * BLOCK + j % BLOCK) * KV_HEADS + head) * DIM + d] = number;
        }
        OnDevice::new(HALF, &[blocks as i64, BLOCK as i64, kv * d], &bytes(&cache))
    };
    let shape = match paged {
        true => vec![batch, 1, n * d],
        false => vec![batch, n, 1, d],
    };
    let numbers: Vec<u8> = table.iter().flat_map(|block| block.to_le_bytes()).collect();
    let arguments = Arguments {
        query: Some(OnDevice::new(HALF, &shape, &bytes(&query))),
        key: vec![stored(&key)],
        value: vec![stored(&value)],
        actual_seq_lengths: Some(lengths.iter().map(|&length| length as i64).collect()),
        block_table: paged.then(|| OnDevice::new(aclDataType::ACL_INT32, &[batch, columns as i64], &numbers)),
        block_size: if paged { BLOCK as i64 } else { 0 },
        num_heads: n,
        num_key_value_heads: kv,
        scale,
        input_layout: Some(if paged { "BSH" } else { "BNSD" }.into()),
        attention_out: Some(OnDevice::new(HALF, &shape, &vec![0xff; query.len() * 2])),
        ..Arguments::default()
    };
    (arguments, want)
}

#[track_caller]
fn near(arguments: &Arguments, want: &[f64]) {
    let out = arguments.attention_out.as_ref().unwrap();
    let got = numbers(HALF, &download::<u8>(out.at(), want.len() * 2));
    for (got, want) in got.iter().zip(want) {
        assert!(abs_diff_eq!(got, want, epsilon = 2e-3), "{got} is not {want}");
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    #[test]
    fn lengths_are_those_of_the_keys(
        lengths in proptest::collection::vec(1usize..90, 1..6), paged: bool, seed in 0usize..1000,
    ) {
        let _bench = Bench::new();
        let (arguments, want) = call(&lengths, paged, seed);
        for version in if paged { 3..=4 } else { 1..=4 } {
            ok(compute(version, &arguments));
            near(&arguments, &want);
        }
    }
}

#[test]
fn blocks_that_the_cache_lacks_are_found() {
    let _bench = Bench::new();
    let (mut arguments, _) = call(&[20, 40], true, 3);
    let table: Vec<u8> = [0i32, 1, 2, 3, 9, 5].iter().flat_map(|block| block.to_le_bytes()).collect();
    arguments.block_table = Some(OnDevice::new(aclDataType::ACL_INT32, &[2, 3], &table));
    let before = findings().len();
    ok(compute(4, &arguments));
    let found = findings();
    let found = found[before..].iter().find(|finding| finding.kind == FindingKind::BlockTable);
    assert!(found.unwrap().message.contains("IncreFlashAttentionV4"));
    let _strict = check_scope(Check::Strict);
    assert_ne!(compute(4, &arguments), 0);
}

#[test]
fn versions_one_and_two_throw_the_position_bias_away() {
    let _bench = Bench::new();
    let (mut arguments, want) = call(&[32, 32], false, 6);
    let bias = reference::numbers(3, HEADS * 32);
    arguments.pse_shift = Some(OnDevice::new(HALF, &[1, HEADS as i64, 1, 32], &bytes(&bias)));
    for version in [1, 2] {
        ok(compute(version, &arguments));
        near(&arguments, &want);
    }
    ok(compute(3, &arguments));
    let out = arguments.attention_out.as_ref().unwrap();
    let got = numbers(HALF, &download::<u8>(out.at(), want.len() * 2));
    assert!(got.iter().zip(&want).any(|(a, b)| (a - b).abs() > 1e-2));
}

#[test]
fn what_the_rules_refuse_has_the_operators_own_status() {
    let _bench = Bench::new();
    let status = |change: &dyn Fn(&mut Arguments)| {
        let (mut arguments, _) = call(&[20, 40], true, 1);
        change(&mut arguments);
        prepare(4, &arguments).0
    };
    assert_eq!(status(&|_| {}), 0);
    assert_eq!(status(&|of| of.key.clear()), 161_001);
    assert_eq!(status(&|of| of.query = None), 161_001);
    fails(status(&|of| of.input_layout = Some("TND".into())), 561_002, &["incre.input_layout"]);
    fails(status(&|of| of.actual_seq_lengths = None), 561_002, &["incre.decode_rules"]);
    fails(status(&|of| of.block_size = 1024), 561_002, &["incre.decode_rules"]);
    let rows = |of: &mut Arguments| of.query = Some(OnDevice::new(HALF, &[2, 2, 128], &[0; 1024]));
    fails(status(&rows), 561_002, &["incre.rows"]);
}

#[test]
fn products_compute_or_refuse_it() {
    for (chip, want_status) in
        [("Ascend910B3", 0), ("Ascend910_9391", 0), ("Ascend310P3", 0), ("Ascend950PR_9599", 361_001)]
    {
        let _bench = on_chip(chip);
        for version in 1..=4 {
            let (arguments, want) = call(&[7, 20], false, 2);
            let status = compute(version, &arguments);
            assert_eq!(status, want_status, "{chip}: {}", message());
            if status == 0 {
                near(&arguments, &want);
            }
        }
    }
}

#[test]
fn bf16_is_refused_on_310p() {
    let _bench = on_chip("Ascend310P3");
    let (arguments, _) = call(&[7, 20], false, 2);
    let bf16 = |of: OnDevice| of.read_as(aclDataType::ACL_BF16);
    let arguments = Arguments {
        query: arguments.query.map(bf16),
        key: arguments.key.into_iter().map(bf16).collect(),
        value: arguments.value.into_iter().map(bf16).collect(),
        attention_out: arguments.attention_out.map(bf16),
        ..arguments
    };
    fails(prepare(4, &arguments).0, 161_002, &["incre.registered", "BF16"]);
}
