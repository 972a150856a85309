//! Versions of RingAttentionUpdate, and which one a call needs.

use super::RingUpdateCall;
use crate::Cann::{V8_1, V9_0};
use crate::operator::{OperatorVersion, versions};

versions! {
    /// A version of RingAttentionUpdate.
    pub enum Version {
        /// The first.
        V1 = OperatorVersion::new(1, "aclnnRingAttentionUpdate", "8.1").on_a2_a3(V8_1).on_ascend950(V9_0),
        /// Adds the order of packed softmax tensors.
        V2 = OperatorVersion::new(2, "aclnnRingAttentionUpdateV2", "after 8.1").on_a2_a3(V8_1).on_ascend950(V9_0),
    }
}

impl Version {
    /// The oldest version that can express a call.
    pub fn oldest_for(call: &RingUpdateCall<'_>) -> Version {
        match call.input_softmax_layout {
            None | Some("") => Version::V1,
            Some(_) => Version::V2,
        }
    }
}
