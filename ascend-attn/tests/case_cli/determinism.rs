//! `ascend-attn determinism`: every way computes the same attention, and differences are seen, counted and placed.

use super::{command, small, text, vectors, write};

use std::collections::BTreeMap;
use std::path::Path;
use std::process::Output;

use ascend_attention::case::{AttentionCase, CaseTensor, Expect, Parameter};
use ascend_attention::f16;
use serde_json::Value;

fn determinism(arguments: &[&str]) -> Output {
    command("determinism", arguments).output().unwrap()
}

/// The JSON lines of a run that succeeds: one for each file, and the counts.
#[track_caller]
fn found(arguments: &[&str]) -> (Vec<Value>, Value) {
    let mut all = arguments.to_vec();
    all.push("--json");
    let output = determinism(&all);
    assert!(output.status.success(), "{}", text(&output.stdout));
    let lines = text(&output.stdout).lines();
    let mut lines: Vec<Value> = lines.map(|line| serde_json::from_str(line).unwrap()).collect();
    let counts = lines.pop().unwrap();
    (lines, counts)
}

/// What was found for one file, by variation.
fn by_name(line: &Value) -> BTreeMap<&str, &Value> {
    let variations = line["variations"].as_array().unwrap().iter();
    variations.map(|found| (found["name"].as_str().unwrap(), found)).collect()
}

#[test]
fn every_way_computes_the_same_attention() {
    let folders = ["numeric", "quantised", "targets", "real"].map(vectors);
    let folders: Vec<&str> = folders.iter().map(|path| path.to_str().unwrap()).collect();
    let (files, counts) = found(&folders);
    let mut same = BTreeMap::<&str, usize>::new();
    for line in &files {
        let file = line["file"].as_str().unwrap();
        assert_eq!(line["failure"], Value::Null, "{file}");
        for (name, found) in by_name(line) {
            match found["verdict"].as_str().unwrap() {
                "impossible" => assert!(!found["reason"].as_str().unwrap().is_empty()),
                "same" => *same.entry(name.split_whitespace().next().unwrap()).or_default() += 1,
                _ => {
                    // Rounded at another place: a wrong key or mask would be seen as numbers of the size of the values.
                    let quantised = file.contains("post_quant") || file.contains("out_int8");
                    let most = if quantised { 1.0 } else { 0.01 };
                    let distance = found["distance"].as_f64().unwrap();
                    assert!(distance <= most, "{file}: {found}");
                    // Only the emulation's own choice of a path depends on how many rows a call has.
                    assert!(name.starts_with("chunks of "), "{file}: {found}");
                }
            }
        }
    }
    assert_eq!(counts["summary"]["cases"], files.len());
    for (name, least) in [
        ("again", files.len()),
        ("threads:", 4 * files.len()),
        ("each", 20),
        ("batch", 40),
        ("chunks", 10),
        ("blocks", 100),
    ] {
        assert!(same[name] >= least, "{name}: {same:?}");
    }
}

/// With deterministic operators no way changes a bit of any case, of any product.
#[test]
fn deterministic_operators_change_no_bit() {
    let folders = ["numeric", "quantised", "targets", "real"].map(vectors);
    let mut arguments: Vec<&str> = folders.iter().map(|path| path.to_str().unwrap()).collect();
    arguments.extend(["--deterministic", "--same"]);
    let (files, counts) = found(&arguments);
    let ways = files.iter().flat_map(by_name);
    let chunks = ways.filter(|(name, found)| name.starts_with("chunks of ") && found["verdict"] == "same").count();
    assert!(chunks >= 40, "{chunks}");
    assert_eq!(counts["summary"]["differing"], 0);
}

/// Two sequences of four rows and 40 keys, causal from the right, BNSD of FLOAT16.
fn causal(folder: &Path) -> String {
    let mut case = AttentionCase::new("causal", Default::default());
    case.arguments.input_layout = "BNSD".to_owned();
    case.arguments.num_heads = 2;
    case.arguments.scale = 0.25;
    for (parameter, rows) in [(Parameter::Query, 4), (Parameter::Key, 40), (Parameter::Value, 40)] {
        let shape = [2, 2, rows, 64];
        let count: usize = shape.iter().product();
        let values: Vec<f32> = (0..count).map(|i| ((i * 37 + rows) % 61) as f32 / 30.0 - 1.0).collect();
        let dtype = ascend_attention::DType::Float16;
        let tensor = CaseTensor::from_f32(dtype, &shape, &values).unwrap();
        case.arguments.set_tensor(parameter, tensor);
    }
    case.arguments.sparse_mode = 3;
    case.mask = ascend_attention::case::MaskSource::Compressed;
    write(folder, "causal.safetensors", &case)
}

#[test]
fn what_a_case_cannot_have_is_named() {
    let folder = tempfile::tempdir().unwrap();
    let file = causal(folder.path());
    let (files, _) = found(&[&file]);
    let ways = by_name(&files[0]);
    assert_eq!((files[0]["sequences"].as_u64(), files[0]["heads"].as_u64()), (Some(2), Some(2)));
    for (name, rows) in [
        ("again", 16),
        ("each sequence alone", 16),
        ("batch in reverse", 16),
        ("batch twice", 32),
        ("chunks of 1", 16),
        ("blocks of 128", 16),
        ("blocks of 128 in reverse", 16),
        ("threads: 1", 16),
    ] {
        assert_eq!(ways[name]["rows"], rows, "{name}: {}", ways[name]);
    }
    // A chunk as long as the prompt is the call itself.
    assert!(!ways.contains_key("chunks of 16"));

    let padded = vectors("numeric/056_left_pad_q_kv.safetensors");
    let (files, _) = found(&[padded.to_str().unwrap()]);
    let ways = by_name(&files[0]);
    assert_eq!(ways["blocks of 16"]["verdict"], "impossible");
    assert_eq!(ways["blocks of 16"]["reason"], "the sequences are left padded");

    // Why is said once.
    let output = determinism(&[padded.to_str().unwrap()]);
    let printed = text(&output.stdout);
    let said = printed.matches("blocks of 16 ").count();
    assert!(said > 1, "{printed}");
    let why = "impossible: the sequences are left padded";
    assert_eq!(printed.matches(why).count(), 1, "{printed}");

    // More rows than keys, causal from the left: the last ones see every key.
    let wide = vectors("numeric/014_causal_lu_bsnd_bf16.safetensors");
    let (files, _) = found(&[wide.to_str().unwrap()]);
    let ways = by_name(&files[0]);
    for name in ["chunks of 1", "chunks of 16"] {
        assert_ne!(ways[name]["verdict"], "impossible", "{}", ways[name]);
        assert_eq!(ways[name]["rows"], 29 * 4);
    }

    let alone = write(folder.path(), "alone.safetensors", &small());
    let (files, _) = found(&[&alone]);
    let ways = by_name(&files[0]);
    assert_eq!(ways["each sequence alone"]["reason"], "the case has one sequence");
}

#[test]
fn differences_are_seen_and_placed() {
    // In chunks of single rows the emulation takes its path for decoding, which rounds elsewhere.
    let (files, counts) = found(&[vectors("real/minilm_layer0.safetensors").to_str().unwrap()]);
    let ways = by_name(&files[0]);
    let chunks = ways["chunks of 1"];
    assert_eq!(chunks["verdict"], "differs");
    let (differing, rows) = (chunks["differing"].as_u64().unwrap(), chunks["rows"].as_u64().unwrap());
    assert!(0 < differing && differing < rows, "{chunks}");
    let first = &chunks["first"];
    let number = |name: &str| first[name].as_f64().unwrap() as f32;
    assert_ne!(f16::from_f32(number("before")), f16::from_f32(number("after")));
    assert!(f64::from((number("before") - number("after")).abs()) <= chunks["distance"].as_f64().unwrap());
    assert!(chunks["ulps"].as_u64().unwrap() >= 1);
    assert!(counts["summary"]["differing"].as_u64().unwrap() >= 1);

    let file = vectors("real/minilm_layer0.safetensors");
    let strict = determinism(&["--same", file.to_str().unwrap()]);
    assert_eq!(strict.status.code(), Some(1));
    let printed = text(&strict.stdout);
    assert!(printed.contains(" rows differ; largest distance "), "{printed}");
    assert!(printed.contains(" became "), "{printed}");
}

#[test]
fn what_is_no_call_to_compute_is_said() {
    let folder = tempfile::tempdir().unwrap();
    let mut refused = small();
    refused.arguments.num_heads = 7;
    refused.expect = Expect::Reject { status: None };
    let refused = write(folder.path(), "refused.safetensors", &refused);
    let output = determinism(&[&refused]);
    assert_eq!(output.status.code(), Some(1));
    assert!(text(&output.stdout).contains("refused  FAIL  "), "{}", text(&output.stdout));

    let gather = vectors("gather/nz_f16.safetensors");
    let output = determinism(&[gather.to_str().unwrap()]);
    assert_eq!(output.status.code(), Some(0));
    assert!(text(&output.stdout).contains("skipped: a case of "), "{}", text(&output.stdout));

    let missing = determinism(&["no-such-file.safetensors"]);
    assert_eq!(missing.status.code(), Some(2));
}
