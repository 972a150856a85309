//! What computed the numbers of a command, as text and as JSON, and how things are counted.

use super::{emulated, last_line, program, text, vectors};

use serde_json::Value;

fn output(arguments: &[&str]) -> std::process::Output {
    program().args(arguments).output().unwrap()
}

/// Times of the emulation are none of the chip whose name it has.
#[test]
fn times_of_the_emulation_are_said_to_be_its_own() {
    let sizes = ["triangle", "--tokens", "64", "--layers", "2", "--runs", "1"];
    let command = [&sizes[..], &["--platform", "emulated"]].concat();
    let said = output(&command);
    let said = text(&said.stdout);
    let line = said.lines().find(|line| line.starts_with("measured on "));
    let line = line.unwrap_or_else(|| panic!("{said}"));
    let want = "measured on this machine's CPU, by the emulation of Ascend910B3, median of 1;";
    assert!(line.starts_with(want), "{line}");
    let json = output(&[&command[..], &["--json"]].concat());
    let json: Value = serde_json::from_slice(&json.stdout).unwrap();
    assert_eq!((&json["platform"], &json["soc"]), (&"emulated".into(), &"Ascend910B3".into()));
    let never = output(&[&command[..], &["--json", "--measure", "never"]].concat());
    let never: Value = serde_json::from_slice(&never.stdout).unwrap();
    assert_eq!((&never["platform"], &never["soc"]), (&Value::Null, &Value::Null));
}

#[test]
fn the_last_object_of_every_command_says_what_computed_it() {
    let case = vectors("numeric/059_head_dim_16.safetensors");
    let case = case.to_str().unwrap();
    for command in ["run", "determinism"] {
        let output = output(&[command, "--platform", "emulated", "--json", case]);
        let summary: Value = serde_json::from_str(last_line(&output)).unwrap();
        let summary = &summary["summary"];
        assert_eq!(summary["platform"], "emulated", "{command}");
        assert_eq!(summary["soc"], "Ascend910B3", "{command}");
        assert_eq!(summary["cann"], "9.1", "{command}");
    }
}

#[test]
fn one_is_counted_in_the_singular() {
    let case = vectors("numeric/059_head_dim_16.safetensors");
    let case = case.to_str().unwrap();
    let determinism = output(&["determinism", "--platform", "emulated", case]);
    assert!(last_line(&determinism).starts_with("1 case, 0 failed"), "{}", last_line(&determinism));
    let both = output(&["determinism", "--platform", "emulated", case, case]);
    assert!(last_line(&both).starts_with("2 cases, 0 failed"), "{}", last_line(&both));
    assert_eq!(last_line(&emulated(&[case])), "1 passed, 0 failed");
}

/// Verdicts of which nothing is expected are neither passes nor failures, and no pass is claimed for them.
#[test]
fn verdicts_without_expectation_are_counted_as_what_they_are() {
    let folder = vectors("numeric");
    let case = folder.join("059_head_dim_16.safetensors");
    let check = |more: &[&str]| output(&[&["check"], more, &[case.to_str().unwrap()]].concat());
    let own = check(&[]);
    assert_eq!(last_line(&own), "1 passed, 0 failed");
    assert!(own.stderr.is_empty(), "{}", text(&own.stderr));

    let other = check(&["--cann", "8.2"]);
    assert_eq!(other.status.code(), Some(0));
    assert_eq!(last_line(&other), "0 passed, 0 failed, 1 without expectation");
    let said = text(&other.stdout);
    assert!(said.contains("without expectation: 1 accepted, 0 rejected;"), "{said}");
    let told = text(&other.stderr);
    let why =
        "note: --cann 8.2: its contract is not known by itself; calls are judged by that of 8.1, the nearest before it";
    assert_eq!(told.trim(), why);
    for (name, told) in [
        ("8.1", false),
        ("8.5.0", false),
        ("8.5RC2", false),
        ("9.1.0-beta.1", false),
        ("8.4.RC1", true),
        ("8.12", true),
    ] {
        let stderr = check(&["--cann", name]).stderr;
        assert_eq!(!stderr.is_empty(), told, "{name}: {}", text(&stderr));
    }

    let json = check(&["--cann", "8.2", "--json"]);
    let summary: Value = serde_json::from_str(last_line(&json)).unwrap();
    let summary = &summary["summary"];
    assert_eq!((&summary["passed"], &summary["without_expectation"]), (&0.into(), &1.into()));
    assert_eq!(summary["accepted_without_expectation"], 1);
    assert_eq!(summary["rejected_without_expectation"], 0);
}
