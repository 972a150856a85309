//! The two functions of an operator: phase one prepares a call, phase two queues it.

use std::ffi::c_void;

use ascend_spec::OperatorVersion;
use ascend_sys::bindings::{self as sys, aclOpExecutor};
use ascend_sys::{Api, Library, MissingSymbol};

use crate::error::{Error, Result};

/// The function of phase two, alike for all operators.
pub(super) type PhaseTwo = unsafe extern "C" fn(
    *mut c_void,
    u64,
    *mut aclOpExecutor,
    sys::aclrtStream,
) -> sys::aclnnStatus;

/// Both functions of an operator, or of one of its versions.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Phases {
    /// Name of phase two.
    pub(crate) name: &'static str,
    pub(crate) one: fn(&Api) -> Result<(), MissingSymbol>,
    pub(crate) two: fn(&Api) -> Result<PhaseTwo, MissingSymbol>,
}

/// The [`Phases`] of these names.
macro_rules! phases {
    ($one:ident, $two:ident) => {
        $crate::operator::Phases {
            name: stringify!($two),
            one: |api| api.$one().map(drop),
            two: |api| api.$two(),
        }
    };
}

pub(crate) use phases;

impl Phases {
    /// Whether both are installed.
    pub(crate) fn are_installed(&self, api: &Api) -> bool {
        (self.one)(api).is_ok() && (self.two)(api).is_ok()
    }

    /// Refuses a CANN without the operator; `instead` says what to do there.
    pub(crate) fn required(
        &self,
        api: &Api,
        operator: OperatorVersion,
        instead: &'static str,
    ) -> Result<()> {
        if self.are_installed(api) {
            return Ok(());
        }
        Err(Error::MissingOperator {
            operator: operator.symbol(),
            library: Library::Opapi.file_name(),
            since: operator.since_cann(),
            instead,
        })
    }
}

#[cfg(test)]
mod tests {
    use ascend_sys::Functions;

    use super::*;

    #[test]
    fn an_operator_that_is_not_installed_is_named_with_its_release() {
        let phases = phases!(aclnnScatterPaKvCacheGetWorkspaceSize, aclnnScatterPaKvCache);
        let old = Api::from_functions(Functions::default(), "CANN 8.1");
        let required = phases.required(&old, OperatorVersion::ScatterPaKvCache, "do without");
        let missing = required.unwrap_err();
        assert!(matches!(
            missing,
            Error::MissingOperator {
                operator: "aclnnScatterPaKvCache",
                ..
            }
        ));
        assert_eq!(
            missing.to_string(),
            "libopapi.so does not export aclnnScatterPaKvCache: it comes with CANN after 8.1; install a newer release, \
             or do without"
        );
    }
}
