//! Status codes of the C ABI, by their names.
//!
//! The codes of `acl*`, of `aclnn*` and of HCCL's functions are number spaces of their own: 161001 means nothing to one
//! and a null argument to another. They are therefore types of their own.

use std::fmt;

use ascend_sys::bindings as sys;

/// What an `acl*` or `aclrt*` function returned (`aclError`). 0 is success.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct AclStatus(pub i32);

impl AclStatus {
    /// CANN's name for the code, such as `ACL_ERROR_RT_MEMORY_ALLOCATION`; `None` for codes that the headers do not
    /// name.
    pub const fn name(self) -> Option<&'static str> {
        ascend_sys::acl_error_name(self.0)
    }

    /// Whether device or host memory ran out.
    pub const fn is_out_of_memory(self) -> bool {
        matches!(self.0, sys::ACL_ERROR_RT_MEMORY_ALLOCATION | sys::ACL_ERROR_RT_DEVICE_OOM | sys::ACL_ERROR_BAD_ALLOC)
    }

    /// Whether the device has no streams left, or no queues for them.
    pub const fn is_stream_shortage(self) -> bool {
        matches!(self.0, sys::ACL_ERROR_RT_RESOURCE_ALLOC_FAIL | sys::ACL_ERROR_RT_NO_STREAM_RESOURCE)
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
        ascend_sys::aclnn_status_name(self.0)
    }
}

impl fmt::Display for AclnnStatus {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        display(f, self.0, self.name())
    }
}

/// What a function of HCCL returned (`HcclResult`). 0 is success.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct HcclStatus(pub u32);

impl HcclStatus {
    /// CANN's name for the code, such as `HCCL_E_PARA`; `None` for codes that the headers do not name.
    pub fn name(self) -> Option<&'static str> {
        ascend_sys::Enumeration::name(sys::HcclResult(self.0))
    }
}

impl fmt::Display for HcclStatus {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        display(f, self.0, self.name())
    }
}

fn display(f: &mut fmt::Formatter<'_>, code: impl fmt::Display, name: Option<&str>) -> fmt::Result {
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
        assert_eq!(AclStatus(207_001).to_string(), "207001 (ACL_ERROR_RT_MEMORY_ALLOCATION)");
        assert_eq!(AclnnStatus(561_002).to_string(), "561002 (ACLNN_ERR_INNER_TILING_ERROR)");
        assert_eq!(HcclStatus(9).to_string(), "9 (HCCL_E_TIMEOUT)");
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
