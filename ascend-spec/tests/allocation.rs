//! Checking a call that holds every rule allocates nothing.

#![allow(clippy::unwrap_used, clippy::panic, reason = "helpers of tests end them by a panic")]

use ascend_testing::allocations;

use allocations::allocations;
use ascend_spec::ops::fused_infer_attention_score::{FiaCall, Version};
use ascend_spec::{Cann, DType, Soc, Target, TensorDesc, Violation};

#[global_allocator]
static ALLOCATOR: allocations::Counting = allocations::Counting;

#[test]
fn an_accepted_call_allocates_nothing_on_any_target() {
    let of = |dtype, shape: &[i64]| TensorDesc::contiguous(dtype, shape).unwrap();
    let bf16 = |shape: &[i64]| of(DType::Bf16, shape);
    let lengths: Vec<i64> = (0..256).map(|b| 1 + b * 16).collect();
    let ends: Vec<i64> = (1..=256).collect();

    let dense = [bf16(&[256, 8, 4096, 128])];
    let decode = FiaCall {
        query: Some(bf16(&[256, 32, 1, 128])),
        key: &dense,
        value: &dense,
        num_heads: 32,
        num_key_value_heads: 8,
        actual_seq_lengths_kv: Some(&lengths),
        attention_out: Some(bf16(&[256, 32, 1, 128])),
        ..FiaCall::new("BNSD")
    };
    let cache = [bf16(&[8192, 128, 1024])];
    let table = Some(of(DType::Int32, &[256, 32]));
    let paged = FiaCall { key: &cache, value: &cache, block_table: table, block_size: 128, ..decode.clone() };
    let packed = FiaCall {
        query: Some(bf16(&[256, 32, 128])),
        sparse_mode: 3,
        atten_mask: Some(of(DType::Int8, &[2048, 2048])),
        actual_seq_lengths: Some(&ends),
        attention_out: Some(bf16(&[256, 32, 128])),
        input_layout: "TND",
        ..paged.clone()
    };
    let masked = FiaCall {
        query: Some(bf16(&[256, 32, 4, 128])),
        sparse_mode: 1,
        atten_mask: Some(of(DType::Bool, &[256, 1, 4, 4096])),
        softmax_lse_flag: true,
        softmax_lse: Some(of(DType::Float, &[256, 32, 4, 1])),
        attention_out: Some(bf16(&[256, 32, 4, 128])),
        ..decode.clone()
    };
    let elements = vec![bf16(&[1, 8, 4096, 128]); 256];
    let list = FiaCall { key: &elements, value: &elements, ..decode.clone() };
    let latent = [bf16(&[8192, 1, 128, 512])];
    let absorbed = FiaCall {
        query: Some(bf16(&[256, 32, 1, 512])),
        key: &latent,
        value: &latent,
        query_rope: Some(bf16(&[256, 32, 1, 64])),
        key_rope: Some(bf16(&[8192, 1, 128, 64])),
        num_key_value_heads: 1,
        attention_out: Some(bf16(&[256, 32, 1, 512])),
        ..paged.clone()
    };
    let int8 = [of(DType::Int8, &[256, 8, 4096, 128])];
    let scale = Some(bf16(&[1, 8, 1, 128]));
    let quantised = FiaCall {
        key: &int8,
        value: &int8,
        key_antiquant_scale: scale,
        value_antiquant_scale: scale,
        ..decode.clone()
    };

    let calls = [&decode, &paged, &packed, &masked, &list, &absorbed, &quantised];
    for soc in [Soc::AtlasA2, Soc::AtlasA3, Soc::Ascend950] {
        for target in Cann::ALL.map(|cann| Target::new(soc, cann)) {
            let version = match soc {
                Soc::Ascend950 => Version::V5,
                _ => Version::chosen_on(&decode, Version::V3, target),
            };
            for (index, call) in calls.into_iter().enumerate() {
                let before = allocations();
                let checked = call.check(version, target);
                if checked.as_ref().is_err_and(Violation::is_unsupported) {
                    continue;
                }
                let checked = checked.unwrap_or_else(|error| {
                    panic!("call {index} on {target}: {error}");
                });
                let linted = checked.lint(&[]);
                let keys: usize = (0..256).map(|b| checked.problem.kv_len(b)).sum();
                assert_eq!(allocations(), before, "call {index} on {target}");
                assert_eq!(linted, Ok(()), "call {index} on {target}");
                assert_eq!(keys, 256 + 16 * 255 * 128);
            }
        }
    }
}

#[test]
fn an_accepted_flash_attention_call_allocates_nothing() {
    use ascend_spec::ops::flash_attention_score::{FlashAttentionCall, Version};

    let of = |dtype, shape: &[i64]| TensorDesc::contiguous(dtype, shape);
    let ends: Vec<i64> = (1..=256).map(|b| b * 16).collect();
    let dense = FlashAttentionCall {
        query: of(DType::Bf16, &[8, 32, 512, 128]),
        key: of(DType::Bf16, &[8, 8, 512, 128]),
        value: of(DType::Bf16, &[8, 8, 512, 128]),
        num_heads: 32,
        softmax_max: of(DType::Float, &[8, 32, 512, 8]),
        softmax_sum: of(DType::Float, &[8, 32, 512, 8]),
        attention_out: of(DType::Bf16, &[8, 32, 512, 128]),
        ..FlashAttentionCall::new("BNSD")
    };
    let masked = FlashAttentionCall {
        sparse_mode: 6,
        atten_mask: of(DType::Bool, &[3072, 2048]),
        prefix: Some(&[0, 1, 2, 3, 4, 5, 6, 512]),
        real_shift: of(DType::Bf16, &[1, 32, 512, 512]),
        drop_mask: of(DType::UInt8, &[8 * 32 * 512 * 64]),
        keep_prob: 0.9,
        ..dense
    };
    let packed = FlashAttentionCall {
        query: of(DType::Bf16, &[4096, 32, 128]),
        key: of(DType::Bf16, &[4096, 8, 128]),
        value: of(DType::Bf16, &[4096, 8, 128]),
        actual_seq_lengths: Some(&ends),
        actual_seq_lengths_kv: Some(&ends),
        sparse_mode: 7,
        atten_mask: of(DType::UInt8, &[2048, 2048]),
        pre_tokens: 16,
        next_tokens: 0,
        softmax_max: of(DType::Float, &[4096, 32, 8]),
        softmax_sum: of(DType::Float, &[4096, 32, 8]),
        attention_out: of(DType::Bf16, &[4096, 32, 128]),
        ..FlashAttentionCall { input_layout: Some("TND"), ..dense }
    };
    let target = Target::new(Soc::AtlasA2, Cann::V9_1);
    for call in [dense, masked, packed] {
        let before = allocations();
        let problem = call.check(Version::chosen_on(&call, target), target);
        let linted = problem.as_ref().map(|problem| problem.lint(&[]));
        let rows = problem.as_ref().map(|problem| {
            let each = problem.sequences();
            each.map(|of| problem.geometry(&of).q_len()).sum::<u64>()
        });
        assert_eq!(allocations(), before);
        assert_eq!(linted, Ok(Ok(())));
        assert_eq!(rows, Ok(4096));
    }
}
