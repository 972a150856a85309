//! Calls of the paths beyond the dense ones.

use super::{Call, Random, cached, desc};
use ascend_spec::ops::fused_infer_attention_score::{Cache, Parameter, Version};
use ascend_spec::{DType, Extents, Layout, Soc, SparseMode, Target};

pub const HALVES: [DType; 2] = [DType::Float16, DType::Bf16];
pub const HEADS: [(i64, i64); 6] = [(1, 1), (2, 2), (4, 2), (4, 1), (12, 1), (17, 1)];
pub const CACHES: [Cache; 3] = [Cache::BnBsH, Cache::BnNBsD, Cache::Nz];

pub fn pick<T: Copy>(random: &mut Random, choices: &[T]) -> T {
    choices[random.below(choices.len())]
}

/// A length from `least` on, with edges of tiles and blocks now and then.
pub fn length(random: &mut Random, least: i64) -> i64 {
    let length = match random.below(4) {
        0 => pick(random, &[0, 1, 16, 95, 96, 97, 127, 128, 129, 192]),
        1 => 40 + random.below(200) as i64,
        _ => random.below(40) as i64,
    };
    length.max(least)
}

/// Cumulative sums.
pub fn ends(lengths: &[i64]) -> Vec<i64> {
    lengths
        .iter()
        .scan(0, |end, length| {
            *end += length;
            Some(*end)
        })
        .collect()
}

/// Packed sequences of the prefill path: rotary parts, a sink, a paged cache.
pub fn packed(seed: u64) -> Call {
    let random = &mut Random(seed);
    let (heads, kv_heads) = pick(random, &HEADS);
    let paged = random.below(2) == 0;
    let layout = match random.below(2) {
        0 if !paged => Layout::NtdTnd,
        _ => Layout::Tnd,
    };
    let (dim, value_dim) = pick(random, &[(64, 64), (128, 128), (192, 128)]);
    let mode = pick(random, &[SparseMode::DefaultMask, SparseMode::RightDownCausal, SparseMode::Band]);
    let batch = 1 + random.below(4);
    let mut q_lens: Vec<i64> = (0..batch).map(|_| length(random, 0)).collect();
    q_lens[0] = q_lens[0].max(1);
    let kv_lens: Vec<i64> = q_lens
        .iter()
        .map(|&q| match mode {
            SparseMode::RightDownCausal => q + length(random, 0),
            _ => length(random, 0),
        })
        .collect();
    let extents = Extents { batch: 1, heads, rows: q_lens.iter().sum(), dim };
    let mut call = Call::new(layout, DType::Bf16, extents, seed);
    let out = Extents { dim: value_dim, ..extents };
    call.output(DType::Bf16, out);
    call.q_lens = Some(ends(&q_lens));
    let keys = Extents { heads: kv_heads, rows: kv_lens.iter().sum::<i64>(), ..extents };
    let rope = dim == 128 && random.below(2) == 0;
    if paged {
        let cache = pick(random, &CACHES);
        let sizes = [kv_heads, 128, dim, value_dim];
        call.pages(cache, DType::Bf16, sizes, &kv_lens, random);
        let blocks = call.key[0].shape[0];
        let rope = rope.then(|| cached(cache, DType::Bf16, [blocks, kv_heads, 128, 64]));
        call.plain.key_rope = rope;
    } else {
        let mut lens = kv_lens.clone();
        // No keys at all is another path.
        lens[0] += i64::from(keys.rows == 0);
        let keys = Extents { rows: lens.iter().sum(), ..keys };
        call.keys(DType::Bf16, keys, value_dim);
        call.kv_lens = Some(ends(&lens));
        let rope = rope.then(|| {
            let shape = layout.input().shape(Extents { dim: 64, ..keys });
            desc(DType::Bf16, &shape)
        });
        call.plain.key_rope = rope;
    }
    if rope {
        let shape = layout.input().shape(Extents { dim: 64, ..extents });
        call.plain.query_rope = Some(desc(DType::Bf16, &shape));
    } else if dim == value_dim && random.below(2) == 0 {
        call.plain.learnable_sink = Some(desc(DType::Bf16, &[heads]));
    }
    if mode != SparseMode::DefaultMask {
        call.masked(mode);
    }
    if mode == SparseMode::Band {
        call.plain.pre_tokens = random.below(60) as i64;
        call.plain.next_tokens = random.below(60) as i64;
    }
    if random.below(2) == 0 {
        call.lse(extents);
    }
    call
}

/// Paged caches of batched queries, one row or several.
pub fn paged(seed: u64) -> Call {
    let random = &mut Random(seed);
    let (heads, kv_heads) = pick(random, &HEADS);
    let dtype = pick(random, &HALVES);
    let layout = pick(random, &[Layout::Bnsd, Layout::Bsnd, Layout::Bsh]);
    let several = random.below(2) == 0;
    let cache = match layout {
        Layout::Bnsd => pick(random, &CACHES[..2]),
        _ => Cache::BnBsH,
    };
    let dim = pick(random, &[16, 32, 64, 128]);
    let block_size = if several { 128 } else { pick(random, &[16, 32, 128]) };
    let batch = 1 + random.below(4) as i64;
    let kv_lens: Vec<i64> = (0..batch).map(|_| length(random, 1)).collect();
    let rows = if several { length(random, 2) } else { 1 };
    let extents = Extents { batch, heads, rows, dim };
    let mut call = Call::new(layout, dtype, extents, seed);
    call.pages(cache, dtype, [kv_heads, block_size, dim, dim], &kv_lens, random);
    if several && random.below(2) == 0 {
        call.masked(SparseMode::RightDownCausal);
    }
    if random.below(2) == 0 {
        call.lse(extents);
    }
    call
}

/// Multi-head latent attention over a compressed cache, quantised or not.
pub fn latent(seed: u64) -> Call {
    let random = &mut Random(seed);
    let heads = pick(random, &[1, 2, 8, 32]);
    let quantised = random.below(3) == 0;
    let layouts = [
        Layout::Bsh,
        Layout::Bsnd,
        Layout::BshNbsd,
        Layout::BsndNbsd,
        Layout::Tnd,
        Layout::TndNtd,
        Layout::Bnsd,
        Layout::BnsdNbsd,
    ];
    let layout = pick(random, &layouts[..if quantised { 6 } else { 8 }]);
    let dtype = if quantised { DType::Bf16 } else { pick(random, &HALVES) };
    let cache = match layout {
        _ if quantised => Cache::Nz,
        Layout::Bnsd | Layout::BnsdNbsd => pick(random, &CACHES[..2]),
        Layout::Tnd | Layout::TndNtd => pick(random, &CACHES),
        _ => pick(random, &[Cache::BnBsH, Cache::Nz]),
    };
    let block_size = match cache {
        Cache::Nz => 128,
        _ => pick(random, &[16, 128]),
    };
    let batch = 1 + random.below(3) as i64;
    let rows = pick(random, &[1, 1, 2, 5]);
    let q_lens: Vec<i64> = (0..batch).map(|_| rows).collect();
    let kv_lens: Vec<i64> = (0..batch).map(|_| length(random, rows)).collect();
    let packed = layout.is_packed();
    let extents = Extents {
        batch: if packed { 1 } else { batch },
        heads,
        rows: if packed { batch * rows } else { rows },
        dim: 512,
    };
    let stored = if quantised { DType::Int8 } else { dtype };
    let mut call = Call::new(layout, stored, extents, seed);
    call.output(dtype, extents);
    call.plain.scale = 1.0 / 192f64.sqrt();
    call.pages(cache, stored, [1, block_size, 512, 512], &kv_lens, random);
    let blocks = call.key[0].shape[0];
    call.plain.key_rope = Some(cached(cache, dtype, [blocks, 1, block_size, 64]));
    let shape = layout.input().shape(Extents { dim: 64, ..extents });
    call.plain.query_rope = Some(desc(dtype, &shape));
    if packed {
        call.q_lens = Some(ends(&q_lens));
    }
    if rows > 1 {
        call.masked(SparseMode::RightDownCausal);
    }
    if quantised {
        let shape = match (packed, layout.input().shape(extents)) {
            (true, _) => vec![extents.rows, heads],
            (false, _) => vec![batch, rows, heads],
        };
        call.plain.dequant_scale_query = Some(desc(DType::Float, &shape));
        call.plain.key_antiquant_scale = Some(desc(DType::Float, &[1]));
        call.plain.value_antiquant_scale = Some(desc(DType::Float, &[1]));
        call.plain.query_quant_mode = 3;
    }
    call
}

/// Dense queries with a position bias, a shared prefix or left padding.
pub fn biased(seed: u64) -> Call {
    let random = &mut Random(seed);
    let (heads, kv_heads) = pick(random, &HEADS);
    let dtype = pick(random, &HALVES);
    let layout = pick(random, &[Layout::Bnsd, Layout::Bsnd, Layout::Bsh]);
    let batch = 1 + random.below(3) as i64;
    let decode = random.below(3) == 0;
    let rows = if decode { 1 } else { length(random, 2) };
    let keys = length(random, 1);
    let dim = pick(random, &[16, 64]);
    let extents = Extents { batch, heads, rows, dim };
    let mut call = Call::new(layout, dtype, extents, seed);
    let rows_of_keys = Extents { heads: kv_heads, rows: keys, ..extents };
    call.keys(dtype, rows_of_keys, dim);
    let below = |random: &mut Random, most: i64| -> Vec<i64> {
        (0..batch).map(|_| random.below(most as usize + 1) as i64).collect()
    };
    let mut prefix = 0;
    if random.below(2) == 0 {
        // Left padding, further than there is room now and then.
        call.kv_lens = Some(below(random, keys));
        call.plain.kv_padding_size = Some(desc(DType::Int64, &[1]));
        let padding = random.below(keys as usize + 3) as i64 - 2;
        let bytes = padding.to_le_bytes().to_vec();
        call.contents.push((Parameter::KvPaddingSize.into(), bytes));
        if !decode {
            call.q_lens = Some(below(random, rows));
            call.plain.query_padding_size = Some(desc(DType::Int64, &[1]));
            let padding = random.below(rows as usize + 3) as i64 - 2;
            let bytes = padding.to_le_bytes().to_vec();
            call.contents.push((Parameter::QueryPaddingSize.into(), bytes));
        }
    } else if random.below(3) > 0 {
        prefix = length(random, 1);
        let shape = layout.input().shape(Extents { batch: 1, rows: prefix, ..rows_of_keys });
        call.plain.key_shared_prefix = Some(desc(dtype, &shape));
        call.plain.value_shared_prefix = Some(desc(dtype, &shape));
        if random.below(2) == 0 {
            call.prefix_len = Some(vec![random.below(prefix as usize + 1) as i64]);
        }
        if random.below(2) == 0 {
            call.kv_lens = Some(below(random, keys));
        }
    }
    let all = keys + prefix;
    if random.below(3) > 0 {
        let one = random.below(2) as i64;
        let spare = random.below(20) as i64;
        let more = if decode { 0 } else { random.below(3) as i64 };
        let shape = [[1, batch][one as usize], heads, rows + more, all + spare];
        call.plain.pse_shift = Some(desc(dtype, &shape));
    }
    match random.below(3) {
        0 if !decode => call.masked(SparseMode::RightDownCausal),
        1 => {
            call.plain.sparse_mode = SparseMode::AllMask.acl();
            let spare = random.below(5) as i64;
            let shape = if decode { vec![batch, 1, 1, all + spare] } else { vec![batch, 1, rows, all + spare] };
            let mask = desc(DType::Bool, &shape);
            let count = mask.elements().unwrap() as usize;
            let bytes = (0..count).map(|_| u8::from(random.below(4) == 0)).collect();
            call.contents.push((Parameter::AttenMask.into(), bytes));
            call.plain.atten_mask = Some(mask);
        }
        _ => {}
    }
    if random.below(2) == 0 {
        call.lse(extents);
    }
    call
}

/// Slopes as position bias: as many keys as rows, from positions of their own. For V5 on Ascend 950.
pub fn sloped(seed: u64) -> Call {
    const STARTS: [Option<&[i64]>; 4] = [None, Some(&[0]), Some(&[7]), Some(&[-40])];
    let random = &mut Random(seed);
    let (heads, kv_heads) = pick(random, &HEADS);
    let dtype = pick(random, &HALVES);
    let layout = pick(random, &[Layout::Bnsd, Layout::Bsnd, Layout::Bsh]);
    let extents =
        Extents { batch: 1 + random.below(3) as i64, heads, rows: length(random, 1), dim: pick(random, &[16, 64]) };
    let mut call = Call::new(layout, dtype, extents, seed);
    let of_keys = Extents { heads: kv_heads, ..extents };
    call.keys(dtype, of_keys, extents.dim);
    if random.below(3) == 0 {
        let mut lens = || -> Vec<i64> {
            let some = |_| random.below(extents.rows as usize + 1) as i64;
            (0..extents.batch).map(some).collect()
        };
        call.kv_lens = Some(lens());
        call.q_lens = (extents.rows > 1).then(lens);
    }
    if extents.rows > 1 && random.below(2) == 0 {
        call.masked(SparseMode::RightDownCausal);
    }
    (call.target, call.version) = (Target::snapshot(Soc::Ascend950), Version::V5);
    call.plain.pse_type = pick(random, &[2, 3]);
    call.plain.pse_shift = Some(desc(DType::Float, &[heads]));
    call.plain.q_start_idx = pick(random, &STARTS);
    call.plain.kv_start_idx = pick(random, &STARTS);
    let slopes = (0..heads).flat_map(|_| (0.3 * random.unit()).to_le_bytes());
    call.contents.push((Parameter::PseShift.into(), slopes.collect()));
    if random.below(2) == 0 {
        call.lse(extents);
    }
    call
}
