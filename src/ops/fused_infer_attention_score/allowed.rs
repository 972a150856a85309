//! What a caller lets a call do: the lints that it may break, and the releases that have to take it.

use ascend_spec::Cann;
use ascend_spec::ops::fused_infer_attention_score::Version;
use smallvec::SmallVec;

use crate::error::Result;
use crate::operator::{AllowedLints, lints_of};

/// The lints that a call may break, by id, and whether it is to be portable.
#[derive(Clone, Debug, Default)]
pub(super) struct Allowed {
    lints: AllowedLints,
    portable_since: Option<Cann>,
}

impl Allowed {
    /// Allows a lint that stays within the call's tensors; [`Allowed::ids`] refuses one that does not.
    pub(super) fn lint(&mut self, id: impl Into<String>) {
        self.lints.lint(id);
    }

    /// Allows any lint.
    ///
    /// # Safety
    /// As for [`FusedInferAttention::allow_overrun`](super::FusedInferAttention::allow_overrun).
    pub(super) unsafe fn overrun(&mut self, id: impl Into<String>) {
        // SAFETY: handed on to the caller.
        unsafe { self.lints.overrun(id) };
    }

    /// Requires that every release from this one on takes the call alike.
    pub(super) fn portable_since(&mut self, since: Cann) {
        self.portable_since = Some(since);
    }

    /// The first release that has to take the call as its own does.
    pub(super) fn portable(&self) -> Option<Cann> {
        self.portable_since
    }

    /// All lints that are allowed.
    ///
    /// # Errors
    /// [`ARGUMENT_VALUE`](crate::rules::ARGUMENT_VALUE) for what is no lint of the
    /// operator, and for a lint that overruns memory and was allowed as one that does not.
    pub(super) fn ids(&self) -> Result<SmallVec<[&str; 4]>> {
        self.lints.ids(lints_of::<Version>)
    }
}
