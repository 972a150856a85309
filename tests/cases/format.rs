//! Case files: what is written is read back, and whatever a reader does not know is an error that names it.

use crate::case_files;

use std::fs;
use std::path::{Path, PathBuf};

use ascend_attention::DType;
use ascend_attention::case::{CaseError, CaseTensor, Expect, MaskKind, Parameter, Tolerance};
use ascend_attention::spec::ops::fused_infer_attention_score::{Arguments, Version};
use ascend_attention::spec::{Cann, Release, Soc, Target};
use case_files::{BASE, TENSORS, file, full, raw, tensor};

fn vectors() -> Vec<PathBuf> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/vectors");
    let mut files: Vec<PathBuf> = ["numeric", "real"]
        .iter()
        .flat_map(|folder| fs::read_dir(root.join(folder)).unwrap())
        .map(|entry| entry.unwrap().path())
        .collect();
    files.sort();
    assert!(files.len() > 15);
    files
}

/// The file above with some metadata added, or changed if the key is there already.
fn with<'a>(changes: &[(&'a str, &'a str)]) -> Vec<u8> {
    let mut metadata: Vec<(&'a str, &'a str)> = BASE.to_vec();
    for change in changes {
        match metadata.iter_mut().find(|(key, _)| *key == change.0) {
            Some(entry) => *entry = *change,
            None => metadata.push(*change),
        }
    }
    file(&metadata, TENSORS)
}

fn with_tensors<'a>(more: &[(&'a str, &'a str, &'a [u64], usize)]) -> Vec<u8> {
    file(BASE, &[TENSORS, more].concat())
}

fn error(file: &[u8]) -> CaseError {
    case_files::from_bytes(file).expect_err("the file should be refused")
}

#[test]
fn what_is_written_is_read_back() {
    let case = full();
    let bytes = case.to_bytes().unwrap();
    assert_eq!(case_files::from_bytes(&bytes).unwrap(), case);
    assert_eq!(case.to_bytes().unwrap(), bytes, "writing is deterministic");

    let mut rejected = full();
    rejected.expect = Expect::Reject {
        status: Some(561_002),
    };
    rejected.arguments.atten_mask = None;
    rejected.mask = MaskKind::Compressed;
    rejected.arguments.sparse_mode = 3;
    rejected.arguments.value.clear();
    let bytes = rejected.to_bytes().unwrap();
    assert_eq!(case_files::from_bytes(&bytes).unwrap(), rejected);

    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("case.safetensors");
    case.write(&path).unwrap();
    assert_eq!(case_files::read(&path).unwrap(), case);
}

#[test]
fn other_readers_of_safetensors_read_what_is_written() {
    let bytes = full().to_bytes().unwrap();
    let read = safetensors::SafeTensors::deserialize(&bytes).unwrap();
    let query = read.tensor("query").unwrap();
    assert_eq!(query.shape(), [2, 3]);
    assert_eq!(
        query.data(),
        full().tensor(Parameter::Query).unwrap().bytes()
    );
    assert!(read.tensor("key.1").is_ok() && read.tensor("value").is_ok());
    let (_, header) = safetensors::SafeTensors::read_metadata(&bytes).unwrap();
    let metadata = header.metadata().clone().unwrap();
    assert_eq!(metadata["num_heads"], "4");
    assert_eq!(
        metadata["actual_seq_lengths_kv"],
        "[3, -9223372036854775808]"
    );
    // The header ends at a multiple of 8 and wide elements come first, so that every tensor is aligned.
    for (name, view) in read.iter() {
        let offset = view.data().as_ptr().addr() - bytes.as_ptr().addr();
        assert!(offset.is_multiple_of(view.dtype().bitsize() / 8), "{name}");
    }
}

#[test]
fn every_case_of_the_repository_survives_a_round_trip() {
    for path in vectors() {
        let case = case_files::read(&path).unwrap();
        let again = case_files::from_bytes(&case.to_bytes().unwrap()).unwrap();
        assert_eq!(again, case, "{}", path.display());
        assert!(!case.name.is_empty() && case.expected("attention_out").is_some());
    }
}

#[test]
fn a_file_says_which_machine_it_is_for() {
    let read = |changes: &[(&'static str, &'static str)]| case_files::from_bytes(&with(changes));
    let case = read(&[
        ("soc", "Ascend910B1"),
        ("cann", "9.1.0"),
        ("op_version", "4"),
        ("out_dtype", "bfloat16"),
        ("rms_rtol", "0.125"),
        ("sparse_mode", "9"),
        ("expect_rule", "tokens.without_mask"),
        ("portable_since", "8.5.0"),
    ])
    .unwrap();
    assert_eq!(case.expect_rule.as_deref(), Some("tokens.without_mask"));
    assert_eq!(case.portable_since, Some(Cann::V8_5));
    assert_eq!(case.soc_name.as_deref(), Some("Ascend910B1"));
    assert_eq!((case.cann, case.op_version), (Some(Cann::V9_1), Some(4)));
    assert_eq!(
        (case.out_dtype, case.rms_rtol),
        (Some(DType::Bf16), Some(0.125))
    );
    assert_eq!(case.arguments.sparse_mode, 9);
    assert_eq!(case.describe().attention_out.unwrap().dtype, DType::Bf16);
    assert_eq!(
        case_files::from_bytes(&case.to_bytes().unwrap()).unwrap(),
        case
    );
    for (key, value, expected) in [
        ("cann", "9.7", "8.1 to 9.1"),
        ("cann", "newest", "8.1 to 9.1"),
        ("cann", "9.1junk", "8.1 to 9.1"),
        ("portable_since", "9.1.0 or so", "8.1 to 9.1"),
        ("op_version", "6", "1 to 5"),
        ("op_version", "V4", "1 to 5"),
        ("out_dtype", "float7", "an element type"),
        ("rms_rtol", "-1", "at least 0"),
        ("dtype.key", "int5", "`int4`, "),
    ] {
        let text = read(&[(key, value)]).unwrap_err().to_string();
        assert!(text.contains(expected), "{key} {value}: {text}");
    }
    for old in ["8.1.0", "8.5.0"] {
        let text = read(&[("soc", "Ascend950PR_9599"), ("cann", old)]);
        let text = text.unwrap_err().to_string();
        assert!(text.contains("allowed: 9.0, 9.1"), "{text}");
    }
    let chip = read(&[("soc", "Ascend950PR_9599")]).unwrap();
    let old = Target::snapshot(Soc::AtlasA2);
    assert_eq!(chip.target(old), Target::new(Soc::Ascend950, Cann::NEWEST));
    let release = read(&[("cann", "8.5.0")]).unwrap();
    assert_eq!(release.target(old), Target::new(Soc::AtlasA2, Cann::V8_5));
}

#[test]
fn small_types_are_stored_as_bytes() {
    let small: [(&str, &str, &[u64], usize); 6] = [
        ("query", "F16", &[1, 1, 2, 2], 8),
        ("key.0", "U8", &[1, 2, 3], 6),
        ("key.1", "U8", &[1, 2, 3], 6),
        ("value", "U8", &[1, 2, 3], 6),
        ("dequant_scale_query", "U8", &[4], 4),
        ("atten_mask", "U8", &[4], 4),
    ];
    let types = [
        ("dtype.key", "float4_e2m1"),
        ("dtype.value", "hifloat8"),
        ("dtype.dequant_scale_query", "float8_e8m0"),
    ];
    let all = [BASE, &types].concat();
    let case = case_files::from_bytes(&file(&all, &small)).unwrap();
    for key in &case.arguments.key {
        assert_eq!(
            (key.dtype(), key.shape()),
            (DType::Float4E2M1, &[1, 2, 6][..])
        );
    }
    assert_eq!(case.arguments.value[0].dtype(), DType::HiFloat8);
    assert_eq!(case.arguments.value[0].shape(), [1, 2, 3]);
    let dtype = |of| case.tensor(of).unwrap().dtype();
    assert_eq!(dtype(Parameter::DequantScaleQuery), DType::Float8E8M0);
    assert_eq!(dtype(Parameter::AttenMask), DType::UInt8);
    let written = case.to_bytes().unwrap();
    assert_eq!(case_files::from_bytes(&written).unwrap(), case);
    let (_, header) = safetensors::SafeTensors::read_metadata(&written).unwrap();
    let metadata = header.metadata().clone().unwrap();
    for (key, name) in types {
        assert_eq!(metadata[key], name);
    }

    // A key of a tensor that is not there, or is not stored as bytes, says nothing that could be true.
    for wrong in ["dtype.block_table", "dtype.query", "dtype.key.2"] {
        let all = [BASE, &[(wrong, "int4")]].concat();
        assert!(
            case_files::from_bytes(&file(&all, &small)).is_err(),
            "{wrong}"
        );
    }
    // Half a byte is no row's.
    let odd = CaseTensor::new(DType::Int4, &[2, 3], vec![0; 3]).unwrap();
    let mut case = case;
    case.arguments.set_tensor(Parameter::PseShift, odd);
    assert!(
        matches!(case.to_bytes(), Err(CaseError::Dtype { tensor, .. }) if tensor == "pse_shift")
    );
}

/// Folders of cases that name their product and release: the repository's, and that of a larger collection.
fn targets() -> impl Iterator<Item = PathBuf> {
    let own = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/vectors");
    let more = std::env::var_os("ASCEND_VECTORS").map(PathBuf::from);
    let roots = [Some(own), more].into_iter().flatten();
    roots.map(|root| root.join("targets"))
}

#[test]
fn cases_of_all_targets_survive_a_round_trip() {
    for path in targets().flat_map(|folder| fs::read_dir(folder).unwrap()) {
        let path = path.unwrap().path();
        if path.extension().is_some_and(|of| of == "safetensors") {
            let case = case_files::read(&path)
                .unwrap_or_else(|error| panic!("{}: {error}", path.display()));
            assert!(
                case.soc_name.is_some() && case.cann.is_some(),
                "{}",
                path.display()
            );
            let again = case_files::from_bytes(&case.to_bytes().unwrap()).unwrap();
            assert_eq!(again, case, "{}", path.display());
        }
    }
}

#[test]
fn verdicts_by_release_are_those_of_the_operators_checks() {
    for folder in targets() {
        verdicts_are_right(&folder);
    }
}

/// Compares the verdicts that the folder of cases states.
fn verdicts_are_right(folder: &Path) {
    let verdicts = fs::read_to_string(folder.join("verdicts.json")).unwrap();
    let verdicts: std::collections::BTreeMap<String, std::collections::BTreeMap<String, String>> =
        serde_json::from_str(&verdicts).unwrap();
    let (mut judged, mut wrong) = (0, Vec::new());
    for (file, releases) in &verdicts {
        let case = case_files::read(folder.join(file)).unwrap();
        let soc = Soc::from_name(case.soc_name.as_deref().unwrap()).unwrap();
        let description = case.describe();
        let call = description.call();
        for (release, expected) in releases {
            let Some(Release::Known(cann)) = Cann::of_version(release) else {
                panic!("{file}: {release}");
            };
            let version = usize::from(case.op_version.unwrap()) - 1;
            let checked = call.check(Version::ALL[version], Target::new(soc, cann));
            let verdict = match &checked {
                Ok(_) => "accept",
                Err(violation) if violation.is_unsupported() => "unsupported",
                Err(_) => "reject",
            };
            judged += 1;
            if verdict != expected {
                wrong.push(format!(
                    "{file} on {cann}: {:?}, not {expected}",
                    checked.err()
                ));
            }
        }
    }
    assert!(judged > 50, "{judged}");
    assert!(
        wrong.is_empty(),
        "{} of {judged}:\n{}",
        wrong.len(),
        wrong.join("\n")
    );
}

#[test]
fn absent_attributes_have_the_operators_defaults() {
    let case = case_files::from_bytes(&file(BASE, TENSORS)).unwrap();
    let attributes: Arguments<CaseTensor> = case.describe().call().attributes();
    assert_eq!(attributes, Arguments::default());
    let a = Arguments::<CaseTensor>::default();
    assert_eq!((a.input_layout.as_str(), a.scale), ("BSH", 1.0));
    assert_eq!(
        [
            a.num_heads,
            a.num_key_value_heads,
            a.sparse_mode,
            a.pre_tokens,
            a.next_tokens,
            a.inner_precise,
            a.block_size,
        ],
        [1, 0, 0, 2_147_483_647, 2_147_483_647, 1, 0]
    );
    assert_eq!(case.arguments.actual_seq_lengths, None);
    assert_eq!((case.mask, case.expect), (MaskKind::None, Expect::Ok));
    assert!(case.name.is_empty() && case.tolerance.is_none());
}

#[test]
fn the_mask_kind_follows_from_the_mask_if_it_is_absent() {
    let mask = ("atten_mask", "BOOL", &[2, 3][..], 6);
    let case = case_files::from_bytes(&with_tensors(&[mask])).unwrap();
    assert_eq!(case.mask, MaskKind::Tensor);
}

#[test]
fn names_that_the_reader_does_not_know_are_errors() {
    for key in ["format", "version", "op"] {
        let rest: Vec<_> = BASE
            .iter()
            .filter(|(name, _)| *name != key)
            .copied()
            .collect();
        let error = error(&file(&rest, TENSORS));
        assert!(
            matches!(error, CaseError::MissingKey(name) if name == key),
            "{error}"
        );
    }
    assert!(matches!(
        error(&file(&[], TENSORS)),
        CaseError::MissingKey("format")
    ));
    for (changes, text) in [
        (("format", "other"), "unknown format \"other\""),
        (("version", "2"), "unknown version \"2\""),
        (("op", "flash_attention"), "unknown op \"flash_attention\""),
        (
            ("op", "flash_attention_score"),
            "a case of flash_attention_score",
        ),
        (("scale_value", "1"), "unknown metadata key \"scale_value\""),
        (("Num_heads", "1"), "unknown metadata key \"Num_heads\""),
        (
            ("prefix", "[1]"),
            "\"prefix\" is no argument of fused_infer_attention_score",
        ),
    ] {
        let error = error(&with(&[changes])).to_string();
        assert!(error.contains(text), "{error}");
    }
    let names: [&'static str; 10] = [
        "Query",
        "keys",
        "key.",
        "key.x",
        "key.+1",
        "key.00",
        "key.-1",
        "value.1.0",
        "softmax_max",
        "",
    ];
    for name in names {
        let error = error(&with_tensors(&[(name, "F16", &[1], 2)]));
        assert!(
            matches!(&error, CaseError::UnknownTensor(given) if given == name),
            "{error}"
        );
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
    let error = error(&file(
        &[BASE, &[("num_heads", long.as_str())]].concat(),
        TENSORS,
    ));
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
        (
            build(&[("atten_mask_kind", "none")], &[mask]),
            "not `tensor`",
        ),
        (
            build(
                &[("atten_mask_kind", "compressed"), ("sparse_mode", "3")],
                &[mask],
            ),
            "not `tensor`",
        ),
        (
            build(&[("atten_mask_kind", "tensor")], &[]),
            "`atten_mask` is missing",
        ),
        (
            build(&[("atten_mask_kind", "compressed")], &[]),
            "no compressed mask",
        ),
        (
            build(&[("expect_status", "561002")], &[]),
            "`expect` is not `reject`",
        ),
        (build(&[], &[out]), "neither `atol` nor `rtol`"),
        (
            build(&[("atol", "0.1")], &[lse]),
            "`softmax_lse_flag` is not `true`",
        ),
        (
            build(&[("atol", "0.1")], &[half]),
            "expected outputs are F32",
        ),
        (
            with_tensors(&[("key.0", "F16", &[1], 2)]),
            "both `key` and `key.0`",
        ),
        (
            with_tensors(&[("value.7", "F16", &[1], 2)]),
            "both `value` and `value.0`",
        ),
    ] {
        let error = error(&bytes).to_string();
        assert!(error.contains(text), "{error}");
    }
    // One of the two tolerances is enough.
    let case = case_files::from_bytes(&build(&[("rtol", "0.5")], &[out])).unwrap();
    assert_eq!(
        case.tolerance,
        Some(Tolerance {
            atol: 0.0,
            rtol: 0.5
        })
    );
}

#[test]
fn required_tensors_and_whole_lists_are_needed() {
    for missing in ["query", "key", "value"] {
        let rest: Vec<_> = TENSORS
            .iter()
            .filter(|(name, ..)| *name != missing)
            .copied()
            .collect();
        let error = error(&file(BASE, &rest));
        assert!(
            matches!(&error, CaseError::MissingTensor(name) if name == missing),
            "{error}"
        );
        // A call that is to be refused may lack them: that may be why.
        let rejected = file(&[BASE, &[("expect", "reject")]].concat(), &rest);
        assert!(case_files::from_bytes(&rejected).is_ok());
    }
    let list = |places: &[&'static str]| {
        let tensors: Vec<_> = places
            .iter()
            .map(|name| (*name, "F16", &[1u64][..], 2))
            .collect();
        file(
            BASE,
            &[&[TENSORS[0], TENSORS[2]], tensors.as_slice()].concat(),
        )
    };
    let case = case_files::from_bytes(&list(&["key.1", "key.2", "key.0"])).unwrap();
    assert_eq!(case.arguments.key.len(), 3);
    for (places, missing) in [
        (&["key.0", "key.2"][..], "key.1"),
        (&["key.1"], "key.0"),
        (&["key.18446744073709551615"], "key.0"),
    ] {
        let error = error(&list(places));
        assert!(
            matches!(&error, CaseError::MissingTensor(name) if name == missing),
            "{error}"
        );
    }
    // The text holds for every operator.
    let text = CaseError::MissingTensor("block_tables".into()).to_string();
    assert!(!text.contains("query"), "{text}");
    // More digits than any number has.
    let error = error(&list(&["key.18446744073709551616"]));
    assert!(matches!(error, CaseError::UnknownTensor(_)), "{error}");
}

#[test]
fn list_order_is_by_number_not_by_text() {
    let mut case = full();
    case.arguments.key = (1..=12)
        .map(|rows| tensor(DType::Float16, &[rows, 1]))
        .collect();
    let read = case_files::from_bytes(&case.to_bytes().unwrap()).unwrap();
    let rows: Vec<usize> = read
        .arguments
        .key
        .iter()
        .map(|key| key.shape()[0])
        .collect();
    assert_eq!(rows, (1..=12).collect::<Vec<_>>());
}

#[test]
fn names_that_appear_twice_are_errors() {
    for key in ["format", "num_heads"] {
        let error = error(&file(&[BASE, &[(key, "4"), (key, "8")]].concat(), TENSORS));
        assert!(
            matches!(&error, CaseError::Duplicate(name) if name == key),
            "{error}"
        );
    }
    let error = error(&with_tensors(&[("query", "F16", &[0], 0)]));
    assert!(
        matches!(&error, CaseError::Duplicate(name) if name == "query"),
        "{error}"
    );
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
    case.arguments.set_tensor(
        Parameter::PseShift,
        CaseTensor::new(DType::Float4E1M2, &[2], vec![0; 1]).unwrap(),
    );
    assert!(
        matches!(case.to_bytes(), Err(CaseError::Dtype { tensor, .. }) if tensor == "pse_shift")
    );
}

#[test]
fn a_case_that_could_not_be_read_back_is_not_written() {
    let mut case = full();
    case.arguments.scale = f64::NAN;
    assert!(matches!(
        case.to_bytes(),
        Err(CaseError::Malformed { key: "scale", .. })
    ));
    let mut case = full();
    case.tolerance = Some(Tolerance {
        atol: f64::INFINITY,
        rtol: 0.0,
    });
    assert!(matches!(
        case.to_bytes(),
        Err(CaseError::Malformed { key: "atol", .. })
    ));
    let mut case = full();
    case.mask = MaskKind::None;
    assert!(matches!(case.to_bytes(), Err(CaseError::Contradiction(_))));
    let mut case = full();
    case.arguments
        .set_tensor(Parameter::SoftmaxLse, tensor(DType::Float, &[1]));
    assert!(matches!(case.to_bytes(), Err(CaseError::Contradiction(_))));
    let mut case = full();
    case.arguments.value.clear();
    assert!(matches!(case.to_bytes(), Err(CaseError::MissingTensor(name)) if name == "value"));
}

#[test]
fn a_file_that_cannot_be_read_is_named() {
    let folder = tempfile::tempdir().unwrap();
    for path in [
        folder.path().join("absent.safetensors"),
        folder.path().to_owned(),
    ] {
        let error = case_files::read(&path).unwrap_err();
        assert!(
            error.to_string().contains(&path.display().to_string()),
            "{error}"
        );
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
        assert!(message.len() < 500, "{} bytes", message.len());
        assert!(!message.contains(['\n', '\u{1b}']), "{message}");
    }
    let cut = file(BASE, TENSORS);
    for (bytes, says) in [
        (&b"abc"[..], "3 bytes, where its first 8 say"),
        (&b"12345678901"[..], "but only 3 follow"),
        (&cut[..cut.len() - 1], "the file was cut off"),
        (&with(&[("prefix", "[1]")])[..], "leave it out"),
        (
            &with(&[("expect_status", "3")])[..],
            "leave it out, or expect the refusal",
        ),
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
        let error = ascend_attention::case::ParameterCase::from_json(line)
            .unwrap_err()
            .to_string();
        assert!(error.contains("twice in one object"), "{error}");
    }
    let error = ascend_attention::case::ParameterCase::from_json(r#"{"soc":7}"#).unwrap_err();
    assert!(!error.to_string().contains('\\'), "{error}");
}

#[test]
fn types_that_end_within_a_byte_are_not_written() {
    let mut case = case_files::read(
        Path::new(env!("CARGO_MANIFEST_DIR"))
            .join("tests/vectors/numeric/033_decode_bsh_one_len.safetensors"),
    )
    .unwrap();
    for (shape, bytes, whole) in [(&[1, 1][..], 1, false), (&[1, 4], 3, true)] {
        let tensor = CaseTensor::new(DType::Float6E2M3, shape, vec![0; bytes]).unwrap();
        case.arguments
            .set_tensor(Parameter::KeySharedPrefix, tensor);
        match case.to_bytes() {
            Ok(file) => assert!(whole && case_files::from_bytes(&file).is_ok()),
            Err(error) => assert!(
                !whole && matches!(error, CaseError::Dtype { .. }),
                "{error}"
            ),
        }
    }
}
