//! Checking a call that holds every rule allocates nothing.

#![allow(clippy::unwrap_used)]

mod allocations;

use allocations::allocations;
use ascend_spec::fia::{FiaCall, Version};
use ascend_spec::{Cann, DType, Soc, Target, TensorDesc};

#[test]
fn an_accepted_call_allocates_nothing() {
    let half = |shape: &[i64]| TensorDesc::contiguous(DType::Float16, shape).unwrap();
    let key = [half(&[256, 8, 4096, 128])];
    let lengths: Vec<i64> = (0..256).map(|b| b * 16).collect();
    let call = FiaCall {
        query: Some(half(&[256, 32, 1, 128])),
        key: &key,
        value: &key,
        num_heads: 32,
        num_key_value_heads: 8,
        actual_seq_lengths_kv: Some(&lengths),
        attention_out: Some(half(&[256, 32, 1, 128])),
        ..FiaCall::new("BNSD")
    };
    for cann in Cann::ALL {
        for (version, soc) in [(Version::V1, Soc::AtlasA2), (Version::V5, Soc::Ascend950)] {
            let before = allocations();
            let problem = call.check(version, Target::new(soc, cann)).unwrap();
            let linted = problem.lint(&[]);
            let kv: usize = (0..256).map(|b| problem.kv_len(b)).sum();
            assert_eq!(allocations(), before);
            assert!(linted.is_ok() && kv == 16 * 255 * 128);
        }
    }
}
