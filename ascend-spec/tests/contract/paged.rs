//! Corners of page attention in the decode path.

use crate::corners::{answers, checked, half, int8, of, with};
use ascend_spec::ops::fused_infer_attention_score::FiaCall;
use ascend_spec::{DType, TensorDesc};

/// Single rows over a paged cache of three axes.
pub(crate) fn paged<'a>(layout: &'a str, cache: &'a [TensorDesc], query: &[i64], heads: (i64, i64)) -> FiaCall<'a> {
    FiaCall {
        query: Some(half(query)),
        key: cache,
        value: cache,
        num_heads: heads.0,
        num_key_value_heads: heads.1,
        block_table: Some(of(DType::Int32, &[2, 4])),
        block_size: 16,
        actual_seq_lengths_kv: Some(&[40, 64]),
        attention_out: Some(half(query)),
        ..FiaCall::new(layout)
    }
}

#[test]
fn single_rows_in_bsh_have_the_head_dimension_of_a_cache_of_three_axes() {
    // B8: the last axis is N * (value.dim2 / Nk), a division without remainder.
    let (key, odd, short, narrow) =
        ([half(&[20, 16, 256])], [half(&[20, 16, 257])], [half(&[20, 16, 255])], [half(&[20, 16, 128])]);
    let call = paged("BSH", &key, &[2, 1, 512], (4, 2));
    let value = |value, out: i64| {
        with(&call, |c| {
            c.value = value;
            c.attention_out = Some(half(&[2, 1, out]));
        })
    };
    let rows = with(&call, |c| {
        c.query = Some(half(&[2, 2, 512]));
        c.attention_out = Some(half(&[2, 2, 256]));
        c.value = &narrow;
    });
    answers(&[
        ("accepted", "value as key", call.clone()),
        ("unsupported", "257 / 2 is 128", value(&odd, 512)),
        ("attention_out.shape", "257 / 2 is 128", value(&odd, 514)),
        ("unsupported", "255 / 2 is 127", value(&short, 508)),
        ("attention_out.shape", "255 / 2 is 127", value(&short, 512)),
        ("accepted", "half as wide", value(&narrow, 256)),
        ("attention_out.shape", "half as wide", value(&narrow, 512)),
        ("attention_out.shape", "several rows", rows),
    ]);
    let narrow = value(&narrow, 256);
    assert_eq!(checked(&narrow).problem.value_dim, 64);
}

#[test]
fn the_key_alone_says_how_a_paged_cache_lies() {
    // F6, J9.
    let (three, four) = ([half(&[20, 16, 256])], [half(&[20, 2, 16, 128])]);
    let (leading, trailing) = ([half(&[1, 20, 16, 256])], [half(&[20, 16, 256, 1])]);
    let two = [half(&[20, 16])];
    let bsnd = paged("BSND", &three, &[2, 1, 4, 128], (4, 2));
    let bnsd = FiaCall {
        query: Some(half(&[2, 4, 1, 128])),
        attention_out: Some(half(&[2, 4, 1, 128])),
        ..paged("BNSD", &four, &[2, 4, 1, 128], (4, 2))
    };
    let bsh = paged("BSH", &three, &[2, 1, 512], (4, 2));
    answers(&[
        ("accepted", "BnBsH", bsnd.clone()),
        ("accepted", "BnNBsD", bnsd.clone()),
        ("cache.layout", "four axes", with(&bsnd, |c| c.key = &leading)),
        ("cache.layout", "four axes", with(&bsnd, |c| c.key = &trailing)),
        ("cache.layout", "four axes", with(&bsh, |c| c.key = &leading)),
        ("cache.layout", "four axes", with(&bsnd, |c| c.key = &four)),
        ("unsupported", "value of four axes", with(&bsnd, |c| c.value = &four)),
        ("unsupported", "value of four axes", with(&bsh, |c| c.value = &four)),
        ("unsupported", "value of three axes", with(&bnsd, |c| c.value = &three)),
        ("unsupported", "value of two axes", with(&bsnd, |c| c.value = &two)),
        ("unsupported", "key of two axes", with(&bsnd, |c| c.key = &two)),
    ]);
    // The prefill path looks at both.
    let cache = [half(&[20, 128, 256])];
    let prefill = FiaCall { block_size: 128, ..paged("BSND", &cache, &[2, 17, 4, 128], (4, 2)) };
    answers(&[
        ("accepted", "BnBsH", prefill.clone()),
        ("cache.rank", "two axes", with(&prefill, |c| c.key = &two)),
        (
            "attention_out.shape",
            "nothing",
            with(&prefill, |c| {
                c.input_layout = "BNSD";
                c.query = Some(half(&[2, 4, 17, 128]));
            }),
        ),
    ]);
}

#[test]
fn the_decode_path_takes_key_caches_of_any_shape() {
    // No entry of group F compares them; an NZ cache is another matter (F20).
    let (fewer, longer, wider) = ([half(&[20, 1, 16, 128])], [half(&[20, 2, 32, 128])], [half(&[20, 2, 16, 256])]);
    let right = [half(&[20, 2, 16, 128])];
    let call = paged("BNSD", &right, &[2, 4, 1, 128], (4, 2));
    for keys in [&right, &fewer, &longer, &wider] {
        answers(&[("accepted", "key", with(&call, |c| c.key = keys))]);
        answers(&[("accepted", "value", with(&call, |c| c.value = keys))]);
        let call = with(&call, |c| c.key = keys);
        let linted = checked(&call).lint(&["cache.value_unchecked"]);
        let id = linted.err().map(|violation| violation.rule.id);
        assert_eq!(id, (keys[0] != right[0]).then_some("cache.shape_unchecked"));
    }
}

#[test]
fn unchecked_calls_take_any_value() {
    // J1.
    let (key, flat) = ([int8(&[20, 32, 256])], [int8(&[20, 32])]);
    let call = FiaCall {
        block_size: 32,
        inner_precise: 2,
        actual_seq_lengths: Some(&[1, 1]),
        antiquant_scale: Some(half(&[2, 256])),
        ..paged("BSND", &key, &[2, 1, 4, 128], (4, 2))
    };
    answers(&[
        ("accepted", "unchecked", call.clone()),
        ("unsupported", "a value of two axes", with(&call, |c| c.value = &flat)),
        ("inner_precise.known", "no query lengths", with(&call, |c| c.actual_seq_lengths = None)),
    ]);
}

#[test]
fn packed_queries_have_the_head_dimension_of_the_value_as_its_axes_say() {
    // B13, J2.
    let (nz, by_heads, flat) = ([int8(&[8, 2, 4, 32, 32])], [int8(&[8, 2, 32, 128])], [int8(&[8, 32])]);
    let words = [of(DType::Int32, &[8, 2, 4, 32, 32])];
    let call = FiaCall {
        block_size: 32,
        inner_precise: 2,
        actual_seq_lengths: Some(&[2, 3]),
        antiquant_scale: Some(of(DType::Float, &[2, 256])),
        antiquant_offset: Some(of(DType::Float, &[2, 256])),
        ..paged("TND", &nz, &[3, 4, 128], (4, 2))
    };
    let value = |value| with(&call, |c| c.value = value);
    answers(&[
        ("accepted", "as the key", call.clone()),
        ("unsupported", "other axes", value(&by_heads)),
        ("attention_out.shape", "two axes", value(&flat)),
        ("unsupported", "another type", value(&words)),
    ]);
}
