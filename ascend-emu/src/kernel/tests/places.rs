//! The place of every number, in small calls computed by hand. Kernels and reference find elements by the same
//! contract, so a comparison of the two does not show an error in it.
//!
//! With one key, or with equal scores, the output shows which values were read.

use super::calls::{Call, desc};
use super::case::ComputedCall as _;
use super::data::Data;
use crate::kernel::bad_block;
use crate::kernel::simd::Level;
use ascend_spec::attention_problem::{AttentionProblem, TensorRole};
use ascend_spec::ops::fused_infer_attention_score::{Argument, Parameter, Version};
use ascend_spec::{Cann, DType, Extents, Layout, Soc, Target, TensorDesc};
use half::{bf16, f16};

fn halves(values: impl IntoIterator<Item = f32>) -> Vec<u8> {
    let bytes = |value| f16::from_f32(value).to_le_bytes();
    values.into_iter().flat_map(bytes).collect()
}

fn brains(values: impl IntoIterator<Item = f32>) -> Vec<u8> {
    let bytes = |value| bf16::from_f32(value).to_le_bytes();
    values.into_iter().flat_map(bytes).collect()
}

fn singles(values: impl IntoIterator<Item = f32>) -> Vec<u8> {
    values.into_iter().flat_map(f32::to_le_bytes).collect()
}

fn integers(values: &[i32]) -> Vec<u8> {
    values.iter().flat_map(|value| value.to_le_bytes()).collect()
}

fn of(batch: i64, heads: i64, rows: i64, dim: i64) -> Extents {
    Extents { batch, heads, rows, dim }
}

/// Runs a call and checks that both the kernels and the oracle compute `want` of head, row and element, in every
/// batch entry.
fn gives(call: &Call, want: impl Fn(usize, usize, usize) -> f64) {
    gives_each(call, |_, head, row, d| want(head, row, d));
}

/// Like [`gives`], but `want` also depends on the batch entry.
fn gives_each(call: &Call, want: impl Fn(usize, usize, usize, usize) -> f64) {
    call.with(None, |problem: &AttentionProblem<'_>, data: &mut Data| {
        let oracle = data.oracle(problem);
        data.run(problem, Level::detect());
        let (heads, rows, dim) = (problem.heads, problem.query_rows, problem.value_dim);
        assert!(!oracle.attention.is_empty());
        for (index, &from_oracle) in oracle.attention.iter().enumerate() {
            let d = index % dim;
            let row = index / dim % rows;
            let head = index / (dim * rows) % heads;
            let b = index / (dim * rows * heads);
            let want = want(b, head, row, d);
            let close = |got: f64| (got - want).abs() <= 1e-2 * want.abs();
            let got = data.output(&problem.out, (b, head, row), d);
            assert!(close(got), "{b} {head} {row} {d}: {got}, not {want}");
            let place = format_args!("{b} {head} {row} {d}");
            assert!(close(from_oracle), "oracle: {place}: {from_oracle}, not {want}");
        }
    });
}

/// A single row of `dim` over caches with these blocks.
fn decode(stored: DType, cache: &[i64], table: &[i32], block_size: i64, len: i64) -> Call {
    let dim = 32;
    let mut call = Call::new(Layout::Bnsd, DType::Float16, of(1, 1, 1, dim), 1);
    call.key = vec![desc(stored, cache)];
    call.value = vec![desc(stored, cache)];
    call.plain.block_size = block_size;
    call.plain.num_key_value_heads = 1;
    call.plain.block_table = Some(desc(DType::Int32, &[1, table.len() as i64]));
    call.kv_lens = Some(vec![len]);
    call.contents = vec![(Parameter::BlockTable.into(), integers(table)), (Parameter::Query.into(), halves([0.0; 32]))];
    call
}

#[test]
fn nz_blocks_keep_runs_of_thirty_two_channels() {
    // 3 blocks, 1 head, 4 runs, 128 tokens, 32 channels. Token 128 of the sequence is token 0 of block 2.
    let mut call = Call::new(Layout::Bnsd, DType::Bf16, of(1, 10, 1, 128), 1);
    call.key = vec![desc(DType::Int8, &[3, 1, 4, 128, 32])];
    call.value = call.key.clone();
    call.plain.block_size = 128;
    call.plain.inner_precise = 1;
    call.plain.num_key_value_heads = 1;
    call.plain.block_table = Some(desc(DType::Int32, &[1, 2]));
    call.kv_lens = Some(vec![129]);
    let scale = Some(desc(DType::Bf16, &[1, 1, 128]));
    call.plain.key_antiquant_scale = scale;
    call.plain.value_antiquant_scale = scale;
    let value = |at: usize| {
        let (block, run, token, lane) = (at / 16384, at / 4096 % 4, at / 32 % 128, at % 32);
        match (block, token) {
            (2, 0) => (run * 32 + lane) as u8,
            (1, _) => 0,
            // Blocks that the table does not name, and rows past the length, may hold anything.
            _ => 100,
        }
    };
    call.contents = vec![
        (Parameter::BlockTable.into(), integers(&[1, 2])),
        (Parameter::Query.into(), brains([0.0; 1280])),
        (Parameter::Value.into(), (0..3 * 16384).map(value).collect()),
        (Parameter::KeyAntiquantScale.into(), brains([1.0; 128])),
        (Parameter::ValueAntiquantScale.into(), brains([129.0; 128])),
    ];
    // The mean of 128 zeros and the row of token 128.
    gives(&call, |_, _, d| d as f64);
}

#[test]
fn heads_of_a_block_come_before_or_after_its_tokens() {
    for heads_first in [false, true] {
        let mut call = Call::new(Layout::Bnsd, DType::Float16, of(1, 2, 1, 16), 1);
        let shape: &[i64] = if heads_first { &[2, 2, 16, 16] } else { &[2, 16, 32] };
        call.key = vec![desc(DType::Float16, shape)];
        call.value = call.key.clone();
        call.plain.block_size = 16;
        call.plain.num_key_value_heads = 2;
        call.plain.block_table = Some(desc(DType::Int32, &[1, 1]));
        call.kv_lens = Some(vec![2]);
        let value = (0..1024).map(|at| {
            let (block, rest) = (at / 512, at % 512);
            let (head, token) = if heads_first { (rest / 256, rest / 16 % 16) } else { (rest / 16 % 2, rest / 32) };
            match (block, token) {
                (1, 0) => (1 + head) as f32 * 10.0,
                (1, 1) => (1 + head) as f32 * 30.0,
                _ => f32::NAN,
            }
        });
        call.contents = vec![
            (Parameter::BlockTable.into(), integers(&[1])),
            (Parameter::Query.into(), halves([0.0; 32])),
            (Parameter::Value.into(), halves(value)),
        ];
        gives(&call, |head, _, _| (1 + head) as f64 * 20.0);
    }
}

#[test]
fn ids_that_name_no_block_are_found_and_count_as_zeros() {
    for bad in [-1, 3, i32::MAX, i32::MIN] {
        let mut call = decode(DType::Float16, &[3, 16, 32], &[2, bad], 16, 18);
        call.contents.push((Parameter::Value.into(), halves([9.0; 3 * 16 * 32])));
        gives(&call, |_, _, _| 8.0);
        call.with(None, |problem, data| {
            let found = data.with_buffers(|buffers| {
                // SAFETY: the tensors have the sizes of their descriptors.
                unsafe { bad_block(problem, buffers) }
            });
            let text = found.unwrap().to_string();
            let want = format!("block table entry [0, 1] names block {bad} of 3");
            assert_eq!(text, want);
        });
        // Past the sequence's keys nothing is looked up.
        call.kv_lens = Some(vec![16]);
        call.with(None, |problem, data| {
            // SAFETY: the buffers are those of the problem's tensors.
            let found = data.with_buffers(|buffers| unsafe { bad_block(problem, buffers) });
            assert_eq!(found, None);
        });
    }
}

#[test]
fn the_first_of_two_nibbles_is_the_low_one() {
    let dim = 64;
    for stored in [DType::Int4, DType::Int32] {
        let mut call = Call::new(Layout::Bsnd, DType::Float16, of(1, 1, 1, dim), 1);
        let held = if stored == DType::Int4 { dim } else { dim / 8 };
        call.keys(stored, of(1, 1, 1, held), held);
        call.plain.antiquant_scale = Some(desc(DType::Float16, &[2]));
        call.plain.antiquant_offset = Some(desc(DType::Float16, &[2]));
        call.contents = vec![
            // Value 2 d is 7, value 2 d + 1 is -3.
            (Parameter::Value.into(), vec![0xd7; 32]),
            // The key's, then the value's.
            (Parameter::AntiquantScale.into(), halves([9.0, 0.5])),
            (Parameter::AntiquantOffset.into(), halves([9.0, 1.0])),
        ];
        gives(&call, |_, _, d| if d % 2 == 0 { 4.0 } else { -1.0 });
    }
}

#[test]
fn scales_belong_to_their_channel_token_and_head() {
    let (heads, keys, dim) = (2, 3, 32);
    let base = |mode: i64, shape: &[i64]| {
        let mut call = Call::new(Layout::Bnsd, DType::Float16, of(1, heads, 1, dim), 1);
        call.keys(DType::Int8, of(1, heads, keys, dim), dim);
        let number = if mode == 0 || mode == 2 { DType::Float16 } else { DType::Float };
        call.plain.key_antiquant_scale = Some(desc(number, shape));
        call.plain.value_antiquant_scale = Some(desc(number, shape));
        call.plain.key_antiquant_mode = mode;
        call.plain.value_antiquant_mode = mode;
        call.contents = vec![
            (Parameter::Query.into(), halves([0.0; 64])),
            (Parameter::Value.into(), vec![2; (heads * keys * dim) as usize]),
        ];
        call
    };
    let scale = Parameter::ValueAntiquantScale;
    // One a channel of a head.
    let mut call = base(0, &[1, heads, 1, dim]);
    let numbers = halves((0..64).map(|at| 1.0 + at as f32));
    call.contents.push((scale.into(), numbers));
    gives(&call, |head, _, d| 2.0 * (1 + head * 32 + d) as f64);
    // One a token, with room past the keys.
    let mut call = base(1, &[1, 5]);
    let numbers = singles([1.0, 2.0, 6.0, f32::NAN, f32::NAN]);
    call.contents.push((scale.into(), numbers));
    gives(&call, |_, _, _| 2.0 * 3.0);
    // One a head.
    let mut call = base(2, &[heads]);
    call.contents.push((scale.into(), halves([5.0, 7.0])));
    gives(&call, |head, _, _| 2.0 * [5.0, 7.0][head]);
    // One a token of a head.
    let mut call = base(3, &[1, heads, 4]);
    let numbers = [1.0, 2.0, 6.0, f32::NAN, 10.0, 20.0, 60.0, f32::NAN];
    call.contents.push((scale.into(), singles(numbers)));
    gives(&call, |head, _, _| 2.0 * [3.0, 30.0][head]);
}

#[test]
fn each_sequence_of_a_list_has_its_own_rotary_part() {
    // Scores come from the rotary parts alone, and one of 60 leaves the other keys nothing: sequence b sees its key b.
    let (batch, keys) = (3, 4);
    for layout in [Layout::Bnsd, Layout::Bsnd, Layout::Bsh] {
        let mut call = Call::new(layout, DType::Float16, of(batch, 2, 1, 128), 1);
        (call.target, call.version) = (Target::new(Soc::Ascend950, Cann::V9_1), Version::V5);
        call.plain.scale = 1.0;
        call.plain.num_key_value_heads = 1;
        let shape = |of| TensorDesc::packed(DType::Float16, layout.input().shape(of));
        call.key = vec![shape(of(1, 1, keys, 128)); batch as usize];
        call.value = call.key.clone();
        call.plain.query_rope = Some(shape(of(batch, 2, 1, 64)));
        call.plain.key_rope = Some(shape(of(batch, 1, keys, 64)));
        // With one head the rotary part is [batch, keys, 64] in every layout.
        let rope = (0..3 * 4 * 64).map(|at| match (at / 256, at / 64 % 4, at % 64) {
            (b, key, 0) if b == key => 60.0,
            _ => 0.0,
        });
        call.contents = vec![
            (Parameter::Query.into(), halves([0.0; 3 * 2 * 128])),
            (Parameter::QueryRope.into(), halves([1.0; 3 * 2 * 64])),
            (Parameter::KeyRope.into(), halves(rope)),
        ];
        for b in 0..batch as usize {
            let value = |at: usize| (100 * b + 10 * (at / 128)) as f32 + 1.0;
            let values = halves((0..4 * 128).map(value));
            call.contents.push((Argument::element(Parameter::Value, b), values));
        }
        gives_each(&call, |b, _, _, _| (100 * b + 10 * b + 1) as f64);
        call.with(None, |problem, _| {
            let mut touched = Vec::new();
            problem.touches(&mut |role, bytes| {
                if role == TensorRole::KeyRope {
                    touched.push(bytes);
                }
            });
            assert_eq!(touched, [Some(0..3 * 4 * 64 * 2)]);
        });
    }
}

#[test]
fn padding_is_before_what_counts() {
    // 4 rows, of them rows 1 and 2 valid: 1 row of padding follows. Of 5 keys, the 2 before the last are valid.
    let mut call = Call::new(Layout::Bnsd, DType::Float16, of(1, 1, 4, 16), 1);
    call.keys(DType::Float16, of(1, 1, 5, 16), 16);
    (call.q_lens, call.kv_lens) = (Some(vec![2]), Some(vec![2]));
    call.plain.query_padding_size = Some(desc(DType::Int64, &[1]));
    call.plain.kv_padding_size = Some(desc(DType::Int64, &[1]));
    let value = |at: usize| [f32::NAN, f32::NAN, 3.0, 5.0, f32::NAN][at / 16];
    let one = 1i64.to_le_bytes().to_vec();
    call.contents = vec![
        (Parameter::Query.into(), halves([0.0; 64])),
        (Parameter::Value.into(), halves((0..80).map(value))),
        (Parameter::QueryPaddingSize.into(), one.clone()),
        (Parameter::KvPaddingSize.into(), one),
    ];
    gives(&call, |_, row, _| [0.0, 4.0, 4.0, 0.0][row]);
}

#[test]
fn a_sink_takes_weight_and_gives_nothing() {
    let mut call = Call::new(Layout::Tnd, DType::Bf16, of(1, 2, 1, 64), 1);
    call.keys(DType::Bf16, of(1, 2, 1, 64), 64);
    (call.q_lens, call.kv_lens) = (Some(vec![1]), Some(vec![1]));
    call.plain.learnable_sink = Some(desc(DType::Bf16, &[2]));
    call.lse(of(1, 2, 1, 64));
    call.contents = vec![
        (Parameter::Query.into(), brains([0.0; 128])),
        (Parameter::Value.into(), brains([8.0; 128])),
        // Scores are 0: a sink of 0 takes half, one of -inf nothing.
        (Parameter::LearnableSink.into(), brains([0.0, f32::NEG_INFINITY])),
    ];
    gives(&call, |head, _, _| [4.0, 8.0][head]);
}

#[test]
fn an_int8_output_rounds_to_even_and_saturates() {
    let mut call = Call::new(Layout::Bnsd, DType::Float16, of(1, 1, 2, 32), 1);
    call.output(DType::Int8, of(1, 1, 2, 32));
    call.keys(DType::Float16, of(1, 1, 1, 32), 32);
    call.plain.quant_scale2 = Some(desc(DType::Float, &[32]));
    call.plain.quant_offset2 = Some(desc(DType::Float, &[32]));
    let scales = (0..32).map(|d| if d < 16 { 0.5 } else { -100.0 });
    call.contents = vec![
        (Parameter::Value.into(), halves((0..32).map(|d| d as f32))),
        (Parameter::QuantScale2.into(), singles(scales)),
        (Parameter::QuantOffset2.into(), singles([1.0; 32])),
    ];
    // 0.5 d + 1, ties to even: 1, 1.5 -> 2, 2, 2.5 -> 2, 3, 3.5 -> 4 ...
    let want = |d: usize| match d {
        0..16 => (d as f64 / 2.0 + 1.0).round_ties_even(),
        _ => -128.0,
    };
    assert_eq!([want(1), want(3), want(5)], [2.0, 2.0, 4.0]);
    gives(&call, |_, _, d| want(d));
}
