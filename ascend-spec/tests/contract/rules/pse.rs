//! Calls that break the rules on position bias by slopes.

use ascend_spec::ops::fused_infer_attention_score::{FiaCall, Version};
use ascend_spec::{DType, Soc};

use super::{Broken, Good, desc, half};

pub(super) fn calls(broken: &mut Broken, good: &Good<'_>) {
    let prefill = &good.prefill;
    let square = [half(&[2, 4, 16, 32])];
    let slopes =
        FiaCall { key: &square, value: &square, pse_type: 2, pse_shift: desc(DType::Float, &[8]), ..prefill.clone() };
    for (id, call) in [
        ("pse_type.known", FiaCall { pse_type: 1, ..prefill.clone() }),
        ("pse_shift.slopes", FiaCall { pse_shift: desc(DType::Float, &[4]), ..slopes.clone() }),
        ("pse_type.square", FiaCall { key: good.key, value: good.key, ..slopes.clone() }),
        ("start_idx.range", FiaCall { kv_start_idx: Some(&[1 << 31]), ..slopes.clone() }),
        ("start_idx.range", FiaCall { q_start_idx: Some(&[-1_048_577]), ..slopes.clone() }),
        ("start_idx.range", FiaCall { q_start_idx: Some(&[0, 0]), ..slopes.clone() }),
    ] {
        broken.on(Version::V5, Soc::Ascend950, id, &call);
    }
}
