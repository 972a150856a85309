//! Which version a call needs.

use super::PromptCall;
use crate::operator_version::prompt_flash_attention::Version;

impl Version {
    /// The oldest version that can express a call and computes all of it.
    pub fn oldest_for(call: &PromptCall<'_>) -> Version {
        if call.pse_shift.is_some() || call.inner_precise != PromptCall::DEFAULT_PRECISE {
            return Version::V3;
        }
        let quantised = [
            &call.deq_scale1,
            &call.quant_scale1,
            &call.deq_scale2,
            &call.quant_scale2,
            &call.quant_offset2,
        ];
        let newer = call.actual_seq_lengths_kv.is_some() || call.sparse_mode != 0;
        match newer || quantised.iter().any(|tensor| tensor.is_some()) {
            true => Version::V2,
            false => Version::V1,
        }
    }
}
