//! FlashAttentionScore and FlashAttentionVarLenScore: golden cases, statuses with their texts, strided tensors, and
//! the bytes that a launch touches.

use super::call::{OnDevice, run};
use super::case::{Case, cases};
use crate::bench::*;
use ascend_emu::abi::*;
use ascend_emu::{Check, FindingKind, check_scope, findings};
use ascend_spec::ops::flash_attention_score::{self, Parameter, Version};
use ascend_spec::{arguments_of_version, flash_attention_score_arguments, flash_attention_var_len_score_arguments};
use ascend_sys::bindings::{aclDataType, aclOpExecutor};

type Arguments = flash_attention_score::Arguments<OnDevice>;

const FLOAT: aclDataType = aclDataType::ACL_FLOAT;
const UINT8: aclDataType = aclDataType::ACL_UINT8;

/// Phase one and phase two of each version.
macro_rules! versions {
    ($version:expr, $arguments:ident; $($name:ident: $kind:ident $number:tt $one:ident $two:ident;)*) => {
        match $version {
            $(Version::$name => (versions!(@ $kind $number $one $arguments), $two as super::call::PhaseTwo),)*
        }
    };
    (@ dense $number:tt $one:ident $arguments:ident) => {
        flash_attention_score_arguments! { arguments_of_version { $number phase_one { $one, $arguments } } }
    };
    (@ packed $number:tt $one:ident $arguments:ident) => {
        flash_attention_var_len_score_arguments! { $number phase_one { $one, $arguments } }
    };
}

pub(crate) type Prepared = (i32, (u64, *mut aclOpExecutor));

pub(crate) fn prepare(version: Version, arguments: &Arguments) -> (Prepared, super::call::PhaseTwo) {
    versions! { version, arguments;
        V1: dense 1 aclnnFlashAttentionScoreGetWorkspaceSize aclnnFlashAttentionScore;
        V2: dense 2 aclnnFlashAttentionScoreV2GetWorkspaceSize aclnnFlashAttentionScoreV2;
        V3: dense 3 aclnnFlashAttentionScoreV3GetWorkspaceSize aclnnFlashAttentionScoreV3;
        V4: dense 4 aclnnFlashAttentionScoreV4GetWorkspaceSize aclnnFlashAttentionScoreV4;
        VarLenV1: packed 1 aclnnFlashAttentionVarLenScoreGetWorkspaceSize aclnnFlashAttentionVarLenScore;
        VarLenV2: packed 2 aclnnFlashAttentionVarLenScoreV2GetWorkspaceSize aclnnFlashAttentionVarLenScoreV2;
        VarLenV3: packed 3 aclnnFlashAttentionVarLenScoreV3GetWorkspaceSize aclnnFlashAttentionVarLenScoreV3;
        VarLenV4: packed 4 aclnnFlashAttentionVarLenScoreV4GetWorkspaceSize aclnnFlashAttentionVarLenScoreV4;
        VarLenV5: packed 5 aclnnFlashAttentionVarLenScoreV5GetWorkspaceSize aclnnFlashAttentionVarLenScoreV5;
    }
}

/// Computes, and gives the status of the first step that fails.
fn attend(version: Version, arguments: &Arguments) -> i32 {
    let ((status, prepared), two) = prepare(version, arguments);
    if status != 0 {
        return status;
    }
    run(two, prepared)
}

/// The compressed mask of a mode.
fn compressed(mode: i64) -> OnDevice {
    let rows = if mode == 6 { 3072 } else { 2048 };
    let cells = (0..rows).flat_map(|i| (0..2048).map(move |j| (i, j)));
    let hides = |(i, j): (i64, i64)| match i {
        ..2048 => j > i,
        _ => j >= 1024,
    };
    let bytes: Vec<u8> = cells.map(|cell| u8::from(hides(cell))).collect();
    OnDevice::new(aclDataType::ACL_BOOL, &[rows, 2048], &bytes)
}

/// The arguments of a golden case, with its outputs poisoned.
fn arguments_of(case: &Case) -> Arguments {
    let query = case.inputs("query")[0].dtype;
    let mut arguments = Arguments::default();
    for &parameter in Parameter::ALL {
        let info = parameter.info();
        match parameter {
            // Reserved: no case has it.
            Parameter::SoftmaxOut => {}
            Parameter::AttentionOut => {
                arguments.set_tensor(parameter, case.output(info.name, query));
            }
            _ if parameter.is_output() => {
                arguments.set_tensor(parameter, case.output(info.name, FLOAT));
            }
            _ if info.kind.is_tensor() => {
                let given = case.inputs(info.name).into_iter();
                given.for_each(|tensor| arguments.set_tensor(parameter, tensor));
            }
            _ => {
                if let Some(value) = case.value(info) {
                    arguments.set_value(parameter, value).unwrap();
                }
            }
        }
    }
    if case.metadata["atten_mask_kind"] == "compressed" {
        arguments.atten_mask = Some(compressed(arguments.sparse_mode));
    }
    arguments
}

fn version_of(case: &Case) -> Version {
    let packed = case.metadata["op"] == "flash_attention_varlen_score";
    Version::numbered(packed, case.version()).unwrap()
}

#[test]
fn golden_cases_of_flash_attention_score_are_computed() {
    let bench = Bench::new();
    bench.enter();
    for op in ["flash_attention_score", "flash_attention_varlen_score"] {
        for case in &cases(op, 5) {
            let arguments = arguments_of(case);
            assert_eq!(attend(version_of(case), &arguments), 0, "{}: {}", case.name, message());
            let out = arguments.attention_out.as_ref().unwrap();
            case.compare("attention_out", out, ["atol", "rtol"]);
            for (name, of) in [("softmax_max", &arguments.softmax_max), ("softmax_sum", &arguments.softmax_sum)] {
                case.compare(name, of.as_ref().unwrap(), ["softmax_atol", "softmax_rtol"]);
            }
        }
    }
}

/// Two rows and two keys of one head in FLOAT, whose scores are all 0.
fn small() -> Arguments {
    let rows = || OnDevice::new(FLOAT, &[1, 2, 8], &[0; 64]);
    let values: Vec<u8> = (0..16u8).flat_map(|at| f32::from(at).to_le_bytes()).collect();
    let softmax = || OnDevice::new(FLOAT, &[1, 1, 2, 8], &[0xff; 64]);
    Arguments {
        query: Some(rows()),
        key: Some(rows()),
        value: Some(OnDevice::new(FLOAT, &[1, 2, 8], &values)),
        input_layout: Some("BSH".into()),
        softmax_max: Some(softmax()),
        softmax_sum: Some(softmax()),
        attention_out: Some(rows()),
        ..Arguments::default()
    }
}

/// The numbers of an output.
fn floats(of: &Option<OnDevice>, count: usize) -> Vec<f32> {
    download(of.as_ref().unwrap().at(), count)
}

#[test]
fn failures_of_tiling_are_null_pointers_with_the_text_of_the_rule() {
    let bench = Bench::new();
    bench.enter();
    let refuse = |change: &dyn Fn(&mut Arguments), code, parts: &[&str]| {
        let mut arguments = small();
        change(&mut arguments);
        fails(prepare(Version::V2, &arguments).0.0, code, parts);
    };
    refuse(&|call| call.keep_prob = 1.5, 161001, &["flash.keep_prob", "1.5"]);
    refuse(&|call| call.pse_type = 7, 161001, &["flash.pse_type", "7"]);
    refuse(&|call| call.query = None, 161001, &["flash.required", "query"]);
    refuse(&|call| call.num_heads = 0, 161002, &["flash.head_num"]);
    let mask = || Some(OnDevice::new(aclDataType::ACL_INT8, &[2, 2], &[0; 4]));
    refuse(&|call| call.atten_mask = mask(), 161001, &["flash.atten_mask_dtype", "INT8"]);
    let mask = || Some(OnDevice::new(UINT8, &[1, 1, 1, 2], &[0; 2]));
    refuse(&|call| call.atten_mask = mask(), 161001, &["flash.atten_mask_shape"]);
    let fails_on_950 = prepare(Version::V4, &small()).0.0;
    assert_ne!(fails_on_950, 0);
    assert!(message().contains("aclnnFlashAttentionScoreV4"), "{}", message());
}

#[test]
fn a_key_narrower_than_a_head_is_a_host_crash() {
    let bench = Bench::new();
    bench.enter();
    let mut arguments = small();
    arguments.key = Some(OnDevice::new(FLOAT, &[1, 2, 4], &[0; 32]));
    arguments.value = Some(OnDevice::new(FLOAT, &[1, 2, 4], &[0; 32]));
    let before = findings().len();
    let status = {
        let _scope = check_scope(Check::Strict);
        prepare(Version::V1, &arguments).0.0
    };
    assert_eq!(status, 161001, "{}", message());
    let crash = findings().split_off(before).into_iter();
    assert!(crash.map(|finding| finding.kind).any(|kind| kind == FindingKind::HostCrash));
}

#[test]
fn strided_masks_drop_masks_and_softmax_outputs_are_copied() {
    let bench = Bench::new();
    bench.enter();
    let plain = Arguments {
        atten_mask: Some(OnDevice::new(UINT8, &[2, 2], &[0, 1, 0, 0])),
        drop_mask: Some(OnDevice::new(UINT8, &[1], &[0b1011])),
        keep_prob: 0.5,
        ..small()
    };
    ok(attend(Version::V1, &plain));
    let out = floats(&plain.attention_out, 16);
    // Row 0 sees key 0 alone, kept. Row 1 sees both keys, of which key 1 alone is kept.
    let value = |key: usize, d: usize| (key * 8 + d) as f32;
    for d in 0..8 {
        assert_eq!(out[d], 2.0 * value(0, d));
        assert_eq!(out[8 + d], 2.0 * value(1, d) / 2.0);
    }
    assert_eq!(floats(&plain.softmax_sum, 16), [[1.0; 8], [2.0; 8]].concat());

    // The same tensors with a byte, or a number, between their elements.
    let spread = || OnDevice::strided(FLOAT, &[1, 1, 2, 8], &[32, 32, 16, 2], &[0xff; 128]);
    let apart = Arguments {
        atten_mask: Some(OnDevice::strided(UINT8, &[2, 2], &[1, 2], &[0, 0, 1, 0])),
        drop_mask: Some(OnDevice::strided(UINT8, &[1, 1], &[7, 7], &[0b1011])),
        softmax_max: Some(spread()),
        softmax_sum: Some(spread()),
        keep_prob: 0.5,
        ..small()
    };
    ok(attend(Version::V1, &apart));
    assert_eq!(floats(&apart.attention_out, 16), out);
    let sums: Vec<f32> = floats(&apart.softmax_sum, 32);
    for (at, &sum) in sums.iter().enumerate() {
        match at % 2 {
            0 => assert_eq!(sum, [1.0, 2.0][at / 16]),
            _ => assert_eq!(sum.to_bits(), u32::MAX),
        }
    }
}

#[test]
fn rows_behind_unmarked_sequences_are_not_touched() {
    let bench = Bench::new();
    bench.enter();
    let rows = |count: i64, held: usize, byte: u8| OnDevice::new(FLOAT, &[count, 1, 8], &vec![byte; held * 32]);
    let _scope = check_scope(Check::Strict);
    // A thousand rows more than there is memory for.
    let arguments = Arguments {
        query: Some(rows(1002, 2, 0)),
        key: Some(rows(2, 2, 0)),
        value: Some(rows(2, 2, 0)),
        attention_out: Some(rows(1002, 2, 0xff)),
        softmax_max: Some(rows(1002, 2, 0xff)),
        softmax_sum: Some(rows(1002, 2, 0xff)),
        actual_seq_lengths: Some(vec![2]),
        actual_seq_lengths_kv: Some(vec![2]),
        input_layout: Some("TND".into()),
        ..Arguments::default()
    };
    ok(attend(Version::VarLenV1, &arguments));
    // Marked ones are filled with 0, and have to be there.
    let marked = Arguments {
        key: Some(rows(3, 3, 0)),
        value: Some(rows(3, 3, 0)),
        actual_seq_lengths: Some(vec![2, 0]),
        actual_seq_lengths_kv: Some(vec![2, 0]),
        ..arguments
    };
    assert_ne!(attend(Version::VarLenV1, &marked), 0);
}
