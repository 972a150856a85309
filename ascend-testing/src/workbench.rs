//! What the tests share: a context of their own, memory, streams that can be held up, and one attention call.

#![allow(
    clippy::undocumented_unsafe_blocks,
    clippy::not_unsafe_ptr_arg_deref,
    clippy::new_without_default,
    reason = "tests call the C functions as C programs do, and end where a pointer is wrong"
)]

use crate::alone::alone;
use approx::abs_diff_eq;
use ascend_emu::abi::*;
use ascend_sys::bindings as sys;
use ascend_sys::bindings::{
    aclDataType, aclFormat, aclOpExecutor, aclTensor, aclTensorList, aclrtMemMallocPolicy, aclrtMemcpyKind, aclrtStream,
};
use half::f16;
use std::ffi::{CStr, c_void};
use std::ptr::{self, null, null_mut};
use std::sync::Once;

pub const H2D: aclrtMemcpyKind = aclrtMemcpyKind::ACL_MEMCPY_HOST_TO_DEVICE;
pub const D2H: aclrtMemcpyKind = aclrtMemcpyKind::ACL_MEMCPY_DEVICE_TO_HOST;
pub const D2D: aclrtMemcpyKind = aclrtMemcpyKind::ACL_MEMCPY_DEVICE_TO_DEVICE;
pub const HUGE_FIRST: aclrtMemMallocPolicy = aclrtMemMallocPolicy::ACL_MEM_MALLOC_HUGE_FIRST;
pub const RELAXED: sys::aclmdlRICaptureMode = sys::aclmdlRICaptureMode::ACL_MODEL_RI_CAPTURE_MODE_RELAXED;

/// The latest error message of this thread.
pub fn message() -> String {
    let text = unsafe { aclGetRecentErrMsg() };
    if text.is_null() {
        return String::new();
    }
    unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned()
}

/// Asserts success.
#[track_caller]
pub fn ok(status: i32) {
    assert_eq!(status, 0, "{}", message());
}

/// Asserts a failure with a status and a message that has all these parts.
#[track_caller]
pub fn fails(status: i32, code: i32, parts: &[&str]) {
    let message = message();
    assert_eq!(status, code, "{message}");
    for part in parts {
        assert!(message.contains(part), "`{part}` is not in `{message}`");
    }
}

/// `aclInit`, once in the process.
pub fn init() {
    static INIT: Once = Once::new();
    INIT.call_once(|| ok(unsafe { aclInit(null()) }));
}

/// A context of its own on device 0, current on this thread.
pub struct Bench {
    pub context: *mut c_void,
}

impl Bench {
    pub fn new() -> Self {
        init();
        let mut context = null_mut();
        ok(unsafe { aclrtCreateContext(&mut context, 0) });
        Bench { context }
    }

    /// Makes the context this thread's.
    pub fn enter(&self) {
        ok(unsafe { aclrtSetCurrentContext(self.context) });
    }
}

impl Drop for Bench {
    fn drop(&mut self) {
        if !std::thread::panicking() {
            ok(unsafe { aclrtDestroyContext(self.context) });
        }
    }
}

pub fn malloc(bytes: usize) -> *mut c_void {
    let mut at = null_mut();
    ok(unsafe { aclrtMalloc(&mut at, bytes, HUGE_FIRST) });
    at
}

pub fn free(at: *mut c_void) {
    ok(unsafe { aclrtFree(at) });
}

/// Memory of the device that is given back when it is dropped, or a null pointer for no bytes.
#[derive(Debug)]
pub struct Memory {
    pub at: *mut c_void,
}

impl Memory {
    pub fn new(bytes: usize) -> Self {
        Memory { at: malloc(bytes) }
    }

    pub fn of(bytes: &[u8]) -> Self {
        let at = match bytes {
            [] => null_mut(),
            _ => upload(bytes),
        };
        Memory { at }
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        if !self.at.is_null() && !std::thread::panicking() {
            free(self.at);
        }
    }
}

pub fn upload<T: Copy>(values: &[T]) -> *mut c_void {
    let bytes = size_of_val(values);
    let at = malloc(bytes);
    ok(unsafe { aclrtMemcpy(at, bytes, values.as_ptr().cast(), bytes, H2D) });
    at
}

pub fn download<T: Copy + Default>(at: *const c_void, count: usize) -> Vec<T> {
    let mut values = vec![T::default(); count];
    let bytes = size_of_val(values.as_slice());
    ok(unsafe { aclrtMemcpy(values.as_mut_ptr().cast(), bytes, at, bytes, D2H) });
    values
}

pub fn stream() -> aclrtStream {
    let mut stream = null_mut();
    ok(unsafe { aclrtCreateStream(&mut stream) });
    stream
}

pub fn event() -> *mut c_void {
    let mut event = null_mut();
    ok(unsafe { aclrtCreateEvent(&mut event) });
    event
}

pub fn external_event() -> *mut c_void {
    let mut event = null_mut();
    ok(unsafe { aclrtCreateEventWithFlag(&mut event, sys::ACL_EVENT_EXTERNAL) });
    event
}

pub fn sync(stream: aclrtStream) {
    ok(unsafe { aclrtSynchronizeStream(stream) });
}

pub fn destroy(stream: aclrtStream) {
    ok(unsafe { aclrtDestroyStream(stream) });
}

/// Holds streams up until opened: a graph that waits for an external event.
pub struct Gate {
    event: *mut c_void,
    graph: *mut c_void,
    opener: aclrtStream,
}

impl Gate {
    pub fn new() -> Self {
        let (event, opener) = (external_event(), stream());
        let mut graph = null_mut();
        unsafe {
            ok(aclmdlRICaptureBegin(opener, RELAXED));
            ok(aclrtStreamWaitEvent(opener, event));
            ok(aclmdlRICaptureEnd(opener, &mut graph));
        }
        Gate { event, graph, opener }
    }

    /// Work queued to the stream from now on waits for the gate.
    pub fn hold(&self, stream: aclrtStream) {
        ok(unsafe { aclmdlRIExecuteAsync(self.graph, stream) });
    }

    pub fn open(&self) {
        unsafe {
            ok(aclrtRecordEvent(self.event, self.opener));
        }
        sync(self.opener);
    }

    pub fn destroy(self) {
        unsafe {
            ok(aclmdlRIDestroy(self.graph));
            ok(aclrtDestroyEvent(self.event));
        }
        destroy(self.opener);
    }
}

pub fn tensor(dtype: aclDataType, shape: &[i64], data: *mut c_void) -> *mut aclTensor {
    tensor_of(aclFormat::ACL_FORMAT_ND, dtype, shape, data)
}

/// A tensor in the format that PyTorch's plugin gives a tensor of this number of axes.
pub fn torch_tensor(dtype: aclDataType, shape: &[i64], data: *mut c_void) -> *mut aclTensor {
    let format = match shape.len() {
        3 => aclFormat::ACL_FORMAT_NCL,
        4 => aclFormat::ACL_FORMAT_NCHW,
        5 => aclFormat::ACL_FORMAT_NCDHW,
        _ => aclFormat::ACL_FORMAT_ND,
    };
    tensor_of(format, dtype, shape, data)
}

pub fn tensor_of(format: aclFormat, dtype: aclDataType, shape: &[i64], data: *mut c_void) -> *mut aclTensor {
    let mut strides = vec![1i64; shape.len()];
    for i in (1..shape.len()).rev() {
        strides[i - 1] = strides[i] * shape[i];
    }
    let tensor = unsafe {
        aclCreateTensor(
            shape.as_ptr(),
            shape.len() as u64,
            dtype,
            strides.as_ptr(),
            0,
            format,
            shape.as_ptr(),
            shape.len() as u64,
            data,
        )
    };
    assert!(!tensor.is_null(), "{}", message());
    tensor
}

pub fn list(tensors: &[*mut aclTensor]) -> *mut aclTensorList {
    let members: Vec<*const aclTensor> = tensors.iter().map(|&t| t.cast_const()).collect();
    let list = unsafe { aclCreateTensorList(members.as_ptr(), members.len() as u64) };
    assert!(!list.is_null(), "{}", message());
    list
}

/// Sequence length and head dimension of [`Call`].
pub const S: usize = 4;
pub const D: usize = 16;
const SHAPE: [i64; 4] = [1, 1, S as i64, D as i64];
/// What outputs hold before a launch.
pub const POISON: u16 = 0x7e55;

/// One attention call, V1, BNSD, f16, 1 x 1 x [`S`] x [`D`], with the log-sum-exp.
pub struct Call {
    pub q: *mut c_void,
    pub k: *mut c_void,
    pub v: *mut c_void,
    pub out: *mut c_void,
    pub lse: *mut c_void,
    pub tensors: [*mut aclTensor; 3],
    pub key: *mut aclTensorList,
    pub value: *mut aclTensorList,
    pub workspace: *mut c_void,
    pub workspace_bytes: u64,
}

/// Values between -1 and 1 that f16 holds exactly.
pub fn numbers(seed: usize, count: usize) -> Vec<f16> {
    (0..count).map(|i| f16::from_f32(((i * 37 + seed * 101) % 65) as f32 / 32.0 - 1.0)).collect()
}

/// Softmax(Q K^T / sqrt(D)) V in double precision, and the log-sum-exp.
pub fn expected(q: &[f16], k: &[f16], v: &[f16]) -> (Vec<f64>, Vec<f64>) {
    let scale = 1.0 / (D as f64).sqrt();
    let (mut out, mut lse) = (vec![0.0; S * D], vec![0.0; S]);
    for i in 0..S {
        let dot = |j: usize| (0..D).map(|d| q[i * D + d].to_f64() * k[j * D + d].to_f64()).sum::<f64>();
        let scores: Vec<f64> = (0..S).map(|j| dot(j) * scale).collect();
        let sum: f64 = scores.iter().map(|s| s.exp()).sum();
        lse[i] = sum.ln();
        for d in 0..D {
            out[i * D + d] = (0..S).map(|j| scores[j].exp() / sum * v[j * D + d].to_f64()).sum();
        }
    }
    (out, lse)
}

impl Call {
    /// With inputs made from a seed and poisoned outputs.
    pub fn new(seed: usize) -> Self {
        let input = |n: usize| upload(&numbers(seed + n, S * D));
        let (q, k, v) = (input(0), input(1), input(2));
        let (out, lse) = (malloc(S * D * 2), malloc(S * 4));
        let half = aclDataType::ACL_FLOAT16;
        let call = Call {
            q,
            k,
            v,
            out,
            lse,
            tensors: [
                tensor(half, &SHAPE, q),
                tensor(half, &SHAPE, out),
                tensor(aclDataType::ACL_FLOAT, &[1, 1, S as i64, 1], lse),
            ],
            key: list(&[tensor(half, &SHAPE, k)]),
            value: list(&[tensor(half, &SHAPE, v)]),
            workspace: malloc(16 << 20),
            workspace_bytes: 16 << 20,
        };
        call.poison();
        call
    }

    pub fn poison(&self) {
        let poison = [POISON; S * D];
        unsafe {
            ok(aclrtMemcpy(self.out, S * D * 2, poison.as_ptr().cast(), S * D * 2, H2D));
            ok(aclrtMemset(self.lse, S * 4, 0x55, S * 4));
        }
    }

    /// Phase one.
    pub fn prepare(&self) -> *mut aclOpExecutor {
        let (mut bytes, mut executor) = (0, null_mut());
        ok(self.try_prepare(self.tensors[0], 0, &mut bytes, &mut executor));
        assert_eq!(bytes, self.workspace_bytes);
        executor
    }

    pub fn try_prepare(
        &self,
        query: *const aclTensor,
        sparse_mode: i64,
        bytes: *mut u64,
        executor: *mut *mut aclOpExecutor,
    ) -> i32 {
        let layout = c"BNSD";
        unsafe {
            aclnnFusedInferAttentionScoreGetWorkspaceSize(
                query,
                self.key,
                self.value,
                null(),
                null(),
                null(),
                null(),
                null(),
                null(),
                null(),
                null(),
                null(),
                null(),
                null(),
                null(),
                null(),
                null(),
                1,
                1.0 / (D as f64).sqrt(),
                i64::from(i32::MAX),
                i64::from(i32::MAX),
                layout.as_ptr().cast_mut(),
                0,
                sparse_mode,
                0,
                0,
                0,
                true,
                self.tensors[1],
                self.tensors[2],
                bytes,
                executor,
            )
        }
    }

    /// Phase two.
    pub fn launch(&self, executor: *mut aclOpExecutor, stream: aclrtStream) -> i32 {
        unsafe { aclnnFusedInferAttentionScore(self.workspace, self.workspace_bytes, executor, stream) }
    }

    pub fn run(&self, stream: aclrtStream) {
        ok(self.launch(self.prepare(), stream));
    }

    /// Whether the output is what attention of the inputs made from `seed` is.
    #[track_caller]
    pub fn check(&self, seed: usize) {
        self.check_at(seed, self.out);
    }

    #[track_caller]
    pub fn check_at(&self, seed: usize, out: *const c_void) {
        let input = |n: usize| numbers(seed + n, S * D);
        let (want, want_lse) = expected(&input(0), &input(1), &input(2));
        let got: Vec<f16> = download(out, S * D);
        for (got, want) in got.iter().zip(&want) {
            assert!(abs_diff_eq!(got.to_f64(), want, epsilon = 2e-3), "{got} is not {want}");
        }
        let got: Vec<f32> = download(self.lse, S);
        for (got, want) in got.iter().zip(&want_lse) {
            assert!(abs_diff_eq!(f64::from(*got), want, epsilon = 1e-4), "lse {got} is not {want}");
        }
    }

    /// Whether nothing was written.
    pub fn is_poisoned(&self) -> bool {
        let got: Vec<u16> = download(self.out, S * D);
        got.iter().all(|&bits| bits == POISON)
    }

    pub fn destroy(self) {
        unsafe {
            for tensor in self.tensors {
                ok(aclDestroyTensor(tensor));
            }
            ok(aclDestroyTensorList(self.key));
            ok(aclDestroyTensorList(self.value));
        }
        for at in [self.q, self.k, self.v, self.out, self.lse, self.workspace] {
            free(at);
        }
    }
}

/// An address that is nothing's.
pub fn nowhere() -> *mut c_void {
    ptr::without_provenance_mut(0x10)
}

/// Like [`alone`], and the process finds little more host memory than the emulator has taken when it starts.
#[track_caller]
pub fn with_little_memory(name: &str, body: impl FnOnce()) {
    const MORE: u64 = 256 << 20;
    alone(name, || {
        // What the emulator reserves for devices, and the threads that compute.
        let bench = Bench::new();
        free(malloc(1));
        sync(null_mut());
        drop(bench);
        let pages = std::fs::read_to_string("/proc/self/statm").unwrap();
        let pages: u64 = pages.split(' ').next().unwrap().parse().unwrap();
        let page = unsafe { libc::sysconf(libc::_SC_PAGESIZE) } as u64;
        let most = pages * page + MORE;
        let limit = libc::rlimit { rlim_cur: most, rlim_max: most };
        assert_eq!(unsafe { libc::setrlimit(libc::RLIMIT_AS, &limit) }, 0);
        body();
    });
}
