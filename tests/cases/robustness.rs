//! Case files: whatever bytes a file has, reading it gives a case or an error, never a panic.

use crate::case_files;

use ascend_attention::case::CaseError;
use case_files::{BASE, TENSORS, file, full, raw};
use proptest::prelude::*;

#[test]
fn files_that_are_no_safetensors_are_errors() {
    let good = file(BASE, TENSORS);
    assert!(case_files::from_bytes(&good).is_ok());
    let offsets = |a: u64, b: u64| {
        raw(&format!(r#"{{"query":{{"dtype":"U8","shape":[{}],"data_offsets":[{a},{b}]}}}}"#, b.wrapping_sub(a)), 4)
    };
    let huge = format!(
        r#"{{"query":{{"dtype":"U8","shape":[2305843009213693951],"data_offsets":[0,2305843009213693951]}},{}}}"#,
        (1..8)
            .map(|i| {
                let start = i * 2_305_843_009_213_693_951u64;
                format!(
                    r#""key.{i}":{{"dtype":"U8","shape":[2305843009213693951],"data_offsets":[{start},{}]}}"#,
                    start + 2_305_843_009_213_693_951
                )
            })
            .collect::<Vec<_>>()
            .join(",")
    );
    for bytes in [
        Vec::new(),
        vec![0; 7],
        vec![0; 8],
        vec![0xff; 64],
        u64::MAX.to_le_bytes().to_vec(),
        good[..good.len() - 1].to_vec(),
        [good.as_slice(), &[0]].concat(),
        raw("", 0),
        raw("[]", 0),
        raw("null", 0),
        raw("{", 0),
        raw(r#"{"__metadata__":3}"#, 0),
        raw(r#"{"__metadata__":{"format":1}}"#, 0),
        raw(r#"{"query":{}}"#, 0),
        raw(r#"{"query":{"dtype":"F12","shape":[],"data_offsets":[0,0]}}"#, 0),
        raw(r#"{"query":{"dtype":"F16","shape":[-1],"data_offsets":[0,0]}}"#, 0),
        raw(r#"{"query":{"dtype":"F16","shape":[2],"data_offsets":[0,3]}}"#, 3),
        raw(r#"{"query":{"dtype":"F4","shape":[1],"data_offsets":[0,1]}}"#, 1),
        raw(r#"{"query":{"dtype":"F64","shape":[4611686018427387904,4],"data_offsets":[0,0]}}"#, 0),
        raw(&huge, 0),
        offsets(0, 5),
        offsets(1, 4),
        offsets(4, 0),
        offsets(0, u64::MAX),
        raw(&"[".repeat(100_000), 0),
    ] {
        let error = case_files::from_bytes(&bytes).expect_err("the file should be refused");
        assert!(matches!(error, CaseError::NotSafetensors(_)), "{error}");
    }
}

/// The header of a good file and the rest.
fn parts() -> (Vec<u8>, Vec<u8>) {
    let file = full().to_bytes().unwrap();
    let length = u64::from_le_bytes(file[..8].try_into().unwrap()) as usize;
    (file[8..8 + length].to_vec(), file[8 + length..].to_vec())
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(512))]

    #[test]
    fn random_bytes_never_panic(bytes in proptest::collection::vec(any::<u8>(), 0..256)) {
        prop_assert!(case_files::from_bytes(&bytes).is_err());
    }

    #[test]
    fn random_headers_never_panic(header in "[{}\\[\\]:,\"a-z_0-9.]{0,80}", data in 0usize..32) {
        prop_assert!(case_files::from_bytes(&raw(&header, data)).is_err());
    }

    #[test]
    fn a_truncated_file_is_never_a_case(cut in any::<proptest::sample::Index>()) {
        let file = full().to_bytes().unwrap();
        prop_assert!(case_files::from_bytes(&file[..cut.index(file.len())]).is_err());
    }

    #[test]
    fn a_changed_header_never_panics(
        changes in proptest::collection::vec((any::<proptest::sample::Index>(), any::<u8>()), 1..6),
    ) {
        let (mut header, data) = parts();
        for (at, byte) in changes {
            let at = at.index(header.len());
            header[at] = byte;
        }
        let mut file = (header.len() as u64).to_le_bytes().to_vec();
        file.extend_from_slice(&header);
        file.extend_from_slice(&data);
        // Whatever is read despite the change can be written and read again.
        if let Ok(case) = case_files::from_bytes(&file) {
            prop_assert_eq!(&case_files::from_bytes(&case.to_bytes().unwrap()).unwrap(), &case);
        }
    }

    #[test]
    fn offsets_and_shapes_never_panic(
        numbers in proptest::collection::vec(
            prop_oneof![0u64..20, Just(u64::MAX), Just(1 << 61), Just(1 << 63), any::<u64>()], 12),
        dtype in proptest::sample::select(vec!["U8", "F16", "F64", "F4", "BOOL"]),
    ) {
        let tensors: Vec<String> = numbers
            .chunks(4)
            .zip(["query", "key", "value"])
            .map(|(n, name)| format!(
                r#""{name}":{{"dtype":"{dtype}","shape":[{},{}],"data_offsets":[{},{}]}}"#, n[0], n[1], n[2], n[3]
            ))
            .collect();
        let _ = case_files::from_bytes(&raw(&format!("{{{}}}", tensors.join(",")), 24));
    }

    #[test]
    fn attributes_survive(
        num_heads in any::<i64>(), pre_tokens in any::<i64>(), scale in -1e300f64..1e300, layout in ".{0,12}",
        lengths in proptest::option::of(proptest::collection::vec(any::<i64>(), 0..5)),
    ) {
        let mut case = full();
        case.arguments.num_heads = num_heads;
        case.arguments.pre_tokens = pre_tokens;
        case.arguments.scale = scale;
        case.arguments.input_layout = layout;
        case.arguments.actual_seq_lengths = lengths;
        prop_assert_eq!(&case_files::from_bytes(&case.to_bytes().unwrap()).unwrap(), &case);
        // Describing whatever was read does not panic either.
        let description = case.describe();
        let call = description.call();
        let _ = call.check(ascend_spec::ops::fused_infer_attention_score::Version::V4, ascend_spec::Target::snapshot(ascend_spec::Soc::AtlasA2));
    }
}
