//! Lints of releases from 8.5 on, and of Ascend 950.

use super::{Found, bf16, half, int8, lints_on, mask, of, with};
use ascend_spec::ops::fused_infer_attention_score::{FiaCall, Version};
use ascend_spec::{Cann, DType, Dims, Soc, StridedKeys, Target, TensorDesc};

const A2: Target = Target::new(Soc::AtlasA2, Cann::V9_1);
const A2_9_0: Target = Target::new(Soc::AtlasA2, Cann::V9_0);
const A2_9_2: Target = Target::new(Soc::AtlasA2, Cann::V9_2);
const ASCEND_950: Target = Target::new(Soc::Ascend950, Cann::V9_1);

pub(super) fn split_fused(found: &mut Found<'_>) {
    let key = [bf16(&[20, 2, 80])];
    let four = [bf16(&[20, 4, 80])];
    let packed = FiaCall {
        query: Some(bf16(&[9, 4, 80])),
        key: &key,
        value: &key,
        num_heads: 4,
        num_key_value_heads: 2,
        actual_seq_lengths: Some(&[4, 9]),
        actual_seq_lengths_kv: Some(&[8, 20]),
        attention_out: Some(bf16(&[9, 4, 80])),
        ..FiaCall::new("TND")
    };
    assert_eq!(lints_on(&packed, Version::V5, A2), [""; 0]);
    assert_eq!(lints_on(&packed, Version::V3, A2), ["version.deprecated"]);
    found.ids.insert("version.deprecated");
    (found.visit)("version.deprecated", &packed, Version::V3, A2);
    found.breaks_on("split_fuse.ends", &with(&packed, |c| c.actual_seq_lengths = Some(&[11, 9])), A2);
    found.breaks_on(
        "split_fuse.causal_rows",
        &with(&packed, |c| {
            (c.sparse_mode, c.atten_mask) = (3, mask(&[2048, 2048]));
            c.actual_seq_lengths_kv = Some(&[3, 20]);
        }),
        A2,
    );
    // Rows of padding, and lengths that fill the rows where ends are meant.
    assert_eq!(lints_on(&with(&packed, |c| c.actual_seq_lengths = Some(&[4, 8])), Version::V5, A2_9_2), [""; 0]);
    found.breaks_on("split_fuse.lengths_each", &with(&packed, |c| c.actual_seq_lengths = Some(&[4, 5])), A2_9_2);
    found.breaks_on("split_fuse.lengths_each", &with(&packed, |c| c.actual_seq_lengths_kv = Some(&[8, 12])), A2_9_2);
    found.breaks_on("split_fuse.kv_heads", &with(&packed, |c| c.num_key_value_heads = 1), A2);
    for (heads, kv_heads) in [(5, 2), (4, 3), (3, 2), (2, 4), (1, 2)] {
        let query = bf16(&[9, heads, 80]);
        let key = [bf16(&[20, kv_heads, 80])];
        let call = FiaCall {
            query: Some(query),
            key: &key,
            value: &key,
            num_heads: heads,
            num_key_value_heads: kv_heads,
            attention_out: Some(query),
            ..packed
        };
        let target = |cann| Target::new(Soc::AtlasA2, cann);
        for cann in [Cann::V8_5, Cann::V9_0, Cann::V9_1] {
            let broken = lints_on(&call, Version::V4, target(cann));
            assert_eq!(broken, ["split_fuse.heads_divide"], "{heads} {kv_heads} {cann}");
        }
        // 8.1 refuses, and no newer release is named as one that takes it.
        assert!(call.check(Version::V1, target(Cann::V8_1)).is_err());
        assert_eq!(call.taken_by(Version::V1, target(Cann::V8_1), &[]), None);
        found.breaks_on("split_fuse.heads_divide", &call, A2);
    }
    found.breaks_on("split_fuse.output_dtype", &with(&packed, |c| c.attention_out = Some(half(&[9, 4, 80]))), A2);
    found.breaks_on("split_fuse.ignored", &with(&packed, |c| c.value_shared_prefix = Some(bf16(&[1]))), A2);
    // A tensor of another type than the keys, and one over a cache, whose rows have other strides.
    let prefixed = with(&packed, |c| {
        c.key_shared_prefix = Some(bf16(&[1, 4, 80]));
        c.value_shared_prefix = Some(half(&[1, 4, 80]));
    });
    found.breaks_on("split_fuse.ignored", &prefixed, A2);
    let cache = [bf16(&[4, 16, 160])];
    let paged = with(&prefixed, |c| {
        (c.key, c.value) = (&cache, &cache);
        c.block_table = Some(of(DType::Int32, &[2, 3]));
        c.block_size = 16;
        c.actual_seq_lengths_kv = Some(&[20, 37]);
    });
    found.breaks_on("split_fuse.ignored", &paged, A2);
    let own = with(&packed, |c| {
        (c.key, c.value, c.num_key_value_heads) = (&four, &four, 0);
    });
    found.breaks_on("split_fuse.kv_heads_zero", &own, A2);
    found.breaks_on("split_fuse.kv_heads_zero", &own, A2_9_0);
}

pub(super) fn unified(found: &mut Found<'_>) {
    let key = [bf16(&[2, 64, 4, 64])];
    let two = [key[0], key[0]];
    let single = FiaCall {
        query: Some(bf16(&[2, 1, 4, 64])),
        key: &key,
        value: &key,
        num_heads: 4,
        attention_out: Some(bf16(&[2, 1, 4, 64])),
        ..FiaCall::new("BSND")
    };
    assert_eq!(lints_on(&single, Version::V5, A2), [""; 0]);
    found.breaks_on(
        "sparse_mode.single_row",
        &with(&single, |c| {
            (c.sparse_mode, c.atten_mask) = (3, mask(&[2048, 2048]));
        }),
        A2,
    );
    found.breaks_on(
        "learnable_sink.combined",
        &with(&single, |c| {
            c.learnable_sink = Some(bf16(&[4]));
            c.pse_shift = Some(bf16(&[1, 4, 1, 64]));
        }),
        A2,
    );
    found.breaks_on("pse_type.ignored", &with(&single, |c| c.pse_type = 2), A2_9_0);
    found.breaks_on("key.list_batch_unchecked", &with(&single, |c| (c.key, c.value) = (&two, &two)), A2);
    found.breaks_on("atten_mask.row_each", &with(&single, |c| c.atten_mask = mask(&[1, 64])), A2);
    let hollow = [key[0], bf16(&[0, 64, 4, 64])];
    found.breaks_on("key.list_batch_empty", &with(&single, |c| (c.key, c.value) = (&hollow, &hollow)), A2);
    let padded = with(&single, |c| {
        c.query = Some(bf16(&[2, 3, 4, 64]));
        c.attention_out = Some(bf16(&[2, 3, 4, 64]));
        c.kv_padding_size = Some(of(DType::Int64, &[1]));
        c.actual_seq_lengths_kv = Some(&[20, 30]);
        c.atten_mask = mask(&[2, 3, 64]);
    });
    assert_eq!(lints_on(&padded, Version::V5, A2), [""; 0]);
    found.breaks_on("atten_mask.padded_keys", &with(&padded, |c| c.atten_mask = mask(&[2, 3, 30])), A2);
    let out = with(&single, |c| c.attention_out = Some(int8(&[2, 1, 4, 64])));
    let problem = out.check(Version::V5, A2_9_0);
    assert!(problem.is_err(), "what has no scale is not computed");
    let several = with(&single, |c| {
        c.query = Some(bf16(&[2, 3, 4, 64]));
        c.attention_out = Some(bf16(&[2, 3, 4, 64]));
    });
    found.breaks_on("pse_shift.one_row", &with(&several, |c| c.pse_shift = Some(bf16(&[1, 4, 1, 64]))), ASCEND_950);
    found.breaks_on("pse_shift.one_row_taken", &with(&several, |c| c.pse_shift = Some(bf16(&[1, 4, 1, 64]))), A2);
    let odd = [of(DType::Bf16, &[2, 64, 4, 7])];
    found.breaks_on(
        "head_dim.unaligned",
        &with(&single, |c| {
            c.query = Some(bf16(&[2, 1, 4, 7]));
            (c.key, c.value) = (&odd, &odd);
            c.attention_out = Some(bf16(&[2, 1, 4, 7]));
        }),
        ASCEND_950,
    );
}

pub(super) fn trees(found: &mut Found<'_>) {
    let key = [bf16(&[2, 64, 4, 128])];
    let tree = FiaCall {
        query: Some(bf16(&[2, 3, 4, 128])),
        key: &key,
        value: &key,
        num_heads: 4,
        query_rope: Some(bf16(&[2, 3, 4, 64])),
        key_rope: Some(bf16(&[2, 64, 4, 64])),
        sparse_mode: 9,
        atten_mask: mask(&[2, 3, 3]),
        attention_out: Some(bf16(&[2, 3, 4, 128])),
        ..FiaCall::new("BSND")
    };
    assert_eq!(lints_on(&tree, Version::V5, A2), [""; 0]);
    for shape in [&[1, 3, 3][..], &[2, 3, 2], &[18 - 1], &[2, 2, 2]] {
        let small = with(&tree, |c| c.atten_mask = mask(shape));
        found.breaks_on("tree_mask.size", &small, A2);
        // What is read beyond the tensor counts as touched: a caller that has not allocated it is refused.
        let checked = small.check(Version::V5, A2).unwrap();
        let described = mask(shape).unwrap().byte_range().unwrap();
        assert!(checked.problem.mask_bytes().unwrap().end > described.end);
    }
    found.breaks_on("tree_mask.shape", &with(&tree, |c| c.atten_mask = mask(&[2, 4, 5])), A2);
    let packed_key = [bf16(&[20, 4, 128])];
    let packed = FiaCall {
        query: Some(bf16(&[5, 4, 128])),
        key: &packed_key,
        value: &packed_key,
        query_rope: Some(bf16(&[5, 4, 64])),
        key_rope: Some(bf16(&[20, 4, 64])),
        actual_seq_lengths: Some(&[3, 5]),
        actual_seq_lengths_kv: Some(&[8, 20]),
        atten_mask: mask(&[9 + 4]),
        attention_out: Some(bf16(&[5, 4, 128])),
        input_layout: "TND",
        ..tree.clone()
    };
    assert_eq!(lints_on(&packed, Version::V5, A2), [""; 0]);
    found.breaks_on("tree_mask.size", &with(&packed, |c| c.atten_mask = mask(&[12])), A2);
    let latents = [bf16(&[4, 128, 512])];
    let absorbed = FiaCall {
        query: Some(bf16(&[2, 3, 4, 512])),
        key: &latents,
        value: &latents,
        query_rope: Some(bf16(&[2, 3, 4, 64])),
        key_rope: Some(bf16(&[4, 128, 64])),
        num_key_value_heads: 1,
        block_table: Some(of(DType::Int32, &[2, 2])),
        block_size: 128,
        actual_seq_lengths_kv: Some(&[3, 200]),
        attention_out: Some(bf16(&[2, 3, 4, 512])),
        ..tree.clone()
    };
    assert_eq!(lints_on(&absorbed, Version::V5, A2), [""; 0]);
    found.breaks_on("tree_mask.more_rows", &with(&absorbed, |c| c.actual_seq_lengths_kv = Some(&[2, 200])), A2);
    let cache = [int8(&[4, 1, 16, 128, 32])];
    let quantised = FiaCall {
        query: Some(int8(&[5, 8, 512])),
        key: &cache,
        value: &cache,
        num_heads: 8,
        num_key_value_heads: 1,
        query_rope: Some(bf16(&[5, 8, 64])),
        key_rope: Some(bf16(&[4, 1, 4, 128, 16])),
        dequant_scale_query: Some(of(DType::Float, &[5, 8])),
        key_antiquant_scale: Some(of(DType::Float, &[1])),
        value_antiquant_scale: Some(of(DType::Float, &[1])),
        query_quant_mode: 3,
        block_table: Some(of(DType::Int32, &[2, 2])),
        block_size: 128,
        actual_seq_lengths_kv: Some(&[8, 20]),
        attention_out: Some(bf16(&[5, 8, 512])),
        ..packed.clone()
    };
    assert_eq!(lints_on(&quantised, Version::V5, A2), [""; 0]);
    for shape in [&[12][..], &[2, 3, 3]] {
        let other = with(&quantised, |c| c.atten_mask = mask(shape));
        found.breaks_on("tree_mask.ignored", &other, A2);
        let checked = other.check(Version::V5, A2).unwrap();
        assert_eq!(checked.problem.mask_bytes(), None);
    }
}

pub(super) fn strided_caches(found: &mut Found<'_>) {
    let strided = |shape: &[i64], strides: [i64; 3]| TensorDesc { strides: Dims::of(strides), ..bf16(shape) };
    let blocks_apart = [strided(&[6, 128, 128], [32_768, 128, 1])];
    let rows_apart = [strided(&[6, 128, 128], [32_768, 256, 1])];
    let decode = FiaCall {
        query: Some(bf16(&[2, 8, 1, 64])),
        key: &blocks_apart,
        value: &blocks_apart,
        num_heads: 8,
        num_key_value_heads: 2,
        block_table: Some(of(DType::Int32, &[2, 2])),
        block_size: 128,
        actual_seq_lengths_kv: Some(&[100, 128]),
        attention_out: Some(bf16(&[2, 8, 1, 64])),
        ..FiaCall::new("BNSD")
    };
    // The bytes of two caches.
    let copied = |call: &FiaCall<'_>, version, target, bytes: u64| {
        let checked = call.check(version, target).unwrap();
        let refused = checked.lint(&[]).unwrap_err();
        let said = format!("{bytes} bytes copied by each call");
        assert!(refused.given.starts_with(&said), "{refused}");
        assert!(refused.fix.contains("contiguous cache"), "{refused}");
    };
    let bytes = 2 * 6 * 128 * 128 * 2;
    found.breaks_by("cache.copied", &decode, (Version::V4, A2_9_2));
    copied(&decode, Version::V1, A2_9_2, bytes);
    // What the fix asks for.
    let plain = [bf16(&[6, 128, 128])];
    let mended = with(&decode, |c| (c.key, c.value) = (&plain, &plain));
    assert_eq!(lints_on(&mended, Version::V4, A2_9_2), [""; 0]);
    let reading = A2.strided_keys(StridedKeys::Copied);
    copied(&decode, Version::V4, reading, bytes);
    // 9.0 takes it too, and no source says what it does.
    assert_eq!(lints_on(&decode, Version::V4, A2_9_0)[0], "tensor.strided");
    let packed = FiaCall {
        query: Some(bf16(&[9, 8, 64])),
        attention_out: Some(bf16(&[9, 8, 64])),
        actual_seq_lengths: Some(&[4, 9]),
        input_layout: "TND",
        ..decode.clone()
    };
    for version in [Version::V4, Version::V5] {
        assert_eq!(lints_on(&packed, version, A2_9_2), [""; 0]);
    }
    let by_first = lints_on(&packed, Version::V1, A2_9_2);
    assert_eq!(by_first, ["version.deprecated"]);
    let rows = with(&packed, |c| (c.key, c.value) = (&rows_apart, &rows_apart));
    found.breaks_by("cache.copied", &rows, (Version::V4, A2_9_2));
    copied(&rows, Version::V4, A2_9_2, bytes);
    assert_eq!(lints_on(&decode, Version::V5, Target::new(Soc::Ascend950, Cann::V9_2)), [""; 0]);

    let latents = [strided(&[6, 128, 512], [73_728, 512, 1])];
    let absorbed = FiaCall {
        query: Some(bf16(&[2, 1, 8, 512])),
        key: &latents,
        value: &latents,
        query_rope: Some(bf16(&[2, 1, 8, 64])),
        key_rope: Some(strided(&[6, 128, 64], [73_728, 64, 1])),
        num_key_value_heads: 1,
        attention_out: Some(bf16(&[2, 1, 8, 512])),
        input_layout: "BSND",
        ..decode
    };
    assert_eq!(lints_on(&absorbed, Version::V4, A2_9_2), [""; 0]);
    // Before V4 the absorbed form is copied too.
    copied(&absorbed, Version::V3, A2_9_2, 6 * 128 * (2 * 512 + 64) * 2);
}
