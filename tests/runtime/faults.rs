//! What only the emulation can show: functions that are missing, failures on demand, and misuse of the raw functions,
//! where hardware crashes. Each has its own named error, and the device is usable afterwards.

#![cfg(feature = "emulation")]

use crate::harness;

use std::ffi::c_char;
use std::ptr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use ascend_attention::case::{Tolerance, record_calls};
use ascend_attention::fused_causal_conv::{FusedCausalConv1d, FusedConvSequence, FusedConvSequences};
use ascend_attention::spec::Cann;
use ascend_attention::sys::bindings::{
    ACL_SUCCESS, aclCANNPackageName, aclCANNPackageVersion, aclDataType, aclFormat, aclIntArray, aclOpExecutor,
    aclTensor, aclTensorList,
};
use ascend_attention::sys::{Api, Functions};
use ascend_attention::{AclnnStatus, Error, Platform, Runtime, Tensor, f16};
use harness::{Sample, still_works, stream, tensor};

#[test]
fn a_missing_symbol_is_named_and_hurts_nothing_else() {
    let with = |change: fn(&mut Functions)| {
        let mut functions = harness::functions();
        change(&mut functions);
        let api = Arc::new(Api::from_functions(functions, "emulation, in part"));
        // SAFETY: the functions that are left are the emulation's.
        unsafe { Runtime::from_api(api) }
    };
    let runtime = with(|functions| {
        functions.aclrtGetVersion = None;
        functions.aclnnFusedInferAttentionScoreV4GetWorkspaceSize = None;
    })
    .unwrap();
    assert_eq!(runtime.platform(), Platform::Custom);
    let error = runtime.version().unwrap_err();
    assert_eq!(
        error.to_string(),
        "libascendcl.so does not export aclrtGetVersion; the CANN in use has no such function"
    );
    // The call goes to the next version that is there.
    let stream = runtime.device(0).unwrap().stream().unwrap();
    still_works(&stream);
    let sample = Sample::new(1);
    let [query, key, value] = sample.upload(&stream);
    let plan = Sample::attention(stream.device()).plan((&query, &key, &value)).unwrap();
    assert_eq!(plan.operator(), "aclnnFusedInferAttentionScoreV5");
    drop(plan);

    let runtime = with(|functions| {
        functions.aclnnFusedInferAttentionScore = None;
        functions.aclnnFusedInferAttentionScoreV2 = None;
        functions.aclnnFusedInferAttentionScoreV3 = None;
        functions.aclnnFusedInferAttentionScoreV4 = None;
        functions.aclnnFusedInferAttentionScoreV5 = None;
    })
    .unwrap();
    let stream = runtime.device(0).unwrap().stream().unwrap();
    let [query, key, value] = sample.upload(&stream);
    let error = Sample::attention(stream.device()).plan((&query, &key, &value)).unwrap_err();
    assert!(matches!(&error, Error::OperatorVersion { needed: "aclnnFusedInferAttentionScoreV4", .. }), "{error}");

    let without = with(|functions| functions.aclInit = None).unwrap_err();
    assert!(matches!(without, Error::MissingSymbol(missing) if missing.symbol == "aclInit"));

    // Without events memory is freed when the stream is synchronised.
    let runtime = with(|functions| functions.aclrtCreateEventExWithFlag = None).unwrap();
    let stream = runtime.device(0).unwrap().stream().unwrap();
    assert!(matches!(stream.record_event(), Err(Error::MissingSymbol(_))));
    let [query, key, value] = sample.upload(&stream);
    let plan = Sample::attention(stream.device()).plan((&query, &key, &value)).unwrap();
    for _ in 0..5 {
        drop(plan.launch(&stream, (&query, &key, &value)).unwrap());
    }
    still_works(&stream);
}

#[test]
fn a_beta_whose_convolution_has_other_arguments_is_refused() {
    unsafe extern "C" fn beta(_: aclCANNPackageName, version: *mut aclCANNPackageVersion) -> i32 {
        // SAFETY: the caller gives a version to write to.
        let version = unsafe { &mut (*version).version };
        for (to, from) in version.iter_mut().zip(b"9.1.0-beta.1\0") {
            *to = *from as c_char;
        }
        0
    }
    if harness::not_on_npu("the emulation is told to be another version") {
        return;
    }
    let machine = ascend_emu::Machine::new("Ascend950PR_9599", Cann::V9_1).unwrap();
    let table = ascend_emu::functions_of(&machine).unwrap();
    let api = Api::from_functions(Functions { aclsysGetCANNVersion: Some(beta), ..table }, "a beta");
    // SAFETY: the functions are the emulation's, but for one that says another version.
    let stream = unsafe { Runtime::from_api(Arc::new(api)) }.unwrap().device(0).unwrap().stream().unwrap();
    let ones = |shape: &[usize]| harness::filled(&stream, f16::ONE, shape);
    let (x, lines) = (ones(&[3, 64]), ones(&[1, 2, 64]));
    let sequence = FusedConvSequence { rows: 3, computed: 0, rejected: 0, lines: &[0] };
    let sequences = FusedConvSequences::new(&stream, 2, &[sequence]).unwrap();
    let rule = FusedCausalConv1d::new();
    let plans = [
        rule.plan(&sequences, (&x, &x, &lines)).map(drop),
        rule.in_place().plan(&sequences, (&x, &x, &lines)).map(drop),
    ];
    for plan in plans {
        let text = plan.unwrap_err().to_string();
        assert!(text.contains("fused_conv.product") && text.contains("9.1.0-beta.1"), "{text}");
    }
}

#[test]
fn failures_of_launches_and_waits_are_named() {
    use ascend_emu::{Site, inject};

    if harness::not_on_npu("failures are injected into the emulation of this process") {
        return;
    }
    let stream = stream();
    let sample = Sample::new(1);
    let [query, key, value] = sample.upload(&stream);
    let plan = Sample::attention(stream.device()).plan((&query, &key, &value)).unwrap();

    let refused = inject(Site::Launch, 1, 361_001);
    let error = plan.launch(&stream, (&query, &key, &value)).unwrap_err();
    drop(refused);
    assert!(matches!(&error, Error::Aclnn { status: AclnnStatus(361_001), .. }), "{error}");
    assert!(error.to_string().contains("ACLNN_ERR_RUNTIME_ERROR"), "{error}");
    still_works(&stream);

    // A fault of the device shows when the stream is waited for.
    let fault = inject(Site::Launch, 1, 507_015);
    let output = plan.launch(&stream, (&query, &key, &value)).unwrap();
    drop(fault);
    let error = output.attention.download(&stream).unwrap_err();
    assert!(matches!(&error, Error::Acl { status, .. } if status.0 == 507_015), "{error}");
    drop(output);
    still_works(&stream);

    // A recorded launch is waited for, and nothing else would show the fault.
    let fault = inject(Site::Launch, 1, 507_015);
    let launch = || plan.launch(&stream, (&query, &key, &value)).map(drop);
    let (outcome, calls) = record_calls(Tolerance::default(), launch);
    drop(fault);
    let error = outcome.unwrap_err();
    assert!(matches!(&error, Error::Acl { status, .. } if status.0 == 507_015), "{error}");
    assert_eq!(calls.len(), 1);
    still_works(&stream);

    let late = inject(Site::Sync, 1, 507_046);
    let error = stream.synchronize_timeout(Duration::from_millis(1)).unwrap_err();
    drop(late);
    assert!(matches!(&error, Error::Timeout { function: "aclrtSynchronizeStreamWithTimeout", .. }), "{error}");
    still_works(&stream);
}

/// Descriptors of a call with one tensor for everything, as a C program makes them.
struct Raw<'a> {
    api: &'a Api,
    query: *mut aclTensor,
    out: *mut aclTensor,
    key: *mut aclTensorList,
    value: *mut aclTensorList,
}

impl<'a> Raw<'a> {
    fn new(api: &'a Api, tensor: &Tensor<f16>, out: &Tensor<f16>) -> Self {
        let describe = |tensor: &Tensor<f16>| {
            let (shape, strides) = (&*tensor.desc().shape, tensor.strides());
            let rank = shape.len() as u64;
            // SAFETY: shape and strides are arrays of that rank.
            unsafe {
                api.aclCreateTensor().unwrap()(
                    shape.as_ptr(),
                    rank,
                    aclDataType::ACL_FLOAT16,
                    strides.as_ptr(),
                    0,
                    aclFormat::ACL_FORMAT_ND,
                    shape.as_ptr(),
                    rank,
                    tensor.as_raw(),
                )
            }
        };
        let list = || {
            let member = describe(tensor).cast_const();
            // SAFETY: the array has one tensor, which becomes the list's.
            unsafe { api.aclCreateTensorList().unwrap()(&member, 1) }
        };
        Self { api, query: describe(tensor), out: describe(out), key: list(), value: list() }
    }

    fn phase_one(&self, query: *const aclTensor) -> (i32, u64, *mut aclOpExecutor) {
        let (mut bytes, mut executor) = (0, ptr::null_mut());
        let layout = c"BNSD".as_ptr().cast_mut();
        let none = ptr::null();
        let array = ptr::null();
        // SAFETY: every argument is a live object, null, or a place for a result.
        let status = unsafe {
            self.api.aclnnFusedInferAttentionScoreGetWorkspaceSize().unwrap()(
                query,
                self.key,
                self.value,
                none,
                none,
                array,
                array,
                none,
                none,
                none,
                none,
                none,
                none,
                none,
                none,
                none,
                none,
                1,
                1.0,
                i64::from(i32::MAX),
                i64::from(i32::MAX),
                layout,
                1,
                0,
                0,
                0,
                0,
                false,
                self.out,
                none,
                &mut bytes,
                &mut executor,
            )
        };
        (status, bytes, executor)
    }

    fn message(&self) -> String {
        // SAFETY: the text ends with NUL and is copied at once.
        unsafe {
            let text = self.api.aclGetRecentErrMsg().unwrap()();
            assert!(!text.is_null());
            std::ffi::CStr::from_ptr(text).to_str().unwrap().to_owned()
        }
    }
}

impl Drop for Raw<'_> {
    fn drop(&mut self) {
        // SAFETY: each object is alive and destroyed once.
        unsafe {
            assert_eq!(self.api.aclDestroyTensor().unwrap()(self.query), ACL_SUCCESS);
            assert_eq!(self.api.aclDestroyTensor().unwrap()(self.out), ACL_SUCCESS);
            assert_eq!(self.api.aclDestroyTensorList().unwrap()(self.key), ACL_SUCCESS);
            assert_eq!(self.api.aclDestroyTensorList().unwrap()(self.value), ACL_SUCCESS);
        }
    }
}

/// What a C program does wrong; hardware crashes here, the emulation says what is wrong.
#[test]
fn misuse_of_the_raw_table_is_named() {
    if harness::not_on_npu("hardware crashes here") {
        return;
    }
    let stream = stream();
    let runtime = harness::runtime();
    let half = tensor(&stream, [1, 1, 16, 32]);
    let out = tensor(&stream, [1, 1, 16, 32]);
    let raw = Raw::new(runtime.api(), &half, &out);

    // A null pointer.
    let (status, ..) = raw.phase_one(ptr::null());
    assert_eq!(AclnnStatus(status).name(), Some("ACLNN_ERR_PARAM_NULLPTR"));
    assert!(raw.message().contains("query"), "{}", raw.message());

    // A workspace that is too small, and none.
    let (status, bytes, executor) = raw.phase_one(raw.query);
    assert_eq!(status, 0);
    let workspace = stream.device().alloc::<u8>(bytes as usize).unwrap();
    let launch = |at, bytes, executor| {
        // SAFETY: the emulation refuses what is wrong.
        unsafe { runtime.api().aclnnFusedInferAttentionScore().unwrap()(at, bytes, executor, stream.as_raw()) }
    };
    let status = launch(workspace.as_raw(), bytes - 1, executor);
    assert_eq!(AclnnStatus(status).name(), Some("ACLNN_ERR_PARAM_INVALID"));
    assert!(raw.message().contains("workspaceSize"));
    let status = launch(ptr::null_mut(), bytes, executor);
    assert_eq!(AclnnStatus(status).name(), Some("ACLNN_ERR_PARAM_NULLPTR"));
    assert!(raw.message().contains("workspace is null"));

    // An executor that was used up.
    assert_eq!(launch(workspace.as_raw(), bytes, executor), 0);
    let status = launch(workspace.as_raw(), bytes, executor);
    assert_eq!(AclnnStatus(status).name(), Some("ACLNN_ERR_PARAM_INVALID"));
    assert!(raw.message().contains("already used by phase two"), "{}", raw.message());
    stream.synchronize().unwrap();
    still_works(&stream);
}

/// Phase one that asks for more scratch memory each time.
#[allow(clippy::too_many_arguments, reason = "the operator's")]
unsafe extern "C" fn growing(
    query: *const aclTensor,
    key: *const aclTensorList,
    value: *const aclTensorList,
    pse_shift: *const aclTensor,
    atten_mask: *const aclTensor,
    actual_seq_lengths: *const aclIntArray,
    actual_seq_lengths_kv: *const aclIntArray,
    deq_scale1: *const aclTensor,
    quant_scale1: *const aclTensor,
    deq_scale2: *const aclTensor,
    quant_scale2: *const aclTensor,
    quant_offset2: *const aclTensor,
    antiquant_scale: *const aclTensor,
    antiquant_offset: *const aclTensor,
    block_table: *const aclTensor,
    query_padding_size: *const aclTensor,
    kv_padding_size: *const aclTensor,
    num_heads: i64,
    scale: f64,
    pre_tokens: i64,
    next_tokens: i64,
    input_layout: *mut c_char,
    num_key_value_heads: i64,
    sparse_mode: i64,
    inner_precise: i64,
    block_size: i64,
    antiquant_mode: i64,
    softmax_lse_flag: bool,
    attention_out: *const aclTensor,
    softmax_lse: *const aclTensor,
    bytes: *mut u64,
    executor: *mut *mut aclOpExecutor,
) -> i32 {
    static CALLS: AtomicU64 = AtomicU64::new(1);
    let phase_one = harness::functions().aclnnFusedInferAttentionScoreGetWorkspaceSize.unwrap();
    // SAFETY: handed on from the caller.
    unsafe {
        let status = phase_one(
            query,
            key,
            value,
            pse_shift,
            atten_mask,
            actual_seq_lengths,
            actual_seq_lengths_kv,
            deq_scale1,
            quant_scale1,
            deq_scale2,
            quant_scale2,
            quant_offset2,
            antiquant_scale,
            antiquant_offset,
            block_table,
            query_padding_size,
            kv_padding_size,
            num_heads,
            scale,
            pre_tokens,
            next_tokens,
            input_layout,
            num_key_value_heads,
            sparse_mode,
            inner_precise,
            block_size,
            antiquant_mode,
            softmax_lse_flag,
            attention_out,
            softmax_lse,
            bytes,
            executor,
        );
        *bytes += 4096 * CALLS.fetch_add(1, Ordering::Relaxed);
        status
    }
}

#[test]
fn scratch_memory_grows_while_work_uses_it() {
    let functions = Functions {
        aclnnFusedInferAttentionScoreGetWorkspaceSize: Some(growing),
        // Without V4 and V5 the deprecated first version takes the call.
        aclnnFusedInferAttentionScoreV4: None,
        aclnnFusedInferAttentionScoreV5: None,
        ..harness::functions()
    };
    let api = Arc::new(Api::from_functions(functions, "emulation that wants more"));
    // SAFETY: the functions are the emulation's, but for asking for more scratch memory.
    let runtime = unsafe { Runtime::from_api(api) }.unwrap();
    let stream = runtime.device(0).unwrap().stream().unwrap();
    let sample = Sample::new(5);
    let [query, key, value] = sample.upload(&stream);
    let mut most = 0;
    for _ in 0..10 {
        let plan = Sample::attention(stream.device()).plan((&query, &key, &value)).unwrap();
        assert!(plan.workspace_bytes() > most);
        most = plan.workspace_bytes();
        drop(plan.launch(&stream, (&query, &key, &value)).unwrap());
        assert_eq!(stream.workspace_bytes(), most);
    }
    still_works(&stream);
}
