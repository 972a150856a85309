//! One field of a call changed, at random.

use super::calls::contents::arguments_of;
use super::calls::{Call, Random};
use ascend_attention::spec::ops::fused_infer_attention_score::{Argument, Parameter};
use ascend_attention::spec::{DType, Dims, Format, Layout, TensorDesc};

fn pick<T: Copy>(random: &mut Random, of: &[T]) -> T {
    of[random.below(of.len())]
}

/// The description of a tensor that the call has.
pub fn of_mut(call: &mut Call, argument: Argument) -> Option<&mut TensorDesc> {
    match argument.parameter {
        Parameter::Key => call.key.get_mut(argument.index),
        Parameter::Value => call.value.get_mut(argument.index),
        one => (call.plain.single_mut(one)?).as_mut(),
    }
}

/// Changes one field of the call; says which.
pub fn one_field(call: &mut Call, random: &mut Random) -> String {
    match random.below(5) {
        0 => attribute(call, random),
        1 => lengths(call, random),
        2 => extra(call, random),
        _ => tensor(call, random),
    }
}

/// A number near the one given, or far from all.
fn number(random: &mut Random, now: i64) -> i64 {
    match random.below(6) {
        0 => now.wrapping_add(1),
        1 => now.wrapping_sub(1),
        2 => now.wrapping_mul(2),
        3 => now / 2,
        4 => pick(random, &[-1, 0, 1, 2, 3, 4, 5, 16, 32, 128]),
        _ => pick(random, &[i64::MIN, i64::MAX, 1 << 33, -(1 << 40), 257]),
    }
}

fn attribute(call: &mut Call, random: &mut Random) -> String {
    let plain = &mut call.plain;
    let (name, field) = match random.below(14) {
        0 => ("num_heads", &mut plain.num_heads),
        1 => ("num_key_value_heads", &mut plain.num_key_value_heads),
        2 => ("sparse_mode", &mut plain.sparse_mode),
        3 => ("inner_precise", &mut plain.inner_precise),
        4 => ("block_size", &mut plain.block_size),
        5 => ("antiquant_mode", &mut plain.antiquant_mode),
        6 => ("key_antiquant_mode", &mut plain.key_antiquant_mode),
        7 => ("value_antiquant_mode", &mut plain.value_antiquant_mode),
        8 => ("query_quant_mode", &mut plain.query_quant_mode),
        9 => ("pse_type", &mut plain.pse_type),
        10 => ("pre_tokens", &mut plain.pre_tokens),
        11 => ("next_tokens", &mut plain.next_tokens),
        12 => {
            plain.softmax_lse_flag = !plain.softmax_lse_flag;
            return format!("softmax_lse_flag {}", plain.softmax_lse_flag);
        }
        _ => {
            let names = ["", "SH", "NSD", "bnsd", "\u{e9}"];
            let index = random.below(names.len() + Layout::ALL.len());
            let known = || Layout::ALL[index - names.len()].as_str();
            plain.input_layout = names.get(index).copied().unwrap_or_else(known);
            return format!("input_layout {:?}", plain.input_layout);
        }
    };
    *field = number(random, *field);
    format!("{name} {field}")
}

fn lengths(call: &mut Call, random: &mut Random) -> String {
    let (name, array) = match random.below(5) {
        0 | 1 => ("actual_seq_lengths", &mut call.q_lens),
        2 | 3 => ("actual_seq_lengths_kv", &mut call.kv_lens),
        _ => ("actual_shared_prefix_len", &mut call.prefix_len),
    };
    match array {
        None => *array = Some(vec![number(random, 1)]),
        Some(lengths) if !lengths.is_empty() && random.below(3) > 0 => {
            let index = random.below(lengths.len());
            lengths[index] = number(random, lengths[index]);
        }
        Some(lengths) => match random.below(3) {
            0 => *array = None,
            1 => lengths.push(number(random, 0)),
            _ => drop(lengths.pop()),
        },
    }
    format!("{name} {array:?}")
}

/// A tensor that the call did not have.
fn extra(call: &mut Call, random: &mut Random) -> String {
    let query = call.plain.query.unwrap();
    let (n, d) = (call.plain.num_heads, *query.shape.last().unwrap());
    let half = query.dtype;
    let desc = |dtype, shape: &[i64]| TensorDesc::contiguous(dtype, shape);
    let plain = &mut call.plain;
    let (name, slot, wanted) = match random.below(16) {
        0 => ("pse_shift", &mut plain.pse_shift, desc(half, &[1, n, 300, 300])),
        1 => ("atten_mask", &mut plain.atten_mask, desc(DType::Bool, &[2048, 2048])),
        2 => ("deq_scale1", &mut plain.deq_scale1, desc(DType::Float, &[1])),
        3 => ("quant_scale1", &mut plain.quant_scale1, desc(DType::Float, &[1])),
        4 => ("quant_scale2", &mut plain.quant_scale2, desc(DType::Float, &[1])),
        5 => ("quant_offset2", &mut plain.quant_offset2, desc(DType::Float, &[1])),
        6 => ("antiquant_scale", &mut plain.antiquant_scale, desc(half, &[2, n, 1, d])),
        7 => ("block_table", &mut plain.block_table, desc(DType::Int32, &[1, 1])),
        8 => ("query_padding_size", &mut plain.query_padding_size, desc(DType::Int64, &[1])),
        9 => ("kv_padding_size", &mut plain.kv_padding_size, desc(DType::Int64, &[1])),
        10 => ("key_antiquant_scale", &mut plain.key_antiquant_scale, desc(half, &[1])),
        11 => ("value_antiquant_offset", &mut plain.value_antiquant_offset, desc(half, &[1])),
        12 => ("key_shared_prefix", &mut plain.key_shared_prefix, Some(call.key[0])),
        13 => ("query_rope", &mut plain.query_rope, Some(query)),
        14 => ("learnable_sink", &mut plain.learnable_sink, desc(DType::Bf16, &[n])),
        _ => ("dequant_scale_query", &mut plain.dequant_scale_query, desc(DType::Float, &[1])),
    };
    if slot.is_none() {
        *slot = wanted;
        return format!("{name} given");
    }
    *slot = None;
    format!("{name} not given")
}

fn tensor(call: &mut Call, random: &mut Random) -> String {
    let all = arguments_of(&call.describe());
    let argument = pick(random, &all);
    let desc = of_mut(call, argument).unwrap();
    match random.below(8) {
        0 => desc.dtype = pick(random, DType::ALL),
        1 => desc.format = pick(random, &[Format::FractalNz, Format::Ncl, Format::Undefined]),
        2 => {
            // One axis more or less.
            let mut shape = desc.shape.to_vec();
            if random.below(2) == 0 && shape.len() < Dims::MAX_RANK {
                shape.insert(0, 1);
            } else {
                shape.pop();
            }
            *desc = TensorDesc::packed(desc.dtype, Dims::new(&shape).unwrap());
        }
        3 => {
            let strides: Vec<i64> = desc.strides.iter().map(|stride| stride * 2).collect();
            desc.strides = Dims::new(&strides).unwrap();
        }
        _ if desc.shape.rank() > 0 => {
            let axis = random.below(desc.shape.rank());
            let size = desc.shape[axis];
            let other = pick(random, &[size + 1, size - 1, 0, 2 * size, 1, size + 16]).max(0);
            *desc = TensorDesc::packed(desc.dtype, desc.shape.with(axis, other));
        }
        _ => {}
    }
    format!("{argument:?} {desc}")
}
