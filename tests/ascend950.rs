//! Ascend 950 has V5 of the operator, and slopes as position bias with it.
#![cfg(feature = "emulation")]
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod harness;

use ascend_attention::attention::{Distance, Inputs, PseShift};
use ascend_attention::{FusedInferAttention, Layout, f16};

const HEADS: usize = 2;
const ROWS: usize = 24;
const DIM: usize = 16;

/// Head `head` of the output by the definition, where all products of queries and keys are 0 and value `j` is `j`.
fn expected(slope: f64, root: bool, lag: f64) -> Vec<f64> {
    (0..ROWS)
        .map(|i| {
            let weight = |j: usize| {
                let distance = (i as f64 - j as f64 - lag).abs();
                (-slope * if root { distance.sqrt() } else { distance }).exp()
            };
            let sum: f64 = (0..ROWS).map(weight).sum();
            (0..ROWS).map(|j| weight(j) * j as f64).sum::<f64>() / sum
        })
        .collect()
}

#[test]
fn slopes_bend_attention_toward_near_keys() {
    if harness::not_on_npu("which product it is, is not the test's to choose") {
        return;
    }
    // SAFETY: this is the only test of its program, and nothing has started a thread that reads the environment.
    unsafe { std::env::set_var("ASCEND_EMU_SOC", "Ascend950PR_9599") };
    let stream = harness::stream();
    let shape = [1, HEADS, ROWS, DIM];
    let zeros = stream
        .upload(&[f16::ZERO; HEADS * ROWS * DIM], shape)
        .unwrap();
    let numbers: Vec<_> = (0..HEADS * ROWS * DIM)
        .map(|i| f16::from_f32((i / DIM % ROWS) as f32))
        .collect();
    let values = stream.upload(&numbers, shape).unwrap();
    let slopes = stream.upload(&[0.5f32, 0.0625], [HEADS]).unwrap();
    for (distance, root) in [(Distance::Linear, false), (Distance::SquareRoot, true)] {
        let inputs = Inputs::new(&zeros, &zeros, &values).pse_shift(PseShift::Slopes {
            slopes: &slopes,
            distance,
            query_start: 5,
            key_start: 3,
        });
        let plan = FusedInferAttention::new(Layout::Bnsd)
            .scale(1.0)
            .heads(2)
            .plan_with(&inputs)
            .unwrap();
        assert_eq!(plan.operator(), "aclnnFusedInferAttentionScoreV5");
        let output = plan.launch_with::<f16>(&stream, &inputs).unwrap();
        let got = output.attention.download(&stream).unwrap();
        let want = [0.5, 0.0625].map(|slope| expected(slope, root, -2.0));
        for (row, want) in want.concat().iter().enumerate() {
            let got = got[row * DIM].to_f64();
            assert!(
                (got - want).abs() < 0.02,
                "{distance:?}, row {row}: {got}, not {want}"
            );
        }
    }
    harness::still_works(&stream);
}
