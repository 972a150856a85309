//! Learnable sinks.

use super::{Probe, hold, kept, of, probe};
use ascend_spec::ops::fused_infer_attention_score::FiaCall;
use ascend_spec::{DType, TensorDesc};

#[test]
fn sinks() {
    let sink = |dtype, dim, q: DType, inner_precise| {
        let p = Probe { dtype: q, ..probe("TND", [2, 8, 2, 16, 64, dim]) };
        FiaCall { learnable_sink: of(dtype, &[8]), inner_precise, ..p.call() }
    };
    use DType::{Bf16, Float16};
    let plain = |layout, d, dtype| FiaCall {
        learnable_sink: of(dtype, &[4]),
        ..probe(layout, [2, 4, 2, 16, 64, d]).bf16().call()
    };
    let one: Option<TensorDesc> = of(Bf16, &[3]);
    hold(&[
        ("BF16, 64", "aaaa", sink(Bf16, 64, Bf16, 0)),
        ("BF16, 128", "aaaa", sink(Bf16, 128, Bf16, 0)),
        ("FLOAT16 query, BF16 sink, 128", "rarr", sink(Bf16, 128, Float16, 0)),
        ("FLOAT16 query, BF16 sink, 64", "raaa", sink(Bf16, 64, Float16, 0)),
        ("FLOAT16 query and sink, 128", "--aa", sink(Float16, 128, Float16, 0)),
        ("FLOAT16 query and sink, 96", "--aa", sink(Float16, 96, Float16, 0)),
        ("FLOAT16 query and sink, precision 1", "--rr", sink(Float16, 128, Float16, 1)),
        ("BSND", "raaa", plain("BSND", 64, Bf16)),
        ("BNSD, 96", "raaa", plain("BNSD", 96, Bf16)),
        ("BNSD, FLOAT16 sink", "--rr", plain("BNSD", 64, Float16)),
        ("NTD_TND", "aaaa", plain("NTD_TND", 64, Bf16)),
        ("of another size", "rrrr", FiaCall { learnable_sink: one, ..plain("BSND", 64, Bf16) }),
        ("with rows of bias", "raaa", FiaCall { pse_shift: of(Bf16, &[1, 4, 16, 64]), ..plain("BNSD", 64, Bf16) }),
        (
            "with an INT8 output",
            "raaa",
            FiaCall {
                attention_out: of(DType::Int8, &[2, 4, 16, 64]),
                quant_scale2: of(DType::Float, &[1]),
                ..plain("BNSD", 64, Bf16)
            },
        ),
        (
            "with left padding",
            "raaa",
            FiaCall {
                kv_padding_size: of(DType::Int64, &[1]),
                actual_seq_lengths_kv: Some(kept(vec![5, 6])),
                ..plain("BNSD", 64, Bf16)
            },
        ),
    ]);
}
