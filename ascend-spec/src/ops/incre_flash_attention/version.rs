//! Versions of IncreFlashAttention, and what each computes with.

use super::Parameter;
use crate::Cann::V8_1;
use crate::operator::{OperatorVersion, versions};

/// The properties that all versions share: the products. Ascend 950 exports them and refuses every call.
const fn version(number: u8, symbol: &'static str) -> OperatorVersion {
    OperatorVersion::new(number, symbol, "8.1")
        .on_a2_a3(V8_1)
        .on_inference_cards(V8_1)
}

versions! {
    /// A version of IncreFlashAttention: each adds arguments to the one before.
    pub enum Version {
        /// The first. It takes a position bias and computes without it.
        V1 = version(1, "aclnnIncreFlashAttention"),
        /// Adds quantisation. It takes a position bias and computes without it.
        V2 = version(2, "aclnnIncreFlashAttentionV2"),
        /// Adds quantised keys and values, paged caches and the precision, and uses the position bias.
        V3 = version(3, "aclnnIncreFlashAttentionV3"),
        /// Adds left padding of keys and values.
        V4 = version(4, "aclnnIncreFlashAttentionV4"),
    }
}

impl Version {
    /// Whether the version has a parameter and computes with it: V1 and V2 take a position bias and ignore it.
    pub(super) fn computes(self, parameter: Parameter) -> bool {
        let since = match parameter {
            Parameter::PseShift => 3,
            other => other.info().since,
        };
        since <= self.number()
    }
}
