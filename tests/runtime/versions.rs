//! Of the versions of the operator that are there and can express a call, the oldest that is not deprecated is used;
//! where none is, the error says which one is needed, and since when CANN has it.
#![cfg(feature = "emulation")]

use crate::harness;

use std::env;
use std::ffi::c_char;
use std::process::Command;
use std::sync::Arc;

use ascend_attention::attention::{
    Affine, AntiquantMode, Antiquantisation, Distance, Inputs, Plan, PseShift, Quantisation, SharedPrefix,
};
use ascend_attention::spec::ops::fused_infer_attention_score::Version;
use ascend_attention::spec::{Cann, Soc, Target};
use ascend_attention::sys::{Api, Functions};
use ascend_attention::{
    Error, FusedInferAttention, Layout, Machine, PLATFORM_VARIABLE, Result, Runtime, Stream, Tensor, bf16, f16,
};
use harness::still_works;

fn stream_of(change: impl FnOnce(&mut Functions)) -> Stream {
    let mut functions = harness::functions();
    change(&mut functions);
    let api = Arc::new(Api::from_functions(functions, "emulation, in part"));
    // SAFETY: the functions that are left are the emulation's, or do what those do.
    let runtime = unsafe { Runtime::from_api(api) }.unwrap();
    runtime.device(0).unwrap().stream().unwrap()
}

fn without_v4(functions: &mut Functions) {
    functions.aclnnFusedInferAttentionScoreV4 = None;
    functions.aclnnFusedInferAttentionScoreV4GetWorkspaceSize = None;
}

fn without_v5(functions: &mut Functions) {
    functions.aclnnFusedInferAttentionScoreV5 = None;
    functions.aclnnFusedInferAttentionScoreV5GetWorkspaceSize = None;
}

fn halves(stream: &Stream, shape: &[usize]) -> Tensor<f16> {
    let len = shape.iter().product();
    stream.upload(&vec![f16::ONE; len], shape).unwrap()
}

fn packed(stream: &Stream, dim: usize) -> Tensor<bf16> {
    stream.upload(&vec![bf16::ONE; 8 * 2 * dim], [8, 2, dim]).unwrap()
}

fn plain(stream: &Stream) -> Result<Plan> {
    let x = halves(stream, &[1, 2, 16, 32]);
    FusedInferAttention::new(Layout::Bnsd).scale(1.0).heads(2).plan((&x, &x, &x))
}

fn prefixed(stream: &Stream) -> Result<Plan> {
    let x = halves(stream, &[1, 2, 16, 32]);
    let inputs = Inputs::new(&x, &x, &x).shared_prefix(SharedPrefix::new(&x, &x));
    FusedInferAttention::new(Layout::Bnsd).scale(1.0).heads(2).plan(inputs)
}

fn split(stream: &Stream) -> Result<Plan> {
    let query = halves(stream, &[1, 2, 1, 32]);
    let key = stream.upload(&[1i8; 2 * 16 * 32], [1, 2, 16, 32])?;
    let scale = halves(stream, &[1]);
    let grid = Affine::scale(&scale);
    let inputs = Inputs::new(&query, &key, &key).quantisation(Quantisation::KeyValue {
        antiquantisation: Antiquantisation::Split { mode: AntiquantMode::PerChannel, key: grid, value: grid },
        output: None,
    });
    FusedInferAttention::new(Layout::Bnsd).scale(1.0).heads(2).plan(inputs)
}

fn of_two_sequences() -> FusedInferAttention {
    FusedInferAttention::new(Layout::Tnd)
        .scale(1.0)
        .heads(2)
        .kv_heads(2)
        .actual_seq_lengths([3, 8])
        .actual_seq_lengths_kv([3, 8])
}

fn roped(stream: &Stream) -> Result<Plan> {
    let (x, rope) = (packed(stream, 128), packed(stream, 64));
    of_two_sequences().plan(Inputs::new(&x, &x, &x).rope(&rope, &rope))
}

fn with_sink(stream: &Stream) -> Result<Plan> {
    let x = packed(stream, 64);
    let sink = stream.upload(&[bf16::ONE; 2], [2])?;
    of_two_sequences().plan(Inputs::new(&x, &x, &x).learnable_sink(&sink))
}

fn with_slopes(stream: &Stream) -> Result<Plan> {
    let x = halves(stream, &[1, 2, 16, 32]);
    let slopes = stream.upload(&[0.5f32, 0.25], [2])?;
    let inputs = Inputs::new(&x, &x, &x).pse_shift(PseShift::Slopes {
        slopes: &slopes,
        distance: Distance::Linear,
        query_start: 0,
        key_start: 0,
    });
    FusedInferAttention::new(Layout::Bnsd).scale(1.0).heads(2).plan(inputs)
}

/// In the emulation's release, from which on V1 to V3 are deprecated.
#[test]
fn the_oldest_version_that_can_express_a_call_and_is_not_deprecated_is_used() {
    type Call = fn(&Stream) -> Result<Plan>;
    let calls: [(Call, &str); 5] = [
        (plain, "aclnnFusedInferAttentionScore"),
        (prefixed, "aclnnFusedInferAttentionScoreV2"),
        (split, "aclnnFusedInferAttentionScoreV2"),
        (roped, "aclnnFusedInferAttentionScoreV3"),
        (with_sink, "aclnnFusedInferAttentionScoreV4"),
    ];
    let stream = stream_of(|_| {});
    for (call, _) in calls {
        let operator = call(&stream).unwrap().operator();
        assert_eq!(operator, "aclnnFusedInferAttentionScoreV4");
    }
    let stream = stream_of(without_v4);
    for (call, _) in calls {
        let operator = call(&stream).unwrap().operator();
        assert_eq!(operator, "aclnnFusedInferAttentionScoreV5");
    }
    // Deprecated versions where nothing else is installed ...
    let stream = stream_of(|functions| {
        without_v4(functions);
        without_v5(functions);
    });
    for (call, operator) in &calls[..4] {
        assert_eq!(call(&stream).unwrap().operator(), *operator);
    }
    // ... and without the oldest symbols the next.
    let stream = stream_of(|functions| {
        without_v4(functions);
        without_v5(functions);
        functions.aclnnFusedInferAttentionScore = None;
        functions.aclnnFusedInferAttentionScoreV2GetWorkspaceSize = None;
    });
    for (call, operator) in [(plain as Call, calls[3].1), (prefixed, calls[3].1)] {
        assert_eq!(call(&stream).unwrap().operator(), operator);
    }
    still_works(&stream);
}

#[test]
fn a_sink_on_an_older_cann_names_what_it_needs() {
    let stream = stream_of(|functions| {
        without_v4(functions);
        without_v5(functions);
    });
    let error = with_sink(&stream).unwrap_err();
    assert!(
        matches!(error, Error::OperatorVersion { needed: "aclnnFusedInferAttentionScoreV4", since: "8.5", .. }),
        "{error:?}"
    );
    let text = error.to_string();
    for part in ["V4", "learnable sinks", "libopapi.so", "CANN 8.5"] {
        assert!(text.contains(part), "{part}: {text}");
    }
    still_works(&stream);

    // A wrong call is called wrong, whatever is installed.
    let x = packed(&stream, 64);
    let sink = stream.upload(&[bf16::ONE; 3], [3]).unwrap();
    let inputs = Inputs::new(&x, &x, &x).learnable_sink(&sink);
    let error = of_two_sequences().plan(inputs).unwrap_err();
    assert!(matches!(error, Error::Violation(_)), "{error:?}");
}

unsafe extern "C" fn ascend950() -> *const c_char {
    c"Ascend950PR_9599".as_ptr()
}

#[test]
fn calls_on_ascend_950_name_its_version() {
    let on_950 = |functions: &mut Functions| functions.aclrtGetSocName = Some(ascend950);
    let stream = stream_of(|functions| {
        on_950(functions);
        without_v5(functions);
    });
    let error = plain(&stream).unwrap_err();
    assert!(
        matches!(error, Error::OperatorVersion { needed: "aclnnFusedInferAttentionScoreV5", since: "9.0", .. }),
        "{error:?}"
    );

    // Slopes are of no release for the older products.
    let stream = stream_of(|_| {});
    let error = with_slopes(&stream).unwrap_err();
    assert!(matches!(error, Error::Violation(_)), "{error:?}");
    still_works(&stream);
}

/// Not a test of its own: what an emulation of an older release says.
#[test]
fn child_plans_learnable_sinks() {
    if env::var_os("ASCEND_TEST_CHILD").is_none() {
        return;
    }
    let stream = harness::stream();
    match with_sink(&stream) {
        Ok(plan) => println!("sinks by {}", plan.operator()),
        Err(error) => println!("no sinks: {error}"),
    }
    println!("plain by {}", plain(&stream).unwrap().operator());
}

#[test]
fn an_older_release_can_be_emulated() {
    let run = |variable: &str, value: &str| {
        let child = Command::new(env::current_exe().unwrap())
            .args(["--exact", "versions::child_plans_learnable_sinks", "--nocapture"])
            .env("ASCEND_TEST_CHILD", "1")
            .env(PLATFORM_VARIABLE, "emulated")
            // The shared library exports every version, whatever the release: what is missing shows in process alone.
            .env_remove("ASCEND_TEST_PLATFORM")
            .env(variable, value)
            .output()
            .unwrap();
        assert!(child.status.success(), "{child:?}");
        String::from_utf8(child.stdout).unwrap()
    };
    let first = "plain by aclnnFusedInferAttentionScore\n";
    let kept = "plain by aclnnFusedInferAttentionScoreV4\n";
    for (variable, value) in [("ASCEND_EMU_OPERATOR", "V3"), ("ASCEND_EMU_CANN", "8.1")] {
        let old = run(variable, value);
        assert!(old.contains("no sinks: ") && old.contains("aclnnFusedInferAttentionScoreV4"), "{old}");
        assert!(old.contains("install CANN 8.5 or newer"), "{old}");
        assert!(old.contains(first), "{old}");
    }
    for (variable, value, plain) in [("ASCEND_EMU_OPERATOR", "V4", kept), ("ASCEND_EMU_CANN", "8.5", first)] {
        let new = run(variable, value);
        assert!(new.contains("sinks by aclnnFusedInferAttentionScoreV4\n") && new.contains(plain), "{new}");
    }
}

#[test]
fn machines_of_several_releases_live_side_by_side() {
    if harness::not_on_npu("an installed toolkit is of one release") {
        return;
    }
    // Heads above 256 are an error of 8.1 alone.
    let many_heads = |stream: &Stream| {
        let x = halves(stream, &[1, 300, 16, 64]);
        FusedInferAttention::new(Layout::Bnsd)
            .scale(1.0)
            .heads(300)
            .plan((&x, &x, &x))
            .and_then(|plan| plan.launch(stream, (&x, &x, &x)))
            .and_then(|output| output.attention.download(stream))
    };
    let mut devices = Vec::new();
    for soc in [Soc::AtlasA2, Soc::AtlasA3] {
        for cann in Cann::ALL {
            let machine = Machine::new(soc, cann);
            let runtime = Runtime::emulated_as(&machine).unwrap();
            let device = runtime.device(0).unwrap();
            assert_eq!(device.target().unwrap(), Target::new(soc, cann));
            assert_eq!(Runtime::emulated_as(&machine).unwrap().device(0).unwrap(), device);
            devices.push((cann, device));
        }
    }
    for (cann, device) in &devices {
        let stream = device.stream().unwrap();
        match many_heads(&stream) {
            Ok(output) => assert!(*cann > Cann::V8_1 && output.iter().all(|x| *x == f16::ONE)),
            Err(Error::Violation(violation)) => {
                assert_eq!((*cann, violation.rule.id), (Cann::V8_1, "num_heads.max"));
            }
            Err(error) => panic!("{cann}: {error}"),
        }
    }
    for name in ["Kunpeng920", "Ascend9500000", ""] {
        let unknown = Machine::named(name, Cann::V9_1);
        assert!(matches!(Runtime::emulated_as(&unknown), Err(Error::UnknownProduct { .. })));
    }
}

#[test]
fn equal_machines_have_one_runtime_and_others_their_own() {
    if harness::not_on_npu("an installed toolkit is of one release") {
        return;
    }
    let device = |machine: &Machine| Runtime::emulated_as(machine).unwrap().device(0).unwrap();
    let machine = |name: &str| Machine::named(name, Cann::V9_0);
    let first = device(&machine("Ascend910_9391"));
    // However it is written.
    for same in [
        machine("Ascend910_9391"),
        machine(" Ascend910_9391"),
        Machine::new(Soc::AtlasA3, Cann::V9_0),
        machine("Ascend910_9391").operator(Version::V5),
    ] {
        assert_eq!(device(&same), first, "{same:?}");
    }
    // Far more names than machines: each device answers with its own.
    for at in 0..60 {
        let name = format!("Ascend910_93{at:02}");
        let other = device(&machine(&name));
        assert_eq!(other.soc_name(), name);
        assert_eq!(other == first, name == "Ascend910_9391");
    }
    for different in [
        Machine::new(Soc::AtlasA3, Cann::V9_1),
        machine("Ascend910_9391").operator(Version::V4),
        machine("Ascend910B3"),
    ] {
        assert_ne!(device(&different), first, "{different:?}");
    }
    assert_eq!(first.soc_name(), "Ascend910_9391");
}

/// A release without newer versions has calls that are portable: elsewhere the newer ones are chosen.
#[test]
fn calls_of_older_releases_are_portable() {
    for cann in [Cann::V8_1, Cann::V8_5, Cann::V9_1] {
        let runtime = Runtime::emulated_as(&Machine::new(Soc::AtlasA2, cann)).unwrap();
        let stream = runtime.device(0).unwrap().stream().unwrap();
        let x = halves(&stream, &[1, 2, 16, 32]);
        let call = FusedInferAttention::new(Layout::Bnsd).scale(1.0).heads(2);
        let plan = call.portable_since(cann).plan((&x, &x, &x));
        assert!(plan.is_ok(), "{cann}: {:?}", plan.map(drop));
    }
}
