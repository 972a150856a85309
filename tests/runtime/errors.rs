//! Everything that can go wrong has its own named error, and the device is usable afterwards.

use crate::harness;

use std::env;
use std::process::Command;

use ascend_attention::attention::{Arguments, Inputs, Parameter};
use ascend_attention::rules;
use ascend_attention::spec::Cann;
use ascend_attention::spec::ops::fused_infer_attention_score::FiaCall;
use ascend_attention::{
    DType, Error, FusedInferAttention, InnerPrecise, Layout, Mask, PLATFORM_VARIABLE, Runtime, Tensor, bf16, f16,
};
use harness::{still_works, stream, tensor};

/// A rule by its id, with texts that say something.
#[track_caller]
fn violates<T: std::fmt::Debug>(outcome: Result<T, Error>, id: &str) {
    match outcome.unwrap_err() {
        Error::Violation(violation) => {
            assert_eq!(violation.rule.id, id, "{violation}");
            assert!(!violation.given.is_empty() && !violation.allowed.is_empty() && !violation.fix.is_empty());
        }
        other => panic!("{other}"),
    }
}

#[test]
fn broken_rules_are_named_before_the_operator_is_called() {
    let stream = stream();
    let q = tensor(&stream, [1, 4, 8, 32]);
    let kv = tensor(&stream, [1, 2, 16, 32]);
    let call = || FusedInferAttention::new(Layout::Bnsd).scale(1.0).heads(4).kv_heads(2);
    call().plan((&q, &kv, &kv)).unwrap();
    violates(call().heads(8).plan((&q, &kv, &kv)), "num_heads.query");
    violates(call().kv_heads(3).plan((&q, &kv, &kv)), "num_key_value_heads.divides");
    violates(call().actual_seq_lengths([9]).plan((&q, &kv, &kv)), "actual_seq_lengths.range");
    violates(call().actual_seq_lengths_kv([17]).plan((&q, &kv, &kv)), "actual_seq_lengths_kv.range");
    let mask = |shape: [usize; 2]| {
        let len = shape.iter().product();
        Mask::all_mask(stream.upload(&vec![false; len], shape).unwrap())
    };
    call().mask(mask([8, 16])).plan((&q, &kv, &kv)).unwrap();
    let narrow = call().mask(mask([8, 15])).plan((&q, &kv, &kv));
    assert!(narrow.unwrap_err().to_string().contains("[8, 15]"));
    let float = stream.upload(&[0f32; 128], [8, 16]).unwrap();
    violates(call().mask(Mask::all_mask(float)).plan((&q, &kv, &kv)), "dtype.registered");
    let band = |pre, next| stream.device().masks().band(pre, next).unwrap();
    violates(call().mask(band(-1, -1)).plan((&q, &kv, &kv)), "tokens.both_negative");
    violates(call().mask(band(-1, 0)).plan((&q, &kv, &kv)), "tokens.empty_band");
    violates(call().plan(Inputs::lists(&q, &[], &[&kv])), "call.required");
    still_works(&stream);
}

#[test]
fn lints_stop_a_call_unless_allowed() {
    let stream = stream();
    let whole = tensor(&stream, [1, 8, 4, 32]);
    let strided = whole.permute([0, 2, 1, 3]).unwrap();
    let kv = tensor(&stream, [1, 4, 16, 32]);
    let call = FusedInferAttention::new(Layout::Bnsd).scale(1.0).heads(4);
    violates(call.plan((&strided, &kv, &kv)), "tensor.strided");
    let plan = call.clone().allow_lint("tensor.strided").plan((&strided, &kv, &kv)).unwrap();
    drop(plan);
    call.plan((&strided.contiguous(&stream).unwrap(), &kv, &kv)).unwrap();
    still_works(&stream);
}

#[test]
fn a_portable_call_is_one_that_every_release_takes_alike() {
    let stream = stream();
    let query = tensor(&stream, [2, 2, 1, 96]);
    let kv = tensor(&stream, [2, 2, 64, 96]);
    let call = FusedInferAttention::new(Layout::Bnsd).scale(1.0).heads(2).actual_seq_lengths_kv([40, 50]);
    let portable = |call: &FusedInferAttention| call.clone().portable_since(Cann::V8_5);
    portable(&call).plan((&query, &kv, &kv)).unwrap();

    // 9.0 alone asks for a mask of all rows of the key, whatever the lengths are.
    let hidden = stream.upload(&[false; 2 * 50], [2, 1, 50]).unwrap();
    let masked = call.mask(Mask::all_mask(hidden));
    masked.plan((&query, &kv, &kv)).unwrap();
    let refused = portable(&masked).plan((&query, &kv, &kv));
    let text = refused.as_ref().unwrap_err().to_string();
    assert!(text.contains("CANN 9.0 refuses by atten_mask.full"), "{text}");
    violates(refused, "portable.refused");
    portable(&masked).allow_lint("portable.refused").plan((&query, &kv, &kv)).unwrap();
    masked.clone().portable_since(Cann::V9_1).plan((&query, &kv, &kv)).unwrap();
    still_works(&stream);
}

#[test]
fn what_is_left_unset_is_named() {
    let stream = stream();
    let (query, key) = (tensor(&stream, [1, 8, 16, 64]), tensor(&stream, [1, 2, 16, 64]));
    let call = FusedInferAttention::new(Layout::Bnsd);
    let text = |outcome: Result<_, Error>| outcome.map(drop).unwrap_err().to_string();
    let scaled = call.clone().heads(8).kv_heads(2);
    assert_eq!(
        text(scaled.plan((&query, &key, &key))),
        "argument.value: an argument of a function has a value that the function takes; given scale: none, allowed: the \
         factor of the scores, usually one over the root of the head dimension: `.scale(1.0 / 64f64.sqrt())`; \
         `.scale(1.0)` for queries that are scaled already; fix: set the factor by `.scale(..)`"
    );
    scaled.scale(1.0).plan((&query, &key, &key)).unwrap();
    // With and without a scale.
    for call in [call.clone(), call.scale(0.125)] {
        let text = text(call.plan((&query, &key, &key)));
        assert!(text.starts_with("num_heads.query") && text.contains("`.heads(8)`"), "{text}");
    }
    let hidden: Tensor<f16> = Tensor::empty(stream.device(), [1, 16, 8 * 128]).unwrap();
    let bsh = FusedInferAttention::new(Layout::Bsh).scale(0.125);
    let text = text(bsh.plan((&hidden, &hidden, &hidden)));
    assert!(text.starts_with("head_dim.max") && text.contains("`.heads()`"), "{text}");
    still_works(&stream);
}

#[test]
fn lengths_of_the_wrong_kind_are_answered_by_the_right_ones() {
    let stream = stream();
    let packed: Tensor<bf16> = Tensor::empty(stream.device(), [8, 1, 64]).unwrap();
    let fix = |q: &[usize], kv: &[usize]| {
        let call = FusedInferAttention::new(Layout::Tnd).heads(1).kv_heads(1).scale(0.125);
        let call = call.actual_seq_lengths(q).actual_seq_lengths_kv(kv);
        match call.plan((&packed, &packed, &packed)).unwrap_err() {
            Error::Violation(violation) => (violation.rule.id, violation.fix),
            other => panic!("{other}"),
        }
    };
    let cumulative = "set actualSeqLengths to [3, 8]: it is cumulative".to_owned();
    assert_eq!(fix(&[3, 5], &[3, 8]), ("packed.q_total", cumulative));
    let keys = "set actualSeqLengthsKv to [3, 8]: it is cumulative".to_owned();
    assert_eq!(fix(&[3, 8], &[3, 5]), ("packed.kv_ends", keys));
    let decreasing = "set actualSeqLengths to [5, 8]: it is cumulative".to_owned();
    assert_eq!(fix(&[5, 3], &[5, 8]), ("packed.q_total", decreasing));
    let (rule, leading) = fix(&[0, 3, 8], &[3, 8]);
    assert!(["packed.lengths_required", "split_fuse.ends"].contains(&rule), "{rule}");
    assert!(leading.contains("leading 0"), "{leading}");
    // Nothing is guessed: these are no lengths of 8 rows.
    assert!(fix(&[3, 4], &[3, 8]).1.starts_with("trim the query"));

    let none = FusedInferAttention::new(Layout::Tnd).heads(1).scale(0.125);
    violates(none.plan((&packed, &packed, &packed)), "packed.lengths_required");

    let rows = tensor(&stream, [2, 1, 5, 64]);
    let call = FusedInferAttention::new(Layout::Bnsd).heads(1).scale(0.125);
    let error = call.actual_seq_lengths_kv([3, 8]).plan((&rows, &rows, &rows));
    let text = error.unwrap_err().to_string();
    let ends = "fix: if the entries are ends of sequences, pass their lengths [3, 5]; otherwise ";
    assert!(text.contains(ends), "{text}");
    still_works(&stream);
}

#[test]
fn lints_that_leave_the_tensors_are_allowed_by_unsafe_code_alone() {
    let Some(stream) = harness::stream_of(Cann::V8_1) else {
        return;
    };
    let query = tensor(&stream, [1, 4, 8, 32]);
    let (key, short) = (tensor(&stream, [1, 4, 16, 32]), tensor(&stream, [1, 4, 8, 32]));
    let call = FusedInferAttention::new(Layout::Bnsd).heads(4).scale(1.0);
    let id = "value.shape_unchecked";
    violates(call.plan((&query, &key, &short)), id);
    for inputs in [(&key, &short), (&key, &key)] {
        let error = call.clone().allow_lint(id).plan((&query, inputs.0, inputs.1)).unwrap_err();
        let text = error.to_string();
        assert!(text.contains("given allow_lint: value.shape_unchecked") && text.contains("`allow_overrun`"), "{text}");
    }
    let mut arguments = Arguments::new(ascend_attention::spec::ops::fused_infer_attention_score::Arguments {
        num_heads: 4,
        input_layout: "BNSD".to_owned(),
        inner_precise: 0,
        ..Default::default()
    });
    arguments.set(Parameter::Query, &query).set(Parameter::Key, &key).set(Parameter::Value, &short).allow_lint(id);
    assert!(matches!(
        arguments.plan(stream.device()),
        Err(Error::Violation(violation))
            if violation.rule.id == "argument.value"
                && violation.given.starts_with("allow_lint: ")
    ));
    // SAFETY: the call is not launched.
    let allowed = unsafe { call.allow_overrun(id) };
    allowed.plan((&query, &key, &short)).unwrap();
    still_works(&stream);
}

#[test]
fn a_wrong_dtype_is_named() {
    let stream = stream();
    let int = stream.upload(&[0i32; 512], [1, 1, 16, 32]).unwrap();
    let call = FusedInferAttention::new(Layout::Bnsd).scale(1.0);
    violates(call.plan((&int, &int, &int)), "dtype.registered");
    let half = tensor(&stream, [1, 1, 16, 32]);
    let error = stream.upload_bytes(DType::Float16, &[0; 3], [1]).unwrap_err();
    assert_eq!(
        error.to_string(),
        "argument.value: an argument of a function has a value that the function takes; given bytes: 3, allowed: 2, by \
         the shape; fix: bring as many elements as the shape has"
    );
    let error = ascend_attention::AnyTensor::from(&half).typed::<f32>().unwrap_err();
    assert!(matches!(
        &error,
        Error::Violation(violation)
            if violation.rule.id == "argument.value"
                && violation.given.starts_with("dtype: ")
    ));
    still_works(&stream);
}

#[test]
fn what_this_release_lacks_is_unsupported_by_name() {
    let stream = stream();
    let query = tensor(&stream, [1, 1, 1, 32]);
    let bytes = |rows: usize| {
        let bytes = vec![1; rows * 32];
        stream.upload_bytes(DType::Int8, &bytes, [1, 1, rows, 32])
    };
    let scale = stream.upload(&[1.0f32; 16], [1, 16]).unwrap();
    let mut call = FiaCall::new("BNSD");
    (call.key_antiquant_mode, call.value_antiquant_mode) = (1, 1);
    let mut arguments = Arguments::new(call.attributes());
    arguments
        .set(Parameter::Query, query)
        .set(Parameter::KeyAntiquantScale, &scale)
        .set(Parameter::ValueAntiquantScale, &scale)
        .set(Parameter::Key, bytes(16).unwrap())
        .set(Parameter::Value, bytes(16).unwrap());
    arguments.plan(stream.device()).unwrap();
    // Scales of single tokens, with keys that have none.
    arguments.set(Parameter::KeySharedPrefix, bytes(4).unwrap()).set(Parameter::ValueSharedPrefix, bytes(4).unwrap());
    let error = arguments.plan(stream.device()).unwrap_err();
    assert!(error.breaks(&ascend_attention::spec::UNSUPPORTED), "{error}");
    assert!(error.to_string().contains("keySharedPrefix"), "{error}");
    still_works(&stream);
}

/// A program whose `main` returns an error prints its `Debug` form.
#[test]
fn errors_are_text_in_either_form() {
    let stream = stream();
    let q = tensor(&stream, [1, 4, 8, 32]);
    let kv = tensor(&stream, [1, 2, 16, 32]);
    let call = FusedInferAttention::new(Layout::Bnsd).scale(1.0);
    let errors = [
        call.heads(4).kv_heads(3).plan((&q, &kv, &kv)).unwrap_err(),
        Error::NoEmulation,
        Error::invalid("rows", 0, "at least 1"),
    ];
    for error in errors {
        assert_eq!(format!("{error:?}"), error.to_string());
        let fields = format!("{error:#?}");
        let variants = ["Violation(", "NoEmulation"];
        assert!(variants.iter().any(|of| fields.starts_with(of)), "{fields}");
    }
}

/// Single tokens of one packed tensor of queries, keys and values, and tensors of their own, by one plan.
#[test]
fn strides_of_single_entries_are_not_planned() {
    let stream = stream();
    let numbers: Vec<f16> = (0..192).map(|i| f16::from_f32(i as f32 / 64.0)).collect();
    let packed = stream.upload(&numbers, [1, 1, 192]).unwrap();
    let views = [0, 64, 128].map(|at| packed.narrow(2, at..at + 64).unwrap());
    let own = [0, 64, 128].map(|at| {
        let of = numbers.get(at..at + 64).unwrap();
        stream.upload(of, [1, 1, 64]).unwrap()
    });
    let call = FusedInferAttention::new(Layout::Bsh).scale(1.0).heads(1);
    let attended = |plan: &ascend_attention::Plan, [q, k, v]: &[Tensor<f16>; 3]| {
        let output = plan.launch(&stream, (q, k, v)).unwrap();
        output.attention.download(&stream).unwrap()
    };
    for planned in [&views, &own] {
        let plan = call.clone().plan((&planned[0], &planned[1], &planned[2]));
        let plan = plan.unwrap();
        for given in [&views, &own] {
            assert_eq!(attended(&plan, given), numbers[128..]);
        }
    }
}

#[test]
fn a_launch_must_be_as_planned() {
    let stream = stream();
    let q = tensor(&stream, [1, 2, 8, 32]);
    let kv = tensor(&stream, [1, 2, 16, 32]);
    let call = FusedInferAttention::new(Layout::Bnsd).scale(1.0).heads(2);
    let plan = call.plan((&q, &kv, &kv)).unwrap();
    let with_lse = call.softmax_lse(true).plan((&q, &kv, &kv)).unwrap();

    let longer = tensor(&stream, [1, 2, 17, 32]);
    let error = plan.launch(&stream, (&q, &longer, &kv)).unwrap_err();
    assert_eq!(
        error.to_string(),
        "plan.tensors: a launch has the tensors and attributes that its plan was made for, at any address; given key: \
         FLOAT16 [1, 2, 17, 32], allowed: FLOAT16 [1, 2, 16, 32]; fix: launch with what was planned, or \
         plan again"
    );
    let outcome = plan.launch(&stream, Inputs::lists(&q, &[&kv, &kv], &[&kv]));
    assert!(matches!(
        &outcome,
        Err(Error::Violation(violation))
            if violation.rule.id == "plan.tensors"
                && violation.given.starts_with("key: ")
    ));
    let mut output = plan.output().unwrap();
    let outcome = with_lse.launch_into(&stream, (&q, &kv, &kv), &mut output);
    assert!(
        matches!(
            &outcome,
            Err(Error::Violation(violation))
                if violation.rule.id == "plan.tensors"
                    && violation.given.starts_with("softmax_lse: ")
        ),
        "{outcome:?}"
    );
    let mut output = with_lse.output().unwrap();
    let outcome = plan.launch_into(&stream, (&q, &kv, &kv), &mut output);
    assert!(matches!(
        &outcome,
        Err(Error::Violation(violation))
            if violation.rule.id == "plan.tensors"
                && violation.given.starts_with("softmax_lse: ")
    ));
    assert!(plan.output::<f32>().is_err());

    // An output has memory of its own.
    let mut output = plan.output().unwrap();
    output.attention = q.clone();
    let error = plan.launch_into(&stream, (&q, &kv, &kv), &mut output).unwrap_err();
    assert_eq!(
        error.to_string(),
        "argument.memory: what a call writes is memory of its own, which no other argument shares and no other caller \
         reads; given output: memory that is shared with query, allowed: memory of its own; fix: give the call a tensor \
         of its own, such as `Device::alloc` makes"
    );
    still_works(&stream);
}

#[test]
fn tensors_refuse_what_does_not_fit() {
    let stream = stream();
    let tensor = stream.upload(&[0i32; 24], [2, 3, 4]).unwrap();
    let buffer = stream.device().alloc::<i32>(4).unwrap();
    for error in [
        stream.upload(&[0i32; 23], [2, 3, 4]).unwrap_err(),
        stream.upload(&[0i32; 1], [1; 9]).unwrap_err(),
        stream.upload_bytes(DType::String, &[], [0]).unwrap_err(),
        tensor.reshape([5, 5]).unwrap_err(),
        tensor.permute([0, 1, 2]).unwrap().permute([1, 0, 2]).unwrap().reshape([24]).unwrap_err(),
        tensor.permute([0, 0, 1]).unwrap_err(),
        tensor.permute([0, 1]).unwrap_err(),
        tensor.permute([0, 1, 3]).unwrap_err(),
        tensor.narrow(3, 0..1).unwrap_err(),
        tensor.narrow(0, 1..3).unwrap_err(),
        #[allow(clippy::reversed_empty_ranges, reason = "the range is to be refused")]
        tensor.narrow(0, 2..1).unwrap_err(),
        tensor.overwrite(&stream, &[0; 3]).unwrap_err(),
        Tensor::from_buffer(&buffer, [5]).unwrap_err(),
        buffer.copy_from(&stream, &[0; 5]).unwrap_err(),
        tensor.download_async(&stream, stream.device().host_buffer(3).unwrap()).unwrap_err(),
    ] {
        assert!(error.breaks(&rules::ARGUMENT_VALUE), "{error}");
    }
    assert!(tensor.narrow(1, 3..3).unwrap().is_empty());
    assert_eq!(tensor.reshape([24]).unwrap().download(&stream).unwrap(), [0; 24]);
    let nibbles = stream.upload_bytes(DType::Int4, &[1, 2, 3], [5]).unwrap();
    assert_eq!(nibbles.download_bytes(&stream).unwrap(), [1, 2, 3]);
    assert!(nibbles.narrow(0, 1..3).is_err() && nibbles.narrow(0, 2..4).is_ok());
}

#[test]
fn views_of_packed_elements_share_no_byte_with_their_neighbours() {
    let stream = stream();
    let bytes = [0x21, 0x43, 0x65, 0x87, 0xf9];
    for dtype in [DType::Int4, DType::Float4E2M1] {
        let rows = stream.upload_bytes(dtype, &bytes, [3, 3]).unwrap();
        let refused = rows.narrow(0, 0..1).unwrap_err();
        assert!(refused.to_string().contains("whole byte"), "{refused}");
        // A column shares bytes too, though it is strided.
        assert!(rows.narrow(1, 0..1).is_err());
        let first_two = rows.narrow(0, 0..2).unwrap();
        first_two.overwrite_bytes(&stream, &[0; 3]).unwrap();
        // The last row ends where the tensor does; nothing is behind the last element.
        let last = rows.narrow(0, 2..3).unwrap();
        assert_eq!(last.download_bytes(&stream).unwrap(), [0x87, 0x09]);
        let all = rows.download_bytes(&stream).unwrap();
        assert_eq!(all, [0, 0, 0, 0x87, 0x09]);
    }
    // As many as fill the last byte all belong to the tensor: no view ends between them.
    let even = stream.upload_bytes(DType::Int4, &bytes, [10]).unwrap();
    assert!(even.narrow(0, 0..9).is_err() && even.narrow(0, 4..10).is_ok());
    assert!(even.narrow(0, 3..3).unwrap().is_empty());
}

#[test]
fn a_missing_device_is_an_error_of_the_runtime() {
    let error = harness::runtime().device(1000).unwrap_err();
    assert!(matches!(&error, Error::Acl { function: "aclrtSetDevice", .. }), "{error}");
    still_works(&stream());
}

#[test]
fn environment_chooses_the_backend() {
    let run = |platform: &str| {
        let child = Command::new(env::current_exe().unwrap())
            .args(["--exact", "errors::child_prints_the_backend", "--nocapture", "--test-threads=1"])
            .env(PLATFORM_VARIABLE, platform)
            .env("ASCEND_TEST_CHILD", "1")
            .env("ASCEND_HOME_PATH", "/nonexistent-toolkit")
            .env_remove("ASCEND_TOOLKIT_HOME")
            .output()
            .unwrap();
        assert!(child.status.success());
        String::from_utf8(child.stdout).unwrap()
    };
    let emulated = run("emulated");
    assert!(emulated.contains("platform emulated"), "{emulated}");
    let wrong = run("gpu");
    assert!(wrong.contains(r#"given ASCEND_PLATFORM: "gpu", allowed: auto, npu, emulated; fix: set"#), "{wrong}");
    if harness::not_on_npu("a toolkit that the system's loader knows is found in spite of the variable") {
        return;
    }
    let auto = run("auto");
    assert!(auto.contains("platform emulated"), "{auto}");
    // A missing library: every path tried, and what to do.
    let npu = run("npu");
    for part in [
        "the libraries of CANN cannot be loaded",
        "/nonexistent-toolkit/lib64/libascendcl.so: no such file",
        "ASCEND_HOME_PATH=/nonexistent-toolkit",
        "ASCEND_PLATFORM=emulated",
    ] {
        assert!(npu.contains(part), "{part} is not in: {npu}");
    }
}

/// Body of the child processes of [`environment_chooses_the_backend`].
#[test]
fn child_prints_the_backend() {
    if env::var_os("ASCEND_TEST_CHILD").is_none() {
        return;
    }
    match Runtime::auto() {
        Ok(runtime) => println!("platform {}", runtime.platform()),
        Err(error) => println!("error {error}"),
    }
}

#[test]
fn corrected_rows_are_refused_where_the_operator_refuses_them() {
    let Some(stream) = harness::stream_of(Cann::V8_1) else {
        return;
    };
    let q = tensor(&stream, [1, 4, 1, 32]);
    let call =
        FusedInferAttention::new(Layout::Bnsd).scale(1.0).heads(4).inner_precise(InnerPrecise::HighPrecisionCorrected);
    violates(call.plan((&q, &q, &q)), "inner_precise.known");
}
