//! Status codes, and the calling thread's most recent error.

use ascend_spec::Violation;
use ascend_sys::bindings as sys;
use std::any::Any;
use std::borrow::Cow;
use std::cell::RefCell;
use std::ffi::{CString, c_char};
use std::fmt::Display;
use std::io::{self, Write as _};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::ptr;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, Ordering};

/// Gives the toolkit's status macros, whose Rust type the bindings choose, the type of a status.
macro_rules! codes {
    ($($name:ident = $source:ident;)*) => {
        $(
            #[allow(clippy::unnecessary_cast, reason = "the bindings of some toolkits choose i32")]
            pub(crate) const $name: i32 = sys::$source as i32;
        )*
    };
}

codes! {
    SUCCESS = ACL_SUCCESS;
    NULL_PARAM = ACL_ERROR_INVALID_PARAM;
    UNINITIALIZED = ACL_ERROR_UNINITIALIZE;
    REPEAT_INITIALIZE = ACL_ERROR_REPEAT_INITIALIZE;
    INVALID_FILE = ACL_ERROR_INVALID_FILE;
    REPEAT_FINALIZE = ACL_ERROR_REPEAT_FINALIZE;
    FEATURE_UNSUPPORTED = ACL_ERROR_FEATURE_UNSUPPORTED;
    INTERNAL = ACL_ERROR_INTERNAL_ERROR;
    PARAM_INVALID = ACL_ERROR_RT_PARAM_INVALID;
    INVALID_DEVICE = ACL_ERROR_RT_INVALID_DEVICEID;
    CONTEXT_NULL = ACL_ERROR_RT_CONTEXT_NULL;
    STREAM_CONTEXT = ACL_ERROR_RT_STREAM_CONTEXT;
    TIMESTAMP_INVALID = ACL_ERROR_RT_EVENT_TIMESTAMP_INVALID;
    TIMESTAMP_REVERSAL = ACL_ERROR_RT_EVENT_TIMESTAMP_REVERSAL;
    INVALID_HANDLE = ACL_ERROR_RT_INVALID_HANDLE;
    REPORT_TIMEOUT = ACL_ERROR_WAIT_CALLBACK_TIMEOUT;
    STREAM_SUBSCRIBED = ACL_ERROR_RT_STREAM_SUBSCRIBE;
    THREAD_SUBSCRIBED = ACL_ERROR_RT_THREAD_SUBSCRIBE;
    NO_CALLBACK_THREAD = ACL_ERROR_RT_STREAM_NO_CB_REG;
    NOT_SUBSCRIBED = ACL_ERROR_THREAD_NOT_SUBSCRIBE;
    TASK_TIMEOUT = ACL_ERROR_RT_TASK_TIMEOUT;
    MEMORY_TYPE = ACL_ERROR_RT_INVALID_MEMORY_TYPE;
    SYSPARAM_NOT_SET = ACL_ERROR_RT_SYSPARAMOPT_NOT_SET;
    CAPTURE_DEPENDENCY = ACL_ERROR_RT_CAPTURE_DEPENDENCY;
    MODEL_CAPTURED = ACL_ERROR_RT_MODEL_CAPTURED;
    STREAM_UNJOINED = ACL_ERROR_RT_STREAM_UNJOINED;
    STREAM_CAPTURED = ACL_ERROR_RT_STREAM_CAPTURED;
    EVENT_CAPTURED = ACL_ERROR_RT_EVENT_CAPTURED;
    STREAM_NOT_CAPTURED = ACL_ERROR_RT_STREAM_NOT_CAPTURED;
    CAPTURE_MODE = ACL_ERROR_RT_CAPTURE_MODE_NOT_SUPPORT;
    CAPTURE_IMPLICIT = ACL_ERROR_RT_STREAM_CAPTURE_IMPLICIT;
    CAPTURE_CONFLICT = ACL_ERROR_STREAM_CAPTURE_CONFLICT;
    CAPTURE_INVALIDATED = ACL_ERROR_RT_STREAM_CAPTURE_INVALIDATED;
    TASK_GROUP_STATUS = ACL_ERROR_STREAM_TASK_GROUP_STATUS;
    NOT_SUPPORTED = ACL_ERROR_RT_FEATURE_NOT_SUPPORT;
    MEMORY_ALLOCATION = ACL_ERROR_RT_MEMORY_ALLOCATION;
    MEMORY_FREE = ACL_ERROR_RT_MEMORY_FREE;
    NO_STREAM_RESOURCE = ACL_ERROR_RT_NO_STREAM_RESOURCE;
    DEVICE_INTERNAL = ACL_ERROR_RT_INTERNAL_ERROR;
    AICORE_EXCEPTION = ACL_ERROR_RT_AICORE_EXCEPTION;
    STREAM_SYNC_TIMEOUT = ACL_ERROR_RT_STREAM_SYNC_TIMEOUT;
    EVENT_SYNC_TIMEOUT = ACL_ERROR_RT_EVENT_SYNC_TIMEOUT;
    ACLNN_NULLPTR = ACLNN_ERR_PARAM_NULLPTR;
    ACLNN_INVALID = ACLNN_ERR_PARAM_INVALID;
    ACLNN_RUNTIME = ACLNN_ERR_RUNTIME_ERROR;
    ACLNN_INNER = ACLNN_ERR_INNER;
    ACLNN_INNER_NULLPTR = ACLNN_ERR_INNER_NULLPTR;
}

/// Gives results of collectives the type of a status.
macro_rules! hccl_codes {
    ($($name:ident = $source:ident;)*) => {
        $( pub(crate) const $name: i32 = sys::HcclResult::$source.0 as i32; )*
    };
}

hccl_codes! {
    HCCL_PARA = HCCL_E_PARA;
    HCCL_PTR = HCCL_E_PTR;
    HCCL_INTERNAL = HCCL_E_INTERNAL;
    HCCL_NOT_SUPPORTED = HCCL_E_NOT_SUPPORT;
    HCCL_TIMEOUT = HCCL_E_TIMEOUT;
    HCCL_RUNTIME = HCCL_E_RUNTIME;
}

/// Code of a collective that ended without the other ranks; no header names it.
pub(crate) const COLLECTIVE_FAILED: i32 = 507_048;

/// Code of a capture ended on another thread than it began on; later headers than 8.1 name it.
pub(crate) const CAPTURE_WRONG_THREAD: i32 = 107_038;

/// Code of an asynchronous copy that pageable host memory makes a synchronous one, while a capture forbids these; later
/// headers than 8.1 name it.
pub(crate) const CAPTURE_BLOCKS_ASYNC: i32 = 107_041;

/// Codes of registered host memory; later headers than 8.1 name them.
pub(crate) const ALREADY_REGISTERED: i32 = 507_910;
pub(crate) const NOT_REGISTERED: i32 = 507_911;

/// Why a call fails: a status and a text for `aclGetRecentErrMsg`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Failure {
    pub code: i32,
    pub message: Cow<'static, str>,
}

impl Failure {
    pub(crate) fn new(code: i32, message: impl Into<Cow<'static, str>>) -> Self {
        Failure { code, message: message.into() }
    }

    /// Turns this failure of the runtime into the failure that an `aclnn*` function returns for it.
    pub(crate) fn of_runtime(self) -> Self {
        Failure { message: format!("runtime error {}: {}", self.code, self.message).into(), code: ACLNN_RUNTIME }
    }
}

/// A call that the contract refuses.
impl From<Violation> for Failure {
    fn from(refusal: Violation) -> Self {
        Failure::new(refusal.status(), refusal.to_string())
    }
}

pub(crate) type Outcome<T = ()> = Result<T, Failure>;

/// Builds a [`Failure`] from a code and a format string.
macro_rules! failure {
    ($code:expr, $($text:tt)*) => {
        $crate::status::Failure::new($code, ::std::format!($($text)*))
    };
}
pub(crate) use failure;

#[derive(Default)]
struct RecentError {
    /// Message of the latest error, until [`take_message`] takes it.
    message: Option<CString>,
    /// The message that was taken last, kept alive for its reader.
    handed_out: Option<CString>,
    /// Status of the latest failing `acl*` call.
    code: i32,
    /// Calls that have failed.
    failures: u64,
}

thread_local! {
    static RECENT: RefCell<RecentError> = RefCell::new(RecentError::default());
}

/// Runs `with` on the thread's record; does nothing while the thread is being torn down.
fn recent<T: Default>(with: impl FnOnce(&mut RecentError) -> T) -> T {
    RECENT.try_with(|recent| recent.try_borrow_mut().map(|mut r| with(&mut r)).ok()).ok().flatten().unwrap_or_default()
}

/// Takes the latest message as a C string that stays valid until the thread calls this again; null if there is none.
pub(crate) fn take_message() -> *const c_char {
    let text = recent(|recent| {
        recent.handed_out = recent.message.take();
        recent.handed_out.as_ref().map(|text| Pointer(text.as_ptr()))
    });
    text.map_or(ptr::null(), |text| text.0)
}

/// A pointer with a default value, as [`recent`] needs it.
struct Pointer(*const c_char);

/// The thread's latest `aclError`. With `forget` the next call returns success.
pub(crate) fn last_error(forget: bool) -> i32 {
    recent(|recent| {
        let code = recent.code;
        if forget {
            recent.code = SUCCESS;
        }
        code
    })
}

/// How many calls of this thread have failed.
pub(crate) fn failures() -> u64 {
    recent(|recent| recent.failures)
}

/// The latest message, which is not taken.
pub(crate) fn message() -> Option<String> {
    recent(|recent| Some(recent.message.as_ref()?.to_string_lossy().into_owned()))
}

fn remember(failure: &Failure, is_acl: bool) {
    let bytes: Vec<u8> = failure.message.bytes().filter(|&b| b != 0).collect();
    recent(|recent| {
        recent.message = CString::new(bytes).ok();
        recent.failures = recent.failures.wrapping_add(1);
        if is_acl {
            recent.code = failure.code;
        }
    });
}

/// Writes a line to stderr. A stderr that is closed or full is no reason for a call to fail.
pub(crate) fn warn(text: impl Display) {
    let _ = writeln!(io::stderr(), "ascend-emu: {text}");
}

/// Text of a caught panic.
pub(crate) fn panic_text(payload: &(dyn Any + Send)) -> &str {
    payload
        .downcast_ref::<&'static str>()
        .copied()
        .or_else(|| payload.downcast_ref::<String>().map(String::as_str))
        .unwrap_or("no text")
}

/// Runs a body, turning a panic into a failure with `code`.
pub(crate) fn contain<T>(code: i32, body: impl FnOnce() -> Outcome<T>) -> Outcome<T> {
    // Shared state is behind `Lock`s, which a panic leaves consistent.
    catch_unwind(AssertUnwindSafe(body)).unwrap_or_else(|payload| {
        Err(failure!(code, "internal error of the emulator: {}", panic_text(payload.as_ref())))
    })
}

/// Refuses a call in a child of a process that uses the emulator.
fn refuse_forked() -> Outcome {
    if !forked() {
        return Ok(());
    }
    Err(failure!(
        NOT_SUPPORTED,
        "this process was forked after aclInit: streams and their work stay with the parent and would never be over \
         here; fork before aclInit, or start the child by exec"
    ))
}

/// Body of every `acl*` function that returns a status.
pub(crate) fn acl(body: impl FnOnce() -> Outcome) -> i32 {
    status_of(true, body)
}

/// Body of an `acl*` function whose failure is a normal result: it sets the message but not the thread's last error.
pub(crate) fn acl_answer(body: impl FnOnce() -> Outcome) -> i32 {
    status_of(false, body)
}

fn status_of(is_last_error: bool, body: impl FnOnce() -> Outcome) -> i32 {
    match contain(INTERNAL, || refuse_forked().and_then(|()| body())) {
        Ok(()) => SUCCESS,
        Err(failure) => {
            remember(&failure, is_last_error);
            failure.code
        }
    }
}

/// Body of every function that returns an `aclnnStatus`.
pub(crate) fn aclnn(body: impl FnOnce() -> Outcome) -> i32 {
    let own = || refuse_forked().map_err(Failure::of_runtime);
    match contain(ACLNN_INNER, || own().and_then(|()| body())) {
        Ok(()) => SUCCESS,
        Err(failure) => {
            remember(&failure, false);
            failure.code
        }
    }
}

/// The codes of HCCL's results. A failure with another code is one of the runtime.
const HCCL_CODES: std::ops::RangeInclusive<i32> = 0..=sys::HcclResult::HCCL_E_IN_STATUS.0 as i32;

/// Body of every function that returns a `HcclResult`.
pub(crate) fn hccl(body: impl FnOnce() -> Outcome) -> sys::HcclResult {
    let Err(mut failure) = contain(HCCL_INTERNAL, || refuse_forked().and_then(|()| body())) else {
        return sys::HcclResult::HCCL_SUCCESS;
    };
    if !HCCL_CODES.contains(&failure.code) {
        failure = Failure {
            message: format!("runtime error {}: {}", failure.code, failure.message).into(),
            code: HCCL_RUNTIME,
        };
    }
    remember(&failure, false);
    sys::HcclResult(failure.code.unsigned_abs())
}

/// `ERROR_INTERNAL_ERROR` of ATB's statuses.
const ATB_INTERNAL: i32 = 3;

/// Body of every function of ATB, whose failures have ATB's statuses.
pub(crate) fn atb<T>(body: impl FnOnce() -> Outcome<T>) -> Outcome<T> {
    let outcome = contain(ATB_INTERNAL, || refuse_forked().and_then(|()| body()));
    outcome.inspect_err(|failure| remember(failure, false))
}

/// Body of every function that returns something else; on failure it returns `on_failure`.
pub(crate) fn value<T>(on_failure: T, body: impl FnOnce() -> Outcome<T>) -> T {
    let outcome = contain(INTERNAL, || refuse_forked().and_then(|()| body()));
    outcome.unwrap_or_else(|failure| {
        remember(&failure, false);
        on_failure
    })
}

/// Whether this process was forked from one that uses the emulator.
///
/// A fork copies the forking thread alone. The threads of streams and of the kernels are missing in the child, and
/// locks that they held stay held: nothing queued would ever run, and any call might wait for ever. Each call in the
/// child is refused instead.
static FORKED: AtomicBool = AtomicBool::new(false);

unsafe extern "C" fn in_child() {
    FORKED.store(true, Ordering::Relaxed);
}

/// Makes [`forked`] true in children of this process from now on. Fails with the system's error number.
pub(crate) fn watch_forks() -> Result<(), i32> {
    static REGISTERED: OnceLock<i32> = OnceLock::new();
    let status = *REGISTERED.get_or_init(|| {
        // SAFETY: the handler is a function of this library and does nothing but store a flag, which is allowed in the
        // child of a process with threads.
        unsafe { libc::pthread_atfork(None, None, Some(in_child)) }
    });
    match status {
        0 => Ok(()),
        error => Err(error),
    }
}

/// Whether this process was forked from one that called [`watch_forks`].
pub(crate) fn forked() -> bool {
    FORKED.load(Ordering::Relaxed)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::ffi::CStr;

    fn message() -> Option<String> {
        let text = take_message();
        if text.is_null() {
            return None;
        }
        // SAFETY: a non-null result of `take_message` is a C string valid until the next call on this thread.
        Some(unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned())
    }

    #[test]
    fn messages_are_taken_once_and_stay_on_their_thread() {
        assert_eq!(message(), None);
        assert_eq!(acl(|| Err(failure!(PARAM_INVALID, "value {}", 7))), 107_000);
        std::thread::spawn(|| assert_eq!(message(), None)).join().unwrap();
        assert_eq!(message().as_deref(), Some("value 7"));
        assert_eq!(message(), None);
    }

    #[test]
    fn a_panic_becomes_a_status() {
        assert_eq!(acl(|| panic!("boom")), INTERNAL);
        assert!(message().unwrap().contains("boom"));
        assert_eq!(aclnn(|| panic!("boom")), ACLNN_INNER);
        assert_eq!(value(5, || panic!("boom")), 5);
    }

    #[test]
    fn last_error_is_of_acl_functions() {
        assert_eq!(last_error(true), SUCCESS);
        acl(|| Err(failure!(PARAM_INVALID, "x")));
        aclnn(|| Err(failure!(ACLNN_INVALID, "y")));
        assert_eq!(last_error(false), PARAM_INVALID);
        assert_eq!(last_error(true), PARAM_INVALID);
        assert_eq!(last_error(true), SUCCESS);
    }

    #[test]
    fn zero_bytes_do_not_lose_a_message() {
        acl(|| Err(failure!(PARAM_INVALID, "a\0b")));
        assert_eq!(message().as_deref(), Some("ab"));
    }
}
