//! The program `ascend-attn`: exit codes, the closing line, JSON, written cases, and what `doctor` says.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking")]

mod backends;
mod case_records;
mod determinism;
mod environment;
mod platform;
mod ranks;
mod triangle;

use ascend_testing::case_files;
use ascend_testing::harness;

use std::env;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

use ascend_attention::case::{AttentionCase, Case, CaseTensor, Expect, MaskSource, Parameter};
use ascend_attention::f16;
use serde_json::Value;

/// The folder of the workspace.
const ROOT: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/..");

fn vectors(name: &str) -> PathBuf {
    Path::new(ROOT).join("tests/vectors").join(name)
}

/// The program with an environment that chooses no platform.
fn program() -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_ascend-attn"));
    command
        .current_dir(ROOT)
        .env_remove("ASCEND_PLATFORM")
        .env_remove("ASCEND_HOME_PATH")
        .env_remove("ASCEND_TOOLKIT_HOME")
        .env_remove("ASCEND_RECORD");
    for (name, _) in env::vars_os() {
        if name.to_string_lossy().starts_with("ASCEND_EMU_") {
            command.env_remove(name);
        }
    }
    command
}

/// A command of the program on the emulation, with these arguments.
fn command(name: &str, arguments: &[&str]) -> Command {
    let mut command = program();
    command.args([name, "--platform", "emulated"]).args(arguments);
    command
}

/// What `run` on the emulation does with these arguments.
fn emulated(arguments: &[&str]) -> Output {
    command("run", arguments).output().unwrap()
}

fn text(bytes: &[u8]) -> &str {
    std::str::from_utf8(bytes).unwrap()
}

fn last_line(output: &Output) -> &str {
    text(&output.stdout).lines().last().unwrap_or_default()
}

fn write(folder: &Path, name: &str, case: &AttentionCase) -> String {
    let path = folder.join(name);
    case.write(&path).unwrap();
    path.to_str().unwrap().to_owned()
}

fn small() -> AttentionCase {
    case_files::read(vectors("numeric/059_head_dim_16.safetensors")).unwrap()
}

#[test]
fn the_repositorys_cases_pass() {
    let output = emulated(&[
        vectors("real").to_str().unwrap(),
        vectors("numeric/035_decode_mqa_lse.safetensors").to_str().unwrap(),
    ]);
    assert_eq!(output.status.code(), Some(0), "{}", text(&output.stderr));
    assert_eq!(last_line(&output), "7 passed, 0 failed");
    let lines: Vec<&str> = text(&output.stdout).lines().collect();
    assert_eq!(lines.len(), 9);
    assert!(lines[0].starts_with("platform emulated, "), "{}", lines[0]);
    for (line, name) in lines[1..7].iter().zip(0..6) {
        assert!(line.starts_with(&format!("minilm_layer{name} ")), "{line}");
        assert!(line.contains(" pass  attention_out worst error ") && line.contains(" allowed"), "{line}");
        assert!(line.ends_with(" ms)"), "{line}");
    }
    assert!(lines[7].contains("softmax_lse worst error"), "{}", lines[7]);
    assert!(!text(&output.stdout).contains('\u{1b}'), "colours without a terminal");
}

#[test]
fn cases_of_other_operators_pass_and_are_written_again() {
    let folder = tempfile::tempdir().unwrap();
    let out = folder.path().to_str().unwrap();
    let gather = vectors("gather");
    let output = emulated(&["--out", out, gather.to_str().unwrap()]);
    assert_eq!(output.status.code(), Some(0), "{}", text(&output.stdout));
    assert_eq!(last_line(&output), "3 passed, 0 failed");
    let printed = text(&output.stdout);
    assert!(printed.contains("pass  key worst error 0.00e0"), "{printed}");
    let again = emulated(&[out]);
    assert_eq!(last_line(&again), "3 passed, 0 failed");
}

#[test]
fn one_wrong_number_fails() {
    let folder = tempfile::tempdir().unwrap();
    let mut case = small();
    let expected = case.expected[0].1.bytes_mut();
    expected[40..44].copy_from_slice(&7.5f32.to_le_bytes());
    case.note = "layer 3 of\ta step".to_owned();
    let bad = write(folder.path(), "bad.safetensors", &case);
    let good = vectors("numeric/059_head_dim_16.safetensors");
    let output = emulated(&[&bad, good.to_str().unwrap()]);
    assert_eq!(output.status.code(), Some(1));
    assert_eq!(last_line(&output), "1 passed, 1 failed");
    let line = text(&output.stdout).lines().nth(1).unwrap();
    for part in ["bad ", " FAIL ", "attention_out[10]", "want 7.5", "1 of 768"] {
        assert!(line.contains(part), "{line}");
    }
    // What a recorded case says of itself, whatever it is.
    let line = text(&output.stdout).lines().nth(2).unwrap();
    assert_eq!(line.trim(), r"note: layer 3 of\ta step");
}

#[test]
fn an_unknown_key_is_an_error_that_names_it_and_the_rest_runs() {
    let folder = tempfile::tempdir().unwrap();
    let bytes = fs::read(vectors("numeric/059_head_dim_16.safetensors")).unwrap();
    // Same length, so that the header keeps its size.
    let at = bytes.windows(11).position(|part| part == b"sparse_mode").unwrap();
    let mut changed = bytes.clone();
    changed[at..at + 11].copy_from_slice(b"sparse_moda");
    fs::write(folder.path().join("a.safetensors"), changed).unwrap();
    fs::write(folder.path().join("b.safetensors"), &bytes[..100]).unwrap();
    fs::write(folder.path().join("c.safetensors"), &bytes).unwrap();
    fs::write(folder.path().join("d.txt"), "not a case").unwrap();
    let output = emulated(&[folder.path().to_str().unwrap()]);
    assert_eq!(output.status.code(), Some(1));
    assert_eq!(last_line(&output), "1 passed, 2 failed");
    let stdout = text(&output.stdout);
    assert!(stdout.contains("unknown key \"sparse_moda\": did you mean `sparse_mode`?"), "{stdout}");
    assert!(stdout.contains("not a safetensors file"), "{stdout}");
}

#[test]
fn calls_without_data_are_for_check() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("calls.jsonl");
    fs::write(&path, "{}\n").unwrap();
    let output = emulated(&[path.to_str().unwrap()]);
    assert_eq!(output.status.code(), Some(1));
    assert!(
        text(&output.stdout).contains("calls  FAIL  calls without data cannot be run: `ascend-attn check`"),
        "{}",
        text(&output.stdout)
    );
    let output = emulated(&[folder.path().to_str().unwrap()]);
    assert_eq!(output.status.code(), Some(2));
    assert!(text(&output.stderr).contains("`ascend-attn check`"), "{}", text(&output.stderr));
}

#[test]
fn what_is_not_supported_is_said_by_name_and_does_not_pass() {
    let folder = tempfile::tempdir().unwrap();
    let case = case_files::unsupported();
    let path = write(folder.path(), "prefix.safetensors", &case);
    let output = emulated(&[&path]);
    assert_eq!(output.status.code(), Some(0));
    assert_eq!(last_line(&output), "0 passed, 0 failed, 1 unsupported");
    let line = text(&output.stdout).lines().nth(1).unwrap();
    assert!(line.starts_with("prefix  unsupported: ") && line.contains("keySharedPrefix"), "{line}");
}

#[test]
fn expected_refusals_pass_and_others_do_not() {
    let folder = tempfile::tempdir().unwrap();
    let mut case = small();
    case.arguments.num_heads = 3;
    let fails = write(folder.path(), "fails.safetensors", &case);
    case.expect = Expect::Reject { status: Some(561_002) };
    let passes = write(folder.path(), "passes.safetensors", &case);
    case.expect = Expect::Reject { status: Some(1) };
    let other = write(folder.path(), "other.safetensors", &case);
    let output = emulated(&[&fails, &passes, &other]);
    assert_eq!(output.status.code(), Some(1));
    assert_eq!(last_line(&output), "1 passed, 2 failed");
    let stdout = text(&output.stdout);
    assert!(stdout.contains("refused as expected"), "{stdout}");
}

#[test]
fn a_case_that_another_rule_refuses_than_recorded_fails() {
    let folder = tempfile::tempdir().unwrap();
    let mut case = small();
    case.arguments.num_heads = 3;
    case.expect = Expect::Reject { status: Some(561_002) };
    case.expect_rule = Some("head_dim.equal".to_owned());
    let path = write(folder.path(), "rule.safetensors", &case);
    let output = emulated(&[&path]);
    let stdout = text(&output.stdout);
    assert_eq!(last_line(&output), "0 passed, 1 failed");
    assert!(
        stdout.contains("rejected by another rule than recorded (") && stdout.contains(", recorded head_dim.equal)"),
        "{stdout}"
    );
    // The chip and the release of the platform are said.
    let first = stdout.lines().next().unwrap();
    assert!(first.contains(" with CANN "), "{first}");
}

#[test]
fn nan_is_not_written_as_an_expected_output() {
    let folder = tempfile::tempdir().unwrap();
    let mut case = small();
    case.expected.clear();
    let query = case.tensor(Parameter::Query).unwrap().clone();
    let mut bytes = query.bytes().to_vec();
    bytes[..2].copy_from_slice(&f16::NAN.to_le_bytes());
    let query = CaseTensor::new(query.dtype(), query.shape(), bytes).unwrap();
    case.arguments.set_tensor(Parameter::Query, query);
    let path = write(folder.path(), "nan.safetensors", &case);
    let out = folder.path().join("out");
    let output = emulated(&["--out", out.to_str().unwrap(), &path]);
    let stdout = text(&output.stdout);
    assert_eq!(output.status.code(), Some(1), "{stdout}");
    assert!(stdout.contains("NaN in attention_out"), "{stdout}");
    assert!(!out.join("nan.safetensors").exists());
}

#[test]
fn a_lint_is_named_and_does_not_stop_a_case() {
    let folder = tempfile::tempdir().unwrap();
    let mut case = small();
    // The operator ignores the window of mode 0 without a mask.
    case.arguments.sparse_mode = 0;
    case.mask = MaskSource::None;
    case.arguments.pre_tokens = 5;
    case.expected.clear();
    let path = write(folder.path(), "window.safetensors", &case);
    let output = emulated(&[&path]);
    assert_eq!(output.status.code(), Some(0), "{}", text(&output.stdout));
    let line = text(&output.stdout).lines().nth(1).unwrap();
    assert!(line.ends_with("  lints: tokens.without_mask"), "{line}");
    let json = emulated(&["--json", &path]);
    let json: Value = serde_json::from_str(text(&json.stdout).lines().next().unwrap()).unwrap();
    assert!(json["lints"][0].as_str().unwrap().starts_with("tokens.without_mask: "));
}

#[test]
fn json_has_an_object_for_each_case_and_a_summary() {
    let folder = tempfile::tempdir().unwrap();
    let mut bad = small();
    let expected = bad.expected[0].1.bytes_mut();
    expected[..4].copy_from_slice(&f32::INFINITY.to_le_bytes());
    let bad = write(folder.path(), "bad.safetensors", &bad);
    let good = vectors("numeric/059_head_dim_16.safetensors");
    let output = emulated(&["--json", good.to_str().unwrap(), &bad]);
    assert_eq!(output.status.code(), Some(1));
    let lines: Vec<Value> = text(&output.stdout).lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    assert_eq!(lines.len(), 3);
    assert_eq!(lines[0]["verdict"], "passed");
    assert_eq!(lines[0]["name"], "head_dim_16");
    assert_eq!(lines[0]["reason"], Value::Null);
    let first = &lines[0]["outputs"][0];
    assert_eq!((&first["output"], &first["compared"]), (&"attention_out".into(), &768.into()));
    assert!(first["worst"]["error"].as_f64().unwrap() <= first["worst"]["tolerance"].as_f64().unwrap());
    assert!(lines[0]["milliseconds"].as_f64().unwrap() > 0.0);
    assert_eq!(lines[1]["verdict"], "failed");
    assert!(lines[1]["reason"].as_str().unwrap().contains("attention_out[0]"));
    assert_eq!(lines[1]["outputs"][0]["worst"]["want"], "inf");
    let summary = &lines[2]["summary"];
    assert_eq!((&summary["passed"], &summary["failed"]), (&1.into(), &1.into()));
    assert_eq!(summary["platform"], "emulated");
}

#[test]
fn written_outputs_are_cases_again() {
    let folder = tempfile::tempdir().unwrap();
    let mut bare = small();
    bare.expected.clear();
    bare.tolerance = None;
    let input = write(folder.path(), "bare.safetensors", &bare);
    let lse = vectors("numeric/035_decode_mqa_lse.safetensors");
    let out = folder.path().join("new/folder");
    let arguments = ["--out", out.to_str().unwrap(), &input, lse.to_str().unwrap()];
    let output = emulated(&arguments);
    assert_eq!(output.status.code(), Some(0), "{}", text(&output.stdout));
    assert_eq!(last_line(&output), "1 passed, 0 failed, 1 computed");
    let line = text(&output.stdout).lines().nth(1).unwrap();
    assert!(line.contains("computed  attention_out FLOAT16 [1, 4, 12, 16]"), "{line}");

    let written = Case::read(out.join("035_decode_mqa_lse.safetensors")).unwrap();
    assert_eq!(written.expected.len(), 2);
    let again = emulated(&[out.to_str().unwrap()]);
    assert_eq!(again.status.code(), Some(0), "{}", text(&again.stdout));
    assert_eq!(last_line(&again), "2 passed, 0 failed");
    assert!(text(&again.stdout).contains("attention_out worst error 0.00e0"));

    // Never over the input, never two cases into one file.
    let over = emulated(&["--out", folder.path().to_str().unwrap(), &input]);
    assert_eq!(over.status.code(), Some(2));
    assert!(text(&over.stderr).contains("would be overwritten"), "{}", text(&over.stderr));
    assert_eq!(case_files::read(&input).unwrap(), bare);
    // Nor through a link, nor into a pipe, which waits for a reader.
    let name = "bare.safetensors";
    let links = folder.path().join("links");
    type Link<'a> = &'a dyn Fn(&Path) -> bool;
    let made: [(Link<'_>, i32); 3] = [
        (&|at| std::os::unix::fs::symlink(&input, at).is_ok(), 0),
        (&|at| fs::hard_link(&input, at).is_ok(), 0),
        (&|at| Command::new("mkfifo").arg(at).status().unwrap().success(), 1),
    ];
    for (make, code) in made {
        fs::create_dir(&links).unwrap();
        assert!(make(&links.join(name)));
        let output = emulated(&["--out", links.to_str().unwrap(), &input]);
        assert_eq!(output.status.code(), Some(code), "{}", text(&output.stdout));
        assert_eq!(case_files::read(&input).unwrap(), bare);
        assert_eq!(fs::read_dir(&links).unwrap().count(), 1);
        fs::remove_dir_all(&links).unwrap();
    }
    let twice = emulated(&["--out", out.to_str().unwrap(), &input, &input]);
    assert_eq!(twice.status.code(), Some(2));
    assert!(text(&twice.stderr).contains("to the same file"), "{}", text(&twice.stderr));
}

#[test]
fn a_command_that_cannot_be_carried_out_exits_with_2() {
    let empty = tempfile::tempdir().unwrap();
    for arguments in [
        &[][..],
        &["run"],
        &["run", "absent.safetensors"],
        &["run", empty.path().to_str().unwrap()],
        &["run", "--platform", "gpu", "x"],
        &["unknown"],
    ] {
        let output = program().args(arguments).output().unwrap();
        assert_eq!(output.status.code(), Some(2), "{arguments:?}");
        assert!(output.stdout.is_empty() && !output.stderr.is_empty(), "{arguments:?}");
    }
    let output =
        program().args(["run", vectors("real").to_str().unwrap()]).env("ASCEND_PLATFORM", "gpu").output().unwrap();
    assert_eq!(output.status.code(), Some(2));
    assert!(text(&output.stderr).contains("auto, npu, emulated"), "{}", text(&output.stderr));
}

#[test]
fn the_variable_chooses_the_platform_of_auto() {
    let output = program()
        .args(["run", vectors("numeric/059_head_dim_16.safetensors").to_str().unwrap()])
        .env("ASCEND_PLATFORM", "emulated")
        .output()
        .unwrap();
    assert_eq!(output.status.code(), Some(0));
    assert!(text(&output.stdout).starts_with("platform emulated"));
}

#[test]
fn help_and_version_are_there() {
    for arguments in [&["--help"][..], &["run", "--help"], &["doctor", "--help"]] {
        let output = program().args(arguments).output().unwrap();
        assert_eq!(output.status.code(), Some(0));
        let help = text(&output.stdout);
        assert!(help.contains("Usage: ascend-attn") && !help.contains('\u{1b}'), "{help}");
    }
    let output = program().arg("--version").output().unwrap();
    assert_eq!(text(&output.stdout).trim(), concat!("ascend-attn ", env!("CARGO_PKG_VERSION")));
}

#[test]
fn doctor_works_without_an_npu() {
    let toolkit = tempfile::tempdir().unwrap();
    fs::write(toolkit.path().join("version.cfg"), "runtime_running_version=[7.7:8.1.RC1]\n").unwrap();
    let doctor = |arguments: &[&str]| {
        let output = program()
            .arg("doctor")
            .args(arguments)
            .env("ASCEND_HOME_PATH", toolkit.path())
            .env("ASCEND_EMU_DEVICES", "3")
            .output()
            .unwrap();
        assert_eq!(output.status.code(), Some(0), "{}", text(&output.stderr));
        text(&output.stdout).to_owned()
    };
    let report = doctor(&[]);
    let path = toolkit.path().display().to_string();
    for part in [
        format!("ASCEND_HOME_PATH {path}"),
        "ASCEND_EMU_DEVICES 3".to_owned(),
        format!("{path} [ASCEND_HOME_PATH]: version 8.1.RC1"),
        format!("{path}/lib64/libascendcl.so"),
        "emulation: available".to_owned(),
        "versions V1 V2 V3 V4 V5".to_owned(),
        "platform auto: ".to_owned(),
    ] {
        assert!(report.contains(&part), "no {part:?} in:\n{report}");
    }
    let json: Value = serde_json::from_str(&doctor(&["--json"])).unwrap();
    assert_eq!(json["environment"]["ASCEND_HOME_PATH"], path.as_str());
    assert_eq!(json["environment"]["ASCEND_EMU_DEVICES"], "3");
    assert_eq!(json["environment"]["ASCEND_EMU_SOC"], Value::Null);
    assert_eq!(json["emulation"]["operator_versions"][0], "V1");
    assert_eq!(json["emulation"]["devices"], 3);
    assert!(json["emulation"]["soc"].as_str().unwrap().starts_with("Ascend"));
    assert!(json["libraries"].as_array().unwrap().iter().all(|tried| tried["path"].is_string()));
    assert!(!json["advice"].is_null() && !json["auto"]["reason"].is_null());
}

/// The calls of a run, as the emulation in the program's own process writes them down.
#[test]
fn a_trace_shows_every_call_of_a_run() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("calls.jsonl");
    let path = write(folder.path(), "case.safetensors", &small());
    for times in 1..3 {
        let output = command("run", &[&path]).env("ASCEND_EMU_TRACE", &file).output().unwrap();
        assert_eq!(output.status.code(), Some(0), "{}", text(&output.stderr));
        let lines: Vec<Value> =
            fs::read_to_string(&file).unwrap().lines().map(|line| serde_json::from_str(line).unwrap()).collect();
        let calls_of = |function: &str| lines.iter().filter(|line| line["function"] == function).count();
        // A second process goes on where the first has ended.
        assert_eq!(calls_of("aclInit"), times);
        let phase_two = lines.iter().filter(|line| {
            let name = line["function"].as_str().unwrap();
            name.starts_with("aclnnFused") && !name.ends_with("WorkspaceSize")
        });
        assert_eq!(phase_two.count(), times);
        assert!(calls_of("aclrtSetDevice") >= times && calls_of("aclrtGetSocName") >= times);
    }
    let output = command("run", &[&path]).env("ASCEND_EMU_TRACE", folder.path()).output().unwrap();
    assert!(!output.status.success());
    let said = format!("{}{}", text(&output.stdout), text(&output.stderr));
    assert!(said.contains("ASCEND_EMU_TRACE: given `"), "{said}");
}

#[test]
fn a_reader_that_goes_away_is_no_panic() {
    for arguments in
        [&["run", "--platform", "emulated", vectors("real").to_str().unwrap()][..], &["doctor"], &["--help"]]
    {
        let mut child = program().args(arguments).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        drop(child.stdout.take());
        let output = child.wait_with_output().unwrap();
        let stderr = text(&output.stderr);
        assert!(!stderr.contains("panicked"), "{stderr}");
        assert_ne!(output.status.code(), Some(101), "{arguments:?}");
    }
}

/// Devices and pipes may have no end: nothing is read of them. Other files are read up to a bound.
#[test]
fn files_without_an_end_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    let named = |name: &str| folder.path().join(name);
    for name in ["zeros.jsonl", "zeros.safetensors"] {
        std::os::unix::fs::symlink("/dev/zero", named(name)).unwrap();
    }
    for name in ["pipe.jsonl", "pipe.safetensors"] {
        let made = Command::new("mkfifo").arg(named(name)).status().unwrap();
        assert!(made.success());
    }
    for name in ["large.jsonl", "large.safetensors"] {
        let file = fs::File::create(named(name)).unwrap();
        file.set_len(Case::MOST_BYTES + 1).unwrap();
    }
    let ends = |arguments: &[&str], why: &str| {
        let mut child = program().args(arguments).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        let begun = std::time::Instant::now();
        while child.try_wait().unwrap().is_none() {
            if begun.elapsed().as_secs() > 60 {
                child.kill().unwrap();
                panic!("{arguments:?} reads without an end");
            }
            std::thread::sleep(std::time::Duration::from_millis(20));
        }
        let output = child.wait_with_output().unwrap();
        assert!(!output.status.success(), "{arguments:?}");
        let said = format!("{}{}", text(&output.stdout), text(&output.stderr));
        assert!(said.contains(why), "{arguments:?}: {said}");
    };
    let run = ["run", "--platform", "emulated"];
    for (name, why) in
        [("zeros", "no regular file"), ("pipe", "no regular file"), ("large", "bytes, the most that are read")]
    {
        let (lines, case) = (named(name).with_extension("jsonl"), named(name).with_extension("safetensors"));
        let (lines, case) = (lines.to_str().unwrap(), case.to_str().unwrap());
        ends(&["check", lines], why);
        ends(&["check", case], why);
        ends(&[&run[..], &[case]].concat(), why);
        ends(&["mask", "--case", case], why);
        ends(&["mask", "tree", "--tree", lines], why);
        ends(&["mask", "mode1", "--tensor", lines], why);
    }
    let png = named("pipe.jsonl");
    ends(&["mask", "causal", "--png", png.to_str().unwrap()], "name a regular file");
    let own = folder.path().to_str().unwrap();
    ends(&["mask", "--case", own], "no regular file");
    ends(&["mask", "tree", "--tree", own], "no regular file");
}
