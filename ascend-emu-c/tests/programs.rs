//! Programs in C and C++, written for CANN, link against the emulator's library and print the right numbers.
//!
//! A statically linked test program belongs to a target without shared libraries to link: nothing to show there.
#![cfg(not(target_feature = "crt-static"))]
#![allow(clippy::unwrap_used, clippy::panic, reason = "tests")]

#[path = "../../xtask/src/dynamic_symbols.rs"]
mod dynamic_symbols;
#[allow(dead_code, reason = "its task is a program; here is what it lays out")]
#[path = "../../xtask/src/emu_libs.rs"]
mod emu_libs;

use ascend_attention::Runtime;
use ascend_attention::case::{Case, Expect, Parameter, Verdict};
use ascend_spec::fia::Version;
use ascend_spec::{Cann, is_exported};
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::sync::OnceLock;
use tempfile::TempDir;

const TARGET: &str = env!("ASCEND_EMU_TARGET");

fn repository() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap()
}

/// Builds the shared library as this test was built, and tells where it is.
fn library() -> &'static Path {
    static LIBRARY: OnceLock<PathBuf> = OnceLock::new();
    LIBRARY.get_or_init(|| {
        // TARGET_DIR[/TRIPLE]/PROFILE/deps/THIS
        let this = std::env::current_exe().unwrap();
        let profile = this.parent().and_then(Path::parent).unwrap();
        let base = profile.parent().unwrap();
        let cross = base.ends_with(TARGET);
        let target_dir = if cross { base.parent().unwrap() } else { base };
        let profile_name = match profile.file_name().unwrap().to_str().unwrap() {
            "debug" => "dev",
            other => other,
        };
        let cargo = std::env::var_os("CARGO").unwrap_or_else(|| OsString::from(env!("CARGO")));
        let mut build = Command::new(cargo);
        build
            .args([
                "build",
                "--package",
                "ascend-emu-c",
                "--profile",
                profile_name,
            ])
            .arg("--target-dir")
            .arg(target_dir)
            .current_dir(repository());
        if cross {
            build.args(["--target", TARGET]);
        }
        succeed(&mut build);
        profile.join("libascend_emu_c.so")
    })
}

/// Runs a command to success.
fn succeed(command: &mut Command) -> Output {
    let output = command.output().unwrap();
    assert!(
        output.status.success(),
        "{command:?}: {}\n{}{}",
        output.status,
        String::from_utf8_lossy(&output.stdout),
        String::from_utf8_lossy(&output.stderr)
    );
    output
}

/// A folder that looks like a toolkit's `lib64`.
fn lay_out() -> TempDir {
    let folder = tempfile::tempdir().unwrap();
    emu_libs::place(library(), folder.path()).unwrap();
    folder
}

/// Compiles a program of `tests/c` against the headers and the libraries.
fn compile(source: &str, flags: &[&str], libraries: &Path) -> PathBuf {
    compile_with(source, flags, &["ascendcl", "nnopbase", "opapi"], libraries)
}

/// [`compile`] against these libraries.
fn compile_with(source: &str, flags: &[&str], names: &[&str], libraries: &Path) -> PathBuf {
    let program = libraries.join(source.replace('.', "_"));
    let mut build = cc::Build::new();
    build
        .cargo_metadata(false)
        .cpp(source.ends_with(".cpp"))
        .target(TARGET)
        .host(env!("ASCEND_EMU_HOST"))
        .opt_level(1)
        .debug(false)
        .warnings(false);
    let mut command = build.get_compiler().to_command();
    command
        .args(flags)
        .args(["-Wall", "-Wextra", "-Wpedantic", "-Werror", "-I"])
        .arg(repository().join("include"))
        .arg(repository().join("tests/c").join(source))
        .arg("-L")
        .arg(libraries)
        .args(names.iter().map(|name| format!("-l{name}")))
        .arg("-o")
        .arg(&program);
    succeed(&mut command);
    program
}

/// What a program prints: lines of words, and numbers by name and index.
struct Printed {
    lines: Vec<String>,
    numbers: BTreeMap<(String, usize), f64>,
}

/// The command that runs a program, in an environment without the emulator's variables.
fn command(program: &Path, libraries: &Path) -> Command {
    let mut command = Command::new(program);
    command.env("LD_LIBRARY_PATH", libraries);
    for (name, _) in std::env::vars_os() {
        if name.to_string_lossy().starts_with("ASCEND_EMU_") {
            command.env_remove(name);
        }
    }
    command.env_remove("ASCEND_RECORD");
    command
}

fn run(program: &Path, libraries: &Path) -> Printed {
    let output = succeed(&mut command(program, libraries));
    let text = String::from_utf8(output.stdout).unwrap();
    let mut printed = Printed {
        lines: text.lines().map(str::to_owned).collect(),
        numbers: BTreeMap::new(),
    };
    for line in text.lines() {
        let words: Vec<&str> = line.split_whitespace().collect();
        if let [name @ ("out" | "lse"), index, value] = words[..] {
            let key = (name.to_owned(), index.parse().unwrap());
            printed.numbers.insert(key, value.parse().unwrap());
        }
    }
    assert_eq!(printed.lines.last().map(String::as_str), Some("done"));
    printed
}

impl Printed {
    /// Checks every number of a name.
    fn check(&self, name: &str, expected: &[f64], tolerance: f64) {
        for (index, want) in expected.iter().enumerate() {
            let got = self.numbers.get(&(name.to_owned(), index)).copied();
            let got = got.unwrap_or_else(|| panic!("{name} {index} is not printed"));
            assert!(
                (got - want).abs() <= tolerance,
                "{name} {index}: {got} is not {want}"
            );
        }
        let count = self.numbers.keys().filter(|(of, _)| of == name).count();
        assert_eq!(count, expected.len());
    }
}

/// Element of the tensor with a seed, as the programs make it; half precision holds it exactly.
fn element(seed: usize, index: usize) -> f64 {
    ((index * 37 + seed * 101) % 65) as f64 / 32.0 - 1.0
}

const HEADS: usize = 2;
const QUERIES: usize = 3;
const KEYS: usize = 5;
const DIM: usize = 16;
const SCALE: f64 = 0.25;

/// Attention of one row in double precision, over the first `visible` keys: the row, and its log-sum-exp.
fn row(
    visible: usize,
    q: impl Fn(usize) -> f64,
    k: impl Fn(usize, usize) -> f64,
    v: impl Fn(usize, usize) -> f64,
) -> (Vec<f64>, f64) {
    let score = |j: usize| (0..DIM).map(|d| q(d) * k(j, d)).sum::<f64>() * SCALE;
    let weights: Vec<f64> = (0..visible).map(|j| score(j).exp()).collect();
    let sum: f64 = weights.iter().sum();
    let out = (0..DIM)
        .map(|d| (0..visible).map(|j| weights[j] * v(j, d)).sum::<f64>() / sum)
        .collect();
    (out, sum.ln())
}

#[test]
fn a_c_program_computes_attention() {
    let libraries = lay_out();
    let program = compile("two_phase.c", &["-std=c99"], libraries.path());
    let printed = run(&program, libraries.path());
    let (mut out, mut lse) = (Vec::new(), Vec::new());
    for head in 0..HEADS {
        for i in 0..QUERIES {
            // Both heads share the one key head.
            let q = |d| element(1, (head * QUERIES + i) * DIM + d);
            let (values, sum) = row(
                KEYS,
                q,
                |j, d| element(2, j * DIM + d),
                |j, d| element(3, j * DIM + d),
            );
            out.extend(values);
            lse.push(sum);
        }
    }
    printed.check("out", &out, 1e-3);
    printed.check("lse", &lse, 1e-5);
    assert!(
        printed
            .lines
            .contains(&"refused 161001 with a message".to_owned())
    );
}

#[test]
fn a_cpp_program_with_the_usual_habits_computes_causal_attention() {
    let libraries = lay_out();
    let program = compile("habits.cpp", &["-std=c++11"], libraries.path());
    let printed = run(&program, libraries.path());
    let mut out = Vec::new();
    for i in 0..QUERIES {
        for head in 0..HEADS {
            let at = |row: usize, d: usize| (row * HEADS + head) * DIM + d;
            // The last query sees every key.
            let (values, _) = row(
                i + KEYS - QUERIES + 1,
                |d| element(4, at(i, d)),
                |j, d| element(5, at(j, d)),
                |j, d| element(6, at(j, d)),
            );
            out.extend(values);
        }
    }
    printed.check("out", &out, 1e-3);
    assert!(printed.lines.contains(&"shape 1 5 2 16".to_owned()));
}

#[test]
fn the_environment_chooses() {
    let libraries = lay_out();
    let habits = compile("habits.cpp", &["-std=c++11"], libraries.path());
    let two_phase = compile("two_phase.c", &["-std=c99"], libraries.path());
    for (program, name, value, told) in [
        // Reading past an allocation.
        (&habits, "ASCEND_EMU_CHECK", "strict", "out of bounds"),
        (&habits, "ASCEND_EMU_CHECK", "lax", "compat, strict"),
        (&two_phase, "ASCEND_EMU_FAULT", "malloc:2=207001", "207001"),
        (&two_phase, "ASCEND_EMU_FAULT", "launch:1=507015", "507015"),
        (&two_phase, "ASCEND_EMU_FAULT", "sync:1=507014", "507014"),
        (&two_phase, "ASCEND_EMU_MEMORY", "1048576", "out of memory"),
        (
            &two_phase,
            "ASCEND_EMU_SOC",
            "Ascend310P3",
            "Atlas inference",
        ),
        (&two_phase, "ASCEND_EMU_DEVICES", "none", "1 to 64"),
        (&two_phase, "ASCEND_EMU_TRACE", "/", "a file to append to"),
    ] {
        let output = command(program, libraries.path())
            .env(name, value)
            .output()
            .unwrap();
        let text = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(1), "{name}={value}: {text}");
        assert!(text.contains(told), "{name}={value}: {text}");
    }
    let output = command(&two_phase, libraries.path())
        .env("ASCEND_EMU_THREADS", "1")
        .env("ASCEND_EMU_CHECK", "strict")
        .output()
        .unwrap();
    assert!(output.status.success());
    assert!(output.stderr.is_empty(), "a right program is told nothing");
}

/// The lines of a trace, by process in the order of their calls.
fn traced(file: &Path) -> BTreeMap<u64, Vec<Value>> {
    let mut processes: BTreeMap<u64, Vec<Value>> = BTreeMap::new();
    for line in std::fs::read_to_string(file).unwrap().lines() {
        let call: Value = serde_json::from_str(line).unwrap();
        let process = call["process"].as_u64().unwrap();
        processes.entry(process).or_default().push(call);
    }
    for calls in processes.values_mut() {
        calls.sort_by_key(|call| call["sequence"].as_u64());
        let numbers = calls.iter().map(|call| call["sequence"].as_u64().unwrap());
        assert!(numbers.eq(0..calls.len() as u64));
    }
    processes
}

#[test]
fn a_trace_shows_every_call_with_its_arguments() {
    let libraries = lay_out();
    let program = compile("two_phase.c", &["-std=c99"], libraries.path());
    let file = libraries.path().join("calls.jsonl");
    let traced_run = || {
        let mut command = command(&program, libraries.path());
        command.env("ASCEND_EMU_TRACE", &file).stdout(Stdio::null());
        command.spawn().unwrap()
    };
    // Processes that write at the same time.
    let running: Vec<_> = (0..3).map(|_| traced_run()).collect();
    for mut child in running {
        assert!(child.wait().unwrap().success());
    }
    let processes = traced(&file);
    assert_eq!(processes.len(), 3);
    for calls in processes.values() {
        let names: Vec<&str> = calls
            .iter()
            .map(|c| c["function"].as_str().unwrap())
            .collect();
        assert_eq!(names[..2], ["aclInit", "aclrtSetDevice"]);
        assert_eq!(names.last(), Some(&"aclFinalize"));
        let of = |name: &str| {
            calls
                .iter()
                .filter(|call| call["function"] == name)
                .collect::<Vec<_>>()
        };
        assert_eq!(
            of("aclFloatToFloat16").len(),
            (HEADS * QUERIES + 2 * KEYS) * DIM
        );
        assert_eq!(
            of("aclFloatToFloat16")[0]["arguments"]["value"],
            -1.0 + 36.0 / 32.0
        );
        assert_eq!(of("aclInit")[0]["arguments"]["configPath"], Value::Null);
        assert!(of("aclInit")[0]["time"].as_f64().unwrap() > 1.7e9);

        let allocated = of("aclrtMalloc")[0];
        assert_eq!(allocated["arguments"]["size"], HEADS * QUERIES * DIM * 2);
        assert_eq!(
            allocated["arguments"]["policy"],
            "ACL_MEM_MALLOC_HUGE_FIRST"
        );
        assert_eq!(
            (&allocated["status"], &allocated["name"]),
            (&0.into(), &"ACL_SUCCESS".into())
        );
        let address = &allocated["out"]["devPtr"];
        assert!(address.as_str().unwrap().starts_with("0x"));
        assert_eq!(of("aclrtMemcpy")[0]["arguments"]["dst"], *address);
        assert_eq!(
            of("aclrtMemcpy")[0]["arguments"]["kind"],
            "ACL_MEMCPY_HOST_TO_DEVICE"
        );

        let made = of("aclCreateTensor")[0];
        assert_eq!(made["arguments"]["viewDims"], json!([1, 2, 3, 16]));
        assert_eq!(made["arguments"]["stride"], json!([96, 48, 16, 1]));
        assert_eq!(made["arguments"]["format"], "ACL_FORMAT_ND");
        assert!(made.get("status").is_none());

        let phase_one = of("aclnnFusedInferAttentionScoreGetWorkspaceSize");
        let [refused, accepted] = phase_one[..] else {
            panic!("{} calls", phase_one.len())
        };
        assert_eq!(
            (&refused["status"], &refused["name"]),
            (&161_001.into(), &"ACLNN_ERR_PARAM_NULLPTR".into())
        );
        assert!(refused["message"].as_str().unwrap().contains("query"));
        assert!(refused.get("out").is_none());
        let arguments = &accepted["arguments"];
        let query = json!({
            "handle": made["returned"], "dtype": "ACL_FLOAT16", "shape": [1, 2, 3, 16], "format": "ACL_FORMAT_ND",
            "address": address,
        });
        assert_eq!(arguments["query"], query);
        assert_eq!(arguments["key"][0]["shape"], json!([1, 1, 5, 16]));
        assert_eq!(arguments["key"].as_array().unwrap().len(), 1);
        assert_eq!(arguments["attenMaskOptional"], Value::Null);
        assert_eq!(arguments["scaleValue"], 0.25);
        assert_eq!(arguments["inputLayout"], "BNSD");
        assert_eq!(arguments["softmaxLseFlag"], true);
        let phase_two = of("aclnnFusedInferAttentionScore")[0];
        assert_eq!(
            phase_two["arguments"]["executor"],
            accepted["out"]["executor"]
        );
        assert_eq!(
            phase_two["arguments"]["workspaceSize"],
            accepted["out"]["workspaceSize"]
        );
        assert_eq!(phase_two["name"], "ACLNN_SUCCESS");
    }
}

/// Views, arrays, texts and null pointers of a program that makes mistakes.
#[test]
fn a_trace_shows_views_arrays_and_mistakes() {
    let libraries = lay_out();
    let program = compile("described.c", &["-std=c99"], libraries.path());
    let file = libraries.path().join("calls.jsonl");
    succeed(command(&program, libraries.path()).env("ASCEND_EMU_TRACE", &file));
    let processes = traced(&file);
    let calls = processes.values().next().unwrap();
    let of = |name: &str| {
        calls
            .iter()
            .filter(|call| call["function"] == name)
            .collect::<Vec<_>>()
    };

    let view = &of("aclGetFormat")[0]["arguments"]["tensor"];
    let expected = json!({
        "handle": view["handle"], "dtype": "ACL_BF16", "shape": [2, 3], "strides": [1, 2], "offset": 4,
        "storage": [12], "format": "ACL_FORMAT_NCL", "address": "0x1000",
    });
    assert_eq!(*view, expected);
    assert_eq!(of("aclGetFormat")[0]["out"]["format"], "ACL_FORMAT_NCL");

    let long = of("aclCreateIntArray")[0]["arguments"]["value"]
        .as_array()
        .unwrap();
    assert_eq!(
        (long.len(), &long[1023], &long[1024]),
        (1025, &json!(1023), &json!("976 left out"))
    );
    assert_eq!(
        of("aclGetIntArraySize")[0]["arguments"]["array"],
        json!(long)
    );
    assert_eq!(of("aclGetIntArraySize")[0]["out"]["size"], 2000);
    assert_eq!(
        of("aclCreateFloatArray")[0]["arguments"]["value"],
        json!([0.1, "inf"])
    );
    assert_eq!(
        of("aclCreateBoolArray")[0]["arguments"]["value"],
        json!([true, false])
    );
    // The length is refused before anything is read.
    let endless = of("aclCreateIntArray")[1];
    assert_eq!(endless["arguments"]["size"], u64::MAX);
    assert!(
        endless["arguments"]["value"]
            .as_str()
            .unwrap()
            .starts_with("0x")
    );
    assert_eq!(endless["returned"], Value::Null);
    assert!(endless["message"].as_str().unwrap().contains("at most"));
    assert_eq!(
        of("aclCreateIntArray")[2]["arguments"]["value"],
        Value::Null
    );

    let fill = of("aclnnInplaceFillScalarGetWorkspaceSize")[0];
    assert_eq!(fill["arguments"]["value"], 2.5);
    assert_eq!(fill["arguments"]["selfRef"], Value::Null);
    assert!(
        fill["message"]
            .as_str()
            .unwrap()
            .contains("selfRef is null")
    );

    let member = &of("aclGetTensorListSize")[0]["arguments"]["tensorList"][0];
    assert_eq!(
        (&member["shape"], &member["strides"]),
        (&json!([2, 3]), &json!([1, 2]))
    );
    let gone = of("aclDestroyTensor")[0];
    assert_eq!(gone["arguments"]["tensor"], view["handle"]);
    assert_eq!(gone["name"], "ACLNN_ERR_PARAM_INVALID");
    assert!(gone["message"].as_str().unwrap().contains("with its list"));
}

/// The cases in a folder by their files' names.
fn recorded(folder: &Path) -> Vec<Case> {
    let files = std::fs::read_dir(folder).unwrap();
    let mut files: Vec<PathBuf> = files.map(|entry| entry.unwrap().path()).collect();
    files.sort();
    files.iter().map(|file| Case::read(file).unwrap()).collect()
}

#[test]
fn a_c_program_s_attention_calls_are_recorded_and_replayed() {
    let libraries = lay_out();
    let program = compile("two_phase.c", &["-std=c99"], libraries.path());
    let folder = libraries.path().join("calls");
    let output = succeed(command(&program, libraries.path()).env("ASCEND_RECORD", &folder));
    assert!(output.stderr.is_empty());
    let cases = recorded(&folder);
    let [refused, ran] = &cases[..] else {
        panic!("{} calls", cases.len())
    };
    let status = Some(161_001);
    assert_eq!(refused.expect, Expect::Reject { status });
    assert!(
        refused.tensor(Parameter::Query).is_none() && refused.note.contains("query"),
        "{}",
        refused.note
    );

    assert_eq!((ran.name.as_str(), ran.expect), ("recorded", Expect::Ok));
    let query = ran.tensor(Parameter::Query).unwrap().to_f32().unwrap();
    let made = (0..HEADS * QUERIES * DIM).map(|index| element(1, index) as f32);
    assert!(made.eq(query));
    assert!(ran.attention_out.is_some() && ran.softmax_lse.is_some());

    let stream = Runtime::emulated()
        .unwrap()
        .device(0)
        .unwrap()
        .stream()
        .unwrap();
    for case in &cases {
        assert_eq!(
            case.run(&stream).unwrap().verdict,
            Verdict::Passed,
            "{}",
            case.name
        );
    }
    // Other outputs than those would not pass.
    let mut wrong = ran.clone();
    wrong.attention_out.as_mut().unwrap().bytes_mut()[2] ^= 0x7f;
    let verdict = wrong.run(&stream).unwrap().verdict;
    assert!(matches!(verdict, Verdict::Failed { .. }), "{verdict:?}");
}

#[test]
fn a_folder_that_cannot_be_written_is_told_once_and_fails_no_call() {
    let libraries = lay_out();
    let program = compile("two_phase.c", &["-std=c99"], libraries.path());
    let output =
        succeed(command(&program, libraries.path()).env("ASCEND_RECORD", "/dev/null/calls"));
    let text = String::from_utf8(output.stderr).unwrap();
    assert_eq!(text.lines().count(), 1, "{text}");
    assert!(
        text.contains("ASCEND_RECORD: no more calls are recorded: /dev/null/calls"),
        "{text}"
    );
}

/// The golden cases that stand in the repository.
fn golden() -> Vec<(PathBuf, Case)> {
    let mut found = Vec::new();
    for folder in ["numeric", "quantised", "real"] {
        let folder = repository().join("tests/vectors").join(folder);
        for entry in std::fs::read_dir(folder).unwrap() {
            let path = entry.unwrap().path();
            if path
                .extension()
                .is_some_and(|extension| extension == "safetensors")
            {
                found.push((path.clone(), Case::read(&path).unwrap()));
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
        let verdict = case.run(&stream).unwrap().verdict;
        println!("ran {} {}", path.display(), verdict == Verdict::Passed);
    }
}

/// What the library records of golden cases are these cases: inputs, attributes, and outputs that pass where the golden ones
/// do; of caches the blocks that are read.
#[test]
fn golden_cases_are_recorded_as_they_were_called() {
    let toolkit = tempfile::tempdir().unwrap();
    let libraries = toolkit.path().join("lib64");
    emu_libs::place(library(), &libraries).unwrap();
    let folder = toolkit.path().join("calls");
    let mut child = command(&std::env::current_exe().unwrap(), &libraries);
    child
        .args([
            "--exact",
            "child_runs_golden_cases_on_a_toolkit",
            "--nocapture",
        ])
        .env("ASCEND_TEST_CHILD", "1")
        .env("ASCEND_HOME_PATH", toolkit.path())
        .env("ASCEND_RECORD", &folder);
    let text = String::from_utf8(succeed(&mut child).stdout).unwrap();
    let passed: Vec<&str> = text
        .lines()
        .filter_map(|line| line.rsplit_once("ran ")?.1.strip_suffix(" true"))
        .collect();
    let golden: Vec<Case> = golden()
        .into_iter()
        .filter(|(path, _)| passed.contains(&path.to_str().unwrap()))
        .map(|(_, case)| case)
        .collect();
    assert!(golden.len() > 30, "{text}");
    let calls = recorded(&folder);
    assert_eq!(calls.len(), golden.len());
    let stream = Runtime::emulated()
        .unwrap()
        .device(0)
        .unwrap()
        .stream()
        .unwrap();
    let mut smaller = 0;
    for (golden, call) in golden.iter().zip(&calls) {
        let name = &golden.name;
        let attributes = |case: &Case| {
            let of = &case.arguments;
            (
                of.input_layout.clone(),
                of.num_heads,
                of.scale,
                of.sparse_mode,
                of.actual_seq_lengths_kv.clone(),
            )
        };
        assert_eq!(attributes(call), attributes(golden), "{name}");
        assert_eq!(
            call.tensor(Parameter::Query).unwrap(),
            golden.tensor(Parameter::Query).unwrap(),
            "{name}"
        );
        assert_eq!(call.mask, golden.mask, "{name}");
        match golden.tensor(Parameter::BlockTable).is_some() {
            false => assert_eq!(call.arguments.key, golden.arguments.key, "{name}"),
            true => {
                smaller += usize::from(
                    call.arguments.key[0].bytes().len() < golden.arguments.key[0].bytes().len(),
                )
            }
        }
        let outcome = call.run(&stream).unwrap();
        assert_eq!(outcome.verdict, Verdict::Passed, "{name}");
        // The outputs are those of the golden case too.
        let mut judged = call.clone();
        (judged.attention_out, judged.softmax_lse) =
            (golden.attention_out.clone(), golden.softmax_lse.clone());
        (judged.tolerance, judged.rms_rtol) = (golden.tolerance, golden.rms_rtol);
        assert_eq!(
            judged.run(&stream).unwrap().verdict,
            Verdict::Passed,
            "{name}"
        );
    }
    assert!(smaller > 0, "some cache has blocks that nobody reads");
}

#[test]
fn a_cpp_program_fills_tensors_with_the_half_of_op() {
    let libraries = lay_out();
    let newer = ["acl_rt", "nnopbase", "opapi_transformer", "opapi_math"];
    let program = compile_with("host_types.cpp", &["-std=c++11"], &newer, libraries.path());
    run(&program, libraries.path());
}

#[test]
fn a_c_program_copies_with_the_functions_of_libc_sec() {
    let libraries = lay_out();
    let names = ["c_sec", "ascendcl"];
    let program = compile_with("secure.c", &["-std=c99"], &names, libraries.path());
    run(&program, libraries.path());
}

#[test]
fn a_c_program_computes_attention_of_training_and_merges_it() {
    const PACKED_ROWS: usize = 5;
    let libraries = lay_out();
    let names = ["ascendcl", "nnopbase", "opapi", "m"];
    let program = compile_with("training.c", &["-std=c99"], &names, libraries.path());
    let printed = run(&program, libraries.path());
    let at = |row: usize, head: usize, d: usize| (row * HEADS + head) * DIM + d;
    let mut out = Vec::new();
    let mut lse = vec![0.0; HEADS * QUERIES * 8];
    for i in 0..QUERIES {
        for head in 0..HEADS {
            // Both parts of the keys at once.
            let of = |seed: usize| {
                move |j: usize, d: usize| match j.checked_sub(KEYS) {
                    None => element(seed, at(j, head, d)),
                    Some(j) => element(seed + 2, at(j, head, d)),
                }
            };
            let (values, sum) = row(2 * KEYS, |d| element(1, at(i, head, d)), of(2), of(3));
            out.extend(values);
            lse[(head * QUERIES + i) * 8..][..8].fill(sum);
        }
    }
    // Sequences of 2 and 3 rows over 2 and 5 keys; the last one hides its last key, too.
    for i in 0..PACKED_ROWS {
        let (first, visible) = match i {
            0 | 1 => (0, i + 1),
            _ => (2, i),
        };
        for head in 0..HEADS {
            let of = |seed: usize| move |j: usize, d: usize| element(seed, at(first + j, head, d));
            let (values, _) = row(visible, |d| element(6, at(i, head, d)), of(7), of(8));
            out.extend(values);
        }
    }
    printed.check("out", &out, 1e-5);
    printed.check("lse", &lse, 1e-5);
    let refused = "refused 161001 with a message".to_owned();
    assert!(printed.lines.contains(&refused));
}

#[test]
fn a_cpp_program_computes_attention_of_inference_cards() {
    let libraries = lay_out();
    let program = compile("prompt_and_incre.cpp", &["-std=c++11"], libraries.path());
    let printed = run(&program, libraries.path());
    let mut out = Vec::new();
    // The newest and the oldest version of each operator.
    for rows in [QUERIES, QUERIES, 1, 1] {
        for head in 0..HEADS {
            for i in 0..rows {
                let q = |d| element(1, (head * rows + i) * DIM + d);
                let k = |j, d| element(2, j * DIM + d);
                let (values, _) = row(KEYS, q, k, |j, d| element(3, j * DIM + d));
                out.extend(values);
            }
        }
    }
    printed.check("out", &out, 1e-3);
}

macro_rules! names {
    ($( [$library:ident] fn $name:ident ( $( $argument:ident : $type:ty ),* ) -> $result:ty ; )*) => {
        &[ $( stringify!($name) ),* ]
    };
}

const NAMES: &[&str] = ascend_sys::for_each_function! { names };

/// Not a test of its own: which entry points the table of a loaded toolkit has.
#[test]
fn child_loads_a_toolkit() {
    if std::env::var_os("ASCEND_TEST_CHILD").is_none() {
        return;
    }
    // SAFETY: the variable names the emulator's library, which has the functions that it is asked for.
    let api = unsafe { ascend_sys::Api::load() }.unwrap();
    macro_rules! look_up {
        ($( [$library:ident] fn $name:ident ( $( $argument:ident : $type:ty ),* ) -> $result:ty ; )*) => {
            $( if api.$name().is_ok() { println!("found {}", stringify!($name)); } )*
        };
    }
    ascend_sys::for_each_function! { look_up }
}

#[test]
fn a_toolkit_of_a_release_lacks_the_entry_points_that_the_release_lacks() {
    for cann in Cann::ALL {
        let folder = tempfile::tempdir().unwrap();
        let libraries = folder.path().join("lib64");
        emu_libs::place(library(), &libraries).unwrap();
        let hidden = emu_libs::keep(&libraries, cann).unwrap();
        let newest = Version::newest_of(cann);
        let (newer, expected): (Vec<&str>, Vec<&str>) =
            NAMES.iter().partition(|name| !is_exported(name, cann));
        assert_eq!(hidden.len(), newer.len(), "{cann}: {hidden:?}");
        assert!(
            newer
                .iter()
                .all(|name| hidden.iter().any(|hidden| hidden == name))
        );
        let gather = if cann < Cann::V8_5 { 2 } else { 0 };
        // Of training attention: the third version, the fifth for packed sequences, the fourth, the measurement, the quantised
        // form.
        let training = match cann {
            Cann::V8_1 => 2 + 3 + 2 + 2,
            Cann::V8_5 => 2 + 1 + 2,
            Cann::V9_0 => 1,
            _ => 2,
        };
        assert_eq!(
            newer.len(),
            3 * (5 - Version::ALL.iter().filter(|of| **of <= newest).count()) + gather + training
        );

        let this = std::env::current_exe().unwrap();
        let mut child = command(&this, &libraries);
        child
            .args(["--exact", "child_loads_a_toolkit", "--nocapture"])
            .env("ASCEND_TEST_CHILD", "1")
            .env("ASCEND_HOME_PATH", folder.path())
            .env("ASCEND_EMU_CANN", cann.to_string());
        let text = String::from_utf8(succeed(&mut child).stdout).unwrap();
        let found: Vec<&str> = text
            .lines()
            .filter_map(|line| line.rsplit_once("found ").map(|(_, name)| name))
            .collect();
        assert_eq!(found, expected, "{cann}");

        // What is left links and runs as before.
        let program = compile("two_phase.c", &["-std=c99"], &libraries);
        run(&program, &libraries);
    }
}

#[test]
fn operators_that_clients_do_not_find_are_named() {
    let libraries = lay_out();
    let program = compile("missing.c", &["-std=c99"], libraries.path());
    let printed = run(&program, libraries.path());
    let refusals: Vec<bool> = (printed.lines.iter())
        .filter(|line| line.starts_with("200006 aclSetCompileopt: "))
        .map(|line| line.contains("the operator aclnnErf is not emulated"))
        .collect();
    // The name belongs to the refusal that follows.
    assert_eq!(refusals, [false, true, false]);
}

/// The functions of the small operators around attention.
#[cfg(feature = "glue")]
fn glue_names() -> impl Iterator<Item = &'static str> {
    let operators = ascend_emu::glue::OPERATORS.iter().copied();
    operators
        .clone()
        .chain(operators.map(|name| &*format!("{name}GetWorkspaceSize").leak()))
}

#[cfg(not(feature = "glue"))]
fn glue_names() -> impl Iterator<Item = &'static str> {
    std::iter::empty()
}

#[test]
fn the_library_exports_the_whole_table_and_what_programs_take_beside_it() {
    const UNSUPPORTED: &str = include_str!("../src/unsupported.rs");
    const SECURE: [&str; 6] = [
        "memcpy_s",
        "memmove_s",
        "memset_s",
        "strcat_s",
        "strcpy_s",
        "strncpy_s",
    ];
    let path = std::ffi::CString::new(library().to_str().unwrap()).unwrap();
    // SAFETY: loading the library runs no code of its own.
    let handle = unsafe { libc::dlopen(path.as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL) };
    assert!(!handle.is_null());
    for name in NAMES {
        let symbol = std::ffi::CString::new(*name).unwrap();
        // SAFETY: a live handle and a NUL-terminated text; the result is not called.
        let found = unsafe { libc::dlsym(handle, symbol.as_ptr()) };
        assert!(!found.is_null(), "{name} is missing");
        // SAFETY: as above.
        let here = unsafe { libc::dlsym(libc::RTLD_DEFAULT, symbol.as_ptr()) };
        assert!(here.is_null(), "{name} is defined in this program");
    }
    let listed = Command::new("nm")
        .args(["-D", "--defined-only"])
        .arg(library())
        .output();
    // Where there is no nm, the names above are what can be shown.
    if let Ok(listed) = listed {
        let text = String::from_utf8(listed.stdout).unwrap();
        let mut exported: Vec<&str> = text
            .lines()
            .filter_map(|l| l.split(' ').next_back())
            .collect();
        // Members of `op::fp16_t`; the program that uses them says whether any is missing.
        exported.retain(|name| !name.contains("2op7tagFp16"));
        exported.sort_unstable();
        // Functions that fail by name; clients that link them say whether any is missing.
        exported.retain(|name| {
            !UNSUPPORTED
                .split([' ', ';', '(', '\n'])
                .any(|word| word == *name)
        });
        let mut names = [NAMES, &SECURE].concat();
        names.extend(glue_names());
        names.sort_unstable();
        assert_eq!(exported, names);
    }
}
