//! Which version a call needs.

use super::RingUpdateCall;
use crate::operator_version::ring_attention_update::Version;

impl Version {
    /// The oldest version that can express a call.
    pub fn oldest_for(call: &RingUpdateCall<'_>) -> Version {
        match call.input_softmax_layout {
            None | Some("") => Version::V1,
            Some(_) => Version::V2,
        }
    }
}
