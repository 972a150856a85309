//! Calls that break the rules on packed sequences and sinks.

use ascend_spec::ops::fused_infer_attention_score::{FiaCall, Version};
use ascend_spec::{DType, Soc, Target};

use super::{Broken, Good, bf16, desc, mask};

pub(super) fn calls(broken: &mut Broken, _: &Good<'_>) {
    let rows = [bf16(&[9, 4, 64])];
    let packed = FiaCall {
        query: Some(bf16(&[5, 4, 64])),
        attention_out: Some(bf16(&[5, 4, 64])),
        key: &rows,
        value: &rows,
        input_layout: "TND",
        num_heads: 4,
        actual_seq_lengths: Some(&[2, 5]),
        actual_seq_lengths_kv: Some(&[4, 9]),
        ..FiaCall::new("TND")
    };
    packed.check(Version::V4, Target::snapshot(Soc::AtlasA2)).unwrap();
    let sink = desc(DType::Float, &[4]);
    broken.by("learnable_sink.dtype", FiaCall { learnable_sink: sink, ..packed.clone() });
    let banded = FiaCall { sparse_mode: 4, atten_mask: mask(&[2048, 2048]), ..packed.clone() };
    broken.by("packed.band", FiaCall { pre_tokens: -3, ..banded.clone() });
    let (wide, narrow) = ([bf16(&[9, 4, 192])], [bf16(&[9, 4, 192])]);
    broken.by(
        "packed.band_head_dim",
        FiaCall {
            query: Some(bf16(&[5, 4, 192])),
            attention_out: Some(bf16(&[5, 4, 192])),
            key: &wide,
            value: &narrow,
            ..banded.clone()
        },
    );
    broken.by("packed.value_rows", FiaCall { value: &[bf16(&[8, 4, 64])], ..packed.clone() });
}
