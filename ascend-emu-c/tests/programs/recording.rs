//! `ASCEND_RECORD`: the attention calls of a program as cases.

use crate::computed::{BEFORE_DEPRECATION, DIM, HEADS, QUERIES, element};
use crate::{command, compile, emu_libs, lay_out, library, repository, succeed};
use ascend_attention::Runtime;
use ascend_attention::case::{AttentionCase, Case, Expect, Parameter, Verdict};
use std::path::{Path, PathBuf};

/// The case in a file.
fn read(file: &Path) -> AttentionCase {
    Case::read(file).unwrap().attention().unwrap()
}

/// The cases in a folder by their files' names.
fn recorded(folder: &Path) -> Vec<AttentionCase> {
    let files = std::fs::read_dir(folder).unwrap();
    let mut files: Vec<PathBuf> = files.map(|entry| entry.unwrap().path()).collect();
    files.sort();
    files.iter().map(|file| read(file)).collect()
}

#[test]
fn a_c_program_s_attention_calls_are_recorded_and_replayed() {
    let libraries = lay_out();
    let program = compile("two_phase.c", &["-std=c99"], libraries.path());
    let folder = libraries.path().join("calls");
    let mut command = command(&program, libraries.path());
    let output = succeed(command.env("ASCEND_RECORD", &folder).envs([BEFORE_DEPRECATION]));
    assert!(output.stderr.is_empty());
    let cases = recorded(&folder);
    let [refused, ran] = &cases[..] else { panic!("{} calls", cases.len()) };
    let status = Some(161_001);
    assert_eq!(refused.expect, Expect::Reject { status });
    assert!(refused.tensor(Parameter::Query).is_none() && refused.note.contains("query"), "{}", refused.note);

    assert_eq!((ran.name.as_str(), ran.expect), ("recorded", Expect::Ok));
    let query = ran.tensor(Parameter::Query).unwrap().to_f32().unwrap();
    let made = (0..HEADS * QUERIES * DIM).map(|index| element(1, index) as f32);
    assert!(made.eq(query));
    assert_eq!(ran.expected.len(), 2);

    let stream = Runtime::emulated().unwrap().device(0).unwrap().stream().unwrap();
    for case in &cases {
        assert_eq!(case.launch(&stream).unwrap().verdict, Verdict::Passed, "{}", case.name);
    }
    // Other outputs than those would not pass.
    let mut wrong = ran.clone();
    wrong.expected[0].1.bytes_mut()[2] ^= 0x7f;
    let verdict = wrong.launch(&stream).unwrap().verdict;
    assert!(matches!(verdict, Verdict::Failed { .. }), "{verdict:?}");
}

#[test]
fn a_folder_that_cannot_be_written_is_told_once_and_fails_no_call() {
    let libraries = lay_out();
    let program = compile("two_phase.c", &["-std=c99"], libraries.path());
    let mut command = command(&program, libraries.path());
    let command = command.env("ASCEND_RECORD", "/dev/null/calls");
    let output = succeed(command.envs([BEFORE_DEPRECATION]));
    let text = String::from_utf8(output.stderr).unwrap();
    assert_eq!(text.lines().count(), 1, "{text}");
    assert!(text.contains("ASCEND_RECORD: no more calls are recorded: /dev/null/calls"), "{text}");
}

/// The golden cases that stand in the repository.
fn golden() -> Vec<(PathBuf, AttentionCase)> {
    let mut found = Vec::new();
    for folder in ["numeric", "quantised", "real"] {
        let folder = repository().join("tests/vectors").join(folder);
        for entry in std::fs::read_dir(folder).unwrap() {
            let path = entry.unwrap().path();
            if path.extension().is_some_and(|extension| extension == "safetensors") {
                found.push((path.clone(), read(&path)));
            }
        }
    }
    assert!(found.len() > 30);
    found.sort_by(|(one, _), (other, _)| one.cmp(other));
    found
}

/// Not a test of its own: the golden cases, run on the libraries of a toolkit.
#[test]
fn child_runs_golden_cases_on_a_toolkit() {
    if std::env::var_os("ASCEND_TEST_CHILD").is_none() {
        return;
    }
    let stream = Runtime::npu().unwrap().device(0).unwrap().stream().unwrap();
    for (path, mut case) in golden() {
        // As the toolkit is.
        (case.soc_name, case.cann) = (None, None);
        let verdict = case.launch(&stream).unwrap().verdict;
        println!("ran {} {}", path.display(), verdict == Verdict::Passed);
    }
}

/// What the library records of golden cases are these cases: inputs, attributes, and outputs that pass where the
/// golden ones do; of caches the blocks that are read.
#[test]
fn golden_cases_are_recorded_as_they_were_called() {
    let toolkit = tempfile::tempdir().unwrap();
    let libraries = toolkit.path().join("lib64");
    emu_libs::place(&library(), &libraries).unwrap();
    let folder = toolkit.path().join("calls");
    let mut child = command(&std::env::current_exe().unwrap(), &libraries);
    child
        .args(["--exact", "recording::child_runs_golden_cases_on_a_toolkit", "--nocapture"])
        .env("ASCEND_TEST_CHILD", "1")
        .env("ASCEND_HOME_PATH", toolkit.path())
        .env("ASCEND_RECORD", &folder);
    let text = String::from_utf8(succeed(&mut child).stdout).unwrap();
    let passed: Vec<&str> = text.lines().filter_map(|line| line.rsplit_once("ran ")?.1.strip_suffix(" true")).collect();
    let golden: Vec<AttentionCase> = golden()
        .into_iter()
        .filter(|(path, _)| passed.contains(&path.to_str().unwrap()))
        .map(|(_, case)| case)
        .collect();
    assert!(golden.len() > 30, "{text}");
    let calls = recorded(&folder);
    assert_eq!(calls.len(), golden.len());
    let stream = Runtime::emulated().unwrap().device(0).unwrap().stream().unwrap();
    let mut smaller = 0;
    for (golden, call) in golden.iter().zip(&calls) {
        let name = &golden.name;
        let attributes = |case: &AttentionCase| {
            let of = &case.arguments;
            (of.input_layout.clone(), of.num_heads, of.scale, of.sparse_mode, of.actual_seq_lengths_kv.clone())
        };
        assert_eq!(attributes(call), attributes(golden), "{name}");
        assert_eq!(call.tensor(Parameter::Query).unwrap(), golden.tensor(Parameter::Query).unwrap(), "{name}");
        assert_eq!(call.mask, golden.mask, "{name}");
        match golden.tensor(Parameter::BlockTable).is_some() {
            false => assert_eq!(call.arguments.key, golden.arguments.key, "{name}"),
            true => smaller += usize::from(call.arguments.key[0].bytes().len() < golden.arguments.key[0].bytes().len()),
        }
        let outcome = call.launch(&stream).unwrap();
        assert_eq!(outcome.verdict, Verdict::Passed, "{name}");
        // The outputs are those of the golden case too.
        let mut judged = call.clone();
        judged.expected.clone_from(&golden.expected);
        (judged.tolerance, judged.rms_rtol) = (golden.tolerance, golden.rms_rtol);
        assert_eq!(judged.launch(&stream).unwrap().verdict, Verdict::Passed, "{name}");
    }
    assert!(smaller > 0, "some cache has blocks that nobody reads");
}
