//! What can go wrong, as one type.

use std::ffi::CStr;
use std::fmt;

use ascend_spec::{Rule, Target, UnreleasedTarget, Violation};
use ascend_sys::{Api, LoadError, MissingSymbol, bindings as sys};

use crate::rules;
use crate::status::{AclStatus, AclnnStatus, HcclStatus};

/// The result of everything in this crate that can fail.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// What went wrong. Plain data: printing or sending it needs nothing of the libraries.
///
/// `{:?}` is the text of `{}`, so that a program whose `main` returns a [`Result`] prints what a person can read;
/// `{:#?}` shows variant and fields.
///
/// ```
/// use ascend_attention::Error;
///
/// let error = Error::invalid("rows", 0, "at least 1").fix("leave empty calls out");
/// assert_eq!(
///     format!("{error:?}"),
///     "argument.value: an argument of a function has a value that the function takes; given rows: 0, allowed: at \
///      least 1; fix: leave empty calls out"
/// );
/// assert!(format!("{error:#?}").starts_with("Violation("));
/// ```
#[derive(Clone, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A rule is broken: one of the operator, a lint, a condition of this crate ([`rules`](crate::rules)), or
    /// [`UNSUPPORTED`](ascend_spec::UNSUPPORTED) where the call may be right and this crate can neither check nor
    /// compute it. The rule's level tells which. Found before any function of CANN was called; nothing was changed.
    #[error(transparent)]
    Violation(#[from] Violation),
    /// An `acl*` function failed.
    #[error("{function} returned {status}{}", suffix(message))]
    Acl {
        /// The C function.
        function: &'static str,
        /// What it returned.
        status: AclStatus,
        /// The text of `aclGetRecentErrMsg` about it; empty if there is none.
        message: String,
    },
    /// An `aclnn*` function, or one that handles descriptors and executors, failed.
    #[error("{function} returned {status}{}", suffix(message))]
    Aclnn {
        /// The C function.
        function: &'static str,
        /// What it returned.
        status: AclnnStatus,
        /// The text of `aclGetRecentErrMsg` about it; empty if there is none.
        message: String,
    },
    /// A function of HCCL failed.
    #[error("{function}{} returned {status}{}", of_rank(*rank, *call), suffix(message))]
    Hccl {
        /// The C function.
        function: &'static str,
        /// The rank that called it, if it had one.
        rank: Option<usize>,
        /// The number of the rank's call, from 1 on; none for calls that make or end a communicator.
        call: Option<u64>,
        /// What it returned.
        status: HcclStatus,
        /// The text of `aclGetRecentErrMsg` about it; empty if there is none.
        message: String,
    },
    /// A C function that makes an object returned null.
    #[error("{function} returned null{}", suffix(message))]
    NullHandle {
        /// The C function.
        function: &'static str,
        /// The text of `aclGetRecentErrMsg` about it; empty if there is none.
        message: String,
    },
    /// Memory ran out, even after waiting for memory that dropped buffers still held.
    #[error("out of memory: {function} of {bytes} bytes returned {status}{}", suffix(message))]
    OutOfMemory {
        /// The C function.
        function: &'static str,
        /// What it returned.
        status: AclStatus,
        /// Bytes requested; 0 where the failed function allocates memory of its own.
        bytes: usize,
        /// The text of `aclGetRecentErrMsg` about it; empty if there is none.
        message: String,
    },
    /// A wait took longer than allowed. What was waited for goes on.
    #[error("timeout: {function} returned {status}{}", suffix(message))]
    Timeout {
        /// The C function.
        function: &'static str,
        /// What it returned.
        status: AclStatus,
        /// The text of `aclGetRecentErrMsg` about it; empty if there is none.
        message: String,
    },
    /// The device has no streams left, or no queues for them.
    #[error(
        "{function} returned {status}{}: the device's streams are used up, of which every captured graph takes some; \
         capture fewer sizes or layers, or drop graphs (`graph::CaptureEstimate` counts them)",
        suffix(message)
    )]
    StreamsExhausted {
        /// The C function.
        function: &'static str,
        /// What it returned.
        status: AclStatus,
        /// The text of `aclGetRecentErrMsg` about it; empty if there is none.
        message: String,
    },
    /// The calling thread captures a graph, and the refused operation cannot be part of one.
    #[error("{what} is not possible while this thread captures a graph: {instead}")]
    Capturing {
        /// The refused operation.
        what: &'static str,
        /// What to do instead.
        instead: &'static str,
    },
    /// CANN's libraries cannot be loaded.
    #[error("{0}; to run on the CPU instead, use the emulation (ASCEND_PLATFORM=emulated)")]
    Load(#[from] LoadError),
    /// The installed CANN lacks a function.
    #[error(transparent)]
    MissingSymbol(#[from] MissingSymbol),
    /// The installed CANN has no version of the operator that can express the call.
    #[error("the call needs {needed} or newer{why}, and {library} exports none: install CANN {since} or newer")]
    OperatorVersion {
        /// The version that the call is made with where the library has it.
        needed: &'static str,
        /// Why no older version would do; empty if none is older.
        why: &'static str,
        /// The library that should export it.
        library: &'static str,
        /// The first CANN release that has it.
        since: &'static str,
    },
    /// A case is for another product than the device, or for a newer release than the installed one.
    #[error("the case is for {wanted}, and this is {device}: run it on {instead}")]
    OtherTarget {
        /// The target that the case names.
        wanted: String,
        /// The device, and its CANN release.
        device: Target,
        /// Where the case can be run.
        instead: String,
    },
    /// The installed CANN lacks an operator that has one version only.
    #[error("{library} does not export {operator}: it comes with CANN {since}; install a newer release, or {instead}")]
    MissingOperator {
        /// The operator.
        operator: &'static str,
        /// The library that should export it.
        library: &'static str,
        /// The CANN releases that have it: a name, or `after` one that does not.
        since: &'static str,
        /// What to use without it.
        instead: &'static str,
    },
    /// The chip is of no family that the contract of the operators knows.
    #[error(
        "{name:?} is a chip of no known family, so that no rule of the operators is known for it; known: {}",
        ascend_spec::Soc::NAME_FORMS
    )]
    UnknownProduct {
        /// The name that `aclrtGetSocName` returned, or that the program chose.
        name: String,
    },
    /// The chosen release does not know the chosen chip.
    #[error(transparent)]
    Unreleased(#[from] UnreleasedTarget),
    /// The emulation was requested, but this build has none.
    #[error("this build has no emulation: enable the feature `emulation` of ascend-attention")]
    NoEmulation,
}

/// The fields of each variant, for `{:#?}`.
macro_rules! shown {
    ($($variant:ident $(($of:ident))? $({ $($field:ident),* })?,)*) => {
        impl fmt::Debug for Error {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                if !f.alternate() {
                    return fmt::Display::fmt(self, f);
                }
                match self {
                    $(
                        $(Self::$variant($of) => {
                            f.debug_tuple(stringify!($variant)).field($of).finish()
                        })?
                        $(Self::$variant { $($field),* } => {
                            let mut shown = f.debug_struct(stringify!($variant));
                            $(shown.field(stringify!($field), $field);)*
                            shown.finish()
                        })?
                    )*
                }
            }
        }
    };
}

shown! {
    Violation(error),
    Acl { function, status, message },
    Aclnn { function, status, message },
    Hccl { function, rank, call, status, message },
    NullHandle { function, message },
    OutOfMemory { function, status, bytes, message },
    Timeout { function, status, message },
    StreamsExhausted { function, status, message },
    Capturing { what, instead },
    Load(error),
    MissingSymbol(error),
    OperatorVersion { needed, why, library, since },
    OtherTarget { wanted, device, instead },
    MissingOperator { operator, library, since, instead },
    UnknownProduct { name },
    Unreleased(error),
    NoEmulation {},
}

fn of_rank(rank: Option<usize>, call: Option<u64>) -> String {
    match (rank, call) {
        (Some(rank), Some(call)) => format!(", call {call} of rank {rank},"),
        (Some(rank), None) => format!(" of rank {rank}"),
        (None, _) => String::new(),
    }
}

fn suffix(message: &str) -> String {
    if message.is_empty() { String::new() } else { format!(": {message}") }
}

impl Error {
    /// The refusal of an argument's value, by [`rules::ARGUMENT_VALUE`], also for functions that build on this crate.
    #[cold]
    pub fn invalid(argument: &'static str, given: impl fmt::Display, allowed: impl fmt::Display) -> Self {
        Self::by(&rules::ARGUMENT_VALUE, argument, given, allowed)
    }

    /// The refusal of memory that a call would write and that others use, by [`rules::ARGUMENT_MEMORY`].
    #[cold]
    pub fn shared(argument: &'static str, given: impl fmt::Display, allowed: impl fmt::Display) -> Self {
        Self::by(&rules::ARGUMENT_MEMORY, argument, given, allowed)
    }

    /// The refusal of a launch with something else than was planned, by [`rules::PLAN_TENSORS`].
    #[cold]
    pub fn not_as_planned(argument: &'static str, given: impl fmt::Display, planned: impl fmt::Display) -> Self {
        Self::by(&rules::PLAN_TENSORS, argument, given, planned)
    }

    /// The refusal of an argument by a rule, whose fix it has.
    #[cold]
    pub(crate) fn by(
        rule: &'static Rule,
        argument: &'static str,
        given: impl fmt::Display,
        allowed: impl fmt::Display,
    ) -> Self {
        Self::Violation(rule.broken(format_args!("{argument}: {given}"), allowed))
    }

    /// This error, with another advice where it is a broken rule.
    #[must_use]
    pub fn fix(mut self, fix: impl fmt::Display) -> Self {
        if let Self::Violation(violation) = &mut self {
            violation.fix = fix.to_string();
        }
        self
    }

    /// Whether a call was refused by this rule.
    pub fn breaks(&self, rule: &Rule) -> bool {
        matches!(self, Self::Violation(violation) if violation.rule == rule)
    }
}

/// Returns this thread's latest error text. It has to be read right after the failure, on the thread that got it: any
/// later call may replace it.
#[cold]
fn recent_message(api: &Api) -> String {
    let Ok(recent) = api.aclGetRecentErrMsg() else {
        return String::new();
    };
    // SAFETY: the function takes no argument; the text it returns is NUL-terminated and valid until this thread's next
    // call, and is copied here.
    unsafe {
        let text = recent();
        if text.is_null() { String::new() } else { CStr::from_ptr(text).to_string_lossy().trim().to_owned() }
    }
}

/// The error of an `acl*` function. `bytes` is the size of a failed allocation.
#[cold]
pub(crate) fn acl_error(api: &Api, function: &'static str, status: i32, bytes: usize) -> Error {
    let message = recent_message(api);
    let status = AclStatus(status);
    if status.is_out_of_memory() {
        Error::OutOfMemory { function, status, bytes, message }
    } else if status.is_stream_shortage() {
        Error::StreamsExhausted { function, status, message }
    } else if status.is_timeout() {
        Error::Timeout { function, status, message }
    } else {
        Error::Acl { function, status, message }
    }
}

/// The error of an `aclnn*` function.
#[cold]
pub(crate) fn aclnn_error(api: &Api, function: &'static str, status: i32) -> Error {
    Error::Aclnn { function, status: AclnnStatus(status), message: recent_message(api) }
}

/// The outcome of a function of HCCL, called by a rank as its call of a number.
pub(crate) fn hccl_error(
    api: &Api,
    function: &'static str,
    (rank, call): (Option<usize>, Option<u64>),
    result: sys::HcclResult,
) -> Result<()> {
    match result {
        sys::HcclResult::HCCL_SUCCESS => Ok(()),
        sys::HcclResult(code) => {
            Err(Error::Hccl { function, rank, call, status: HcclStatus(code), message: recent_message(api) })
        }
    }
}

/// The error of a function that returned no object.
#[cold]
pub(crate) fn null_error(api: &Api, function: &'static str) -> Error {
    Error::NullHandle { function, message: recent_message(api) }
}

/// Calls a function of the table that returns `aclError`, and turns everything but 0 into an [`Error`].
/// The expansion is unsafe where calling the function is.
macro_rules! acl {
    ($api:expr, $function:ident ( $($argument:expr),* $(,)? )) => {{
        let api: &::ascend_sys::Api = $api;
        let status = api.$function()?($($argument),*);
        if status == ::ascend_sys::bindings::ACL_SUCCESS {
            ::core::result::Result::Ok(())
        } else {
            ::core::result::Result::Err($crate::error::acl_error(api, stringify!($function), status, 0))
        }
    }};
}

/// As `acl!`, but for functions that return `aclnnStatus`.
macro_rules! aclnn {
    ($api:expr, $function:ident ( $($argument:expr),* $(,)? )) => {{
        let api: &::ascend_sys::Api = $api;
        let status = api.$function()?($($argument),*);
        if status == ::ascend_sys::bindings::ACLNN_SUCCESS {
            ::core::result::Result::Ok(())
        } else {
            ::core::result::Result::Err($crate::error::aclnn_error(api, stringify!($function), status))
        }
    }};
}

pub(crate) use {acl, aclnn};

#[cfg(test)]
mod tests {
    use std::ffi::c_char;

    use ascend_sys::Functions;

    use super::*;

    unsafe extern "C" fn recent() -> *const c_char {
        c"EZ9999: the reason\n".as_ptr()
    }

    fn api() -> Api {
        let functions = Functions { aclGetRecentErrMsg: Some(recent), ..Functions::default() };
        Api::from_functions(functions, "a test")
    }

    #[test]
    fn kinds_follow_the_code_and_carry_the_text() {
        let error = acl_error(&api(), "aclrtMalloc", 207_018, 64);
        assert_eq!(
            error.to_string(),
            "out of memory: aclrtMalloc of 64 bytes returned 207018 (ACL_ERROR_RT_DEVICE_OOM): EZ9999: the reason"
        );
        let timeout = acl_error(&api(), "aclrtSynchronizeStreamWithTimeout", 507_046, 0);
        assert!(matches!(timeout, Error::Timeout { .. }));
        let other = acl_error(&api(), "aclrtFree", 107_017, 0);
        assert!(matches!(&other, Error::Acl { message, .. } if message == "EZ9999: the reason"));
        let aclnn = aclnn_error(&api(), "aclnnX", 161_002);
        assert!(matches!(aclnn, Error::Aclnn { status: AclnnStatus(161_002), .. }));
    }

    #[test]
    fn a_missing_message_function_is_no_error() {
        let none = Api::from_functions(Functions::default(), "a test");
        let error = acl_error(&none, "aclrtFree", 107_017, 0);
        assert_eq!(error.to_string(), "aclrtFree returned 107017 (ACL_ERROR_RT_INVALID_HANDLE)");
    }

    #[test]
    fn errors_can_be_sent_and_stay_small() {
        fn sent<T: Send + Sync + std::error::Error + 'static>() {}
        sent::<Error>();
        assert!(size_of::<Error>() <= 128);
    }
}
