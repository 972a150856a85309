//! Which version a call needs.

use super::IncreCall;
use crate::operator_version::incre_flash_attention::Version;

impl Version {
    /// The oldest version that can express a call and computes all of it.
    pub fn oldest_for(call: &IncreCall<'_>) -> Version {
        let given = |tensors: &[bool]| tensors.contains(&true);
        if call.kv_padding_size.is_some() {
            return Version::V4;
        }
        let third = [
            call.pse_shift.is_some(),
            call.antiquant_scale.is_some(),
            call.antiquant_offset.is_some(),
            call.block_table.is_some(),
            call.block_size != 0,
            call.inner_precise != IncreCall::DEFAULT_PRECISE,
        ];
        let second = [
            call.dequant_scale1.is_some(),
            call.quant_scale1.is_some(),
            call.dequant_scale2.is_some(),
            call.quant_scale2.is_some(),
            call.quant_offset2.is_some(),
        ];
        match (given(&third), given(&second)) {
            (true, _) => Version::V3,
            (false, true) => Version::V2,
            (false, false) => Version::V1,
        }
    }
}
