//! `ASCEND_EMU_TRACE`: the calls of a program, line by line.

use crate::computed::{DIM, HEADS, KEYS, QUERIES};
use crate::{command, compile, lay_out, succeed};
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::path::Path;
use std::process::Stdio;

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
        let names: Vec<&str> = calls.iter().map(|c| c["function"].as_str().unwrap()).collect();
        assert_eq!(names[..2], ["aclInit", "aclrtSetDevice"]);
        assert_eq!(names.last(), Some(&"aclFinalize"));
        let of = |name: &str| calls.iter().filter(|call| call["function"] == name).collect::<Vec<_>>();
        assert_eq!(of("aclFloatToFloat16").len(), (HEADS * QUERIES + 2 * KEYS) * DIM);
        assert_eq!(of("aclFloatToFloat16")[0]["arguments"]["value"], -1.0 + 36.0 / 32.0);
        assert_eq!(of("aclInit")[0]["arguments"]["configPath"], Value::Null);
        assert!(of("aclInit")[0]["time"].as_f64().unwrap() > 1.7e9);

        let allocated = of("aclrtMalloc")[0];
        assert_eq!(allocated["arguments"]["size"], HEADS * QUERIES * DIM * 2);
        assert_eq!(allocated["arguments"]["policy"], "ACL_MEM_MALLOC_HUGE_FIRST");
        assert_eq!((&allocated["status"], &allocated["name"]), (&0.into(), &"ACL_SUCCESS".into()));
        let address = &allocated["out"]["devPtr"];
        assert!(address.as_str().unwrap().starts_with("0x"));
        assert_eq!(of("aclrtMemcpy")[0]["arguments"]["dst"], *address);
        assert_eq!(of("aclrtMemcpy")[0]["arguments"]["kind"], "ACL_MEMCPY_HOST_TO_DEVICE");

        let made = of("aclCreateTensor")[0];
        assert_eq!(made["arguments"]["viewDims"], json!([1, 2, 3, 16]));
        assert_eq!(made["arguments"]["stride"], json!([96, 48, 16, 1]));
        assert_eq!(made["arguments"]["format"], "ACL_FORMAT_ND");
        assert!(made.get("status").is_none());

        let phase_one = of("aclnnFusedInferAttentionScoreGetWorkspaceSize");
        let [refused, accepted] = phase_one[..] else { panic!("{} calls", phase_one.len()) };
        assert_eq!((&refused["status"], &refused["name"]), (&161_001.into(), &"ACLNN_ERR_PARAM_NULLPTR".into()));
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
        assert_eq!(phase_two["arguments"]["executor"], accepted["out"]["executor"]);
        assert_eq!(phase_two["arguments"]["workspaceSize"], accepted["out"]["workspaceSize"]);
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
    let of = |name: &str| calls.iter().filter(|call| call["function"] == name).collect::<Vec<_>>();

    let view = &of("aclGetFormat")[0]["arguments"]["tensor"];
    let expected = json!({
        "handle": view["handle"], "dtype": "ACL_BF16", "shape": [2, 3], "strides": [1, 2], "offset": 4,
        "storage": [12], "format": "ACL_FORMAT_NCL", "address": "0x1000",
    });
    assert_eq!(*view, expected);
    assert_eq!(of("aclGetFormat")[0]["out"]["format"], "ACL_FORMAT_NCL");

    let long = of("aclCreateIntArray")[0]["arguments"]["value"].as_array().unwrap();
    assert_eq!((long.len(), &long[1023], &long[1024]), (1025, &json!(1023), &json!("976 left out")));
    assert_eq!(of("aclGetIntArraySize")[0]["arguments"]["array"], json!(long));
    assert_eq!(of("aclGetIntArraySize")[0]["out"]["size"], 2000);
    assert_eq!(of("aclCreateFloatArray")[0]["arguments"]["value"], json!([0.1, "inf"]));
    assert_eq!(of("aclCreateBoolArray")[0]["arguments"]["value"], json!([true, false]));
    // The length is refused before anything is read.
    let endless = of("aclCreateIntArray")[1];
    assert_eq!(endless["arguments"]["size"], u64::MAX);
    assert!(endless["arguments"]["value"].as_str().unwrap().starts_with("0x"));
    assert_eq!(endless["returned"], Value::Null);
    assert!(endless["message"].as_str().unwrap().contains("at most"));
    assert_eq!(of("aclCreateIntArray")[2]["arguments"]["value"], Value::Null);

    let fill = of("aclnnInplaceFillScalarGetWorkspaceSize")[0];
    assert_eq!(fill["arguments"]["value"], 2.5);
    assert_eq!(fill["arguments"]["selfRef"], Value::Null);
    assert!(fill["message"].as_str().unwrap().contains("selfRef is null"));

    let member = &of("aclGetTensorListSize")[0]["arguments"]["tensorList"][0];
    assert_eq!((&member["shape"], &member["strides"]), (&json!([2, 3]), &json!([1, 2])));
    let gone = of("aclDestroyTensor")[0];
    assert_eq!(gone["arguments"]["tensor"], view["handle"]);
    assert_eq!(gone["name"], "ACLNN_ERR_PARAM_INVALID");
    assert!(gone["message"].as_str().unwrap().contains("with its list"));
}
