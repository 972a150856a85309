//! Files that are no case, and cases that no file can hold: each is refused by what is wrong with it.

use super::format::{error, with, with_tensors};
use crate::case_files::{self, BASE, TENSORS, file, full, raw, tensor};
use ascend_attention::DType;
use ascend_attention::case::{CaseError, CaseTensor, MaskSource, Parameter, Tolerance};
use std::path::Path;

#[test]
fn names_that_the_reader_does_not_know_are_errors() {
    for key in ["format", "version", "op"] {
        let rest: Vec<_> = BASE.iter().filter(|(name, _)| *name != key).copied().collect();
        let error = error(&file(&rest, TENSORS));
        assert!(matches!(error, CaseError::MissingKey(name) if name == key), "{error}");
    }
    assert!(matches!(error(&file(&[], TENSORS)), CaseError::MissingKey("format")));
    for (changes, text) in [
        (("format", "other"), "unknown format \"other\""),
        (("version", "2"), "unknown version \"2\""),
        (("op", "flash_attention"), "unknown op \"flash_attention\""),
        (("op", "flash_attention_score"), "a case of flash_attention_score"),
        (("scale_value", "1"), "unknown key \"scale_value\""),
        (("Num_heads", "1"), "unknown key \"Num_heads\": did you mean `num_heads`?"),
        (("prefix", "[1]"), "\"prefix\" is no argument of fused_infer_attention_score"),
    ] {
        let error = error(&with(&[changes])).to_string();
        assert!(error.contains(text), "{error}");
    }
    let names: [&'static str; 10] =
        ["Query", "keys", "key.", "key.x", "key.+1", "key.00", "key.-1", "value.1.0", "softmax_max", ""];
    for name in names {
        let error = error(&with_tensors(&[(name, "F16", &[1], 2)]));
        assert!(matches!(&error, CaseError::UnknownTensor { name: given, .. } if given == name), "{error}");
    }
}

#[test]
fn values_that_cannot_be_read_are_errors() {
    for (key, value) in [
        ("num_heads", "8.0"),
        ("num_heads", ""),
        ("num_heads", " 8"),
        ("num_heads", "0x8"),
        ("num_heads", "9223372036854775808"),
        ("sparse_mode", "three"),
        ("scale", "1,0"),
        ("scale", "nan"),
        ("scale", "inf"),
        ("scale", ""),
        ("softmax_lse_flag", "True"),
        ("softmax_lse_flag", "1"),
        ("actual_seq_lengths", "3"),
        ("actual_seq_lengths", "[3"),
        ("actual_seq_lengths", "[3.5]"),
        ("actual_seq_lengths", "[\"3\"]"),
        ("actual_seq_lengths_kv", "null"),
        ("actual_seq_lengths_kv", "[9223372036854775808]"),
        ("actual_shared_prefix_len", "{}"),
        ("atten_mask_kind", "causal"),
        ("atol", "-1e-3"),
        ("rtol", "inf"),
        ("rtol", "NaN"),
        ("expect", "error"),
        ("expect_status", "561002.0"),
    ] {
        let error = error(&with(&[(key, value)]));
        let CaseError::Malformed { key: named, .. } = error else {
            panic!("{key}={value:?}: {error}");
        };
        assert_eq!(named, key);
    }
    let long = "9".repeat(10_000);
    let error = error(&file(&[BASE, &[("num_heads", long.as_str())]].concat(), TENSORS));
    assert!(error.to_string().len() < 200, "{error}");
    let big = with(&[("expect", "reject"), ("expect_status", "4294967296")]);
    assert!(case_files::from_bytes(&big).is_err());
}

#[test]
fn parts_that_exclude_each_other_are_errors() {
    let mask = ("atten_mask", "BOOL", &[2, 3][..], 6);
    let out = ("attention_out", "F32", &[1, 1, 2, 2][..], 16);
    let lse = ("softmax_lse", "F32", &[1, 1, 2, 1][..], 8);
    let half = ("attention_out", "F16", &[1, 1, 2, 2][..], 8);
    let build = |metadata: &[(&'static str, &'static str)], tensors: &[_]| {
        file(&[BASE, metadata].concat(), &[TENSORS, tensors].concat())
    };
    for (bytes, text) in [
        (build(&[("atten_mask_kind", "none")], &[mask]), "not `tensor`"),
        (build(&[("atten_mask_kind", "compressed"), ("sparse_mode", "3")], &[mask]), "not `tensor`"),
        (build(&[("atten_mask_kind", "tensor")], &[]), "`atten_mask` is missing"),
        (build(&[("atten_mask_kind", "compressed")], &[]), "no compressed mask"),
        (build(&[("expect_status", "561002")], &[]), "`expect` is not `reject`"),
        (build(&[], &[out]), "neither `atol` nor `rtol`"),
        (build(&[("atol", "0.1")], &[lse]), "`softmax_lse_flag` is not `true`"),
        (build(&[("atol", "0.1")], &[half]), "expected outputs are F32"),
        (with_tensors(&[("key.0", "F16", &[1], 2)]), "both `key` and `key.0`"),
        (with_tensors(&[("value.7", "F16", &[1], 2)]), "both `value` and `value.0`"),
    ] {
        let error = error(&bytes).to_string();
        assert!(error.contains(text), "{error}");
    }
    // One of the two tolerances is enough.
    let case = case_files::from_bytes(&build(&[("rtol", "0.5")], &[out])).unwrap();
    assert_eq!(case.tolerance, Some(Tolerance { atol: 0.0, rtol: 0.5 }));
}

#[test]
fn required_tensors_and_whole_lists_are_needed() {
    for missing in ["query", "key", "value"] {
        let rest: Vec<_> = TENSORS.iter().filter(|(name, ..)| *name != missing).copied().collect();
        let error = error(&file(BASE, &rest));
        assert!(matches!(&error, CaseError::MissingTensor(name) if name == missing), "{error}");
        // A call that is to be refused may lack them: that may be why.
        let rejected = file(&[BASE, &[("expect", "reject")]].concat(), &rest);
        assert!(case_files::from_bytes(&rejected).is_ok());
    }
    let list = |places: &[&'static str]| {
        let tensors: Vec<_> = places.iter().map(|name| (*name, "F16", &[1u64][..], 2)).collect();
        file(BASE, &[&[TENSORS[0], TENSORS[2]], tensors.as_slice()].concat())
    };
    let case = case_files::from_bytes(&list(&["key.1", "key.2", "key.0"])).unwrap();
    assert_eq!(case.arguments.key.len(), 3);
    for (places, missing) in
        [(&["key.0", "key.2"][..], "key.1"), (&["key.1"], "key.0"), (&["key.18446744073709551615"], "key.0")]
    {
        let error = error(&list(places));
        assert!(matches!(&error, CaseError::MissingTensor(name) if name == missing), "{error}");
    }
    // The text holds for every operator.
    let text = CaseError::MissingTensor("block_tables".into()).to_string();
    assert!(!text.contains("query"), "{text}");
    // More digits than any number has.
    let error = error(&list(&["key.18446744073709551616"]));
    assert!(matches!(error, CaseError::UnknownTensor { .. }), "{error}");
}

#[test]
fn names_that_appear_twice_are_errors() {
    for key in ["format", "num_heads"] {
        let error = error(&file(&[BASE, &[(key, "4"), (key, "8")]].concat(), TENSORS));
        assert!(matches!(&error, CaseError::Duplicate(name) if name == key), "{error}");
    }
    let error = error(&with_tensors(&[("query", "F16", &[0], 0)]));
    assert!(matches!(&error, CaseError::Duplicate(name) if name == "query"), "{error}");
    let twice = raw(r#"{"__metadata__":{},"__metadata__":{}}"#, 0);
    assert!(
        matches!(case_files::from_bytes(&twice), Err(CaseError::NotSafetensors(text)) if text.contains("duplicate"))
    );
}

#[test]
fn tensors_that_cann_does_not_have_are_errors() {
    let nine = with_tensors(&[("pse_shift", "F16", &[1; 9], 2)]);
    assert!(matches!(error(&nine), CaseError::Shape { tensor, .. } if tensor == "pse_shift"));
    let fnuz = with_tensors(&[("pse_shift", "F8_E4M3FNUZ", &[1], 1)]);
    assert!(matches!(error(&fnuz), CaseError::Dtype { tensor, .. } if tensor == "pse_shift"));
    let mut case = full();
    case.arguments.set_tensor(Parameter::PseShift, CaseTensor::new(DType::Float4E1M2, &[2], vec![0; 1]).unwrap());
    assert!(matches!(case.to_bytes(), Err(CaseError::Dtype { tensor, .. }) if tensor == "pse_shift"));
}

#[test]
fn a_case_that_could_not_be_read_back_is_not_written() {
    let mut case = full();
    case.arguments.scale = f64::NAN;
    assert!(matches!(case.to_bytes(), Err(CaseError::Malformed { key: "scale", .. })));
    let mut case = full();
    case.tolerance = Some(Tolerance { atol: f64::INFINITY, rtol: 0.0 });
    assert!(matches!(case.to_bytes(), Err(CaseError::Malformed { key: "atol", .. })));
    let mut case = full();
    case.mask = MaskSource::None;
    assert!(matches!(case.to_bytes(), Err(CaseError::Contradiction(_))));
    let mut case = full();
    case.arguments.set_tensor(Parameter::SoftmaxLse, tensor(DType::Float, &[1]));
    assert!(matches!(case.to_bytes(), Err(CaseError::Contradiction(_))));
    let mut case = full();
    case.arguments.value.clear();
    assert!(matches!(case.to_bytes(), Err(CaseError::MissingTensor(name)) if name == "value"));
}

#[test]
fn a_file_that_cannot_be_read_is_named() {
    let folder = tempfile::tempdir().unwrap();
    for path in [folder.path().join("absent.safetensors"), folder.path().to_owned()] {
        let error = case_files::read(&path).unwrap_err();
        assert!(error.to_string().contains(&path.display().to_string()), "{error}");
    }
}

#[test]
fn messages_name_the_value_what_is_expected_and_the_fix_and_repeat_no_hostile_text() {
    // Names as long and as wild as a file makes them.
    let wild = format!("\u{1b}[2J\n{}", "x".repeat(100_000));
    let wild = wild.as_str();
    for bytes in [
        with(&[(wild, "1")]),
        with(&[("version", wild)]),
        with(&[("op", wild)]),
        with(&[("scale", wild)]),
        with_tensors(&[(wild, "F16", &[2], 4)]),
        with_tensors(&[("key.1", wild, &[2], 4)]),
    ] {
        let message = error(&bytes).to_string();
        assert!(message.len() < 800, "{} bytes", message.len());
        assert!(!message.contains(['\n', '\u{1b}']), "{message}");
    }
    let cut = file(BASE, TENSORS);
    for (bytes, says) in [
        (&b"abc"[..], "3 bytes, where its first 8 say"),
        (&b"12345678901"[..], "but only 3 follow"),
        (&cut[..cut.len() - 1], "the file was cut off"),
        (&with(&[("prefix", "[1]")])[..], "leave it out"),
        (&with(&[("expect_status", "3")])[..], "leave it out, or expect the refusal"),
    ] {
        let message = error(bytes).to_string();
        assert!(message.contains(says), "{says}: {message}");
    }
}

#[test]
fn a_line_with_a_name_twice_is_refused() {
    for line in [
        r#"{"id":"d","attrs":{},"expect":"accept","expect":"reject"}"#,
        r#"{"id":"d","attrs":{"num_heads":4,"num_heads":8},"expect":"accept"}"#,
        r#"{"id":"d","inputs":{"query":{"shape":[1],"shape":[2],"dtype":"FLOAT16"}}}"#,
    ] {
        let error = ascend_attention::case::ParameterCase::from_json(line).unwrap_err().to_string();
        assert!(error.contains("twice in one object"), "{error}");
    }
    let error = ascend_attention::case::ParameterCase::from_json(r#"{"soc":7}"#).unwrap_err();
    assert!(!error.to_string().contains('\\'), "{error}");
}

#[test]
fn types_that_end_within_a_byte_are_not_written() {
    let mut case = case_files::read(
        Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/vectors/numeric/033_decode_bsh_one_len.safetensors"),
    )
    .unwrap();
    for (shape, bytes, whole) in [(&[1, 1][..], 1, false), (&[1, 4], 3, true)] {
        let tensor = CaseTensor::new(DType::Float6E2M3, shape, vec![0; bytes]).unwrap();
        case.arguments.set_tensor(Parameter::KeySharedPrefix, tensor);
        match case.to_bytes() {
            Ok(file) => assert!(whole && case_files::from_bytes(&file).is_ok()),
            Err(error) => assert!(!whole && matches!(error, CaseError::Dtype { .. }), "{error}"),
        }
    }
}
