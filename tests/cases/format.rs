//! Case files: what is written is read back, and whatever a reader does not know is an error that names it.

use std::fs;
use std::path::{Path, PathBuf};

use crate::case_files::{self, BASE, TENSORS, file, full, tensor};
use ascend_attention::DType;
use ascend_attention::case::{CaseError, CaseTensor, Expect, MaskSource, Parameter};
use ascend_attention::spec::ops::fused_infer_attention_score::{Arguments, Version};
use ascend_attention::spec::{Cann, Release, Soc, Target};

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
pub(super) fn with<'a>(changes: &[(&'a str, &'a str)]) -> Vec<u8> {
    let mut metadata: Vec<(&'a str, &'a str)> = BASE.to_vec();
    for change in changes {
        match metadata.iter_mut().find(|(key, _)| *key == change.0) {
            Some(entry) => *entry = *change,
            None => metadata.push(*change),
        }
    }
    file(&metadata, TENSORS)
}

pub(super) fn with_tensors<'a>(more: &[(&'a str, &'a str, &'a [u64], usize)]) -> Vec<u8> {
    file(BASE, &[TENSORS, more].concat())
}

pub(super) fn error(file: &[u8]) -> CaseError {
    case_files::from_bytes(file).expect_err("the file should be refused")
}

#[test]
fn what_is_written_is_read_back() {
    let case = full();
    let bytes = case.to_bytes().unwrap();
    assert_eq!(case_files::from_bytes(&bytes).unwrap(), case);
    assert_eq!(case.to_bytes().unwrap(), bytes, "writing is deterministic");

    let mut rejected = full();
    rejected.expect = Expect::Reject { status: Some(561_002) };
    rejected.arguments.atten_mask = None;
    rejected.mask = MaskSource::Compressed;
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
    assert_eq!(query.data(), full().tensor(Parameter::Query).unwrap().bytes());
    assert!(read.tensor("key.1").is_ok() && read.tensor("value").is_ok());
    let (_, header) = safetensors::SafeTensors::read_metadata(&bytes).unwrap();
    let metadata = header.metadata().clone().unwrap();
    assert_eq!(metadata["num_heads"], "4");
    assert_eq!(metadata["actual_seq_lengths_kv"], "[3, -9223372036854775808]");
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
    assert_eq!((case.out_dtype, case.rms_rtol), (Some(DType::Bf16), Some(0.125)));
    assert_eq!(case.arguments.sparse_mode, 9);
    assert_eq!(case.describe().attention_out.unwrap().dtype, DType::Bf16);
    assert_eq!(case_files::from_bytes(&case.to_bytes().unwrap()).unwrap(), case);
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
    let types =
        [("dtype.key", "float4_e2m1"), ("dtype.value", "hifloat8"), ("dtype.dequant_scale_query", "float8_e8m0")];
    let all = [BASE, &types].concat();
    let case = case_files::from_bytes(&file(&all, &small)).unwrap();
    for key in &case.arguments.key {
        assert_eq!((key.dtype(), key.shape()), (DType::Float4E2M1, &[1, 2, 6][..]));
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
        assert!(case_files::from_bytes(&file(&all, &small)).is_err(), "{wrong}");
    }
    // Half a byte is no row's.
    let odd = CaseTensor::new(DType::Int4, &[2, 3], vec![0; 3]).unwrap();
    let mut case = case;
    case.arguments.set_tensor(Parameter::PseShift, odd);
    assert!(matches!(case.to_bytes(), Err(CaseError::Dtype { tensor, .. }) if tensor == "pse_shift"));
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
            let case = case_files::read(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
            assert!(case.soc_name.is_some() && case.cann.is_some(), "{}", path.display());
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
                wrong.push(format!("{file} on {cann}: {:?}, not {expected}", checked.err()));
            }
        }
    }
    assert!(judged > 50, "{judged}");
    assert!(wrong.is_empty(), "{} of {judged}:\n{}", wrong.len(), wrong.join("\n"));
}

#[test]
fn absent_attributes_have_the_operators_defaults() {
    let case = case_files::from_bytes(&file(BASE, TENSORS)).unwrap();
    let attributes: Arguments<CaseTensor> = case.describe().call().attributes();
    assert_eq!(attributes, Arguments::default());
    let a = Arguments::<CaseTensor>::default();
    assert_eq!((a.input_layout.as_str(), a.scale), ("BSH", 1.0));
    assert_eq!(
        [a.num_heads, a.num_key_value_heads, a.sparse_mode, a.pre_tokens, a.next_tokens, a.inner_precise, a.block_size,],
        [1, 0, 0, 2_147_483_647, 2_147_483_647, 1, 0]
    );
    assert_eq!(case.arguments.actual_seq_lengths, None);
    assert_eq!((case.mask, case.expect), (MaskSource::None, Expect::Ok));
    assert!(case.name.is_empty() && case.tolerance.is_none());
}

#[test]
fn the_mask_kind_follows_from_the_mask_if_it_is_absent() {
    let mask = ("atten_mask", "BOOL", &[2, 3][..], 6);
    let case = case_files::from_bytes(&with_tensors(&[mask])).unwrap();
    assert_eq!(case.mask, MaskSource::Tensor);
}

#[test]
fn list_order_is_by_number_not_by_text() {
    let mut case = full();
    case.arguments.key = (1..=12).map(|rows| tensor(DType::Float16, &[rows, 1])).collect();
    let read = case_files::from_bytes(&case.to_bytes().unwrap()).unwrap();
    let rows: Vec<usize> = read.arguments.key.iter().map(|key| key.shape()[0]).collect();
    assert_eq!(rows, (1..=12).collect::<Vec<_>>());
}
