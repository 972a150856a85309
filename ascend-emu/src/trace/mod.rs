//! `ASCEND_EMU_TRACE`: a line of JSON for each call of the C ABI.

mod decode;
mod json;
pub(crate) mod value;

use crate::config::config;
use crate::status;
use decode::Arguments;
use json::Json;
use std::fs::File;
use std::io::Write as _;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU64, Ordering};
use std::time::{Instant, SystemTime, UNIX_EPOCH};
use value::Value;

/// The file that calls are traced to.
#[derive(Debug)]
pub(crate) struct Trace {
    /// Opened to append, so that lines of several threads and processes do not mix: each is written at once.
    file: &'static File,
    calls: AtomicU64,
    failed: AtomicBool,
}

impl Trace {
    /// Notes a call before it is made.
    ///
    /// # Safety
    ///
    /// The arguments keep the contract of [`abi`](crate::abi).
    pub(crate) unsafe fn begin<'a>(&'a self, function: &'static str, arguments: Arguments<'a>) -> Line<'a> {
        let sequence = self.calls.fetch_add(1, Ordering::Relaxed);
        let text = contain(|| {
            let mut json = Json::default();
            json.key("arguments").object(|json| {
                for (name, value) in arguments {
                    // SAFETY: the caller's promise.
                    unsafe { decode::argument(json, function, name, value, arguments) };
                }
            });
            json
        });
        Line {
            trace: self,
            function,
            arguments,
            sequence,
            decoded: text,
            failures: status::failures(),
            time: SystemTime::now(),
            start: Instant::now(),
        }
    }

    /// Writes a line; stderr names the first failure.
    fn write(&self, line: &str) {
        if let Err(error) = { self.file }.write_all(line.as_bytes())
            && !self.failed.swap(true, Ordering::Relaxed)
        {
            status::warn(format_args!("ASCEND_EMU_TRACE: a line cannot be written: {error}"));
        }
    }
}

/// A call that is being made.
#[derive(Debug)]
pub(crate) struct Line<'a> {
    trace: &'a Trace,
    function: &'static str,
    arguments: Arguments<'a>,
    sequence: u64,
    decoded: Option<Json>,
    /// Failures of this thread before the call.
    failures: u64,
    time: SystemTime,
    start: Instant,
}

impl Line<'_> {
    /// Notes how the call ended, and writes its line.
    ///
    /// # Safety
    ///
    /// `returned` is what the function returned, of the type `result`, for the arguments of [`Trace::begin`].
    pub(crate) unsafe fn end(self, result: &str, returned: Value) {
        let duration = self.start.elapsed();
        let line = contain(|| {
            let mut json = Json::default();
            json.object(|json| {
                json.key("sequence").integer(self.sequence);
                json.key("process").integer(std::process::id());
                json.key("thread").integer(thread());
                let since = self.time.duration_since(UNIX_EPOCH).unwrap_or_default();
                json.key("time").fixed(since.as_secs_f64(), 6);
                json.key("function").string(self.function);
                if let Some(decoded) = self.decoded {
                    json.append(decoded);
                }
                let status = match returned {
                    Value::Signed(code) => i32::try_from(code).ok(),
                    Value::Named(named) if result.ends_with("HcclResult") => i32::try_from(named.code).ok(),
                    _ => None,
                };
                if status.is_none_or(|code| code == status::SUCCESS) {
                    json.key("out").object(|json| {
                        for (name, value) in self.arguments {
                            // SAFETY: the call has succeeded.
                            unsafe { decode::written(json, self.function, name, value, self.arguments) };
                        }
                    });
                }
                match status {
                    Some(code) => {
                        json.key("status").integer(code);
                        let name = match returned {
                            Value::Named(named) => named.name,
                            _ if result.ends_with("aclnnStatus") => ascend_sys::aclnn_status_name(code),
                            _ => ascend_sys::acl_error_name(code),
                        };
                        if let Some(name) = name {
                            json.key("name").string(name);
                        }
                    }
                    None => {
                        json.key("returned");
                        // SAFETY: texts that functions return end in NUL.
                        unsafe { decode::returned(json, &returned) };
                    }
                }
                if status::failures() != self.failures
                    && let Some(message) = status::message()
                {
                    json.key("message").string(&message);
                }
                json.key("microseconds").fixed(duration.as_secs_f64() * 1e6, 1);
            });
            json.into_line()
        });
        if let Some(line) = line {
            self.trace.write(&line);
        }
    }
}

/// Contains a panic of the tracing.
fn contain<T>(body: impl FnOnce() -> T) -> Option<T> {
    catch_unwind(AssertUnwindSafe(body)).ok()
}

/// The operating system's number of the calling thread.
fn thread() -> i64 {
    // SAFETY: the call takes nothing and cannot fail.
    unsafe { libc::syscall(libc::SYS_gettid) }
}

const UNKNOWN: u8 = 0;
const OFF: u8 = 1;
const ON: u8 = 2;
static STATE: AtomicU8 = AtomicU8::new(UNKNOWN);

/// The trace that the environment chooses, or `None` if calls are not traced.
#[inline]
pub(crate) fn trace() -> Option<&'static Trace> {
    if STATE.load(Ordering::Relaxed) == OFF {
        return None;
    }
    chosen()
}

/// Reads what the environment chooses.
#[cold]
fn chosen() -> Option<&'static Trace> {
    static TRACE: OnceLock<Option<Trace>> = OnceLock::new();
    let trace = TRACE.get_or_init(|| {
        let file = config().trace.as_ref()?;
        Some(Trace { file, calls: AtomicU64::new(0), failed: AtomicBool::new(false) })
    });
    let trace = trace.as_ref();
    STATE.store(if trace.is_some() { ON } else { OFF }, Ordering::Relaxed);
    trace
}

/// Defines functions that trace a call and then make it:
///
/// `traced! { pub fn name(argument: Type, ...) -> Type = path::of::function; ... }`
macro_rules! traced {
    ($(
        $visibility:vis fn $name:ident $(<const $index:ident : usize>)? ( $( $argument:ident : $type:ty ),* $(,)? )
            -> $result:ty = $call:expr;
    )*) => {
        $(
            #[allow(non_snake_case, reason = "the names are those of the C functions")]
            #[allow(clippy::too_many_arguments, reason = "the C signatures")]
            #[allow(missing_docs, clippy::missing_safety_doc, reason = "those of the function that it stands for")]
            $visibility unsafe extern "C" fn $name $(<const $index: usize>)? ($( $argument: $type ),*) -> $result {
                #[cold]
                #[inline(never)]
                #[allow(clippy::too_many_arguments, reason = "the C signatures")]
                unsafe fn traced $(<const $index: usize>)? (
                    trace: &'static $crate::trace::Trace,
                    $( $argument: $type ),*
                ) -> $result {
                    let arguments: &[(&'static str, $crate::trace::value::Value)] =
                        &[$( (
                            ascend_spec::operator::name_of_field(stringify!($argument)),
                            $crate::trace::value::value!($argument),
                        ) ),*];
                    // SAFETY: the caller keeps the contract of the C ABI.
                    let line = unsafe { trace.begin(stringify!($name), arguments) };
                    // SAFETY: the caller keeps the contract of the C ABI.
                    let result = unsafe { ($call)($( $argument ),*) };
                    // SAFETY: this is what the function returned.
                    unsafe { line.end(stringify!($result), $crate::trace::value::value!(result)) };
                    result
                }
                match $crate::trace::trace() {
                    // SAFETY: the caller keeps the contract of the C ABI.
                    None => unsafe { ($call)($( $argument ),*) },
                    // SAFETY: the caller keeps the contract of the C ABI.
                    Some(trace) => unsafe { traced $(::<$index>)? (trace, $( $argument ),*) },
                }
            }
        )*
    };
}
pub(crate) use traced;
