//! Failures that no rule stands behind: the call may be right, and something else is missing or broken.

use ascend_attention::AclStatus;
use ascend_attention::sys::bindings as sys;

use super::borders::has_word;
use super::status::Status;

/// A kind of failure outside of the operators' contracts.
#[derive(Debug)]
pub(super) struct Cause {
    /// What a text says that speaks of it, as [`has_word`] takes it.
    signs: &'static [&'static str],
    /// Whether a status of the runtime means it.
    has_status: fn(i32) -> bool,
    /// What failed.
    pub(super) name: &'static str,
    /// What to do.
    pub(super) advice: &'static str,
    /// Whether no rule can stand behind the failure, unless the text has the status of a refused call as well.
    pub(super) is_final: bool,
    /// The conditions, by the last part of a rule's name, that a call breaks where this is its own fault.
    pub(super) conditions: &'static [&'static str],
}

/// The kinds, those that exclude others first.
const CAUSES: [Cause; 11] = [
    Cause {
        signs: &["out of memory", "Tried to allocate"],
        has_status: |status| AclStatus(status).is_out_of_memory(),
        name: "device memory is used up",
        advice: "no argument is refused; see \"It takes too much\" in symptoms.md",
        is_final: true,
        conditions: &[],
    },
    Cause {
        signs: &["not in libopapi.so", "undefined symbol", "cannot open shared object", "symbol lookup error"],
        has_status: |_| false,
        name: "the installed libraries lack a function or a library is not found",
        advice: "set_env.sh of the toolkit, or of the package that has the operator, was not read, or the release is \
                 too old: `ascend-attn doctor`",
        is_final: true,
        conditions: &[],
    },
    Cause {
        signs: &["Errno None", "drvErr", "drvRetCode", "TsdOpen failed", "npu-smi: command not found"],
        has_status: |status| {
            matches!(
                status,
                sys::ACL_ERROR_RT_INVALID_DEVICEID
                    | sys::ACL_ERROR_INVALID_DEVICE
                    | sys::ACL_ERROR_RT_NO_DEVICE
                    | sys::ACL_ERROR_RT_DEV_SETUP_ERROR
                    | sys::ACL_ERROR_DRV_FAILURE
                    | sys::ACL_ERROR_RT_DRV_INTERNAL_ERROR
            )
        },
        name: "the driver, the device or the process, before any operator",
        advice: "`ascend-attn doctor`: do the versions of driver, firmware and toolkit fit, and does the process see \
                 the device (ASCEND_RT_VISIBLE_DEVICES)?",
        is_final: true,
        conditions: &[],
    },
    Cause {
        signs: &["HCCL function error", "function error: Hccl*", "hccl fftsplus task timeout", "EI00*", "EI9999"],
        has_status: |_| false,
        name: "a collective operation between ranks (HCCL)",
        advice: "find the rank that failed first or never came to the operation: the others only waited for it",
        is_final: true,
        conditions: &[],
    },
    Cause {
        signs: &[
            "Cannot find bin",
            "Cannot find binary",
            "does not has any binary",
            "dynamic kernel config",
            "EZ1013",
            "ParseDynamicKernels",
        ],
        has_status: |_| false,
        name: "the installed kernels have none for this product and these dtypes",
        advice: "install the kernel package of this product (opp), or give dtypes that the operator is registered for",
        is_final: false,
        conditions: &["dtype", "registered", "product"],
    },
    Cause {
        signs: &["SoC version", "not configured through the AddConfig"],
        has_status: |_| false,
        name: "the operator is not registered for this product",
        advice: "call an operator that the product has",
        is_final: false,
        conditions: &["product"],
    },
    Cause {
        signs: &["Alloc sq cq fail", "resource alloc fail"],
        has_status: |status| AclStatus(status).is_stream_shortage(),
        name: "the device's streams are used up",
        advice: "capture fewer graphs: graphs.md",
        is_final: true,
        conditions: &[],
    },
    Cause {
        signs: &["captured-stream", "stream is captured", "Parameter stream is invalid"],
        has_status: |status| {
            matches!(
                status,
                sys::ACL_ERROR_RT_CAPTURE_DEPENDENCY
                    ..=sys::ACL_ERROR_STREAM_TASK_GROUP_INTR | sys::ACL_ERROR_RT_STREAM_CAPTURE_INVALIDATED
            )
        },
        name: "the runtime refuses what was asked of a stream, such as a wait while it is captured",
        advice: "what cannot be captured: graphs.md",
        is_final: true,
        conditions: &[],
    },
    Cause {
        signs: &[],
        has_status: |status| matches!(status, sys::ACL_ERROR_RT_CONTEXT_NULL..=sys::ACL_ERROR_RT_STREAM_CONTEXT),
        name: "the calling thread has no context of a device, or the stream is of another context",
        advice: "call aclrtSetDevice (torch.npu.set_device) on each thread before it calls CANN, and use streams on \
                 the device that they were made on",
        is_final: true,
        conditions: &[],
    },
    Cause {
        signs: &["aicore timeout", "aicore execution times out"],
        has_status: |status| {
            let of_kernel = matches!(
                status,
                sys::ACL_ERROR_RT_AICORE_TIMEOUT
                    | sys::ACL_ERROR_RT_AICPU_TIMEOUT
                    | sys::ACL_ERROR_RT_VECTOR_CORE_TIMEOUT
                    | sys::ACL_ERROR_RT_TASK_TIMEOUT
            );
            of_kernel || AclStatus(status).is_timeout()
        },
        name: "a kernel or a wait did not end in time",
        advice: "ASCEND_LAUNCH_BLOCKING=1 names the call; for replays of graphs see \"It hangs\" in symptoms.md",
        is_final: true,
        conditions: &[],
    },
    Cause {
        signs: &[
            "aicore exception",
            "aicore error",
            "aivec error",
            "aivector error",
            "aicore execution is abnormal",
            "Aicpu kernel execute failed",
        ],
        has_status: |status| {
            matches!(
                status,
                sys::ACL_ERROR_RT_MODEL_EXECUTE
                    | sys::ACL_ERROR_RT_LOST_HEARTBEAT
                    | sys::ACL_ERROR_RT_AICORE_EXCEPTION..=sys::ACL_ERROR_RT_AICORE_TRAP_EXCEPTION
                    | sys::ACL_ERROR_RT_AICPU_EXCEPTION
                    | sys::ACL_ERROR_RT_VECTOR_CORE_EXCEPTION..=sys::ACL_ERROR_RT_VECTOR_CORE_TRAP_WRITE_OVERFLOW
                    | sys::ACL_ERROR_RT_DEVICE_MEM_ERROR
            )
        },
        name: "a kernel failed on the device, maybe of an earlier call than the one that is named",
        advice: "ASCEND_LAUNCH_BLOCKING=1 names the call; the emulation in ASCEND_EMU_CHECK=strict finds what it reads \
                 or writes wrongly",
        is_final: true,
        conditions: &[],
    },
];

/// What failed where the runtime says so by a code or a status that is of no kind above.
const RUNTIME: Cause = Cause {
    signs: &["EE10*", "rtKernelLaunch*"],
    has_status: |status| !Status(status).is_refusal(),
    name: "the runtime, which failed by itself or refused one of its own calls: no operator's argument is meant",
    advice: "the host's log of CANN says at which call (ASCEND_PROCESS_LOG_PATH, ~/ascend/log); \
             ASCEND_LAUNCH_BLOCKING=1 lets each operator fail where it is called",
    is_final: true,
    conditions: &[],
};

/// The causes that a text with these statuses speaks of.
pub(super) fn causes(text: &str, statuses: &[Status]) -> Vec<&'static Cause> {
    let speaks_of = |cause: &&Cause| {
        let has_status = statuses.iter().any(|status| (cause.has_status)(status.0));
        has_status || cause.signs.iter().any(|sign| has_word(text, sign))
    };
    let causes: Vec<&Cause> = CAUSES.iter().filter(speaks_of).collect();
    match causes.is_empty() {
        true => [&RUNTIME].into_iter().filter(speaks_of).collect(),
        false => causes,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names(text: &str, statuses: &[i32]) -> Vec<&'static str> {
        let statuses: Vec<Status> = statuses.iter().copied().map(Status).collect();
        causes(text, &statuses).into_iter().map(|cause| cause.name).collect()
    }

    #[test]
    fn statuses_of_the_runtime_have_a_cause_and_refusals_have_none() {
        for (status, begins) in [
            (107_001, "the driver"),
            (107_002, "the calling thread"),
            (107_030, "the runtime refuses"),
            (207_001, "device memory"),
            (207_008, "the device's streams"),
            (507_014, "a kernel or a wait"),
            (507_015, "a kernel failed"),
            (507_048, "the runtime, which"),
            (100_000, "the runtime, which"),
        ] {
            let named = names("", &[status]);
            assert!(named.len() == 1 && named[0].starts_with(begins), "{status}: {named:?}");
        }
        assert!(names("", &[561_002, -1]).is_empty());
    }

    #[test]
    fn signs_are_whole_words() {
        assert!(names("WEI0006, the SoC versions", &[]).is_empty());
        assert_eq!(names("EI0006: a socket", &[]).len(), 1);
        assert_eq!(names("EE1001: an argument", &[]), [RUNTIME.name]);
        assert_eq!(names("there is an aicore error exception", &[]).len(), 1);
    }
}
