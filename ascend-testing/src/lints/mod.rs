//! Each lint is found alone, by a call that differs from a clean one in it. Shared by the tests of the contract and
//! those of the emulator, which launch the calls.

mod portable;
mod quantised;
mod releases;

use ascend_spec::ops::fused_infer_attention_score::{FiaCall, Version};
use ascend_spec::{DType, Dims, Level, Soc, Target, TensorDesc};
use std::collections::BTreeSet;

/// The version and the target that a call is for unless a test names others.
fn asked_for(call: &FiaCall<'_>) -> (Version, Target) {
    let (version, soc) = match call.q_start_idx {
        Some(_) => (Version::V5, Soc::Ascend950),
        None => (Version::V4, Soc::AtlasA2),
    };
    (version, Target::snapshot(soc))
}

fn lints(call: &FiaCall<'_>) -> Vec<&'static str> {
    let (version, target) = asked_for(call);
    lints_on(call, version, target)
}

fn lints_on(call: &FiaCall<'_>, version: Version, target: Target) -> Vec<&'static str> {
    let mut ids = Vec::new();
    let mut crash = false;
    let problem = call.check(version, target).unwrap();
    problem.each_lint(&mut |violation| {
        for text in [&violation.given, &violation.allowed, &violation.fix] {
            assert!(!text.is_empty(), "{violation:?}");
        }
        ids.push(violation.rule.id);
        crash |= violation.rule.level == Level::HostCrash;
    });
    assert_eq!(problem.lint(&[]).is_err(), !ids.is_empty());
    assert_eq!(problem.lint(&ids).is_err(), crash);
    ids
}

fn of(dtype: DType, shape: &[i64]) -> TensorDesc {
    TensorDesc::contiguous(dtype, shape).unwrap()
}

fn half(shape: &[i64]) -> TensorDesc {
    of(DType::Float16, shape)
}

fn bf16(shape: &[i64]) -> TensorDesc {
    of(DType::Bf16, shape)
}

fn int8(shape: &[i64]) -> TensorDesc {
    of(DType::Int8, shape)
}

fn float(shape: &[i64]) -> Option<TensorDesc> {
    Some(of(DType::Float, shape))
}

fn mask(shape: &[i64]) -> Option<TensorDesc> {
    Some(of(DType::Bool, shape))
}

/// Takes a call, and the lint that it breaks when it is checked for a version and a target.
type Visit<'v> = &'v mut dyn FnMut(&'static str, &FiaCall<'_>, Version, Target);

/// Calls by the lint that each breaks; what is found must be it alone.
struct Found<'v> {
    ids: BTreeSet<&'static str>,
    visit: Visit<'v>,
}

impl Found<'_> {
    fn clean(&self, call: &FiaCall<'_>) {
        assert_eq!(lints(call), [""; 0], "{call:?}");
    }

    fn breaks_on(&mut self, id: &'static str, call: &FiaCall<'_>, target: Target) {
        self.breaks_by(id, call, (Version::V5, target));
    }

    fn breaks_by(&mut self, id: &'static str, call: &FiaCall<'_>, (version, target): (Version, Target)) {
        assert_eq!(lints_on(call, version, target), [id], "{call:?}");
        self.ids.insert(id);
        (self.visit)(id, call, version, target);
    }

    fn breaks(&mut self, id: &'static str, call: FiaCall<'_>) {
        self.breaks_by(id, &call, asked_for(&call));
    }
}

fn with<'a>(call: &FiaCall<'a>, change: impl FnOnce(&mut FiaCall<'a>)) -> FiaCall<'a> {
    let mut call = call.clone();
    change(&mut call);
    call
}

/// Visits a call or several for every lint. Those about other releases have calls that are not visited.
pub fn each_broken(visit: Visit<'_>) -> BTreeSet<&'static str> {
    let mut found = Found { ids: BTreeSet::new(), visit };
    dense(&mut found);
    paged(&mut found);
    packed(&mut found);
    quantised::quantised(&mut found);
    quantised::antiquantised(&mut found);
    releases::split_fused(&mut found);
    releases::unified(&mut found);
    releases::trees(&mut found);
    releases::strided_caches(&mut found);
    portable::portable(&mut found);
    found.ids
}

fn dense(found: &mut Found<'_>) {
    let key = [half(&[2, 64, 4, 32])];
    let short = [half(&[2, 63, 4, 32])];
    let two = [key[0], key[0]];
    let none = [half(&[2, 0, 4, 32])];
    let prefill = FiaCall {
        query: Some(half(&[2, 16, 4, 32])),
        key: &key,
        value: &key,
        num_heads: 4,
        attention_out: Some(half(&[2, 16, 4, 32])),
        ..FiaCall::new("BSND")
    };
    let decode =
        FiaCall { query: Some(half(&[2, 1, 4, 32])), attention_out: Some(half(&[2, 1, 4, 32])), ..prefill.clone() };
    found.clean(&prefill);
    found.clean(&decode);
    let strided = TensorDesc { strides: Dims::of([2048, 32, 512, 1]), ..half(&[2, 16, 4, 32]) };
    found.breaks("tensor.strided", with(&prefill, |c| c.query = Some(strided)));
    let broadcast = TensorDesc { strides: Dims::of([1024, 0, 64, 1]), ..half(&[2, 4, 16, 64]) };
    found.breaks("tensor.strided", with(&prefill, |c| c.pse_shift = Some(broadcast)));
    found.breaks("tensor.empty", with(&prefill, |c| c.atten_mask = mask(&[0, 64])));
    found.breaks(
        "tensor.countable",
        with(&prefill, |c| {
            c.pse_shift = TensorDesc::contiguous(DType::Float16, &[1, 4, i64::MAX, 64]);
        }),
    );
    found.breaks("value.shape_unchecked", with(&prefill, |c| c.value = &none));
    found.breaks(
        "input_layout.heads_first",
        FiaCall { input_layout: "BSND_NBSD", attention_out: Some(half(&[4, 2, 1, 32])), ..decode.clone() },
    );
    let nz = TensorDesc { format: ascend_spec::Format::FractalNz, ..of(DType::Float, &[1]) };
    found.breaks("tensor.format", with(&decode, |c| c.softmax_lse = Some(nz)));
    found.breaks("scale_value.finite", with(&prefill, |c| c.scale = f64::NAN));
    found.breaks("scale_value.zero", with(&prefill, |c| c.scale = 1e-60));
    let root = f64::from(32).sqrt();
    found.breaks("scale_value.inverse", with(&prefill, |c| c.scale = root));
    found.breaks("attention_out.shape_unchecked", with(&prefill, |c| c.attention_out = Some(half(&[2, 16, 4, 31]))));
    found.breaks("softmax_lse.unchecked", with(&decode, |c| c.softmax_lse_flag = true));
    found.breaks("softmax_lse.ignored", with(&decode, |c| c.softmax_lse = float(&[2, 4, 1, 1])));
    found.clean(&with(&decode, |c| c.softmax_lse = float(&[1])));
    found.breaks("inner_precise.meaning", with(&prefill, |c| c.inner_precise = 5));
    found.breaks("value.shape_unchecked", with(&prefill, |c| c.value = &short));
    found.breaks("key.list_ignored", with(&prefill, |c| (c.key, c.value) = (&two, &two)));
    let elements = [half(&[1, 64, 4, 32]), half(&[1, 60, 4, 32])];
    let list = with(&prefill, |c| (c.key, c.value) = (&elements, &elements));
    found.clean(&list);
    let mixed = [elements[0], bf16(&[1, 60, 4, 32])];
    found.breaks("key.list_dtype", with(&list, |c| c.key = &mixed));
    let uneven = [half(&[1, 64, 4, 32]), half(&[1, 60, 4, 32])];
    let uneven = with(&list, |c| (c.key, c.value) = (&uneven, &uneven));
    found.clean(&with(&uneven, |c| {
        c.actual_seq_lengths_kv = Some(&[60]);
    }));
    found.breaks("key.list_single_length", with(&uneven, |c| c.actual_seq_lengths_kv = Some(&[61])));
    let many = vec![half(&[1, 64, 4, 32]); 257];
    found.breaks(
        "key.list_max",
        FiaCall {
            query: Some(half(&[257, 16, 4, 32])),
            attention_out: Some(half(&[257, 16, 4, 32])),
            key: &many,
            value: &many,
            ..prefill.clone()
        },
    );
    let long = [half(&[1, 20_971_521, 1, 16])];
    found.breaks(
        "query.rows_max",
        FiaCall {
            query: Some(half(&[1, 1, 1, 16])),
            attention_out: Some(half(&[1, 1, 1, 16])),
            key: &long,
            value: &long,
            num_heads: 1,
            ..decode.clone()
        },
    );
    let narrow = [half(&[1, 64, 8, 32])];
    found.breaks(
        "num_heads.max_decode",
        FiaCall {
            query: Some(half(&[1, 1, 264, 32])),
            attention_out: Some(half(&[1, 1, 264, 32])),
            key: &narrow,
            value: &narrow,
            num_heads: 264,
            num_key_value_heads: 8,
            ..decode.clone()
        },
    );
    let odd = [half(&[129, 64, 4, 24])];
    found.breaks(
        "query.batch_unaligned",
        FiaCall {
            query: Some(half(&[129, 1, 4, 24])),
            attention_out: Some(half(&[129, 1, 4, 24])),
            key: &odd,
            value: &odd,
            ..decode.clone()
        },
    );
    found.breaks("actual_seq_lengths.surplus", with(&prefill, |c| c.actual_seq_lengths = Some(&[1, 2, 3])));
    found.breaks("actual_seq_lengths.ignored", with(&decode, |c| c.actual_seq_lengths = Some(&[0])));
    found.clean(&with(&decode, |c| c.actual_seq_lengths = Some(&[1, 1])));
    found.breaks("block_size.ignored", with(&prefill, |c| c.block_size = 64));
    // What serving engines pass with keys that are in no cache.
    found.clean(&with(&prefill, |c| c.block_size = 128));
    masked(found, &prefill, &decode);
    padded(found, &prefill, &decode);
    prefixed(found, &prefill);
    found.breaks("start_idx.ignored", with(&prefill, |c| c.q_start_idx = Some(&[0])));
}

fn masked(found: &mut Found<'_>, prefill: &FiaCall<'_>, decode: &FiaCall<'_>) {
    found.breaks("tokens.without_mask", with(prefill, |c| c.pre_tokens = 8));
    // Bounds beyond every key hide none, and a single row has no later keys.
    for (pre_tokens, next_tokens) in [(65_535, 65_535), (63, 63)] {
        found.clean(&with(prefill, |c| (c.pre_tokens, c.next_tokens) = (pre_tokens, next_tokens)));
    }
    found.clean(&with(decode, |c| (c.pre_tokens, c.next_tokens) = (65_535, 0)));
    found.breaks("tokens.without_mask", with(decode, |c| c.pre_tokens = 4));
    found.breaks(
        "tokens.without_mask",
        with(prefill, |c| {
            (c.sparse_mode, c.atten_mask, c.next_tokens) = (1, mask(&[16, 64]), 0);
        }),
    );
    let causal = with(prefill, |c| (c.sparse_mode, c.atten_mask) = (3, mask(&[2048, 2048])));
    for pre_tokens in [0, 63, 65_535] {
        found.clean(&with(&causal, |c| (c.pre_tokens, c.next_tokens) = (pre_tokens, 0)));
    }
    found.breaks("pre_tokens.ignored", with(&causal, |c| c.pre_tokens = 62));
    for mode in [1, 2, 4] {
        found.breaks("sparse_mode.without_mask", with(decode, |c| c.sparse_mode = mode));
    }
    found.clean(&with(decode, |c| c.sparse_mode = 3));
    found.breaks("sparse_mode.unchecked", with(decode, |c| c.sparse_mode = 7));
    for call in [decode, prefill] {
        found.breaks("sparse_mode.wide", with(call, |c| c.sparse_mode = 1 << 32));
    }
    found.breaks("sparse_mode.left_up_decode", with(decode, |c| (c.sparse_mode, c.atten_mask) = (2, mask(&[2, 64]))));
    found.clean(&with(decode, |c| (c.sparse_mode, c.atten_mask) = (1, mask(&[2, 1, 1, 64]))));
    for shape in [&[2, 4, 1, 64][..], &[2, 1, 4, 64], &[2, 4, 64]] {
        found.breaks("atten_mask.head_axis", with(decode, |c| c.atten_mask = mask(shape)));
    }
    found.breaks("atten_mask.head_axis", with(prefill, |c| c.atten_mask = mask(&[2, 4, 16, 64])));
}

fn padded(found: &mut Found<'_>, prefill: &FiaCall<'_>, decode: &FiaCall<'_>) {
    let pad = |dtype, shape: &[i64]| Some(of(dtype, shape));
    let clean = with(prefill, |c| {
        c.query_padding_size = pad(DType::Int64, &[1]);
        c.actual_seq_lengths = Some(&[4, 9]);
    });
    found.clean(&clean);
    found.breaks("padding_size.unchecked", with(&clean, |c| c.query_padding_size = pad(DType::Int32, &[1])));
    found.breaks("padding_size.ignored", with(decode, |c| c.query_padding_size = pad(DType::Int64, &[1])));
    found.breaks("padding_size.ignored", with(decode, |c| c.kv_padding_size = pad(DType::Int64, &[1])));
    let decode = with(decode, |c| {
        c.kv_padding_size = pad(DType::Int64, &[1]);
        c.actual_seq_lengths_kv = Some(&[4, 9]);
    });
    found.clean(&decode);
    found.breaks("padding_size.unchecked", with(&decode, |c| c.kv_padding_size = pad(DType::Int64, &[2])));
}

fn prefixed(found: &mut Found<'_>, prefill: &FiaCall<'_>) {
    let prefix = with(prefill, |c| {
        c.key_shared_prefix = Some(half(&[1, 16, 4, 32]));
        c.value_shared_prefix = Some(half(&[1, 16, 4, 32]));
        c.actual_shared_prefix_len = Some(&[12]);
    });
    found.clean(&prefix);
    found.breaks(
        "shared_prefix.dtype_unchecked",
        with(&prefix, |c| c.value_shared_prefix = Some(bf16(&[1, 16, 4, 32]))),
    );
    found.breaks("shared_prefix.length_ignored", with(prefill, |c| c.actual_shared_prefix_len = Some(&[12])));
    found.clean(&with(&prefix, |c| c.pse_shift = Some(half(&[1, 4, 16, 80]))));
    found.breaks("pse_shift.prefix_unchecked", with(&prefix, |c| c.pse_shift = Some(half(&[1, 4, 16, 64]))));
}

fn paged(found: &mut Found<'_>) {
    let cache = [half(&[8, 128, 128])];
    let decode = FiaCall {
        query: Some(half(&[2, 1, 4, 32])),
        key: &cache,
        value: &cache,
        num_heads: 4,
        block_table: Some(of(DType::Int32, &[2, 4])),
        block_size: 128,
        actual_seq_lengths_kv: Some(&[300, 500]),
        attention_out: Some(half(&[2, 1, 4, 32])),
        ..FiaCall::new("BSND")
    };
    found.clean(&decode);
    found.breaks("block_table.unchecked", with(&decode, |c| c.block_table = Some(of(DType::Int64, &[2, 4]))));
    found.breaks("block_table.unchecked", with(&decode, |c| c.block_table = Some(of(DType::Int32, &[1, 4]))));
    let few = [half(&[3, 128, 128])];
    found.breaks("cache.blocks_unchecked", with(&decode, |c| (c.key, c.value) = (&few, &few)));
    let other = [half(&[8, 64, 128])];
    found.breaks("cache.shape_unchecked", with(&decode, |c| (c.key, c.value) = (&other, &other)));
    found.breaks("cache.value_unchecked", with(&decode, |c| c.value = &other));
    let (heads_first, fewer) = ([half(&[8, 4, 128, 32])], [half(&[8, 2, 128, 64])]);
    let by_heads = FiaCall {
        input_layout: "BNSD",
        query: Some(half(&[2, 4, 1, 32])),
        attention_out: Some(half(&[2, 4, 1, 32])),
        key: &heads_first,
        value: &heads_first,
        ..decode.clone()
    };
    found.clean(&by_heads);
    found.breaks("cache.shape_unchecked", with(&by_heads, |c| (c.key, c.value) = (&fewer, &fewer)));
    found.breaks("actual_seq_lengths_kv.empty", with(&decode, |c| c.actual_seq_lengths_kv = Some(&[])));
    let wide = [half(&[8, 128, 65_536])];
    found.breaks(
        "cache.hidden_size_unchecked",
        FiaCall {
            query: Some(half(&[2, 1, 256, 256])),
            attention_out: Some(half(&[2, 1, 256, 256])),
            key: &wide,
            value: &wide,
            num_heads: 256,
            ..decode.clone()
        },
    );
    let bytes = [int8(&[8, 128, 128])];
    found.breaks(
        "inner_precise.unchecked",
        FiaCall {
            key: &bytes,
            value: &bytes,
            antiquant_scale: Some(half(&[2, 128])),
            inner_precise: 2,
            actual_seq_lengths: Some(&[1]),
            ..decode.clone()
        },
    );
}

fn packed(found: &mut Found<'_>) {
    let rows = [bf16(&[9, 4, 128])];
    let packed = FiaCall {
        query: Some(bf16(&[5, 4, 128])),
        attention_out: Some(bf16(&[5, 4, 128])),
        key: &rows,
        value: &rows,
        num_heads: 4,
        num_key_value_heads: 4,
        actual_seq_lengths: Some(&[2, 5]),
        actual_seq_lengths_kv: Some(&[4, 9]),
        ..FiaCall::new("TND")
    };
    found.clean(&packed);
    let wide = [bf16(&[9, 4, 192])];
    found.clean(&FiaCall { query: Some(bf16(&[5, 4, 192])), key: &wide, ..packed.clone() });
    let heads_first = [bf16(&[4, 9, 128])];
    let ntd = FiaCall {
        query: Some(bf16(&[4, 5, 128])),
        key: &heads_first,
        value: &heads_first,
        input_layout: "NTD_TND",
        ..packed.clone()
    };
    found.clean(&ntd);
    found.breaks("pse_shift.ignored", with(&ntd, |c| c.pse_shift = Some(bf16(&[1, 4, 5, 9]))));
    found.breaks("padding_size.ignored", with(&ntd, |c| c.query_padding_size = Some(of(DType::Int64, &[1]))));
    let rope = with(&packed, |c| {
        c.query_rope = Some(bf16(&[5, 4, 64]));
        c.key_rope = Some(bf16(&[9, 4, 64]));
    });
    found.clean(&rope);
    found.breaks("rope.dtype_unchecked", with(&rope, |c| c.query_rope = Some(half(&[5, 4, 64]))));
    let cache = [bf16(&[8, 128, 512])];
    let paged = with(&rope, |c| {
        (c.key, c.value) = (&cache, &cache);
        c.key_rope = Some(bf16(&[8, 128, 256]));
        c.block_table = Some(of(DType::Int32, &[2, 1]));
        c.block_size = 128;
    });
    found.clean(&paged);
    found.breaks("rope.cache_unchecked", with(&paged, |c| c.key_rope = Some(bf16(&[7, 128, 256]))));
    let latent = [bf16(&[8, 128, 512])];
    found.clean(&FiaCall {
        query: Some(bf16(&[5, 4, 512])),
        query_rope: Some(bf16(&[5, 4, 64])),
        attention_out: Some(bf16(&[5, 4, 512])),
        key: &latent,
        value: &latent,
        key_rope: Some(bf16(&[8, 128, 64])),
        num_key_value_heads: 1,
        ..paged
    });
}
