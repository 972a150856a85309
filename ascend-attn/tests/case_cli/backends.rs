//! `ascend-attn backends`: steps from files, what is compared, and exit codes.

use super::{command, last_line, text};

use std::fs;
use std::process::Output;

use serde_json::Value;

/// Two requests decode, one of them with a cached prompt; then a third request has a prompt.
const STEPS: [&str; 2] = [
    r#"{"version":1,"settings":{"blocks":8,"block_size":128,"pad":"SkipNegative","causality":"Causal","policy":{"chunked_prefill":false,"drafting":null}},"requests":[{"cached":130,"new":1,"drafts":0,"row":[4,2]},{"cached":7,"new":1,"drafts":0,"row":[3]}]}"#,
    r#"{"version":1,"settings":{"blocks":8,"block_size":128,"pad":"SkipNegative","causality":"Causal","policy":{"chunked_prefill":false,"drafting":null}},"requests":[{"cached":131,"new":1,"drafts":0,"row":[4,2]},{"cached":0,"new":9,"drafts":0,"row":[6]}]}"#,
];

fn backends(steps: &str, arguments: &[&str]) -> Output {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("steps.jsonl");
    fs::write(&file, steps).unwrap();
    let mut command = command("backends", &["--heads", "4", "--kv-heads", "2", "--head-dim", "64"]);
    command.args(arguments).arg(file).output().unwrap()
}

#[test]
fn steps_of_a_file_are_compared_one_by_one() {
    let steps = STEPS.join("\n");
    let arguments = ["--first", "fused", "--second", "paged_decode", "--layers", "2"];
    let output = backends(&steps, &arguments);
    let printed = text(&output.stdout);
    assert_eq!(output.status.code(), Some(0), "{}", text(&output.stderr));
    let lines: Vec<&str> = printed.lines().collect();
    assert_eq!(lines.len(), 1 + 2 + 1, "{printed}");
    assert!(lines[1].starts_with("step 0, DecodeOnly: fused "), "{printed}");
    assert!(lines[1].contains(" ms and paged_decode "), "{printed}");
    assert!(lines[1].contains(" of 1024 elements equal"), "{printed}");
    assert!(lines[2].contains(" and refused ("), "{printed}");
    assert!(lines[2].ends_with(": not compared"), "{printed}");
    assert!(last_line(&output).starts_with("2 steps, 1 compared in "), "{printed}");

    let json = backends(&steps, &[&arguments[..], &["--json"]].concat());
    let objects: Vec<Value> = text(&json.stdout).lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    assert_eq!(objects.len(), 3);
    assert_eq!(objects[0]["sides"][1]["backend"], "paged_decode");
    assert!(objects[1]["sides"][1]["refused"].is_string());
    let summary = &objects[2]["summary"];
    assert_eq!((&summary["compared"], &summary["elements"]), (&1.into(), &1024.into()));
    assert_eq!(summary["platform"], "emulated");
    assert_eq!(summary["equal"], objects[0]["equal"]);
    assert_eq!(summary["furthest"], objects[0]["furthest"]);
}

/// The book's page about the format shows these steps.
#[test]
fn the_page_about_the_format_shows_steps_that_are_read() {
    let page = fs::read_to_string(super::Path::new(super::ROOT).join("docs/src/recorded-steps.md"));
    let page = page.unwrap();
    let (_, example) = page.split_once("```json\n").unwrap();
    let (example, _) = example.split_once("```").unwrap();
    assert_eq!(example.trim().lines().collect::<Vec<_>>(), STEPS);
}

#[test]
fn the_same_backend_is_equal_and_a_bound_decides_the_exit_code() {
    let steps = STEPS.join("\n");
    let same = ["--first", "fused", "--second", "fused", "--most", "0"];
    let output = backends(&steps, &same);
    assert_eq!(output.status.code(), Some(0));
    assert!(last_line(&output).ends_with(": 100.00 % of 3072 elements equal"));
    let one = backends(STEPS[0], &same[..4]);
    assert!(last_line(&one).starts_with("1 step, 1 compared in "));
    let nothing = ["--first", "paged_decode", "--second", "fused"];
    let output = backends(STEPS[1], &nothing);
    assert_eq!(output.status.code(), Some(1));
    assert!(last_line(&output).ends_with(": nothing was compared"));
    // Parts of the keys are rounded before they are merged: this differs from one call in some of 512 elements.
    for dtype in ["f16", "bf16"] {
        for (most, code) in [("0.02", 0), ("0", 1)] {
            let bound = ["--second", "split_decode:128,fused", "--dtype", dtype];
            let output = backends(&steps, &[&same[..2], &bound[..], &["--most", most]].concat());
            assert_eq!(output.status.code(), Some(code), "{dtype} {most}");
            assert!(last_line(&output).contains("; furthest apart in step 0"));
        }
    }
    for most in ["nan", "inf", "-1", "far"] {
        let output = backends(&steps, &[&same[..4], &["--most", most]].concat());
        assert_eq!(output.status.code(), Some(2), "{most}");
        let error = text(&output.stderr);
        assert!(error.contains("a finite number of at least 0"), "{error}");
    }
}

#[test]
fn backends_of_chunks_and_of_parts_have_names() {
    let chunks = STEPS.map(|step| step.replace("\"Causal\"", "{\"Chunk\":128}"));
    let output = backends(&chunks.join("\n"), &["--first", "chunked_local", "--second", "chunked_local"]);
    assert_eq!(output.status.code(), Some(0), "{}", text(&output.stderr));
    assert!(last_line(&output).contains("2 compared"));
    // A backend that is missing is named as the program calls it.
    let output = backends(&chunks[0], &["--first", "fused", "--second", "fused"]);
    assert_eq!(output.status.code(), Some(1));
    let printed = text(&output.stdout);
    assert!(printed.contains("named `chunked_local`"), "{printed}");

    let output = backends(STEPS[0], &["--first", "split_decode:128", "--second", "paged_decode"]);
    assert_eq!(output.status.code(), Some(0), "{}", text(&output.stderr));
    assert!(text(&output.stdout).contains(": split_decode "));
    for (name, why) in [
        ("split_decode:0", "as in split_decode:256"),
        ("split_decode:x", "as in split_decode:256"),
        ("split_decode", "split_decode:KEYS"),
        ("fused,fused", "each name once"),
        ("flash", "one of fused, fused_in_two, paged_decode"),
    ] {
        let output = backends(STEPS[0], &["--first", name, "--second", "fused"]);
        assert_eq!(output.status.code(), Some(2), "{name}");
        assert!(text(&output.stderr).contains(why), "{name}: {}", text(&output.stderr));
    }
}

#[test]
fn a_mask_is_named_as_configurations_do() {
    let run =
        |first: &str, mask: &str| backends(STEPS[0], &["--first", first, "--second", "named_mask", "--mask", mask]);
    let output = run("named_mask", "sinks:4:16");
    assert_eq!(output.status.code(), Some(0), "{}", text(&output.stdout));
    // Keys that no token sees change nothing, and those that are hidden do.
    let output = run("fused", "window:16");
    assert_eq!(output.status.code(), Some(1), "{}", text(&output.stdout));
    assert!(text(&output.stdout).contains("refused"), "{}", text(&output.stdout));
    for wrong in ["sinks:4", "window:0", "full"] {
        let output = run("fused", wrong);
        assert_eq!(output.status.code(), Some(2), "{wrong}");
        assert!(text(&output.stderr).contains("sinks:SINKS:KEYS"), "{}", text(&output.stderr));
    }
}

#[test]
fn what_is_no_recorded_step_is_named_with_its_line() {
    let arguments = ["--first", "fused", "--second", "fused"];
    let output = backends(&format!("{}\n\n{{}}", STEPS[0]), &arguments);
    assert_eq!(output.status.code(), Some(2));
    let error = text(&output.stderr);
    assert!(error.contains("steps.jsonl:3: "), "{error}");
    let output = backends("", &arguments);
    assert_eq!(output.status.code(), Some(2));
    assert!(text(&output.stderr).contains("steps"));
}
