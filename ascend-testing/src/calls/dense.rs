//! Calls over tensors with a batch axis: prefill and decode, every mask, lists of keys, strided views.

use super::paths::{HALVES, HEADS, length, pick};
use super::{Call, Random, desc};
use ascend_spec::ops::fused_infer_attention_score::{FiaCall, Parameter};
use ascend_spec::{DType, Dims, Extents, Layout, SparseMode, TensorDesc};

/// A call of the prefill or the decode path.
pub fn dense(seed: u64) -> Call {
    let random = &mut Random(seed);
    let (heads, kv_heads) = pick(random, &HEADS);
    let dtype = pick(random, &HALVES);
    let decode = random.below(3) == 0;
    let layouts = [Layout::Bnsd, Layout::Bsnd, Layout::Bsh, Layout::BnsdBsnd];
    let layout = pick(random, &layouts[..if decode { 3 } else { 4 }]);
    let batch = 1 + random.below(4) as i64;
    let extents = Extents {
        batch,
        heads,
        rows: if decode { 1 } else { length(random, 2) },
        dim: if decode { 1 + random.below(80) as i64 } else { pick(random, &[16, 32, 48, 64, 128]) },
    };
    let mut call = Call::new(layout, dtype, extents, seed);
    let keys = length(random, 1);
    let rows = Extents { heads: kv_heads, rows: keys, ..extents };
    call.keys(dtype, rows, extents.dim);
    let mut shortest = keys;
    if batch > 1 && random.below(4) == 0 {
        let lengths: Vec<i64> = (0..batch).map(|_| length(random, 1)).collect();
        let one = |&rows: &i64| {
            let extents = Extents { batch: 1, rows, heads: kv_heads, ..extents };
            TensorDesc::packed(dtype, layout.input().shape(extents))
        };
        call.key = lengths.iter().map(one).collect();
        call.value.clone_from(&call.key);
        shortest = lengths.into_iter().min().unwrap();
    }
    if random.below(2) == 0 {
        call.kv_lens = Some(lengths(random, batch, shortest));
    }
    if !decode && random.below(2) == 0 {
        call.q_lens = Some(lengths(random, batch, extents.rows));
    }
    call.plain.inner_precise = random.below(if decode { 2 } else { 4 }) as i64;
    if random.below(2) == 0 {
        call.lse(extents);
    }
    let longest = longest(&call, layout);
    if decode {
        if random.below(3) == 0 {
            full_mask(&mut call, random, &[batch, 1, longest]);
        }
    } else {
        masks(&mut call, random, &[batch, extents.rows, longest]);
    }
    if random.below(6) == 0 {
        spread(&mut call, 2 + random.below(2) as i64);
    }
    call
}

fn lengths(random: &mut Random, batch: i64, most: i64) -> Vec<i64> {
    let count = pick(random, &[1, batch]);
    (0..count)
        .map(|_| match random.below(4) {
            0 => 0,
            1 => most,
            _ => random.below(most as usize + 1) as i64,
        })
        .collect()
}

fn longest(call: &Call, layout: Layout) -> i64 {
    let axis = layout.input().row_axis();
    call.key.iter().map(|key| key.shape[axis]).max().unwrap()
}

/// A mask of the prefill path, or none.
fn masks(call: &mut Call, random: &mut Random, &[batch, rows, keys]: &[i64; 3]) {
    // The others belong to the training operators.
    let mode = pick(random, &SparseMode::ALL[..5]);
    let tokens = |random: &mut Random| random.below(60) as i64;
    match mode {
        SparseMode::DefaultMask if random.below(2) == 0 => {}
        SparseMode::DefaultMask | SparseMode::AllMask => {
            call.plain.sparse_mode = mode.acl();
            let (more, spare) = (random.below(3) as i64, random.below(20) as i64);
            let (i, j) = (rows + more, keys + spare);
            let shape = match random.below(5) {
                0 => vec![i, j],
                1 => vec![1, i, j],
                2 => vec![batch, i, j],
                3 => vec![1, 1, i, j],
                _ => vec![batch, 1, i, j],
            };
            full_mask(call, random, &shape);
            if mode == SparseMode::DefaultMask {
                call.plain.pre_tokens = pick(random, &[FiaCall::ALL_TOKENS, 3, 40]);
                call.plain.next_tokens = pick(random, &[FiaCall::ALL_TOKENS, 0, 17]);
            }
        }
        SparseMode::Band => {
            call.masked(mode);
            call.plain.pre_tokens = tokens(random);
            call.plain.next_tokens = tokens(random);
        }
        _ => call.masked(mode),
    }
}

fn full_mask(call: &mut Call, random: &mut Random, shape: &[i64]) {
    let dtype = pick(random, &[DType::Int8, DType::UInt8, DType::Bool]);
    let mask = desc(dtype, shape);
    let most = pick(random, &[1, 4, 20]);
    let bytes = (0..mask.elements().unwrap()).map(|_| u8::from(random.below(most) == 0)).collect();
    call.contents.push((Parameter::AttenMask.into(), bytes));
    call.plain.atten_mask = Some(mask);
}

/// Takes the tensors that attention is computed of apart: each element is followed by a gap.
fn spread(call: &mut Call, by: i64) {
    let apart = |desc: &mut TensorDesc| {
        let strides: Vec<i64> = desc.strides.iter().map(|stride| stride * by).collect();
        desc.strides = Dims::new(&strides).unwrap();
    };
    call.key.iter_mut().for_each(apart);
    call.value.iter_mut().for_each(apart);
    call.plain.query.iter_mut().for_each(apart);
    call.plain.attention_out.iter_mut().for_each(apart);
    call.plain.softmax_lse.iter_mut().for_each(apart);
}
