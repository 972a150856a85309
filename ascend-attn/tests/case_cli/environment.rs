//! Unknown variables, bad values, and what `doctor` says of both.

use super::{harness, program, text};

use std::process::Output;

use serde_json::Value;

fn with(variables: &[(&str, &str)], arguments: &[&str]) -> Output {
    let mut command = program();
    command.args(arguments).envs(variables.iter().copied());
    command.output().unwrap()
}

const MISSPELT: [(&str, &str); 2] = [("ASCEND_EMU_CHEK", "strict"), ("ASCEND_EMU_STRICT", "")];

#[test]
fn every_command_names_a_misspelt_variable_once() {
    let real = "tests/vectors/numeric/059_head_dim_16.safetensors";
    for arguments in [
        &["run", "--platform", "emulated", real][..],
        &["check", real],
        &["mask", "causal"],
        &["bench", "--filter", "nothing"],
        &["triangle", "--tokens", "64", "--layers", "4", "--measure", "never"],
    ] {
        let output = with(&MISSPELT, arguments);
        let error = text(&output.stderr);
        let told = "note: ASCEND_EMU_CHEK is set, and nothing reads it: did you mean ASCEND_EMU_CHECK?";
        assert_eq!(error.matches(told).count(), 1, "{arguments:?}: {error}");
        assert_eq!(error.matches("ASCEND_EMU_CHEK ").count(), 1, "{error}");
        // An empty value counts as not set.
        assert!(!error.contains("ASCEND_EMU_STRICT"), "{error}");
    }
    let known = with(&[("ASCEND_EMU_CHECK", "strict"), ("ASCEND_GLOBAL_LOG_LEVEL", "3")], &["mask", "causal"]);
    assert!(known.stderr.is_empty(), "{}", text(&known.stderr));
}

#[test]
fn doctor_lists_variables_that_nobody_reads() {
    let variables = [MISSPELT[0], ("ASCEND_ELSEWHERE", "1"), ("ASCEND_EMU_SOC", "Ascend910B4")];
    let output = with(&variables, &["doctor"]);
    let report = text(&output.stdout);
    for part in [
        "  ASCEND_EMU_SOC Ascend910B4",
        "  ASCEND_EMU_CHEK is set, and nothing reads it: did you mean ASCEND_EMU_CHECK?",
        "  ASCEND_ELSEWHERE is set, and nothing reads it",
        "to do: set ASCEND_EMU_CHECK in the place of ASCEND_EMU_CHEK",
    ] {
        assert!(report.lines().any(|line| line == part), "no {part:?} in:\n{report}");
    }
    assert!(!report.contains("in the place of ASCEND_ELSEWHERE"), "{report}");
    let output = with(&variables, &["doctor", "--json"]);
    let json: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(json["unknown_variables"][1]["name"], "ASCEND_EMU_CHEK");
    assert_eq!(json["unknown_variables"][1]["meant"], "ASCEND_EMU_CHECK");
    assert_eq!(json["unknown_variables"][0]["meant"], Value::Null);
}

#[test]
fn a_platform_that_is_required_decides_the_exit_code_of_doctor() {
    if harness::not_on_npu("the system's loader may find one") {
        return;
    }
    let nowhere = [("ASCEND_HOME_PATH", "/nonexistent"), ("ASCEND_OPP_PATH", ""), ("LD_LIBRARY_PATH", "")];
    let require = |name, more: &[(&str, &str)]| with(&[&nowhere[..], more].concat(), &["doctor", "--require", name]);
    let npu = require("npu", &[]);
    assert_eq!(npu.status.code(), Some(1));
    assert!(text(&npu.stderr).starts_with("error: --require npu: "), "{}", text(&npu.stderr));
    // The report stands there all the same.
    assert!(text(&npu.stdout).contains("emulation: available"));
    assert_eq!(require("emulated", &[]).status.code(), Some(0));
    let bad = require("emulated", &[("ASCEND_EMU_DEVICES", "none")]);
    assert_eq!(bad.status.code(), Some(1));
    assert!(text(&bad.stderr).contains("ASCEND_EMU_DEVICES"), "{}", text(&bad.stderr));
    let report = text(&bad.stdout);
    let advice = "to do: fix what keeps the emulation from starting: ";
    let advice = report.lines().find(|line| line.starts_with(advice));
    let advice = advice.unwrap_or_else(|| panic!("{report}"));
    assert!(advice.contains("ASCEND_EMU_DEVICES: given `none`, allowed: 1 to 64"), "{advice}");
    assert!(!report.contains("build with the feature"), "{report}");
}

#[test]
fn a_benchmark_refuses_an_instruction_set_that_is_not_there() {
    let arguments = ["bench", "--filter", "causal_1024", "--dtype", "f16"];
    let output = with(&[("ASCEND_EMU_SIMD", "mmx")], &arguments);
    assert_eq!(output.status.code(), Some(2));
    let error = text(&output.stderr);
    assert!(error.contains("ASCEND_EMU_SIMD: given `mmx`, allowed: "), "{error}");
}
