//! Calls that break the rules on what the operator looks at first: tensors, layout, product.

use ascend_spec::ops::fused_infer_attention_score::{FiaCall, Version};
use ascend_spec::{DType, Format, Soc, TensorDesc};

use super::{Broken, Good, half};

pub(super) fn calls(broken: &mut Broken, good: &Good<'_>) {
    let Good { prefill, decode, .. } = good;
    broken.by("call.required", FiaCall { query: None, ..prefill.clone() });
    broken.by("call.required", FiaCall { key: &[], ..prefill.clone() });
    broken.by("call.required", FiaCall { value: &[], ..prefill.clone() });
    broken.by("call.required", FiaCall { attention_out: None, ..prefill.clone() });
    let float = TensorDesc { dtype: DType::Float, ..half(&[2, 8, 16, 32]) };
    broken.by("dtype.registered", FiaCall { query: Some(float), ..prefill.clone() });
    broken.by("dtype.registered", FiaCall { atten_mask: Some(float), ..prefill.clone() });
    let nz = TensorDesc { format: Format::FractalNz, ..half(&[2, 8, 16, 32]) };
    broken.by("format.plain", FiaCall { query: Some(nz), ..prefill.clone() });
    broken.by("shape.countable", FiaCall { query: Some(half(&[2, -8, 16, 32])), ..prefill.clone() });
    broken.by("input_layout.known", FiaCall { input_layout: "NHWC", ..prefill.clone() });
    broken.by("query.rank", FiaCall { query: Some(half(&[2, 8, 16])), ..prefill.clone() });
    broken
        .by("query.hidden_size", FiaCall { query: Some(half(&[2, 16, 250])), input_layout: "BSH", ..prefill.clone() });
    broken.by("num_heads.positive", FiaCall { num_heads: 0, ..prefill.clone() });
    broken.by("input_layout.bnsd_bsnd_rows", FiaCall { input_layout: "BNSD_BSND", ..decode.clone() });
    broken.by(
        "query.empty_output",
        FiaCall { query: Some(half(&[0, 16, 8, 32])), input_layout: "BSND", ..prefill.clone() },
    );
    broken.by(
        "query.empty_decode",
        FiaCall { query: Some(half(&[0, 8, 1, 32])), attention_out: Some(half(&[0, 8, 1, 32])), ..decode.clone() },
    );
    broken.by(
        "input_layout.prefill",
        FiaCall { input_layout: "BNSD_NBSD", attention_out: Some(half(&[8, 2, 16, 32])), ..prefill.clone() },
    );
    for (version, soc) in [
        (Version::V5, Soc::AtlasA2),
        (Version::V4, Soc::Ascend950),
        (Version::V1, Soc::AtlasInference),
        (Version::V1, Soc::AtlasTraining),
        (Version::V1, Soc::Atlas200I500A2),
    ] {
        broken.on(version, soc, "call.product", prefill);
    }
}
