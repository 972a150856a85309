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
    for says in [
        "sparse modes 1 to 4",
        "561002",
        "check E4.1",
        "fix:       pass the mask",
    ] {
        assert!(text.contains(says), "{says}: {text}");
    }
    let (code, text) = check(&["--explain", "no.such_rule"]);
    assert_eq!(code, 2);
    assert!(text.contains("no.such_rule"), "{text}");
    let (code, text) = check(&["--explain", "atten_msk.requred"]);
    assert_eq!(code, 2);
    assert!(text.contains("near it: atten_mask.required"), "{text}");
}

#[test]
fn every_rule_is_explained_with_its_text_source_and_fix() {
    for rule in ascend_attention::spec::every_rule() {
        let (code, text) = check(&["--explain", rule.id]);
        assert_eq!(code, 0, "{text}");
        for says in [rule.holds, rule.source, rule.fix] {
            assert!(text.contains(says), "{}: {text}", rule.id);
        }
    }
}

#[test]
fn a_summary_counts_by_area_and_adds_up() {
    let (code, text) = check(&["--summary", "--json", &sample()]);
    assert_eq!(code, 0, "{text}");
    let objects: Vec<serde_json::Value> = text
        .lines()
        .map(|line| serde_json::from_str(line).unwrap())
        .collect();
    let (counts, areas) = objects.split_last().unwrap();
    for field in [
        "accepted_right",
        "accepted_wrong",
        "rejected_right",
        "rejected_wrong",
    ] {
        let sum: u64 = areas.iter().map(|area| area[field].as_u64().unwrap()).sum();
        assert_eq!(counts[field], sum, "{field}");
    }
    let names: Vec<&str> = areas
        .iter()
        .map(|area| area["area"].as_str().unwrap())
        .collect();
    for name in [
        "mla",
        "antiquantised",
        "prefix",
        "packed",
        "decode",
        "prefill",
    ] {
        assert!(names.contains(&name), "{name}: {names:?}");
    }
    let (code, text) = check(&["--summary", &sample()]);
    assert_eq!(code, 0, "{text}");
    // A heading, the areas, two lines of counts.
    assert_eq!(text.lines().count(), names.len() + 3, "{text}");
}
