//! Cases of operators other than FusedInferAttentionScore: what files say of them, and what becomes of their calls.

use crate::harness;

use std::path::Path;

use ascend_attention::case::{Case, CaseError, CaseTensor, Expect, ParameterCase, Tolerance, Verdict};
use ascend_attention::spec::declared::{AnyArguments, DeclaredOperator};
use ascend_attention::spec::operator::{OwnedValue, Value};
use ascend_attention::spec::{Cann, Soc};
use ascend_attention::{DType, Error};

/// One of the repository's own cases.
fn gather() -> Case {
    let file = "tests/vectors/gather/norm_block_edges_cumsum.safetensors";
    Case::read(Path::new(env!("CARGO_MANIFEST_DIR")).join(file)).unwrap()
}

/// A case without tensors.
fn plain(operator: DeclaredOperator, name: &str) -> Case {
    Case::new(name, AnyArguments::new(operator))
}

/// A file with other entries in the header: each text is replaced by one of the same length.
fn edited(case: &Case, edits: &[(&str, &str)]) -> Result<Case, CaseError> {
    let bytes = case.to_bytes().unwrap();
    let length = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
    let mut header = String::from_utf8(bytes[8..8 + length].to_vec()).unwrap();
    for (from, to) in edits {
        assert!(header.contains(from), "{header}");
        header = header.replacen(from, to, 1);
    }
    let mut file = (header.len() as u64).to_le_bytes().to_vec();
    file.extend_from_slice(header.as_bytes());
    file.extend_from_slice(&bytes[8 + length..]);
    Case::from_bytes(&file)
}

#[test]
fn a_written_case_is_read_as_it_was() {
    let mut training = plain(DeclaredOperator::FlashAttentionVarlenScore, "training");
    training.note = "of a test".to_owned();
    training.op_version = Some(5);
    for name in ["query", "key", "value", "query_rope", "key_rope"] {
        let tensor = CaseTensor::from_f32(DType::Bf16, &[4, 2, 64], &[0.5; 512]).unwrap();
        training.arguments.set_tensor(name, tensor).unwrap();
    }
    for (name, value) in [
        ("input_layout", OwnedValue::Text(Some("TND".to_owned()))),
        ("num_heads", OwnedValue::Int(2)),
        ("keep_prob", OwnedValue::Float(0.5)),
        ("prefix", OwnedValue::Ints(Some(vec![3, 0]))),
        ("actual_seq_lengths", OwnedValue::Ints(Some(vec![1, 4]))),
    ] {
        training.arguments.set_value(name, value).unwrap();
    }
    let row = CaseTensor::from_f32(DType::Float, &[1], &[f32::NAN]).unwrap();
    training.expected = vec![("softmax_max", row.clone()), ("attention_out", row)];
    training.tolerance = Some(Tolerance { atol: 0.5, rtol: 0.0 });
    training.softmax_tolerance = Some(Tolerance { atol: 0.0, rtol: 1e-4 });
    training.group = Some(("cut".to_owned(), "piece0".to_owned()));
    training.cann = Some(Cann::V9_1);
    training.soc_name = Some("Ascend910B1".to_owned());
    let mut list = plain(DeclaredOperator::IncreFlashAttention, "list");
    for name in ["query", "key", "key", "value", "value"] {
        let tensor = CaseTensor::from_f32(DType::Float16, &[1, 1, 64], &[0.5; 64]).unwrap();
        list.arguments.set_tensor(name, tensor).unwrap();
    }
    list.expect = Expect::Reject { status: Some(561_002) };
    for case in [gather(), training, list] {
        let bytes = case.to_bytes().unwrap();
        let read = Case::from_bytes(&bytes).unwrap();
        // NaN is not itself: the bytes are compared as well.
        assert_eq!(read.to_bytes().unwrap(), bytes);
        assert_eq!(read.arguments, case.arguments);
        assert_eq!(read.expected.len(), case.expected.len());
        let bare = |mut case: Case| {
            case.expected.clear();
            case
        };
        assert_eq!(bare(read), bare(case));
    }
}

#[test]
fn the_flag_of_the_log_sum_exp_is_a_truth_value_in_files_though_an_integer() {
    let file = "tests/vectors/sparse/049_bsa_tnd_x1_row_masks_f16.safetensors";
    let case = Case::read(Path::new(env!("CARGO_MANIFEST_DIR")).join(file)).unwrap();
    let flag = "softmax_lse_flag";
    assert_eq!(case.arguments.value(flag), Some(Value::Int(1)));
    assert_eq!(Case::from_bytes(&case.to_bytes().unwrap()).unwrap(), case);
    assert_eq!(Some(case.tolerance_of("softmax_lse", false)), case.softmax_tolerance);
    let written = |to: &str| edited(&case, &[("\"true\"", &format!("\"{to}\""))]);
    assert_eq!(written("0001").unwrap(), case);
    let refused = written("0000").unwrap_err().to_string();
    assert!(refused.contains("softmax_lse is expected"), "{refused}");
    let refused = written("TRUE").unwrap_err().to_string();
    assert!(refused.contains(flag), "{refused}");
}

#[test]
fn what_the_operator_does_not_have_is_refused_by_name() {
    let case = gather();
    for (edits, says) in [
        (("\"op_version\":\"1\"", "\"op_version\":\"2\""), "op_version"),
        (("\"cache_mode\"", "\"input_layout\""), "\"input_layout\" is no argument of gather_pa_kv_cache"),
        (("\"cache_mode\"", "\"softmax_atol\""), "\"softmax_atol\" is no argument of gather_pa_kv_cache"),
        (("\"cache_mode\"", "\"cash_mode\""), "unknown key \"cash_mode\": did you mean `cache_mode`?"),
        (("\"block_tables\"", "\"block_table\""), "unknown tensor \"block_table\""),
        (("\"value_cache\"", "\"value_cache.0\""), "unknown tensor \"value_cache.0\""),
        (("gather_pa_kv_cache", "gather_pa_kv"), "unknown op \"gather_pa_kv\""),
    ] {
        let error = edited(&case, &[edits]).unwrap_err().to_string();
        assert!(error.contains(says), "{error}");
    }

    let mut older = plain(DeclaredOperator::FlashAttentionScore, "sink");
    let sink = CaseTensor::from_f32(DType::Float, &[1], &[0.5]).unwrap();
    older.arguments.set_tensor("sink", sink).unwrap();
    for name in ["query", "key", "value"] {
        let tensor = CaseTensor::from_f32(DType::Bf16, &[1, 1, 1, 64], &[0.5; 64]).unwrap();
        older.arguments.set_tensor(name, tensor).unwrap();
    }
    older.op_version = Some(2);
    let error = older.to_bytes().unwrap_err().to_string();
    assert!(error.contains("version 2") && error.contains("`sink`"), "{error}");
    older.op_version = Some(3);
    older.to_bytes().unwrap();
}

#[test]
fn every_expected_number_of_an_operator_counts() {
    let stream = harness::stream();
    for output in ["key", "value"] {
        let mut case = gather();
        assert_eq!(case.launch(&stream).unwrap().verdict, Verdict::Passed);
        let at = case.expected.iter().position(|(name, _)| *name == output).unwrap();
        let bytes = case.expected[at].1.bytes_mut();
        let last = bytes.len() - 4;
        bytes[last..].copy_from_slice(&1e6f32.to_le_bytes());
        let outcome = case.launch(&stream).unwrap();
        match &outcome.verdict {
            Verdict::Failed { reason } => assert!(reason.contains(output), "{reason}"),
            other => panic!("{other:?}"),
        }
        assert_eq!(outcome.comparisons[at].outside, 1);
        let kept = case.with_outputs(&outcome).unwrap();
        assert_eq!(kept.launch(&stream).unwrap().verdict, Verdict::Passed);
    }
}

#[test]
fn an_operators_refusal_is_judged_by_status_and_rule() {
    let stream = harness::stream();
    let mut case = gather();
    case.expect = Expect::Reject { status: None };
    let verdict = |case: &Case| case.launch(&stream).unwrap().verdict;
    assert!(matches!(verdict(&case), Verdict::Failed { reason } if reason.contains("takes it")));

    let mode = OwnedValue::Text(Some("Sideways".to_owned()));
    case.arguments.set_value("cache_mode", mode).unwrap();
    assert_eq!(verdict(&case), Verdict::Passed);
    case.expect = Expect::Reject { status: Some(561_002) };
    case.expect_rule = Some("gather.cache_mode".to_owned());
    assert_eq!(verdict(&case), Verdict::Passed);
    case.expect_rule = Some("gather.tokens".to_owned());
    assert!(matches!(verdict(&case), Verdict::Failed { .. }));
    case.expect_rule = None;
    case.expect = Expect::Reject { status: Some(161_001) };
    assert!(matches!(verdict(&case), Verdict::Failed { .. }));
    case.expect = Expect::Ok;
    assert!(matches!(verdict(&case), Verdict::Failed { .. }));
}

#[test]
fn a_file_whose_table_names_no_block_is_not_run() {
    let stream = harness::stream();
    let mut case = gather();
    let table = &case.arguments.tensors("block_tables")[0];
    let mut bytes = table.bytes().to_vec();
    bytes[..4].copy_from_slice(&(1i32 << 20).to_le_bytes());
    let table = CaseTensor::new(table.dtype(), table.shape(), bytes).unwrap();
    case.arguments.set_tensor("block_tables", table).unwrap();
    let outcome = case.launch(&stream).unwrap();
    match &outcome.refusal {
        Some(Error::Violation(violation)) => assert_eq!(violation.rule.id, "gather.block"),
        other => panic!("{other:?}"),
    }
    assert!(matches!(outcome.verdict, Verdict::Failed { .. }) && outcome.outputs.is_empty());
    case.expect_rule = Some("gather.block".to_owned());
    assert_eq!(case.launch(&stream).unwrap().verdict, Verdict::Passed);
    harness::still_works(&stream);
}

#[test]
fn a_release_without_the_operator_is_an_error() {
    let mut case = gather();
    case.cann = Some(Cann::V8_1);
    let stream = harness::stream();
    if harness::not_on_npu("the release is chosen") {
        return;
    }
    assert!(matches!(case.launch(&stream), Err(Error::MissingOperator { .. })));
}

#[test]
fn several_tensors_for_one_are_refused_in_the_words_of_the_operator() {
    let desc = r#"{"shape": [4, 16, 1, 64], "dtype": "float16"}"#;
    let line =
        |op: &str, name: &str| format!(r#"{{"id": "two", "op": "{op}", "inputs": {{"{name}": [{desc}, {desc}]}}}}"#);
    for (op, name, allowed) in [
        ("fused_infer_attention_score", "query", "the lists of fused_infer_attention_score are key and value"),
        ("gather_pa_kv_cache", "key_cache", "gather_pa_kv_cache takes no lists of tensors"),
    ] {
        let error = ParameterCase::from_json(&line(op, name)).unwrap_err();
        assert!(error.to_string().ends_with(allowed), "{error}");
    }
}

#[test]
fn selected_blocks_are_compared_as_a_set_and_cached_tokens_with_those_left_as_they_were() {
    let stream = harness::emulated_stream(Soc::AtlasA2, Cann::V9_1);
    let half = |shape: &[usize], element: f32| {
        CaseTensor::from_f32(DType::Float16, shape, &vec![element; shape.iter().product()]).unwrap()
    };
    let integers = |shape: &[usize], numbers: &[i32]| {
        let bytes = numbers.iter().flat_map(|number| number.to_le_bytes()).collect();
        CaseTensor::new(DType::Int32, shape, bytes).unwrap()
    };
    // All compressed tokens are alike: of the 4 blocks the first and the last two are selected.
    let mut case = plain(DeclaredOperator::NsaCompressAttentionInfer, "blocks");
    for (name, tensor) in [
        ("query", half(&[1, 1, 32], 1.0)),
        ("key", half(&[1, 16, 32], 1.0)),
        ("value", half(&[1, 16, 32], 0.5)),
        ("block_table", integers(&[1, 1], &[0])),
    ] {
        case.arguments.set_tensor(name, tensor).unwrap();
    }
    for (name, value) in [
        ("actual_cmp_kv_seq_len", OwnedValue::Ints(Some(vec![15]))),
        ("select_block_count", OwnedValue::Int(3)),
        ("page_block_size", OwnedValue::Int(16)),
        ("scale", OwnedValue::Float(0.2)),
    ] {
        case.arguments.set_value(name, value).unwrap();
    }
    case.tolerance = Some(Tolerance { atol: 1e-3, rtol: 0.0 });
    let out = CaseTensor::from_f32(DType::Float, &[1, 1, 32], &[0.5; 32]).unwrap();
    for (blocks, passes) in [([3, 0, 2], true), ([0, 2, 3], true), ([0, 1, 3], false)] {
        case.expected = vec![("output", out.clone()), ("top_k_output", integers(&[1, 1, 3], &blocks))];
        let read = Case::from_bytes(&case.to_bytes().unwrap()).unwrap();
        let verdict = read.launch(&stream).unwrap().verdict;
        assert_eq!(verdict == Verdict::Passed, passes, "{blocks:?}: {verdict:?}");
    }

    let mut case = plain(DeclaredOperator::NsaCompressWithCache, "cache");
    for (name, tensor) in [
        ("input", half(&[16, 1, 16], 1.0)),
        ("weight", half(&[16, 1], 0.25)),
        ("slot_mapping", integers(&[1], &[1])),
        ("output_cache", half(&[2, 1, 16], 9.0)),
    ] {
        case.arguments.set_tensor(name, tensor).unwrap();
    }
    for (name, value) in
        [("act_seq_len", OwnedValue::Ints(Some(vec![16]))), ("compress_block_size", OwnedValue::Int(16))]
    {
        case.arguments.set_value(name, value).unwrap();
    }
    case.tolerance = Some(Tolerance { atol: 1e-3, rtol: 0.0 });
    for (old, passes) in [(9.0, true), (8.0, false)] {
        let cache = [[old; 16], [4.0; 16]];
        let cache = CaseTensor::from_f32(DType::Float, &[2, 1, 16], cache.as_flattened()).unwrap();
        case.expected = vec![("output_cache", cache)];
        let read = Case::from_bytes(&case.to_bytes().unwrap()).unwrap();
        let verdict = read.launch(&stream).unwrap().verdict;
        assert_eq!(verdict == Verdict::Passed, passes, "{verdict:?}");
    }
}
