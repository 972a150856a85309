//! What holds for the calls of all operators: refusals, traces, repeated launches.

use super::tensors::*;
use crate::bench::*;
use ascend_emu::abi::*;
use ascend_emu::glue::{self, *};
use ascend_emu::{Check, check_scope};
use ascend_sys::bindings::aclDataType;
use ascend_sys::bindings::{aclFormat, aclTensor};
use std::ptr::{null, null_mut};

#[test]
fn what_does_not_fit_is_refused_by_name() {
    let _bench = Bench::new();
    let x = Tensor::floats(&[2, 3], &[1.0]);
    let y = Tensor::floats(&[2], &[1.0]);
    fails(
        call!(aclnnAdd(x.input(), y.input(), int(1), x.out())),
        161_002,
        &["aclnnAdd: other: given [2], allowed: what broadcasts together with [2, 3]"],
    );
    fails(call!(aclnnExp(x.input(), y.out())), 161_002, &["aclnnExp: out: given [2], allowed: [2, 3]"]);
    fails(
        call!(aclnnCast(x.input(), Type(aclDataType::ACL_INT32), x.out())),
        161_002,
        &["aclnnCast: out: given FLOAT, allowed: INT32"],
    );
    fails(call!(aclnnSoftmax(x.input(), 2, x.out())), 161_002, &["aclnnSoftmax: dim: given 2, allowed: -2 to 1"]);
    let complex = tensor(aclDataType::ACL_COMPLEX64, &[2, 3], malloc(48));
    fails(
        call!(aclnnNeg(In(complex), x.out())),
        161_002,
        &["aclnnNeg: self: given COMPLEX64, allowed: FLOAT, FLOAT16"],
    );
    let blocks = tensor_of(aclFormat::ACL_FORMAT_FRACTAL_NZ, aclDataType::ACL_FLOAT16, &[1, 1, 16, 16], malloc(512));
    fails(
        call!(aclnnInplaceZero(InOutShared(blocks))),
        161_002,
        &["aclnnInplaceZero: selfRef: given format FractalNz"],
    );
    fails(
        call!(aclnnMm(x.input(), x.input(), x.out(), 0)),
        161_002,
        &["aclnnMm: mat2: given [2, 3], allowed: a factor for [2, 3] with 3 rows"],
    );
    fails(call!(aclnnAdds(x.input(), Scalar(null()), int(1), x.out())), 161_001, &["aclnnAdds: other is null"]);
    // Handles that are none, of other things, or destroyed.
    fails(call!(aclnnExp(In(std::ptr::dangling()), x.out())), 161_002, &["aclnnExp: self: "]);
    fails(call!(aclnnExp(In(int(1).0.cast::<aclTensor>()), x.out())), 161_002, &["aclnnExp: self: "]);
    // Positions that are none show on the device.
    let index = Tensor::ints(&[1], &[2]);
    let out = Tensor::floats(&[1, 3], &[0.0]);
    ok(call!(aclnnIndexSelect(x.input(), 0, index.input(), out.out())));
    fails(
        unsafe { aclrtSynchronizeStream(null_mut()) },
        507_015,
        &["aclnnIndexSelect: index: index 2 is out of range for axis 0 of size 2"],
    );
}

/// A view that is as large as a view may claim to be takes no memory and no time.
#[test]
fn absurd_views_are_refused() {
    let _bench = Bench::new();
    let huge = View { shape: vec![1 << 40, 1 << 20], strides: vec![0, 0], offset: 0, room: 1 };
    let x = Tensor::new(aclDataType::ACL_FLOAT, huge, &[1.0]);
    let sum = Tensor::floats(&[], &[0.0]);
    fails(
        call!(aclnnReduceSum(x.input(), ints(&[]), Flag(0), Type(aclDataType::ACL_FLOAT), sum.out())),
        161_002,
        &["aclnnReduceSum: self: given 1152921504606846976 elements, allowed: at most"],
    );
    let nothing = |strides: [i64; 2], rows: i64| {
        let view = View { shape: vec![rows, 0], strides: strides.to_vec(), offset: 0, room: 1 };
        Tensor::new(aclDataType::ACL_FLOAT, view, &[1.0])
    };
    let (x, out) = (nothing([0, 0], 1 << 40), nothing([0, 0], 1 << 40));
    fails(
        call!(aclnnSoftmax(x.input(), 0, out.out())),
        161_002,
        &["aclnnSoftmax: self: given 1099511627776 elements along the axes that have some"],
    );
    for stride in [1 << 62, -(1 << 62), i64::MIN] {
        let (x, out) = (nothing([stride, 1], 8), nothing([1, stride], 8));
        ok(call!(aclnnSoftmax(x.input(), 0, out.out())));
        ok(unsafe { aclrtSynchronizeStream(null_mut()) });
    }
    let memory = malloc(64);
    let outside = Tensor::over(aclDataType::ACL_FLOAT, View::packed(&[1 << 20]), memory);
    ok(call!(aclnnInplaceZero(outside.shared())));
    fails(
        unsafe { aclrtSynchronizeStream(null_mut()) },
        507_015,
        &["aclnnInplaceZero", "selfRef", "past the end of an allocation of 64 bytes"],
    );
}

#[test]
fn launches_are_watched_like_those_of_attention() {
    let _bench = Bench::new();
    let x = Tensor::floats(&[4], &[1.0]);
    let gate = Gate::new();
    let stream = stream();
    gate.hold(stream);
    let (mut bytes, mut executor) = (0, null_mut());
    unsafe {
        ok(glue::aclnnInplaceOne::prepare(x.shared(), &mut bytes, &mut executor));
        ok(glue::aclnnInplaceOne::launch(null_mut(), 0, executor, stream));
        let _strict = check_scope(Check::Strict);
        let mut values = [0f32; 4];
        let status = aclrtMemcpy(values.as_mut_ptr().cast(), 16, x.at, 16, D2H);
        fails(status, 107_000, &["aclnnInplaceOne", "selfRef"]);
    }
    gate.open();
    sync(stream);
    gate.destroy();
    destroy(stream);
}

#[test]
fn executors_run_again_with_other_addresses() {
    let _bench = Bench::new();
    let (a, b) = (Tensor::floats(&[2], &[1.0, 2.0]), Tensor::floats(&[2], &[5.0, 6.0]));
    let (first, second) = (Tensor::floats(&[4], &[0.0]), Tensor::floats(&[4], &[0.0]));
    let (mut bytes, mut executor) = (0, null_mut());
    let members = tensors(&[&a, &b]);
    unsafe {
        ok(glue::aclnnCat::prepare(members, 0, first.out(), &mut bytes, &mut executor));
        ok(aclSetAclOpExecutorRepeatable(executor));
        ok(glue::aclnnCat::launch(null_mut(), 0, executor, null_mut()));
        ok(aclSetOutputTensorAddr(executor, 0, first.handle, second.at));
        ok(aclSetDynamicInputTensorAddr(executor, 0, 1, members.0.cast_mut(), a.at));
        ok(glue::aclnnCat::launch(null_mut(), 0, executor, null_mut()));
        ok(aclDestroyAclOpExecutor(executor));
    }
    assert_eq!(first.values(), [1.0, 2.0, 5.0, 6.0]);
    assert_eq!(second.values(), [1.0, 2.0, 1.0, 2.0]);
}

/// A trace is chosen when the process starts, so that another process makes the calls.
#[cfg(not(target_feature = "crt-static"))]
#[test]
fn calls_are_traced_with_their_arguments() {
    const VARIABLE: &str = "ASCEND_EMU_TRACE";
    if std::env::var_os(VARIABLE).is_some() {
        let _bench = Bench::new();
        let x = Tensor::floats(&[2, 3], &[1.0]);
        ok(call!(aclnnAdds(x.input(), int(1), int(1), x.out())));
        fails(call!(aclnnSoftmax(x.input(), 5, x.out())), 161_002, &[]);
        return sync(null_mut());
    }
    let file = std::env::temp_dir().join(format!("glue-trace-{}", std::process::id()));
    let child = std::process::Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "glue::calls::calls_are_traced_with_their_arguments"])
        .env(VARIABLE, &file)
        .output()
        .unwrap();
    let text = std::fs::read_to_string(&file).unwrap();
    std::fs::remove_file(&file).unwrap();
    assert!(child.status.success(), "{child:?}");
    let line = |function: &str| {
        let name = format!("\"function\":\"{function}\"");
        text.lines().find(|line| line.contains(&name)).unwrap()
    };
    let prepared = line("aclnnAddsGetWorkspaceSize");
    assert!(prepared.contains("\"self\":{\"handle\":") && prepared.contains("\"shape\":[2,3]"));
    assert!(prepared.contains("\"workspaceSize\":0") && prepared.contains("\"status\":0"));
    assert!(line("aclnnAdds").contains("\"status\":0"));
    let refused = line("aclnnSoftmaxGetWorkspaceSize");
    assert!(refused.contains("\"dim\":5") && refused.contains("\"status\":161002"));
    assert!(refused.contains("aclnnSoftmax: dim: given 5, allowed: -2 to 1"));
}

/// What a parameter is when it is nothing.
trait Nothing {
    const NOTHING: Self;
}

macro_rules! nothing {
    ($($type:ident: $value:expr;)*) => {$(
        impl Nothing for $type {
            const NOTHING: Self = $value;
        }
    )*};
}

nothing! {
    In: In(null());
    InPacked: InPacked(null());
    InStored: InStored(null());
    OptionalIn: OptionalIn(null());
    Ins: Ins(null());
    Out: Out(null());
    OutStored: OutStored(null());
    OptionalOut: OptionalOut(null());
    InOut: InOut(null());
    InOutShared: InOutShared(null());
    Scalar: Scalar(null());
    OptionalScalar: OptionalScalar(null());
    Ints: Ints(null());
    Type: Type(aclDataType::ACL_FLOAT);
    Text: Text(null());
    Flag: Flag(0);
    i8: 0;
    i32: 0;
    i64: 0;
    u64: 0;
    f32: 0.0;
    f64: 0.0;
}

macro_rules! call_with_nothing {
    ($( $(#[$doc:meta])* fn $name:ident ( $( $argument:ident : $kind:ident ),* ) = $compute:expr ; )*) => {
        #[test]
        fn every_operator_names_itself_and_what_is_null() {
            let _bench = Bench::new();
            $(
                fails(
                    call!($name($( <$kind as Nothing>::NOTHING ),*)),
                    161_001,
                    &[concat!(stringify!($name), ": "), " is null"],
                );
            )*
        }
    };
}

ascend_emu::for_each_glue_function! { call_with_nothing }
