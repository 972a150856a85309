//! `ascend-attn check` says what the operator would make of calls.

#![allow(clippy::unwrap_used, reason = "helpers of tests end them by a panic")]

use std::io::Write as _;
use std::path::Path;
use std::process::{Command, Output, Stdio};

use ascend_attention::case::{AttentionCase, Case, CaseTensor, Expect, MaskSource, Parameter};
use ascend_attention::spec::DType;

/// The folder of the workspace.
const ROOT: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/..");

fn check(arguments: &[&str]) -> (i32, String) {
    let Output { status, stdout, stderr } = Command::new(env!("CARGO_BIN_EXE_ascend-attn"))
        .current_dir(ROOT)
        .arg("check")
        .args(arguments)
        .output()
        .unwrap();
    let text = [stdout, stderr].concat();
    (status.code().unwrap(), String::from_utf8(text).unwrap())
}

fn sample() -> String {
    let path = Path::new(ROOT).join("ascend-spec/tests/params/sample.jsonl");
    path.to_str().unwrap().to_owned()
}

/// The case of FusedInferAttentionScore in a file.
fn read(path: impl AsRef<Path>) -> AttentionCase {
    Case::read(path).unwrap().attention().unwrap()
}

#[test]
fn recorded_verdicts_and_case_files_agree() {
    let (code, text) = check(&[&sample(), "tests/vectors/real", "tests/vectors/numeric"]);
    assert_eq!(code, 0, "{text}");
    let last = text.lines().last().unwrap();
    assert!(last.ends_with(" passed, 0 failed"), "{last}");
    assert!(!last.starts_with("0 "), "{last}");
}

/// The numbers of a position bias, which no line of JSON has.
#[test]
fn an_infinity_in_the_bias_of_a_case_is_a_lint() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("bias.safetensors");
    let mut case = read(Path::new(ROOT).join("tests/vectors/numeric/050_pse_1nss.safetensors"));
    let printed = |case: &AttentionCase| {
        case.write(&file).unwrap();
        check(&["--json", file.to_str().unwrap()])
    };
    let (code, text) = printed(&case);
    assert!(code == 0 && !text.contains("pse_shift.finite"), "{text}");
    let bias = case.arguments.pse_shift.as_mut().unwrap();
    let infinity: &[u8] = if bias.dtype() == DType::Bf16 { &[0x80, 0xff] } else { &[0x00, 0xfc] };
    bias.bytes_mut()[..2].copy_from_slice(infinity);
    let (code, text) = printed(&case);
    assert!(code == 0 && text.contains("pse_shift.finite") && text.contains("row 0, key 0"), "{text}");
}

#[test]
fn json_has_an_object_for_each_call_and_the_counts() {
    let (code, text) = check(&["--json", &sample()]);
    assert_eq!(code, 0, "{text}");
    let objects: Vec<serde_json::Value> = text.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    let (counts, calls) = objects.split_last().unwrap();
    assert_eq!(counts["summary"]["passed"], calls.len());
    for (at, call) in calls.iter().enumerate() {
        assert_eq!(call["file"], sample());
        assert_eq!(call["line"], at + 1);
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
    let line = line.lines().find(|line| line.contains(r#""expect":"accept""#)).unwrap();
    std::fs::write(&file, line.replace(r#""expect":"accept""#, r#""expect":"reject""#)).unwrap();
    let (code, text) = check(&[file.to_str().unwrap()]);
    assert_eq!(code, 1, "{text}");
    assert!(text.contains("NOT AS EXPECTED") && text.ends_with("0 passed, 1 failed\n"), "{text}");
}

#[test]
fn what_cannot_be_read_is_named_and_counted_and_the_rest_is_checked() {
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str| folder.path().join(name);
    let good = std::fs::read_to_string(sample()).unwrap();
    let good = good.lines().next().unwrap();
    std::fs::write(path("a.safetensors"), b"not a case").unwrap();
    std::fs::copy(Path::new(ROOT).join("tests/vectors/numeric/059_head_dim_16.safetensors"), path("b.safetensors"))
        .unwrap();
    std::fs::write(path("c.jsonl"), format!("{good}\n\n{{\"id\": 3}}\n{good}\n")).unwrap();
    std::fs::write(path("d.jsonl"), [0xff, 0xfe]).unwrap();
    std::fs::write(path("e.txt"), "no case at all").unwrap();

    let folder = folder.path().to_str().unwrap();
    let (code, text) = check(&[folder]);
    assert_eq!(code, 1, "{text}");
    let lines: Vec<&str> = text.lines().collect();
    let begins = [
        "a: UNREADABLE; not a safetensors file",
        "b (head_dim_16): accept, as expected",
        "c:1 (",
        "c:3: UNREADABLE; not a parameter case: `id` is 3",
        "c:4 (",
        "d: UNREADABLE; ",
        "accepted: ",
        "3 passed, 3 failed",
    ];
    assert_eq!(lines.len(), begins.len(), "{text}");
    for (line, begin) in lines.iter().zip(begins) {
        assert!(line.starts_with(begin), "{begin}: {line}");
    }

    let (code, text) = check(&["--json", folder]);
    assert_eq!(code, 1, "{text}");
    let objects: Vec<serde_json::Value> = text.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    let verdicts: Vec<&str> = objects[..6].iter().map(|object| object["verdict"].as_str().unwrap()).collect();
    assert_eq!((verdicts[0], verdicts[3]), ("unreadable", "unreadable"));
    assert!(objects[0]["file"].as_str().unwrap().ends_with("a.safetensors"));
    assert_eq!((&objects[3]["line"], &objects[1]["line"]), (&3.into(), &serde_json::Value::Null));
    assert_eq!(objects[6]["summary"]["unreadable"], 3);

    // An argument that names no file is a wrong command line, as for `run`.
    let (code, text) = check(&[folder, "absent.jsonl"]);
    assert_eq!(code, 2);
    assert!(text.starts_with("error: absent.jsonl: "), "{text}");
}

#[test]
fn flags_that_would_be_ignored_are_refused() {
    for arguments in [
        &["--explain", "atten_mask.required", "--json"][..],
        &["--explain", "atten_mask.required", "--summary"],
        &["--explain", "atten_mask.required", "--soc", "Ascend910B3"],
    ] {
        let (code, text) = check(arguments);
        assert_eq!(code, 2, "{text}");
        assert!(text.contains("cannot be used with"), "{text}");
    }
    let (code, text) = check(&["--soc", "Ascend1", &sample()]);
    assert_eq!(code, 2, "{text}");
    assert!(text.contains("--soc Ascend1: ") && text.contains("Ascend910B1"), "{text}");
}

#[test]
fn a_rule_is_explained_and_an_unknown_one_is_not() {
    let (code, text) = check(&["--explain", "atten_mask.required"]);
    assert_eq!(code, 0, "{text}");
    for says in ["sparse modes 1 to 4", "561002", "check E4.1", "fix:       pass the mask"] {
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
    for rule in ascend_trianglemix::rules::every_rule() {
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
    let objects: Vec<serde_json::Value> = text.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    let (counts, areas) = objects.split_last().unwrap();
    for field in ["accepted_right", "accepted_wrong", "rejected_right", "rejected_wrong"] {
        let sum: u64 = areas.iter().map(|area| area[field].as_u64().unwrap()).sum();
        assert_eq!(counts["summary"][field], sum, "{field}");
    }
    let names: Vec<&str> = areas.iter().map(|area| area["area"].as_str().unwrap()).collect();
    for name in ["mla", "antiquantised", "prefix", "packed", "decode", "prefill"] {
        assert!(names.contains(&name), "{name}: {names:?}");
    }
    let (code, text) = check(&["--summary", &sample()]);
    assert_eq!(code, 0, "{text}");
    // A heading, the areas, two lines of counts.
    assert_eq!(text.lines().count(), names.len() + 3, "{text}");
}

#[test]
fn a_release_and_a_chip_are_asked_by_name_and_all_of_them_make_a_table() {
    let targets = Path::new(ROOT).join("ascend-spec/tests/params/targets.jsonl").to_str().unwrap().to_owned();
    // Each line is judged for the releases and the product that it names.
    let (code, text) = check(&[&targets]);
    assert_eq!(code, 0, "{text}");
    let (code, text) = check(&["--json", "--cann", "9.0", "--soc", "Ascend910B1", &targets]);
    assert_eq!(code, 0, "{text}");
    let first: serde_json::Value = serde_json::from_str(text.lines().next().unwrap()).unwrap();
    assert_eq!((&first["cann"], &first["soc"]), (&"9.0".into(), &"Atlas A2".into()));
    assert!(first["status"].is_i64(), "{first}");

    // What an older release refuses and a newer one takes, says so.
    let (_, text) = check(&["--json", "--cann", "8.5", "--soc", "Ascend910B1", &targets]);
    let refused = text.lines().filter_map(|line| {
        let call: serde_json::Value = serde_json::from_str(line).unwrap();
        Some((call["taken_by"]["cann"].as_str()?.to_owned(), call))
    });
    let mut named = 0;
    for (cann, call) in refused {
        let soc = call["taken_by"]["soc"].as_str().unwrap();
        let end = format!("; {soc} with CANN {cann} takes the call");
        assert!(call["message"].as_str().unwrap().ends_with(&end), "{call}");
        named += 1;
    }
    assert!(named > 5, "{named}: {text}");

    let case = "tests/vectors/numeric/059_head_dim_16.safetensors";
    let (code, text) = check(&["--cann", "all", "--soc", "all", case]);
    assert_eq!(code, 0, "{text}");
    let lines: Vec<&str> = text.lines().collect();
    let words = |line: &str| -> Vec<String> { line.split_whitespace().map(str::to_owned).collect() };
    assert_eq!(words(lines[1]), ["8.1", "8.5", "9.0", "9.1", "9.2"]);
    assert_eq!(words(lines[2])[..3], ["Atlas", "A2", "accept"]);
    assert_eq!(words(lines[4])[..4], ["Ascend", "950", "-", "-"]);
    // The card has not the operator: what is expected of the call is not of it.
    let card = "  Atlas inference series (310P) reject   reject   reject   reject   reject";
    assert_eq!(lines[5], card);
    assert!(text.contains("call.product: "), "{text}");
    // The older operators are all that it has.
    let rows = r#"{"shape": [2, 1, 128], "dtype": "float16"}"#;
    let older = format!(
        r#"{{"id": "decode", "op": "incre_flash_attention", "inputs": {{"query": {rows}, "key": {rows}, "value": {rows}}}, "outputs": {{"attention_out": {rows}}}, "attrs": {{"input_layout": "BSH"}}}}"#
    );
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("older.jsonl");
    std::fs::write(&file, older).unwrap();
    let (code, text) = check(&["--soc", "all", file.to_str().unwrap()]);
    assert_eq!(code, 0, "{text}");
    assert!(text.contains("(310P) accept"), "{text}");

    for wrong in [["--cann", "7.0"], ["--cann", "9.1junk"], ["--soc", "Kunpeng920"], ["--soc", "Ascend9500000"]] {
        let (code, text) = check(&[wrong[0], wrong[1], case]);
        assert_eq!(code, 2, "{text}");
        assert!(text.contains("allowed: "), "{text}");
    }
}

#[test]
fn a_release_that_does_not_know_the_chip_judges_nothing() {
    let case = "tests/vectors/numeric/059_head_dim_16.safetensors";
    for old in ["8.1", "8.5.0"] {
        let (code, text) = check(&["--cann", old, "--soc", "Ascend950PR_9599", case]);
        assert_eq!(code, 2, "{text}");
        assert!(text.contains("allowed: 9.0, 9.1"), "{text}");
    }
    // The chip alone has the newest release where the default one does not know it.
    let (_, text) = check(&["--json", "--soc", "Ascend950PR_9599", case]);
    let first: serde_json::Value = serde_json::from_str(text.lines().next().unwrap()).unwrap();
    assert_eq!(first["soc"], "Ascend 950");
    assert!(["9.0", "9.1"].contains(&first["cann"].as_str().unwrap()), "{first}");

    let folder = tempfile::tempdir().unwrap();
    let line = std::fs::read_to_string(sample()).unwrap();
    let line = line.lines().next().unwrap();
    let refused = |name: &str, more: &str| {
        let file = folder.path().join(name);
        std::fs::write(&file, line.replacen('{', &format!("{{{more},"), 1)).unwrap();
        let (code, text) = check(&[file.to_str().unwrap()]);
        assert_eq!(code, 1, "{text}");
        text
    };
    let text = refused("old.jsonl", r#""soc":"Ascend950PR_9599","release":"8.5.0""#);
    assert!(text.contains("allowed: 9.0, 9.1"), "{text}");
    let text = refused("odd.jsonl", r#""soc":"Ascend9500000""#);
    assert!(text.contains("`soc`"), "{text}");
}

#[test]
fn a_case_without_a_release_is_judged_for_the_one_that_it_would_run_on() {
    let case = "tests/vectors/numeric/059_head_dim_16.safetensors";
    let (code, text) = check(&["--json", case]);
    assert_eq!(code, 0, "{text}");
    let first: serde_json::Value = serde_json::from_str(text.lines().next().unwrap()).unwrap();
    let default = ascend_attention::Machine::DEFAULT_CANN.name();
    assert_eq!((&first["cann"], &first["agrees"]), (&default.into(), &true.into()));
}

#[test]
fn a_block_beyond_the_cache_is_named_as_when_the_case_is_run() {
    let root = Path::new(ROOT).join("tests/vectors/numeric");
    let right = root.join("067_paged_decode_bsh_block16.safetensors");
    let mut case = read(&right);
    let (code, text) = check(&[right.to_str().unwrap()]);
    assert!(code == 0 && !text.contains("block_table.range"), "{text}");
    let table = case.tensor(Parameter::BlockTable).unwrap();
    let mut bytes = table.bytes().to_vec();
    bytes[..4].copy_from_slice(&(1i32 << 20).to_le_bytes());
    let table = CaseTensor::new(table.dtype(), table.shape(), bytes).unwrap();
    case.arguments.set_tensor(Parameter::BlockTable, table);
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("beyond.safetensors");
    case.write(&file).unwrap();
    let (_, text) = check(&[file.to_str().unwrap()]);
    assert!(text.contains("accept") && text.contains("lints: block_table.range"), "{text}");
    let (_, text) = check(&["--json", file.to_str().unwrap()]);
    assert!(text.contains("1048576"), "{text}");
}

#[test]
fn a_case_is_judged_for_the_target_that_it_names() {
    let (code, text) = check(&["tests/vectors/targets"]);
    assert_eq!(code, 0, "{text}");
    assert!(text.lines().last().unwrap().ends_with(" passed, 0 failed"), "{text}");
}

#[test]
fn a_case_that_another_rule_rejects_than_recorded_is_not_as_expected() {
    let root = Path::new(ROOT).join("tests/vectors/numeric");
    let mut case = read(root.join("059_head_dim_16.safetensors"));
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("rule.safetensors");
    let judged = |case: &AttentionCase| {
        case.write(&file).unwrap();
        check(&[file.to_str().unwrap()])
    };
    // The operator ignores the window of mode 0 without a mask.
    let mut lint = case.clone();
    lint.arguments.sparse_mode = 0;
    lint.mask = MaskSource::None;
    lint.arguments.pre_tokens = 5;
    lint.expect_rule = Some("tokens.without_mask".to_owned());
    let (code, text) = judged(&lint);
    assert!(code == 0 && text.contains("as expected; stopped by the lint tokens.without_mask"), "{text}");
    lint.arguments.pre_tokens = i64::from(i32::MAX);
    let (code, text) = judged(&lint);
    assert!(code == 1 && text.contains("NOT AS EXPECTED; the lint tokens.without_mask"), "{text}");

    case.arguments.num_heads = 3;
    case.expect = Expect::Reject { status: Some(561_002) };
    let (code, text) = judged(&case);
    assert_eq!(code, 0, "{text}");
    case.expect_rule = Some("head_dim.equal".to_owned());
    let (code, text) = judged(&case);
    assert!(
        code == 1
            && text.contains("rejected by another rule than recorded (")
            && text.contains(", recorded head_dim.equal)"),
        "{text}"
    );
}

#[test]
fn calls_of_other_operators_are_judged_with_their_status() {
    let own = Path::new(ROOT).join("ascend-spec/tests/flash/sample.jsonl");
    let more = std::env::var_os("ASCEND_VECTORS").map(|folder| {
        let targets = Path::new(&folder).join("params/targets");
        targets.join("flash_attention_score.jsonl")
    });
    for file in [Some(own), more].into_iter().flatten() {
        let (code, text) = check(&["--summary", "--json", file.to_str().unwrap()]);
        assert_eq!(code, 0, "{text}");
        let objects: Vec<serde_json::Value> = text.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
        for area in ["flash_attention_score", "flash_attention_varlen_score"] {
            let counts = objects.iter().find(|object| object["area"] == area);
            let counts = counts.unwrap();
            assert!(counts["accepted_right"].as_u64().unwrap() > 0, "{counts}");
            assert!(counts["rejected_right"].as_u64().unwrap() > 0, "{counts}");
        }
    }

    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("status.jsonl");
    let line =
        r#"{"id": "nothing", "op": "prompt_flash_attention", "op_version": 3, "inputs": {}, "attrs": {}, "outputs": {},
        "expect": "reject", "status": 161001}"#
            .replace('\n', " ");
    std::fs::write(&file, &line).unwrap();
    let name = file.to_str().unwrap();
    let (code, text) = check(&[name]);
    assert!(code == 0 && text.contains("as expected"), "{text}");
    std::fs::write(&file, line.replace("161001", "561103")).unwrap();
    let (code, text) = check(&[name]);
    assert_eq!(code, 1, "{text}");
    assert!(text.contains("status 161001 instead of 561103"), "{text}");
    std::fs::write(&file, line.replace("prompt_flash", "prompt_flesh")).unwrap();
    let (code, text) = check(&[name]);
    assert_eq!(code, 1, "{text}");
    assert!(text.contains("prompt_flesh_attention"), "{text}");
}

#[test]
fn case_files_of_every_operator_are_judged() {
    let (code, text) = check(&["tests/vectors/gather", "tests/vectors/train"]);
    assert_eq!(code, 0, "{text}");
    let accepted = text.lines().filter(|line| line.contains("accept, as expected"));
    assert_eq!(accepted.count(), 3 + 19, "{text}");
}

#[test]
fn a_line_without_inner_precise_says_what_it_is_taken_for() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("line.jsonl");
    let line = |precise: &str| {
        let rows = r#"{"shape":[1,8,16,64],"dtype":"float16"}"#;
        format!(
            r#"{{"id":"a","inputs":{{"query":{rows},"key":{rows},"value":{rows}}},"outputs":{{"attention_out":{rows}}},"attrs":{{"input_layout":"BNSD","num_heads":8{precise}}}}}"#
        )
    };
    let lines = [line(""), line(r#","inner_precise":1"#)].join("\n");
    std::fs::write(&file, lines).unwrap();
    let (_, text) = check(&[file.to_str().unwrap()]);
    let said: Vec<bool> =
        text.lines().take(2).map(|line| line.contains("inner_precise is not given and taken for 1")).collect();
    assert_eq!(said, [true, false], "{text}");
}

/// What `ascend-attn explain` says of a text on standard input.
fn explained(arguments: &[&str], text: &str) -> (i32, String) {
    let mut program = Command::new(env!("CARGO_BIN_EXE_ascend-attn"))
        .current_dir(ROOT)
        .arg("explain")
        .args(arguments)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut input = program.stdin.take().unwrap();
    input.write_all(text.as_bytes()).unwrap();
    drop(input);
    let Output { status, stdout, .. } = program.wait_with_output().unwrap();
    (status.code().unwrap(), String::from_utf8(stdout).unwrap())
}

#[test]
fn what_a_failed_call_printed_is_explained_by_rules() {
    let log = "RuntimeError: NPU function error: call aclnnFusedInferAttentionScoreV3 failed, error code is 561002\n\
               EZ9999: numHeads 10 cannot be divided by numKeyValueHeads 4";
    let (code, text) = explained(&[], log);
    assert_eq!(code, 0, "{text}");
    assert!(text.starts_with("found: fused_infer_attention_score, 561002 (ACLNN_ERR_INNER_TILING_ERROR)\n"), "{text}");
    assert!(text.contains("num_key_value_heads.divides: "), "{text}");
    assert!(text.contains("  fix:       ") && text.contains("  checked:   aclnnFusedInferAttentionScore"), "{text}");
    let (code, text) = explained(&["--rules", "1"], log);
    assert_eq!((code, text.matches("must hold").count()), (0, 1), "{text}");
    let (code, text) = explained(&[], "error code 561002");
    assert!(code == 1 && text.contains("no rule fits") && text.contains("--call"), "{text}");
    // The call itself says which rule it breaks, and is not asked for a text.
    let (code, text) = explained(&["--call", &sample(), "-"], "561002");
    assert!(code == 1 && text.contains(" passed, 0 failed"), "{text}");
    let (code, text) = explained(&["--call", &sample()], "");
    assert!(code == 0 && text.contains(" passed, 0 failed"), "{text}");
    assert!(!text.contains("found: "), "{text}");
}

#[test]
fn failures_of_the_runtime_are_told_from_refused_calls() {
    let log = "RuntimeError: ACL stream synchronize failed, error code:507015, the shape of atten_mask and key";
    let (code, text) = explained(&[], log);
    assert!(code == 1 && text.starts_with("found: no operator, 507015 (ACL_ERROR_RT_AICORE_EXCEPTION)\n"), "{text}");
    assert!(text.contains("outside of the rules: a kernel failed"), "{text}");
    let (code, text) = explained(&[], "call aclnnLightningIndexer failed, error code is 4294967295");
    assert!(code == 0 && text.contains("indexer.query: by its status -1 alone"), "{text}");
    // What to do next is said, and a log of another encoding is read all the same.
    let file = tempfile::NamedTempFile::new().unwrap();
    let log = b"\xff\xfe\nRuntimeError: PagedAttentionOperation setup failed!";
    std::fs::write(file.path(), log).unwrap();
    let (code, text) = explained(&[file.path().to_str().unwrap()], "");
    assert!(code == 1 && text.starts_with("found: attention of ATB\n"), "{text}");
    let commands = ["\n  or run:    ", "\n               python program.py"];
    assert!(commands.iter().all(|command| text.contains(command)), "{text}");
    let (_, text) = explained(&[], "error code is 561002");
    assert!(text.contains("\n               ASCEND_RECORD=calls ") && text.contains("--call"), "{text}");
    // Words that are no message of CANN are a guess, and said to be one.
    let (code, text) = explained(&[], "npu_fused_infer_attention_score with head_dim 256 and block size 16");
    assert!(code == 0 && text.contains("\nno message of CANN is in the text"), "{text}");
}
