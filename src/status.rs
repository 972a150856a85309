//! Status codes of the C ABI, by their names.
//!
//! The codes of `acl*` and of `aclnn*` functions are two number spaces: 161001 means nothing to one and a null argument
//! to the other. They are therefore two types.

use std::fmt;

use ascend_sys::bindings as sys;

/// Looks a code up among constants of the bindings.
macro_rules! name_of {
    ($code:expr; $($constant:ident),* $(,)?) => {
        match $code {
            $( sys::$constant => Some(stringify!($constant)), )*
            _ => None,
        }
    };
}

/// What an `acl*` or `aclrt*` function returned (`aclError`). 0 is success.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct AclStatus(pub i32);

impl AclStatus {
    /// CANN's name for the code, such as `ACL_ERROR_RT_MEMORY_ALLOCATION`; `None` for codes that the headers do not name.
    pub const fn name(self) -> Option<&'static str> {
        name_of! { self.0;
        ACL_ERROR_INVALID_PARAM,
        ACL_ERROR_UNINITIALIZE,
        ACL_ERROR_REPEAT_INITIALIZE,
        ACL_ERROR_INVALID_FILE,
        ACL_ERROR_WRITE_FILE,
        ACL_ERROR_INVALID_FILE_SIZE,
        ACL_ERROR_PARSE_FILE,
        ACL_ERROR_OP_TYPE_NOT_MATCH,
        ACL_ERROR_OP_INPUT_NOT_MATCH,
        ACL_ERROR_OP_OUTPUT_NOT_MATCH,
        ACL_ERROR_OP_ATTR_NOT_MATCH,
        ACL_ERROR_OP_NOT_FOUND,
        ACL_ERROR_OP_LOAD_FAILED,
        ACL_ERROR_UNSUPPORTED_DATA_TYPE,
        ACL_ERROR_FORMAT_NOT_MATCH,
        ACL_ERROR_KERNEL_NOT_FOUND,
        ACL_ERROR_WAIT_CALLBACK_TIMEOUT,
        ACL_ERROR_REPEAT_FINALIZE,
        ACL_ERROR_COMPILING_STUB_MODE,
        ACL_ERROR_PROF_REPEAT_SUBSCRIBE,
        ACL_ERROR_PROF_API_CONFLICT,
        ACL_ERROR_INVALID_MAX_OPQUEUE_NUM_CONFIG,
        ACL_ERROR_INVALID_OPP_PATH,
        ACL_ERROR_OP_UNSUPPORTED_DYNAMIC,
        ACL_ERROR_RELATIVE_RESOURCE_NOT_CLEARED,
        ACL_ERROR_UNSUPPORTED_JPEG,
        ACL_ERROR_INVALID_BUNDLE_MODEL_ID,
        ACL_ERROR_BAD_ALLOC,
        ACL_ERROR_API_NOT_SUPPORT,
        ACL_ERROR_INVALID_DEVICE,
        ACL_ERROR_MEMORY_ADDRESS_UNALIGNED,
        ACL_ERROR_RESOURCE_NOT_MATCH,
        ACL_ERROR_INVALID_RESOURCE_HANDLE,
        ACL_ERROR_FEATURE_UNSUPPORTED,
        ACL_ERROR_PROF_MODULES_UNSUPPORTED,
        ACL_ERROR_STORAGE_OVER_LIMIT,
        ACL_ERROR_INTERNAL_ERROR,
        ACL_ERROR_FAILURE,
        ACL_ERROR_GE_FAILURE,
        ACL_ERROR_RT_FAILURE,
        ACL_ERROR_DRV_FAILURE,
        ACL_ERROR_PROFILING_FAILURE,
        ACL_ERROR_RT_PARAM_INVALID,
        ACL_ERROR_RT_INVALID_DEVICEID,
        ACL_ERROR_RT_CONTEXT_NULL,
        ACL_ERROR_RT_STREAM_CONTEXT,
        ACL_ERROR_RT_MODEL_CONTEXT,
        ACL_ERROR_RT_STREAM_MODEL,
        ACL_ERROR_RT_EVENT_TIMESTAMP_INVALID,
        ACL_ERROR_RT_EVENT_TIMESTAMP_REVERSAL,
        ACL_ERROR_RT_ADDR_UNALIGNED,
        ACL_ERROR_RT_STREAM_SUBSCRIBE,
        ACL_ERROR_RT_THREAD_SUBSCRIBE,
        ACL_ERROR_RT_GROUP_NOT_SET,
        ACL_ERROR_RT_GROUP_NOT_CREATE,
        ACL_ERROR_RT_STREAM_NO_CB_REG,
        ACL_ERROR_RT_INVALID_MEMORY_TYPE,
        ACL_ERROR_RT_INVALID_HANDLE,
        ACL_ERROR_RT_INVALID_MALLOC_TYPE,
        ACL_ERROR_RT_WAIT_TIMEOUT,
        ACL_ERROR_RT_TASK_TIMEOUT,
        ACL_ERROR_RT_SYSPARAMOPT_NOT_SET,
        ACL_ERROR_RT_DEVICE_TASK_ABORT,
        ACL_ERROR_RT_STREAM_ABORT,
        ACL_ERROR_RT_CAPTURE_DEPENDENCY,
        ACL_ERROR_RT_STREAM_UNJOINED,
        ACL_ERROR_RT_MODEL_CAPTURED,
        ACL_ERROR_RT_STREAM_CAPTURED,
        ACL_ERROR_RT_EVENT_CAPTURED,
        ACL_ERROR_RT_STREAM_NOT_CAPTURED,
        ACL_ERROR_RT_CAPTURE_MODE_NOT_SUPPORT,
        ACL_ERROR_RT_STREAM_CAPTURE_IMPLICIT,
        ACL_ERROR_STREAM_CAPTURE_CONFLICT,
        ACL_ERROR_STREAM_TASK_GROUP_STATUS,
        ACL_ERROR_STREAM_TASK_GROUP_INTR,
        ACL_ERROR_RT_FEATURE_NOT_SUPPORT,
        ACL_ERROR_RT_MEMORY_ALLOCATION,
        ACL_ERROR_RT_MEMORY_FREE,
        ACL_ERROR_RT_AICORE_OVER_FLOW,
        ACL_ERROR_RT_NO_DEVICE,
        ACL_ERROR_RT_RESOURCE_ALLOC_FAIL,
        ACL_ERROR_RT_NO_PERMISSION,
        ACL_ERROR_RT_NO_EVENT_RESOURCE,
        ACL_ERROR_RT_NO_STREAM_RESOURCE,
        ACL_ERROR_RT_NO_NOTIFY_RESOURCE,
        ACL_ERROR_RT_NO_MODEL_RESOURCE,
        ACL_ERROR_RT_NO_CDQ_RESOURCE,
        ACL_ERROR_RT_OVER_LIMIT,
        ACL_ERROR_RT_QUEUE_EMPTY,
        ACL_ERROR_RT_QUEUE_FULL,
        ACL_ERROR_RT_AIVEC_OVER_FLOW,
        ACL_ERROR_RT_OVER_FLOW,
        ACL_ERROR_RT_DEVICE_OOM,
        ACL_ERROR_RT_INTERNAL_ERROR,
        ACL_ERROR_RT_LOST_HEARTBEAT,
        ACL_ERROR_RT_MODEL_EXECUTE,
        ACL_ERROR_RT_AICORE_TIMEOUT,
        ACL_ERROR_RT_AICORE_EXCEPTION,
        ACL_ERROR_RT_AICORE_TRAP_EXCEPTION,
        ACL_ERROR_RT_AICPU_TIMEOUT,
        ACL_ERROR_RT_AICPU_EXCEPTION,
        ACL_ERROR_RT_DEV_SETUP_ERROR,
        ACL_ERROR_RT_VECTOR_CORE_TIMEOUT,
        ACL_ERROR_RT_VECTOR_CORE_EXCEPTION,
        ACL_ERROR_RT_VECTOR_CORE_TRAP_EXCEPTION,
        ACL_ERROR_RT_AICORE_TRAP_READ_OVERFLOW,
        ACL_ERROR_RT_AICORE_TRAP_WRITE_OVERFLOW,
        ACL_ERROR_RT_VECTOR_CORE_TRAP_READ_OVERFLOW,
        ACL_ERROR_RT_VECTOR_CORE_TRAP_WRITE_OVERFLOW,
        ACL_ERROR_RT_STREAM_SYNC_TIMEOUT,
        ACL_ERROR_RT_EVENT_SYNC_TIMEOUT,
        ACL_ERROR_RT_DEVICE_MEM_ERROR,
        ACL_ERROR_RT_HBM_MULTI_BIT_ECC_ERROR,
        ACL_ERROR_RT_SUSPECT_DEVICE_MEM_ERROR,
        ACL_ERROR_RT_LINK_ERROR,
        ACL_ERROR_RT_SUSPECT_REMOTE_ERROR,
        ACL_ERROR_RT_DRV_INTERNAL_ERROR,
        ACL_ERROR_RT_AICPU_INTERNAL_ERROR,
        ACL_ERROR_RT_SOCKET_CLOSE,
        ACL_ERROR_RT_STREAM_CAPTURE_INVALIDATED,
            }
    }

    /// Whether device or host memory ran out.
    pub const fn is_out_of_memory(self) -> bool {
        matches!(
            self.0,
            sys::ACL_ERROR_RT_MEMORY_ALLOCATION
                | sys::ACL_ERROR_RT_DEVICE_OOM
                | sys::ACL_ERROR_BAD_ALLOC
        )
    }

    /// Whether the device has no streams, or queues for them, left.
    pub const fn is_stream_shortage(self) -> bool {
        matches!(
            self.0,
            sys::ACL_ERROR_RT_RESOURCE_ALLOC_FAIL | sys::ACL_ERROR_RT_NO_STREAM_RESOURCE
        )
    }

    /// Whether a wait ended before what it waited for.
    pub const fn is_timeout(self) -> bool {
        matches!(
            self.0,
            sys::ACL_ERROR_RT_STREAM_SYNC_TIMEOUT
                | sys::ACL_ERROR_RT_EVENT_SYNC_TIMEOUT
                | sys::ACL_ERROR_RT_WAIT_TIMEOUT
        )
    }
}

impl fmt::Display for AclStatus {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        display(f, self.0, self.name())
    }
}

/// What an `aclnn*` function, or one that handles descriptors and executors, returned (`aclnnStatus`). 0 is success.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct AclnnStatus(pub i32);

impl AclnnStatus {
    /// CANN's name for the code, such as `ACLNN_ERR_PARAM_NULLPTR`; `None` for codes that the headers do not name.
    pub const fn name(self) -> Option<&'static str> {
        name_of! { self.0;
        ACLNN_ERR_PARAM_NULLPTR,
        ACLNN_ERR_PARAM_INVALID,
        ACLNN_ERR_RUNTIME_ERROR,
        ACLNN_ERR_INNER,
        ACLNN_ERR_INNER_INFERSHAPE_ERROR,
        ACLNN_ERR_INNER_TILING_ERROR,
        ACLNN_ERR_INNER_FIND_KERNEL_ERROR,
        ACLNN_ERR_INNER_CREATE_EXECUTOR,
        ACLNN_ERR_INNER_NOT_TRANS_EXECUTOR,
        ACLNN_ERR_INNER_NULLPTR,
        ACLNN_ERR_INNER_WRONG_ATTR_INFO_SIZE,
        ACLNN_ERR_INNER_KEY_CONFILICT,
        ACLNN_ERR_INNER_INVALID_IMPL_MODE,
        ACLNN_ERR_INNER_OPP_PATH_NOT_FOUND,
        ACLNN_ERR_INNER_LOAD_JSON_FAILED,
        ACLNN_ERR_INNER_JSON_VALUE_NOT_FOUND,
        ACLNN_ERR_INNER_JSON_FORMAT_INVALID,
        ACLNN_ERR_INNER_JSON_DTYPE_INVALID,
        ACLNN_ERR_INNER_OPP_KERNEL_PKG_NOT_FOUND,
        ACLNN_ERR_INNER_OP_FILE_INVALID,
        ACLNN_ERR_INNER_ATTR_NUM_OUT_OF_BOUND,
        ACLNN_ERR_INNER_ATTR_LEN_NOT_ENOUGH,
        ACLNN_ERR_INNER_INPUT_NUM_IN_JSON_NOT_MATCH,
        ACLNN_ERR_INNER_OUTPUT_NUM_IN_JSON_NOT_MATCH,
        ACLNN_ERR_INNER_STATIC_WORKSPACE_INVALID,
        ACLNN_ERR_INNER_STATIC_BLOCK_DIM_INVALID,
            }
    }
}

impl fmt::Display for AclnnStatus {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        display(f, self.0, self.name())
    }
}

fn display(f: &mut fmt::Formatter<'_>, code: i32, name: Option<&str>) -> fmt::Result {
    match name {
        Some(name) => write!(f, "{code} ({name})"),
        None => write!(f, "{code}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn codes_have_the_names_of_their_own_number_space() {
        assert_eq!(
            AclStatus(207_001).to_string(),
            "207001 (ACL_ERROR_RT_MEMORY_ALLOCATION)"
        );
        assert_eq!(
            AclnnStatus(561_002).to_string(),
            "561002 (ACLNN_ERR_INNER_TILING_ERROR)"
        );
        assert_eq!(AclStatus(161_001).name(), None);
        assert_eq!(AclnnStatus(207_001).to_string(), "207001");
    }

    #[test]
    fn kinds_of_failure_are_told_apart() {
        for code in [207_001, 207_018, 200_000] {
            assert!(AclStatus(code).is_out_of_memory() && !AclStatus(code).is_timeout());
        }
        for code in [507_046, 507_047, 107_019] {
            assert!(AclStatus(code).is_timeout() && !AclStatus(code).is_out_of_memory());
        }
        assert!(!AclStatus(507_014).is_timeout());
        for code in [207_005, 207_008] {
            assert!(AclStatus(code).is_stream_shortage() && !AclStatus(code).is_out_of_memory());
        }
    }
}
