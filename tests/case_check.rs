//! `ascend-attn check` says what the operator would make of calls.

#![allow(clippy::unwrap_used)]

use std::path::Path;
use std::process::{Command, Output};

fn check(arguments: &[&str]) -> (i32, String) {
    let Output {
        status,
        stdout,
        stderr,
    } = Command::new(env!("CARGO_BIN_EXE_ascend-attn"))
        .arg("check")
        .args(arguments)
        .output()
        .unwrap();
    let text = [stdout, stderr].concat();
    (status.code().unwrap(), String::from_utf8(text).unwrap())
}

fn sample() -> String {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("ascend-spec/tests/params/sample.jsonl");
    path.to_str().unwrap().to_owned()
}

#[test]
fn recorded_verdicts_and_case_files_agree() {
    let (code, text) = check(&[&sample(), "tests/vectors/real", "tests/vectors/numeric"]);
    assert_eq!(code, 0, "{text}");
    let last = text.lines().last().unwrap();
    assert!(last.ends_with(" passed, 0 failed"), "{last}");
    assert!(!last.starts_with("0 "), "{last}");
}

#[test]
fn json_has_an_object_for_each_call_and_the_counts() {
    let (code, text) = check(&["--json", &sample()]);
    assert_eq!(code, 0, "{text}");
    let objects: Vec<serde_json::Value> = text
        .lines()
        .map(|line| serde_json::from_str(line).unwrap())
        .collect();
    let (counts, calls) = objects.split_last().unwrap();
    assert_eq!(counts["passed"], calls.len());
    for call in calls {
        let refused = call["verdict"] == "reject";
        assert_eq!(call["rule"].is_string(), refused, "{call}");
        assert!(!refused || call["message"].is_string(), "{call}");
    }
}

#[test]
fn a_wrong_expectation_fails_and_is_named() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("wrong.jsonl");
    let line = std::fs::read_to_string(sample()).unwrap();
    let line = line
        .lines()
        .find(|line| line.contains(r#""expect":"accept""#))
        .unwrap();
    std::fs::write(
        &file,
        line.replace(r#""expect":"accept""#, r#""expect":"reject""#),
    )
    .unwrap();
    let (code, text) = check(&[file.to_str().unwrap()]);
    assert_eq!(code, 1, "{text}");
    assert!(
        text.contains("NOT AS EXPECTED") && text.ends_with("0 passed, 1 failed\n"),
        "{text}"
    );
}

#[test]
fn a_rule_is_explained_and_an_unknown_one_is_not() {
    let (code, text) = check(&["--explain", "atten_mask.required"]);
    assert_eq!(code, 0, "{text}");
    assert!(
        text.contains("561002") && text.contains("check E4.1"),
        "{text}"
    );
    let (code, text) = check(&["--explain", "no.such_rule"]);
    assert_eq!(code, 2);
    assert!(text.contains("no.such_rule"), "{text}");
}
