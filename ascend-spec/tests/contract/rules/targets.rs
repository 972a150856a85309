//! Rules of single releases and products that no recorded call breaks.

use super::{Broken, Good, bf16, desc, half, int8, mask};
use ascend_spec::ops::fused_infer_attention_score::{FiaCall, Version};
use ascend_spec::{Cann, DType, Dims, Soc, Target, TensorDesc};

const A2_8_1: Target = Target::snapshot(Soc::AtlasA2);
const A2_9_0: Target = Target::new(Soc::AtlasA2, Cann::V9_0);
const A2_9_1: Target = Target::new(Soc::AtlasA2, Cann::V9_1);
const ASCEND_950: Target = Target::new(Soc::Ascend950, Cann::V9_1);

pub(super) fn calls(broken: &mut Broken, good: &Good<'_>) {
    broken.at(Version::V4, ASCEND_950, "call.entry_point", &good.prefill);

    let strided = TensorDesc { strides: Dims::of([8192, 2048, 64, 1]), ..good.key[0] };
    let keys = [strided];
    let call = FiaCall { key: &keys, ..good.prefill.clone() };
    broken.at(Version::V1, A2_9_1, "tensor.contiguous", &call);
    assert!(call.check(Version::V1, A2_9_0).is_ok(), "until 9.0 no one looks");

    let many = vec![bf16(&[1, 1, 16, 64]); 257];
    let list = FiaCall {
        query: Some(bf16(&[257, 1, 1, 64])),
        key: &many,
        value: &many,
        num_heads: 1,
        attention_out: Some(bf16(&[257, 1, 1, 64])),
        ..FiaCall::new("BNSD")
    };
    broken.at(Version::V1, A2_9_0, "key.list_most", &list);
    assert!(list.check(Version::V1, A2_9_1).is_ok());

    let prefix = bf16(&[1, 1, 8, 64]);
    let several = FiaCall {
        query: Some(bf16(&[2, 1, 4, 64])),
        key: &many[..2],
        value: &many[..2],
        attention_out: Some(bf16(&[2, 1, 4, 64])),
        key_shared_prefix: Some(prefix),
        value_shared_prefix: Some(prefix),
        ..list.clone()
    };
    broken.at(Version::V2, A2_9_1, "shared_prefix.unified_alone", &several);

    rotary(broken);
    int8_keys(broken);
    measured(broken);
    crashes(broken, good);
    ascend_950(broken);
}

fn rotary(broken: &mut Broken) {
    let (key, key_rope) = ([bf16(&[2, 64, 1, 128])], bf16(&[2, 64, 1, 64]));
    let split = FiaCall {
        query: Some(bf16(&[2, 4, 1, 128])),
        key: &key,
        value: &key,
        query_rope: Some(bf16(&[2, 4, 1, 64])),
        key_rope: Some(key_rope),
        num_heads: 1,
        attention_out: Some(bf16(&[2, 4, 1, 128])),
        ..FiaCall::new("BSND")
    };
    assert!(split.check(Version::V3, A2_9_1).is_ok());
    let quantised =
        FiaCall { attention_out: Some(int8(&[2, 4, 1, 128])), quant_scale2: desc(DType::Float, &[1]), ..split.clone() };
    broken.at(Version::V3, A2_9_1, "quant.output_rope", &quantised);
    let narrow = [bf16(&[2, 64, 1, 64])];
    let call = FiaCall {
        query: Some(bf16(&[2, 4, 1, 64])),
        key: &narrow,
        value: &narrow,
        attention_out: Some(bf16(&[2, 4, 1, 64])),
        ..split
    };
    broken.at(Version::V3, A2_9_1, "rope.dims", &call);
}

fn int8_keys(broken: &mut Broken) {
    let cache = [int8(&[9, 8, 4, 128, 32])];
    let scale = Some(bf16(&[8, 1, 128]));
    let nz = FiaCall {
        query: Some(bf16(&[2, 40, 1, 128])),
        key: &cache,
        value: &cache,
        num_heads: 40,
        num_key_value_heads: 8,
        key_antiquant_scale: scale,
        value_antiquant_scale: scale,
        inner_precise: 1,
        block_size: 128,
        block_table: desc(DType::Int32, &[2, 4]),
        actual_seq_lengths_kv: Some(&[100, 400]),
        attention_out: Some(bf16(&[2, 40, 1, 128])),
        ..FiaCall::new("BNSD")
    };
    broken.at(Version::V2, A2_8_1, "antiquant.nz_heads", &nz);
    assert!(nz.check(Version::V2, A2_9_0).is_ok());
    let packed = FiaCall {
        query: Some(bf16(&[2, 40, 128])),
        actual_seq_lengths: None,
        attention_out: Some(bf16(&[2, 40, 128])),
        input_layout: "TND",
        ..nz
    };
    broken.at(Version::V2, A2_9_0, "antiquant.packed_nz_null", &packed);
}

/// Packed sequences that 8.1 is asked to measure.
fn measured(broken: &mut Broken) {
    let key = [bf16(&[20, 2, 128])];
    let packed = FiaCall {
        query: Some(bf16(&[9, 2, 128])),
        key: &key,
        value: &key,
        num_heads: 2,
        actual_seq_lengths: Some(&[4, 9]),
        actual_seq_lengths_kv: Some(&[8, 20]),
        attention_out: Some(bf16(&[9, 2, 128])),
        ..FiaCall::new("TND")
    };
    match packed.unread_lengths(Version::V2, A2_8_1) {
        Err(violation) => assert!(broken.0.insert(violation.rule.id)),
        other => panic!("not refused: {other:?}"),
    }
    let unread = packed.unread_lengths(Version::V2, A2_9_1).unwrap();
    assert_eq!(unread.actual_seq_lengths, Some(vec![4, 9]));
    assert_eq!(unread.actual_seq_lengths_kv, Some(vec![10, 20]));
    assert_eq!(unread.actual_shared_prefix_len, None);
}

/// Calls that end the process on some hosts and that others refuse.
fn crashes(broken: &mut Broken, good: &Good<'_>) {
    const A2_8_5: Target = Target::new(Soc::AtlasA2, Cann::V8_5);
    const ZERO: &str = "num_heads.zero";
    let key = [bf16(&[2, 64, 128])];
    let flat = FiaCall {
        query: Some(bf16(&[2, 16, 256])),
        key: &key,
        value: &key,
        num_heads: 0,
        num_key_value_heads: 4,
        attention_out: Some(bf16(&[2, 16, 256])),
        ..FiaCall::new("BSH")
    };
    for target in [A2_8_5, A2_9_0, A2_9_1] {
        broken.at(Version::V1, target, ZERO, &flat);
    }
    let packed = FiaCall { input_layout: "TND_NTD", ..flat.clone() };
    let ordinary = "num_heads.positive";
    broken.at(Version::V1, A2_9_0, ZERO, &packed);
    broken.at(Version::V1, A2_8_5, ordinary, &packed);
    broken.at(Version::V1, A2_8_1, ordinary, &flat);
    broken.at(Version::V5, ASCEND_950, ordinary, &flat);
    let negative = FiaCall { num_heads: -1, ..flat };
    broken.at(Version::V1, A2_9_1, ordinary, &negative);

    let three = [good.elements[0], good.elements[1], good.elements[0]];
    let four = FiaCall {
        query: Some(half(&[4, 8, 16, 32])),
        key: &three,
        value: &three,
        attention_out: Some(half(&[4, 8, 16, 32])),
        ..good.list.clone()
    };
    broken.at(Version::V1, A2_9_0, "key.list_short", &four);
    broken.at(Version::V1, A2_9_1, "key.list_length", &four);
}

fn ascend_950(broken: &mut Broken) {
    let key = [int8(&[2, 64, 4, 64])];
    let scale = desc(DType::Float, &[1]);
    let tensor = FiaCall {
        query: Some(int8(&[2, 8, 4, 64])),
        key: &key,
        value: &key,
        num_heads: 4,
        deq_scale1: scale,
        quant_scale1: scale,
        attention_out: Some(bf16(&[2, 8, 4, 64])),
        ..FiaCall::new("BSND")
    };
    broken.at(Version::V5, ASCEND_950, "quant.per_tensor_scales", &tensor);
    let scale = Some(bf16(&[4, 64]));
    let single = FiaCall {
        query: Some(bf16(&[2, 1, 4, 64])),
        deq_scale1: None,
        quant_scale1: None,
        key_antiquant_scale: scale,
        value_antiquant_scale: scale,
        sparse_mode: 3,
        atten_mask: mask(&[2048, 2048]),
        attention_out: Some(bf16(&[2, 1, 4, 64])),
        ..tensor
    };
    broken.at(Version::V5, ASCEND_950, "sparse_mode.one_row", &single);
    let small = [TensorDesc { dtype: DType::Int4, ..key[0] }];
    let masked =
        FiaCall { key: &small, value: &small, sparse_mode: 0, atten_mask: desc(DType::UInt8, &[2, 1, 64]), ..single };
    broken.at(Version::V5, ASCEND_950, "atten_mask.dtype_registered", &masked);
}
