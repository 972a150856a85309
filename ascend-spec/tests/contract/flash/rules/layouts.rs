//! Layouts, heads, packed lengths and the outputs' shapes.

use super::*;

pub(super) fn layouts(broken: &mut Broken) {
    for input_layout in ["NTD", "", "BNS"] {
        let call = FlashAttentionCall { input_layout: Some(input_layout), ..dense() };
        broken.by("flash.input_layout", 161_002, call);
    }
    let lower = FlashAttentionCall { input_layout: Some("tnd"), ..packed() };
    broken.by("flash.input_layout", 161_002, lower);
    let rank = FlashAttentionCall { input_layout: Some("BSH"), ..dense() };
    broken.by("flash.query_rank", 161_002, rank);
    let key = half(&[2, 2, 40, 64, 1]);
    let wide = FlashAttentionCall { key, ..dense() };
    broken.by("flash.kv_rank", 161_001, wide);
    broken.at(Version::V2, TARGET, "flash.key_rank", 161_002, &wide);
    let key = half(&[2, 40, 64]);
    let narrow = FlashAttentionCall { key, ..dense() };
    for version in [Version::V1, Version::V2, Version::V3] {
        broken.at(version, TARGET, "flash.key_rank", 161_002, &narrow);
    }
    let value = half(&[2, 40, 64]);
    broken.by("flash.kv_rank", 161_001, FlashAttentionCall { value, ..dense() });
    broken.at(Version::V1, TARGET, "flash.packed_without_lengths", 161_001, &packed());
    let key = half(&[3, 2, 40, 64]);
    broken.by("flash.key_batch", 161_001, FlashAttentionCall { key, value: key, ..dense() });
    let int8 = of(DType::Int8, &[2, 2, 40, 64]);
    broken.by("flash.dtype", 161_002, FlashAttentionCall { value: int8, ..dense() });
    let attention_out = float(&[2, 4, 24, 64]);
    let other = FlashAttentionCall { attention_out, ..dense() };
    broken.at(Version::V2, TARGET, "flash.out_dtype", 161_002, &other);
    broken.by("flash.out_shape", 161_001, other);
}

pub(super) fn heads(broken: &mut Broken) {
    broken.by("flash.head_num", 161_002, FlashAttentionCall { num_heads: 0, ..dense() });
    let narrow = half(&[2, 40, 32]);
    let call = FlashAttentionCall { key: narrow, value: narrow, ..hidden() };
    broken.by("flash.key_narrow", 161_001, call);
    let key = half(&[2, 2, 40, 32]);
    broken.by("flash.key_dim", 161_002, FlashAttentionCall { key, ..dense() });
    let value = half(&[2, 2, 40, 65]);
    broken.by("flash.value_dim", 161_002, FlashAttentionCall { value, ..dense() });
    let wide = FlashAttentionCall { query: half(&[2, 4, 24, 769]), key: half(&[2, 2, 40, 769]), ..dense() };
    broken.by("flash.head_dim_max", 161_002, wide);
    let uneven = FlashAttentionCall { query: half(&[2, 24, 258]), ..hidden() };
    broken.by("flash.hidden_size", 161_001, uneven);
    broken.by("flash.query_heads", 161_001, FlashAttentionCall { num_heads: 2, ..dense() });
    let key = half(&[2, 3, 40, 64]);
    broken.by("flash.head_groups", 161_001, FlashAttentionCall { key, value: key, ..dense() });
    let of_88 = |keys: i64, dim: i64| FlashAttentionCall {
        query: half(&[1, 2, 2, 88]),
        key: half(&[1, keys, 2, 88]),
        value: half(&[1, keys, 2, dim]),
        num_heads: 2,
        softmax_max: float(&[1, 2, 2, 8]),
        softmax_sum: float(&[1, 2, 2, 8]),
        attention_out: half(&[1, 2, 2, dim]),
        input_layout: Some("BSND"),
        ..dense()
    };
    broken.by("flash.head_dim_88", 161_001, of_88(512, 80));
    for (keys, dim) in [(511, 80), (512, 72), (512, 88)] {
        assert!(of_88(keys, dim).check(Version::V1, TARGET).is_ok());
    }
}

pub(super) fn lengths(broken: &mut Broken) {
    let with = |q: Option<&'static [i64]>, kv: Option<&'static [i64]>| FlashAttentionCall {
        actual_seq_lengths: q,
        actual_seq_lengths_kv: kv,
        ..packed()
    };
    for call in [with(None, Some(&[12, 45])), with(Some(&[10, 30]), Some(&[]))] {
        broken.by("flash.lengths_required", 161_001, call);
    }
    broken.by("flash.lengths_count", 161_001, with(Some(&[10, 30]), Some(&[45])));
    broken.by("flash.lengths_sum", 161_001, with(Some(&[10, 31]), Some(&[12, 45])));
    broken.by("flash.padded_tail", 161_001, with(Some(&[10, 29]), Some(&[12, 44])));
    assert!(with(Some(&[10, 29, 0]), Some(&[12, 44, 0])).check(Version::VarLenV1, TARGET).is_ok());
    broken.by("flash.lengths_all_zero", 161_001, with(Some(&[0, 0]), Some(&[12, 45])));
    broken.lint("flash.lengths_descend", with(Some(&[10, 30, 30]), Some(&[12, 45, 40])));
    broken.lint("flash.tail_unwritten", with(Some(&[10, 29]), Some(&[12, 45])));
}

pub(super) fn outputs(broken: &mut Broken) {
    let softmax_sum = float(&[2, 24, 4, 8]);
    broken.by("flash.softmax_shape", 161_001, FlashAttentionCall { softmax_sum, ..dense() });
    let softmax_out_layout = Some("TND");
    let order = FlashAttentionCall { softmax_out_layout, ..packed() };
    broken.lint("flash.softmax_out_layout_known", order);
    let attention_out = half(&[2, 4, 24, 63]);
    broken.by("flash.out_shape", 161_001, FlashAttentionCall { attention_out, ..dense() });
}
