//! `ascend-attn ranks`: both sides agree, the bytes are counted, and what cannot be divided is refused.

use super::{command, program, text};

use serde_json::Value;

const SMALL: [&str; 10] = ["--tokens", "300", "--requests", "3", "--heads", "4", "--head-dim", "64", "--steps", "2"];

#[test]
fn divided_contexts_are_compared_with_one_device() {
    let output = command("ranks", &[&SMALL[..], &["--ranks", "3", "--json"]].concat()).output().unwrap();
    assert_eq!(output.status.code(), Some(0), "{}", text(&output.stderr));
    let all: Value = serde_json::from_str(text(&output.stdout)).unwrap();
    let report = &all["summary"];
    assert_eq!(
        (&report["ranks"], &report["tokens"], &report["platform"]),
        (&3.into(), &300.into(), &"emulated".into())
    );
    assert!(report["difference"].as_f64().unwrap() < 0.01, "{report}");
    // Two other ranks: 3 rows of 4 heads, queries and results of 64 elements of 2 bytes, and a log-sum-exp.
    assert_eq!(report["sent_bytes"], 2 * 3 * 4 * (2 * 64 * 2 + 4));
    for part in ["write", "gather", "attention", "exchange", "merge"] {
        assert!(report["part_seconds"][part].as_f64().unwrap() > 0.0, "{report}");
    }
    let chunk = command("ranks", &[&SMALL[..], &["--new", "5", "--kv-heads", "2", "--dtype", "f16"]].concat());
    let chunk = { chunk }.output().unwrap();
    assert_eq!(chunk.status.code(), Some(0), "{}", text(&chunk.stderr));
    let printed = text(&chunk.stdout);
    assert!(
        printed.contains(
            "3 requests with 300 tokens each, 5 new in a step; 4 heads of 64 on each of 2 ranks over 2 key heads"
        ),
        "{printed}"
    );
    assert!(printed.contains("\n  exchange "), "{printed}");
}

#[test]
fn divided_rows_are_compared_with_one_device() {
    let rows = ["--by-rows", "--new", "70", "--ranks", "3", "--json"];
    let output = command("ranks", &[&SMALL[..], &rows].concat()).output().unwrap();
    assert_eq!(output.status.code(), Some(0), "{}", text(&output.stderr));
    let all: Value = serde_json::from_str(text(&output.stdout)).unwrap();
    let report = &all["summary"];
    assert!(report["by_rows"] == true && report["difference"].as_f64().unwrap() < 0.01, "{report}");
    // Two other ranks: of 3 requests 24 of 70 new keys and 128 of 370 cached ones, all of them with their values.
    assert_eq!(report["sent_bytes"], 2 * 3 * (24 + 128) * 2 * 64 * 2);
    // The parts that there are, of which the first one has the writes.
    let parts = report["part_seconds"].as_object().unwrap();
    assert!(parts.len() == 2 && parts["gather"].as_f64() > Some(0.0) && parts["attention"].as_f64() > Some(0.0));
}

#[test]
fn a_step_is_drawn_with_a_row_for_each_rank() {
    let folder = tempfile::tempdir().unwrap();
    let [svg, png] = ["step.svg", "step.png"].map(|name| folder.path().join(name));
    let files = ["--svg", svg.to_str().unwrap(), "--png", png.to_str().unwrap(), "--ranks", "3"];
    let output = command("ranks", &[&SMALL[..], &files].concat()).output().unwrap();
    assert_eq!(output.status.code(), Some(0), "{}", text(&output.stderr));
    let drawn = std::fs::read_to_string(svg).unwrap();
    for part in ["rank 0", "rank 2", "waiting", "exchange", " ms", "3 requests with 300 tokens"] {
        assert!(drawn.contains(part), "{part}: {drawn}");
    }
    assert!(!drawn.contains("rank 3"));
    assert!(std::fs::read(png).unwrap().starts_with(b"\x89PNG"));
    assert_eq!(text(&output.stdout).matches("\non paper  ").count(), 2, "{}", text(&output.stdout));
}

#[test]
fn costs_on_paper_are_tables_and_objects_of_one_model() {
    let costs = |arguments: &[&str]| program().arg("costs").args(arguments).output();
    let printed = costs(&["--ranks", "1,8,1024"]).unwrap();
    assert_eq!(printed.status.code(), Some(0), "{}", text(&printed.stderr));
    let rows = text(&printed.stdout).lines().filter(|line| line.starts_with("| 1024 |") || line.starts_with("| 1 |"));
    assert_eq!(rows.count(), 4, "{}", text(&printed.stdout));
    let output = costs(&["--ranks", "1,8,1024", "--json"]).unwrap();
    let all: Value = serde_json::from_str(text(&output.stdout)).unwrap();
    for (machine, costs) in all.as_object().unwrap() {
        let of = |kind: &str, at: usize, division: &str| costs[kind][at][division].clone();
        // One rank exchanges nothing; up to the key heads contexts are not divided; 1024 ranks hold less.
        assert_eq!(of("decode", 0, "TP"), of("decode", 0, "DCP"), "{machine}");
        assert_eq!(of("decode", 1, "TP"), of("decode", 1, "DCP"), "{machine}");
        let bytes = |division| of("decode", 2, division)["bytes"].as_f64().unwrap();
        assert_eq!(bytes("TP"), 128.0 * bytes("DCP"), "{machine}");
        assert_eq!(of("prompt", 0, "ring")["seconds"]["exchange"], 0.0, "{machine}");
    }
    assert_eq!(costs(&["--ranks", "0"]).unwrap().status.code(), Some(2));
}

#[test]
fn a_difference_beyond_the_bound_fails_and_what_cannot_be_is_trouble() {
    let apart = command("ranks", &[&SMALL[..], &["--within", "-1"]].concat()).output().unwrap();
    assert_eq!(apart.status.code(), Some(1), "{}", text(&apart.stderr));
    for (arguments, said) in [
        (["--run", "48"], "ranks.interleave"),
        (["--kv-heads", "3"], "query heads over 3 key heads"),
        (["--ranks", "16"], "16"),
    ] {
        let refused = command("ranks", &[&SMALL[..], &arguments].concat()).output().unwrap();
        assert_eq!(refused.status.code(), Some(2), "{}", text(&refused.stdout));
        assert!(text(&refused.stderr).contains(said), "{}", text(&refused.stderr));
    }
    let few = command("ranks", &SMALL).env("ASCEND_EMU_DEVICES", "1").output().unwrap();
    assert_eq!(few.status.code(), Some(2));
    assert!(text(&few.stderr).contains("set ASCEND_EMU_DEVICES=2"), "{}", text(&few.stderr));
}
