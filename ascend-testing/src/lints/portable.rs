//! Lints of calls that are to run on other releases as well.

use super::{Found, half, mask, with};
use ascend_spec::ops::fused_infer_attention_score::{FiaCall, Version};
use ascend_spec::{Cann, DType, Soc, Target, TensorDesc};

/// What is reported: the lint, and the release that it tells of.
fn differences(call: &FiaCall<'_>, target: Target, since: Cann) -> Vec<(&'static str, Cann)> {
    let mut found = Vec::new();
    call.each_difference(Version::V4, target, since, &mut |lint| {
        let named = |cann: &Cann| {
            let other = Target { cann: *cann, ..target };
            let before = lint.given.find(&format!("{other}"));
            before.map(|at| (at, *cann))
        };
        let first = Cann::ALL.iter().filter_map(named).min();
        found.push((lint.rule.id, first.unwrap().1));
    });
    found
}

pub(super) fn portable(found: &mut Found<'_>) {
    let newest = Target::new(Soc::AtlasA2, Cann::V9_1);
    let key = [half(&[2, 64, 4, 96])];
    let decode = FiaCall {
        query: Some(half(&[2, 1, 4, 96])),
        key: &key,
        value: &key,
        num_heads: 4,
        num_key_value_heads: 4,
        attention_out: Some(half(&[2, 1, 4, 96])),
        ..FiaCall::new("BSND")
    };
    let all = Cann::V8_1;
    assert_eq!(differences(&decode, newest, all), []);

    // 8.5 and before see every key behind the triangle, 9.0 refuses it, 9.1 reads it as a full mask.
    let triangle = with(&decode, |call| {
        call.sparse_mode = 3;
        call.atten_mask = mask(&[2048, 2048]);
    });
    let (refused, meaning) = ("portable.refused", "portable.meaning");
    assert_eq!(
        differences(&triangle, newest, all),
        [(meaning, Cann::V8_1), (meaning, Cann::V8_5), (refused, Cann::V9_0)]
    );
    assert_eq!(differences(&triangle, newest, Cann::V9_0), [(refused, Cann::V9_0)]);
    assert_eq!(differences(&triangle, newest, Cann::V9_1), []);
    found.ids.extend([refused, meaning]);

    // A call that its own release refuses is reported there alone.
    let ninth = Target::new(Soc::AtlasA2, Cann::V9_0);
    assert_eq!(differences(&triangle, ninth, all), [(refused, Cann::V9_0)]);

    // 8.5 and 9.0 ignore the padding of a single row's cached keys where 9.1 refuses it.
    let cache = [half(&[4, 128, 4 * 96])];
    let padded = with(&decode, |call| {
        call.key = &cache;
        call.value = &cache;
        call.block_table = TensorDesc::contiguous(DType::Int32, &[2, 2]);
        call.block_size = 128;
        call.actual_seq_lengths_kv = Some(&[100, 90]);
        call.kv_padding_size = TensorDesc::contiguous(DType::Int64, &[1]);
    });
    assert_eq!(differences(&padded, ninth, Cann::V8_5), [(refused, Cann::V9_1), (refused, Cann::V9_2)]);

    // The split-fuse path of 8.5 on ignores the order of ends that the snapshot refuses.
    let packed = [bf16(&[128, 4, 64])];
    let falling = FiaCall {
        query: Some(bf16(&[32, 8, 64])),
        key: &packed,
        value: &packed,
        num_heads: 8,
        num_key_value_heads: 4,
        actual_seq_lengths: Some(&[40, 32]),
        actual_seq_lengths_kv: Some(&[64, 128]),
        attention_out: Some(bf16(&[32, 8, 64])),
        ..FiaCall::new("TND")
    };
    assert_eq!(differences(&falling, newest, Cann::V8_1), [(refused, Cann::V8_1)]);

    // Ascend 950 is compared with its own releases only, which are alike.
    let chip = Target::new(Soc::Ascend950, Cann::V9_1);
    let mut none = true;
    decode.each_difference(Version::V5, chip, Cann::V8_1, &mut |_| none = false);
    assert!(none);
}

fn bf16(shape: &[i64]) -> TensorDesc {
    TensorDesc::contiguous(DType::Bf16, shape).unwrap()
}
