//! Golden cases: every one passes.

use crate::case_files;
use crate::harness;

use std::env;
use std::fs;
use std::path::{Path, PathBuf};

use ascend_attention::case::{AttentionCase, Case, CaseTensor, Expect, Parameter, Verdict};
use ascend_attention::spec::Cann;
use ascend_attention::{Error, Runtime, Stream};
use harness::stream;

/// The case files of a folder, by name.
fn cases(folder: &Path) -> Vec<PathBuf> {
    let mut files: Vec<PathBuf> = fs::read_dir(folder)
        .unwrap_or_else(|error| panic!("{}: {error}", folder.display()))
        .map(|entry| entry.unwrap().path())
        .filter(|path| path.extension().is_some_and(|extension| extension == "safetensors"))
        .collect();
    files.sort();
    files
}

/// A stream for cases that name no release: their verdicts and numbers are those of the snapshot that stands for 8.1.
fn snapshot_stream() -> Stream {
    match harness::on_npu() {
        true => stream(),
        false => harness::stream_of(Cann::V8_1).unwrap(),
    }
}

/// Runs every case of a folder, all of which have to pass; returns how many there are.
fn replay(folder: &Path) -> usize {
    replay_of(folder, "")
}

/// Runs the golden cases whose names hold `part`. Cases that the machine is not the target of count as well.
fn replay_of(folder: &Path, part: &str) -> usize {
    replay_on(&snapshot_stream(), folder, part)
}

/// Runs the golden cases whose names hold `part` on this stream.
fn replay_on(stream: &Stream, folder: &Path, part: &str) -> usize {
    let (mut passed, mut elsewhere, mut wrong) = (0, 0, Vec::new());
    let named = |path: &PathBuf| {
        let name = path.file_name();
        name.is_some_and(|name| name.to_string_lossy().contains(part))
    };
    for path in cases(folder).into_iter().filter(named) {
        let name = path.file_stem().unwrap().to_string_lossy().into_owned();
        let case = Case::read(&path).unwrap_or_else(|error| panic!("{name}: {error}"));
        let outcome = match case.launch(stream) {
            Err(Error::OtherTarget { .. }) if harness::on_npu() => {
                elsewhere += 1;
                continue;
            }
            outcome => outcome.unwrap_or_else(|error| panic!("{name}: {error}")),
        };
        match outcome.verdict {
            // Another package has an operator of the same name, of which the case is.
            Verdict::Unsupported(_) if case.provider.is_some() => elsewhere += 1,
            Verdict::Passed => {
                assert!(
                    outcome.refusal.is_some() || outcome.comparisons.iter().any(|comparison| comparison.compared > 0),
                    "{name} passed without anything compared"
                );
                passed += 1;
            }
            other => wrong.push(format!("{name}: {other:?}")),
        }
    }
    println!("{}: {passed} passed, {} did not", folder.display(), wrong.len());
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
    if elsewhere > 0 && harness::on_npu() {
        harness::does_not_apply(&format!("{elsewhere} cases are for another product or release"));
    }
    passed + elsewhere
}

fn own(folder: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/vectors").join(folder)
}

/// A folder of the larger collection that `ASCEND_VECTORS` names.
fn more(folder: &str) -> Option<PathBuf> {
    let folder = Path::new(&env::var_os("ASCEND_VECTORS")?).join(folder);
    folder.is_dir().then_some(folder)
}

#[test]
fn attention_of_a_real_model_is_right() {
    assert_eq!(replay(&own("real")), 6);
}

#[test]
fn the_repositorys_cases_are_right() {
    assert_eq!(replay(&own("numeric")), 25);
}

#[test]
fn the_repositorys_quantised_cases_are_right() {
    assert_eq!(replay(&own("quantised")), 11);
}

#[test]
fn cases_of_newer_releases_and_products_are_right() {
    for (product, own_cases, all_cases) in [("_a2_", 12, 79), ("_950_", 19, 56)] {
        assert_eq!(replay_of(&own("targets"), product), own_cases);
        match more("targets") {
            Some(folder) => assert_eq!(replay_of(&folder, product), all_cases),
            None => harness::does_not_apply("there is no larger collection of targets"),
        }
    }
}

#[test]
fn gathered_caches_are_right() {
    assert_eq!(replay_on(&stream(), &own("gather"), ""), 3);
    match more("train") {
        Some(folder) => assert_eq!(replay_on(&stream(), &folder, "_gather_"), 10),
        None => harness::does_not_apply("there is no larger collection of gathered caches"),
    }
}

#[test]
fn sparse_attention_is_right() {
    harness::expect_odd_sparse_lists();
    for (operator, own_cases, all_cases) in [("_li_", 3, 17), ("_sfa_", 3, 25), ("_bsa_", 3, 15)] {
        assert_eq!(replay_on(&stream(), &own("sparse"), operator), own_cases);
        match more("sparse") {
            Some(folder) => assert_eq!(replay_on(&stream(), &folder, operator), all_cases),
            None => harness::does_not_apply("there is no larger collection of sparse attention"),
        }
    }
}

#[test]
fn linear_attention_is_right() {
    for (operator, own_cases, all_cases) in
        [("_rgdr_", 4, 33), ("_cgdr_", 3, 16), ("_fconv_", 5, 16), ("_vconv_", 5, 9)]
    {
        assert_eq!(replay_on(&stream(), &own("linear"), operator), own_cases);
        match more("linear") {
            Some(folder) => assert_eq!(replay_on(&stream(), &folder, operator), all_cases),
            None => harness::does_not_apply("there is no larger collection of linear attention"),
        }
    }
}

#[test]
fn a_larger_collection_is_right() {
    for (folder, least) in [("numeric", 89), ("quantised", 40), ("real", 6)] {
        let Some(folder) = more(folder) else {
            harness::does_not_apply(&format!("there is no larger collection of {folder}"));
            continue;
        };
        let passed = replay(&folder);
        assert!(passed >= least, "only {passed} of {least}");
    }
}

#[test]
fn every_expected_number_counts() {
    let stream = stream();
    let path = own("numeric").join("035_decode_mqa_lse.safetensors");
    let good = case_files::read(path).unwrap();
    assert!(matches!(good.launch(&stream).unwrap().verdict, Verdict::Passed));

    // One number of an expected output off: the case fails, and says where.
    for lse in [false, true] {
        let mut case = good.clone();
        let bytes = case.expected[usize::from(lse)].1.bytes_mut();
        let last = bytes.len() - 4;
        bytes[last..].copy_from_slice(&1e6f32.to_le_bytes());
        let outcome = case.launch(&stream).unwrap();
        assert!(matches!(&outcome.verdict, Verdict::Failed { .. }), "{:?}", outcome.verdict);
        let comparison = &outcome.comparisons[usize::from(lse)];
        assert_eq!(comparison.outside, 1);
        assert_eq!(comparison.worst.unwrap().index, last / 4);
        assert_eq!(comparison.worst.unwrap().want, 1e6);
    }

    // Nothing specified: nothing was shown, so the case does not pass.
    let mut case = good.clone();
    for (_, expected) in &mut case.expected {
        for value in expected.bytes_mut().chunks_exact_mut(4) {
            value.copy_from_slice(&f32::NAN.to_le_bytes());
        }
    }
    let verdict = case.launch(&stream).unwrap().verdict;
    assert!(matches!(&verdict, Verdict::Failed { reason } if reason.contains("nothing")), "{verdict:?}");

    // An expected output of another shape is not compared with part of this one.
    let mut case = good.clone();
    case.expected[0].1 = good.expected[1].1.clone();
    let verdict = case.launch(&stream).unwrap().verdict;
    assert!(matches!(&verdict, Verdict::Failed { reason } if reason.contains("[2, 16, 1, 1]")), "{verdict:?}");
}

#[test]
fn outputs_can_be_computed_and_kept() {
    let stream = stream();
    let path = own("numeric").join("035_decode_mqa_lse.safetensors");
    let good = case_files::read(path).unwrap();
    let mut bare = good.clone();
    bare.expected.clear();
    bare.tolerance = None;
    let outcome = bare.launch(&stream).unwrap();
    assert!(matches!(outcome.verdict, Verdict::Computed));
    assert!(outcome.comparisons.is_empty());

    // What was computed is what is computed again, exactly.
    let kept = bare.with_outputs(&outcome).unwrap();
    let kept = case_files::from_bytes(&kept.to_bytes().unwrap()).unwrap();
    let again = kept.launch(&stream).unwrap();
    assert!(matches!(again.verdict, Verdict::Passed), "{:?}", again.verdict);
    let worst = again.comparisons[0].worst.unwrap();
    assert_eq!((worst.error, worst.tolerance), (0.0, 0.0));
}

#[test]
fn a_call_that_must_be_refused_is_refused_or_the_case_fails() {
    let stream = stream();
    let path = own("numeric").join("059_head_dim_16.safetensors");
    let good = case_files::read(path).unwrap();
    let verdict = |case: &AttentionCase| case.launch(&stream).unwrap().verdict;

    let mut wrong = good.clone();
    wrong.arguments.num_heads = 3;
    let outcome = wrong.launch(&stream).unwrap();
    assert!(
        matches!(&outcome.verdict, Verdict::Failed { reason } if reason.contains("given")),
        "{:?}",
        outcome.verdict
    );
    assert!(outcome.outputs.is_empty());

    wrong.expect = Expect::Reject { status: None };
    let outcome = wrong.launch(&stream).unwrap();
    assert!(matches!(outcome.verdict, Verdict::Passed));
    assert!(outcome.refusal.is_some() && outcome.outputs.is_empty());
    wrong.expect = Expect::Reject { status: Some(561_002) };
    assert!(matches!(verdict(&wrong), Verdict::Passed));
    wrong.expect = Expect::Reject { status: Some(161_001) };
    assert!(matches!(verdict(&wrong), Verdict::Failed { .. }));

    // A call that runs although it should not.
    let mut right = good.clone();
    right.expect = Expect::Reject { status: None };
    assert!(matches!(verdict(&right), Verdict::Failed { .. }));

    // What is not supported is neither.
    let beyond = case_files::unsupported();
    assert!(matches!(verdict(&beyond), Verdict::Unsupported(_)));

    // A missing tensor is a null pointer.
    let mut null = good;
    null.arguments.value.clear();
    null.expect = Expect::Reject { status: Some(161_001) };
    assert!(matches!(verdict(&null), Verdict::Passed));
}

#[test]
fn a_file_that_would_make_the_device_leave_its_tensors_is_refused() {
    // Newer releases have rules for it.
    let Some(stream) = harness::stream_of(Cann::V8_1) else {
        return;
    };
    let read = |name: &str| case_files::read(own("numeric").join(format!("{name}.safetensors"))).unwrap();
    let refused = |case: &AttentionCase, id: &str| {
        let outcome = case.launch(&stream).unwrap();
        match &outcome.refusal {
            Some(Error::Violation(violation)) => assert_eq!(violation.rule.id, id),
            other => panic!("{other:?}"),
        }
        let failed = matches!(outcome.verdict, Verdict::Failed { .. });
        assert!(failed, "{:?}", outcome.verdict);
        assert!(outcome.outputs.is_empty());
    };
    let mut short = read("000_plain_bnsd_f16");
    let mut shape = short.arguments.value[0].shape().to_vec();
    shape[2] -= 1;
    short.arguments.value[0] = case_files::tensor(short.arguments.value[0].dtype(), &shape);
    refused(&short, "value.shape_unchecked");
    // That is no refusal of the operator's.
    short.expect = Expect::Reject { status: None };
    refused(&short, "value.shape_unchecked");

    let mut paged = read("067_paged_decode_bsh_block16");
    let table = paged.tensor(Parameter::BlockTable).unwrap();
    let mut bytes = table.bytes().to_vec();
    bytes[..4].copy_from_slice(&(1i32 << 20).to_le_bytes());
    let table = CaseTensor::new(table.dtype(), table.shape(), bytes).unwrap();
    paged.arguments.set_tensor(Parameter::BlockTable, table);
    refused(&paged, "block_table.range");
    harness::still_works(&stream);
}

#[test]
fn an_operator_that_does_nothing_fails() {
    use std::ffi::c_void;
    use std::sync::Arc;

    use ascend_attention::sys::Api;
    use ascend_attention::sys::bindings::{aclOpExecutor, aclnnStatus, aclrtStream};

    /// Phase two that queues nothing and says that all is well.
    unsafe extern "C" fn nothing(_: *mut c_void, _: u64, _: *mut aclOpExecutor, _: aclrtStream) -> aclnnStatus {
        0
    }
    let mut functions = harness::functions();
    functions.aclnnFusedInferAttentionScoreV4 = Some(nothing);
    let api = Arc::new(Api::from_functions(functions, "nothing is computed"));
    // SAFETY: the emulation's functions, and one that touches no argument.
    let runtime = unsafe { Runtime::from_api(api) }.unwrap();
    let stream = runtime.device(0).unwrap().stream().unwrap();
    for name in ["035_decode_mqa_lse", "059_head_dim_16"] {
        let case = case_files::read(own("numeric").join(format!("{name}.safetensors"))).unwrap();
        let outcome = case.launch(&stream).unwrap();
        assert!(matches!(outcome.verdict, Verdict::Failed { .. }));
        for comparison in &outcome.comparisons {
            assert_eq!(comparison.outside, comparison.compared, "{name}");
            assert!(comparison.worst.unwrap().got.is_nan());
        }
    }
}

#[test]
fn training_attention_and_its_kin_are_right() {
    assert_eq!(replay_on(&stream(), &own("train"), ""), 19);
    match more("train") {
        Some(folder) => assert_eq!(replay_on(&stream(), &folder, ""), cases(&folder).len()),
        None => harness::does_not_apply("there is no larger collection of training cases"),
    }
}
