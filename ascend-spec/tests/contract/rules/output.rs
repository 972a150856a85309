//! Calls that break the rules on outputs and precision.

use ascend_spec::ops::fused_infer_attention_score::FiaCall;
use ascend_spec::{DType, TensorDesc};

use super::{Broken, Good, desc, half};

pub(super) fn calls(broken: &mut Broken, good: &Good<'_>) {
    let Good { prefill, decode, .. } = good;
    let out = TensorDesc { dtype: DType::Bf16, ..half(&[2, 8, 16, 32]) };
    broken.by("attention_out.dtype", FiaCall { attention_out: Some(out), ..prefill.clone() });
    broken.by("attention_out.shape", FiaCall { attention_out: Some(half(&[2, 8, 16, 16])), ..prefill.clone() });
    let asked = FiaCall { softmax_lse_flag: true, ..prefill.clone() };
    broken.by("softmax_lse.required", asked.clone());
    broken.by("softmax_lse.shape", FiaCall { softmax_lse: desc(DType::Float, &[2, 8, 16]), ..asked.clone() });
    broken.by("softmax_lse.dtype", FiaCall { softmax_lse: desc(DType::Float16, &[2, 8, 16, 1]), ..asked.clone() });
    broken.by("inner_precise.known", FiaCall { inner_precise: 4, ..prefill.clone() });
    broken.by("inner_precise.known", FiaCall { inner_precise: 2, ..decode.clone() });
    broken.by("antiquant_mode.unused", FiaCall { antiquant_mode: 1, ..prefill.clone() });
}
