//! Ascend 950 has V5 of the operator, with keys, values and outputs of small floats, from CANN 9.0 on.

use crate::harness;

use ascend_attention::attention::{Affine, AntiquantMode, Antiquantisation, Distance, Inputs, PseShift, Quantisation};
use ascend_attention::spec::minifloat::pack_nibbles;
use ascend_attention::spec::ops::fused_infer_attention_score::Version;
use ascend_attention::spec::{Cann, DType, Soc, Target};
use ascend_attention::{
    Error, Float4E2M1, Float8E4M3Fn, Float8E8M0, FusedInferAttention, HiFloat8, Layout, Machine, Mask, Runtime, Stream,
    bf16, f16,
};

/// A stream of an emulated Ascend 950 with a release of CANN.
fn stream(cann: Cann) -> Stream {
    let machine = Machine::new(Soc::Ascend950, cann);
    let runtime = Runtime::emulated_as(&machine).unwrap();
    runtime.device(0).unwrap().stream().unwrap()
}

/// The mean over the tokens: what attention makes of values where all scores are alike.
fn mean(tokens: usize, dim: usize, value: impl Fn(usize, usize) -> f32) -> Vec<f32> {
    let of = |d| (0..tokens).map(|j| value(j, d)).sum::<f32>() / tokens as f32;
    (0..dim).map(of).collect()
}

fn assert_close(got: impl Iterator<Item = f32>, want: &[f32], error: f32) {
    let got: Vec<f32> = got.collect();
    assert_eq!(got.len(), want.len());
    for (d, (got, want)) in got.iter().zip(want).enumerate() {
        assert!((got - want).abs() <= error * want.abs() + 1e-3, "element {d}: {got}, not {want}");
    }
}

#[test]
fn small_floats_of_keys_and_values_are_scaled() {
    if harness::not_on_npu("which product it is, is not the test's to choose") {
        return;
    }
    const TOKENS: usize = 40;
    const DIM: usize = 64;
    let stream = stream(Cann::V9_1);
    let queries = [f16::ZERO; DIM];
    let query = stream.upload(&queries, [1, 1, 1, DIM]).unwrap();
    let plain = |j: usize, d: usize| ((j * 7 + d) % 13) as f32 - 4.0;
    let launch = |inputs: &Inputs<'_, f16>| {
        let plan = FusedInferAttention::new(Layout::Bnsd).scale(0.125).plan(inputs).unwrap();
        let output = plan.launch(&stream, inputs).unwrap();
        let got = output.attention.download(&stream).unwrap();
        got.into_iter().map(f16::to_f32)
    };
    let shape = [1, 1, TOKENS, DIM];

    // A scale for each token of E4M3.
    let codes: Vec<_> = (0..TOKENS * DIM).map(|at| Float8E4M3Fn::from_f32(plain(at / DIM, at % DIM))).collect();
    let values = stream.upload(&codes, shape).unwrap();
    let scales: Vec<_> = (0..TOKENS).map(|j| 0.25 + j as f32 / 16.0).collect();
    let scale = stream.upload(&scales, [1, TOKENS]).unwrap();
    let split = |mode, scale| Quantisation::KeyValue {
        antiquantisation: Antiquantisation::Split { mode, key: Affine::scale(scale), value: Affine::scale(scale) },
        output: None,
    };
    let inputs = Inputs::new(&query, &values, &values);
    let inputs = inputs.quantisation(split(AntiquantMode::PerToken, &scale));
    let want = mean(TOKENS, DIM, |j, d| plain(j, d) * scales[j]);
    assert_close(launch(&inputs), &want, 2e-3);

    // A scale for 32 elements of E2M1, two of which share a byte.
    let codes = (0..TOKENS * DIM).map(|at| Float4E2M1::from_f32(plain(at / DIM, at % DIM)));
    let codes: Vec<u8> = codes.map(Float4E2M1::to_bits).collect();
    let bytes = pack_nibbles(&codes);
    let values = stream.upload_bytes(DType::Float4E2M1, &bytes, shape).unwrap();
    let exponent = |j: usize, group: usize| 125 + ((j + 3 * group) % 5) as u8;
    let scales: Vec<_> = (0..TOKENS * 2).map(|at| Float8E8M0::from_bits(exponent(at / 2, at % 2))).collect();
    let scale = stream.upload(&scales, [1, 1, 1, TOKENS, 2]).unwrap();
    let inputs = Inputs::new(&query, &values, &values);
    let inputs = inputs.quantisation(split(AntiquantMode::PerTokenGroup, &scale));
    let want = mean(TOKENS, DIM, |j, d| {
        let power = 2f32.powi(i32::from(exponent(j, d / 32)) - 127);
        Float4E2M1::from_f32(plain(j, d)).to_f32() * power
    });
    assert_close(launch(&inputs), &want, 2e-3);
    harness::still_works(&stream);
}

#[test]
fn groups_of_mxfp8_values_run_along_the_tokens_of_each_sequence() {
    if harness::not_on_npu("which product it is, is not the test's to choose") {
        return;
    }
    const DIM: usize = 64;
    // The groups of the second sequence begin anew.
    const TOKENS: [usize; 2] = [70, 33];
    let stream = stream(Cann::V9_1);
    let all = TOKENS[0] + TOKENS[1];
    let query = stream.upload(&[Float8E4M3Fn::default(); 2 * DIM], [2, 1, DIM]).unwrap();
    let plain = |j: usize, d: usize| Float8E4M3Fn::from_f32((j * 5 + d) as f32 % 11.0 - 3.0);
    let codes: Vec<_> = (0..all * DIM).map(|at| plain(at / DIM, at % DIM)).collect();
    let values = stream.upload(&codes, [all, 1, DIM]).unwrap();
    let ones = |count: usize| vec![Float8E8M0::from_bits(127); count];
    let query_scale = stream.upload(&ones(2 * 2), [2, 1, 1, 2]).unwrap();
    let key_scale = stream.upload(&ones(all * 2), [all, 1, 1, 2]).unwrap();
    // Pairs of groups: two of the first sequence, one of the second.
    let exponent = |pair: usize, d: usize, slot: usize| 124 + ((pair * 2 + slot + d) % 6) as u8;
    let scales: Vec<_> =
        (0..3 * DIM * 2).map(|at| Float8E8M0::from_bits(exponent(at / (2 * DIM), at / 2 % DIM, at % 2))).collect();
    let value_scale = stream.upload(&scales, [3, 1, DIM, 2]).unwrap();
    let inputs = Inputs::new(&query, &values, &values).quantisation(Quantisation::MxFp8 {
        query_scale: &query_scale,
        key_scale: &key_scale,
        value_scale: &value_scale,
        quant_scale1: None,
    });
    let plan = FusedInferAttention::new(Layout::Tnd)
        .scale(0.125)
        .actual_seq_lengths([1usize, 2])
        .actual_seq_lengths_kv([TOKENS[0], all])
        .out_dtype(DType::Bf16)
        .plan(inputs)
        .unwrap();
    assert_eq!(plan.operator(), "aclnnFusedInferAttentionScoreV5");
    let output = plan.launch(&stream, inputs.output_type::<bf16>()).unwrap();
    let got = output.attention.download(&stream).unwrap();
    let sequence = |first_token: usize, first_pair: usize, tokens: usize| {
        mean(tokens, DIM, |j, d| {
            let exponent = exponent(first_pair + j / 64, d, j / 32 % 2);
            plain(first_token + j, d).to_f32() * 2f32.powi(i32::from(exponent) - 127)
        })
    };
    let want = [sequence(0, 0, TOKENS[0]), sequence(TOKENS[0], 2, TOKENS[1])].concat();
    assert_close(got.into_iter().map(bf16::to_f32), &want, 1e-2);
    harness::still_works(&stream);
}

#[test]
fn a_row_that_the_mask_leaves_without_keys_is_0_where_tokens_leave_another() {
    if harness::not_on_npu("which product it is, is not the test's to choose") {
        return;
    }
    const ROWS: usize = 4;
    let stream = stream(Cann::V9_1);
    let ones = [f16::ONE; ROWS * 16];
    let x = stream.upload(&ones, [1, 1, ROWS, 16]).unwrap();
    let hidden: Vec<bool> = (0..ROWS * ROWS).map(|at| at / ROWS == 2).collect();
    let hidden = stream.upload(&hidden, [1, ROWS, ROWS]).unwrap();
    let row = |next_tokens| {
        let plan = FusedInferAttention::new(Layout::Bnsd)
            .scale(0.25)
            .mask(Mask::default_mask(hidden.clone(), 10, next_tokens))
            .plan((&x, &x, &x))
            .unwrap();
        let output = plan.launch(&stream, (&x, &x, &x)).unwrap();
        output.attention.download(&stream).unwrap()[2 * 16]
    };
    // The mean of the values, until the first row sees no key either.
    assert_eq!((row(0), row(-1)), (f16::ONE, f16::ZERO));
    harness::still_works(&stream);
}

#[test]
fn outputs_are_written_in_the_small_float_that_is_asked_for() {
    if harness::not_on_npu("which product it is, is not the test's to choose") {
        return;
    }
    let stream = stream(Cann::V9_1);
    let x = stream.upload(&[f16::from_f32(1.5); 4 * 16], [1, 1, 4, 16]).unwrap();
    let (scale, offset) = (stream.upload(&[3f32], [1]).unwrap(), stream.upload(&[-0.2f32], [1]).unwrap());
    let inputs = Inputs::new(&x, &x, &x).quantisation(Quantisation::Output(Affine::new(&scale, &offset)));
    let plan = |dtype| {
        let call = FusedInferAttention::new(Layout::Bnsd).scale(0.25);
        call.out_dtype(dtype).plan(inputs).unwrap()
    };
    let output = plan(DType::HiFloat8).launch(&stream, inputs.output_type::<HiFloat8>());
    let got = output.unwrap().attention.download(&stream).unwrap();
    assert_eq!(got, vec![HiFloat8::from_f32(4.3); 4 * 16]);
    let output = plan(DType::Float8E4M3Fn).launch(&stream, inputs.output_type::<Float8E4M3Fn>());
    let got = output.unwrap().attention.download(&stream).unwrap();
    assert_eq!(got, vec![Float8E4M3Fn::from_f32(4.3); 4 * 16]);
    harness::still_works(&stream);
}

#[test]
fn a_query_of_int8_without_rotary_parts_is_named_for_lack_of_a_kernel() {
    if harness::not_on_npu("which product it is, is not the test's to choose") {
        return;
    }
    let stream = stream(Cann::V9_1);
    let x = stream.upload(&[1i8; 4 * 16], [1, 1, 4, 16]).unwrap();
    let one = stream.upload(&[1f32], [1]).unwrap();
    let inputs = Inputs::new(&x, &x, &x).quantisation(Quantisation::Int8 {
        deq_scale1: &one,
        quant_scale1: &one,
        deq_scale2: &one,
        output: None,
    });
    let call = FusedInferAttention::new(Layout::Bnsd).scale(0.25).out_dtype(DType::Bf16);
    match call.plan(inputs) {
        Err(Error::Violation(violation)) => {
            assert_eq!(violation.rule.id, "quant.per_tensor_kernel");
        }
        other => panic!("{other:?}"),
    }
    call.allow_lint("quant.per_tensor_kernel").plan(inputs).unwrap();
}

#[test]
fn slopes_are_refused_by_every_release_that_knows_the_product() {
    if harness::not_on_npu("which product it is, is not the test's to choose") {
        return;
    }
    for cann in Soc::Ascend950.releases() {
        let stream = stream(cann);
        let x = stream.upload(&[f16::ZERO; 4 * 16], [1, 1, 4, 16]).unwrap();
        let slopes = stream.upload(&[0.5f32], [1]).unwrap();
        for distance in [Distance::Linear, Distance::SquareRoot] {
            let inputs = Inputs::new(&x, &x, &x).pse_shift(PseShift::Slopes {
                slopes: &slopes,
                distance,
                query_start: 5,
                key_start: 3,
            });
            let call = FusedInferAttention::new(Layout::Bnsd).scale(1.0);
            match call.plan(inputs) {
                Err(Error::Violation(violation)) => {
                    assert_eq!(violation.rule.id, "pse_type.zero", "{cann}");
                }
                other => panic!("{cann}: {other:?}"),
            }
        }
        harness::still_works(&stream);
    }
}

#[test]
fn releases_that_do_not_know_the_product_make_no_machine() {
    for cann in [Cann::V8_1, Cann::V8_5] {
        let machine = Machine::new(Soc::Ascend950, cann).operator(Version::V5);
        match Runtime::emulated_as(&machine) {
            Err(Error::Unreleased(error)) => {
                assert_eq!(error.target, Target::new(Soc::Ascend950, cann));
                let text = error.to_string();
                assert!(text.contains("allowed: 9.0, 9.1"), "{text}");
            }
            other => panic!("{cann}: {other:?}"),
        }
    }
}
