//! `ASCEND_RECORD`: the calls of FusedInferAttentionScore as case files.

use ascend_attention::case::{CaseError, OperatorCall, Recorder};
use ascend_emu::{ObservedCall, Observer, observe};
use std::ffi::CStr;
use std::io::Write as _;
use std::sync::Once;

/// Hands calls to the recorder of the safe layer, which knows the format.
struct Calls {
    recorder: Recorder,
    soc_name: String,
}

impl Calls {
    fn record(
        &self,
        observed: &ObservedCall<'_>,
        write: impl FnOnce(&Recorder, &OperatorCall<'_>) -> Result<(), CaseError>,
    ) {
        let call = OperatorCall {
            call: observed.call,
            version: observed.version,
            target: observed.target,
            soc_name: &self.soc_name,
            read: &|argument, start, to| observed.read(argument, start, to),
        };
        if let Err(error) = write(&self.recorder, &call) {
            // A stderr that is closed or full is no reason for a call to fail.
            let _ = writeln!(std::io::stderr(), "ascend-emu: ASCEND_RECORD: no more calls are recorded: {error}");
        }
    }
}

impl Observer for Calls {
    fn ran(&self, call: &ObservedCall<'_>, outcome: Result<(), &str>) {
        self.record(call, |recorder, call| recorder.ran(call, outcome));
    }

    fn refused(&self, call: &ObservedCall<'_>, message: &str) {
        self.record(call, |recorder, call| recorder.refused(call, message));
    }
}

/// Whether a function of the C ABI begins a call that may be recorded.
pub(crate) const fn begins_call(function: &str) -> bool {
    const PREFIX: &[u8] = b"aclnnFusedInferAttentionScore";
    let name = function.as_bytes();
    let mut index = 0;
    while index < PREFIX.len() {
        if index >= name.len() || name[index] != PREFIX[index] {
            return false;
        }
        index += 1;
    }
    true
}

/// Looks at the environment once, and records from now on if it says so.
pub(crate) fn begin() {
    static LOOKED: Once = Once::new();
    LOOKED.call_once(|| {
        let Some(recorder) = Recorder::from_environment() else {
            return;
        };
        // SAFETY: the function asks nothing of its caller, and what it returns is a text that stays.
        let soc_name = unsafe { CStr::from_ptr(ascend_emu::abi::aclrtGetSocName()) };
        let soc_name = soc_name.to_string_lossy().into_owned();
        observe(Box::leak(Box::new(Calls { recorder, soc_name })));
    });
}
