//! Random calls that the operators take.

use super::calls::paths::{ends, pick};
use super::calls::{Call, Random, ascend950, dense, desc, paths, quantised, releases};
use super::mutation::one_in;
use ascend_spec::ops::fused_infer_attention_score::Cache;
use ascend_spec::ops::{
    batch_mat_mul, flash_attention_score, gather_pa_kv_cache, incre_flash_attention, prompt_flash_attention,
    ring_attention_update,
};
use ascend_spec::{
    Cann, DType, Soc, Target, TensorDesc, ops::attention_update as update, ops::scatter_pa_kv_cache as scatter,
};

pub(super) const FUSED_SEEDS: u64 = 75;
pub(super) const OTHER_SEEDS: u64 = 80;
pub(super) const NEWEST: Target = Target::new(Soc::AtlasA2, Cann::NEWEST);

/// Contents of any tensor: small positions for integers, a mask that hides some, numbers near 1.
pub(super) fn fill(name: &'static str, index: usize, desc: &TensorDesc, held: &mut [u8]) {
    let random = &mut Random(held.len() as u64 ^ ((name.len() as u64) << 20) ^ ((index as u64) << 30));
    let size = match desc.dtype {
        DType::Int32 => 4,
        DType::Int64 => 8,
        _ => 0,
    };
    if size > 0 && !matches!(name, "key" | "value") {
        let mut last = 0i64;
        for place in held.chunks_mut(size) {
            last = match random.below(8) {
                0 => -1,
                1 => 1 << 30,
                2 => last.max(0) + random.below(9) as i64,
                _ => random.below(4) as i64,
            };
            place.copy_from_slice(&last.to_le_bytes()[..place.len()]);
        }
        return;
    }
    let mask = matches!(desc.dtype, DType::Bool | DType::UInt8);
    for (at, byte) in held.iter_mut().enumerate() {
        *byte = match mask {
            true => u8::from(at % 3 == 0),
            false if at % 2 == 1 => 0x3c,
            false => ((at * 37) >> 1) as u8,
        };
    }
}

/// A call of FusedInferAttentionScore, of any of its paths on any product.
pub(super) fn fused(seed: u64) -> Call {
    const DRAWS: [fn(u64) -> Call; 15] = [
        dense::dense,
        paths::packed,
        paths::paged,
        paths::latent,
        paths::biased,
        paths::sloped,
        quantised::nz,
        quantised::packed_nz,
        quantised::antiquant,
        quantised::quantised,
        ascend950::any,
        |seed| releases::accepted(seed, NEWEST),
        |seed| releases::accepted(seed, Target::new(Soc::AtlasA2, Cann::V8_5)),
        |seed| releases::accepted(seed, Target::new(Soc::AtlasA2, Cann::V9_0)),
        split_fused,
    ];
    DRAWS[seed as usize % DRAWS.len()](seed)
}

/// Packed rows of the split-fuse path, over a cache or not, with arguments that it ignores.
fn split_fused(seed: u64) -> Call {
    let random = &mut Random(seed);
    let (kv_heads, group) = (pick(random, &[1, 2, 4]), pick(random, &[1, 2]));
    let (dim, heads) = (pick(random, &[16, 40, 80]), kv_heads * group);
    let batch = 1 + random.below(3);
    let q_lens: Vec<i64> = (0..batch).map(|_| 1 + random.below(5) as i64).collect();
    let kv_lens: Vec<i64> = q_lens.iter().map(|q| q + random.below(40) as i64).collect();
    let of = ascend_spec::Extents { batch: 1, heads, rows: q_lens.iter().sum(), dim };
    let layout = ascend_spec::Layout::Tnd;
    let mut call = Call::new(layout, DType::Float16, of, seed);
    if one_in(2, random) {
        call.pages(Cache::BnBsH, DType::Float16, [kv_heads, 16, dim, dim], &kv_lens, random);
    } else {
        let rows = kv_lens.iter().sum();
        call.keys(DType::Float16, ascend_spec::Extents { heads: kv_heads, rows, ..of }, dim);
        call.kv_lens = Some(ends(&kv_lens));
    }
    call.q_lens = Some(ends(&q_lens));
    let prefix = Some(desc(DType::Float16, &[1, pick(random, &[1, 4, 9]), dim]));
    (call.plain.key_shared_prefix, call.plain.value_shared_prefix) = (prefix, prefix);
    call.target = NEWEST;
    call.version = ascend_spec::ops::fused_infer_attention_score::Version::V5;
    call
}

/// Sizes of attention: batch, key heads, query heads, query rows, keys, head dimension.
fn sizes(random: &mut Random) -> [i64; 6] {
    let kv_heads = pick(random, &[1, 2, 4]);
    [
        pick(random, &[1, 2, 3]),
        kv_heads,
        kv_heads * pick(random, &[1, 2]),
        pick(random, &[2, 7, 16, 33]),
        pick(random, &[1, 8, 17, 64, 130]),
        pick(random, &[16, 32, 64, 72, 80]),
    ]
}

fn half(shape: &[i64]) -> Option<TensorDesc> {
    Some(desc(DType::Float16, shape))
}

fn float(shape: &[i64]) -> Option<TensorDesc> {
    Some(desc(DType::Float, shape))
}

pub(super) fn prompt(seed: u64) -> prompt_flash_attention::Arguments<TensorDesc> {
    let random = &mut Random(seed);
    let [b, kv, n, s, keys, d] = sizes(random);
    prompt_flash_attention::Arguments {
        query: half(&[b, n, s, d]),
        key: half(&[b, kv, keys, d]),
        value: half(&[b, kv, keys, d]),
        pse_shift: half(&[1, n, s, keys]).filter(|_| one_in(3, random)),
        atten_mask: Some(desc(DType::Bool, &[b, 1, s, keys])).filter(|_| one_in(2, random)),
        num_heads: n,
        num_key_value_heads: kv,
        next_tokens: 2_147_483_647,
        input_layout: Some("BNSD".into()),
        attention_out: half(&[b, n, s, d]),
        ..Default::default()
    }
}

pub(super) fn incre(seed: u64) -> incre_flash_attention::Arguments<TensorDesc> {
    let random = &mut Random(seed);
    let [b, kv, n, _, keys, d] = sizes(random);
    let mut call = incre_flash_attention::Arguments {
        query: half(&[b, n, 1, d]),
        key: vec![desc(DType::Float16, &[b, kv, keys, d])],
        value: vec![desc(DType::Float16, &[b, kv, keys, d])],
        pse_shift: half(&[1, n, 1, keys]).filter(|_| one_in(3, random)),
        atten_mask: Some(desc(DType::Bool, &[b, keys])).filter(|_| one_in(2, random)),
        num_heads: n,
        num_key_value_heads: kv,
        input_layout: Some("BNSD".into()),
        attention_out: half(&[b, n, 1, d]),
        ..Default::default()
    };
    if seed % 4 >= 2 && one_in(2, random) {
        let cache = desc(DType::Float16, &[4, 16, kv * d]);
        (call.key, call.value) = (vec![cache], vec![cache]);
        (call.pse_shift, call.atten_mask) = (None, None);
        call.block_table = Some(desc(DType::Int32, &[b, 3]));
        call.block_size = 16;
        call.actual_seq_lengths = Some(vec![random.below(49) as i64; b as usize]);
    }
    call
}

/// A call of FlashAttentionScore or, with versions from 11 on, of FlashAttentionVarLenScore.
pub(super) fn score(seed: u64) -> (flash_attention_score::Arguments<TensorDesc>, u8) {
    let random = &mut Random(seed);
    let [b, kv, n, s, keys, d] = sizes(random);
    let packed = seed % 2 == 1;
    let layout = match packed {
        true => "TND",
        false => pick(random, &["BNSD", "BSND", "BSH", "SBH"]),
    };
    let shape = |n: i64, s: i64| match layout {
        "BNSD" => vec![b, n, s, d],
        "BSND" => vec![b, s, n, d],
        "BSH" => vec![b, s, n * d],
        "SBH" => vec![s, b, n * d],
        _ => vec![b * s, n, d],
    };
    let softmax = match packed {
        true => vec![b * s, n, 8],
        false => vec![b, n, s, 8],
    };
    let scores = b * n * s * keys;
    let sum = |len: i64| (1..=b).map(|b| b * len).collect::<Vec<i64>>();
    let mut call = flash_attention_score::Arguments {
        query: half(&shape(n, s)),
        key: half(&shape(kv, keys)),
        value: half(&shape(kv, keys)),
        softmax_max: float(&softmax),
        softmax_sum: float(&softmax),
        attention_out: half(&shape(n, s)),
        actual_seq_lengths: packed.then(|| sum(s)),
        actual_seq_lengths_kv: packed.then(|| sum(keys)),
        num_heads: n,
        input_layout: Some(layout.into()),
        ..Default::default()
    };
    if one_in(2, random) {
        let shapes = [vec![s, keys], vec![b, 1, s, keys], vec![b, n, s, keys]];
        call.atten_mask = Some(desc(DType::Bool, &shapes[random.below(3)]));
        call.sparse_mode = 1;
        if one_in(3, random) {
            // Rows of another tensor: every second column.
            call.atten_mask = call.atten_mask.map(|mask| {
                let strides = mask.strides.iter().map(|stride| stride * 2);
                let strides = strides.collect::<Vec<i64>>();
                let strides = ascend_spec::Dims::new(&strides).unwrap();
                TensorDesc { strides, ..mask }
            });
        }
    }
    if one_in(3, random) {
        call.real_shift = match (packed, random.below(2)) {
            (true, 0) => half(&[scores]),
            (true, _) => half(&[n * b * keys]),
            (false, 0) => half(&[b, n, s, keys]),
            (false, _) => half(&[1, n, 1, keys]),
        };
    }
    if one_in(3, random) {
        call.drop_mask = Some(desc(DType::UInt8, &[(scores + 127) / 128 * 16]));
        call.keep_prob = 0.5;
    }
    (call, if packed { 11 + (seed / 2 % 2) as u8 } else { 1 + (seed / 2 % 3) as u8 })
}

pub(super) fn ring(seed: u64) -> (ring_attention_update::Arguments<TensorDesc>, u8) {
    let random = &mut Random(seed);
    let [b, _, n, s, ..] = sizes(random);
    let packed = one_in(2, random);
    let (attn, softmax) = match packed {
        true => (vec![b * s, n, 64], vec![b * s, n, 8]),
        false => (vec![s, b, n * 64], vec![b, n, s, 8]),
    };
    let (attn, softmax) = (half(&attn), float(&softmax));
    let call = ring_attention_update::Arguments {
        prev_attn_out: attn,
        prev_softmax_max: softmax,
        prev_softmax_sum: softmax,
        cur_attn_out: attn,
        cur_softmax_max: softmax,
        cur_softmax_sum: softmax,
        actual_seq_qlen: Some(desc(DType::Int64, &[b + 1])).filter(|_| packed),
        input_layout: Some(if packed { "TND" } else { "SBH" }.into()),
        attn_out: attn,
        softmax_max: softmax,
        softmax_sum: softmax,
        ..Default::default()
    };
    (call, 1 + (seed % 2) as u8)
}

/// A cache and the rows of so many tokens: of every head, or in the NZ order of every hidden unit.
fn rows_and_cache(nz: bool, tokens: i64, random: &mut Random) -> [TensorDesc; 3] {
    let (n, d) = (pick(random, &[1, 2]), pick(random, &[16, 64]));
    let (blocks, size) = (pick(random, &[1, 4]), pick(random, &[2, 16]));
    let dtype = pick(random, &[DType::Float16, DType::Bf16]);
    let cache = match nz {
        true => desc(dtype, &[blocks, n * d / 16, size, 16]),
        false => desc(dtype, &[blocks, size, n, d]),
    };
    [desc(dtype, &[tokens, n, d]), desc(dtype, &[tokens, n * d]), cache]
}

pub(super) fn gather(seed: u64) -> gather_pa_kv_cache::Arguments<TensorDesc> {
    let random = &mut Random(seed);
    let (nz, b) = (one_in(3, random), pick(random, &[1, 2, 3]));
    let tokens = pick(random, &[1, 5, 40]);
    let [by_head, by_unit, cache] = rows_and_cache(nz, tokens, random);
    let rows = if nz { by_unit } else { by_head };
    let sums = one_in(2, random);
    gather_pa_kv_cache::Arguments {
        key_cache: Some(cache),
        value_cache: Some(cache),
        block_tables: Some(desc(DType::Int32, &[b, 3])),
        seq_lens: Some(desc(DType::Int32, &[b + i64::from(sums)])),
        key: Some(rows),
        value: Some(rows),
        seq_offset: Some(desc(DType::Int32, &[b])).filter(|_| one_in(2, random)),
        cache_mode: nz.then(|| "PA_NZ".into()),
        is_seq_lens_cumsum: sums,
    }
}

pub(super) fn scatter(seed: u64) -> scatter::Arguments<TensorDesc> {
    let random = &mut Random(seed);
    let nz = one_in(3, random);
    let tokens = pick(random, &[1, 5, 40]);
    let [rows, _, cache] = rows_and_cache(nz, tokens, random);
    scatter::Arguments {
        key: Some(rows),
        key_cache: Some(cache),
        slot_mapping: Some(desc(pick(random, &[DType::Int32, DType::Int64]), &[tokens])),
        value: Some(rows),
        value_cache: Some(cache),
        cache_mode: nz.then(|| "PA_NZ".into()),
        ..Default::default()
    }
}

pub(super) fn update(seed: u64) -> update::Arguments<TensorDesc> {
    let random = &mut Random(seed);
    let parts = pick(random, &[1, 2, 5]);
    let (rows, dim) = (pick(random, &[1, 7, 64]), pick(random, &[8, 32, 136]));
    let (local, lse) = (desc(DType::Float16, &[rows, dim]), desc(DType::Float, &[rows]));
    let writes_lse = one_in(2, random);
    update::Arguments {
        lse: vec![lse; parts],
        local_out: vec![local; parts],
        update_type: i64::from(writes_lse),
        out: Some(local),
        lse_out: writes_lse.then_some(lse),
    }
}

pub(super) fn products(seed: u64) -> batch_mat_mul::Arguments<TensorDesc> {
    let random = &mut Random(seed);
    let [b, m, k, n] = [(); 4].map(|()| pick(random, &[1, 2, 3, 16, 33]));
    let left = if one_in(3, random) { 1 } else { b };
    batch_mat_mul::Arguments {
        self_: half(&[left, m, k]),
        mat2: half(&[b, k, n]),
        out: half(&[b, m, n]),
        cube_math_type: 0,
    }
}
