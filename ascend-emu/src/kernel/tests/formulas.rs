//! Random calls compared with attention written out over the raw tensors; the place of every element is a formula.
//!
//! Kernels and oracle both take places from the contract's views. These tests do not, so that they find a view that
//! is wrong for both.

use super::calls::{Call, Random, cached, desc};
use super::case::ComputedCall as _;
use super::data::Data;
use crate::kernel::simd::Level;
use ascend_spec::ops::fused_infer_attention_score::{Argument, Cache, Parameter, Version};
use ascend_spec::{Cann, DType, Extents, Layout, Soc, Target, TensorDesc};
use half::f16;

const HALF: DType = DType::Float16;
const HEADS: usize = 4;
const KV_HEADS: usize = 2;
/// Query rows of a sequence where the layout does not pack.
const ROWS: usize = 2;
/// Elements of a rotary part.
const ROPE: usize = 64;

/// Sequence, head, row of the sequence, element.
type Place = (usize, usize, usize, usize);

fn half(data: &Data, argument: impl Into<Argument>, index: usize) -> f64 {
    let bytes = data.bytes(argument);
    f16::from_le_bytes([bytes[2 * index], bytes[2 * index + 1]]).to_f64()
}

fn single(data: &Data, argument: impl Into<Argument>, index: usize) -> f64 {
    let bytes = &data.bytes(argument)[4 * index..][..4];
    f64::from(f32::from_le_bytes(bytes.try_into().unwrap()))
}

/// The block of a sequence's key, and its place in the block, from a table with `columns` columns.
fn block(data: &Data, (b, j): (usize, usize), columns: usize, block_size: usize) -> (usize, usize) {
    let entry = b * columns + j / block_size;
    let id = &data.bytes(Parameter::BlockTable)[4 * entry..][..4];
    let id = i32::from_le_bytes(id.try_into().unwrap());
    (usize::try_from(id).unwrap(), j % block_size)
}

/// A call on Ascend 950, queries of these extents.
fn new(layout: Layout, batch: usize, rows: usize, dim: usize) -> Call {
    let query = extents(batch, HEADS, rows, dim);
    let mut call = Call::new(layout, HALF, query, 7);
    (call.target, call.version) = (Target::new(Soc::Ascend950, Cann::V9_1), Version::V5);
    call.plain.num_key_value_heads = KV_HEADS as i64;
    call
}

fn extents(batch: usize, heads: usize, rows: usize, dim: usize) -> Extents {
    Extents { batch: batch as i64, heads: heads as i64, rows: rows as i64, dim: dim as i64 }
}

fn shaped(layout: Layout, extents: Extents) -> TensorDesc {
    TensorDesc::packed(HALF, layout.input().shape(extents))
}

/// The places of a call's numbers. `key` and `query` have the rotary part at the end.
struct Formulas<Q, K, V, O> {
    rows: Vec<usize>,
    keys: Vec<usize>,
    /// Elements of query and key, and of a value.
    dims: (usize, usize),
    query: Q,
    key: K,
    value: V,
    /// Element of the output.
    out: O,
}

impl<Q, K, V, O> Formulas<Q, K, V, O>
where
    Q: Fn(&Data, Place) -> f64,
    K: Fn(&Data, Place) -> f64,
    V: Fn(&Data, Place) -> f64,
    O: Fn(Place) -> usize,
{
    fn hold(&self, call: &Call) {
        call.with(None, |problem, data| {
            data.run(problem, Level::detect());
            let data = &*data;
            for (b, (&rows, &keys)) in self.rows.iter().zip(&self.keys).enumerate() {
                for (head, row) in (0..HEADS).flat_map(|head| (0..rows).map(move |row| (head, row))) {
                    let kv_head = head * KV_HEADS / HEADS;
                    let score = |j: usize| {
                        let product = |d| (self.query)(data, (b, head, row, d)) * (self.key)(data, (b, kv_head, j, d));
                        (0..self.dims.0).map(product).sum::<f64>() * call.plain.scale
                    };
                    let weights: Vec<f64> = (0..keys).map(|j| score(j).exp()).collect();
                    let sum: f64 = weights.iter().sum();
                    for d in 0..self.dims.1 {
                        let weighted = |(j, weight)| weight * (self.value)(data, (b, kv_head, j, d));
                        let want = weights.iter().enumerate().map(weighted).sum::<f64>() / sum;
                        let got = half(data, Parameter::AttentionOut, (self.out)((b, head, row, d)));
                        let close = (got - want).abs() <= 4e-3 * (1.0 + want.abs());
                        assert!(close, "{b} {head} {row} {d}: {got}, not {want}");
                    }
                }
            }
        });
    }
}

/// Place in `[B, N, S, D]`.
fn bnsd((b, head, row, d): Place, heads: usize, rows: usize, dim: usize) -> usize {
    ((b * heads + head) * rows + row) * dim + d
}

#[test]
fn keys_of_a_list_lie_in_their_own_tensors() {
    let (dim, keys) = (64, vec![5, 9, 1]);
    let mut call = new(Layout::Bnsd, 3, ROWS, dim);
    let tensor = |&rows: &usize| shaped(Layout::Bnsd, extents(1, KV_HEADS, rows, dim));
    call.key = keys.iter().map(tensor).collect();
    call.value = call.key.clone();
    let own = |(b, head, j, d): Place| (head * [5, 9, 1][b] + j) * dim + d;
    let formulas = Formulas {
        rows: vec![ROWS; 3],
        keys,
        dims: (dim, dim),
        query: |data: &Data, place| half(data, Parameter::Query, bnsd(place, HEADS, ROWS, dim)),
        key: |data: &Data, place: Place| half(data, Argument::element(Parameter::Key, place.0), own(place)),
        value: |data: &Data, place: Place| half(data, Argument::element(Parameter::Value, place.0), own(place)),
        out: |place| bnsd(place, HEADS, ROWS, dim),
    };
    formulas.hold(&call);
}

#[test]
fn rotary_parts_beside_a_list_lie_in_one_tensor() {
    let (dim, keys) = (128, 6);
    let mut call = new(Layout::Bsnd, 3, ROWS, dim);
    call.key = vec![shaped(Layout::Bsnd, extents(1, KV_HEADS, keys, dim)); 3];
    call.value = call.key.clone();
    call.plain.query_rope = Some(shaped(Layout::Bsnd, extents(3, HEADS, ROWS, ROPE)));
    call.plain.key_rope = Some(shaped(Layout::Bsnd, extents(3, KV_HEADS, keys, ROPE)));
    let bsnd = |(b, head, row, d): Place, heads, rows, dim| ((b * rows + row) * heads + head) * dim + d;
    let formulas = Formulas {
        rows: vec![ROWS; 3],
        keys: vec![keys; 3],
        dims: (dim + ROPE, dim),
        query: |data: &Data, place: Place| match place.3.checked_sub(dim) {
            None => half(data, Parameter::Query, bsnd(place, HEADS, ROWS, dim)),
            Some(d) => {
                let place = (place.0, place.1, place.2, d);
                half(data, Parameter::QueryRope, bsnd(place, HEADS, ROWS, ROPE))
            }
        },
        key: |data: &Data, (b, head, j, d): Place| match d.checked_sub(dim) {
            None => half(data, Argument::element(Parameter::Key, b), (j * KV_HEADS + head) * dim + d),
            Some(d) => half(data, Parameter::KeyRope, bsnd((b, head, j, d), KV_HEADS, keys, ROPE)),
        },
        value: |data: &Data, (b, head, j, d): Place| {
            half(data, Argument::element(Parameter::Value, b), (j * KV_HEADS + head) * dim + d)
        },
        out: |place| bsnd(place, HEADS, ROWS, dim),
    };
    formulas.hold(&call);
}

/// A paged call in BNSD with these lengths; also the columns of its table.
fn paged(cache: Cache, stored: DType, block_size: usize, dim: usize, keys: &[i64]) -> (Call, usize) {
    let mut call = new(Layout::Bnsd, keys.len(), ROWS, dim);
    let sizes = [KV_HEADS, block_size, dim, dim].map(|size| size as i64);
    call.pages(cache, stored, sizes, keys, &mut Random(5));
    let columns = call.plain.block_table.unwrap().shape[1] as usize;
    (call, columns)
}

#[test]
fn an_nz_cache_and_its_rotary_part_are_cut_into_runs() {
    let (dim, block_size) = (128, 16);
    let (mut call, columns) = paged(Cache::Nz, HALF, block_size, dim, &[40, 3]);
    let blocks = call.key[0].shape[0];
    let sizes = [blocks, KV_HEADS as i64, block_size as i64, ROPE as i64];
    call.plain.key_rope = Some(cached(Cache::Nz, HALF, sizes));
    call.plain.query_rope = Some(shaped(Layout::Bnsd, extents(2, HEADS, ROWS, ROPE)));
    // [blocks, heads, runs, tokens, 16].
    let nz = |data: &Data, (b, head, j, d): Place, dim: usize| {
        let (id, token) = block(data, (b, j), columns, block_size);
        (((id * KV_HEADS + head) * (dim / 16) + d / 16) * block_size + token) * 16 + d % 16
    };
    let formulas = Formulas {
        rows: vec![ROWS; 2],
        keys: vec![40, 3],
        dims: (dim + ROPE, dim),
        query: |data: &Data, place: Place| match place.3.checked_sub(dim) {
            None => half(data, Parameter::Query, bnsd(place, HEADS, ROWS, dim)),
            Some(d) => {
                let place = (place.0, place.1, place.2, d);
                half(data, Parameter::QueryRope, bnsd(place, HEADS, ROWS, ROPE))
            }
        },
        key: |data: &Data, place: Place| match place.3.checked_sub(dim) {
            None => half(data, Parameter::Key, nz(data, place, dim)),
            Some(d) => {
                let place = (place.0, place.1, place.2, d);
                half(data, Parameter::KeyRope, nz(data, place, ROPE))
            }
        },
        value: |data: &Data, place| half(data, Parameter::Value, nz(data, place, dim)),
        out: |place| bnsd(place, HEADS, ROWS, dim),
    };
    formulas.hold(&call);
}

#[test]
fn tokens_of_a_cache_of_three_axes_hold_all_heads() {
    let (dim, block_size) = (64, 16);
    let (call, columns) = paged(Cache::BnBsH, HALF, block_size, dim, &[33, 16]);
    let element = |data: &Data, (b, head, j, d): Place| {
        let (id, token) = block(data, (b, j), columns, block_size);
        (id * block_size + token) * KV_HEADS * dim + head * dim + d
    };
    let formulas = Formulas {
        rows: vec![ROWS; 2],
        keys: vec![33, 16],
        dims: (dim, dim),
        query: |data: &Data, place| half(data, Parameter::Query, bnsd(place, HEADS, ROWS, dim)),
        key: |data: &Data, place| half(data, Parameter::Key, element(data, place)),
        value: |data: &Data, place| half(data, Parameter::Value, element(data, place)),
        out: |place| bnsd(place, HEADS, ROWS, dim),
    };
    formulas.hold(&call);
}

#[test]
fn packed_heads_before_rows_lie_behind_one_another() {
    let dim = 64;
    let mut call = new(Layout::Ntd, 1, 7, dim);
    call.keys(HALF, extents(1, KV_HEADS, 12, dim), dim as i64);
    (call.q_lens, call.kv_lens) = (Some(vec![3, 7]), Some(vec![8, 12]));
    // [heads, rows of all, dim]; the second sequence begins at row 3 and key 8.
    let query = |(b, head, row, d): Place| (head * 7 + 3 * b + row) * dim + d;
    let key = |(b, head, j, d): Place| (head * 12 + 8 * b + j) * dim + d;
    let formulas = Formulas {
        rows: vec![3, 4],
        keys: vec![8, 4],
        dims: (dim, dim),
        query: |data: &Data, place| half(data, Parameter::Query, query(place)),
        key: |data: &Data, place| half(data, Parameter::Key, key(place)),
        value: |data: &Data, place| half(data, Parameter::Value, key(place)),
        out: query,
    };
    formulas.hold(&call);
}

#[test]
fn scales_of_tokens_and_heads_count_tokens_in_every_block() {
    let (dim, block_size) = (64, 64);
    let (mut call, columns) = paged(Cache::BnNBsD, DType::Int8, block_size, dim, &[150, 70]);
    let tokens = columns * block_size;
    // Several rows over INT8 keys are not taken.
    let query = extents(2, HEADS, 1, dim);
    call.plain.query = Some(shaped(Layout::Bnsd, query));
    call.output(HALF, query);
    let scale = desc(DType::Float, &[2, KV_HEADS as i64, tokens as i64]);
    (call.plain.key_antiquant_scale, call.plain.value_antiquant_scale) = (Some(scale), Some(scale));
    (call.plain.key_antiquant_offset, call.plain.value_antiquant_offset) = (Some(scale), Some(scale));
    (call.plain.key_antiquant_mode, call.plain.value_antiquant_mode) = (3, 3);
    let stored = |data: &Data, (b, head, j, d): Place, argument| {
        let (id, token) = block(data, (b, j), columns, block_size);
        let element = ((id * KV_HEADS + head) * block_size + token) * dim + d;
        f64::from(data.bytes(argument)[element].cast_signed())
    };
    let scaled = |data: &Data, place: Place, stored: f64, [scale, offset]: [Parameter; 2]| {
        let (b, head, j, _) = place;
        let entry = (b * KV_HEADS + head) * tokens + j;
        (stored + single(data, offset, entry)) * single(data, scale, entry)
    };
    let formulas = Formulas {
        rows: vec![1; 2],
        keys: vec![150, 70],
        dims: (dim, dim),
        query: |data: &Data, place| half(data, Parameter::Query, bnsd(place, HEADS, 1, dim)),
        key: |data: &Data, place| {
            let grids = [Parameter::KeyAntiquantScale, Parameter::KeyAntiquantOffset];
            scaled(data, place, stored(data, place, Parameter::Key), grids)
        },
        value: |data: &Data, place| {
            let grids = [Parameter::ValueAntiquantScale, Parameter::ValueAntiquantOffset];
            scaled(data, place, stored(data, place, Parameter::Value), grids)
        },
        out: |place| bnsd(place, HEADS, 1, dim),
    };
    formulas.hold(&call);
}

#[test]
fn scales_of_fp8_follow_query_rows_and_rows_of_blocks() {
    let (dim, block_size, stored) = (128, 128, DType::Float8E4M3Fn);
    let query = extents(1, HEADS, 5, dim);
    let mut call = Call::new(Layout::NtdTnd, stored, query, 7);
    (call.target, call.version) = (Target::new(Soc::Ascend950, Cann::V9_2), Version::V5);
    let sizes = [KV_HEADS, block_size, dim, dim].map(|size| size as i64);
    call.pages(Cache::BnNBsD, stored, sizes, &[150, 70], &mut Random(5));
    call.output(HALF, query);
    call.q_lens = Some(vec![3, 5]);
    let columns = call.plain.block_table.unwrap().shape[1] as usize;
    let blocks = call.key[0].shape[0];
    let float = |shape: &[i64]| Some(desc(DType::Float, shape));
    call.plain.dequant_scale_query = float(&[HEADS as i64, 5]);
    call.plain.key_antiquant_scale = float(&[blocks, KV_HEADS as i64, block_size as i64]);
    call.plain.value_antiquant_scale = float(&[KV_HEADS as i64]);
    (call.plain.query_quant_mode, call.plain.key_antiquant_mode) = (3, 3);
    call.plain.value_antiquant_mode = 2;
    let small = |data: &Data, parameter, element: usize| {
        let code = data.bytes(parameter)[element];
        f64::from(ascend_spec::minifloat::Float8E4M3Fn::from_bits(code).to_f32())
    };
    // The second sequence begins at row 3 of 5.
    let row = |b: usize, row: usize| 3 * b + row;
    let cached = |data: &Data, (b, head, j, _): Place| {
        let (id, token) = block(data, (b, j), columns, block_size);
        (id * KV_HEADS + head) * block_size + token
    };
    let formulas = Formulas {
        rows: vec![3, 2],
        keys: vec![150, 70],
        dims: (dim, dim),
        query: |data: &Data, (b, head, i, d): Place| {
            let entry = head * 5 + row(b, i);
            small(data, Parameter::Query, entry * dim + d) * single(data, Parameter::DequantScaleQuery, entry)
        },
        key: |data: &Data, place: Place| {
            let entry = cached(data, place);
            small(data, Parameter::Key, entry * dim + place.3) * single(data, Parameter::KeyAntiquantScale, entry)
        },
        value: |data: &Data, place: Place| {
            small(data, Parameter::Value, cached(data, place) * dim + place.3)
                * single(data, Parameter::ValueAntiquantScale, place.1)
        },
        out: |(b, head, i, d): Place| (row(b, i) * HEADS + head) * dim + d,
    };
    formulas.hold(&call);
}

#[test]
fn rows_after_the_last_sequence_are_padding_from_9_2_on() {
    let dim = 64;
    let of = extents(1, HEADS, 9, dim);
    let mut call = Call::new(Layout::Tnd, HALF, of, 7);
    (call.target, call.version) = (Target::new(Soc::AtlasA2, Cann::V9_2), Version::V4);
    // Keys and values have paddings of their own.
    call.keys(HALF, extents(1, KV_HEADS, 20, dim), dim as i64);
    call.value = vec![shaped(Layout::Tnd, extents(1, KV_HEADS, 13, dim))];
    (call.q_lens, call.kv_lens) = (Some(vec![3, 7]), Some(vec![8, 12]));
    call.lse(of);
    let query = |(b, head, row, d): Place| ((3 * b + row) * HEADS + head) * dim + d;
    let key = |(b, head, j, d): Place| ((8 * b + j) * KV_HEADS + head) * dim + d;
    let formulas = Formulas {
        rows: vec![3, 4],
        keys: vec![8, 4],
        dims: (dim, dim),
        query: |data: &Data, place| half(data, Parameter::Query, query(place)),
        key: |data: &Data, place| half(data, Parameter::Key, key(place)),
        value: |data: &Data, place| half(data, Parameter::Value, key(place)),
        out: query,
    };
    formulas.hold(&call);
    call.with(None, |problem, data| {
        data.run(problem, Level::detect());
        let untouched = |parameter, size| {
            let bytes = data.bytes(parameter);
            assert_eq!(bytes.len(), 9 * HEADS * size);
            bytes[7 * HEADS * size..].iter().all(|&byte| byte == 0xff)
        };
        assert!(untouched(Parameter::AttentionOut, 2 * dim));
        assert!(untouched(Parameter::SoftmaxLse, 4));
    });
}

#[test]
fn blocks_and_heads_of_a_cache_may_lie_apart_from_9_2_on() {
    let (dim, block_size) = (64, 128);
    let (mut call, columns) = paged(Cache::BnNBsD, HALF, block_size, dim, &[150, 70]);
    call.target.cann = Cann::V9_2;
    let spread = |desc: &TensorDesc, head: i64| TensorDesc {
        strides: ascend_spec::Dims::of([3 * head, head, dim as i64, 1]),
        ..*desc
    };
    let (key_head, value_head) = (9_000, 8_200);
    call.key = vec![spread(&call.key[0], key_head)];
    call.value = vec![spread(&call.value[0], value_head)];
    let element = |data: &Data, (b, head, j, d): Place, of_head: i64| {
        let (id, token) = block(data, (b, j), columns, block_size);
        (3 * id + head) * of_head as usize + token * dim + d
    };
    let formulas = Formulas {
        rows: vec![ROWS; 2],
        keys: vec![150, 70],
        dims: (dim, dim),
        query: |data: &Data, place| half(data, Parameter::Query, bnsd(place, HEADS, ROWS, dim)),
        key: |data: &Data, place| half(data, Parameter::Key, element(data, place, key_head)),
        value: |data: &Data, place| half(data, Parameter::Value, element(data, place, value_head)),
        out: |place| bnsd(place, HEADS, ROWS, dim),
    };
    formulas.hold(&call);
}
