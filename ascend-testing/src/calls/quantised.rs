//! Calls with quantised tensors.

use super::paths::{CACHES, HALVES, HEADS, ends, length, pick};
use super::{Call, Random, desc};
use ascend_spec::ops::fused_infer_attention_score::{Cache, Version};
use ascend_spec::{Cann, DType, Extents, Layout, Soc, SparseMode, Target};

/// INT8 keys in an NZ cache, one query row or several.
pub fn nz(seed: u64) -> Call {
    let random = &mut Random(seed);
    let layout = pick(random, &[Layout::Bnsd, Layout::Bsnd, Layout::Bsh]);
    let several = random.below(2) == 0;
    let batch = 1 + random.below(2) as i64;
    let extents = Extents { batch, heads: 10, rows: if several { 2 + random.below(15) as i64 } else { 1 }, dim: 128 };
    let mut call = Call::new(layout, DType::Bf16, extents, seed);
    let lens: Vec<i64> = (0..batch).map(|_| length(random, 1)).collect();
    let block_size = pick(random, &[128, 512]);
    call.pages(Cache::Nz, DType::Int8, [1, block_size, 128, 128], &lens, random);
    call.plain.inner_precise = 1;
    let capacity = call.plain.block_table.unwrap().shape[1] * block_size;
    let scale = match (random.below(2), layout) {
        (0, _) => {
            call.plain.key_antiquant_mode = 1;
            call.plain.value_antiquant_mode = 1;
            desc(DType::Float, &[batch, capacity + random.below(3) as i64])
        }
        (_, Layout::Bsh) => desc(DType::Bf16, &[128]),
        (_, Layout::Bsnd) => desc(DType::Bf16, &[1, 128]),
        _ => desc(DType::Bf16, &[1, 1, 128]),
    };
    call.plain.key_antiquant_scale = Some(scale);
    call.plain.value_antiquant_scale = Some(scale);
    if several {
        call.masked(SparseMode::RightDownCausal);
    }
    call
}

/// Calls with quantised keys over packed rows, which 9.0 and later take, with scales of channels alone.
pub fn packed_nz(seed: u64) -> Call {
    let random = &mut Random(seed);
    let batch = 1 + random.below(3);
    let most = pick(random, &[1, 16]);
    let q_lens: Vec<i64> = (0..batch).map(|_| 1 + random.below(most) as i64).collect();
    let extents = Extents { batch: 1, heads: 10, rows: q_lens.iter().sum(), dim: 128 };
    let mut call = Call::new(Layout::Tnd, DType::Bf16, extents, seed);
    let cann = pick(random, &[Cann::V9_0, Cann::V9_1]);
    (call.target, call.version) = (Target::new(Soc::AtlasA2, cann), Version::V4);
    let lens: Vec<i64> = q_lens.iter().map(|&rows| length(random, rows)).collect();
    call.q_lens = Some(ends(&q_lens));
    let block_size = pick(random, &[128, 512]);
    let sizes = [1, block_size, 128, 128];
    call.pages(Cache::Nz, DType::Int8, sizes, &lens, random);
    call.plain.inner_precise = 1;
    let scale = desc(DType::Bf16, &[1, 128]);
    call.plain.key_antiquant_scale = Some(scale);
    call.plain.value_antiquant_scale = Some(scale);
    if most > 1 || random.below(2) == 0 {
        call.masked(SparseMode::RightDownCausal);
    }
    call
}

/// Quantised keys and values of single rows.
pub fn antiquant(seed: u64) -> Call {
    let random = &mut Random(seed);
    let (heads, kv_heads) = pick(random, &HEADS);
    let dtype = pick(random, &HALVES);
    let stored = pick(random, &[DType::Int8, DType::Int8, DType::Int4, DType::Int32]);
    let layout = match stored {
        DType::Int8 => pick(random, &[Layout::Bnsd, Layout::Bsnd, Layout::Bsh]),
        _ => pick(random, &[Layout::Bsnd, Layout::Bsh]),
    };
    let batch = 1 + random.below(3) as i64;
    let keys = length(random, 1);
    let dim = 64;
    let extents = Extents { batch, heads, rows: 1, dim };
    let mut call = Call::new(layout, dtype, extents, seed);
    let merged = random.below(4) == 0;
    let mode = random.below(if merged { 2 } else { 6 }) as i64;
    let paged = mode >= 4 || stored == DType::Int8 && random.below(3) == 0;
    let held = if stored == DType::Int32 { dim / 8 } else { dim };
    let rows_of_keys = Extents { heads: kv_heads, rows: keys, dim: held, ..extents };
    let mut capacity = keys;
    if paged {
        let lens: Vec<i64> = (0..batch).map(|_| length(random, 1)).collect();
        let cache = match (layout, stored) {
            (Layout::Bnsd, DType::Int8) => pick(random, &CACHES[..2]),
            _ => Cache::BnBsH,
        };
        call.pages(cache, stored, [kv_heads, 32, held, held], &lens, random);
        capacity = call.plain.block_table.unwrap().shape[1] * 32;
    } else {
        call.keys(stored, rows_of_keys, held);
    }
    let blocks = call.key[0].shape[0];
    let spare = capacity + random.below(3) as i64;
    let tensor = random.below(2) == 0;
    let shape: Vec<i64> = match mode {
        0 if tensor => vec![],
        0 => vec![kv_heads * dim],
        1 => vec![batch, spare],
        2 => vec![kv_heads],
        3 => vec![batch, kv_heads, spare],
        4 => vec![blocks, 32],
        _ => vec![blocks, kv_heads, 32],
    };
    let leading: &[i64] = match mode {
        _ if merged => &[2],
        0 => &[1],
        _ => &[],
    };
    let number = if matches!(mode, 0 | 2) { dtype } else { DType::Float };
    let scale = desc(number, &[leading, &shape].concat());
    let offset = (random.below(2) == 0).then_some(scale);
    if merged {
        call.plain.antiquant_scale = Some(scale);
        call.plain.antiquant_offset = offset;
        call.plain.antiquant_mode = mode;
    } else {
        call.plain.key_antiquant_scale = Some(scale);
        call.plain.value_antiquant_scale = Some(scale);
        call.plain.key_antiquant_offset = offset;
        call.plain.value_antiquant_offset = offset;
        call.plain.key_antiquant_mode = mode;
        call.plain.value_antiquant_mode = mode;
    }
    call
}

/// An INT8 query, or an INT8 output, or both.
pub fn quantised(seed: u64) -> Call {
    let random = &mut Random(seed);
    let (heads, kv_heads) = pick(random, &HEADS);
    let half = pick(random, &HALVES);
    let layout = pick(random, &[Layout::Bnsd, Layout::Bsnd, Layout::Bsh, Layout::BnsdBsnd]);
    let batch = 1 + random.below(3) as i64;
    let int8_in = random.below(2) == 0;
    let extents = Extents { batch, heads, rows: length(random, 2), dim: pick(random, &[32, 64]) };
    let stored = if int8_in { DType::Int8 } else { half };
    let mut call = Call::new(layout, stored, extents, seed);
    let keys = Extents {
        heads: kv_heads,
        // One tile: the maximum that runs is the final one.
        rows: if int8_in { length(random, 1).min(96) } else { length(random, 1) },
        ..extents
    };
    call.keys(stored, keys, extents.dim);
    let int8_out = !int8_in || random.below(2) == 0;
    let out = match (int8_out, int8_in) {
        (true, _) => DType::Int8,
        (false, true) => DType::Float16,
        (false, false) => half,
    };
    call.output(out, extents);
    if int8_in {
        let number = pick(random, &[DType::Float, DType::UInt64]);
        call.plain.deq_scale1 = Some(desc(number, &[1]));
        call.plain.quant_scale1 = Some(desc(DType::Float, &[1]));
        call.plain.deq_scale2 = Some(desc(number, &[1]));
    }
    if int8_out {
        let number = if stored == DType::Bf16 && random.below(2) == 0 { DType::Bf16 } else { DType::Float };
        let shape = match random.below(2) {
            0 => vec![1],
            _ => vec![heads, extents.dim],
        };
        call.plain.quant_scale2 = Some(desc(number, &shape));
        call.plain.quant_offset2 = (random.below(2) == 0).then(|| desc(number, &shape));
    }
    if random.below(2) == 0 {
        call.masked(SparseMode::LeftUpCausal);
    }
    call
}
