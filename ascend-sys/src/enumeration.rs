//! Enumerations of the headers.

/// A C enumeration: a number, for some values of which the headers have names.
pub trait Enumeration: Copy {
    /// The number.
    fn code(self) -> i64;

    /// CANN's name of the value, such as `ACL_FORMAT_ND`; `None` for numbers that the headers do not name. If a
    /// number has two names, this is the one that the headers declare first.
    fn name(self) -> Option<&'static str>;
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bindings::{aclDataType, aclFormat};
    use crate::{acl_error_name, aclnn_status_name};

    #[test]
    fn values_have_the_names_of_the_headers() {
        assert_eq!(aclFormat::ACL_FORMAT_ND.name(), Some("ACL_FORMAT_ND"));
        assert_eq!(aclDataType(-1).name(), Some("ACL_DT_UNDEFINED"));
        assert_eq!((aclDataType(77).name(), aclDataType(77).code()), (None, 77));
    }

    #[test]
    fn the_two_spaces_of_statuses_are_told_apart() {
        assert_eq!(acl_error_name(0), Some("ACL_SUCCESS"));
        assert_eq!(aclnn_status_name(0), Some("ACLNN_SUCCESS"));
        assert_eq!(acl_error_name(207_001), Some("ACL_ERROR_RT_MEMORY_ALLOCATION"));
        assert_eq!(aclnn_status_name(207_001), None);
        assert_eq!(aclnn_status_name(161_001), Some("ACLNN_ERR_PARAM_NULLPTR"));
        assert_eq!(acl_error_name(161_001), None);
    }
}
