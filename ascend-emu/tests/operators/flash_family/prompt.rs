//! PromptFlashAttention: golden cases, head dimensions of its own against double precision, strided tensors, statuses
//! by version and product.

use super::call::{OnDevice, PhaseTwo, on_chip, run};
use super::case::{cases, numbers};
use super::reference::{self, Sizes, attend, bytes};
use crate::bench::*;
use approx::abs_diff_eq;
use ascend_emu::abi::*;
use ascend_spec::ops::prompt_flash_attention;
use ascend_spec::{arguments_of_version, prompt_flash_attention_arguments};
use ascend_sys::bindings::{aclDataType, aclOpExecutor};
use proptest::prelude::*;
use std::ptr::null_mut;

type Arguments = prompt_flash_attention::Arguments<OnDevice>;

const HALF: aclDataType = aclDataType::ACL_FLOAT16;

pub(crate) fn prepare(version: u8, arguments: &Arguments) -> (i32, (u64, *mut aclOpExecutor)) {
    match version {
        1 => prompt_flash_attention_arguments! { arguments_of_version {
            1 phase_one { aclnnPromptFlashAttentionGetWorkspaceSize, arguments }
        } },
        2 => prompt_flash_attention_arguments! { arguments_of_version {
            2 phase_one { aclnnPromptFlashAttentionV2GetWorkspaceSize, arguments }
        } },
        _ => prompt_flash_attention_arguments! { arguments_of_version {
            3 phase_one { aclnnPromptFlashAttentionV3GetWorkspaceSize, arguments }
        } },
    }
}

fn compute(version: u8, arguments: &Arguments) -> i32 {
    let (status, prepared) = prepare(version, arguments);
    if status != 0 {
        return status;
    }
    let two: PhaseTwo = match version {
        1 => aclnnPromptFlashAttention,
        2 => aclnnPromptFlashAttentionV2,
        _ => aclnnPromptFlashAttentionV3,
    };
    run(two, prepared)
}

#[test]
fn golden_cases_are_computed() {
    let _bench = Bench::new();
    let cases = cases("prompt_flash_attention", 3);
    for case in &cases {
        let inputs = case.inputs("query");
        let int8 = case.metadata.get("out_dtype").is_some_and(|of| of == "int8");
        let out = if int8 { aclDataType::ACL_INT8 } else { inputs[0].dtype };
        let mut arguments = arguments!(case, ascend_spec::ops::prompt_flash_attention, |_| out);
        if let Some(mask) = case.compressed_mask() {
            arguments.atten_mask = Some(mask);
        }
        let status = compute(case.version(), &arguments);
        assert_eq!(status, 0, "{}: {}", case.name, message());
        let out = arguments.attention_out.as_ref().unwrap();
        case.compare("attention_out", out, ["atol", "rtol"]);
    }
}

/// A call in BNSD without a mask, and what it computes.
fn dense(of: Sizes, seed: usize) -> (Arguments, Vec<f64>) {
    let [b, n, kv, s, keys, d, dv] =
        [of.batch, of.heads, of.kv_heads, of.rows, of.keys, of.dim, of.value_dim].map(|size| size as i64);
    let shapes = [[b, n, s, d], [b, kv, keys, d], [b, kv, keys, dv], [b, n, s, dv]];
    let count = |shape: [i64; 4]| shape.iter().product::<i64>() as usize;
    let data = [0, 1, 2].map(|i| reference::numbers(seed + i, count(shapes[i])));
    let scale = 1.0 / (of.dim as f64).sqrt();
    let want = attend(of, [&data[0], &data[1], &data[2]], scale, &|_, _, _| true);
    let tensor = |i: usize| Some(OnDevice::new(HALF, &shapes[i], &bytes(&data[i])));
    let arguments = Arguments {
        query: tensor(0),
        key: tensor(1),
        value: tensor(2),
        num_heads: n,
        num_key_value_heads: kv,
        scale,
        next_tokens: 2_147_483_647,
        input_layout: Some("BNSD".into()),
        attention_out: Some(OnDevice::new(HALF, &shapes[3], &vec![0xff; count(shapes[3]) * 2])),
        ..Arguments::default()
    };
    (arguments, want)
}

fn output(arguments: &Arguments) -> Vec<f64> {
    let out = arguments.attention_out.as_ref().unwrap();
    let elements = out.shape.iter().product::<i64>() as usize;
    numbers(HALF, &download::<u8>(out.at(), elements * 2))
}

#[track_caller]
fn near(got: &[f64], want: &[f64]) {
    assert_eq!(got.len(), want.len());
    for (got, want) in got.iter().zip(want) {
        assert!(abs_diff_eq!(got, want, epsilon = 2e-3), "{got} is not {want}");
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    #[test]
    fn head_dimensions_need_no_alignment(
        (batch, kv_heads, group) in (1usize..3, 1usize..3, 1usize..4),
        (rows, keys) in (2usize..40, 1usize..70),
        (dim, value_dim) in (1usize..=128, 1usize..=128),
        seed in 0usize..1000,
    ) {
        let _bench = Bench::new();
        let of = Sizes { batch, heads: kv_heads * group, kv_heads, rows, keys, dim, value_dim };
        let (arguments, want) = dense(of, seed);
        ok(compute(3, &arguments));
        near(&output(&arguments), &want);
    }
}

const SMALL: Sizes = Sizes { batch: 2, heads: 4, kv_heads: 2, rows: 5, keys: 9, dim: 24, value_dim: 40 };

#[test]
fn strided_queries_and_keys_are_read_where_they_lie() {
    let _bench = Bench::new();
    let (mut arguments, want) = dense(SMALL, 5);
    for of in [&mut arguments.query, &mut arguments.key, &mut arguments.value] {
        let plain = of.take().unwrap();
        let shape = plain.shape.clone();
        let elements = shape.iter().product::<i64>() as usize;
        let values = download::<u16>(plain.at(), elements);
        // A row of memory holds a row of the tensor and three numbers more.
        let row = shape[3] as usize;
        let wide = values.chunks(row).flat_map(|of| [of, &[0x7e00; 3]].concat());
        let wide: Vec<u8> = wide.flat_map(u16::to_le_bytes).collect();
        let step = shape[3] + 3;
        let strides = [shape[1] * shape[2] * step, shape[2] * step, step, 1];
        *of = Some(OnDevice::strided(HALF, &shape, &strides, &wide));
    }
    ok(compute(3, &arguments));
    near(&output(&arguments), &want);
}

#[test]
fn versions_one_and_two_throw_the_position_bias_away() {
    let _bench = Bench::new();
    let (mut arguments, want) = dense(SMALL, 8);
    let shape = [1, 4, 5, 9];
    let bias = reference::numbers(3, 4 * 5 * 9);
    arguments.pse_shift = Some(OnDevice::new(HALF, &shape, &bytes(&bias)));
    for version in [1, 2] {
        ok(compute(version, &arguments));
        near(&output(&arguments), &want);
    }
    ok(compute(3, &arguments));
    let with_bias = output(&arguments);
    let apart = |(a, b): (&f64, &f64)| (a - b).abs() > 1e-2;
    assert!(with_bias.iter().zip(&want).any(apart));
}

#[test]
fn an_output_without_elements_asks_for_nothing() {
    let _bench = Bench::new();
    let (mut arguments, _) = dense(SMALL, 8);
    arguments.query = Some(OnDevice::new(HALF, &[2, 4, 0, 24], &[]));
    arguments.attention_out = Some(OnDevice::new(HALF, &[2, 4, 0, 40], &[]));
    let (status, (bytes, _)) = prepare(3, &arguments);
    assert_eq!((status, bytes), (0, 0));
    ok(compute(3, &arguments));
}

#[test]
fn what_the_rules_refuse_has_the_operators_own_status() {
    let _bench = Bench::new();
    let status = |version, change: &dyn Fn(&mut Arguments)| {
        let (mut arguments, _) = dense(SMALL, 1);
        change(&mut arguments);
        prepare(version, &arguments).0
    };
    assert_eq!(status(3, &|_| {}), 0);
    assert_eq!(status(3, &|of| of.key = None), 161_001);
    assert_eq!(status(1, &|of| of.input_layout = None), 161_001);
    assert_eq!(status(2, &|of| of.input_layout = Some("SBH".into())), 161_002);
    assert_eq!(status(3, &|of| of.num_heads = 0), 161_002);
    // A failure of inference or tiling, which FusedInferAttentionScore answers with 561002.
    let heads = status(3, &|of| of.num_key_value_heads = 3);
    fails(heads, 561_103, &["prompt.prefill_rules"]);
    let mode = status(3, &|of| of.sparse_mode = 7);
    fails(mode, 561_103, &["prompt.prefill_rules"]);
    let none = unsafe {
        aclnnPromptFlashAttentionGetWorkspaceSize(
            null_mut(),
            null_mut(),
            null_mut(),
            null_mut(),
            null_mut(),
            null_mut(),
            1,
            1.0,
            0,
            0,
            null_mut(),
            1,
            null_mut(),
            &mut 0,
            &mut null_mut(),
        )
    };
    assert_eq!(none, 161_001);
}

#[test]
fn products_compute_or_refuse_it() {
    for (chip, first) in [("Ascend910B3", 0), ("Ascend910_9391", 0), ("Ascend310P3", 0), ("Ascend950PR_9599", 361_001)]
    {
        let _bench = on_chip(chip);
        let (arguments, want) = dense(SMALL, 2);
        let (status, prepared) = prepare(3, &arguments);
        assert_eq!(status, first, "{chip}: {}", message());
        if status == 0 {
            ok(run(aclnnPromptFlashAttentionV3, prepared));
            near(&output(&arguments), &want);
        }
        let bf16 = |of: Option<OnDevice>| of.map(|of| of.read_as(aclDataType::ACL_BF16));
        let arguments = Arguments {
            query: bf16(arguments.query),
            key: bf16(arguments.key),
            value: bf16(arguments.value),
            attention_out: bf16(arguments.attention_out),
            ..arguments
        };
        let of_bf16 = if chip == "Ascend310P3" { 161_002 } else { first };
        assert_eq!(prepare(3, &arguments).0, of_bf16, "{chip}: {}", message());
    }
}
