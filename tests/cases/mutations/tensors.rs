//! Every tensor of a call made wrong: missing, of another dtype, format, rank or size, strided, or given where it may
//! not be.

use super::call::Call;
use super::{Case, Mutation};
use ascend_attention::spec::ops::fused_infer_attention_score::{FiaCall, Route};
use ascend_attention::spec::{DType, Dims, Format, TensorDesc};

/// A tensor that is not in a list.
#[derive(Debug)]
pub struct Single {
    pub name: &'static str,
    pub of: for<'a> fn(&'a mut FiaCall<'static>) -> &'a mut Option<TensorDesc>,
}

macro_rules! singles {
    ($($name:ident)*) => {
        /// Every tensor that is not in a list.
        pub const SINGLES: &[Single] = &[$(Single {
            name: stringify!($name),
            of: |call| &mut call.$name,
        },)*];
    };
}

singles! {
    query pse_shift atten_mask deq_scale1 quant_scale1 deq_scale2 quant_scale2 quant_offset2 antiquant_scale
    antiquant_offset block_table query_padding_size kv_padding_size key_antiquant_scale key_antiquant_offset
    value_antiquant_scale value_antiquant_offset key_shared_prefix value_shared_prefix query_rope key_rope
    key_rope_antiquant_scale dequant_scale_query learnable_sink attention_out softmax_lse
}

/// Adds the mutations of every tensor of a case.
pub fn mutate(case: &Case, visit: &mut dyn FnMut(Mutation)) {
    for single in SINGLES {
        let now = *(single.of)(&mut case.call.plain.clone());
        let mut put = |kind: &'static str, detail: String, desc: Option<TensorDesc>| {
            let mut call = case.call.clone();
            *(single.of)(&mut call.plain) = desc;
            visit(Mutation { field: single.name, kind, detail, call });
        };
        match now {
            Some(_) if single.name == "softmax_lse" && !case.call.plain.softmax_lse_flag => {}
            Some(desc) => {
                if needed(case, single.name) {
                    put("null", String::new(), None);
                }
                each_change(case, single.name, desc, &mut |kind, detail, desc| put(kind, detail, Some(desc)));
            }
            None => {
                if let Some(desc) = forbidden(case, single.name) {
                    put("given", desc.to_string(), Some(desc));
                }
            }
        }
    }
    lists(case, visit);
}

type List = (&'static str, fn(&mut Call) -> &mut Vec<TensorDesc>);

fn lists(case: &Case, visit: &mut dyn FnMut(Mutation)) {
    let lists: [List; 2] = [("key", |call| &mut call.key), ("value", |call| &mut call.value)];
    for (field, of) in lists {
        let mut changed = |kind, detail, change: &dyn Fn(&mut Vec<TensorDesc>)| {
            let mut call = case.call.clone();
            change(of(&mut call));
            visit(Mutation { field, kind, detail, call });
        };
        let now = of(&mut case.call.clone()).clone();
        changed("null", String::new(), &Vec::clear);
        changed("count", "one more".into(), &|list| list.push(list[0]));
        if now.len() > 1 {
            changed("count", "one less".into(), &|list| list.truncate(list.len() - 1));
        }
        for (index, desc) in now.iter().enumerate() {
            each_change(case, field, *desc, &mut |kind, detail, desc| {
                changed(kind, format!("{index}: {detail}"), &|list| list[index] = desc);
            });
        }
    }
}

/// Dtypes that the documents allow for a tensor of this call.
fn dtypes(case: &Case, name: &str, now: DType) -> Vec<DType> {
    match name {
        "atten_mask" => vec![DType::Bool, DType::Int8, DType::UInt8],
        "deq_scale1" | "deq_scale2" => vec![DType::UInt64, DType::Float],
        // BF16 scales go with BF16 queries; an offset has its scale's.
        "quant_scale2" if case.call.plain.quant_offset2.is_none() => match case.query.dtype {
            DType::Bf16 => vec![DType::Float, DType::Bf16],
            _ => vec![DType::Float],
        },
        _ => vec![now],
    }
}

/// Changes of one tensor that the documents do not allow.
fn each_change(case: &Case, name: &str, desc: TensorDesc, visit: &mut dyn FnMut(&'static str, String, TensorDesc)) {
    let allowed = dtypes(case, name, desc.dtype);
    for &dtype in DType::ALL.iter().filter(|dtype| !allowed.contains(dtype)) {
        visit("dtype", dtype.to_string(), TensorDesc { dtype, ..desc });
    }
    for format in [Format::FractalNz, Format::Nc1hwc0, Format::Undefined, Format::Ndc1hwc0] {
        visit("format", format.to_string(), TensorDesc { format, ..desc });
    }
    let mut shaped = |kind, shape: Dims| {
        if !allowed_shape(case, name, &desc.shape, &shape) {
            visit(kind, shape.to_string(), TensorDesc { format: desc.format, ..TensorDesc::packed(desc.dtype, shape) });
        }
    };
    let ones = |count: usize| {
        let shape: Vec<i64> = std::iter::repeat_n(1, count).chain(desc.shape.iter().copied()).collect();
        Dims::new(&shape)
    };
    let all = desc.elements().unwrap() as i64;
    for shape in [ones(1), ones(8 - desc.shape.rank()), Dims::new(&[all]), Dims::new(&[])].into_iter().flatten() {
        if shape.rank() != desc.shape.rank() {
            shaped("rank", shape);
        }
    }
    for axis in 0..desc.shape.rank() {
        let size = desc.shape[axis];
        shaped("longer", desc.shape.with(axis, size + 1));
        shaped("longer", desc.shape.with(axis, i64::MAX));
        if size > 1 {
            shaped("shorter", desc.shape.with(axis, size - 1));
        }
        shaped("empty", desc.shape.with(axis, 0));
        shaped("negative", desc.shape.with(axis, -1));
        shaped("negative", desc.shape.with(axis, i64::MIN));
    }
    if all > 1 {
        let apart: Vec<i64> = desc.strides.iter().map(|stride| stride * 2).collect();
        visit("strided", String::new(), TensorDesc { strides: Dims::new(&apart).unwrap(), ..desc });
    }
}

/// Whether a call cannot do without an optional tensor.
fn needed(case: &Case, name: &str) -> bool {
    let call = &case.call.plain;
    match name {
        // A window without its mask is everything.
        "atten_mask" => call.sparse_mode != 0 && !(case.route == Route::Decode && call.sparse_mode == 3 && !case.rope),
        "pse_shift" | "learnable_sink" | "query_padding_size" | "kv_padding_size" => false,
        "quant_offset2" | "antiquant_offset" => false,
        _ => true,
    }
}

/// Whether the documents allow this shape as well.
fn allowed_shape(case: &Case, name: &str, from: &[i64], to: &[i64]) -> bool {
    if from == to {
        return true;
    }
    let prefill = case.route == Route::Prefill;
    // The one axis of another size, if the rank is the same.
    let axis = match from.len() == to.len() {
        true => from.iter().zip(to).position(|(from, to)| from != to),
        false => None,
    };
    let at_least = |axis: usize, least: i64| (least..i64::MAX).contains(&to[axis]);
    match (name, axis) {
        // As good as no mask, which mode 0 does without.
        ("atten_mask", Some(_)) if to.contains(&0) => case.call.plain.sparse_mode == 0 && !case.packed && !case.window,
        // A full mask may be larger than it need be, and one for all sequences.
        ("atten_mask", Some(axis)) if !case.compressed && axis + 1 == from.len() => at_least(axis, case.mask_keys),
        ("atten_mask", Some(axis)) if !case.compressed && axis + 2 == from.len() && prefill => {
            at_least(axis, case.rows)
        }
        ("atten_mask", Some(0)) if !case.compressed && from.len() > 2 => to[0] == case.batch || to[0] == 1 && prefill,
        ("atten_mask", None) => match to {
            [1, _, _] | [1, 1, _, _] => prefill,
            [b, 1, _] => *b == case.batch && !case.compressed,
            _ => false,
        },
        ("pse_shift", Some(0)) => to[0] == 1 || to[0] == case.batch,
        ("pse_shift", Some(2)) => prefill && at_least(2, case.rows),
        ("pse_shift", Some(3)) => at_least(3, case.pse_keys),
        ("block_table", Some(1)) => at_least(1, case.blocks_needed),
        // Only their number of elements counts.
        ("deq_scale1" | "quant_scale1" | "deq_scale2" | "quant_scale2" | "quant_offset2", None) => {
            to.iter().product::<i64>() == from.iter().product::<i64>()
        }
        // One scale a token: there may be more than tokens.
        ("antiquant_scale", Some(axis)) if axis > 0 && axis + 1 == from.len() => {
            case.call.plain.antiquant_mode == 1
                && case.call.plain.antiquant_offset.is_none()
                && at_least(axis, case.key_rows)
        }
        ("key_antiquant_scale" | "value_antiquant_scale", Some(axis)) if axis > 0 && axis + 1 == from.len() => {
            let (mode, offset) = split(case, name);
            case.route == Route::Decode && matches!(mode, 1 | 3) && !offset && at_least(axis, case.key_rows)
        }
        ("key_antiquant_scale" | "value_antiquant_scale", None) => {
            let (mode, offset) = split(case, name);
            let all = [case.kv_heads * case.dim];
            // Of few queries, [N D] for [N, D]; one scale a token, [1, B, S] for [B, S].
            !offset
                && match mode {
                    0 => {
                        !to.is_empty()
                            && (!prefill && to == [&[1, 1], &from[1..]].concat() && from.len() > 2
                                || prefill && to == all)
                    }
                    1 => to == [&[1], from].concat() && from.len() == 2 && !prefill,
                    _ => false,
                }
        }
        _ => false,
    }
}

/// Mode of one of the split scales, and whether it has an offset.
fn split(case: &Case, name: &str) -> (i64, bool) {
    let call = &case.call.plain;
    match name {
        "key_antiquant_scale" => (call.key_antiquant_mode, call.key_antiquant_offset.is_some()),
        _ => (call.value_antiquant_mode, call.value_antiquant_offset.is_some()),
    }
}

/// A tensor that is well made and may not be given to this call.
fn forbidden(case: &Case, name: &str) -> Option<TensorDesc> {
    let call = &case.call.plain;
    let own = case.query.dtype;
    let desc = |dtype, shape: &[i64]| TensorDesc::contiguous(dtype, shape);
    let key = case.call.key[0];
    let quantised = matches!(key.dtype, DType::Int8 | DType::Int4 | DType::Int32);
    let int8_query = own == DType::Int8;
    let absorbed = case.rope && case.dim == 512;
    let int8_out = case.out.dtype == DType::Int8;
    let channel = [2, call.num_key_value_heads.max(1), 1, case.dim];
    match name {
        "pse_shift" => (case.packed || case.rope).then(|| desc(own, &[1, call.num_heads, case.rows, case.key_rows])),
        "atten_mask" => (case.packed && call.sparse_mode == 0 || case.rope).then(|| desc(DType::Int8, &[2048, 2048])),
        "deq_scale1" | "deq_scale2" | "quant_scale1" => (!int8_query || absorbed).then(|| desc(DType::Float, &[1])),
        "quant_scale2" => (!int8_out).then(|| desc(DType::Float, &[1])),
        "quant_offset2" => (!int8_out).then(|| desc(DType::Float, &[1])),
        "antiquant_scale" | "antiquant_offset" => (!quantised || int8_query).then(|| desc(own, &channel)),
        "key_antiquant_scale" | "value_antiquant_scale" => (!quantised || int8_query).then(|| desc(own, &channel[..1])),
        "key_antiquant_offset" | "value_antiquant_offset" => Some(desc(own, &channel[1..2])),
        "block_table" => Some(desc(DType::Int32, &[case.batch, 1])),
        "query_padding_size" => {
            (case.no_padding || case.route == Route::Decode || case.call.actual_seq_lengths.is_none())
                .then(|| desc(DType::Int64, &[1]))
        }
        "kv_padding_size" => {
            (case.no_padding || case.call.actual_seq_lengths_kv.is_none()).then(|| desc(DType::Int64, &[1]))
        }
        "key_shared_prefix" | "value_shared_prefix" => Some(Some(TensorDesc::packed(key.dtype, key.shape.with(0, 1)))),
        "query_rope" => Some(Some(TensorDesc::packed(own, case.query.shape.with(case.query.shape.rank() - 1, 64)))),
        "key_rope" => Some(Some(TensorDesc::packed(key.dtype, key.shape.with(key.shape.rank() - 1, 64)))),
        "key_rope_antiquant_scale" => (!quantised).then(|| desc(own, &[64])),
        "dequant_scale_query" => Some(desc(DType::Float, &case.query.shape[..case.query.shape.rank() - 1])),
        "learnable_sink" => {
            let fits = case.packed && call.input_layout != "TND_NTD" && matches!(case.dim, 64 | 128);
            (!fits).then(|| desc(DType::Bf16, &[call.num_heads]))
        }
        _ => None,
    }?
}
