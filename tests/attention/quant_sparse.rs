//! Attention to chosen keys of one byte an element: random calls against the definition in double precision, rows as
//! they are packed, and refusals.

use ascend_attention::quant_sparse_flash::{KvQuantSparseFlashAttention, RowElement, quantised_rows};
use ascend_attention::scatter::{ScatterPaKvCache, SlotMapping};
use ascend_attention::sparse::SparseSequences;
use ascend_attention::spec::minifloat::{Float8E4M3Fn, HiFloat8};
use ascend_attention::spec::{Cann, Soc};
use ascend_attention::{Number, Stream, bf16, f16};
use proptest::prelude::*;

use crate::harness;
use crate::sparse::{Draw, draws};
use harness::{numbers, violated};

const DIM: usize = 512;
const ROPE: usize = 64;
const ROW: usize = 656;
const SCALE: f64 = 0.05;

/// The numbers of an element type.
#[derive(Clone, Copy)]
struct Format<Q> {
    byte: fn(Q) -> u8,
    value: fn(Q) -> f32,
}

const INT8: Format<i8> = Format { byte: i8::cast_unsigned, value: f32::from };
const E4M3: Format<Float8E4M3Fn> = Format { byte: Float8E4M3Fn::to_bits, value: Float8E4M3Fn::to_f32 };
const HIFLOAT8: Format<HiFloat8> = Format { byte: HiFloat8::to_bits, value: HiFloat8::to_f32 };

/// The elements of a key that a row stands for, by the definition, without its rotary part.
fn unpacked<T: Number, Q: Copy>(row: &[Q], format: Format<Q>, of: fn(f32) -> T) -> Vec<f64> {
    let bytes: Vec<u8> = row.iter().copied().map(format.byte).collect();
    let scales: Vec<f32> = bytes[640..].as_chunks::<4>().0.iter().map(|bytes| f32::from_ne_bytes(*bytes)).collect();
    let element = |d: usize| of((format.value)(row[d]) * scales[d / 128]).to_f64();
    (0..DIM).map(element).collect()
}

/// Runs a call and compares it with the definition.
fn run<T: Number, Q: RowElement>(draw: &Draw, stream: &Stream, (of, rounding): (fn(f32) -> T, f64), format: Format<Q>) {
    harness::expect_odd_sparse_lists();
    let placed = draw.batch.place(stream);
    let elements = |seed: u64, count: usize| -> Vec<T> {
        let elements = numbers(draw.seed ^ seed, count);
        elements.into_iter().map(of).collect()
    };
    let (rows, keys) = (placed.query_rows.iter().product::<usize>(), placed.key_rows.iter().product::<usize>());
    let query = elements(1, rows * draw.heads * (DIM + ROPE));
    let ropes = elements(4, keys * ROPE);
    let packed: Vec<Q> = quantised_rows(&elements(3, keys * DIM), &ropes).unwrap();
    let lists = draw.lists(&placed);
    let shaped = |rows: &[usize], last: [usize; 2]| [rows, &last].concat();
    let of_queries = shaped(&placed.query_rows, [draw.heads, DIM + ROPE]);
    let inputs = (
        &stream.upload(&query, &of_queries[..]).unwrap(),
        &stream.upload(&packed, &shaped(&placed.key_rows, [1, ROW])[..]).unwrap(),
        &stream.upload(&lists, &shaped(&placed.query_rows, [1, draw.entries])[..]).unwrap(),
    );
    let call = KvQuantSparseFlashAttention::new(SCALE).sparse_block_size(draw.block);
    // Some rows see no key, and some are of no sequence.
    let call = call.causal(draw.causal).allow_lint("quant_sparse_flash.rows_without_keys");
    let call = call.allow_lint("quant_sparse_flash.rows_left_out");
    let plan = call.plan(&placed.sequences, inputs).unwrap();
    let out = plan.launch(stream, inputs).unwrap().download(stream).unwrap();

    let exact = |elements: &[T]| elements.iter().map(|element| element.to_f64()).collect::<Vec<_>>();
    let (query, ropes) = (exact(&query), exact(&ropes));
    let latents: Vec<Vec<f64>> = (packed.chunks(ROW)).map(|row| unpacked(row, format, of)).collect();
    for (index, (first, places)) in placed.places.iter().enumerate() {
        for row in 0..draw.batch.written(&placed, draw.batch.lengths[index].0) {
            let number = first + row;
            let list = &lists[number * draw.entries..][..draw.entries];
            let chosen = draw.chosen(list, draw.batch.candidates(index, row, draw.causal));
            let keys: Vec<usize> = chosen.into_iter().map(|position| places[position]).collect();
            for head in number * draw.heads..(number + 1) * draw.heads {
                let query = &query[head * (DIM + ROPE)..][..DIM + ROPE];
                let score = |&key: &usize| {
                    let elements = latents[key].iter().chain(&ropes[key * ROPE..][..ROPE]);
                    SCALE * query.iter().zip(elements).map(|(q, k)| q * k).sum::<f64>()
                };
                let scores: Vec<f64> = keys.iter().map(score).collect();
                let highest = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
                let total: f64 = scores.iter().map(|score| (score - highest).exp()).sum();
                for (d, got) in out[head * DIM..][..DIM].iter().enumerate() {
                    let weighted =
                        keys.iter().zip(&scores).map(|(&key, score)| (score - highest).exp() / total * latents[key][d]);
                    let (got, want) = (got.to_f64(), weighted.sum::<f64>());
                    assert!((got - want).abs() <= rounding, "{draw:?}: {got} is not {want}");
                }
            }
        }
    }
}

fn run_half<Q: RowElement>(draw: &Draw, stream: &Stream, half: bool, format: Format<Q>) {
    match half {
        true => run(draw, stream, (f16::from_f32, 2e-3), format),
        false => run(draw, stream, (bf16::from_f32, 1.6e-2), format),
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(32))]

    #[test]
    fn rows_attend_to_quantised_keys_on_every_product_and_release(draw in draws(), half: bool, target in 0..7) {
        match target {
            0 => run_half(&draw, &harness::emulated_stream(Soc::AtlasA2, Cann::V8_5), half, INT8),
            1 => run_half(&draw, &harness::emulated_stream(Soc::AtlasA3, Cann::V9_0), half, INT8),
            2 => run_half(&draw, &harness::emulated_stream(Soc::AtlasA2, Cann::V9_2), half, INT8),
            product => {
                let draw = Draw { block: 1, ..draw };
                match product {
                    3 => run_half(&draw, &harness::emulated_stream(Soc::Ascend950, Cann::V9_0), false, E4M3),
                    4 => run_half(&draw, &harness::emulated_stream(Soc::Ascend950, Cann::V9_1), half, E4M3),
                    5 => {
                        let draw = Draw { heads: 48, ..draw };
                        run_half(&draw, &harness::emulated_stream(Soc::Ascend950, Cann::V9_1), half, INT8);
                    }
                    _ => {
                        let draw = Draw { heads: 2, entries: 2048, ..draw };
                        run_half(&draw, &harness::emulated_stream(Soc::Ascend950, Cann::V9_2), half, HIFLOAT8);
                    }
                }
            }
        }
    }
}

/// Compares the elements of quantised rows with those of the keys. `bound` is how far an element of a magnitude may be
/// from its number, both as multiples of its scale.
fn quantises_within<Q: RowElement>(format: Format<Q>, bound: fn(f64) -> f64) {
    let latents: Vec<bf16> = numbers(5, 3 * DIM).into_iter().map(bf16::from_f32).collect();
    let ropes: Vec<bf16> = numbers(6, 3 * ROPE).into_iter().map(bf16::from_f32).collect();
    let rows: Vec<Q> = quantised_rows(&latents, &ropes).unwrap();
    assert_eq!(rows.len(), 3 * ROW);
    for (row, (latent, rope)) in rows.chunks(ROW).zip(latents.chunks(DIM).zip(ropes.chunks(ROPE))) {
        let got = unpacked(row, format, |number| number);
        for (got, want) in got.chunks(128).zip(latent.chunks(128)) {
            let largest = want.iter().map(|want| want.to_f64().abs()).fold(0.0, f64::max);
            let scale = largest / f64::from(Q::LARGEST);
            for (got, want) in got.iter().zip(want) {
                let bound = scale * bound(want.to_f64().abs() / scale) + 1e-6 * largest;
                assert!((got - want.to_f64()).abs() <= bound, "{got} is not {want}");
            }
        }
        let bytes: Vec<u8> = row[DIM..640].iter().copied().map(format.byte).collect();
        let raw: Vec<u8> = rope.iter().flat_map(|element| element.to_bits().to_ne_bytes()).collect();
        assert_eq!(bytes, raw);
    }
    let zeros: Vec<Q> = quantised_rows(&[f16::ZERO; DIM], &[f16::ZERO; ROPE]).unwrap();
    assert!(zeros.iter().all(|&element| (format.byte)(element) == 0));
}

#[test]
fn quantised_elements_are_the_nearest_to_those_of_keys() {
    quantises_within(INT8, |_| 0.5);
    // 3 bits of mantissa, and numbers below the least normal one in steps of 2^-9.
    quantises_within(E4M3, |number| (number / 16.0).max(2f64.powi(-10)));
    // 3 bits of mantissa down to 1/8, 2 down to 2^-7, then 1.
    quantises_within(HIFLOAT8, |number| match number {
        0.125.. => number / 16.0,
        0.007_812_5.. => number / 8.0,
        _ => number / 4.0,
    });
    let refused = |latents: &[f16], ropes: &[f16]| quantised_rows::<_, i8>(latents, ropes).unwrap_err();
    for (latents, ropes) in [(511, 64), (512, 63), (1024, 64)] {
        let error = refused(&vec![f16::ONE; latents], &vec![f16::ONE; ropes]);
        assert!(error.breaks(&ascend_attention::rules::ARGUMENT_VALUE), "{error}");
    }
    for (latent, rope, name) in [(f16::INFINITY, f16::ONE, "latents"), (f16::ONE, f16::NAN, "ropes")] {
        let text = refused(&[latent; DIM], &[rope; ROPE]).to_string();
        assert!(text.contains(name) && text.contains("finite"), "{text}");
    }
    assert!(quantised_rows::<_, i8>(&[1f32; DIM], &[1f32; ROPE]).is_err());
}

#[test]
fn rows_that_are_scattered_into_a_cache_are_read_there() {
    let stream = harness::emulated_stream(Soc::AtlasA2, Cann::V9_1);
    let latents: Vec<f16> = (0..4).flat_map(|key| [f16::from_f32(key as f32); DIM]).collect();
    let rows: Vec<i8> = quantised_rows(&latents, &[f16::ZERO; 4 * ROPE]).unwrap();
    let rows = stream.upload(&rows, [4, 1, ROW]).unwrap();
    let cache = stream.upload(&[0i8; 2 * 16 * ROW], [2, 16, 1, ROW]).unwrap();
    let slots = SlotMapping::new(&stream, &[16, 17, 18, 19], 2 * 16).unwrap();
    let written = (&rows, &slots, &cache);
    ScatterPaKvCache::new().plan(written).unwrap().launch(&stream, written).unwrap();
    let query = stream.upload(&[f16::ZERO; 8 * 576], [1, 8, 576]).unwrap();
    let indices = stream.upload(&[1, 2, -1], [1, 1, 3]).unwrap();
    let sequences = SparseSequences::packed(&stream, &[1], &[4]).unwrap().paged(&stream, &[[1]]).unwrap();
    let inputs = (&query, &cache, &indices);
    let plan = KvQuantSparseFlashAttention::new(SCALE).plan(&sequences, inputs).unwrap();
    let attention = plan.launch(&stream, inputs).unwrap();
    assert_eq!(attention.download(&stream).unwrap(), [f16::from_f32(1.5); 8 * DIM]);
}

#[test]
fn sequences_beyond_the_tensors_and_other_contracts_are_refused() {
    let stream = harness::emulated_stream(Soc::AtlasA2, Cann::V9_1);
    let query = stream.upload(&[f16::ONE; 3 * 8 * 576], [3, 8, 576]).unwrap();
    let rows = stream.upload(&[1i8; 40 * ROW], [40, 1, ROW]).unwrap();
    let floats = [Float8E4M3Fn::from_bits(0); 40 * ROW];
    let floats = stream.upload(&floats, [40, 1, ROW]).unwrap();
    let indices = stream.upload(&[-1; 3 * 16], [3, 1, 16]).unwrap();
    let call = KvQuantSparseFlashAttention::new(SCALE);
    let packed = |queries: &[usize], keys: &[usize]| SparseSequences::packed(&stream, queries, keys).unwrap();
    let sequences = packed(&[1, 2], &[20, 20]);
    let inputs = (&query, &rows, &indices);
    let plan = call.plan(&sequences, inputs).unwrap();
    assert_eq!(plan.operator(), "aclnnKvQuantSparseFlashAttention");
    assert_eq!(plan.launch(&stream, inputs).unwrap().shape(), [3, 8, DIM]);
    for (queries, keys, rule) in [
        (&[1, 3], &[20, 20], "contents"),
        (&[1, 2], &[20, 21], "contents"),
        (&[1, 1], &[20, 20], "rows_left_out"),
        (&[1, 2], &[20, 1], "rows_without_keys"),
    ] {
        let plan = call.plan(&packed(queries, keys), inputs);
        assert_eq!(violated(plan), format!("quant_sparse_flash.{rule}"));
    }
    let plan = call.plan(&sequences, (&query, &floats, &indices));
    assert_eq!(violated(plan), "quant_sparse_flash.dtype");
    let blocks_of_32 = call.clone().sparse_block_size(32);
    assert_eq!(violated(blocks_of_32.plan(&sequences, inputs)), "quant_sparse_flash.sparse_block_size");
}
