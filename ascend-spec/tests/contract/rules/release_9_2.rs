//! Rules that 9.2 adds.

use super::{Broken, Good, bf16, desc, int8, mask};
use ascend_spec::ops::fused_infer_attention_score::{FiaCall, Version};
use ascend_spec::{Cann, DType, Soc, Target, TensorDesc};

const A2: Target = Target::new(Soc::AtlasA2, Cann::V9_2);
const ASCEND_950: Target = Target::new(Soc::Ascend950, Cann::V9_2);

pub(super) fn calls(broken: &mut Broken, good: &Good<'_>) {
    let flagged = FiaCall { softmax_lse_flag: true, ..good.decode.clone() };
    broken.at(Version::V1, A2, "softmax_lse.null", &flagged);
    let uneven = FiaCall { value: &good.elements[..1], ..good.list.clone() };
    broken.at(Version::V1, A2, "key.list_sizes", &uneven);
    let other_batch = FiaCall {
        attention_out: desc(DType::Float16, &[3, 16, 8, 32]),
        input_layout: "BNSD_BSND",
        ..good.prefill.clone()
    };
    broken.at(Version::V1, A2, "attention_out.inferred_shape", &other_batch);
    assert!(other_batch.check(Version::V5, A2).is_ok());
    packed(broken);
    latent(broken);
    fp8(broken);
}

fn packed(broken: &mut Broken) {
    let key = [bf16(&[128, 4, 64])];
    let packed = FiaCall {
        query: Some(bf16(&[32, 8, 64])),
        key: &key,
        value: &key,
        num_heads: 8,
        num_key_value_heads: 4,
        actual_seq_lengths: Some(&[30]),
        actual_seq_lengths_kv: Some(&[100]),
        attention_out: Some(bf16(&[32, 8, 64])),
        ..FiaCall::new("TND")
    };
    assert!(packed.check(Version::V1, A2).is_ok());
    let rows = FiaCall { actual_seq_lengths: Some(&[33]), ..packed.clone() };
    broken.at(Version::V1, A2, "split_fuse.q_rows", &rows);
    let value = [bf16(&[99, 4, 64])];
    let keys = FiaCall { value: &value, ..packed };
    broken.at(Version::V1, A2, "split_fuse.kv_rows", &keys);
}

fn latent(broken: &mut Broken) {
    let key = [bf16(&[2, 64, 1, 512])];
    let latent = FiaCall {
        query: Some(bf16(&[2, 4, 12, 512])),
        key: &key,
        value: &key,
        query_rope: Some(bf16(&[2, 4, 12, 64])),
        key_rope: Some(bf16(&[2, 64, 1, 64])),
        num_heads: 12,
        num_key_value_heads: 1,
        attention_out: Some(bf16(&[2, 4, 12, 512])),
        ..FiaCall::new("BSND")
    };
    assert!(latent.check(Version::V5, ASCEND_950).is_ok());
    let quantised = FiaCall {
        attention_out: Some(int8(&[2, 4, 12, 512])),
        quant_scale2: desc(DType::Float, &[1]),
        ..latent.clone()
    };
    broken.at(Version::V5, ASCEND_950, "mla.other_heads", &quantised);
    let masked = FiaCall { atten_mask: mask(&[1, 4, 64]), ..latent.clone() };
    broken.at(Version::V5, ASCEND_950, "mla.other_heads", &masked);
    let older = Target::new(Soc::Ascend950, Cann::V9_1);
    broken.at(Version::V5, older, "mla.heads", &latent);
}

fn fp8(broken: &mut Broken) {
    let small = |shape: &[i64]| desc(DType::Float8E4M3Fn, shape);
    let float = |shape: &[i64]| desc(DType::Float, shape);
    let cache = [small(&[6, 2, 128, 128]).unwrap()];
    let call = FiaCall {
        query: small(&[8, 20, 128]),
        key: &cache,
        value: &cache,
        num_heads: 8,
        num_key_value_heads: 2,
        actual_seq_lengths: Some(&[7, 20]),
        actual_seq_lengths_kv: Some(&[200, 300]),
        block_table: desc(DType::Int32, &[2, 3]),
        block_size: 128,
        dequant_scale_query: float(&[8, 20]),
        key_antiquant_scale: float(&[6, 2, 128]),
        value_antiquant_scale: float(&[2]),
        query_quant_mode: 3,
        key_antiquant_mode: 3,
        value_antiquant_mode: 2,
        attention_out: Some(bf16(&[20, 8, 128])),
        ..FiaCall::new("NTD_TND")
    };
    assert!(call.check(Version::V5, ASCEND_950).is_ok());
    let mut refused = |id, call: FiaCall<'_>| broken.at(Version::V5, ASCEND_950, id, &call);
    refused("fp8.form", FiaCall { inner_precise: 2, ..call.clone() });
    refused(
        "fp8.cache",
        FiaCall {
            block_size: 64,
            key: &[TensorDesc::contiguous(DType::Float8E4M3Fn, &[6, 2, 64, 128]).unwrap()],
            value: &[TensorDesc::contiguous(DType::Float8E4M3Fn, &[6, 2, 64, 128]).unwrap()],
            block_table: desc(DType::Int32, &[2, 5]),
            ..call.clone()
        },
    );
    refused("fp8.scales", FiaCall { value_antiquant_scale: float(&[1]), ..call.clone() });
    refused("fp8.quant_scale1", FiaCall { quant_scale1: float(&[2]), ..call.clone() });
    let factor = FiaCall { quant_scale1: float(&[1]), ..call };
    let checked = factor.check(Version::V5, ASCEND_950);
    assert!(checked.unwrap_err().is_unsupported());
}
