//! Calls that break the rules on paged caches.

use ascend_spec::DType;
use ascend_spec::ops::fused_infer_attention_score::FiaCall;

use super::{Broken, Good, desc, half, int8};

pub(super) fn calls(broken: &mut Broken, good: &Good<'_>) {
    let prefill = &good.prefill;
    let cache = [half(&[3, 128, 128])];
    let paged = FiaCall {
        key: &cache,
        value: &cache,
        block_table: desc(DType::Int32, &[2, 2]),
        block_size: 128,
        actual_seq_lengths_kv: Some(&[200, 200]),
        ..prefill.clone()
    };
    broken.by("cache.blocks", paged.clone());
    let wide = [half(&[4, 128, 65_536])];
    broken.by(
        "cache.hidden_size",
        FiaCall {
            query: Some(half(&[2, 128, 16, 512])),
            attention_out: Some(half(&[2, 128, 16, 512])),
            num_heads: 128,
            num_key_value_heads: 128,
            key: &wide,
            value: &wide,
            ..paged.clone()
        },
    );
    broken.by("cache.rank", FiaCall { key: &[half(&[4, 128])], ..paged.clone() });
    let heads_first = [half(&[4, 4, 128, 32])];
    broken.by(
        "cache.layout",
        FiaCall {
            query: Some(half(&[2, 16, 8, 32])),
            attention_out: Some(half(&[2, 16, 8, 32])),
            input_layout: "BSND",
            key: &heads_first,
            value: &heads_first,
            ..paged.clone()
        },
    );
    let bytes = [int8(&[4, 128, 32])];
    broken.by(
        "inner_precise.int8_cache",
        FiaCall {
            query: Some(half(&[3, 8, 512])),
            attention_out: Some(half(&[8, 3, 512])),
            input_layout: "TND_NTD",
            key: &bytes,
            value: &bytes,
            inner_precise: 2,
            actual_seq_lengths: Some(&[1, 3]),
            query_rope: Some(half(&[3, 8, 64])),
            key_rope: Some(half(&[4, 128, 64])),
            ..paged.clone()
        },
    );
}
